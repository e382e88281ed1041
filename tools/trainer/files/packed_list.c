#define HALFSTEP_ADVANCED
#include "trainer/files/packed_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"

#include "common/args/recipes.h"
#include "io/json.h"
#include "trainer/products/rows.h"
#include "trainer/models/llama.h"

const char *packed_format_name(int32_t position)
{
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        const halfstep_format_info info = format_info(row);
        if (info.geometry == HALFSTEP_GEOMETRY_PACKED && position-- == 0) return info.name;
    }
    return NULL;
}

static int is_packed_format(const char *name)
{
    const char *known;
    for (int32_t i = 0; (known = packed_format_name(i)) != NULL; i++)
        if (strcmp(known, name) == 0) return 1;
    return 0;
}

static int compare_items(const void *a, const void *b)
{
    return strcmp(((const struct packed_weight *)a)->name, ((const struct packed_weight *)b)->name);
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

static int read_item(hstep_json *json, struct packed_weight *item)
{
    const char *key;
    uint64_t columns = 0;
    item->format = "";
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (strcmp(key, "format") == 0) hstep_json_string(json, &item->format);
        else if (strcmp(key, "columns") == 0) hstep_json_number(json, &columns);
        else hstep_json_skip(json);
    }
    item->columns = columns <= INT32_MAX ? (int64_t)columns : 0;
    return !json->problem;
}

static int read_items(hstep_json *json, struct packed_list *list, size_t most)
{
    const char *name;
    for (size_t n = 0; hstep_json_member(json, &n, &name);) {
        if (list->n == most) return hstep_json_fail(json, "more names than the file has tensors");
        struct packed_weight *item = &list->item[list->n++];
        item->name = name;
        if (!read_item(json, item)) return 0;
    }
    return hstep_json_end(json);
}

/* Fails unless an item describes a tensor of the file. */
static int check_item(const halfstep_safetensors *file, const char *path, const struct packed_weight *item, char *error,
                      size_t error_bytes)
{
    uint64_t index;
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    if (!is_packed_format(item->format))
        snprintf(error, error_bytes, "%s: " HALFSTEP_PACKED_KEY ": %s: unknown format '%s' of packed weights", path,
                 item->name, item->format);
    else if (halfstep_safetensor_find(file, item->name, &index) || halfstep_get_safetensor_info(file, index, &info))
        snprintf(error, error_bytes, "%s: " HALFSTEP_PACKED_KEY " names %s, which the file does not hold", path,
                 item->name);
    else if (strcmp(info.dtype, "U8") || info.ndim != 2 || item->columns < ROW_BLOCK ||
             info.shape[1] != lm_row_bytes(LM_PACKED, item->columns))
        snprintf(error, error_bytes,
                 "%s: " HALFSTEP_PACKED_KEY " says that %s has %lld columns in %s, but its dtype or shape is another",
                 path, item->name, (long long)item->columns, item->format);
    else return 0;
    return -1;
}

int packed_list_read(const halfstep_safetensors *file, const char *path, struct packed_list *list, char *error,
                     size_t error_bytes)
{
    const char *value = halfstep_safetensors_metadata_find(file, HALFSTEP_PACKED_KEY);
    const size_t most = (size_t)halfstep_safetensor_count(file);
    *list = (struct packed_list){NULL, 0, NULL};
    if (!value) return 0;
    list->text = strdup(value);
    list->item = malloc((most + 1) * sizeof *list->item);
    if (!list->text || !list->item) return no_memory(error, error_bytes);
    hstep_json json = {list->text, strlen(list->text), 0, NULL};
    if (!read_items(&json, list, most)) {
        snprintf(error, error_bytes, "%s: " HALFSTEP_PACKED_KEY ": byte %zu: %s", path, json.at, json.problem);
        return -1;
    }
    qsort(list->item, list->n, sizeof *list->item, compare_items);
    for (size_t i = 0; i < list->n; i++)
        if (check_item(file, path, &list->item[i], error, error_bytes) != 0) return -1;
    return 0;
}

void packed_list_free(struct packed_list *list)
{
    free(list->item);
    free(list->text);
    *list = (struct packed_list){NULL, 0, NULL};
}

const struct packed_weight *packed_list_find(const struct packed_list *list, const char *name)
{
    const struct packed_weight wanted = {.name = name};
    return list->n ? bsearch(&wanted, list->item, list->n, sizeof wanted, compare_items) : NULL;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------- */

void packed_list_add(hstep_buffer *text, const char *name, const char *format, int64_t columns)
{
    hstep_append_format(text, text->bytes ? ", " : "{");
    hstep_append_json(text, name);
    hstep_append_format(text, ": {\"format\": \"%s\", \"columns\": %lld}", format, (long long)columns);
}

void packed_list_end(hstep_buffer *text) { hstep_append_format(text, text->bytes ? "}" : "{}"); }
