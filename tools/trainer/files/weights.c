#define HALFSTEP_ADVANCED
#include "trainer/files/checkpoint.h"
#include "trainer/files/model_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct weight_source {
    struct model_files files;
    struct model_tensors model;
    halfstep_safetensors *states;
    char recipe[RECIPE_BYTES]; /* of the saved states; its weight format may have an extra plane in their file */
    int averages;
};

void weight_source_close(struct weight_source *source)
{
    if (!source) return;
    model_tensors_close(&source->model);
    halfstep_close_safetensors(source->states);
    model_files_close(&source->files);
    free(source);
}

static const char *states_path(const struct weight_source *source)
{
    return source->files.checkpoint ? halfstep_checkpoint_path(source->files.checkpoint, "optimizer.safetensors")
                                    : NULL;
}

static int open_weights(struct weight_source *source, const char *path, char *error, size_t error_bytes)
{
    if (model_files_find(path, 0, &source->files, error, error_bytes) != 0 ||
        model_tensors_open(source->files.model, &source->model, error, error_bytes) != 0)
        return -1;
    const char *states = states_path(source);
    if (!states) return 0;
    if (halfstep_open_safetensors(&source->states, states, error, error_bytes) != HALFSTEP_OK) return -1;
    /* Groups of several rules have no recipe in common. Their weights have one format, and no averages. */
    const char *recipe = halfstep_safetensors_metadata_find(source->states, "recipe");
    if (!recipe) recipe = halfstep_safetensors_metadata_find(source->states, "recipe.model.embed_tokens.weight");
    snprintf(source->recipe, sizeof source->recipe, "%s", recipe ? recipe : "");
    source->averages = rule_info(recipe_rule(source->recipe)).average;
    return 0;
}

struct weight_source *weight_source_open(const char *path, char *error, size_t error_bytes)
{
    struct weight_source *source = calloc(1, sizeof *source);
    if (!source) {
        no_memory(error, error_bytes);
        return NULL;
    }
    if (open_weights(source, path, error, error_bytes) == 0) return source;
    weight_source_close(source);
    return NULL;
}

const char *gradient_format_of(const char *dtype)
{
    const char *name;
    for (int32_t i = 0; (name = gradient_format_name(i)) != NULL; i++)
        if (dtype && strcmp(format_named(name).code_dtype, dtype) == 0) break;
    return name;
}

halfstep_tensor checkpoint_tensor(const struct lm_tensor *tensor, const char *gradient)
{
    return (halfstep_tensor){.struct_size = sizeof(halfstep_tensor),
                             .name = tensor->name,
                             .ndim = tensor->ndim,
                             .may_be_empty = 1,
                             .rows = tensor->rows,
                             .row_length = tensor->row_length,
                             .gradient = gradient};
}

int checkpoint_decoder(const char *recipe, const halfstep_tensor *tensor, halfstep_optimizer **optimizer)
{
    int32_t number;
    *optimizer = NULL;
    int code = halfstep_create(NULL, optimizer);
    if (code == HALFSTEP_OK) code = halfstep_add_group(*optimizer, recipe, &number);
    if (code == HALFSTEP_OK) code = halfstep_add_tensor(*optimizer, tensor, &number);
    return code == HALFSTEP_OK ? halfstep_allocate_states(*optimizer) : code;
}

/* Makes the recipe of a rule without states that has the weight format of another recipe. */
static void weights_only(char recipe[RECIPE_BYTES + 8], const char *other)
{
    struct recipe_parts parts;
    recipe_split(other, &parts);
    snprintf(recipe, RECIPE_BYTES + 8, "sgd/%s", parts.weight);
}

/* Counts elements whose codes or extra codes differ. */
static uint64_t count_codes(size_t n, const halfstep_slot_info *now, const char *codes, const halfstep_slot_info *then,
                            const char *first)
{
    const size_t code = now->code_bytes / n, extra = now->extra_bytes / n;
    const char *more = now->extra, *first_more = then->extra;
    uint64_t changed = 0;
    for (size_t i = 0; i < n; i++)
        changed += memcmp(codes + i * code, first + i * code, code) != 0 ||
                   (extra && memcmp(more + i * extra, first_more + i * extra, extra) != 0);
    return changed;
}

/* Counts elements of packed weights that decode to other numbers. A new scale alone may change all codes of a block.
 * The decoder's error codes are those of `first`, and afterwards those of `now`. */
static int count_values(halfstep_optimizer *decoder, const halfstep_tensor *tensor, const halfstep_slot_info *now,
                        const void *codes, const void *first, uint64_t *changed)
{
    const size_t n = (size_t)(tensor->rows * tensor->row_length);
    float *values = malloc(2 * n * sizeof *values);
    int bad =
        !values || halfstep_read_slot(decoder, 0, HALFSTEP_SLOT_WEIGHT, first, 0, tensor->rows, values) != HALFSTEP_OK;
    if (!bad && now->extra_bytes)
        memcpy(slot_info(decoder, 0, HALFSTEP_SLOT_WEIGHT).extra, now->extra, now->extra_bytes);
    bad =
        bad || halfstep_read_slot(decoder, 0, HALFSTEP_SLOT_WEIGHT, codes, 0, tensor->rows, values + n) != HALFSTEP_OK;
    for (size_t i = 0; i < n && !bad; i++) *changed += values[i] != values[n + i];
    free(values);
    return bad;
}

/* Makes the first weights of a tensor again: those of a source, or `values` without one. */
static int make_first(halfstep_optimizer *decoder, const halfstep_tensor *tensor, const struct first_weights *from,
                      void *first, char *error, size_t error_bytes)
{
    if (from->source) return weight_source_write(from->source, from->tensor, decoder, 0, first, error, error_bytes);
    return halfstep_write_slot(decoder, 0, HALFSTEP_SLOT_WEIGHT, first, 0, tensor->rows, from->values) != HALFSTEP_OK;
}

int checkpoint_count_changes(const char *recipe, const halfstep_tensor *tensor, const halfstep_slot_info *now,
                             const void *codes, const struct first_weights *from, uint64_t *changed, char *error,
                             size_t error_bytes)
{
    char fresh[RECIPE_BYTES + 8];
    halfstep_optimizer *optimizer;
    unsigned char *first = malloc(now->code_bytes ? now->code_bytes : 1);
    weights_only(fresh, recipe);
    int bad = checkpoint_decoder(fresh, tensor, &optimizer) != HALFSTEP_OK || !first ||
              make_first(optimizer, tensor, from, first, error, error_bytes) != 0;
    if (!bad && format_info(now->format).geometry == HALFSTEP_GEOMETRY_PACKED) {
        bad = count_values(optimizer, tensor, now, codes, first, changed);
    } else if (!bad) {
        const halfstep_slot_info then = slot_info(optimizer, 0, HALFSTEP_SLOT_WEIGHT);
        *changed += count_codes((size_t)(tensor->rows * tensor->row_length), now, codes, &then, (const char *)first);
    }
    halfstep_destroy(optimizer);
    free(first);
    return bad ? -1 : 0;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

/* A tensor of the source: its bytes, and a temporary optimizer that decodes them. Its gradient slot reads any plain
 * type; its weight slot reads packed codes, and codes and extra together. */
struct stored {
    const struct model_part *part;
    uint64_t index;
    halfstep_safetensor_info info;
    void *codes;
    halfstep_optimizer *decoder;
    int slot;
};

static void close_stored(struct stored *s)
{
    free(s->codes);
    halfstep_destroy(s->decoder);
}

/* Reads the extra plane into the decoder. */
static int read_extra(const struct weight_source *source, const struct lm_tensor *tensor, const char *name,
                      const struct stored *s, char *error, size_t error_bytes)
{
    const char *states = states_path(source);
    const halfstep_slot_info slot = slot_info(s->decoder, 0, HALFSTEP_SLOT_WEIGHT);
    const halfstep_format_info format = format_info(slot.format);
    const int packed = format.geometry == HALFSTEP_GEOMETRY_PACKED;
    halfstep_safetensor_info found = {.struct_size = sizeof found};
    uint64_t place;
    if (halfstep_safetensor_find(source->states, name, &place) != HALFSTEP_OK ||
        halfstep_get_safetensor_info(source->states, place, &found) != HALFSTEP_OK ||
        model_tensor_fits(states, name, &found, tensor, packed ? slot.extra_bytes / (uint64_t)tensor->rows : 0, error,
                          error_bytes) != 0)
        return -1;
    if (!format.extra_dtype || strcmp(found.dtype, format.extra_dtype) != 0) {
        snprintf(error, error_bytes, "%s: %s has dtype %s, which is not that of %s weights", states, name, found.dtype,
                 format.name);
        return -1;
    }
    return halfstep_read_safetensor(source->states, place, 0, slot.extra, slot.extra_bytes, error, error_bytes) ==
                   HALFSTEP_OK
               ? 0
               : -1;
}

/* Makes the decoder of a tensor. */
static int open_decoder(const struct weight_source *source, const struct lm_tensor *tensor, struct stored *s,
                        char *error, size_t error_bytes)
{
    char recipe[RECIPE_BYTES + 8], extra[192];
    uint64_t unused;
    const int dtype = model_tensor_dtype(s->part->path, &s->info, tensor, error, error_bytes);
    const int packed = dtype == LM_PACKED;
    if (dtype < 0) return -1;
    snprintf(extra, sizeof extra, "%s/weight.extra", tensor->name);
    const int with_extra = source->states && halfstep_safetensor_find(source->states, extra, &unused) == HALFSTEP_OK;
    s->slot = with_extra || packed ? HALFSTEP_SLOT_WEIGHT : HALFSTEP_SLOT_GRADIENT;
    weights_only(recipe, with_extra ? source->recipe : packed ? "sgd/int8-sr" : "sgd/f32");
    const halfstep_tensor t = checkpoint_tensor(tensor, packed ? "f32" : gradient_format_of(s->info.dtype));
    int code = checkpoint_decoder(recipe, &t, &s->decoder);
    if (code != HALFSTEP_OK) {
        snprintf(error, error_bytes, "%s: %s: %s", s->part->path, tensor->name, halfstep_strerror(code));
        return -1;
    }
    const halfstep_format_info format = format_info(slot_info(s->decoder, 0, HALFSTEP_SLOT_WEIGHT).format);
    if (s->slot == HALFSTEP_SLOT_WEIGHT && strcmp(s->info.dtype, format.code_dtype) != 0) {
        snprintf(error, error_bytes, "%s: %s has dtype %s, which is not that of %s weights", s->part->path,
                 tensor->name, s->info.dtype, format.name);
        return -1;
    }
    return with_extra ? read_extra(source, tensor, extra, s, error, error_bytes) : 0;
}

/* Reads one tensor. Call close_stored() afterwards, also on failure. */
static int open_stored(const struct weight_source *source, const struct lm_tensor *tensor, struct stored *s,
                       char *error, size_t error_bytes)
{
    *s = (struct stored){0};
    if (model_tensors_find(&source->model, tensor, &s->part, &s->index, &s->info, error, error_bytes) != 0) return -1;
    s->codes = malloc(s->info.bytes ? s->info.bytes : 1);
    if (!s->codes) return -no_memory(error, error_bytes);
    if (source->averages) return 0; /* read_average() reads the codes again, with the states */
    if (halfstep_read_safetensor(s->part->file, s->index, 0, s->codes, s->info.bytes, error, error_bytes) !=
        HALFSTEP_OK)
        return -1;
    return open_decoder(source, tensor, s, error, error_bytes);
}

/* Reads the average of one tensor's weights. Loads the weight and its states into a temporary optimizer of the
 * checkpoint's recipe, which computes the average. */
static int read_average(struct weight_source *source, const struct lm_tensor *tensor, void *codes, float *out,
                        char *error, size_t error_bytes)
{
    halfstep_file_options options = {.struct_size = sizeof options, .subset = 1};
    halfstep_optimizer *optimizer;
    const halfstep_tensor t = checkpoint_tensor(tensor, "f32");
    error[0] = 0;
    int bad = checkpoint_decoder(source->recipe, &t, &optimizer) != HALFSTEP_OK ||
              halfstep_load_optimizer(source->files.checkpoint, optimizer, &codes, &options, error, error_bytes) !=
                  HALFSTEP_OK ||
              halfstep_read_average(optimizer, 0, codes, 0, tensor->rows, out) != HALFSTEP_OK;
    if (bad && !error[0]) {
        const char *detail = optimizer ? halfstep_error_detail(optimizer) : "";
        snprintf(error, error_bytes, "%s: %s: %s", source->files.model, tensor->name,
                 detail[0] ? detail : "does not fit its recipe");
    }
    halfstep_destroy(optimizer);
    return bad ? -1 : 0;
}

static int read_values(struct weight_source *source, const struct lm_tensor *tensor, const struct stored *s, float *out,
                       char *error, size_t error_bytes)
{
    if (source->averages) return read_average(source, tensor, s->codes, out, error, error_bytes);
    int code = halfstep_read_slot(s->decoder, 0, s->slot, s->codes, 0, tensor->rows, out);
    if (code != HALFSTEP_OK)
        snprintf(error, error_bytes, "%s: %s: %s", s->part->path, tensor->name, halfstep_strerror(code));
    return code == HALFSTEP_OK ? 0 : -1;
}

int weight_source_read(struct weight_source *source, const struct lm_tensor *tensor, float *out, char *error,
                       size_t error_bytes)
{
    struct stored s;
    int bad = open_stored(source, tensor, &s, error, error_bytes) != 0 ||
              read_values(source, tensor, &s, out, error, error_bytes) != 0;
    close_stored(&s);
    return bad ? -1 : 0;
}

/* Copies rows of packed weights, because a conversion would round again. Their error codes stay what they begin with if
 * the source has none. */
static void copy_packed(const struct lm_tensor *tensor, const struct stored *s, const halfstep_tensor *held,
                        const halfstep_slot_info *into, void *codes)
{
    const halfstep_slot_info from = slot_info(s->decoder, 0, HALFSTEP_SLOT_WEIGHT);
    const uint64_t rows = (uint64_t)tensor->rows, first = (uint64_t)held->first_row;
    memcpy(codes, (const char *)s->codes + from.code_bytes / rows * first, into->code_bytes);
    if (into->extra_bytes && from.extra_bytes)
        memcpy(into->extra, (const char *)from.extra + from.extra_bytes / rows * first, into->extra_bytes);
}

int weight_source_write(struct weight_source *source, const struct lm_tensor *tensor, halfstep_optimizer *optimizer,
                        int32_t index, void *codes, char *error, size_t error_bytes)
{
    struct stored s;
    halfstep_tensor held = {.struct_size = sizeof held};
    const halfstep_slot_info into = slot_info(optimizer, index, HALFSTEP_SLOT_WEIGHT);
    int bad = open_stored(source, tensor, &s, error, error_bytes) != 0;
    if (!bad) bad = halfstep_get_tensor(optimizer, index, &held) != HALFSTEP_OK;
    const int packed = !bad && s.decoder && lm_dtype_named(s.info.dtype) == LM_PACKED &&
                       format_info(into.format).geometry == HALFSTEP_GEOMETRY_PACKED;
    if (packed) copy_packed(tensor, &s, &held, &into, codes);
    float *values = bad || packed ? NULL : malloc((size_t)(tensor->rows * tensor->row_length) * sizeof *values);
    if (!bad && !packed && !values) bad = no_memory(error, error_bytes);
    if (values) bad = read_values(source, tensor, &s, values, error, error_bytes) != 0;
    if (values && !bad &&
        halfstep_write_slot(optimizer, index, HALFSTEP_SLOT_WEIGHT, codes, 0, held.n_rows,
                            values + held.first_row * held.row_length) != HALFSTEP_OK) {
        snprintf(error, error_bytes, "%s: %s: %s", source->model.path, tensor->name, halfstep_error_detail(optimizer));
        bad = 1;
    }
    free(values);
    close_stored(&s);
    return bad ? -1 : 0;
}

int checkpoint_init(const char *path, const struct holding *holding, char *error, size_t error_bytes)
{
    struct weight_source *source = weight_source_open(path, error, error_bytes);
    if (!source) return -1;
    int bad = model_tensors_check(&source->model, holding->shape, error, error_bytes) != 0;
    for (int32_t i = 0; i < holding->tensors && !bad; i++) {
        struct lm_tensor tensor;
        bad = lm_tensor_info(holding->shape, i, &tensor) != 0 ||
              weight_source_write(source, &tensor, holding->optimizer, i, holding->weights[i], error, error_bytes) != 0;
    }
    weight_source_close(source);
    return bad ? -1 : 0;
}
