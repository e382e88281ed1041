/* Accumulation of gradients outside a step. */
#include <stdlib.h>
#include <string.h>

#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/plan.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* Runs an accumulation. If the handle is not settled, cuts the tensor into chunks for this call only, because an
 * accumulation must not settle the handle. */
static int run_accumulation(const halfstep_optimizer *o, int tensor, struct hstep_accumulation *a)
{
    struct hstep_tensor t = hstep_laid_out(o, tensor);
    struct hstep_chunk *chunks = NULL;
    a->tensor = &t;
    a->chunks = o->chunks + t.first_chunk;
    if (!o->settled) {
        t.chunks = hstep_cut_tensor(&t, 0, NULL);
        chunks = malloc((size_t)(t.chunks + 1) * sizeof *chunks);
        if (!chunks)
            return hstep_fail_memory(o, (uint64_t)(t.chunks + 1) * sizeof *chunks, "the plan of tensor '%s'",
                                     o->labels[tensor].name);
        hstep_cut_tensor(&t, 0, chunks);
        a->chunks = chunks;
    }
    int error = o->device->accumulate(a);
    error = o->device->asynchronous ? hstep_why(o, error) : hstep_wait(o, error);
    free(chunks);
    return error;
}

/* Returns 1 if gradients can be added up in a format. A stochastic half would saturate and so hide an overflow from the
 * scan of the step. */
static int accumulates(const struct hstep_format *f)
{
    return !f->block && !f->extra_bits && !(f->stochastic && !strcmp(f->code_dtype, "F16"));
}

static int accumulate(halfstep_optimizer *o, int32_t tensor, void *accumulator, const char *format,
                      const void *gradient, const char *gradient_format, double scale)
{
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    struct hstep_accumulation a = {.context = &o->context,
                                   .generator = o->generator,
                                   .accumulator = accumulator,
                                   .gradient = gradient,
                                   .scale = (float)scale};
    a.format = halfstep_format_find(format);
    a.gradient_format = halfstep_format_find(gradient_format);
    if (a.format < 0 || a.gradient_format < 0)
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "unknown format '%s'; 'halfstep info' lists the formats",
                          a.format < 0 ? format : gradient_format);
    char able[HSTEP_DETAIL_BYTES] = "";
    if (!accumulates(&hstep_formats[a.format])) {
        for (int i = 0; i < HSTEP_FORMATS; i++)
            if (accumulates(&hstep_formats[i])) hstep_add_name(able, hstep_formats[i].name);
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "'%s' cannot accumulate gradients; these can: %s", format,
                          able);
    }
    if (!(hstep_formats[a.gradient_format].roles & HALFSTEP_ROLE_GRADIENT)) {
        hstep_list_formats(able, HALFSTEP_ROLE_GRADIENT);
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "'%s' cannot store gradients; these can: %s", gradient_format,
                          able);
    }
    if (!(scale >= -1e30 && scale <= 1e30))
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "scale = %g is not in [-1e30, 1e30]", scale);
    if (t->n_rows && t->n_columns && (!accumulator || !gradient))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL accumulator or gradient",
                          o->labels[tensor].name);
    int stochastic = hstep_formats[a.format].stochastic, elements = t->n_rows && t->n_columns;
    if (stochastic) error = hstep_fetch(o);
    if (!error && elements) error = hstep_check_owned(o, accumulator);
    if (!error && elements) error = hstep_check_owned(o, gradient);
    if (error) return hstep_why(o, error);
    /* An update counts in both counters, an accumulation only in writes. Their difference numbers the accumulations. */
    int generator = hstep_generator_id(o->generator);
    a.strand = hstep_key_write(generator, o->seed, t->id,
                               generator == HSTEP_GENERATOR_LATTICE ? t->writes - t->state_steps : t->writes,
                               HALFSTEP_SLOT_GRADIENT);
    if ((error = run_accumulation(o, tensor, &a))) return error;
    if (!stochastic) return HALFSTEP_OK;
    t->writes++;
    hstep_changed(o, tensor, 1);
    hstep_show(o, tensor, 1);
    return HALFSTEP_OK;
}

int halfstep_accumulate(halfstep_optimizer *o, int32_t tensor, void *accumulator, const char *format,
                        const void *gradient, const char *gradient_format, double scale)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, format);
    HSTEP_NEED(o, gradient_format);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, accumulate(o, tensor, accumulator, format, gradient, gradient_format, scale));
}
