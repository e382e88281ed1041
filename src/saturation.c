/* How many weights are at the end of their format's range. */
#include <string.h>

#include "optimizer.h"

int halfstep_saturated(const halfstep_optimizer *o, int32_t tensor, const void *data, uint64_t *count)
{
    if (!o || !count) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_format *f = &hstep_formats[t->slot[HALFSTEP_SLOT_WEIGHT].format];
    int64_t n = t->n_rows * t->n_columns;
    if (n && !data) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL weights", t->name);
    *count = 0;
    if (f->code_bits != 16) return HALFSTEP_OK;
    const uint16_t largest = !strcmp(f->code_dtype, "F16") ? 0x7bff : 0x7f7f, *code = data;
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (code[i] & 0x7fff) == largest;
    *count = sum;
    return HALFSTEP_OK;
}
