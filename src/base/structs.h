/* Reads and fills structures of callers, and reads their names, for both libraries. Such a structure begins with its
 * struct_size. It may be of another version than ours. */
#ifndef HSTEP_STRUCTS_H
#define HSTEP_STRUCTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns the size of a structure, or 0 if no version can have that size. Structures are small and consist of whole
 * words. None is as small as a pointer, whose size a caller may have given by mistake. */
static inline uint32_t hstep_struct_size(const void *structure)
{
    uint32_t size;
    memcpy(&size, structure, sizeof size);
    return size % sizeof size || size <= sizeof(uint64_t) || size > 4096 ? 0 : size;
}

/* Copies the caller's structure to `ours`, which must be zeroed. Returns 0 if the caller sets a field that is unknown
 * here, or if the size is invalid; else 1. */
static inline int hstep_take_struct(void *ours, size_t size, const void *theirs)
{
    uint32_t given = hstep_struct_size(theirs);
    for (size_t i = size; i < given; i++)
        if (((const char *)theirs)[i]) return 0;
    memcpy(ours, theirs, given < size ? given : size);
    return given != 0;
}

/* Copies ours to the caller's structure, as far as that has room, and zeroes its bytes beyond ours. Returns 0 if the
 * caller's size is invalid, else 1. */
static inline int hstep_give_struct(void *theirs, const void *ours, size_t size)
{
    uint32_t bytes = hstep_struct_size(theirs), head = sizeof bytes;
    if (!bytes) return 0;
    memset((char *)theirs + head, 0, bytes - head);
    memcpy((char *)theirs + head, (const char *)ours + head, (bytes < size ? bytes : size) - head);
    return 1;
}

/* Returns the length of the UTF-8 character at text, which has n bytes, and writes its number to *number. Returns 0 if
 * no well-formed character begins there: in its shortest form, no surrogate, nothing above U+10FFFF. */
static inline size_t hstep_utf8(const char *text, size_t n, uint32_t *number)
{
    const unsigned char *s = (const unsigned char *)text;
    if (!n) return 0;
    *number = s[0];
    if (s[0] < 0x80) return 1;
    size_t length = s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : (s[0] & 0xf0) == 0xe0 ? 3 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : 0;
    if (!length || length > n) return 0;
    unsigned char low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    unsigned char high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    if (s[1] < low || s[1] > high) return 0;
    *number = s[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        *number = *number << 6 | (s[i] & 0x3f);
    }
    return length;
}

static inline int hstep_is_utf8(const char *text)
{
    size_t left = strlen(text), length;
    uint32_t number;
    for (; left; text += length, left -= length)
        if (!(length = hstep_utf8(text, left, &number))) return 0;
    return 1;
}

/* The key of safetensors files that no tensor can have for its name. */
#define HSTEP_METADATA "__metadata__"

#endif
