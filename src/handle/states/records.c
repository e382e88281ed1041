/* Records of the optimizer, of groups and of tensors, which a checkpoint keeps beside weights and slots, and the host's
 * copies of records. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/grid.h"
#include "base/structs.h"
#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/tensors.h"
#include "kernels/dispatch.h"

_Static_assert(HALFSTEP_MAX_SCALARS == HSTEP_MAX_NAMED_SCALARS, "a record has the scalars of any rule");

/* Tells whether a state of a tensor has a grid. */
static int has_grid(const struct hstep_tensor *t, int state) { return t->slot[HALFSTEP_SLOT_STATE + state].root != 0; }

/* Errors with ARGUMENT, because a tensor lacks a scalar of its record. */
static int fail_scalar(const halfstep_optimizer *o, int tensor, int scalar)
{
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': %s has no scalar %d", o->labels[tensor].name,
                      hstep_rules[o->tensors[tensor].rule].name, scalar);
}

/* Errors with ARGUMENT, because a state of a tensor has no grid. */
static int fail_grid(const halfstep_optimizer *o, int tensor, int state)
{
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': state %d has no grid", o->labels[tensor].name, state);
}

/* Fails with ARGUMENT unless the record's kind and index exist. */
static int check_index(const halfstep_optimizer *o, const halfstep_record *r)
{
    switch (r->kind) {
    case HALFSTEP_RECORD_OPTIMIZER: return HALFSTEP_OK;
    case HALFSTEP_RECORD_GROUP: return hstep_check_group(o, r->index);
    case HALFSTEP_RECORD_TENSOR: return hstep_check_tensor(o, r->index);
    default:
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "record: unknown kind %d; known: 0 (optimizer), 1 (group), 2 (tensor)", (int)r->kind);
    }
}

/* ---- Reading ---- */

static void read_tensor(const halfstep_optimizer *o, halfstep_record *r)
{
    const struct hstep_tensor *t = &o->tensors[r->index];
    r->id = t->id;
    r->state_steps = t->state_steps;
    r->full_steps = t->full_steps;
    r->writes = t->writes;
    for (int i = 0; i < hstep_rule_scalars(t->rule); i++) r->scalar[i] = t->scalar[i];
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++)
        if (has_grid(t, i)) r->grid[i] = (double)t->slot[HALFSTEP_SLOT_STATE + i].grid;
}

int halfstep_get_record(const halfstep_optimizer *o, halfstep_record *record)
{
    halfstep_record asked = {0};
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, record);
    if (!hstep_take_struct(&asked, sizeof asked, record)) return hstep_fail_struct(o, __func__, record);
    halfstep_record r = {.kind = asked.kind, .index = asked.index};
    int error = check_index(o, &r);
    if (error || (error = hstep_fetch(o))) return error;
    if (r.kind == HALFSTEP_RECORD_TENSOR) {
        hstep_share_scalars((halfstep_optimizer *)(uintptr_t)o); /* all numbers that count stay the same */
        read_tensor(o, &r);
    } else if (r.kind == HALFSTEP_RECORD_GROUP) {
        r.steps = o->groups[r.index].steps;
    } else {
        r.seed = o->seed;
        r.skipped_steps = atomic_load(&o->skipped);
        r.gradient_norm = o->gradient_norm;
    }
    hstep_give_struct(record, &r, sizeof r);
    return HALFSTEP_OK;
}

/* ---- Restoring ---- */

/* Fails for a count above HALFSTEP_MAX_COUNT. Updates count on from it, and no counter may wrap to 0, where a bias
 * correction would divide by it. */
static int check_count(const halfstep_optimizer *o, const char *of, const char *name, uint64_t count)
{
    if (count <= HALFSTEP_MAX_COUNT) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%s%s = %llu is above HALFSTEP_MAX_COUNT (2^63 - 1)", of, name,
                      (unsigned long long)count);
}

static int check_numbers(const halfstep_optimizer *o, const halfstep_record *r)
{
    const struct hstep_tensor *t = &o->tensors[r->index];
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    const char *name = o->labels[r->index].name;
    for (int i = 0; i < HALFSTEP_MAX_SCALARS; i++) {
        const struct hstep_scalar *s = &rule->scalar[i];
        if (i >= hstep_rule_scalars(t->rule)) {
            if (r->scalar[i] != 0.0) return fail_scalar(o, r->index, i);
        } else if (!(r->scalar[i] >= s->minimum && r->scalar[i] <= s->maximum)) {
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': %s = %g is not in [%g, %g]", name, s->name,
                              r->scalar[i], s->minimum, s->maximum);
        }
    }
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        if (!has_grid(t, i)) {
            if (r->grid[i] != 0.0) return fail_grid(o, r->index, i);
        } else if (!hstep_is_grid(r->grid[i])) {
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': %s.grid = %.9g is not an fp32 number in [%g, 1]",
                              name, rule->state[i].name, r->grid[i], (double)HSTEP_GRID_LEAST);
        }
    }
    return HALFSTEP_OK;
}

static int check_tensor_record(const halfstep_optimizer *o, const halfstep_record *r)
{
    char of[HSTEP_DETAIL_BYTES];
    snprintf(of, sizeof of, "tensor '%s': ", o->labels[r->index].name);
    int error = check_count(o, of, "state_steps", r->state_steps);
    if (!error) error = check_count(o, of, "full_steps", r->full_steps);
    if (!error) error = check_count(o, of, "writes", r->writes);
    if (error) return error;
    const int same = r->id ? hstep_find_id(o, r->id) : -1;
    if (same >= 0 && same != r->index)
        return hstep_fail(o, HALFSTEP_ERROR_DUPLICATE, "tensor '%s' already has id %016llx", o->labels[same].name,
                          (unsigned long long)r->id);
    return check_numbers(o, r);
}

/* Fails if a field is set that a record of this kind does not have. */
static int check_kind(const halfstep_optimizer *o, const halfstep_record *r)
{
    static const char *const kinds[] = {"optimizer", "group", "tensor"};
    halfstep_record fields = {.struct_size = r->struct_size, .kind = r->kind};
    if (r->kind != HALFSTEP_RECORD_OPTIMIZER) fields.index = r->index;
    if (r->kind == HALFSTEP_RECORD_OPTIMIZER) {
        fields.seed = r->seed;
        fields.skipped_steps = r->skipped_steps;
        fields.gradient_norm = r->gradient_norm;
    } else if (r->kind == HALFSTEP_RECORD_GROUP) {
        fields.steps = r->steps;
    } else {
        fields.id = r->id;
        fields.state_steps = r->state_steps;
        fields.full_steps = r->full_steps;
        fields.writes = r->writes;
        memcpy(fields.scalar, r->scalar, sizeof fields.scalar);
        memcpy(fields.grid, r->grid, sizeof fields.grid);
    }
    if (!memcmp(&fields, r, sizeof fields)) return HALFSTEP_OK;
    return hstep_fail(
        o, HALFSTEP_ERROR_ARGUMENT,
        "record: reserved, or a field of another kind, is set, but kind is %d (%s); set the fields of its "
        "kind only",
        (int)r->kind, kinds[r->kind]);
}

static int check_record(const halfstep_optimizer *o, const halfstep_record *r)
{
    int error = check_index(o, r);
    if (error || (error = check_kind(o, r))) return error;
    if (r->kind == HALFSTEP_RECORD_TENSOR) return check_tensor_record(o, r);
    if (r->kind == HALFSTEP_RECORD_GROUP) return check_count(o, "", "steps of the group", r->steps);
    if (!(r->gradient_norm >= 0.0 && r->gradient_norm < INFINITY))
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "gradient_norm = %g is negative or not finite", r->gradient_norm);
    return check_count(o, "", "skipped_steps", r->skipped_steps);
}

/* Writes the host's copies of a tensor's record, rounded to nearest in any mode of the caller. */
static void show(const halfstep_optimizer *o, int tensor)
{
    struct hstep_fp fp = hstep_fp_enter();
    hstep_show(o, tensor, 1);
    hstep_fp_leave(fp);
}

static void restore_tensor(halfstep_optimizer *o, const halfstep_record *r)
{
    struct hstep_tensor *t = &o->tensors[r->index];
    if (r->id) hstep_change_id(o, r->index, r->id);
    t->state_steps = r->state_steps;
    t->full_steps = r->full_steps;
    t->writes = r->writes;
    for (int i = 0; i < hstep_rule_scalars(t->rule); i++) t->scalar[i] = r->scalar[i];
    o->scalars_unshared |= hstep_rules[t->rule].totals;
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++)
        if (has_grid(t, i)) t->slot[HALFSTEP_SLOT_STATE + i].grid = (float)r->grid[i];
    hstep_changed(o, r->index, 1);
    show(o, r->index);
}

int halfstep_set_record(halfstep_optimizer *o, const halfstep_record *record)
{
    halfstep_record r = {0};
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, record);
    if (!hstep_take_struct(&r, sizeof r, record)) return hstep_fail_struct(o, __func__, record);
    int error = check_record(o, &r);
    if (error || (error = hstep_fetch(o))) return error;
    if (r.kind == HALFSTEP_RECORD_TENSOR) {
        restore_tensor(o, &r);
        return HALFSTEP_OK;
    }
    if (r.kind == HALFSTEP_RECORD_GROUP) {
        o->groups[r.index].steps = r.steps;
    } else {
        o->seed = r.seed;
        atomic_store(&o->skipped, r.skipped_steps);
        o->gradient_norm = o->round_norm = r.gradient_norm;
    }
    hstep_counts_changed(o);
    return HALFSTEP_OK;
}

/* ---- The host's copies ---- */

int halfstep_bind_record(halfstep_optimizer *o, int32_t tensor, const halfstep_record_places *given)
{
    halfstep_record_places places = {0};
    HSTEP_NEED(o, o);
    if (given && !hstep_take_struct(&places, sizeof places, given)) return hstep_fail_struct(o, __func__, given);
    if (places.reserved) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "record places: reserved must be 0");
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    for (int i = hstep_rule_scalars(t->rule); i < HALFSTEP_MAX_SCALARS; i++)
        if (places.scalar[i]) return fail_scalar(o, tensor, i);
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++)
        if (places.grid[i] && !has_grid(t, i)) return fail_grid(o, tensor, i);
    if ((error = hstep_fetch(o))) return error;
    o->labels[tensor].places = places;
    o->has_bound_copies = 1;
    show(o, tensor);
    return HALFSTEP_OK;
}

/* ---- What happened ---- */

/* If the device fails, functions that return no code return what was known before. */

uint64_t halfstep_skipped_steps(const halfstep_optimizer *o)
{
    if (!o) return 0;
    hstep_fetch(o);
    return atomic_load(&o->skipped);
}

double halfstep_gradient_norm(const halfstep_optimizer *o)
{
    if (!o) return 0.0;
    hstep_fetch(o);
    return o->gradient_norm;
}

const char *halfstep_nonfinite_tensor(const halfstep_optimizer *o, int32_t *too_large)
{
    if (o) hstep_fetch(o);
    if (too_large) *too_large = o ? atomic_load(&o->gradient_too_large) : 0;
    int tensor = o ? atomic_load(&o->nonfinite_tensor) : -1;
    return tensor < 0 ? "" : o->labels[tensor].name;
}
