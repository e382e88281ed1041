/* The check of a device before it touches memory of the caller: steps small cases on the device and on the processor,
 * and compares all bytes. The cases have memory of their own, 16 MB at most on either side. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "handle/checks.h"
#include "handle/devices/device_cases.h"
#include "handle/devices/device_check.h"
#include "handle/states/slots.h"
#include "tables/layout.h"
#define HALFSTEP_ADVANCED
#include "halfstep.h"

/* ---- The two sides ---- */

enum { DEVICE, HOST, SIDES };

struct side {
    halfstep_optimizer *o;
    char *data, *states; /* in the side's memory */
    void **weights;
    const void **gradients;
};

/* The data of a side are the weights of all tensors, then their gradients, then other gradients of the same shapes. */
struct check {
    const halfstep_optimizer *asking;
    char device[40]; /* its name, as halfstep_options has it */
    struct side side[SIDES];
    int tensors;
    uint64_t *weight, *gradient; /* offsets in the data, one more than there are tensors */
    uint64_t others, data_bytes, state_bytes;
    int parts;   /* 1: some tensors are parts, so that steps are made by begin, norms and finish */
    int refused; /* 1: a call of the host was refused since the last wait */
    char *copy;  /* of data or states of the device */
};

/* Returns an error of the device side in the words of the asking handle. */
static int fail_on(const struct check *c, int error)
{
    char text[HSTEP_DETAIL_BYTES];
    snprintf(text, sizeof text, "%s", halfstep_error_detail(c->side[DEVICE].o));
    return error ? hstep_fail(c->asking, error, "the check of the device failed: %.200s", text) : error;
}

static int fail_bits(const struct check *c, int tensor, const char *what)
{
    const halfstep_optimizer *o = c->side[HOST].o;
    return hstep_fail(c->asking, HALFSTEP_ERROR_DEVICE,
                      "%s gives wrong bits (%s of %s), so nothing was stepped on it; run `halfstep verify --device %s "
                      "--json` and report what it prints",
                      c->device, what, o->labels[tensor].name, c->device);
}

/* ---- Opening ---- */

static uint64_t rounded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

static int open_side(struct check *c, int which, const char *device, const char *generator, int tensor)
{
    struct side *s = &c->side[which];
    const halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 5, .device = device};
    int error = hstep_create(&options, 1, &s->o);
    if (!error && c->parts) error = halfstep_set_choice(s->o, HALFSTEP_ALL_GROUPS, "scan", "per-tensor");
    if (!error) error = halfstep_set_choice(s->o, HALFSTEP_ALL_GROUPS, "generator", generator);
    if (error) return error;
    return tensor < 0 ? hstep_describe_general(s->o, c->parts)
                      : hstep_describe_fused(s->o, c->asking, tensor, c->parts);
}

/* Works out where the weights and gradients of all tensors are in a side's data. */
static int place_data(struct check *c)
{
    const halfstep_optimizer *o = c->side[HOST].o;
    c->tensors = o->n_tensors;
    c->weight = calloc(2 * ((size_t)c->tensors + 1), sizeof *c->weight);
    if (!c->weight) return HALFSTEP_ERROR_MEMORY;
    c->gradient = c->weight + c->tensors + 1;
    for (int slot = HALFSTEP_SLOT_WEIGHT; slot <= HALFSTEP_SLOT_GRADIENT; slot++) {
        uint64_t *at = slot ? c->gradient : c->weight;
        at[0] = slot ? c->weight[c->tensors] : 0;
        for (int i = 0; i < c->tensors; i++) {
            halfstep_slot_info info = {.struct_size = sizeof info};
            int error = halfstep_get_slot_info(o, i, slot, &info);
            if (error) return error;
            at[i + 1] = at[i] + rounded(info.code_bytes);
        }
    }
    c->others = c->gradient[c->tensors];
    c->data_bytes = c->others + (c->others - c->gradient[0]);
    return halfstep_state_bytes(c->side[HOST].o, &c->state_bytes);
}

static int bind_side(struct check *c, int which)
{
    struct side *s = &c->side[which];
    s->weights = calloc(2 * (size_t)c->tensors, sizeof *s->weights);
    if (!s->weights) return HALFSTEP_ERROR_MEMORY;
    s->gradients = (const void **)(s->weights + c->tensors);
    int error = halfstep_device_allocate(s->o, c->data_bytes, (void **)&s->data);
    if (error || (error = halfstep_device_allocate(s->o, c->state_bytes, (void **)&s->states))) return error;
    for (int i = 0; i < c->tensors; i++) {
        s->weights[i] = s->data + c->weight[i];
        s->gradients[i] = s->data + c->gradient[i];
    }
    error = halfstep_bind_states(s->o, s->states, c->state_bytes);
    return error ? error : hstep_age_cases(s->o);
}

static void close_check(struct check *c)
{
    for (int i = 0; i < SIDES; i++) {
        struct side *s = &c->side[i];
        halfstep_device_release(s->o, s->data);
        halfstep_device_release(s->o, s->states);
        halfstep_destroy(s->o);
        free(s->weights);
    }
    free(c->weight);
    free(c->copy);
}

/* ---- Comparing ---- */

/* Returns OK if a call had the same result on both sides. On the device a refused step is known after a wait only. A
 * rule may not support calls about one tensor. A tensor of -1 means all. */
static int agree(struct check *c, int device, int host, int tensor)
{
    if (host != HALFSTEP_OK && host != HALFSTEP_NONFINITE && (host != HALFSTEP_ERROR_UNSUPPORTED || tensor < 0))
        return hstep_fail(c->asking, host, "the check of the device failed: %.200s",
                          halfstep_error_detail(c->side[HOST].o));
    if (!device && host == HALFSTEP_NONFINITE) c->refused = 1;
    if (device == host || (!device && host == HALFSTEP_NONFINITE)) return HALFSTEP_OK;
    if (device == HALFSTEP_ERROR_MEMORY || device == HALFSTEP_ERROR_DEVICE) return fail_on(c, device);
    return fail_bits(c, tensor < 0 ? 0 : tensor, "what a call returns");
}

/* Waits for the device, and compares what it refused. */
static int agree_at_last(struct check *c)
{
    const int device = halfstep_synchronize(c->side[DEVICE].o), refused = c->refused;
    c->refused = 0;
    if (!device && refused) return fail_bits(c, 0, "what a step refuses");
    return agree(c, device, refused ? HALFSTEP_NONFINITE : HALFSTEP_OK, -1);
}

static int compare_states(const struct check *c)
{
    const struct side *host = &c->side[HOST];
    for (int i = 0; i < c->tensors; i++)
        for (struct hstep_cursor s = {0}; hstep_next_plane(&host->o->tensors[i], &s);)
            if (memcmp(*s.place, c->copy + (*s.place - host->states), (size_t)s.bytes))
                return fail_bits(c, i, hstep_slot_name(host->o, i, s.slot));
    return HALFSTEP_OK;
}

static int compare_records(const struct check *c)
{
    for (int i = 0; i < c->tensors; i++) {
        halfstep_record record[SIDES];
        memset(record, 0, sizeof record);
        for (int s = 0; s < SIDES; s++) {
            record[s].struct_size = sizeof *record;
            record[s].kind = HALFSTEP_RECORD_TENSOR;
            record[s].index = i;
            int error = halfstep_get_record(c->side[s].o, &record[s]);
            if (error) return fail_on(c, error);
        }
        if (memcmp(&record[DEVICE], &record[HOST], sizeof *record)) return fail_bits(c, i, "the counters");
    }
    return halfstep_gradient_norm(c->side[DEVICE].o) == halfstep_gradient_norm(c->side[HOST].o)
               ? HALFSTEP_OK
               : fail_bits(c, 0, "the norm");
}

/* Compares all bytes of both sides. */
static int compare(const struct check *c)
{
    const struct side *d = &c->side[DEVICE], *host = &c->side[HOST];
    int error = halfstep_device_copy(d->o, c->copy, d->data, c->data_bytes);
    if (error) return fail_on(c, error);
    for (int i = 0; memcmp(c->copy, host->data, (size_t)c->data_bytes) && i < c->tensors; i++) {
        const uint64_t *const at[] = {c->weight, c->gradient};
        for (int j = 0; j < 2; j++)
            if (memcmp(c->copy + at[j][i], host->data + at[j][i], (size_t)(at[j][i + 1] - at[j][i])))
                return fail_bits(c, i, j ? "an accumulated gradient" : "the weight");
    }
    if ((error = halfstep_device_copy(d->o, c->copy, d->states, c->state_bytes))) return fail_on(c, error);
    return (error = compare_states(c)) ? error : compare_records(c);
}

/* ---- Calls ---- */

static int send_gradients(const struct check *c, int step)
{
    const struct side *d = &c->side[DEVICE], *host = &c->side[HOST];
    for (int copies = 0; copies < 2; copies++)
        for (int i = 0; i < c->tensors; i++)
            hstep_fill_case(host->data + c->gradient[i] + copies * (c->others - c->gradient[0]), host->o, i,
                            HALFSTEP_SLOT_GRADIENT, (uint64_t)(2 * step + copies + 1));
    const uint64_t first = c->gradient[0];
    return fail_on(c, halfstep_device_copy(d->o, d->data + first, host->data + first, c->data_bytes - first));
}

static halfstep_call call_of(const struct side *s, int kind, int tensor, int micro)
{
    const int first = tensor < 0 ? 0 : tensor;
    return (halfstep_call){.struct_size = sizeof(halfstep_call),
                           .kind = kind,
                           .tensor = first,
                           .micro = micro,
                           .weights = s->weights + first,
                           .gradients = kind == HALFSTEP_CALL_ROUND ? NULL : s->gradients + first};
}

/* Makes a call in three parts on both sides. Compares the sums that the second part adds, whose carries are made. Other
 * statistics may have other limbs of the same value. */
static int call_in_parts(struct check *c, int kind, int tensor)
{
    static int (*const parts[])(halfstep_optimizer *, const halfstep_call *) = {halfstep_run_begin, halfstep_run_norms,
                                                                                halfstep_run_finish};
    halfstep_call call[SIDES];
    for (int i = 0; i < SIDES; i++) call[i] = call_of(&c->side[i], kind, tensor, 0);
    const size_t count = (size_t)halfstep_statistics_count(c->side[HOST].o, &call[HOST]),
                 first = (size_t)halfstep_norms_offset(c->side[HOST].o, &call[HOST]);
    int64_t *statistics = calloc(2 * count + 1, sizeof *statistics);
    int error = statistics ? HALFSTEP_OK : HALFSTEP_ERROR_MEMORY;
    for (int part = 0; !error && part < 3; part++) {
        int result[SIDES];
        for (int i = 0; i < SIDES; i++) {
            call[i].statistics = statistics + (i ? count : 0);
            result[i] = parts[part](c->side[i].o, &call[i]);
        }
        error = agree(c, result[DEVICE], result[HOST], tensor);
        if (result[HOST]) break;
        if (!error && part == 1 &&
            memcmp(statistics + first, statistics + count + first, (count - first) * sizeof *statistics))
            error = fail_bits(c, tensor < 0 ? 0 : tensor, "the statistics");
    }
    free(statistics);
    return error;
}

/* Makes a call on both sides. A tensor of -1 means all of them. */
static int call_both(struct check *c, int kind, int tensor, int micro)
{
    if (c->parts && !micro) return call_in_parts(c, kind, tensor);
    int result[SIDES];
    for (int i = 0; i < SIDES; i++) {
        const halfstep_call call = call_of(&c->side[i], kind, tensor, micro);
        result[i] = halfstep_run(c->side[i].o, &call);
    }
    return agree(c, result[DEVICE], result[HOST], tensor);
}

static int accumulate_both(struct check *c, int tensor)
{
    halfstep_tensor t = {.struct_size = sizeof t};
    int error = halfstep_get_tensor(c->side[HOST].o, tensor, &t), result[SIDES];
    if (error) return error;
    const char *format = !strcmp(t.gradient, "bf16") && tensor % 2 ? "bf16-sr" : t.gradient;
    for (int i = 0; i < SIDES; i++) {
        char *sum = c->side[i].data + c->gradient[tensor];
        result[i] =
            halfstep_accumulate(c->side[i].o, tensor, sum, format, sum + (c->others - c->gradient[0]), t.gradient, 0.5);
    }
    return agree(c, result[DEVICE], result[HOST], tensor);
}

/* Reads a slot as floats on both sides, and writes it anew from half their values. */
static int rewrite_both(struct check *c, int tensor, int slot)
{
    halfstep_slot_info info = {.struct_size = sizeof info};
    if (halfstep_get_slot_info(c->side[HOST].o, tensor, slot, &info) || info.format < 0) return HALFSTEP_OK;
    const size_t n = (size_t)(info.rows * info.columns);
    float *values = calloc(2 * n + 2, sizeof *values);
    int result[SIDES], error = values ? HALFSTEP_OK : HALFSTEP_ERROR_MEMORY;
    for (int i = 0; !error && i < SIDES; i++) {
        const struct side *s = &c->side[i];
        void *data = slot == HALFSTEP_SLOT_WEIGHT ? s->weights[tensor] : NULL;
        float *mine = values + (i ? n : 0);
        result[i] = halfstep_read_slot(s->o, tensor, slot, data, 0, info.rows, mine);
        for (size_t j = 0; j < n; j++) mine[j] *= 0.5f;
        if (!result[i]) result[i] = halfstep_write_slot(s->o, tensor, slot, data, 0, info.rows, mine);
    }
    if (!error) error = agree(c, result[DEVICE], result[HOST], tensor);
    if (!error && memcmp(values, values + n, n * sizeof *values)) error = fail_bits(c, tensor, info.name);
    free(values);
    return error;
}

static int saturated_both(struct check *c, int tensor)
{
    uint64_t count[SIDES] = {0};
    int result[SIDES];
    for (int i = 0; i < SIDES; i++)
        result[i] = halfstep_saturated(c->side[i].o, tensor, c->side[i].weights[tensor], &count[i]);
    int error = agree(c, result[DEVICE], result[HOST], tensor);
    return error || count[DEVICE] == count[HOST] ? error : fail_bits(c, tensor, "the count of saturated weights");
}

/* Carries within sums that need it, in the memory of the data. */
static int carry_both(const struct check *c)
{
    enum { SUMS = 3, LIMBS = SUMS * HSTEP_EXACT_LIMBS };
    int64_t limbs[LIMBS], carried[SIDES][LIMBS];
    for (int i = 0; i < LIMBS; i++)
        limbs[i] = (int64_t)(i + 1) * (i % 2 ? INT64_C(0x123456789abc) : -INT64_C(0x23456789abcd));
    for (int i = 0; i < SIDES; i++) {
        const struct side *s = &c->side[i];
        int error = halfstep_device_copy(s->o, s->data, limbs, sizeof limbs);
        if (!error) error = s->o->device->carry(&s->o->context, (int64_t *)(void *)s->data, SUMS);
        if (!error) error = halfstep_device_copy(s->o, carried[i], s->data, sizeof limbs);
        if (error) return fail_on(c, error);
    }
    return memcmp(carried[DEVICE], carried[HOST], sizeof limbs) ? fail_bits(c, 0, "carries of sums") : HALFSTEP_OK;
}

/* Makes every third tensor's gradient a sum of two, and hides that of every seventh. */
static int vary(struct check *c, int hide)
{
    int error = HALFSTEP_OK;
    for (int i = 0; !error && i < c->tensors; i += 3) error = accumulate_both(c, i);
    for (int s = 0; s < SIDES; s++)
        for (int i = 0; i < c->tensors; i += 7)
            c->side[s].gradients[i] = hide ? NULL : c->side[s].data + c->gradient[i];
    return error;
}

/* Makes the last gradient of the first fp32 tensor not finite, so that the step is refused. */
static int spoil(const struct check *c)
{
    static const uint32_t infinity = 0x7f800000;
    int i = 0;
    while (i < c->tensors - 1 && c->side[HOST].o->tensors[i].slot[HALFSTEP_SLOT_GRADIENT].format != HSTEP_FORMAT_f32)
        i++;
    for (int s = 0; s < SIDES; s++) {
        int error = halfstep_device_copy(c->side[s].o, c->side[s].data + c->gradient[i], &infinity, sizeof infinity);
        if (error) return fail_on(c, error);
    }
    return HALFSTEP_OK;
}

/* Makes the calls of a check: steps, a refused one, gradient release with micro-steps; then every slot is read and
 * written, and one more step made. The step without some gradients comes after both kinds of verdict were right,
 * because a device that skips no tensor would read addresses of NULL. */
static int make_calls(struct check *c, int rewrite)
{
    enum { STEPS = 5, REFUSED = 1, HIDING = 2, RELEASE = 3, LAST = STEPS - 1 };
    int error = HALFSTEP_OK;
    for (int step = 0; !error && step < STEPS; step++) {
        if (step == LAST)
            for (int i = 0; !error && rewrite && i < c->tensors; i += 2)
                for (int slot = HALFSTEP_SLOT_WEIGHT; !error && slot < HSTEP_SLOTS; slot++)
                    if (slot != HALFSTEP_SLOT_GRADIENT) error = rewrite_both(c, i, slot);
        if (error || (error = send_gradients(c, step))) return error;
        for (int s = 0; s < SIDES; s++) hstep_set_case_step(c->side[s].o, step);
        if (step == REFUSED) error = spoil(c);
        else error = vary(c, step == HIDING);
        if (!error && step < RELEASE) error = call_both(c, HALFSTEP_CALL_STEP, -1, 0);
        for (int i = step; !error && step >= RELEASE && i < c->tensors; i += rewrite ? 3 : 7) {
            if (step == RELEASE) error = call_both(c, HALFSTEP_CALL_TENSOR, i, 1);
            if (!error) error = call_both(c, HALFSTEP_CALL_TENSOR, i, 0);
        }
        if (!error && step >= RELEASE) error = call_both(c, HALFSTEP_CALL_ROUND, -1, 0);
        if (!error) error = agree_at_last(c);
    }
    for (int i = 0; !error && i < c->tensors; i += 2) error = saturated_both(c, i);
    if (error || (error = compare(c))) return error;
    return rewrite ? carry_both(c) : HALFSTEP_OK;
}

enum { WITH_PARTS = 1 }; /* the variant, one for each generator, whose tensors are parts */

static int check_with(const halfstep_optimizer *o, int tensor, int variant)
{
    struct check c = {.asking = o, .parts = variant == WITH_PARTS};
    snprintf(c.device, sizeof c.device, "%s%s%s", o->device->name, *o->ordinal ? ":" : "", o->ordinal);
    const char *generator = halfstep_choice_value("generator", variant);
    int error = open_side(&c, HOST, NULL, generator, tensor);
    if (!error && (error = open_side(&c, DEVICE, c.device, generator, tensor))) fail_on(&c, error);
    if (!error) error = place_data(&c);
    if (!error) error = bind_side(&c, HOST);
    if (!error && (error = bind_side(&c, DEVICE))) fail_on(&c, error);
    const uint64_t most = c.data_bytes > c.state_bytes ? c.data_bytes : c.state_bytes;
    if (!error && !(c.copy = malloc((size_t)most + 1))) error = HALFSTEP_ERROR_MEMORY;
    for (int i = 0; !error && i < c.tensors; i++)
        hstep_fill_case(c.side[HOST].data + c.weight[i], c.side[HOST].o, i, HALFSTEP_SLOT_WEIGHT, 0);
    if (!error)
        error =
            fail_on(&c, halfstep_device_copy(c.side[DEVICE].o, c.side[DEVICE].data, c.side[HOST].data, c.data_bytes));
    if (!error) error = make_calls(&c, variant == 0);
    close_check(&c);
    return error;
}

int hstep_check_device(const halfstep_optimizer *o, int tensor)
{
    const int row = tensor < 0 ? -1 : o->tensors[tensor].fused[HSTEP_WAY_PLAIN];
    int trusted = o->device->trusted(&o->context, row), error = HALFSTEP_OK;
    if (trusted) return trusted < 0 ? hstep_why(o, trusted) : HALFSTEP_OK;
    if (o->device->records(&o->context))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                          "device code is checked before its first use, which a capture does not allow; make a step "
                          "outside of captures first");
    for (int variant = 0; !error && variant < (tensor < 0 ? 3 : 2); variant++) error = check_with(o, tensor, variant);
    if (!error) o->device->trust(&o->context, row);
    return error;
}

int hstep_check_fused(const halfstep_optimizer *o)
{
    int error = HALFSTEP_OK;
    for (int i = 0; !error && o->device->trusted && !o->checking && i < o->n_tensors; i++)
        if (o->tensors[i].fused[HSTEP_WAY_PLAIN] >= 0) error = hstep_check_device(o, i);
    return error;
}
