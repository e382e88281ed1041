/* Which tensors of a safetensors file are packed weights: the value of the metadata HALFSTEP_PACKED_KEY. */
#ifndef HALFSTEP_PACKED_LIST_H
#define HALFSTEP_PACKED_LIST_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep_io.h"

#include "common/text.h"

struct packed_weight {
    const char *name, *format;
    int64_t columns; /* without padding */
};

struct packed_list {
    struct packed_weight *item; /* sorted by name */
    size_t n;
    char *text; /* holds the strings */
};

/* Reads the list of a file. It is empty if the file has none. Fails unless each item is a tensor of the file with the
 * dtype and shape of its format. Returns 0, -1 if the list is wrong, or 1 without memory, with an error text. Call
 * packed_list_free() afterwards, also on failure. */
int packed_list_read(const halfstep_safetensors *file, const char *path, struct packed_list *list, char *error,
                     size_t error_bytes);
void packed_list_free(struct packed_list *list);
/* Returns the item of a tensor, or NULL. */
const struct packed_weight *packed_list_find(const struct packed_list *list, const char *name);
/* Appends an item to the text of a list, which is complete after packed_list_end(). */
void packed_list_add(hstep_buffer *text, const char *name, const char *format, int64_t columns);
void packed_list_end(hstep_buffer *text);

/* Returns the names of formats of packed weights by position, NULL past the last. */
const char *packed_format_name(int32_t position);

#endif
