/* Tensors of a handle. Shapes and formats are checked here, so that a step has nothing left to refuse but gradients. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/grid.h"
#include "base/structs.h"
#include "decide/prepare.h"
#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/tensors.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

static void size_slot(const struct hstep_tensor *t, struct hstep_slot *slot)
{
    if (slot->format < 0) return;
    int64_t rows = t->n_rows, columns = t->n_columns;
    hstep_extend(t, slot->extent, &rows, &columns);
    slot->code_bytes = hstep_code_bytes(slot->format, rows, columns);
    slot->extra_bytes = hstep_extra_bytes(slot->format, rows, columns);
}

/* Fails if the part held here cannot be cut into the blocks of a format. */
static int check_blocks(const halfstep_optimizer *o, const char *name, const struct hstep_tensor *t, int format)
{
    const struct hstep_format *f = &hstep_formats[format];
    int64_t end = t->first_column + t->n_columns, block = f->block;
    if (hstep_is_by_row(format) && (t->first_column % block || (end % block && end != t->row_length)))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': columns %lld + %lld (first + number) do not fall on blocks of %d ('%s')", name,
                          (long long)t->first_column, (long long)t->n_columns, f->block, f->name);
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT &&
        (t->n_columns != t->row_length || t->first_row * t->row_length % block || t->n_rows * t->row_length % block))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': rows %lld + %lld (first + number) of %lld do not fall on blocks of %d "
                          "flattened elements ('%s' states)",
                          name, (long long)t->first_row, (long long)t->n_rows, (long long)t->row_length, f->block,
                          f->name);
    return HALFSTEP_OK;
}

/* Returns the format of a state: its precise format if `format` is a block format and the group's hyper-parameters ask
 * for it, otherwise `format`. */
static int precise_format(const struct hstep_group *g, int state, int format)
{
    const struct hstep_state *s = &hstep_rules[g->recipe.rule].state[state];
    if (!s->precise_while || !hstep_formats[format].block) return format;
    return g->own[hstep_find_hyper(g->recipe.rule, s->precise_while) - HSTEP_COMMON_HYPERS] != 0.0 ? s->precise
                                                                                                   : format;
}

int hstep_choose_states(const halfstep_optimizer *o, const struct hstep_group *g, const char *name,
                        struct hstep_tensor *t)
{
    int flat = 0, longest = 0, error;
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_STATE + i];
        *slot = (struct hstep_slot){.format = HSTEP_FORMAT_NONE, .grid = 1.0f};
        if (i >= hstep_rule_states(g->recipe.rule) || !hstep_state_needed(g, i) ||
            !hstep_state_of_shape(g->recipe.rule, i, t->ndim, t->pattern_rows, t->row_length))
            continue;
        int format = hstep_eligible_format(g->recipe.state[i], g->recipe.weight, t->ndim, t->rows, t->row_length,
                                           hstep_common_rows(t));
        slot->fell_back = format != g->recipe.state[i];
        slot->format = precise_format(g, i, format);
        slot->precise = slot->format != format;
        slot->extent = hstep_rules[g->recipe.rule].state[i].extent;
        slot->nonneg = hstep_rules[g->recipe.rule].state[i].role == HALFSTEP_ROLE_NONNEG;
        slot->root = slot->nonneg ? hstep_formats[slot->format].root : 0;
        size_slot(t, slot);
        const struct hstep_format *f = &hstep_formats[slot->format];
        if (!f->block || f->geometry == HALFSTEP_GEOMETRY_TENSOR) continue;
        if ((error = check_blocks(o, name, t, slot->format))) return error;
        flat |= f->geometry == HALFSTEP_GEOMETRY_FLAT ? 1 : 2;
        if (f->block > longest) longest = f->block;
    }
    if (flat == 3 && t->row_length % longest)
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s': states in blocks of rows and of the flattened tensor need rows of whole blocks",
                          name);
    return HALFSTEP_OK;
}

/* The limit of rows x row_length. It keeps index space, bytes of any format and their sums within int64. */
#define MAX_ELEMENTS ((int64_t)1 << 52)

static int fail_split(const halfstep_optimizer *o, const halfstep_tensor *d)
{
    char list[HALFSTEP_MAX_SPLIT * 22] = "";
    size_t used = 0;
    for (int i = 0; i < HALFSTEP_MAX_SPLIT && d->split[i]; i++)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%lld", i ? " + " : "", (long long)d->split[i]);
    return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                      "tensor '%s': split is %s; its blocks must have at least 2 rows each, and %lld rows together",
                      d->name, used ? list : "not a list that begins with its first block",
                      (long long)(d->matrix_rows ? d->matrix_rows : d->rows));
}

static int check_shape(const halfstep_optimizer *o, const halfstep_tensor *d, struct hstep_tensor *t)
{
    if (d->ndim < 0 || d->rows < 0 || d->row_length < 0 || d->row_length > MAX_ELEMENTS ||
        d->rows > MAX_ELEMENTS / (d->row_length + 31))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': invalid shape, %lld rows of %lld elements; sizes and ndim must be at least 0, "
                          "elements below 2^52",
                          d->name, (long long)d->rows, (long long)d->row_length);
    const int has_elements = d->rows && d->row_length;
    if (!has_elements && !d->may_be_empty)
        return hstep_fail(
            o, HALFSTEP_ERROR_SHAPE,
            "tensor '%s' has no elements: rows is %lld and row_length %lld; set both, or may_be_empty = 1 "
            "if it shall have none",
            d->name, (long long)d->rows, (long long)d->row_length);
    if (has_elements && d->ndim == 0 && d->rows * d->row_length != 1)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': ndim is 0, a scalar, but there are %lld x %lld elements; set ndim", d->name,
                          (long long)d->rows, (long long)d->row_length);
    if (has_elements && d->ndim == 1 && d->row_length != 1 && !(d->rows == 1 && d->row_length >= 4096))
        return hstep_fail(
            o, HALFSTEP_ERROR_SHAPE,
            "tensor '%s': %lld rows of %lld are not of one dimension, which has n rows of length 1, or one "
            "row of at least 4096",
            d->name, (long long)d->rows, (long long)d->row_length);
    const char *wrong = hstep_divide(t, d);
    if (wrong && !strcmp(wrong, "split")) return fail_split(o, d);
    if (wrong)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': matrix_rows is %lld; it must be 0 (one matrix) or a divisor of its %lld rows",
                          d->name, (long long)d->matrix_rows, (long long)d->rows);
    t->first_row = d->first_row;
    t->n_rows = d->n_rows;
    t->first_column = d->first_column;
    t->n_columns = d->n_columns;
    if (!d->first_row && !d->n_rows && !d->first_column && !d->n_columns) {
        t->n_rows = d->rows;
        t->n_columns = d->row_length;
    }
    if (t->first_row < 0 || t->n_rows < 0 || t->first_row > d->rows || t->n_rows > d->rows - t->first_row)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': rows %lld + %lld (first + number) are not within its %lld rows", d->name,
                          (long long)t->first_row, (long long)t->n_rows, (long long)d->rows);
    if (t->first_column < 0 || t->n_columns < 0 || t->first_column > d->row_length ||
        t->n_columns > d->row_length - t->first_column)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': columns %lld + %lld (first + number) are not within its rows of %lld", d->name,
                          (long long)t->first_column, (long long)t->n_columns, (long long)d->row_length);
    if (!d->may_be_empty && (!t->n_rows || !t->n_columns))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': the part held here has no elements, because n_rows is %lld and n_columns %lld; "
                          "set both, or may_be_empty = 1 if it shall have none",
                          d->name, (long long)t->n_rows, (long long)t->n_columns);
    return HALFSTEP_OK;
}

static int choose_formats(const halfstep_optimizer *o, const struct hstep_group *g, const halfstep_tensor *d,
                          struct hstep_tensor *t)
{
    const int gradient = halfstep_format_find(d->gradient), raw = hstep_rules[t->rule].kind == HSTEP_RAW_GRADIENT;
    int roles = HALFSTEP_ROLE_GRADIENT | (raw ? HALFSTEP_ROLE_WEIGHT : 0);
    char known[HSTEP_DETAIL_BYTES];
    hstep_list_formats(known, roles);
    if (!d->gradient)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "tensor '%s': gradient is NULL; set it to the format of its gradients: %s", d->name, known);
    if (gradient < 0)
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "tensor '%s': unknown gradient format '%s'; known: %s", d->name,
                          d->gradient, known);
    if (!(hstep_formats[gradient].roles & roles))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': '%s' cannot store gradients; these can: %s",
                          d->name, d->gradient, known);
    if (hstep_formats[gradient].geometry == HALFSTEP_GEOMETRY_PACKED)
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s': %s cannot follow weights in '%s'; give it decoded weights, such as bf16",
                          d->name, hstep_rules[t->rule].name, d->gradient);
    const int named = g->recipe.weight;
    const int weight = hstep_eligible_format(named, named, t->ndim, t->rows, t->row_length, hstep_common_rows(t));
    t->slot[HALFSTEP_SLOT_WEIGHT].format = weight;
    t->slot[HALFSTEP_SLOT_WEIGHT].fell_back = weight != named;
    t->slot[HALFSTEP_SLOT_GRADIENT].format = gradient;
    size_slot(t, &t->slot[HALFSTEP_SLOT_WEIGHT]);
    size_slot(t, &t->slot[HALFSTEP_SLOT_GRADIENT]);
    const int error = check_blocks(o, d->name, t, weight);
    return error ? error : hstep_choose_states(o, g, d->name, t);
}

/* Returns 1 if a matrix begins at a row of the whole tensor, or the tensor ends there. */
static int begins_matrix(const struct hstep_tensor *t, int64_t row)
{
    return row % t->pattern_rows == 0 || hstep_matrix_in_whole(t, row) != hstep_matrix_in_whole(t, row - 1);
}

int hstep_make_tensor(const halfstep_optimizer *o, const struct hstep_group *g, const halfstep_tensor *d,
                      struct hstep_tensor *t)
{
    *t = (struct hstep_tensor){.rule = g->recipe.rule, .ndim = d->ndim, .rows = d->rows, .row_length = d->row_length};
    if (d->may_be_empty < 0 || d->may_be_empty > 1)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor: may_be_empty = %d; allowed: 0, 1", (int)d->may_be_empty);
    int error = check_shape(o, d, t);
    if (!error) error = choose_formats(o, g, d, t);
    if (error) return error;
    if ((hstep_is_matrix(t->rule, t->ndim, t->pattern_rows, t->row_length) ||
         hstep_pairs(t->rule, t->ndim, t->pattern_rows, t->row_length)) &&
        t->n_rows && t->n_columns &&
        (!begins_matrix(t, t->first_row) || !begins_matrix(t, t->first_row + t->n_rows) ||
         t->n_columns != t->row_length))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s': %s steps only whole matrices of %lld x %lld%s, not rows %lld + %lld and "
                          "columns %lld + %lld (first + number) of %lld x %lld",
                          d->name, hstep_rules[t->rule].name, (long long)t->pattern_rows, (long long)t->row_length,
                          t->blocks > 1 ? ", or the blocks of its split" : "", (long long)t->first_row,
                          (long long)t->n_rows, (long long)t->first_column, (long long)t->n_columns, (long long)t->rows,
                          (long long)t->row_length);
    return HALFSTEP_OK;
}

/* Returns the place of the first tensor in the list of a hash. */
static int *list_of(const halfstep_optimizer *o, int kind, uint64_t key)
{
    return &o->links[key & (uint64_t)(o->capacity_links - 1)].first[kind];
}

static int *list_of_id(const halfstep_optimizer *o, uint64_t id) { return list_of(o, HSTEP_BY_ID, hstep_mix(id)); }

static int *list_of_name(const halfstep_optimizer *o, const char *name)
{
    return list_of(o, HSTEP_BY_NAME, hstep_hash_name(name));
}

static void push(const halfstep_optimizer *o, int kind, int *first, int tensor)
{
    o->links[tensor].next[kind] = *first;
    *first = tensor;
}

/* Puts a tensor into its two lists. */
static void enlist(const halfstep_optimizer *o, int tensor)
{
    push(o, HSTEP_BY_ID, list_of_id(o, o->tensors[tensor].id), tensor);
    push(o, HSTEP_BY_NAME, list_of_name(o, o->labels[tensor].name), tensor);
}

/* Makes room for the links of another tensor. Where there is more room than before, all tensors change their lists. */
static int grow_links(halfstep_optimizer *o)
{
    const int before = o->capacity_links;
    if (hstep_grow((void **)&o->links, o->n_tensors, &o->capacity_links, sizeof *o->links))
        return HALFSTEP_ERROR_MEMORY;
    if (o->capacity_links == before) return HALFSTEP_OK;
    for (int i = 0; i < o->capacity_links; i++) o->links[i] = (struct hstep_links){{-1, -1}, {-1, -1}};
    for (int i = 0; i < o->n_tensors; i++) enlist(o, i);
    return HALFSTEP_OK;
}

int hstep_find_id(const halfstep_optimizer *o, uint64_t id)
{
    int i = o->links ? *list_of_id(o, id) : -1;
    while (i >= 0 && o->tensors[i].id != id) i = o->links[i].next[HSTEP_BY_ID];
    return i;
}

void hstep_change_id(halfstep_optimizer *o, int tensor, uint64_t id)
{
    int *place = list_of_id(o, o->tensors[tensor].id);
    while (*place != tensor) place = &o->links[*place].next[HSTEP_BY_ID];
    *place = o->links[tensor].next[HSTEP_BY_ID];
    o->tensors[tensor].id = id;
    push(o, HSTEP_BY_ID, list_of_id(o, id), tensor);
}

/* Fails if errors and files could not name the tensor by its name. */
static int check_name(const halfstep_optimizer *o, const char *name)
{
    if (!name || !*name)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor number %d has no name; set name", o->n_tensors);
    if (!hstep_is_utf8(name) || !strcmp(name, HSTEP_METADATA))
        return hstep_fail(o, HALFSTEP_ERROR_NAME,
                          "a tensor cannot be named '%s', because no file could hold it; names are UTF-8 and not %s",
                          name, HSTEP_METADATA);
    if (halfstep_tensor_find(o, name) < 0) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_DUPLICATE,
                      "two tensors are named '%s'; files and errors name them, so each needs its own name", name);
}

static int add_tensor(halfstep_optimizer *o, const halfstep_tensor *d, int32_t *index)
{
    int error = check_name(o, d->name);
    if (error) return error;
    if (o->settled)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': tensors must be added before the states exist",
                          d->name);
    struct hstep_tensor t;
    if ((error = hstep_check_group(o, d->group))) return error;
    if ((error = hstep_make_tensor(o, &o->groups[d->group], d, &t))) return error;
    t.group = d->group;
    t.id = d->id ? d->id : hstep_hash_name(d->name);
    const int same = hstep_find_id(o, t.id);
    if (same >= 0)
        return hstep_fail(o, HALFSTEP_ERROR_DUPLICATE,
                          "tensors '%s' and '%s' have the same id %016llx and would share their random bits; give one "
                          "of them another id",
                          o->labels[same].name, d->name, (unsigned long long)t.id);

    size_t length = strlen(d->name) + 1;
    struct hstep_label label = {0};
    if (hstep_grow((void **)&o->tensors, o->n_tensors, &o->capacity_tensors, sizeof t) ||
        hstep_grow((void **)&o->labels, o->n_tensors, &o->capacity_labels, sizeof label) || grow_links(o) ||
        !(label.name = malloc(length)))
        return hstep_fail_memory(o, sizeof t + sizeof label + length, "tensor '%s'", d->name);
    memcpy(label.name, d->name, length);
    o->labels[o->n_tensors] = label;
    o->tensors[o->n_tensors] = t;
    enlist(o, o->n_tensors);
    *index = o->n_tensors++;
    return HALFSTEP_OK;
}

int halfstep_add_tensor(halfstep_optimizer *o, const halfstep_tensor *tensor, int32_t *index)
{
    halfstep_tensor d = {0};
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, tensor);
    HSTEP_NEED(o, index);
    if (!hstep_take_struct(&d, sizeof d, tensor)) return hstep_fail_struct(o, __func__, tensor);
    hstep_complete(&d);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, add_tensor(o, &d, index));
}

uint64_t halfstep_name_id(const char *name) { return name ? hstep_hash_name(name) : 0; }

int32_t halfstep_tensor_count(const halfstep_optimizer *o) { return o ? o->n_tensors : 0; }

int halfstep_get_tensor(const halfstep_optimizer *o, int32_t index, halfstep_tensor *tensor)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, tensor);
    int error = hstep_check_tensor(o, index);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[index];
    halfstep_tensor ours = {.group = t->group,
                            .name = o->labels[index].name,
                            .id = t->id,
                            .ndim = t->ndim,
                            .may_be_empty = !t->n_rows || !t->n_columns,
                            .rows = t->rows,
                            .row_length = t->row_length,
                            .first_row = t->first_row,
                            .n_rows = t->n_rows,
                            .first_column = t->first_column,
                            .n_columns = t->n_columns,
                            .matrix_rows = t->pattern_rows,
                            .gradient = hstep_formats[t->slot[HALFSTEP_SLOT_GRADIENT].format].name};
    for (int i = 0; i < t->blocks && t->blocks > 1; i++)
        ours.split[i] = t->block_end[i] - (i ? t->block_end[i - 1] : 0);
    return hstep_give_struct(tensor, &ours, sizeof ours) ? HALFSTEP_OK : hstep_fail_struct(o, __func__, tensor);
}

int32_t halfstep_tensor_find(const halfstep_optimizer *o, const char *name)
{
    int i = o && name && o->links ? *list_of_name(o, name) : -1;
    while (i >= 0 && strcmp(o->labels[i].name, name) != 0) i = o->links[i].next[HSTEP_BY_NAME];
    return i;
}

void hstep_share_scalars(halfstep_optimizer *o)
{
    if (!o->scalars_unshared || !o->settled) return;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < o->n_tensors; i++) {
            const int share = o->tensors[i].share, from = pass ? share : i, to = pass ? i : share;
            double *ours = o->tensors[from].scalar, *theirs = o->tensors[to].scalar;
            if (!memcmp(ours, theirs, sizeof o->tensors[i].scalar) || (!pass && !(ours[0] > theirs[0]))) continue;
            memcpy(theirs, ours, sizeof o->tensors[i].scalar);
            hstep_changed(o, to, 1);
            hstep_show(o, to, 1);
        }
    o->scalars_unshared = 0;
}

void hstep_add_bytes(const struct hstep_tensor *t, uint64_t sum[HSTEP_BYTES])
{
    sum[HSTEP_WEIGHTS] += t->slot[HALFSTEP_SLOT_WEIGHT].code_bytes;
    sum[HSTEP_GRADIENTS] += t->slot[HALFSTEP_SLOT_GRADIENT].code_bytes;
    sum[HSTEP_WEIGHT_EXTRAS] += t->slot[HALFSTEP_SLOT_WEIGHT].extra_bytes;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++)
        sum[HSTEP_STATES] += t->slot[s].code_bytes + t->slot[s].extra_bytes;
}

int halfstep_memory(const halfstep_optimizer *o, uint64_t *weights, uint64_t *gradients, uint64_t *weight_extras,
                    uint64_t *states, int32_t *fell_back)
{
    HSTEP_NEED(o, o);
    uint64_t sum[HSTEP_BYTES] = {0};
    int32_t fallen = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        int fell = 0;
        for (int s = 0; s < HSTEP_SLOTS; s++) fell |= o->tensors[i].slot[s].fell_back;
        fallen += fell;
        hstep_add_bytes(&o->tensors[i], sum);
    }
    sum[HSTEP_STATES] += o->workspace_bytes;
    if (weights) *weights = sum[HSTEP_WEIGHTS];
    if (gradients) *gradients = sum[HSTEP_GRADIENTS];
    if (weight_extras) *weight_extras = sum[HSTEP_WEIGHT_EXTRAS];
    if (states) *states = sum[HSTEP_STATES];
    if (fell_back) *fell_back = fallen;
    return HALFSTEP_OK;
}
