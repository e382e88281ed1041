#include "base/process/detail.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/structs.h"

struct hstep_detail *hstep_own_detail(void)
{
    static _Thread_local struct hstep_detail own;
    return &own;
}

int hstep_fail_alone(int code, const char *format, ...)
{
    struct hstep_detail *own = hstep_own_detail();
    char text[HSTEP_DETAIL_BYTES]; /* an argument may be the text of before */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    own->serial = 0;
    memcpy(own->text, text, sizeof text);
    return code;
}

void hstep_describe_struct(char text[HSTEP_DETAIL_BYTES], const char *function, const void *structure)
{
    uint32_t size;
    memcpy(&size, structure, sizeof size);
    snprintf(
        text, HSTEP_DETAIL_BYTES,
        hstep_struct_size(structure)
            ? "%s: a field beyond the %u bytes of struct_size that this library knows is set; link with the library "
              "of the header"
            : "%s: wrong struct_size %u; begin with x = {.struct_size = sizeof x}",
        function, (unsigned)size);
}
