/* Updates whose values stay in registers: a kernel for each rule with each recipe of fused.def. Functions are inlined
 * with constant rules and formats. Loops over a lane's places are unrolled, so that arrays of places are registers.
 * Included at the end of kernels.cu. */
#ifndef HSTEP_CUDA_FUSED_KERNELS_H
#define HSTEP_CUDA_FUSED_KERNELS_H

#include "device/cuda/code/fused.h"
#include "device/cuda/code/kernels.h"
#include "device/cuda/code/rules.h"

/* The part of a key that words are made from (rng.h), with factor and offset in their upper halves. */
struct segment_key {
    __attribute__((aligned(16))) uint32_t k0;
    uint32_t k1, factor, offset;
};

/* The segment of random words that a warp is in, and the keys of all slots for it. Each lane writes its own, so that no
 * two write to one address. Those of the first lanes are read. */
struct segment_keys {
    struct segment_key key[LANES];
    uint64_t segment[LANES];
};

/* The chunk that a block works on. It lies in shared memory because registers are scarce. */
struct fused_work {
    int active, option; /* active: the chunk is this kernel's; option: RULE_OPTION is set in the mode */
    int64_t chunk, end; /* of the block's loop over chunks */
    int64_t track, tracks, offset, length, track_length, index_stride;
    uint64_t index0;
    int format[HSTEP_SLOTS];
    char *code[HSTEP_SLOTS], *extra[HSTEP_SLOTS];
    __attribute__((aligned(16))) float k[HSTEP_MAX_SCALARS];
    float grid[HSTEP_SLOTS], onto[HSTEP_SLOTS];
    float gradient_scale, l2;
    struct hstep_key strand[HSTEP_SLOTS];
    struct segment_keys keys[WARPS];
};

/* ---- A slot of a lane ---- */

/* A lane's places of slot s: where they are, and their bytes. again: the addresses are made again before places are
 * stored. */
struct fused_slot {
    int s, again;
    int64_t element;
    char *code, *extra;
    struct scratch scratch;
};

/* Returns the address of the lane's codes. Those of packed blocks stand behind the scales of their own and all earlier
 * blocks. */
V_OP char *fused_code(const struct columns c, const struct fused_work *w, const struct fused_slot *slot)
{
    char *code = w->code[slot->s] + slot->element * c.bits / 8;
    if (!c.steps) return code;
    return code + ((slot->element >> __builtin_ctz(HSTEP_PACKED_BLOCK)) + 1) * HSTEP_PACKED_SCALE;
}

/* Returns the address of the second bytes, or of the scale of the lane's block. */
V_OP char *fused_extra(const struct columns c, const struct fused_work *w, const struct fused_slot *slot)
{
    if (!c.block) return w->extra[slot->s] + slot->element * c.extra_bits / 8;
    return w->extra[slot->s] + (slot->element >> __builtin_ctz((unsigned)c.block)) * hstep_scale_bytes(c.scale);
}

/* load_packed() and store_packed() copy a lane's part of a packed block, from its place in the block on. The codes of
 * all lanes of a block begin 0 or 2 bytes after a multiple of four. Whole words are copied, whose other bytes are the
 * scale or codes of the block. */
V_OP uint32_t odd_of(const char *code) { return (uint32_t)(uintptr_t)code & 2; }
V_OP uint32_t place_in_block(const struct fused_slot *slot) { return (uint32_t)slot->element % HSTEP_PACKED_BLOCK; }

V_OP void load_packed(const char *code, uint32_t place, struct scratch *r)
{
    const uint32_t odd = odd_of(code), select = 0x3210 + odd * 0x1111;
    const char *from = code - odd;
    const uint32_t low = hstep_cuda_word(from, 0), middle = hstep_cuda_word(from, 1);
    uint16_t high;
    memcpy(&high, __builtin_assume_aligned(from + 4 + 2 * odd, 2), 2);
    hstep_cuda_put_word(r->code + PACKED_CODES, 0, hstep_cuda_pick(low, middle, select));
    hstep_cuda_put_word(r->code + PACKED_CODES, 1, hstep_cuda_pick(middle, high, select));
    copy_aligned(r->code + PACKED_SCALE, code - place - HSTEP_PACKED_SCALE, HSTEP_PACKED_SCALE);
}

/* All lanes of the warp must call it at once, because each stores two bytes of the lane before it. The first or the
 * last lane of the block stores the two bytes that are left. */
V_OP void store_packed(char *code, uint32_t place, const struct scratch *r)
{
    const uint32_t odd = odd_of(code), select = 0x7654 - odd * 0x1111;
    const int first = place == 0, last = place == HSTEP_PACKED_BLOCK - PLACES;
    const int before = (int)((place ^ (place - PLACES)) / PLACES % PACKED_LANES);
    const uint32_t low = hstep_cuda_word(r->code + PACKED_CODES, 0), high = hstep_cuda_word(r->code + PACKED_CODES, 1);
    const uint32_t scale = hstep_scale_load(HSTEP_SCALE_BF16, r->code + PACKED_SCALE, 0),
                   exchanged = CUDA_SHUFFLE(high, before);
    const uint16_t left = (uint16_t)((odd ? high : scale) >> 16);
    char *to = code - odd;
    hstep_cuda_put_word(to, 0, hstep_cuda_pick(first ? scale : exchanged, low, select));
    hstep_cuda_put_word(to, 1, hstep_cuda_pick(low, high, select));
    if (odd ? last : first) memcpy(__builtin_assume_aligned(to + (odd ? 8 : -HSTEP_PACKED_SCALE), 2), &left, 2);
}

/* Finds and loads a lane's places of a slot. more: the warp goes on with the tile that is WARPS further on, which is
 * prefetched here. */
V_OP void fused_load(const int format, const int nonneg, const struct fused_work *w, int s, int64_t element,
                     const int more, struct fused_slot *slot, vf *x)
{
    enum { NEXT = WARPS * HSTEP_TILE };
    const struct columns c = columns_of(format);
    const int scale_bytes = c.block ? hstep_scale_bytes(c.scale) : 0;
    struct scratch *r = &slot->scratch;
    slot->s = s;
    slot->element = element;
    slot->code = fused_code(c, w, slot);
    if (c.steps) load_packed(slot->code, place_in_block(slot), r);
    else copy_codes(r->code, slot->code, PLACES * c.bits / 8);
    if (more) CUDA_PREFETCH(slot->code + code_place(c, NEXT));
    if (c.block) {
        slot->extra = fused_extra(c, w, slot);
        copy_aligned(r->extra, slot->extra, scale_bytes);
        if (more) CUDA_PREFETCH(slot->extra + NEXT / c.block * scale_bytes);
        load_scaled(format, nonneg, r->code, v_from_bits(vi_set(hstep_scale_load(c.scale, r->extra, 0))), 0, &x[0],
                    &x[1]);
        return;
    }
    if (c.extra_bits) {
        slot->extra = fused_extra(c, w, slot);
        copy_aligned(r->extra, slot->extra, PLACES * c.extra_bits / 8);
        if (more) CUDA_PREFETCH(slot->extra + extra_place(c, NEXT));
    }
    load_scratch(format, nonneg, r, x);
}

/* Stores a lane's places where they were loaded. */
V_OP void fused_put(const int format, const struct fused_work *w, const struct fused_slot *slot)
{
    const struct columns c = columns_of(format);
    char *code = slot->again ? fused_code(c, w, slot) : slot->code;
    if (c.steps) store_packed(code, place_in_block(slot), &slot->scratch);
    else copy_codes(code, slot->scratch.code, PLACES * c.bits / 8);
    if (c.extra_bits)
        copy_aligned(slot->again ? fused_extra(c, w, slot) : slot->extra, slot->scratch.extra,
                     PLACES * c.extra_bits / 8);
}

/* Makes the keys of all slots for the segment of the index, unless the warp has them. */
V_OP void fused_segment(struct fused_work *w, uint64_t index)
{
    const uint64_t segment = index / 2 >> HSTEP_SEGMENT_SHIFT;
    struct segment_keys *keys = &w->keys[warp_of_thread()];
    const int lane = lane_of_thread();
    if (keys->segment[0] == segment) return;
    CUDA_WARP_BARRIER();
    const struct hstep_key key = hstep_key_segment(&w->strand[lane % HSTEP_SLOTS], segment);
    keys->key[lane] = (struct segment_key){key.k[0], key.k[1], key.factor << 16, key.offset << 16};
    keys->segment[lane] = segment;
    CUDA_WARP_BARRIER();
}

/* Computes hstep_lattice_word() of a mixer's word. The factor and offset are in their upper halves, so that no other
 * bits get in the way of what rounding adds. */
V_OP uint32_t fused_word(const struct segment_key *held, const struct hstep_key *mixer, uint32_t i)
{
    const uint32_t h = hstep_mixer_word(mixer, i);
    const uint32_t high = (h >> 16) * held->factor + held->offset, low = h * held->factor + held->offset;
    return (high & 0xffff0000u) | low >> 16;
}

/* Returns the random words of a lane's places, from word `first` of the segment on. Slots whose format is written with
 * random bits have a strand (decide/prepare.c). Others get the word that rounds to nearest. */
V_OP vi fused_words(const int format, const struct fused_work *w, int s, uint32_t first)
{
    struct hstep_key mixer;
    if (!columns_of(format).stochastic) return nearest_words();
    const struct segment_key held = w->keys[warp_of_thread()].key[s];
    mixer.k[0] = held.k0;
    mixer.k[1] = held.k1;
    /* No lattice rounds the codes of blocks (decide/prepare.c). */
    if (is_block(format)) return V_LANES(vi, hstep_mixer_word(&mixer, first + I));
    return V_LANES(vi, fused_word(&held, &mixer, first + I));
}

V_OP void fused_store(const int format, const int nonneg, const struct fused_work *w, int s, uint32_t first,
                      struct fused_slot *slot, const vf *x)
{
    const vi words = fused_words(format, w, s, first);
    const struct columns c = columns_of(format);
    struct scratch *r = &slot->scratch;
    __attribute__((aligned(16))) float stash[PLACES];
    float inverse;
    if (!c.block) {
        store_any(format, r->code, r->extra, 0, x[0], x[1], words, 1);
        fused_put(format, w, slot);
        return;
    }
    inverse = encode_scale(format, nonneg, stash_pair(format, nonneg, x, v_set(w->onto[s]), stash), r->extra);
    if (lane_of_thread() % (c.block / PLACES) == 0)
        copy_aligned(slot->again ? fused_extra(c, w, slot) : slot->extra, r->extra, hstep_scale_bytes(c.scale));
    encode_codes(format, nonneg, stash, &inverse, r->code, 0, words);
    fused_put(format, w, slot);
}

/* ---- Slots whose format is told apart at run time ---- */

V_OP void load_gradient(const struct fused_work *w, int64_t element, const int more, vf *x)
{
    struct fused_slot slot;
    switch (w->format[HALFSTEP_SLOT_GRADIENT]) {
#define GRADIENT(fn) \
    case HSTEP_FORMAT_##fn: fused_load(HSTEP_FORMAT_##fn, 0, w, HALFSTEP_SLOT_GRADIENT, element, more, &slot, x); break;
        HSTEP_CUDA_FUSED_GRADIENTS(GRADIENT)
#undef GRADIENT
    default: __builtin_unreachable(); /* hstep_cuda_find_fused() takes no others */
    }
}

/* Loads the weight, or a state that is stored as the weight is. packed: the weight may be packed. */
V_OP void load_weight(const int packed, const struct fused_work *w, int s, int64_t element, const int more,
                      struct fused_slot *slot, vf *x)
{
    switch (w->format[HALFSTEP_SLOT_WEIGHT]) {
#define WEIGHT(fn)                                                      \
    case HSTEP_FORMAT_##fn:                                             \
        if (fn##_steps && !packed) __builtin_unreachable();             \
        fused_load(HSTEP_FORMAT_##fn, 0, w, s, element, more, slot, x); \
        break;
        HSTEP_CUDA_FUSED_WEIGHTS(WEIGHT)
#undef WEIGHT
    default: __builtin_unreachable(); /* hstep_cuda_find_fused() takes no others */
    }
}

V_OP void fused_apply(const int format, const struct fused_work *w, int s, uint32_t first, struct fused_slot *slot,
                      const vf *x, const vf *d)
{
    struct scratch *r = &slot->scratch;
    const vi words = fused_words(format, w, s, first);
    if (columns_of(format).steps) {
        apply_packed(format, d, r, words);
        CUDA_WARP_BARRIER(); /* all lanes of a block have read what others write */
    } else {
        apply_any(format, r->code, r->extra, 0, x[0], x[1], d[0], d[1], words);
    }
    fused_put(format, w, slot);
}

V_OP void change_weight(const int packed, const struct fused_work *w, int s, uint32_t first, struct fused_slot *slot,
                        const vf *x, const vf *d)
{
    switch (w->format[HALFSTEP_SLOT_WEIGHT]) {
#define WEIGHT(fn)                                               \
    case HSTEP_FORMAT_##fn:                                      \
        if (fn##_steps && !packed) __builtin_unreachable();      \
        fused_apply(HSTEP_FORMAT_##fn, w, s, first, slot, x, d); \
        break;
        HSTEP_CUDA_FUSED_WEIGHTS(WEIGHT)
#undef WEIGHT
    default: __builtin_unreachable(); /* hstep_cuda_find_fused() takes no others */
    }
}

/* ---- A tile ---- */

/* Constants of a kernel, known at compile time. */
struct fused_what {
    int first, second, option;
    struct hstep_roles states;
};

V_OP int role_of(const struct fused_what f, const int j) { return f.states.role[j]; }
V_OP int optionals_of(const struct fused_what f)
{
    const int *optional = f.states.optional;
    return optional[0] + optional[1] + optional[2] + optional[3];
}
/* Returns 1 if state j is stored. RULE_OPTION only says that some optional state is, so a rule with several of them
 * must look at the formats. */
V_OP int is_stored(const struct fused_what f, const struct fused_work *w, const int j)
{
    if (!f.states.optional[j]) return role_of(f, j) != 0;
    if (!f.option) return 0;
    return optionals_of(f) == 1 || w->format[HALFSTEP_SLOT_STATE + j] >= 0;
}

/* Returns 1 if state j has role GRADIENT beside states in blocks and is stored as f32, not as bf16_sr. */
V_OP int is_wide(const struct fused_what f, const struct fused_work *w, const int j)
{
    return role_of(f, j) == HALFSTEP_ROLE_GRADIENT && is_block(f.first) &&
           w->format[HALFSTEP_SLOT_STATE + j] == HSTEP_FORMAT_f32;
}
V_OP int format_of(const struct fused_what f, const int j)
{
    const int role = role_of(f, j);
    if (role == HALFSTEP_ROLE_NONNEG) return f.second;
    return role == HALFSTEP_ROLE_GRADIENT && is_block(f.first) ? HSTEP_FORMAT_bf16_sr : f.first;
}

/* A lane's places of one state, before and after the rule. */
struct fused_state {
    struct fused_slot slot;
    vf before[2], after[2];
};

/* Returns 1 if the weight may be packed: if no state is stored as it is, because registers are scarce then
 * (hstep_cuda_find_fused()). */
V_OP int may_be_packed(const struct fused_what f)
{
    return role_of(f, 0) != HALFSTEP_ROLE_WEIGHT && role_of(f, 1) != HALFSTEP_ROLE_WEIGHT &&
           role_of(f, 2) != HALFSTEP_ROLE_WEIGHT && role_of(f, 3) != HALFSTEP_ROLE_WEIGHT;
}

/* Returns 1 if registers are scarce. Addresses are then made again before places are stored, and each tile asks for its
 * segment of random words. */
V_OP int is_large(const struct fused_what f)
{
    return role_of(f, 0) == HALFSTEP_ROLE_WEIGHT || role_of(f, 1) == HALFSTEP_ROLE_WEIGHT ||
           (role_of(f, 2) != 0 && !f.states.optional[2]);
}

V_OP void load_state(const struct fused_what f, const int j, const struct fused_work *w, int64_t element,
                     const int more, struct fused_state *state)
{
    const int s = HALFSTEP_SLOT_STATE + j, format = format_of(f, j), nonneg = role_of(f, j) == HALFSTEP_ROLE_NONNEG;
    state->before[0] = state->before[1] = v_set(0.0f);
    state->slot.again = is_large(f);
    if (!is_stored(f, w, j)) return;
    if (role_of(f, j) == HALFSTEP_ROLE_WEIGHT) load_weight(0, w, s, element, more, &state->slot, state->before);
    else if (is_wide(f, w, j)) fused_load(HSTEP_FORMAT_f32, 0, w, s, element, more, &state->slot, state->before);
    else fused_load(format, nonneg, w, s, element, more, &state->slot, state->before);
    if (has_grid(format, nonneg)) scale_pair(state->before, w->grid[s]);
}

/* Returns true if the compiler knows that all numbers are +0. */
V_OP int is_known_zero(vf a)
{
    const vi bits = v_bits(a);
    const int zero = (bits.x[0] | bits.x[1] | bits.x[2] | bits.x[3]) == 0;
    return __builtin_constant_p(zero) && zero;
}

V_OP void store_state(const struct fused_what f, const int j, const struct fused_work *w, int64_t element,
                      uint32_t first, struct fused_state *state)
{
    const int s = HALFSTEP_SLOT_STATE + j, format = format_of(f, j), nonneg = role_of(f, j) == HALFSTEP_ROLE_NONNEG;
    if (!is_stored(f, w, j)) return;
    if (role_of(f, j) == HALFSTEP_ROLE_WEIGHT) {
        /* A state that the rule leaves alone is loaded again, because registers are scarce. */
        if (is_known_zero(state->after[0]) && is_known_zero(state->after[1]))
            load_weight(0, w, s, element, 0, &state->slot, state->before);
        change_weight(0, w, s, first, &state->slot, state->before, state->after);
        return;
    }
    if (is_wide(f, w, j)) fused_store(HSTEP_FORMAT_f32, 0, w, s, first, &state->slot, state->after);
    else fused_store(format, nonneg, w, s, first, &state->slot, state->after);
}

V_OP void fused_tile(const struct fused_what f, vf (*rule)(const vf *, vf, vf, vf *, int), const struct fused_work *w,
                     int64_t element, uint32_t first, const int more)
{
    const int mode = (is_block(f.first) || is_block(f.second) ? RULE_CLAMP : 0) | (f.option ? RULE_OPTION : 0);
    const struct constants constants = constants_of(w->k);
    const struct gradient_terms terms = gradient_terms(w->gradient_scale, 0.0f, w->l2);
    struct fused_slot slot;
    struct fused_state s0, s1, s2, s3;
    vf gradient[2], weight[2], change[2];
    slot.again = 1; /* because registers are scarce */
    load_gradient(w, element, more, gradient);
    load_weight(may_be_packed(f), w, HALFSTEP_SLOT_WEIGHT, element, more, &slot, weight);
    load_state(f, 0, w, element, more, &s0);
    load_state(f, 1, w, element, more, &s1);
    load_state(f, 2, w, element, more, &s2);
    load_state(f, 3, w, element, more, &s3);
    CUDA_UNROLL for (int i = 0; i < 2; i++) gradient[i] = effective_gradient(terms, gradient[i], weight[i]);
    CUDA_UNROLL for (int i = 0; i < 2; i++)
    {
        vf s[HALFSTEP_MAX_STATES] = {s0.before[i], s1.before[i], s2.before[i], s3.before[i]};
        change[i] = rule(constants.k, weight[i], gradient[i], s, mode);
        s0.after[i] = s[0];
        s1.after[i] = s[1];
        s2.after[i] = s[2];
        s3.after[i] = s[3];
    }
    if (is_block(f.first) || is_block(f.second))
        CUDA_WARP_BARRIER(); /* all lanes of a block have read its scale, which one of them writes */
    store_state(f, 0, w, element, first, &s0);
    store_state(f, 1, w, element, first, &s1);
    store_state(f, 2, w, element, first, &s2);
    store_state(f, 3, w, element, first, &s3);
    change_weight(may_be_packed(f), w, HALFSTEP_SLOT_WEIGHT, first, &slot, weight, change);
}

/* Updates the whole tiles of a track. The warps take them in turn. */
V_OP void fused_track(const struct fused_what f, vf (*rule)(const vf *, vf, vf, vf *, int), struct fused_work *w,
                      int64_t track)
{
    enum { SEGMENT_TILES = 2 * HSTEP_SEGMENT_WORDS / HSTEP_TILE };
    const int64_t element = track * w->track_length + w->offset;
    const uint64_t index = w->index0 + (uint64_t)(track * w->index_stride) + (uint64_t)w->offset;
    /* Tiles begin at multiples of their length, so that no segment of random words ends within one. */
    const int lead = (int)(index % HSTEP_TILE), tiles = (lead + (int)w->length) / HSTEP_TILE;
    for (int tile = (lead > 0) + (warp_of_thread() + (int)track) % WARPS; tile < tiles;) {
        const uint64_t from = index + (uint64_t)(tile * HSTEP_TILE - lead);
        const int rest = SEGMENT_TILES - (int)(from / HSTEP_TILE % SEGMENT_TILES);
        const int end = is_large(f) ? tile + 1 : tile + rest < tiles ? tile + rest : tiles;
        fused_segment(w, from);
        for (; tile < end; tile += WARPS) {
            const int place = tile * HSTEP_TILE - lead + lane_of_thread() * PLACES;
            const uint32_t word = ((uint32_t)index + (uint32_t)place) / 2 % HSTEP_SEGMENT_WORDS;
            fused_tile(f, rule, w, element + place, word, tile + WARPS < tiles);
        }
    }
}

/* ---- Chunks ---- */

/* Reads what the block needs to know of a chunk. All threads of the block call this, and a barrier must follow before
 * any of them uses w. */
V_OP void start_fused(const struct hstep_call *call, int64_t chunk, int64_t end, int kernel, struct fused_work *w)
{
    const struct hstep_chunk *c = &call->plan.chunks[chunk];
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const struct hstep_update *u = &call->plan.updates[c->tensor];
    const int i = CUDA_THREAD;
    if (i == 0) {
        w->active = hstep_fused_row(t, u) == kernel && !u->skip && is_fused(call, c->tensor);
        w->option = (u->mode & RULE_OPTION) != 0;
        w->chunk = chunk;
        w->end = end;
        w->track = c->track;
        w->tracks = c->tracks;
        w->offset = c->offset;
        w->length = c->length;
        w->track_length = t->track_length;
        w->index_stride = t->index_stride;
        w->index0 = t->index0;
        w->gradient_scale = u->gradient_scale;
        w->l2 = u->l2;
    }
    if (i < HSTEP_SLOTS) {
        w->format[i] = i < t->slots ? t->slot[i].format : HSTEP_FORMAT_NONE;
        w->code[i] = hstep_code_of(call, c->tensor, i);
        w->extra[i] = t->slot[i].extra;
        w->grid[i] = t->slot[i].grid;
        w->onto[i] = u->onto[i];
        w->strand[i] = u->strand[i];
    }
    w->keys[i / LANES].segment[i % LANES] = ~(uint64_t)0;
    for (int j = i; j < HSTEP_MAX_SCALARS; j += HSTEP_CUDA_THREADS) w->k[j] = u->k[j];
}

/* Updates the chunks first, first + CUDA_BLOCKS and so on, up to `end`. RULE_OPTION is set only for rules with optional
 * states. */
V_OP void fused_chunks(const struct fused_what f, vf (*rule)(const vf *, vf, vf, vf *, int), const int kernel,
                       const struct hstep_call *call, struct fused_work *w, int64_t first, int64_t end)
{
    struct fused_what with = f;
    with.option = 1;
    for (int64_t i = first; i < end; i = w->chunk + CUDA_BLOCKS, end = w->end) {
        CUDA_BARRIER();
        start_fused(call, i, end, kernel, w);
        CUDA_BARRIER();
        if (!w->active) continue;
        if (!w->option)
            for (int64_t track = w->track; track < w->track + w->tracks; track++) fused_track(f, rule, w, track);
        else if (optionals_of(f))
            for (int64_t track = w->track; track < w->track + w->tracks; track++) fused_track(with, rule, w, track);
    }
}

/* ---- Kernels ---- */

/* A test may compile the kernels of some rules only. */
#ifndef HSTEP_CUDA_IS_CHOSEN
#define HSTEP_CUDA_IS_CHOSEN(rule) 1
#endif
/* 1 if a recipe has a kernel under a rule. A rule without states, or with states of role WEIGHT alone, does the same in
 * all recipes, so only the recipe f32 has one. */
#define HAS_KERNEL(rule, first)                                                                                 \
    (HSTEP_CUDA_IS_CHOSEN(rule) && (int)rule##_states <= HSTEP_CUDA_FUSED_STATES && (int)rule##_vectors == 0 && \
     (HSTEP_FORMAT_##first == HSTEP_FORMAT_f32 || (int)rule##_states > (int)rule##_weights))
/* A lane copies the codes of its places in pieces of a power of two (copy_codes()). */
#define CODES_FIT(fn) (((PLACES * fn##_code_bits / 8) & (PLACES * fn##_code_bits / 8 - 1)) == 0)
#define FUSED_CODES(one, two, none) \
    _Static_assert(CODES_FIT(one) && CODES_FIT(two), #one ", " #two ": codes of 6 bits have no fused kernel");
HSTEP_CUDA_FUSED_RECIPES(FUSED_CODES, 0)
#define FUSED_KERNEL(one, two, rule)                                                                                 \
    CUDA_KERNEL_SHARED(2)                                                                                            \
    void halfstep_cuda_fused_##rule##_##one##_##two(struct hstep_call call, struct hstep_cuda_what what)             \
    {                                                                                                                \
        CUDA_SHARED struct fused_work work;                                                                          \
        const struct span span = span_of(&call, what.first, what.n);                                                 \
        const struct fused_what f = {HSTEP_FORMAT_##one, HSTEP_FORMAT_##two, 0, HSTEP_ROLES_OF(rule)};               \
        if (!HAS_KERNEL(rule, one)) return;                                                                          \
        fused_chunks(f, rule##_rule, HSTEP_CUDA_fused_##rule##_##one##_##two, &call, &work, span.first + CUDA_BLOCK, \
                     span.end);                                                                                      \
    }
#define RULE(id, rule) HSTEP_CUDA_FUSED_RECIPES(FUSED_KERNEL, rule)
#include "rules/rules.def"
#undef RULE

#endif
