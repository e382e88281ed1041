#define HALFSTEP_ADVANCED
#include "trainer/files/store_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/args/args.h"
#include "common/args/recipes.h"
#include "common/text.h"
#include "io/json.h"

int store_file_is(const char *path)
{
    static const char magic[] = "halfstep states\n";
    char begin[sizeof magic - 1];
    FILE *file = fopen(path, "rb");
    const int is = file && fread(begin, sizeof begin, 1, file) == 1 && memcmp(begin, magic, sizeof begin) == 0;
    if (file) fclose(file);
    return is;
}

/* ---- What a file says -------------------------------------------------------------------------------------------- */

/* Makes room for one more item. Returns 0 without memory. */
static int grow(void *items, size_t n, size_t *capacity, size_t bytes)
{
    void **list = items;
    if (n < *capacity) return 1;
    const size_t more = *capacity ? 2 * *capacity : 64;
    void *grown = realloc(*list, more * bytes);
    if (!grown) return 0;
    *list = grown;
    *capacity = more;
    return 1;
}

static void read_pairs(hstep_json *json, struct store_pairs *pairs)
{
    struct store_pair pair;
    for (size_t n = 0; hstep_json_member(json, &n, &pair.key);) {
        if (!hstep_json_string(json, &pair.value)) return;
        if (grow(&pairs->pair, pairs->n, &pairs->capacity, sizeof pair)) pairs->pair[pairs->n++] = pair;
        else hstep_json_fail(json, "out of memory");
    }
}

/* Goes to the next item of a list, the first one if n is 0. Returns 0 behind the last, and after an error. */
static int next_item(hstep_json *json, size_t n)
{
    if (json->problem || (n == 0 && !hstep_json_expect(json, '['))) return 0;
    if (hstep_json_take(json, ']')) return 0;
    return n == 0 || hstep_json_expect(json, ',');
}

/* Reads a list of at most `most` numbers. Returns their count. */
static size_t read_numbers(hstep_json *json, uint64_t *numbers, size_t most)
{
    size_t n = 0;
    for (; next_item(json, n); n++)
        if (n == most) hstep_json_fail(json, "too many numbers");
        else hstep_json_number(json, &numbers[n]);
    return n;
}

static void read_slots(hstep_json *json, struct store_tensor *tensor)
{
    const char *key;
    for (; next_item(json, tensor->slots); tensor->slots++) {
        struct store_slot slot = {"", "", {0, 0}};
        for (size_t n = 0; hstep_json_member(json, &n, &key);) {
            if (strcmp(key, "slot") == 0) hstep_json_string(json, &slot.slot);
            else if (strcmp(key, "format") == 0) hstep_json_string(json, &slot.format);
            else if (strcmp(key, "bytes") == 0) read_numbers(json, slot.bytes, 2);
            else hstep_json_skip(json);
        }
        if (tensor->slots == COUNT_OF(tensor->slot)) hstep_json_fail(json, "too many slots");
        else tensor->slot[tensor->slots] = slot;
    }
}

static void read_tensor(hstep_json *json, struct store_tensor *tensor)
{
    const char *key;
    *tensor = (struct store_tensor){.name = "", .recipe = ""};
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (strcmp(key, "name") == 0) hstep_json_string(json, &tensor->name);
        else if (strcmp(key, "recipe") == 0) hstep_json_string(json, &tensor->recipe);
        else if (strcmp(key, "ndim") == 0) hstep_json_number(json, &tensor->ndim);
        else if (strcmp(key, "shape") == 0) read_numbers(json, tensor->shape, 2);
        else if (strcmp(key, "part") == 0) read_numbers(json, tensor->part, 4);
        else if (strcmp(key, "matrix_rows") == 0) read_numbers(json, &tensor->matrix_rows, 1);
        else if (strcmp(key, "split") == 0) tensor->splits = read_numbers(json, tensor->split, HALFSTEP_MAX_SPLIT);
        else if (strcmp(key, "slots") == 0) read_slots(json, tensor);
        else hstep_json_skip(json);
    }
}

static void read_header(hstep_json *json, struct store_about *about)
{
    const char *key;
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (strcmp(key, "tensors") != 0) {
            hstep_json_skip(json);
            continue;
        }
        for (; next_item(json, about->tensors); about->tensors++) {
            if (grow(&about->tensor, about->tensors, &about->capacity, sizeof *about->tensor))
                read_tensor(json, &about->tensor[about->tensors]);
            else hstep_json_fail(json, "out of memory");
        }
    }
}

static void read_commit(hstep_json *json, struct store_about *about)
{
    const char *key;
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (strcmp(key, "metadata") == 0) read_pairs(json, &about->metadata);
        else if (strcmp(key, "values") == 0) read_pairs(json, &about->values);
        else hstep_json_skip(json);
    }
}

int store_about_read(const char *path, struct store_about *about, char *error, size_t error_bytes)
{
    *about = (struct store_about){.info = {.struct_size = sizeof about->info}};
    if (halfstep_store_get_info(path, &about->info, error, error_bytes) != HALFSTEP_OK) return -1;
    hstep_json header = {about->info.header, strlen(about->info.header), 0, NULL};
    hstep_json commit = {about->info.commit, strlen(about->info.commit), 0, NULL};
    read_header(&header, about);
    read_commit(&commit, about);
    const char *problem = header.problem ? header.problem : commit.problem;
    if (!problem) return 0;
    snprintf(error, error_bytes, "%s: the %s: %s", path, header.problem ? "header" : "last record", problem);
    return -1;
}

void store_about_free(struct store_about *about)
{
    free(about->tensor);
    free(about->metadata.pair);
    free(about->values.pair);
    halfstep_store_free_info(&about->info);
    *about = (struct store_about){0};
}

const char *store_pairs_find(const struct store_pairs *pairs, const char *key)
{
    for (size_t i = 0; i < pairs->n; i++)
        if (strcmp(pairs->pair[i].key, key) == 0) return pairs->pair[i].value;
    return NULL;
}

char *store_file_text(const char *path, const char *key, char *error, size_t error_bytes)
{
    struct store_about about;
    char *copy = NULL;
    if (store_about_read(path, &about, error, error_bytes) == 0) {
        const char *text = store_pairs_find(&about.values, key);
        if (!text)
            snprintf(error, error_bytes, "%s has no %s: another program made it; choose another file", path, key);
        else if (!(copy = strdup(text))) no_memory(error, error_bytes);
    }
    store_about_free(&about);
    return copy;
}

/* ---- An optimizer ------------------------------------------------------------------------------------------------ */

/* Returns the metadata of one tensor: "recipe.NAME". */
static const char *of_tensor(const struct store_pairs *metadata, const char *what, const char *name)
{
    const size_t n = strlen(what);
    for (size_t i = 0; i < metadata->n; i++) {
        const char *key = metadata->pair[i].key;
        if (strncmp(key, what, n) == 0 && key[n] == '.' && strcmp(key + n + 1, name) == 0)
            return metadata->pair[i].value;
    }
    return NULL;
}

/* Sets what the metadata say about a group, or about all for HALFSTEP_ALL_GROUPS. Keys that are neither a
 * hyper-parameter nor a choice are others' business: counters, say. */
static int set_settings(const struct store_pairs *metadata, int32_t group, halfstep_optimizer *optimizer)
{
    char prefix[32] = "";
    if (group != HALFSTEP_ALL_GROUPS) snprintf(prefix, sizeof prefix, "group.%d.", group);
    const size_t n = strlen(prefix);
    for (size_t i = 0; i < metadata->n; i++) {
        const struct store_pair *pair = &metadata->pair[i];
        double now, value;
        if (strncmp(pair->key, prefix, n) != 0 || strchr(pair->key + n, '.')) continue;
        const char *name = pair->key + n;
        int code = HALFSTEP_OK;
        /* Some hyper-parameters have names for their numbers, which the metadata do not use. */
        if (parse_number(pair->value, &value) == 0 && halfstep_get_hyper(optimizer, group, name, &now) == HALFSTEP_OK)
            code = halfstep_set_hyper(optimizer, group, name, value);
        else if (halfstep_get_choice(optimizer, group, name))
            code = halfstep_set_choice(optimizer, group, name, pair->value);
        if (code != HALFSTEP_OK) return code;
    }
    return HALFSTEP_OK;
}

/* Adds the groups that the tensors are in. A group without tensors gets the recipe of the first one. */
static int add_groups(const struct store_pairs *metadata, const halfstep_tensor *tensors, size_t n,
                      halfstep_optimizer *optimizer)
{
    int32_t index;
    for (int32_t g = 0;; g++) {
        char key[32];
        snprintf(key, sizeof key, "group.%d.steps", g);
        if (!store_pairs_find(metadata, key)) return set_settings(metadata, HALFSTEP_ALL_GROUPS, optimizer);
        const char *recipe = n ? of_tensor(metadata, "recipe", tensors[0].name) : NULL;
        for (size_t i = n; i-- > 0;)
            if (tensors[i].group == g) recipe = of_tensor(metadata, "recipe", tensors[i].name);
        int code = recipe ? halfstep_add_group(optimizer, recipe, &index) : HALFSTEP_ERROR_FORMAT;
        if (code == HALFSTEP_OK) code = set_settings(metadata, g, optimizer);
        if (code != HALFSTEP_OK) return code;
    }
}

int store_make_optimizer(const struct store_pairs *metadata, const halfstep_tensor *tensors, size_t n, const char *from,
                         halfstep_optimizer **optimizer, char *error, size_t error_bytes)
{
    const char *seed = store_pairs_find(metadata, "seed");
    halfstep_options options = {.struct_size = sizeof options, .seed = seed ? strtoull(seed, NULL, 10) : 0};
    halfstep_tensor *copies = malloc((n + 1) * sizeof *copies);
    int code = copies ? halfstep_create(&options, optimizer) : HALFSTEP_ERROR_MEMORY;
    for (size_t i = 0; i < n && code == HALFSTEP_OK; i++) {
        const char *group = of_tensor(metadata, "group_of", tensors[i].name);
        copies[i] = tensors[i];
        copies[i].group = group ? (int32_t)strtol(group, NULL, 10) : 0;
    }
    if (code == HALFSTEP_OK) code = add_groups(metadata, copies, n, *optimizer);
    for (size_t i = 0; i < n && code == HALFSTEP_OK; i++) {
        int32_t index;
        code = halfstep_add_tensor(*optimizer, &copies[i], &index);
    }
    free(copies);
    if (code == HALFSTEP_OK) return 0;
    const char *detail = *optimizer ? halfstep_error_detail(*optimizer) : "";
    snprintf(error, error_bytes, "%s: %s", from, *detail ? detail : halfstep_strerror(code));
    return -1;
}

void store_free_weights(const halfstep_optimizer *optimizer, void **weights)
{
    for (int32_t i = 0; weights && i < halfstep_tensor_count(optimizer); i++) free(weights[i]);
    free(weights);
}

void **store_make_weights(const halfstep_optimizer *optimizer)
{
    const int32_t n = halfstep_tensor_count(optimizer);
    void **weights = calloc((size_t)n + 1, sizeof *weights);
    for (int32_t i = 0; weights && i < n; i++) {
        const uint64_t bytes = slot_info(optimizer, i, HALFSTEP_SLOT_WEIGHT).code_bytes;
        weights[i] = aligned_alloc(64, bytes ? (bytes + 63) / 64 * 64 : 64);
        if (weights[i]) continue;
        store_free_weights(optimizer, weights);
        return NULL;
    }
    return weights;
}

/* Describes a tensor as halfstep_add_tensor() takes it. Its gradients are never read. */
static halfstep_tensor as_added(const struct store_tensor *t)
{
    halfstep_tensor tensor = {.struct_size = sizeof tensor,
                              .name = t->name,
                              .ndim = (int32_t)t->ndim,
                              .rows = (int64_t)t->shape[0],
                              .row_length = (int64_t)t->shape[1],
                              .first_row = (int64_t)t->part[0],
                              .n_rows = (int64_t)t->part[1],
                              .first_column = (int64_t)t->part[2],
                              .n_columns = (int64_t)t->part[3],
                              .matrix_rows = (int64_t)t->matrix_rows,
                              .gradient = "f32"};
    for (size_t i = 0; i < t->splits; i++) tensor.split[i] = (int64_t)t->split[i];
    return tensor;
}

int store_file_open(const char *path, struct store_file *file, char *error, size_t error_bytes)
{
    *file = (struct store_file){0};
    if (store_about_read(path, &file->about, error, error_bytes) != 0) return -1;
    const size_t n = file->about.tensors;
    halfstep_tensor *tensors = malloc((n + 1) * sizeof *tensors);
    for (size_t i = 0; tensors && i < n; i++) tensors[i] = as_added(&file->about.tensor[i]);
    int bad = !tensors ||
              store_make_optimizer(&file->about.metadata, tensors, n, path, &file->optimizer, error, error_bytes) != 0;
    if (!tensors) no_memory(error, error_bytes);
    free(tensors);
    if (bad) return -1;
    if (!file->about.info.has_weights) {
        snprintf(error, error_bytes, "%s keeps no weights: only the program that has them can open it", path);
        return -1;
    }
    file->weights = store_make_weights(file->optimizer);
    if (!file->weights) return -no_memory(error, error_bytes);
    return halfstep_store_open(path, file->optimizer, file->weights, NULL, &file->store, error, error_bytes) ==
                   HALFSTEP_OK
               ? 0
               : -1;
}

int32_t store_file_find(const struct store_file *file, const struct lm_tensor *tensor, char *error, size_t error_bytes)
{
    for (size_t i = 0; i < file->about.tensors; i++) {
        const struct store_tensor *t = &file->about.tensor[i];
        if (strcmp(t->name, tensor->name) != 0) continue;
        if (t->shape[0] == (uint64_t)tensor->rows && t->shape[1] == (uint64_t)tensor->row_length) return (int32_t)i;
        snprintf(error, error_bytes, "%s has %llu x %llu elements in the file of states, and %lld x %lld in the model",
                 t->name, (unsigned long long)t->shape[0], (unsigned long long)t->shape[1], (long long)tensor->rows,
                 (long long)tensor->row_length);
        return -1;
    }
    snprintf(error, error_bytes, "the file of states has no tensor %s", tensor->name);
    return -1;
}

int store_file_check(const struct store_file *file, const struct lm_config *shape, char *error, size_t error_bytes)
{
    const int n = lm_tensor_count(shape);
    for (int i = 0; i < n; i++) {
        struct lm_tensor tensor;
        if (lm_tensor_info(shape, i, &tensor) != 0 || store_file_find(file, &tensor, error, error_bytes) < 0) return -1;
    }
    if (file->about.tensors == (size_t)n) return 0;
    snprintf(error, error_bytes, "the file of states has %zu tensors, and the model %d", file->about.tensors, n);
    return -1;
}

void store_file_close(struct store_file *file)
{
    halfstep_store_close(file->store);
    if (file->optimizer) store_free_weights(file->optimizer, file->weights);
    halfstep_destroy(file->optimizer);
    store_about_free(&file->about);
    *file = (struct store_file){0};
}
