/* Asynchronous devices: their copy of a handle's data, sending to it and fetching from it. Also what callers may ask of
 * any device.
 *
 * Between two fetches the device owns counters, grids, scalars, steps of groups and the ledger. The handle owns
 * recipes, hyper-parameters and addresses, and sends what it has changed before the next step. Code that reads or
 * changes what the device owns fetches first. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "base/structs.h"
#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/step/ahead.h"
#include "kernels/dispatch.h"

static int records(const halfstep_optimizer *o) { return o->device->records && o->device->records(&o->context); }

/* ---- To the device ---- */

void hstep_changed(halfstep_optimizer *o, int first, int n)
{
    hstep_forget_results(o, first, n);
    if (!o->device->asynchronous || !n) return;
    if (o->changed_end == o->changed_first) o->changed_first = o->changed_end = first;
    if (first < o->changed_first) o->changed_first = first;
    if (first + n > o->changed_end) o->changed_end = first + n;
}

void hstep_counts_changed(halfstep_optimizer *o) { o->counts_changed = 1; }

static int send_groups(halfstep_optimizer *o)
{
    int error = HALFSTEP_OK;
    for (int i = 0; !error && i < o->n_groups; i++) {
        struct hstep_group *group = &o->groups[i], *sent = &o->sent[i];
        if (o->counts_changed) error = o->device->copy(&o->context, &o->plan.groups[i], group, sizeof *group);
        else if (memcmp(group, sent, HSTEP_GROUP_SET_BYTES))
            error = o->device->copy(&o->context, &o->plan.groups[i], group, HSTEP_GROUP_SET_BYTES);
        if (!error) memcpy(sent, group, sizeof *group);
    }
    return error;
}

static int send_ledger(halfstep_optimizer *o)
{
    struct hstep_ledger ledger = {.gradient_scale = o->gradient_scale,
                                  .round_norm = o->round_norm,
                                  .norm = o->gradient_norm,
                                  .skipped = atomic_load(&o->skipped),
                                  .refusals = o->refusals,
                                  .offender = o->offender,
                                  .in_round = o->in_round,
                                  .too_large = o->too_large};
    int error = HALFSTEP_OK;
    if (o->counts_changed) error = o->device->copy(&o->context, o->plan.ledger, &ledger, sizeof ledger);
    else if (o->sent_scale != o->gradient_scale)
        error = o->device->copy(&o->context, &o->plan.ledger->gradient_scale, &ledger.gradient_scale, sizeof(double));
    if (!error) o->sent_scale = o->gradient_scale;
    return error;
}

static int anything_to_send(const halfstep_optimizer *o)
{
    int any = o->counts_changed || o->changed_end > o->changed_first || o->sent_scale != o->gradient_scale;
    for (int i = 0; !any && i < o->n_groups; i++) any = memcmp(&o->groups[i], &o->sent[i], HSTEP_GROUP_SET_BYTES) != 0;
    return any;
}

/* Sends what was changed. An error leaves all marks as they were, so that it is sent again. */
static int send(halfstep_optimizer *o)
{
    if (!anything_to_send(o)) return HALFSTEP_OK;
    if (records(o))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                          "hyper-parameters, counters or memory were changed since the last step, and a step that is "
                          "being captured cannot take them; call halfstep_synchronize() before the capture begins");
    int first = o->changed_first, n = o->changed_end - first;
    uint64_t bytes = (uint64_t)n * sizeof *o->tensors;
    int error = n ? o->device->copy(&o->context, o->plan.tensors + first, o->tensors + first, bytes) : HALFSTEP_OK;
    if (!error) error = send_groups(o);
    if (!error) error = send_ledger(o);
    if (error) return hstep_why(o, error);
    o->changed_first = o->changed_end = o->counts_changed = 0;
    return HALFSTEP_OK;
}

int hstep_send(halfstep_optimizer *o)
{
    if (!o->device->asynchronous || !o->settled) return HALFSTEP_OK;
    hstep_lock(&o->sync_lock);
    int error = send(o);
    hstep_unlock(&o->sync_lock);
    return error;
}

int hstep_send_at_once(halfstep_optimizer *o) { return o->captured && !records(o) ? hstep_send(o) : HALFSTEP_OK; }

int hstep_send_bound(halfstep_optimizer *o)
{
    int error = HALFSTEP_OK;
    struct hstep_group *groups = o->device->shared ? o->groups : o->plan.groups;
    for (int i = 0; !error && i < o->n_groups && o->lr_place; i++)
        if (o->lr_place[i])
            error = o->device->copy(&o->context, &groups[i].hyper[HSTEP_LR], o->lr_place[i], sizeof(double));
    if (!error && o->scale_place)
        error = o->device->copy(&o->context, o->plan.ledger ? &o->plan.ledger->gradient_scale : &o->gradient_scale,
                                o->scale_place, sizeof(double));
    return error;
}

/* ---- From the device ---- */

void hstep_show(const halfstep_optimizer *o, int first, int n)
{
    for (int i = first; i < first + n && o->has_bound_copies; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        const halfstep_record_places *places = &o->labels[i].places;
        if (places->step) *places->step = (float)t->state_steps;
        if (places->state_steps) *places->state_steps = (int64_t)t->state_steps;
        if (places->full_steps) *places->full_steps = (int64_t)t->full_steps;
        if (places->writes) *places->writes = (int64_t)t->writes;
        for (int s = 0; s < HALFSTEP_MAX_SCALARS; s++)
            if (places->scalar[s]) *places->scalar[s] = t->scalar[s];
        for (int s = 0; s < HALFSTEP_MAX_STATES; s++)
            if (places->grid[s]) *places->grid[s] = (double)t->slot[HALFSTEP_SLOT_STATE + s].grid;
    }
}

static int fetch(halfstep_optimizer *o)
{
    struct hstep_ledger ledger;
    uint64_t group_bytes = (uint64_t)o->n_groups * sizeof *o->groups;
    if (records(o))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                          "the stream is being captured; results of its steps are known only after a replay");
    int error = HALFSTEP_OK;
    /* Changes of the handle were made after a fetch, and no step has been made since. */
    if (o->changed_end > o->changed_first || o->counts_changed) return HALFSTEP_OK;
    if (o->n_tensors)
        error = o->device->copy(&o->context, o->tensors, o->plan.tensors, (uint64_t)o->n_tensors * sizeof *o->tensors);
    if (!error && o->n_groups) error = o->device->copy(&o->context, o->fetched, o->plan.groups, group_bytes);
    if (!error) error = o->device->copy(&o->context, &ledger, o->plan.ledger, sizeof ledger);
    if ((error = hstep_wait(o, error))) return error;
    for (int i = 0; i < o->n_groups; i++) o->groups[i].steps = o->fetched[i].steps;
    o->gradient_norm = ledger.norm;
    o->round_norm = ledger.round_norm;
    o->refusals = ledger.refusals;
    o->offender = ledger.offender;
    o->in_round = ledger.in_round;
    o->too_large = ledger.too_large;
    atomic_store(&o->skipped, ledger.skipped);
    if (o->refusals != o->refusals_seen && !o->in_round) {
        atomic_store(&o->nonfinite_tensor, ledger.offender);
        atomic_store(&o->gradient_too_large, ledger.too_large);
    }
    o->refusals_seen = o->refusals;
    atomic_store(&o->device_ahead, 0);
    struct hstep_fp fp = hstep_fp_enter();
    hstep_show(o, 0, o->n_tensors);
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}

/* A handle that was captured is always fetched, because a graph steps it without a call. A const handle does not
 * promise to keep what a fetch changes. */
int hstep_fetch(const halfstep_optimizer *const_o)
{
    halfstep_optimizer *o = (halfstep_optimizer *)(uintptr_t)const_o;
    if (!o->device->asynchronous || !o->settled || !(atomic_load(&o->device_ahead) || o->captured)) return HALFSTEP_OK;
    return fetch(o);
}

/* ---- Memory of asynchronous devices ---- */

int hstep_open_sync(halfstep_optimizer *o)
{
    if (!o->device->asynchronous) return HALFSTEP_OK;
    uint64_t bytes = sizeof *o->plan.ledger;
    o->counts_changed = 1;
    o->offender = -1;
    int error = o->device->allocate(&o->context, bytes, (void **)&o->plan.ledger);
    return error ? error : o->device->zero(&o->context, o->plan.ledger, bytes);
}

int hstep_settle_sync(halfstep_optimizer *o)
{
    if (!o->device->asynchronous) return HALFSTEP_OK;
    free(o->sent);
    o->sent = calloc(2 * (size_t)o->n_groups + 1, sizeof *o->sent);
    if (!o->sent) return HALFSTEP_ERROR_MEMORY;
    o->fetched = o->sent + o->n_groups;
    hstep_changed(o, 0, o->n_tensors);
    return HALFSTEP_OK;
}

int hstep_take_scratch(halfstep_optimizer *o, int tensor, struct hstep_single_scratch **scratch)
{
    if (o->device->shared) return HALFSTEP_OK;
    if (!o->device->asynchronous) return o->device->allocate(&o->context, sizeof **scratch, (void **)scratch);
    hstep_lock(&o->sync_lock);
    int error = HALFSTEP_OK;
    if (!o->single_scratch)
        error = o->device->allocate(&o->context, (uint64_t)o->n_tensors * sizeof **scratch, &o->single_scratch);
    hstep_unlock(&o->sync_lock);
    *scratch = error ? NULL : (struct hstep_single_scratch *)o->single_scratch + tensor;
    return error;
}

void hstep_leave_scratch(halfstep_optimizer *o, struct hstep_single_scratch *scratch)
{
    if (!o->device->shared && !o->device->asynchronous) o->device->release(&o->context, scratch);
}

void hstep_close_sync(halfstep_optimizer *o)
{
    if (o->plan.ledger) o->device->release(&o->context, o->plan.ledger);
    if (o->single_scratch) o->device->release(&o->context, o->single_scratch);
    free(o->sent);
    free((void *)(uintptr_t)o->lr_place);
    free(o->lr_set);
    o->sent = o->fetched = NULL;
}

/* ---- Public functions ---- */

int halfstep_synchronize(halfstep_optimizer *o)
{
    HSTEP_NEED(o, o);
    if (!o->device->asynchronous) return HALFSTEP_OK;
    int error = hstep_fetch(o);
    if (!error) error = hstep_wait(o, hstep_send(o));
    if (error || o->refusals == o->refusals_told) return error;
    o->refusals_told = o->refusals;
    if (o->in_round) return hstep_fail(o, HALFSTEP_NONFINITE, "the norm of the round is not finite");
    return hstep_fail_gradient(o, o->offender, o->too_large);
}

/* Binds one hyper-parameter to `place`, or ends the binding if that is NULL. While it is bound, its value replaces the
 * one that was set: in the device's copy, or on the processor in *value. Afterwards the value that was set counts
 * again. It is restored from *set on the processor, and marked to be sent to an asynchronous device. */
static void bind(halfstep_optimizer *o, const double **held, const double *place, double *value, double *set,
                 double *sent)
{
    if (place && !*held) *set = *value;
    if (!place && *held) {
        if (!o->device->asynchronous) *value = *set;
        else if (sent) *sent = NAN;
    }
    *held = place;
}

int halfstep_bind_hyper(halfstep_optimizer *o, int32_t group, const char *name, const double *place)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, name);
    int all = group == HALFSTEP_ALL_GROUPS, scale = all && !strcmp(name, "gradient_scale");
    int error = all ? HALFSTEP_OK : hstep_check_group(o, group);
    if (error) return error;
    if (!scale && strcmp(name, "lr"))
        return hstep_fail(o, HALFSTEP_ERROR_NAME,
                          "'%s' cannot be bound; known: lr, and for HALFSTEP_ALL_GROUPS gradient_scale", name);
    if (!scale && !o->n_groups)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "there is no group yet whose lr could be bound; add one first");
    if (place && (error = hstep_check_owned(o, place))) return hstep_why(o, error);
    if (scale) {
        bind(o, &o->scale_place, place, &o->gradient_scale, &o->scale_set, &o->sent_scale);
        return HALFSTEP_OK;
    }
    uint64_t n = (uint64_t)o->n_groups + 1;
    if ((!o->lr_place && !(o->lr_place = calloc(n, sizeof *o->lr_place))) ||
        (!o->lr_set && !(o->lr_set = calloc(n, sizeof *o->lr_set))))
        return hstep_fail_memory(o, n * (sizeof *o->lr_place + sizeof *o->lr_set), "binding hyper-parameters");
    for (int i = all ? 0 : group; i < (all ? o->n_groups : group + 1); i++)
        bind(o, &o->lr_place[i], place, &o->groups[i].hyper[HSTEP_LR], &o->lr_set[i],
             o->sent ? &o->sent[i].hyper[HSTEP_LR] : NULL);
    return HALFSTEP_OK;
}

/* ---- Devices: names, information, streams, memory ---- */

const struct hstep_device *hstep_find_device(const char *name, const char **rest)
{
    const struct hstep_device *const devices[] = {hstep_default_device, &hstep_cuda_device};
    if (!name || !strcmp(name, "cpu")) return hstep_default_device;
    for (size_t i = 1; i < sizeof devices / sizeof *devices; i++) {
        size_t length = strlen(devices[i]->name);
        if (strncmp(name, devices[i]->name, length) || (name[length] && name[length] != ':')) continue;
        *rest = name + length + (name[length] == ':');
        if (name[length] && !**rest) break;
        return devices[i];
    }
    hstep_fail(NULL, HALFSTEP_ERROR_NAME, "unknown device '%s'; known: cpu, cuda, and cuda:N for GPU number N", name);
    return NULL;
}

int halfstep_set_stream(halfstep_optimizer *o, void *stream)
{
    HSTEP_NEED(o, o);
    if (o->device->follow) return hstep_why(o, o->device->follow(&o->context, stream));
    return stream ? hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "the %s has no streams", o->device->name) : HALFSTEP_OK;
}

int halfstep_get_device_info(const char *device, halfstep_device_info *info)
{
    const char *rest = "";
    halfstep_device_info ours = {.name = "", .code = ""};
    HSTEP_NEED(NULL, info);
    const struct hstep_device *found = hstep_find_device(device, &rest);
    if (!found) return HALFSTEP_ERROR_NAME;
    if (!found->inform)
        return hstep_fail(NULL, HALFSTEP_ERROR_NAME, "the processor is not described here; ask for cuda, or cuda:N");
    if (!hstep_struct_size(info)) return hstep_fail_struct(NULL, __func__, info);
    found->inform(rest, &ours);
    if (!ours.usable) {
        const char *why = found->why ? found->why() : NULL;
        if (why) hstep_fail(NULL, HALFSTEP_ERROR_DEVICE, "%s", why);
    }
    hstep_give_struct(info, &ours, sizeof ours);
    return HALFSTEP_OK;
}

const char *halfstep_device_code(void) { return hstep_cuda_device.code(); }

int halfstep_device_allocate(const halfstep_optimizer *o, uint64_t bytes, void **memory)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, memory);
    *memory = NULL;
    int error = o->device->allocate(&o->context, bytes, memory);
    if (error == HALFSTEP_ERROR_MEMORY) return hstep_fail_memory(o, bytes, "the call");
    return hstep_why(o, error);
}

void halfstep_device_release(const halfstep_optimizer *o, void *memory)
{
    if (o && memory) o->device->release(&o->context, memory);
}

int halfstep_device_copy(const halfstep_optimizer *o, void *to, const void *from, uint64_t bytes)
{
    HSTEP_NEED(o, o);
    if (!bytes) return HALFSTEP_OK;
    HSTEP_NEED(o, to);
    HSTEP_NEED(o, from);
    return hstep_wait(o, o->device->copy(&o->context, to, from, bytes));
}
