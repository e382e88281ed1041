/* Error reporting and the argument checks shared by all public functions. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "handle/checks.h"

const char *halfstep_strerror(int code)
{
    switch (code) {
    case HALFSTEP_OK: return "ok";
    case HALFSTEP_ERROR_ARGUMENT: return "invalid argument";
    case HALFSTEP_ERROR_NAME: return "unknown name";
    case HALFSTEP_ERROR_RANGE: return "value out of range";
    case HALFSTEP_ERROR_SHAPE: return "invalid shape";
    case HALFSTEP_ERROR_DUPLICATE: return "duplicate name or id";
    case HALFSTEP_ERROR_ORDER: return "call out of order";
    case HALFSTEP_ERROR_UNSUPPORTED: return "unsupported combination";
    case HALFSTEP_ERROR_MEMORY: return "out of memory";
    case HALFSTEP_ERROR_DEVICE: return "device or driver failed";
    case HALFSTEP_ERROR_FORMAT: return "malformed file";
    case HALFSTEP_ERROR_MISMATCH: return "file belongs to another configuration";
    case HALFSTEP_ERROR_IO: return "input or output failed";
    case HALFSTEP_NONFINITE: return "step refused: gradient not finite or too large";
    default: return "unknown error";
    }
}

/* Copies the error text to or from the handle, where threads find it that did not fail themselves. A const handle does
 * not promise to keep its error text. */
static void copy_detail(const halfstep_optimizer *const_o, char *text, int to_text)
{
    halfstep_optimizer *o = (halfstep_optimizer *)const_o;
    hstep_lock(&o->detail_lock);
    memcpy(to_text ? text : o->detail, to_text ? o->detail : text, HSTEP_DETAIL_BYTES);
    hstep_unlock(&o->detail_lock);
}

int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...)
{
    char text[HSTEP_DETAIL_BYTES] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    hstep_fail_alone(code, "%s", text);
    if (!o) return code;
    hstep_own_detail()->serial = o->serial;
    copy_detail(o, text, 0);
    return code;
}

int hstep_fail_struct(const halfstep_optimizer *o, const char *function, const void *structure)
{
    char text[HSTEP_DETAIL_BYTES];
    hstep_describe_struct(text, function, structure);
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "%s", text);
}

int hstep_fail_memory(const halfstep_optimizer *o, uint64_t bytes, const char *what, ...)
{
    char text[HSTEP_DETAIL_BYTES];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(text, sizeof text, what, arguments);
    va_end(arguments);
    return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "out of memory: %s needs %llu bytes; free some and call again", text,
                      (unsigned long long)bytes);
}

void hstep_add_name(char names[HSTEP_DETAIL_BYTES], const char *name)
{
    size_t used = strlen(names);
    snprintf(names + used, HSTEP_DETAIL_BYTES - used, "%s%s", used ? ", " : "", name);
}

void hstep_list_formats(char names[HSTEP_DETAIL_BYTES], int roles)
{
    names[0] = 0;
    for (int i = 0; i < HSTEP_FORMATS; i++)
        if (hstep_formats[i].roles & roles) hstep_add_name(names, hstep_formats[i].name);
}

const char *halfstep_error_detail(const halfstep_optimizer *o)
{
    static _Thread_local char shown[HSTEP_DETAIL_BYTES];
    const struct hstep_detail *own = hstep_own_detail();
    if (!o) return own->serial ? "" : own->text;
    if (own->serial == o->serial) return own->text;
    copy_detail(o, shown, 1);
    return shown;
}

int hstep_fail_gradient(const halfstep_optimizer *o, int tensor, int too_large)
{
    if (tensor < 0) return hstep_fail(o, HALFSTEP_NONFINITE, "the norm of the gradients is not finite");
    return hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is %s", o->labels[tensor].name,
                      too_large
                          ? "finite, but too large: an element times gradient_scale is 2^62 (4.6e18) or more, and "
                            "its square would leave fp32"
                          : "not finite");
}

int hstep_check_group(const halfstep_optimizer *o, int32_t group)
{
    if (group >= 0 && group < o->n_groups) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "there is no group %d; this optimizer has %d, numbered from 0",
                      (int)group, o->n_groups);
}

int hstep_check_tensor(const halfstep_optimizer *o, int32_t tensor)
{
    if (tensor >= 0 && tensor < o->n_tensors) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "there is no tensor %d; this optimizer has %d, numbered from 0",
                      (int)tensor, o->n_tensors);
}

int hstep_why(const halfstep_optimizer *o, int error)
{
    const char *why = error && o->device->why ? o->device->why() : NULL;
    return why ? hstep_fail(o, error, "%s", why) : error;
}

int hstep_check_owned(const halfstep_optimizer *o, const void *memory)
{
    int error = HALFSTEP_OK;
    if (o->device->owns) o->device->owns(&o->context, &memory, 1, &error);
    return error;
}

int hstep_wait(const halfstep_optimizer *o, int error)
{
    if (error) hstep_why(o, error);
    int waited = o->device->wait(&o->context);
    return error ? error : hstep_why(o, waited);
}

int hstep_grow(void **array, int count, int *capacity, size_t size)
{
    if (count < *capacity) return HALFSTEP_OK;
    int wanted = *capacity ? *capacity * 2 : 8;
    if (wanted <= count) return HALFSTEP_ERROR_MEMORY;
    void *larger = realloc(*array, (size_t)wanted * size);
    if (!larger) return HALFSTEP_ERROR_MEMORY;
    *array = larger;
    *capacity = wanted;
    return HALFSTEP_OK;
}
