/* The kernels of device.h's entries. They do what device/host does with tasks and tiles, warp by warp and bit for bit.
 * Tests run the PTX that clang makes of them (tests/cuda).
 *
 * Over 500 lines because the kernels share the walk over chunks and what a warp holds of them. */
#include "vec/cuda.h"

#ifdef __clang__
#pragma clang force_cuda_host_device begin
#endif

#include "device/cuda/code/kernels.h"
#include "device/cuda/code/lane.h"
#include "device/cuda/code/fused.h"
#include "device/cuda/code/matrix.h"
#include "device/cuda/code/rows.h"
#include "device/cuda/code/rules.h"
#include "base/squares.h"

/* Decisions are compiled from the same source as on a host. */
#include "decide/decide.c"
#include "tables/layout.c"
#include "decide/prepare.c"
#include "base/schedule.c"
#include "tables/tables.c"
#ifdef __clang__
#pragma clang force_cuda_host_device end
#endif

/* ---- What a pass sees ----
 *
 * A thread has at most 512 bytes of memory of its own (tests/cuda/cuda_ptx_test.sh), because a driver reserves that for
 * every thread that a GPU can hold. A lane therefore keeps the stored bytes of one slot at a time, and reads those that
 * it needs again. What all lanes of a warp share lies in shared memory. */

/* Copies the stored bytes of a slot to scratch memory, or those of the weight if the slot becomes a copy of it. */
CUDA_DEVICE void fetch_source(const struct hstep_work *w, int s, const struct lane *l, struct scratch *r)
{
    const int from = hstep_source_of(w, s);
    if (from == s) fetch_slot(w, s, l, r);
    else fetch(w->t, w->format[s], w->code[from], w->extra[from], l, r);
}

/* Loads the weight, the effective gradient and the states of the lane's places. mean: of the row, to be subtracted from
 * the gradient. */
CUDA_DEVICE void load(const struct hstep_work *w, float mean, const struct lane *l, struct scratch *r, struct values *v)
{
    const struct hstep_update *u = w->u;
    for (int i = 0; i < 2; i++) v->weight[i] = v->gradient[i] = v->change[i] = v_set(0.0f);
    if (w->format[0] >= 0) {
        fetch_slot(w, 0, l, r);
        decode(w->format[0], 0, r, v->weight);
    }
    if (w->format[1] >= 0) {
        fetch_slot(w, 1, l, r);
        decode(w->format[1], 0, r, v->gradient);
        const struct gradient_terms terms = gradient_terms(u->gradient_scale, mean, u->l2);
        for (int i = 0; i < 2; i++) v->gradient[i] = effective_gradient(terms, v->gradient[i], v->weight[i]);
    } else if (w->pass == HSTEP_PASS_CHANGE) { /* the transformed direction stands in for the gradient */
        fetch_slot(w, HSTEP_SLOT_WORK, l, r);
        decode(HSTEP_FORMAT_f32, 0, r, v->gradient);
    }
    for (int j = 0; j < HALFSTEP_MAX_STATES; j++) {
        int s = HALFSTEP_SLOT_STATE + j;
        v->state[j][0] = v->state[j][1] = v_set(0.0f);
        if (w->format[s] < 0) continue;
        fetch_source(w, s, l, r);
        decode(w->format[s], w->t->slot[s].nonneg, r, v->state[j]);
        if (w->t->slot[s].root) scale_pair(v->state[j], w->t->slot[s].grid);
    }
}

/* Returns the mean of a whole row of the raw gradient, times u->centralize. All lanes get the same value. *v is room,
 * which loses what it held. */
CUDA_DEVICE float row_mean(const struct hstep_work *w, struct room *room, struct values *v, int64_t row_start)
{
    int64_t n = w->t->n_columns;
    struct spread total;
    struct scratch *r = scratch_of(room);
    spread_clear(&total);
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        struct lane *l = place_of(room, lane_of(row_start + i, least(HSTEP_TILE, n - i)));
        fetch_slot(w, HALFSTEP_SLOT_GRADIENT, l, r);
        decode(w->format[HALFSTEP_SLOT_GRADIENT], 0, r, v->gradient);
        spread_add(&total, warp_total(&room->e, v->gradient, 0));
    }
    return (float)(w->u->centralize * (spread_round(&total, &room->e) / (double)n));
}

/* Runs the pass's function of the rule. Values of norms and cross take the place of the weight and the gradient. */
CUDA_DEVICE void run_function(const struct hstep_work *w, struct values *v)
{
    const struct constants constants = constants_of(w->u->k);
    const vf *k = constants.k;
    const int rule = w->t->rule, mode = w->mode;
    for (int i = 0; i < 2; i++) {
        const vf weight = v->weight[i], gradient = v->gradient[i];
        vf s[HALFSTEP_MAX_STATES], y[HSTEP_MAX_NORMS];
        for (int j = 0; j < HALFSTEP_MAX_STATES; j++) s[j] = v->state[j][i];
        for (int j = 0; j < HSTEP_MAX_NORMS; j++) y[j] = v_set(0.0f);
        switch (w->function) {
        case HSTEP_FUNCTION_RULE: v->change[i] = step_rule(rule, mode, k, weight, gradient, s); break;
        case HSTEP_FUNCTION_NORMS:
            step_norms(rule, mode, k, weight, gradient, s, y);
            for (int j = 0; j < SUMS_BEFORE_STATES; j++) v->sum[j][i] = y[j];
            break;
        case HSTEP_FUNCTION_CROSS: v->sum[0][i] = step_cross(rule, w->pair, mode, k, weight, gradient, s); break;
        case HSTEP_FUNCTION_DIRECTION: v->change[i] = step_direction(rule, mode, k, gradient, s); break;
        case HSTEP_FUNCTION_CHANGE: v->change[i] = step_change(rule, k, weight, gradient); break;
        }
        for (int j = 0; j < HALFSTEP_MAX_STATES; j++) v->state[j][i] = s[j];
        CUDA_UNROLL for (int j = SUMS_BEFORE_STATES; j < HSTEP_MAX_NORMS; j++)
        {
            if (w->function == HSTEP_FUNCTION_NORMS && j < hstep_rules[rule].norms) sum_of(v, j)[i] = y[j];
        }
    }
}

/* Prepares a pass over a tensor in shared memory. All lanes of the warp must call it at once. */
CUDA_DEVICE void start_work(const struct hstep_call *call, int tensor, enum hstep_pass pass, int pair,
                            struct hstep_work *w)
{
    CUDA_WARP_BARRIER();
    if (lane_of_thread() == 0) hstep_work_start(call, tensor, pass, pair, w);
    CUDA_WARP_BARRIER();
}

/* ---- update ---- */

/* What a warp knows of the chunk that it updates. */
struct updating {
    struct hstep_work w;
    uint64_t segment; /* of the keys */
    struct hstep_key key[HSTEP_SLOTS];
};

/* Makes the keys of all slots for the segment of random words that the tile begins in, unless the warp has them. */
CUDA_DEVICE void start_segment(struct updating *a, const struct lane *l)
{
    const struct hstep_update *u = a->w.u;
    const int s = lane_of_thread();
    const uint64_t segment = (l->index - (uint64_t)(s * PLACES)) / 2 >> HSTEP_SEGMENT_SHIFT;
    if (a->segment == segment) return;
    CUDA_WARP_BARRIER();
    if (s < HSTEP_SLOTS && (u->stochastic >> s & 1)) a->key[s] = hstep_key_segment(&u->strand[s], segment);
    if (s == 0) a->segment = segment;
    CUDA_WARP_BARRIER();
}

CUDA_DEVICE vi slot_words(const struct updating *a, int s, uint64_t index)
{
    const struct hstep_update *u = a->w.u;
    struct hstep_key key;
    uint64_t segment = a->segment;
    if (!(u->stochastic >> s & 1)) return nearest_words();
    key = a->key[s];
    return random_words(hstep_generator_id(u->generator), &u->strand[s], index, &key, &segment);
}

/* Stores a lane's new values of a state. */
CUDA_DEVICE void put_state(const struct updating *a, int s, const struct lane *l, struct scratch *r, struct values *v,
                           vi *words)
{
    const struct hstep_work *w = &a->w;
    const struct hstep_update *u = w->u;
    const struct hstep_slot *slot = &w->t->slot[s];
    const vf *state = v->state[s - HALFSTEP_SLOT_STATE];
    const int one_scale = hstep_has_one_scale(w->format[s]);
    *words = slot_words(a, s, l->index);
    if (hstep_slot_role(w->t, s) != HALFSTEP_ROLE_WEIGHT) {
        if (one_scale) memcpy(r->extra, &u->scale[s], 4);
        encode(w->format[s], slot->nonneg, state, r, words, 1, u->onto[s]);
    } else {
        vf *old = v->gradient; /* which has been used */
        fetch_source(w, s, l, r);
        decode(w->format[s], slot->nonneg, r, old);
        if (!u->zero_lr) apply(w->format[s], old, state, r, words);
        CUDA_WARP_BARRIER(); /* as for the weight */
    }
    /* The scale of a whole tensor is written once, after its update. */
    put(w->t, w->format[s], w->code[s], one_scale ? NULL : w->extra[s], l, r);
}

/* Returns the state that becomes the weight, or 0. */
CUDA_DEVICE int weight_source(const struct hstep_work *w)
{
    for (int s = HALFSTEP_SLOT_STATE; s < w->t->slots; s++)
        if (w->u->slot_to_weight >> s & 1 && hstep_writes(w, s)) return s;
    return 0;
}

/* Stores the lane's new weight. Copies between the weight and states read what is stored, so states are stored
 * first. */
CUDA_DEVICE void put_weight(const struct updating *a, const struct lane *l, struct scratch *r, const struct values *v,
                            vi *words)
{
    const struct hstep_work *w = &a->w;
    const int from = weight_source(w);
    *words = slot_words(a, 0, l->index);
    fetch(w->t, w->format[0], w->code[from], w->extra[from], l, r);
    if (!from) apply(w->format[0], v->weight, v->change, r, words);
    CUDA_WARP_BARRIER(); /* all lanes of a packed block have read its scale, which one of them writes */
    put(w->t, w->format[0], w->code[0], w->extra[0], l, r);
}

CUDA_DEVICE void put_work(const struct hstep_work *w, const struct lane *l, struct scratch *r, const struct values *v,
                          vi *words)
{
    *words = nearest_words();
    encode(HSTEP_FORMAT_f32, 0, v->change, r, words, 0, 1.0f);
    put(w->t, HSTEP_FORMAT_f32, w->code[HSTEP_SLOT_WORK], NULL, l, r);
}

CUDA_DEVICE void update_tile(struct updating *a, float mean, const struct lane *l, struct scratch *r, struct values *v)
{
    const struct hstep_work *w = &a->w;
    const struct hstep_update *u = w->u;
    const struct hstep_tensor *t = w->t;
    vi words; /* of the slot that is stored */
    start_segment(a, l);
    load(w, mean, l, r, v);
    run_function(w, v);
    for (int i = 0; t->cautious && w->function == HSTEP_FUNCTION_RULE && i < 2; i++)
        v->change[i] = cautious_change(v->change[i], v->gradient[i], v->weight[i], v_set(u->cautious), v_set(u->decay));
    for (int i = 0; hstep_decays_cautiously(w) && i < 2; i++)
        v->change[i] = decay_change(v->change[i], v->weight[i], v_set(u->cautious_decay));
    CUDA_WARP_BARRIER(); /* all lanes of a block have read its scale, which one of them writes */
    for (int s = HALFSTEP_SLOT_STATE; s < t->slots; s++)
        if (hstep_writes(w, s)) put_state(a, s, l, r, v, &words);
    if (hstep_writes(w, HSTEP_SLOT_WORK)) put_work(w, l, r, v, &words);
    if (hstep_writes(w, 0)) put_weight(a, l, r, v, &words);
}

/* Updates a stretch of a chunk. Takes only what the fused kernel leaves if `fused`. turn counts tiles, which the warps
 * take in turn. */
CUDA_DEVICE void update_stretch(struct updating *a, struct room *room, struct hstep_stretch s, int by_rows, int fused,
                                int64_t *turn)
{
    const int64_t lead = fused ? (int64_t)(s.index % HSTEP_TILE) : hstep_grain_lead(a->w.t, s.element, s.index);
    struct values v;
    float mean = 0.0f;
    int known = !by_rows;
    for (int64_t tile = 0; tile < tiles_of(lead, s.n); tile++) {
        if ((*turn)++ % WARPS != warp_of_thread()) continue;
        if (!known) mean = row_mean(&a->w, room, &v, s.element - s.element % a->w.t->n_columns);
        known = 1;
        struct lane *l = place_of(room, lane_at(s, lead, tile));
        if (!fused || !is_whole(l)) update_tile(a, mean, l, scratch_of(room), &v);
    }
}

/* Returns 1 if the fused kernel takes the whole chunk, because every track of the chunk begins and ends with a whole
 * tile. */
CUDA_DEVICE int is_whole_chunk(const struct hstep_tensor *t, const struct hstep_chunk *c)
{
    const uint64_t first = t->index0 + (uint64_t)c->offset,
                   stride = c->track + c->tracks > 1 ? (uint64_t)t->index_stride : 0;
    return first % HSTEP_TILE == 0 && stride % HSTEP_TILE == 0 && c->length % HSTEP_TILE == 0;
}

CUDA_DEVICE void update_chunk(const struct hstep_call *call, const struct hstep_chunk *c, enum hstep_pass pass,
                              struct updating *a, struct room *room)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    int64_t turn = 0;
    if (!hstep_is_updated(t, &call->plan.updates[c->tensor], pass)) return;
    const int fused = pass == HSTEP_PASS_UPDATE && is_fused(call, c->tensor);
    if (fused && is_whole_chunk(t, c)) return;
    start_work(call, c->tensor, pass, -1, &a->w);
    if (lane_of_thread() == 0) a->segment = ~(uint64_t)0;
    CUDA_WARP_BARRIER();
    const int by_rows = hstep_is_by_rows(&a->w);
    for (int64_t track = c->track; track < c->track + c->tracks; track++) {
        struct hstep_stretch s = hstep_stretch_of(t, c, track);
        while (s.n > 0)
            update_stretch(a, room, hstep_take(&s, by_rows ? t->n_columns - s.element % t->n_columns : s.n), by_rows,
                           fused, &turn);
    }
}

/* The numbers first .. end - 1 of chunks or tensors. */
struct span {
    int64_t first, end;
};

/* Returns the chunks of tensors first .. first + n - 1. */
CUDA_DEVICE struct span span_of(const struct hstep_call *call, int first, int n)
{
    struct span span = {0, 0};
    if (!n) return span;
    const struct hstep_tensor *t = &call->plan.tensors[first], *last = t + n - 1;
    span.first = t->first_chunk;
    span.end = last->first_chunk + last->chunks;
    return span;
}

CUDA_KERNEL_SHARED(2) void halfstep_cuda_update(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct room rooms[WARPS];
    CUDA_SHARED struct updating a[WARPS];
    const int warp = warp_of_thread();
    struct span span = span_of(&call, what.first, what.n);
    if (hstep_is_for_matrix((enum hstep_pass)what.pass)) {
        const struct hstep_tensor *t = &call.plan.tensors[what.first];
        span.first = hstep_matrix_chunk(t, call.plan.chunks, call.matrix);
        span.end = hstep_matrix_chunk(t, call.plan.chunks, call.matrix + 1);
    }
    for (int64_t i = span.first + CUDA_BLOCK; i < span.end; i += CUDA_BLOCKS)
        update_chunk(&call, &call.plan.chunks[i], (enum hstep_pass)what.pass, &a[warp], &rooms[warp]);
}

/* ---- scan ---- */

/* Returns how many tiles of a stretch load_aligned() can take: the whole ones if it knows the format and the codes are
 * aligned, else 0. */
CUDA_DEVICE int64_t aligned_tiles(int format, const char *code, int64_t length)
{
    return (uintptr_t)code % 16 == 0 && is_fused_gradient(format) ? length / HSTEP_TILE : 0;
}

CUDA_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* Loads n elements, at most 256, and sets the lane's other places to 0. Returns the largest magnitude in the lane. */
CUDA_DEVICE uint32_t scan_tile(const struct hstep_tensor *t, int format, const char *gradient, int64_t element,
                               int64_t n, struct lane *l, vf *x)
{
    struct scratch r;
    *l = lane_of(element, n);
    fetch(t, format, gradient, NULL, l, &r);
    decode(format, 0, &r, x);
    return hstep_cuda_largest(x[0], x[1]);
}

/* Scans one track of a chunk and adds its squares. Returns the largest magnitude in the lane. */
CUDA_DEVICE uint32_t scan_and_sum(const struct hstep_call *call, const struct hstep_tensor *t, int format,
                                  const char *gradient, struct hstep_stretch s, struct exchange *e, int64_t *turn,
                                  struct spread *sum)
{
    const int bits = hstep_formats[format].code_bits, singly = hstep_is_summed_singly(t);
    uint32_t largest = 0;
    while (s.n > 0) {
        const struct hstep_stretch one = hstep_take_summed(t, &s, 0);
        if ((*turn)++ % WARPS != warp_of_thread()) continue;
        const char *code = gradient + one.element * bits / 8;
        vf x[2];
        if (!singly && aligned_tiles(format, code, one.n)) {
            load_aligned(format, code + lane_of_thread() * PLACES * bits / 8, x);
            largest = larger(largest, hstep_cuda_largest(x[0], x[1]));
        } else {
            struct lane l;
            largest = larger(largest, scan_tile(t, format, gradient, one.element, one.n, &l, x));
            for (int i = l.first; singly && i < l.last; i++) {
                const double value = (double)PLACE(x, i);
                if (is_finite(value)) add_shared(call->statistics, value * value);
            }
        }
        /* Only chunks that are not finite are left out, so that the cut does not matter then either. */
        if (!singly) {
            const double total = warp_total(e, x, 1);
            if (is_finite(total)) spread_add(sum, total);
        }
    }
    return largest;
}

/* Returns the largest magnitude that the lane has of a warp's tiles: `tile`, and every WARPS-th up to `end`. Loads
 * several tiles before it looks at the first, so that memory stays busy. */
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
            largest = larger(largest, hstep_cuda_largest(x[0], x[1]));
        }
    }
    return largest;
}

CUDA_DEVICE uint32_t scan_track(const struct hstep_tensor *t, int format, const char *gradient, struct hstep_stretch s,
                                int64_t track)
{
    const int64_t first = (warp_of_thread() + track) % WARPS;
    const char *code = gradient + s.element * hstep_formats[format].code_bits / 8;
    const int64_t whole = aligned_tiles(format, code, s.n);
    uint32_t largest = 0;
    switch (whole ? format : HSTEP_FORMAT_NONE) {
#define GRADIENT(fn) \
    case HSTEP_FORMAT_##fn: largest = largest_of(HSTEP_FORMAT_##fn, code, first, whole); break;
        HSTEP_CUDA_FUSED_GRADIENTS(GRADIENT)
#undef GRADIENT
    default: break;
    }
    for (int64_t tile = first; tile * HSTEP_TILE < s.n; tile += WARPS) {
        struct lane l;
        vf x[2];
        if (tile < whole) continue;
        const int64_t at = tile * HSTEP_TILE;
        largest = larger(largest, scan_tile(t, format, gradient, s.element + at, least(HSTEP_TILE, s.n - at), &l, x));
    }
    return largest;
}

/* Raises a flag. Lanes add only if they have not seen it raised, so that at most a few wait for each other. */
CUDA_DEVICE void raise_flag(int64_t *flag, int64_t found)
{
    const int64_t seen = *(volatile int64_t *)flag;
    if (found == HSTEP_FLAG_NONFINITE ? !hstep_is_nonfinite(seen) : seen < found) HSTEP_ADD_ATOMIC(flag, found);
}

CUDA_DEVICE void scan_chunk(const struct hstep_call *call, const struct hstep_chunk *c, struct exchange *e,
                            struct spread *sum)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const char *gradient = (const char *)call->gradients[c->tensor - call->first];
    if (!gradient) return;
    const struct hstep_scan scan = hstep_scan_of(call, t);
    uint32_t largest = 0;
    int64_t turn = 0;
    for (int64_t track = c->track; track < c->track + c->tracks; track++)
        largest = larger(largest,
                         scan.summed
                             ? scan_and_sum(call, t, scan.format, gradient, hstep_summed_of(t, c, track), e, &turn, sum)
                             : scan_track(t, scan.format, gradient, hstep_stretch_of(t, c, track), track));
    const int64_t flag = hstep_flag_of(call, &scan, largest);
    if (flag) raise_flag(&call->statistics[hstep_flags_offset() + c->tensor - call->first], flag);
}

CUDA_KERNEL_SHARED(3) void halfstep_cuda_scan(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct exchange e[WARPS];
    struct span span = span_of(&call, call.first, call.n);
    (void)what;
    struct spread sum;
    if (!hstep_is_scanned(&call)) return;
    spread_clear(&sum);
    for (int64_t i = span.first + CUDA_BLOCK; i < span.end; i += CUDA_BLOCKS)
        scan_chunk(&call, &call.plan.chunks[i], &e[warp_of_thread()], &sum);
    spread_flush(&sum, call.statistics);
}

/* ---- sum ---- */

/* Computes the rule's values to be summed for the lane's places, as the update will see them. */
CUDA_DEVICE void values_of(const struct hstep_work *w, float mean, const struct lane *l, struct scratch *r,
                           struct values *v)
{
    load(w, mean, l, r, v);
    run_function(w, v);
}

/* Computes the values of sum number j from those of values_of(). Returns them, in place of the latter. */
CUDA_DEVICE vf *summed_values(const struct hstep_work *w, int j, struct values *v)
{
    const struct hstep_tensor *t = w->t;
    int s = HALFSTEP_SLOT_STATE;
    if (j < hstep_rules[t->rule].norms) return sum_of(v, j);
    if (t->cautious && j == t->sums - 1) {
        for (int i = 0; i < 2; i++)
            v->change[i] = v_select(agrees(v->change[i], v->gradient[i]), v_set(1.0f), v_set(0.0f));
        return v->change;
    }
    while (!hstep_has_one_scale(t->slot[s].format) || hstep_sum_of_state(t, s) != j) s++;
    vf *x = v->state[s - HALFSTEP_SLOT_STATE];
    for (int i = 0; i < 2; i++) x[i] = norm_value(t->slot[s].format, t->slot[s].nonneg, x[i]);
    return x;
}

/* A warp keeps this many sums in registers until the chunk is done. It adds further ones to the limbs at once. */
enum { KEPT_SUMS = HSTEP_MAX_NORMS };

/* Adds to sum number j of a warp, in the registers or in the limbs of all sums. */
CUDA_DEVICE void add_sum(struct spread *sums, int j, int64_t *limbs, double total)
{
    int64_t part[3];
    const int first = hstep_exact_parts(total, part);
    if (!is_finite(total)) return;
    /* Without a branch, the sums stay in registers. */
    CUDA_UNROLL for (int kept = 0; kept < KEPT_SUMS; kept++) spread_take(&sums[kept], first, part, j == kept);
    if (j >= KEPT_SUMS && lane_of_thread() == 0) add_shared(limbs + (int64_t)j * HSTEP_EXACT_LIMBS, total);
}

/* Adds the sums of a stretch within one chunk of columns. */
CUDA_DEVICE void add_chunk(const struct hstep_work *w, float mean, struct room *room, struct values *v,
                           struct hstep_stretch s, int64_t *limbs, struct spread *sums)
{
    const int singly = hstep_is_summed_singly(w->t);
    struct lane *l = place_of(room, lane_at(s, hstep_grain_lead(w->t, s.element, s.index), 0));
    values_of(w, mean, l, scratch_of(room), v);
    for (int j = 0; j < w->t->sums; j++) {
        const int squared = hstep_is_squared(w->t, j);
        const uint64_t every = (uint64_t)hstep_every(w, j);
        /* the number of place 0, which need not be held */
        const uint64_t number = every > 1 ? hstep_number_of(w->t, s.element) + (uint64_t)(l->element - s.element) : 0;
        vf *x = summed_values(w, j, v);
        for (int i = 0; i < PLACES; i++) {
            const double one = (double)PLACE(x, i);
            if (i < l->first || i >= l->last || (every > 1 && (number + (uint64_t)i) % every)) PLACE(x, i) = 0.0f;
            else if (singly && is_finite(one))
                add_shared(limbs + (int64_t)j * HSTEP_EXACT_LIMBS, one * (squared ? one : 1.0));
        }
        if (!singly) add_sum(sums, j, limbs, warp_total(&room->e, x, squared));
    }
}

CUDA_DEVICE void sum_chunk(const struct hstep_call *call, const struct hstep_chunk *c, struct hstep_work *w,
                           struct room *room)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    if (!hstep_is_summed(t, &call->plan.updates[c->tensor])) return;
    int64_t *total = call->statistics + hstep_sum_offset(call, c->tensor), mean_of = -1, turn = 0;
    float mean = 0.0f;
    struct values v;
    struct spread sums[KEPT_SUMS];
    CUDA_UNROLL for (int j = 0; j < KEPT_SUMS; j++) spread_clear(&sums[j]);
    start_work(call, c->tensor, HSTEP_PASS_SUMS, -1, w);
    const int by_rows = hstep_is_by_rows(w);
    for (int64_t track = c->track; track < c->track + c->tracks; track++) {
        struct hstep_stretch s = hstep_summed_of(t, c, track);
        while (s.n > 0) {
            const struct hstep_stretch one = hstep_take_summed(t, &s, by_rows);
            if (turn++ % WARPS != warp_of_thread()) continue;
            const int64_t row_start = one.element - one.element % t->n_columns;
            if (by_rows && row_start != mean_of) mean = row_mean(w, room, &v, mean_of = row_start);
            add_chunk(w, mean, room, &v, one, total, sums);
        }
    }
    CUDA_UNROLL for (int j = 0; j < KEPT_SUMS; j++)
    {
        if (j < t->sums) spread_flush(&sums[j], total + (int64_t)j * HSTEP_EXACT_LIMBS);
    }
}

CUDA_KERNEL_SHARED(2) void halfstep_cuda_sum(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct room rooms[WARPS];
    CUDA_SHARED struct hstep_work w[WARPS];
    const int warp = warp_of_thread();
    struct span span = span_of(&call, what.first, what.n);
    for (int64_t i = span.first + CUDA_BLOCK; i < span.end; i += CUDA_BLOCKS)
        sum_chunk(&call, &call.plan.chunks[i], &w[warp], &rooms[warp]);
}

/* ---- cross ---- */

/* Adds the values of a chunk of a row to `columns`, which hold those of the rows before it, and returns their sum. A
 * chunk that begins within a grain is taken in parts. */
CUDA_DEVICE double cross_chunk(const struct hstep_work *w, float mean, struct room *room, struct values *v,
                               float *chunk, struct hstep_stretch s, double *columns)
{
    const int64_t count = s.n;
    while (s.n > 0) {
        const int64_t lead = hstep_grain_lead(w->t, s.element, s.index), done = count - s.n;
        struct lane *l = place_of(room, lane_at(hstep_take(&s, HSTEP_TILE - lead), lead, 0));
        values_of(w, mean, l, scratch_of(room), v);
        for (int i = l->first; i < l->last; i++)
            chunk[done - lead + lane_of_thread() * PLACES + i] = PLACE(v->sum[0], i);
    }
    CUDA_WARP_BARRIER();
    for (int i = 0; i < PLACES; i++) {
        int64_t at = lane_of_thread() * PLACES + i;
        PLACE(v->sum[0], i) = at < count ? chunk[at] : 0.0f;
        if (at < count) columns[at] += (double)chunk[at];
    }
    return warp_total(&room->e, v->sum[0], 0);
}

/* Sums chunk number i: one chunk of columns in one block of rows, by one warp. */
CUDA_DEVICE void cross_block(const struct hstep_work *w, struct room *room, struct values *v, float *chunk,
                             const struct hstep_cuda_sums *s, int64_t i, double *sums)
{
    const struct hstep_tensor *t = w->t;
    const int64_t part = i % s->chunks, column = part * HSTEP_TILE, block = i / s->chunks % s->blocks,
                  matrix = i / s->chunks / s->blocks, first = block * HSTEP_CROSS_ROWS,
                  rows = least(HSTEP_CROSS_ROWS, hstep_matrix_rows(t, matrix) - first);
    if (rows <= 0) return; /* an empty block after those of a smaller matrix */
    double *columns = sums + s->columns + (block * t->matrices + matrix) * t->row_length + column;
    for (int64_t j = lane_of_thread(); j < least(HSTEP_TILE, t->row_length - column); j += LANES) columns[j] = 0.0;
    CUDA_WARP_BARRIER();
    for (int64_t j = 0; j < rows; j++) {
        const int64_t row = hstep_matrix_start(t, matrix) + first + j;
        struct hstep_stretch stretch = hstep_row_of(t, row);
        const float mean = hstep_is_by_rows(w) ? row_mean(w, room, v, stretch.element) : 0.0f;
        hstep_take(&stretch, column);
        const double sum = cross_chunk(w, mean, room, v, chunk, hstep_take(&stretch, HSTEP_TILE), columns);
        if (lane_of_thread() == 0) sums[s->parts + row * s->chunks + part] = sum;
    }
}

/* Returns the sum of n sums, added exactly by one warp. A sum that is not finite is the result if it counts. */
CUDA_DEVICE double sum_exactly(const double *sums, int64_t n, int odd_counts, struct exchange *e)
{
    struct spread total;
    double odd = 0.0; /* the limbs hold finite sums only */
    spread_clear(&total);
    for (int64_t i = 0; i < n; i++) {
        if (is_finite(sums[i])) spread_add(&total, sums[i]);
        else odd += sums[i];
    }
    const double rounded = spread_round(&total, e);
    return odd_counts && odd != 0.0 ? odd : rounded;
}

/* Sums whole rows from the sums of their chunks, a row by each warp, and whole columns from those of the blocks. */
CUDA_DEVICE void cross_ends(const struct hstep_tensor *t, const struct hstep_cuda_sums *s, struct room *room,
                            double *sums)
{
    const int64_t totals = t->matrices * t->row_length;
    for (int64_t i = thread_of_grid(); i < totals; i += threads_of_grid()) {
        const int64_t rows = hstep_matrix_rows(t, i / t->row_length);
        for (int64_t block = 1; block * HSTEP_CROSS_ROWS < rows; block++)
            sums[s->columns + i] += sums[s->columns + block * totals + i];
    }
    for (int64_t row = warp_of_grid(); row < t->n_rows; row += warps_of_grid()) {
        const double sum = sum_exactly(sums + s->parts + row * s->chunks, s->chunks, 1, &room->e);
        if (lane_of_thread() == 0) sums[row] = sum;
    }
}

/* Computes up to a tile of new numbers of a vector, n from number `first` on. Returns the sum of the new numbers. *v is
 * room. */
CUDA_DEVICE double renew(const struct hstep_tensor *t, int pair, const struct constants *constants, struct room *room,
                         struct values *v, const struct hstep_slot *slot, const double *sums, int64_t first, int64_t n)
{
    const int over_rows = slot->extent == HALFSTEP_EXTENT_ROWS;
    struct scratch *r = scratch_of(room);
    vf *x = v->weight, *mean = v->gradient;
    const vi words = nearest_words();
    const int64_t at = first + lane_of_thread() * PLACES;
    const int count = within(first + n - at, PLACES);
    clear_scratch(r);
    copy_bytes(r->code, slot->code + at * 4, count * 4);
    decode(HSTEP_FORMAT_f32, 1, r, x);
    for (int j = 0; j < PLACES; j++) {
        PLACE(mean, j) = 0.0f;
        if (j >= count) continue;
        const int64_t of = over_rows ? t->row_length : hstep_matrix_rows(t, (at + j) / t->row_length);
        PLACE(mean, j) = (float)(sums[at + j] / (double)of);
    }
    for (int j = 0; j < 2; j++) x[j] = step_vector(t->rule, pair, constants->k, x[j], mean[j]);
    encode(HSTEP_FORMAT_f32, 1, x, r, &words, 1, 1.0f);
    copy_bytes(slot->code + at * 4, r->code, count * 4);
    decode(HSTEP_FORMAT_f32, 0, r, x);
    for (int j = count; j < PLACES; j++) PLACE(x, j) = 0.0f;
    return warp_total(&room->e, x, 0);
}

/* Computes the new vectors of a pair. A warp takes pieces of a vector of rows that end with their matrix. */
CUDA_DEVICE void cross_vectors(struct hstep_tensor *t, int pair, const struct constants *constants,
                               const struct hstep_cuda_sums *s, struct room *room, struct values *v, double *sums)
{
    const int64_t totals = t->matrices * t->row_length;
    struct hstep_slot *slot = hstep_vector_of(t, pair, HALFSTEP_EXTENT_COLUMNS);
    for (int64_t i = warp_of_grid() * HSTEP_TILE; i < totals; i += warps_of_grid() * HSTEP_TILE)
        renew(t, pair, constants, room, v, slot, sums + s->columns, i, least(HSTEP_TILE, totals - i));
    slot = hstep_vector_of(t, pair, HALFSTEP_EXTENT_ROWS);
    for (int64_t i = warp_of_grid(); i < t->matrices * s->pieces; i += warps_of_grid()) {
        const int64_t matrix = i / s->pieces, piece = i % s->pieces * HSTEP_TILE,
                      n = least(HSTEP_TILE, hstep_matrix_rows(t, matrix) - piece);
        if (n <= 0) continue;
        const double sum = renew(t, pair, constants, room, v, slot, sums, hstep_matrix_start(t, matrix) + piece, n);
        if (lane_of_thread() == 0) sums[s->parts + i] = sum;
    }
}

/* Computes the factor of each matrix, a matrix by each warp. Factors of later pairs are 0 until they are made. */
CUDA_DEVICE void cross_factors(const struct hstep_group *g, const struct hstep_tensor *t, int pair,
                               const struct hstep_cuda_sums *s, struct room *room, const double *sums, float *factors)
{
    for (int64_t i = warp_of_grid(); i < t->matrices; i += warps_of_grid()) {
        const int64_t rows = hstep_matrix_rows(t, i), pieces = (rows + HSTEP_TILE - 1) / HSTEP_TILE;
        const double sum = sum_exactly(sums + s->parts + i * s->pieces, pieces, 0, &room->e);
        if (lane_of_thread()) continue;
        factors[pair * t->matrices + i] = hstep_factor_of(g, sum / (double)rows, pair);
        for (int later = pair + 1; later < t->pairs; later++) factors[later * t->matrices + i] = 0.0f;
    }
}

CUDA_KERNEL_SHARED(2) void halfstep_cuda_cross(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct room rooms[WARPS];
    CUDA_SHARED float chunks[WARPS][HSTEP_TILE];
    CUDA_SHARED struct hstep_work works[WARPS];
    CUDA_SHARED struct constants constants;
    struct values v;
    struct room *room = &rooms[warp_of_thread()];
    struct hstep_work *w = &works[warp_of_thread()];
    struct hstep_tensor *t = &call.plan.tensors[what.tensor];
    const struct hstep_cuda_sums s = hstep_cuda_sums(t);
    double *sums = (double *)(void *)(call.plan.workspace + hstep_factor_floats(t));
    if (call.plan.updates[what.tensor].skip) return;
    switch (what.pass) {
    case HSTEP_CUDA_ROWS:
        start_work(&call, what.tensor, HSTEP_PASS_SUMS, what.pair, w);
        for (int64_t i = warp_of_grid(); i < t->matrices * s.blocks * s.chunks; i += warps_of_grid())
            cross_block(w, room, &v, chunks[warp_of_thread()], &s, i, sums);
        break;
    case HSTEP_CUDA_COLUMNS: cross_ends(t, &s, room, sums); break;
    case HSTEP_CUDA_VECTORS:
        if (CUDA_THREAD < HSTEP_MAX_SCALARS)
            constants.k[CUDA_THREAD] = v_set(call.plan.updates[what.tensor].k[CUDA_THREAD]);
        CUDA_BARRIER();
        cross_vectors(t, what.pair, &constants, &s, room, &v, sums);
        break;
    case HSTEP_CUDA_FACTORS:
        cross_factors(&call.plan.groups[t->group], t, what.pair, &s, room, sums, call.plan.workspace);
        break;
    default: break;
    }
}

/* ---- What a single block decides ---- */

/* Copies the call to shared memory, for functions that are not inlined. Each thread would copy it otherwise. */
CUDA_DEVICE void share_call(const struct hstep_call *call, struct hstep_call *shared)
{
    if (CUDA_THREAD == 0) *shared = *call;
    CUDA_BARRIER();
}

/* Returns this thread's share of n tensors. The tensors of a share are consecutive, because neighbours often have the
 * same constants, which are then computed once. */
CUDA_DEVICE struct span share_of_thread(int first, int n)
{
    const int64_t each = (n + HSTEP_CUDA_THREADS - 1) / HSTEP_CUDA_THREADS;
    return (struct span){first + least(each * CUDA_THREAD, n), first + least(each * (CUDA_THREAD + 1), n)};
}

CUDA_KERNEL void halfstep_cuda_decide(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct hstep_call shared;
    const struct span share = share_of_thread(call.first, call.n);
    (void)what;
    share_call(&call, &shared);
    if (CUDA_THREAD == 0) hstep_judge(&shared);
    CUDA_BARRIER();
    hstep_decide_tensors(&shared, (int)share.first, (int)(share.end - share.first));
}

/* Rules with sums over several tensors are left to one thread, which makes each of these sums once. */
CUDA_KERNEL void halfstep_cuda_decide_sums(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct hstep_call shared;
    CUDA_SHARED double sums[HSTEP_CUDA_THREADS][HSTEP_MAX_SUMS];
    struct span share = share_of_thread(what.first, what.n);
    share_call(&call, &shared);
    for (int i = what.first; i < what.first + what.n; i++)
        if (hstep_rules[call.plan.tensors[i].rule].totals)
            share = (struct span){what.first, CUDA_THREAD == 0 ? what.first + what.n : what.first};
    hstep_decide_sums_in(&shared, (int)share.first, (int)(share.end - share.first), sums[CUDA_THREAD]);
}

CUDA_KERNEL void halfstep_cuda_count(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct hstep_call shared;
    const struct span share = share_of_thread(call.first, call.n);
    (void)what;
    share_call(&call, &shared);
    hstep_count_tensors(&shared, (int)share.first, (int)(share.end - share.first));
    if (CUDA_THREAD == 0) hstep_count_step(&shared);
}

CUDA_KERNEL void halfstep_cuda_end_round(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED struct hstep_call shared;
    (void)what;
    share_call(&call, &shared);
    if (CUDA_THREAD == 0) hstep_end_round(&shared);
}

/* ---- Memory ---- */

CUDA_KERNEL void halfstep_cuda_carry(struct hstep_call call, struct hstep_cuda_what what)
{
    (void)call;
    for (int64_t i = thread_of_grid(); i < what.n; i += threads_of_grid())
        hstep_exact_normalize((int64_t *)what.to + i * HSTEP_EXACT_LIMBS);
}

/* Memory of the device is aligned, but its end need not be. */
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
    struct hstep_key key = a->strand;
    uint64_t segment = ~(uint64_t)0;
    vf x[2], y[2];
    vi words = nearest_words();
    fetch(a->tensor, a->format, a->accumulator, NULL, l, &sum);
    fetch(a->tensor, a->gradient_format, a->gradient, NULL, l, &term);
    decode(a->format, 0, &sum, x);
    decode(a->gradient_format, 0, &term, y);
    for (int i = 0; i < 2; i++) x[i] = v_add(x[i], v_mul(y[i], v_set(a->scale)));
    if (hstep_formats[a->format].stochastic)
        words = random_words(hstep_generator_id(a->generator), &a->strand, l->index, &key, &segment);
    encode(a->format, 0, x, &sum, &words, 0, 1.0f);
    put(a->tensor, a->format, a->accumulator, NULL, l, &sum);
}

CUDA_KERNEL void halfstep_cuda_accumulate(struct hstep_accumulation a, struct hstep_cuda_what what)
{
    const struct hstep_tensor *t = a.tensor;
    (void)what;
    for (int64_t i = CUDA_BLOCK; i < t->chunks; i += CUDA_BLOCKS) {
        const struct hstep_chunk *c = &a.chunks[i];
        int64_t turn = 0;
        for (int64_t track = c->track; track < c->track + c->tracks; track++) {
            const struct hstep_stretch s = hstep_stretch_of(t, c, track);
            int64_t lead = (int64_t)(s.index % HSTEP_CELL);
            for (int64_t tile = 0; tile < tiles_of(lead, s.n); tile++) {
                if (turn++ % WARPS != warp_of_thread()) continue;
                struct lane l = lane_at(s, lead, tile);
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
    struct hstep_portion p = {0, 0, 0};
    float *out = (float *)what.to;
    for (int64_t turn = 0; hstep_next_portion(t, s->format, a.first, a.end, &p); turn++) {
        if (turn % warps_of_grid() != warp_of_grid()) continue;
        struct lane l = lane_of(p.element, p.n);
        struct scratch r;
        vf x[2];
        fetch(t, s->format, (const char *)a.data, extra_of(s), &l, &r);
        decode(s->format, s->nonneg, &r, x);
        for (int i = l.first; i < l.last; i++)
            if (l.element + i >= a.first && lane_of_thread() * PLACES + i >= p.skip)
                out[l.element + i - a.first] = s->root ? PLACE(x, i) * s->grid : PLACE(x, i);
    }
}

/* Returns the scale that a state with one scale for the whole tensor has with the new values. One warp does all of it,
 * because chunks are added in their order. */
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
    int one_scale = hstep_has_one_scale(s->format) && a.end > a.first;
    struct hstep_portion p = {0, 0, 0};
    /* One scale for all is one warp's work. */
    int64_t warps = one_scale ? 1 : warps_of_grid();
    if (one_scale && warp_of_grid()) return;
    float scale = one_scale ? scale_of(&a, &e[warp_of_thread()], in) : 0.0f;
    for (int64_t turn = 0; hstep_next_portion(t, s->format, a.first, a.end, &p); turn++) {
        if (turn % warps != warp_of_grid()) continue;
        struct lane l = lane_of(p.element, p.n);
        struct scratch r;
        const vf nothing[2] = {v_set(0.0f), v_set(0.0f)};
        const vi words = nearest_words();
        vf x[2];
        clear_scratch(&r);
        for (int i = 0; i < PLACES; i++) PLACE(x, i) = i >= l.first && i < l.last ? in[l.element + i - a.first] : 0.0f;
        for (int i = 0; s->nonneg && i < 2; i++) x[i] = v_abs(x[i]);
        if (one_scale) memcpy(r.extra, &scale, 4);
        /* A weight is written as a step with a change of 0 writes it, so that it saturates. Formats with a second
         * plane or a scale are encoded instead, because a step would start from what is stored now. */
        if (a.slot == HALFSTEP_SLOT_WEIGHT && !f->extra_bits && !f->block) apply(s->format, x, nothing, &r, &words);
        else encode(s->format, s->nonneg, x, &r, &words, a.slot >= HALFSTEP_SLOT_STATE, onto);
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
