/* The device side of device.h: what device/host does with tasks and tiles, warp by warp and bit for bit. One source in
 * what C and CUDA's C++ share: device code, and compiled as C the kernels of the emulation (tests/cuda).
 *
 * Over 500 lines because the kernels share the walk over chunks and what a warp holds of them. */
#include "vec/cuda.h"

#if defined(__clang__) && !defined(HSTEP_CUDA_EMULATED)
#pragma clang force_cuda_host_device begin
#endif

#include "device/cuda/code/kernels.h"
#include "device/cuda/code/lane.h"
#include "device/cuda/code/fused.h"
#include "device/cuda/code/matrix.h"
#include "device/cuda/code/rules.h"
#include "base/squares.h"

#ifndef HSTEP_CUDA_EMULATED
/* What decides is the same source as on a host. */
#include "decide/decide.c"
#include "tables/layout.c"
#include "decide/prepare.c"
#include "base/schedule.c"
#include "tables/tables.c"
#ifdef __clang__
#pragma clang force_cuda_host_device end
#endif
#endif

/* ---- What a pass is about ---- */

CUDA_DEVICE void start_work(const struct hstep_call *call, int tensor, int pass, struct work *w)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const struct hstep_update *u = &call->plan.updates[tensor];
    w->t = t;
    w->u = u;
    w->pass = pass;
    w->mean = 0.0f;
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        w->format[s] = s < t->slots ? t->slot[s].format : HSTEP_FORMAT_NONE;
        w->code[s] = t->slot[s].code;
        w->extra[s] = t->slot[s].extra_bytes ? t->slot[s].extra : NULL;
        w->segment[s] = ~(uint64_t)0;
    }
    /* The matrix passes share out the slots between them; a micro-step leaves out copies of the weight. */
    for (int s = 0; s < t->slots; s++)
        if ((pass == HSTEP_PASS_DIRECTION && s == HALFSTEP_SLOT_WEIGHT && u->l2 == 0.0f) ||
            (pass == HSTEP_PASS_CHANGE && s != HALFSTEP_SLOT_WEIGHT) ||
            (u->micro && (s == HALFSTEP_SLOT_WEIGHT || hstep_slot_role(t, s) == HALFSTEP_ROLE_WEIGHT)))
            w->format[s] = HSTEP_FORMAT_NONE;
    w->code[HALFSTEP_SLOT_WEIGHT] = code_of(call, tensor, HALFSTEP_SLOT_WEIGHT);
    w->code[HALFSTEP_SLOT_GRADIENT] = code_of(call, tensor, HALFSTEP_SLOT_GRADIENT);
    w->format[SLOT_WORK] = HSTEP_FORMAT_NONE;
    w->code[SLOT_WORK] = w->extra[SLOT_WORK] = NULL;
    if (pass == HSTEP_PASS_DIRECTION || pass == HSTEP_PASS_CHANGE) {
        w->format[SLOT_WORK] = HSTEP_FORMAT_f32;
        w->code[SLOT_WORK] = (char *)call->plan.workspace;
    }
}

/* Weight, effective gradient and states of the lane's places; `scratch` keeps what is stored. */
CUDA_DEVICE void load(const struct work *w, const struct lane *l, struct scratch *scratch, struct values *v)
{
    const struct hstep_update *u = w->u;
    for (int i = 0; i < 2; i++) v->weight[i] = v->gradient[i] = v->change[i] = v_set(0.0f);
    if (w->format[0] >= 0) {
        fetch_slot(w, 0, l, &scratch[0]);
        decode(w->format[0], 0, &scratch[0], v->weight);
    }
    if (w->format[1] >= 0) {
        fetch_slot(w, 1, l, &scratch[1]);
        decode(w->format[1], 0, &scratch[1], v->gradient);
        for (int i = 0; i < 2; i++) {
            vf x = v_mul(v->gradient[i], v_set(u->gradient_scale));
            if (w->mean != 0.0f) x = v_sub(x, v_set(w->mean));
            if (u->l2 != 0.0f) x = v_add(x, v_mul(v_set(u->l2), v->weight[i]));
            v->gradient[i] = x;
        }
    }
    for (int j = 0; j < HALFSTEP_MAX_STATES; j++) {
        int s = HALFSTEP_SLOT_STATE + j, from = u->weight_to_slot >> s & 1 ? HALFSTEP_SLOT_WEIGHT : s;
        v->state[j][0] = v->state[j][1] = v_set(0.0f);
        if (w->format[s] < 0) continue;
        fetch_slot(w, s, l, &scratch[s]);
        decode(w->format[s], w->t->slot[s].nonneg, &scratch[from], v->state[j]);
        if (w->t->slot[s].root) scale_pair(v->state[j], w->t->slot[s].grid);
    }
}

/* Mean of a whole row of the raw gradient, times what the group takes of it; the same in all lanes. */
CUDA_DEVICE float row_mean(const struct work *w, struct exchange *e, int64_t row_start)
{
    int64_t n = w->t->n_columns, total[HSTEP_EXACT_LIMBS];
    for (int k = 0; k < HSTEP_EXACT_LIMBS; k++) total[k] = 0;
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        struct lane l = lane_at(row_start + i, 0, 0, least(HSTEP_TILE, n - i), 0);
        struct scratch r;
        vf x[2];
        fetch_slot(w, HALFSTEP_SLOT_GRADIENT, &l, &r);
        decode(w->format[HALFSTEP_SLOT_GRADIENT], 0, &r, x);
        hstep_exact_add(total, warp_total(e, x, 0));
    }
    return (float)(w->u->centralize * (hstep_exact_round(total) / (double)n));
}

/* ---- update ---- */

CUDA_DEVICE int is_of_tensor(int format) { return hstep_formats[format].geometry == HALFSTEP_GEOMETRY_TENSOR; }

/* Back to the slot; the scale of a whole tensor is written once, after its update. */
CUDA_DEVICE void put_slot(const struct work *w, int s, const struct lane *l, const struct scratch *r)
{
    put(w->t, w->format[s], w->code[s], is_of_tensor(w->format[s]) ? NULL : w->extra[s], l, r);
}

CUDA_DEVICE void update_tile(struct work *w, const struct lane *l)
{
    const struct hstep_update *u = w->u;
    const struct hstep_tensor *t = w->t;
    struct scratch scratch[WORK_SLOTS];
    const struct constants constants = constants_of(u->k);
    struct values v;
    vf old[HALFSTEP_MAX_STATES][2];
    load(w, l, scratch, &v);
    if (w->pass == HSTEP_PASS_CHANGE) {
        fetch_slot(w, SLOT_WORK, l, &scratch[SLOT_WORK]);
        decode(HSTEP_FORMAT_f32, 0, &scratch[SLOT_WORK], v.gradient);
        step_change(t->rule, constants.k, &v);
        apply(w->format[0], v.weight, v.change, &scratch[0], slot_words(w, 0, l->index));
        put_slot(w, 0, l, &scratch[0]);
        return;
    }
    for (int j = 0; j < HALFSTEP_MAX_STATES; j++)
        for (int i = 0; i < 2; i++) old[j][i] = v.state[j][i];
    if (w->pass == HSTEP_PASS_DIRECTION) {
        step_direction(t->rule, u->mode & RULE_CLAMP, constants.k, &v);
        clear_scratch(&scratch[SLOT_WORK]);
        encode(HSTEP_FORMAT_f32, 0, v.change, &scratch[SLOT_WORK], nearest_words(), 0, 1.0f);
        put_slot(w, SLOT_WORK, l, &scratch[SLOT_WORK]);
    } else {
        step_rule(t->rule, u->mode, constants.k, &v);
        for (int i = 0; t->cautious && i < 2; i++)
            v.change[i] = cautious_change(v.change[i], v.gradient[i], v.weight[i], v_set(u->cautious), v_set(u->decay));
        for (int s = HALFSTEP_SLOT_STATE; s < t->slots; s++)
            if (u->weight_to_slot >> s & 1 && w->format[s] >= 0) scratch[s] = scratch[0];
        if (!u->zero_lr && !u->micro) apply(w->format[0], v.weight, v.change, &scratch[0], slot_words(w, 0, l->index));
    }
    for (int s = HALFSTEP_SLOT_STATE; s < t->slots; s++) {
        int j = s - HALFSTEP_SLOT_STATE;
        if (w->format[s] < 0 || t->slot[s].extent != HALFSTEP_EXTENT_ELEMENTS) continue;
        const vi words = slot_words(w, s, l->index);
        if (hstep_slot_role(t, s) != HALFSTEP_ROLE_WEIGHT) {
            if (is_of_tensor(w->format[s])) memcpy(scratch[s].extra, &u->scale[s], 4);
            encode(w->format[s], t->slot[s].nonneg, v.state[j], &scratch[s], words, 1, u->onto[s]);
        } else if (!u->zero_lr) {
            apply(w->format[s], old[j], v.state[j], &scratch[s], words);
            if (u->slot_to_weight >> s & 1) scratch[0] = scratch[s];
        }
        put_slot(w, s, l, &scratch[s]);
    }
    if (w->pass == HSTEP_PASS_UPDATE && w->format[0] >= 0 && !u->zero_lr) put_slot(w, 0, l, &scratch[0]);
}

/* The warps take tiles in turn; `turn` counts them through the chunk. */
CUDA_DEVICE void update_stretch(struct work *w, struct exchange *e, int64_t element, uint64_t index, int64_t n,
                                int64_t *turn, int64_t row_start)
{
    int64_t lead = hstep_unit_lead(w->t, element, index);
    int known = row_start < 0;
    for (int64_t tile = 0; tile < tiles_of(lead, n); tile++) {
        if ((*turn)++ % WARPS != warp_of_thread()) continue;
        if (!known) w->mean = row_mean(w, e, row_start);
        known = 1;
        struct lane l = lane_at(element, index, lead, n, tile);
        if (!w->fused || !is_whole(&l)) update_tile(w, &l);
    }
}

/* Every row has a mean of its own, so rows that touch in memory are taken apart. */
CUDA_DEVICE void update_rows(struct work *w, struct exchange *e, int64_t element, uint64_t index, int64_t n,
                             int64_t *turn)
{
    while (n > 0) {
        int64_t column = element % w->t->n_columns, count = least(n, w->t->n_columns - column);
        update_stretch(w, e, element, index, count, turn, element - column);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

/* Whether the fused kernel takes the whole chunk: it begins and ends with a whole tile in each of its runs. */
CUDA_DEVICE int is_whole_chunk(const struct hstep_tensor *t, const struct hstep_chunk *c)
{
    const uint64_t first = t->index0 + (uint64_t)c->offset,
                   stride = c->run + c->runs > 1 ? (uint64_t)t->index_stride : 0;
    return first % HSTEP_GROUP == 0 && stride % HSTEP_GROUP == 0 && c->length % HSTEP_TILE == 0;
}

CUDA_DEVICE void update_chunk(const struct hstep_call *call, const struct hstep_chunk *c, int pass, struct exchange *e)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const struct hstep_update *u = &call->plan.updates[c->tensor];
    const int fused = pass == HSTEP_PASS_UPDATE && is_fused(call, c->tensor);
    struct work w;
    int64_t turn = 0;
    if (u->skip || (t->matrix && pass == HSTEP_PASS_UPDATE) || (u->zero_lr && pass == HSTEP_PASS_CHANGE)) return;
    if (fused && is_whole_chunk(t, c)) return;
    start_work(call, c->tensor, pass, &w);
    w.fused = fused;
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        int64_t element = run * t->run_length + c->offset;
        uint64_t index = t->index0 + (uint64_t)(run * t->index_stride) + (uint64_t)c->offset;
        if (u->centralize != 0.0 && w.format[HALFSTEP_SLOT_GRADIENT] >= 0)
            update_rows(&w, e, element, index, c->length, &turn);
        else update_stretch(&w, e, element, index, c->length, &turn, -1);
    }
}

/* Numbers first .. end - 1 of chunks or tensors. */
struct span {
    int64_t first, end;
};

/* The chunks of tensors first .. first + n - 1. */
CUDA_DEVICE struct span span_of(const struct hstep_call *call, int first, int n)
{
    struct span span = {0, 0};
    if (!n) return span;
    const struct hstep_tensor *t = &call->plan.tensors[first], *last = t + n - 1;
    span.first = t->first_chunk;
    span.end = last->first_chunk + last->chunks;
    return span;
}

CUDA_KERNEL void halfstep_cuda_update(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct exchange e[WARPS];
    struct span span = span_of(&call, what.first, what.n);
    for (int64_t i = span.first + CUDA_BLOCK; i < span.end; i += CUDA_BLOCKS)
        update_chunk(&call, &call.plan.chunks[i], what.pass, &e[warp_of_thread()]);
}

/* ---- scan ---- */

/* The main stream of a format alone, as a format: the first row that stores the same codes and nothing beside them. */
CUDA_DEVICE int plain_format(int format)
{
    if (!hstep_formats[format].extra_bits) return format;
    for (int i = 0; i < HSTEP_FORMATS; i++)
        if (!hstep_formats[i].extra_bits && !strcmp(hstep_formats[i].code_dtype, hstep_formats[format].code_dtype))
            return i;
    return format;
}

/* What a lane has found out of bounds. */
enum { SCAN_NONFINITE = 1, SCAN_TOO_LARGE = 2 };

/* largest: a pattern of a magnitude. */
CUDA_DEVICE int out_of_bounds(uint32_t largest, double limit)
{
    const double x = (double)hstep_number(largest);
    return x < limit ? 0 : is_finite(x) ? SCAN_TOO_LARGE : SCAN_NONFINITE;
}

/* How many of a stretch's tiles load_aligned() can take: whole ones, of codes that are aligned. */
CUDA_DEVICE int64_t aligned_tiles(int format, const char *code, int64_t length)
{
    return (uintptr_t)code % 16 == 0 && is_fused_gradient(format) ? length / HSTEP_TILE : 0;
}

/* Of a stretch of up to 256 elements: what the lane has of them, 0 elsewhere; returns what of it is out of bounds. */
CUDA_DEVICE int scan_tile(const struct hstep_tensor *t, int format, const char *gradient, int64_t element,
                          int64_t count, double limit, struct lane *l, vf *x)
{
    struct scratch r;
    *l = lane_at(element, 0, 0, count, 0);
    fetch(t, format, gradient, NULL, l, &r);
    decode(format, 0, &r, x);
    return out_of_bounds(hstep_cuda_largest(x[0], x[1]), limit);
}

/* Of a run of a chunk, whose squares are added as well, in chunks of columns. */
CUDA_DEVICE int scan_and_sum(const struct hstep_call *call, const struct hstep_tensor *t, int format,
                             const char *gradient, int64_t run, int64_t offset, int64_t length, double limit,
                             struct exchange *e, int64_t *turn, struct spread *sum)
{
    const int64_t row = t->index_stride;
    const int bits = hstep_formats[format].code_bits;
    const uint64_t start = t->index0 + (uint64_t)(run * t->index_stride);
    const int singly = row < HSTEP_GROUP;
    int bad = 0;
    hstep_scan_bounds(t, start, &offset, &length);
    while (length > 0) {
        int64_t count = HSTEP_TILE;
        if (!singly) {
            int64_t column = (int64_t)((start + (uint64_t)offset) % (uint64_t)row);
            count = least(count - column % HSTEP_TILE, row - column);
        }
        count = least(count, length);
        if ((*turn)++ % WARPS == warp_of_thread()) {
            const int64_t element = run * t->run_length + offset;
            const char *code = gradient + element * bits / 8;
            vf x[2];
            if (!singly && aligned_tiles(format, code, count)) {
                load_aligned(format, code + lane_of_thread() * PLACES * bits / 8, x);
                bad |= out_of_bounds(hstep_cuda_largest(x[0], x[1]), limit);
            } else {
                struct lane l;
                bad |= scan_tile(t, format, gradient, element, count, limit, &l, x);
                for (int i = l.first; singly && i < l.last; i++) {
                    const double one = (double)PLACE(x, i);
                    if (is_finite(one)) add_shared(call->statistics, one * one);
                }
            }
            /* Chunks that are not finite are left out, and no others, so that no cut matters. */
            if (!singly) {
                const double total = warp_total(e, x, 1);
                if (is_finite(total)) spread_add(sum, total);
            }
        }
        offset += count;
        length -= count;
    }
    return bad;
}

/* The largest magnitude that the lane has of a warp's tiles: `tile`, and every WARPS-th up to `end`. Several are loaded
 * before the first is looked at, so that memory has enough to do. */
enum { SCAN_AHEAD = 4 };
V_OP uint32_t largest_of(const int format, const char *code, int64_t tile, int64_t end)
{
    const int bits = columns_of(format).bits;
    const char *mine = code + lane_of_thread() * PLACES * bits / 8;
    uint32_t largest = 0;
    for (; tile < end; tile += SCAN_AHEAD * WARPS) {
        struct scratch r[SCAN_AHEAD] = {{{0}, {0}}};
        CUDA_UNROLL for (int i = 0; i < SCAN_AHEAD; i++)
        {
            const int64_t at = tile + i * WARPS < end ? tile + i * WARPS : tile;
            copy_codes(r[i].code, mine + at * HSTEP_TILE * bits / 8, PLACES * bits / 8);
        }
        CUDA_UNROLL for (int i = 0; i < SCAN_AHEAD; i++)
        {
            vf x[2];
            load_any(format, 0, r[i].code, NULL, 0, &x[0], &x[1]);
            const uint32_t one = hstep_cuda_largest(x[0], x[1]);
            largest = one > largest ? one : largest;
        }
    }
    return largest;
}

CUDA_DEVICE int scan_run(const struct hstep_tensor *t, int format, const char *gradient, int64_t run, int64_t offset,
                         int64_t length, double limit)
{
    const int64_t element = run * t->run_length + offset, first = (warp_of_thread() + run) % WARPS;
    const char *code = gradient + element * hstep_formats[format].code_bits / 8;
    const int64_t whole = aligned_tiles(format, code, length);
    uint32_t largest = 0;
    switch (whole ? format : HSTEP_FORMAT_NONE) {
#define GRADIENT(fn) \
    case HSTEP_FORMAT_##fn: largest = largest_of(HSTEP_FORMAT_##fn, code, first, whole); break;
        HSTEP_CUDA_FUSED_GRADIENTS(GRADIENT)
#undef GRADIENT
    default: break;
    }
    int bad = out_of_bounds(largest, limit);
    for (int64_t tile = first; tile * HSTEP_TILE < length; tile += WARPS) {
        struct lane l;
        vf x[2];
        if (tile < whole) continue;
        const int64_t at = tile * HSTEP_TILE;
        bad |= scan_tile(t, format, gradient, element + at, least(HSTEP_TILE, length - at), limit, &l, x);
    }
    return bad;
}

/* Lanes add where none has been seen to add before, so that a few of them wait for each other at most. */
CUDA_DEVICE void raise_flag(int64_t *flag, int bad)
{
    const int64_t seen = *flag;
    if (bad & SCAN_NONFINITE && !hstep_is_nonfinite(seen)) HSTEP_ADD_ATOMIC(flag, HSTEP_FLAG_NONFINITE);
    if (bad & SCAN_TOO_LARGE && seen < HSTEP_FLAG_TOO_LARGE) HSTEP_ADD_ATOMIC(flag, HSTEP_FLAG_TOO_LARGE);
}

CUDA_DEVICE void scan_chunk(const struct hstep_call *call, const struct hstep_chunk *c, struct exchange *e,
                            struct spread *sum)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const char *gradient = (const char *)call->gradients[c->tensor - call->first];
    if (!gradient) return;
    int raw = hstep_rules[t->rule].kind == HSTEP_RAW_GRADIENT, summed = hstep_is_clipped(call) && !raw;
    int format = plain_format(t->slot[HALFSTEP_SLOT_GRADIENT].format), bad = 0;
    double limit = hstep_gradient_limit(call, raw);
    int64_t turn = 0;
    for (int64_t run = c->run; run < c->run + c->runs; run++)
        bad |= summed ? scan_and_sum(call, t, format, gradient, run, c->offset, c->length, limit, e, &turn, sum)
                      : scan_run(t, format, gradient, run, c->offset, c->length, limit);
    if (bad && call->scan != HSTEP_SCAN_NONE)
        raise_flag(&call->statistics[hstep_flags_offset() + c->tensor - call->first], bad);
}

CUDA_KERNEL_SHARED(3) void halfstep_cuda_scan(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct exchange e[WARPS];
    struct span span = span_of(&call, call.first, call.n);
    (void)what;
    struct spread sum;
    if (call.scan == HSTEP_SCAN_NONE && !hstep_is_clipped(&call)) return;
    spread_clear(&sum);
    for (int64_t i = span.first + CUDA_BLOCK; i < span.end; i += CUDA_BLOCKS)
        scan_chunk(&call, &call.plan.chunks[i], &e[warp_of_thread()], &sum);
    spread_flush(&sum, call.statistics);
}

/* ---- sum ---- */

/* What the update will see of the lane's places: values to be summed. pair: of vectors; -1: of the tensor's sums. */
CUDA_DEVICE void values_of(const struct work *w, int pair, const struct lane *l, vf (*x)[2])
{
    int rule = w->t->rule, count = hstep_rules[rule].norms, clamp = w->u->mode & RULE_CLAMP;
    const struct constants constants = constants_of(w->u->k);
    struct scratch scratch[WORK_SLOTS];
    struct values v;
    load(w, l, scratch, &v);
    if (pair >= 0) {
        step_cross(rule, pair, clamp, constants.k, &v, x[0]);
        return;
    }
    if (w->t->matrix) step_direction(rule, clamp, constants.k, &v);
    else if (count) step_norms(rule, clamp, constants.k, &v, x);
    else step_rule(rule, w->u->mode, constants.k, &v);
    for (int s = HALFSTEP_SLOT_STATE; s < w->t->slots; s++) {
        if (w->t->slot[s].format < 0 || !is_of_tensor(w->t->slot[s].format)) continue;
        for (int i = 0; i < 2; i++)
            x[count][i] = norm_value(w->t->slot[s].format, w->t->slot[s].nonneg, v.state[s - HALFSTEP_SLOT_STATE][i]);
        count++;
    }
    for (int i = 0; w->t->cautious && i < 2; i++)
        x[count][i] = v_select(agrees(v.change[i], v.gradient[i]), v_set(1.0f), v_set(0.0f));
}

/* `count` elements from `element` on, all in one chunk of columns. */
CUDA_DEVICE void add_chunk(const struct work *w, struct exchange *e, int64_t element, uint64_t index, int64_t count,
                           int singly, int64_t *limbs, struct spread *sums)
{
    const struct hstep_rule *rule = &hstep_rules[w->t->rule];
    vf x[HSTEP_MAX_SUMS][2];
    struct lane l = lane_at(element, index, hstep_unit_lead(w->t, element, index), count, 0);
    values_of(w, -1, &l, x);
    uint64_t number = 0; /* of place 0, which need not be held */
    if (w->u->every > 1) number = hstep_number_of(w->t, element) + (uint64_t)(l.element - element);
    for (int j = 0; j < w->t->sums; j++) {
        int64_t *sum = limbs + (int64_t)j * HSTEP_EXACT_LIMBS;
        int squared = !rule->totals || j >= rule->norms, thin = !squared && w->u->every > 1;
        for (int i = 0; i < PLACES; i++) {
            const double one = (double)PLACE(x[j], i);
            if (i < l.first || i >= l.last) PLACE(x[j], i) = 0.0f;
            else if (thin && (number + (uint64_t)i) % (uint64_t)w->u->every) PLACE(x[j], i) = 0.0f;
            else if (singly && is_finite(one)) add_shared(sum, one * (squared ? one : 1.0));
        }
        if (singly) continue;
        double total = warp_total(e, x[j], squared);
        if (is_finite(total)) spread_add(&sums[j], total);
    }
}

CUDA_DEVICE void sum_chunk(const struct hstep_call *call, const struct hstep_chunk *c, struct exchange *e)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    if (!t->sums || !hstep_is_summed(t, &call->plan.updates[c->tensor])) return;
    int64_t *total = call->statistics + hstep_sum_offset(call, c->tensor);
    int64_t row = t->index_stride, mean_of = -1, turn = 0;
    int singly = row < HSTEP_GROUP;
    struct work w;
    struct spread sums[HSTEP_MAX_SUMS];
    for (int j = 0; j < t->sums; j++) spread_clear(&sums[j]);
    start_work(call, c->tensor, HSTEP_PASS_SUMS, &w);
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        uint64_t start = t->index0 + (uint64_t)(run * t->index_stride);
        int64_t offset = c->offset, length = c->length;
        hstep_scan_bounds(t, start, &offset, &length);
        while (length > 0) {
            int64_t element = run * t->run_length + offset, count = HSTEP_TILE, row_start = -1;
            uint64_t index = start + (uint64_t)offset;
            if (singly) {
                count -= hstep_unit_lead(t, element, index);
            } else {
                int64_t column = (int64_t)(index % (uint64_t)row);
                count = least(count - column % HSTEP_TILE, row - column);
            }
            if (w.u->centralize != 0.0) {
                row_start = element - element % t->n_columns;
                count = least(count, t->n_columns - element % t->n_columns);
            }
            count = least(count, length);
            if (turn++ % WARPS == warp_of_thread()) {
                if (row_start != mean_of) w.mean = row_mean(&w, e, row_start);
                mean_of = row_start;
                add_chunk(&w, e, element, index, count, singly, total, sums);
            }
            offset += count;
            length -= count;
        }
    }
    for (int j = 0; j < t->sums; j++) spread_flush(&sums[j], total + (int64_t)j * HSTEP_EXACT_LIMBS);
}

CUDA_KERNEL void halfstep_cuda_sum(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct exchange e[WARPS];
    struct span span = span_of(&call, what.first, what.n);
    for (int64_t i = span.first + CUDA_BLOCK; i < span.end; i += CUDA_BLOCKS)
        sum_chunk(&call, &call.plan.chunks[i], &e[warp_of_thread()]);
}

/* ---- cross ---- */

/* The values of a chunk of a row, added to those of the rows before it, and their sum. A chunk that begins within a
 * unit is taken in parts. */
CUDA_DEVICE double cross_chunk(struct work *w, struct exchange *e, float *chunk, int pair, int64_t row, int64_t column,
                               double *columns)
{
    const struct hstep_tensor *t = w->t;
    int64_t count = least(HSTEP_TILE, t->row_length - column), element = row * t->row_length + column;
    uint64_t index = t->index0 + (uint64_t)(t->dense ? element : row * t->index_stride + column);
    for (int64_t done = 0; done < count;) {
        int64_t lead = hstep_unit_lead(t, element + done, index + (uint64_t)done);
        int64_t some = least(HSTEP_TILE - lead, count - done);
        struct lane l = lane_at(element + done, index + (uint64_t)done, lead, some, 0);
        vf x[HSTEP_MAX_SUMS][2];
        values_of(w, pair, &l, x);
        for (int i = l.first; i < l.last; i++) chunk[done - lead + lane_of_thread() * PLACES + i] = PLACE(x[0], i);
        done += some;
    }
    CUDA_WARP_BARRIER();
    vf mine[2];
    for (int i = 0; i < PLACES; i++) {
        int64_t at = lane_of_thread() * PLACES + i;
        PLACE(mine, i) = at < count ? chunk[at] : 0.0f;
        if (at < count) columns[column + at] += (double)chunk[at];
    }
    return warp_total(e, mine, 0);
}

/* A warp has a chunk of columns of a block of rows. */
CUDA_DEVICE void cross_block(struct work *w, struct exchange *e, float *chunk, int pair,
                             const struct hstep_cuda_sums *s, int64_t i, double *sums)
{
    const struct hstep_tensor *t = w->t;
    int64_t block = i / s->chunks, part = i % s->chunks, column = part * HSTEP_TILE,
            first = block * HSTEP_CUDA_CROSS_ROWS;
    double *columns = sums + s->columns + block * t->row_length;
    for (int64_t j = lane_of_thread(); j < least(HSTEP_TILE, t->row_length - column); j += LANES)
        columns[column + j] = 0.0;
    CUDA_WARP_BARRIER();
    for (int64_t row = first; row < least(first + HSTEP_CUDA_CROSS_ROWS, t->rows); row++) {
        if (w->u->centralize != 0.0) w->mean = row_mean(w, e, row * t->row_length);
        double sum = cross_chunk(w, e, chunk, pair, row, column, columns);
        if (lane_of_thread() == 0) sums[s->parts + row * s->chunks + part] = sum;
    }
}

/* Sums of whole rows, from those of their chunks, and of whole columns. */
CUDA_DEVICE void cross_ends(const struct hstep_tensor *t, const struct hstep_cuda_sums *s, double *sums)
{
    for (int64_t i = thread_of_grid(); i < t->row_length; i += threads_of_grid())
        for (int64_t block = 1; block < s->blocks; block++)
            sums[s->columns + i] += sums[s->columns + block * t->row_length + i];
    for (int64_t row = thread_of_grid(); row < t->rows; row += threads_of_grid()) {
        int64_t limbs[HSTEP_EXACT_LIMBS];
        double odd = 0.0; /* what is not finite has no place in the limbs */
        for (int k = 0; k < HSTEP_EXACT_LIMBS; k++) limbs[k] = 0;
        for (int64_t part = 0; part < s->chunks; part++) {
            double sum = sums[s->parts + row * s->chunks + part];
            if (is_finite(sum)) hstep_exact_add(limbs, sum);
            else odd += sum;
        }
        sums[row] = odd != 0.0 ? odd : hstep_exact_round(limbs);
    }
}

/* The slot of a pair's vector over rows, or over columns. */
CUDA_DEVICE struct hstep_slot *vector_of(struct hstep_tensor *t, int pair, int extent)
{
    int s = HALFSTEP_SLOT_STATE;
    while (t->slot[s].extent != extent || pair--) s++;
    return &t->slot[s];
}

/* The new numbers of a vector from the sums of what each is over; adds the sum of them, each chunk of 256 rounded. */
CUDA_DEVICE void renew(const struct hstep_call *call, int tensor, int pair, struct exchange *e, struct hstep_slot *slot,
                       const double *sums, int64_t n, int64_t of, int64_t *limbs)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const struct constants constants = constants_of(call->plan.updates[tensor].k);
    for (int64_t i = warp_of_grid() * HSTEP_TILE; i < n; i += warps_of_grid() * HSTEP_TILE) {
        struct scratch r;
        vf x[2], mean[2];
        int64_t at = i + lane_of_thread() * PLACES;
        int count = within(n - at, PLACES);
        clear_scratch(&r);
        copy_bytes(r.code, slot->code + at * 4, count * 4);
        decode(HSTEP_FORMAT_f32, 1, &r, x);
        for (int j = 0; j < PLACES; j++) PLACE(mean, j) = j < count ? (float)(sums[at + j] / (double)of) : 0.0f;
        for (int j = 0; j < 2; j++) x[j] = step_vector(t->rule, pair, constants.k, x[j], mean[j]);
        encode(HSTEP_FORMAT_f32, 1, x, &r, nearest_words(), 1, 1.0f);
        copy_bytes(slot->code + at * 4, r.code, count * 4);
        decode(HSTEP_FORMAT_f32, 0, &r, x);
        for (int j = count; j < PLACES; j++) PLACE(x, j) = 0.0f;
        double sum = warp_total(e, x, 0);
        if (is_finite(sum) && lane_of_thread() == 0) add_shared(limbs, sum);
    }
}

CUDA_KERNEL void halfstep_cuda_cross(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct exchange exchanges[WARPS];
    CUDA_SHARED float chunks[WARPS][HSTEP_TILE];
    struct exchange *e = &exchanges[warp_of_thread()];
    struct hstep_tensor *t = &call.plan.tensors[what.tensor];
    const struct hstep_cuda_sums s = hstep_cuda_sums(t->rows, t->row_length);
    double *sums = (double *)(void *)call.plan.workspace;
    int64_t *limbs = (int64_t *)(void *)(sums + s.limbs);
    struct work w;
    if (call.plan.updates[what.tensor].skip) return;
    switch (what.pass) {
    case HSTEP_CUDA_ROWS:
        start_work(&call, what.tensor, HSTEP_PASS_SUMS, &w);
        for (int64_t i = warp_of_grid(); i < s.blocks * s.chunks; i += warps_of_grid())
            cross_block(&w, e, chunks[warp_of_thread()], what.pair, &s, i, sums);
        for (int64_t i = thread_of_grid(); i < 2 * HSTEP_EXACT_LIMBS; i += threads_of_grid()) limbs[i] = 0;
        break;
    case HSTEP_CUDA_COLUMNS: cross_ends(t, &s, sums); break;
    case HSTEP_CUDA_VECTORS:
        renew(&call, what.tensor, what.pair, e, vector_of(t, what.pair, HALFSTEP_EXTENT_COLUMNS), sums + s.columns,
              t->row_length, t->rows, limbs);
        renew(&call, what.tensor, what.pair, e, vector_of(t, what.pair, HALFSTEP_EXTENT_ROWS), sums, t->rows,
              t->row_length, limbs + HSTEP_EXACT_LIMBS);
        break;
    default:
        if (thread_of_grid() == 0)
            hstep_decide_mean(&call, what.tensor, what.pair,
                              hstep_exact_round(limbs + HSTEP_EXACT_LIMBS) / (double)t->rows);
    }
}

/* ---- What a single block decides ---- */

/* This thread's share of n tensors. Its tensors follow each other, because neighbours often have the same constants,
 * which are then worked out once. */
CUDA_DEVICE struct span share_of_thread(int first, int n)
{
    const int64_t each = (n + HSTEP_CUDA_THREADS - 1) / HSTEP_CUDA_THREADS;
    return (struct span){first + least(each * CUDA_THREAD, n), first + least(each * (CUDA_THREAD + 1), n)};
}

CUDA_KERNEL void halfstep_cuda_decide(struct hstep_call call, struct hstep_cuda_what what)
{
    const struct span share = share_of_thread(call.first, call.n);
    (void)what;
    if (CUDA_THREAD == 0) hstep_judge(&call);
    CUDA_BARRIER();
    hstep_decide_tensors(&call, (int)share.first, (int)(share.end - share.first));
}

/* Rules with sums over several tensors are left to one thread, which makes each of these sums once. */
CUDA_KERNEL void halfstep_cuda_decide_sums(struct hstep_call call, struct hstep_cuda_what what)
{
    struct span share = share_of_thread(what.first, what.n);
    for (int i = what.first; i < what.first + what.n; i++)
        if (hstep_rules[call.plan.tensors[i].rule].totals)
            share = (struct span){what.first, CUDA_THREAD == 0 ? what.first + what.n : what.first};
    hstep_decide_sums(&call, (int)share.first, (int)(share.end - share.first));
}

CUDA_KERNEL void halfstep_cuda_count(struct hstep_call call, struct hstep_cuda_what what)
{
    const struct span share = share_of_thread(call.first, call.n);
    (void)what;
    hstep_count_tensors(&call, (int)share.first, (int)(share.end - share.first));
    if (CUDA_THREAD == 0) hstep_count_step(&call);
}

CUDA_KERNEL void halfstep_cuda_end_round(struct hstep_call call, struct hstep_cuda_what what)
{
    (void)what;
    if (CUDA_THREAD == 0) hstep_end_round(&call);
}

/* ---- Memory ---- */

CUDA_KERNEL void halfstep_cuda_carry(struct hstep_call call, struct hstep_cuda_what what)
{
    (void)call;
    for (int64_t i = thread_of_grid(); i < what.n; i += threads_of_grid())
        hstep_exact_normalize((int64_t *)what.to + i * HSTEP_EXACT_LIMBS);
}

/* The device's memory is aligned; the end need not be. */
CUDA_KERNEL void halfstep_cuda_zero(struct hstep_call call, struct hstep_cuda_what what)
{
    int64_t bytes = (int64_t)what.bytes, words = (uintptr_t)what.to % 8 ? 0 : bytes / 8;
    (void)call;
    for (int64_t i = thread_of_grid(); i < words; i += threads_of_grid()) ((uint64_t *)what.to)[i] = 0;
    for (int64_t i = words * 8 + thread_of_grid(); i < bytes; i += threads_of_grid()) ((char *)what.to)[i] = 0;
}

/* ---- Sums of gradients outside a step ---- */

CUDA_DEVICE void accumulate_tile(const struct hstep_accumulation *a, const struct lane *l)
{
    struct scratch sum, term;
    struct hstep_key key = a->stream;
    uint64_t segment = ~(uint64_t)0;
    vf x[2], y[2];
    vi words = nearest_words();
    fetch(a->tensor, a->format, a->accumulator, NULL, l, &sum);
    fetch(a->tensor, a->gradient_format, a->gradient, NULL, l, &term);
    decode(a->format, 0, &sum, x);
    decode(a->gradient_format, 0, &term, y);
    for (int i = 0; i < 2; i++) x[i] = v_add(x[i], v_mul(y[i], v_set(a->scale)));
    if (hstep_formats[a->format].stochastic)
        words = random_words(hstep_generator_id(a->generator), &a->stream, l->index, &key, &segment);
    encode(a->format, 0, x, &sum, words, 0, 1.0f);
    put(a->tensor, a->format, a->accumulator, NULL, l, &sum);
}

CUDA_KERNEL void halfstep_cuda_accumulate(struct hstep_accumulation a, struct hstep_cuda_what what)
{
    const struct hstep_tensor *t = a.tensor;
    (void)what;
    for (int64_t i = CUDA_BLOCK; i < t->chunks; i += CUDA_BLOCKS) {
        const struct hstep_chunk *c = &a.chunks[i];
        int64_t turn = 0;
        for (int64_t run = c->run; run < c->run + c->runs; run++) {
            uint64_t index = t->index0 + (uint64_t)(run * t->index_stride) + (uint64_t)c->offset;
            int64_t lead = (int64_t)(index % HSTEP_GROUP);
            for (int64_t tile = 0; tile < tiles_of(lead, c->length); tile++) {
                if (turn++ % WARPS != warp_of_thread()) continue;
                struct lane l = lane_at(run * t->run_length + c->offset, index, lead, c->length, tile);
                accumulate_tile(&a, &l);
            }
        }
    }
}

/* ---- Slots ---- */

CUDA_DEVICE char *extra_of(const struct hstep_slot *s) { return s->extra_bytes ? s->extra : NULL; }

CUDA_KERNEL void halfstep_cuda_read(struct hstep_access a, struct hstep_cuda_what what)
{
    const struct hstep_tensor *t = a.tensor;
    const struct hstep_slot *s = &t->slot[a.slot];
    struct hstep_piece p = {0, 0, 0};
    float *out = (float *)what.to;
    for (int64_t turn = 0; hstep_next_piece(t, s->format, a.first, a.end, &p); turn++) {
        if (turn % warps_of_grid() != warp_of_grid()) continue;
        struct lane l = lane_at(p.element, 0, 0, p.n, 0);
        struct scratch r;
        vf x[2];
        fetch(t, s->format, (const char *)a.data, extra_of(s), &l, &r);
        decode(s->format, s->nonneg, &r, x);
        for (int i = l.first; i < l.last; i++)
            if (l.element + i >= a.first && lane_of_thread() * PLACES + i >= p.skip)
                out[l.element + i - a.first] = s->root ? PLACE(x, i) * s->grid : PLACE(x, i);
    }
}

/* The scale of a state that has one for the whole tensor, from its new values: one warp's work, for chunks are added
 * in their order. */
CUDA_DEVICE float scale_of(const struct hstep_access *a, struct exchange *e, const float *in)
{
    const struct hstep_tensor *t = a->tensor;
    const struct hstep_slot *s = &t->slot[a->slot];
    int64_t n = a->end - a->first;
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        vf x[2];
        for (int j = 0; j < PLACES; j++) {
            int64_t at = i + lane_of_thread() * PLACES + j;
            PLACE(x, j) = at < n ? in[at] : 0.0f;
        }
        for (int j = 0; j < 2; j++) x[j] = norm_value(s->format, s->nonneg, x[j]);
        sum += warp_total(e, x, 1);
    }
    return hstep_tensor_scale(s->format, sqrt(sum), (double)t->rows * (double)t->row_length);
}

CUDA_KERNEL void halfstep_cuda_write(struct hstep_access a, struct hstep_cuda_what what)
{
    CUDA_SHARED struct exchange e[WARPS];
    const struct hstep_tensor *t = a.tensor;
    const struct hstep_slot *s = &t->slot[a.slot];
    const struct hstep_format *f = &hstep_formats[s->format];
    const float *in = (const float *)what.from;
    const float onto = hstep_onto_grid(s->grid, s->root);
    int one_scale = is_of_tensor(s->format) && a.end > a.first;
    struct hstep_piece p = {0, 0, 0};
    /* Where one scale serves all, one warp does all. */
    int64_t warps = one_scale ? 1 : warps_of_grid();
    if (one_scale && warp_of_grid()) return;
    float scale = one_scale ? scale_of(&a, &e[warp_of_thread()], in) : 0.0f;
    for (int64_t turn = 0; hstep_next_piece(t, s->format, a.first, a.end, &p); turn++) {
        if (turn % warps != warp_of_grid()) continue;
        struct lane l = lane_at(p.element, 0, 0, p.n, 0);
        struct scratch r;
        const vf nothing[2] = {v_set(0.0f), v_set(0.0f)};
        const vi words = nearest_words();
        vf x[2];
        clear_scratch(&r);
        for (int i = 0; i < PLACES; i++) PLACE(x, i) = i >= l.first && i < l.last ? in[l.element + i - a.first] : 0.0f;
        for (int i = 0; s->nonneg && i < 2; i++) x[i] = v_abs(x[i]);
        if (one_scale) memcpy(r.extra, &scale, 4);
        /* A weight is written as a step writes it, minus nothing, so that it saturates; with a second stream that would
         * start from what is there. */
        if (a.slot == HALFSTEP_SLOT_WEIGHT && !f->extra_bits) apply(s->format, x, nothing, &r, words);
        else encode(s->format, s->nonneg, x, &r, words, a.slot >= HALFSTEP_SLOT_STATE, onto);
        put(t, s->format, (char *)a.data, extra_of(s), &l, &r);
    }
}

CUDA_KERNEL void halfstep_cuda_saturated(struct hstep_access a, struct hstep_cuda_what what)
{
    const struct hstep_format *f = &hstep_formats[a.tensor->slot[a.slot].format];
    const uint16_t *code = (const uint16_t *)a.data;
    int largest = strcmp(f->code_dtype, "F16") ? 0x7f7f : 0x7bff;
    int64_t sum = 0;
    for (int64_t i = a.first + thread_of_grid(); i < a.end; i += threads_of_grid())
        sum += (code[i] & 0x7fff) == largest;
    if (sum) CUDA_ADD((int64_t *)what.to, sum);
}

#include "device/cuda/code/fused_kernels.h"
