/* The loops of fused steps, which work on tiles that stay in the first cache. For kernels.c.
 *
 * A tile goes through short loops. Each has a short chain of instructions. A processor can look ahead to its end while
 * it waits for the divider. The loops are, in order:
 *
 *   1. up to the weight: decode gradient and states, apply the rule, encode states
 *   2. the weight
 *   3. the codes of block states
 *
 * Only the first is compiled for each rule and recipe. The others are shared.
 *
 * This file holds the loops, and the tables of those that depend on a format alone. fused_steps.h combines them with
 * rules and recipes. Over 500 lines because the loops share what one tile keeps from loop to loop. */
#ifndef HSTEP_FUSED_H
#define HSTEP_FUSED_H

#include "kernels/tiles.h"

/* A tile has sixteen cells because their maxima fill one vector of the widest instruction set. */
#define FUSED_TILE 512
#define FUSED_CELLS (FUSED_TILE / HSTEP_CELL)

/* The values of one state that a tile keeps from loop to loop: new values, or their stashed form for a block format.
 * Scales are converted to fp32 once, so that a loop reads them at no cost. */
struct fused_state {
    HSTEP_ALIGNED float stash[FUSED_TILE];
    HSTEP_ALIGNED float old[FUSED_TILE]; /* stored values, only for a state that is stored as the weight is */
    HSTEP_ALIGNED float scales[FUSED_CELLS];
    HSTEP_ALIGNED float inverses[FUSED_CELLS];
    HSTEP_ALIGNED uint32_t maxima[FUSED_CELLS][VL];
};

struct fused_scratch {
    HSTEP_ALIGNED float weight[FUSED_TILE];
    HSTEP_ALIGNED float change[FUSED_TILE];   /* or its numerator, for a rule in parts */
    HSTEP_ALIGNED float root[FUSED_TILE];     /* the divisor of that numerator */
    HSTEP_ALIGNED float gradient[FUSED_TILE]; /* as the rule takes it, for rows of `any` gradient */
    struct fused_state state[HSTEP_FUSED_STATES];
};

/* The generator of one slot's random words within a loop. */
struct fused_words {
    vi x, k1, factor, offset;
};

/* Returns the generator of the slot's words from element a->index + element on. */
V_OP struct fused_words fused_words_from(const struct hstep_fused *a, int slot, int64_t element)
{
    const struct hstep_key *key = &a->key[slot];
    return (struct fused_words){mixer_start(key, (a->index + (uint64_t)element) / 2), vi_set(key->k[1]),
                                vi_set(key->factor), vi_set(key->offset)};
}

/* Returns the next words, for an element format. Block codes take the mixer's words directly and save the factor and
 * offset. */
V_OP vi fused_words(struct fused_words *w) { return lattice_of(mixer_next(&w->x, w->k1), w->factor, w->offset); }

/* ---- What comes before the weight ---- */

/* One state within the first loop of a tile. */
struct fused_slot {
    char *code, *extra; /* of the tile */
    struct fused_words words;
    vi largest;    /* of the magnitudes in the cell */
    vf grid, onto; /* of a second moment, from hstep_fused.grid and .onto */
    struct fused_state *scratch;
};

/* Sets the places of a state's codes and extras at offset t. Formats are passed as functions, by name, because a switch
 * over all formats is slow to compile even if one case is left. Roles are constants at every call. Calls are written
 * out, not looped over, so that no choice is left at run time. */
V_OP struct fused_slot fused_begin(const struct hstep_fused *a, struct fused_scratch *scratch, const int state,
                                   const int bits, const int extra_bits, int64_t t)
{
    const int slot = HALFSTEP_SLOT_STATE + state;
    return (struct fused_slot){.code = a->code[slot] + t * bits / 8,
                               .extra = a->extra[slot] + t * extra_bits / 8,
                               .scratch = &scratch->state[state]};
}

#define FUSED_ELEMENTS(fn)                                                                              \
    V_OP struct fused_slot fused_start_##fn(const struct hstep_fused *a, struct fused_scratch *scratch, \
                                            const int state, const int nonneg, int64_t t, int64_t n)    \
    {                                                                                                   \
        struct fused_slot s = fused_begin(a, scratch, state, fn##_code_bits, fn##_extra_bits, t);       \
        (void)nonneg, (void)n;                                                                          \
        s.words = fused_words_from(a, HALFSTEP_SLOT_STATE + state, t);                                  \
        return s;                                                                                       \
    }                                                                                                   \
    V_OP void fused_load_##fn(const struct fused_slot *s, const int nonneg, int64_t r, vf *e, vf *o)    \
    {                                                                                                   \
        (void)nonneg;                                                                                   \
        fn##_decode(s->code, s->extra, r, e, o);                                                        \
    }                                                                                                   \
    V_OP void fused_store_##fn(struct fused_slot *s, const int nonneg, int64_t r, vf e, vf o)           \
    {                                                                                                   \
        (void)nonneg;                                                                                   \
        fn##_encode(s->code, s->extra, r, e, o, fused_words(&s->words), 1);                             \
    }
#define FUSED_BLOCKS(fn)                                                                                     \
    V_OP struct fused_slot fused_start_##fn(const struct hstep_fused *a, struct fused_scratch *scratch,      \
                                            const int state, const int nonneg, int64_t t, int64_t n)         \
    {                                                                                                        \
        struct fused_slot s = fused_begin(a, scratch, state, fn##_code_bits, 0, t);                          \
        s.largest = vi_set(0);                                                                               \
        if (nonneg && fn##_root != 0) {                                                                      \
            s.grid = v_set(a->grid[HALFSTEP_SLOT_STATE + state]);                                            \
            s.onto = v_set(a->onto[HALFSTEP_SLOT_STATE + state]);                                            \
        }                                                                                                    \
        s.extra += t / fn##_block * hstep_scale_bytes(fn##_scale_dtype);                                     \
        load_scales(fn##_scale_dtype, fn##_block, s.extra, s.scratch->scales, n);                            \
        return s;                                                                                            \
    }                                                                                                        \
    V_OP void fused_load_##fn(const struct fused_slot *s, const int nonneg, int64_t r, vf *e, vf *o)         \
    {                                                                                                        \
        load_scaled(HSTEP_FORMAT_##fn, nonneg, s->code, v_set(s->scratch->scales[r / fn##_block]), r, e, o); \
        if (nonneg && fn##_root != 0) *e = v_mul(*e, s->grid), *o = v_mul(*o, s->grid);                      \
    }                                                                                                        \
    V_OP void fused_store_##fn(struct fused_slot *s, const int nonneg, int64_t r, vf e, vf o)                \
    {                                                                                                        \
        vf stashed_e = fn##_stash(e, nonneg), stashed_o = fn##_stash(o, nonneg);                             \
        if (nonneg && fn##_root != 0) {                                                                      \
            stashed_e = onto_grid(fn##_root, stashed_e, s->onto);                                            \
            stashed_o = onto_grid(fn##_root, stashed_o, s->onto);                                            \
        }                                                                                                    \
        v_store(s->scratch->stash + r, stashed_e);                                                           \
        v_store(s->scratch->stash + r + VL, stashed_o);                                                      \
        vi larger = vi_max(magnitude_of(e, stashed_e, nonneg && fn##_root != 0),                             \
                           magnitude_of(o, stashed_o, nonneg && fn##_root != 0));                            \
        s->largest = r % HSTEP_CELL ? vi_max(s->largest, larger) : larger;                                   \
        vi_store(s->scratch->maxima[r / HSTEP_CELL], s->largest);                                            \
    }
#define FORMAT(id, fn) IF_ELEMENT(fn, FUSED_ELEMENTS(fn)) IF_BLOCK(fn, FUSED_BLOCKS(fn))
#include "formats/formats.def"
#undef FORMAT

/* Loads a gradient that fused_gradient() has decoded into scratch memory. */
V_OP void fused_load_any(const struct fused_slot *s, const int nonneg, int64_t r, vf *e, vf *o)
{
    const float *x = (const float *)(const void *)s->code + r;
    (void)nonneg;
    *e = v_load(x);
    *o = v_load(x + VL);
}

typedef struct fused_slot fused_starter(const struct hstep_fused *, struct fused_scratch *, int, int, int64_t, int64_t);
typedef void fused_loader(const struct fused_slot *, int, int64_t, vf *, vf *);
typedef void fused_storer(struct fused_slot *, int, int64_t, vf, vf);

/* Returns the role of state j in a variant, or 0 if the variant does not store the state. Bit i of the variant stores
 * the i-th optional state. */
V_OP int fused_role(const int j, const struct hstep_roles *states, const int variant)
{
    const int *optional = states->optional;
    const int i = (j > 0 && optional[0]) + (j > 1 && optional[1]) + (j > 2 && optional[2]);
    return optional[j] && !(variant >> i & 1) ? 0 : states->role[j];
}

/* Begins one state by its role. Role 0 means that the state is not stored. f1, f2 and fg serve signed states, second
 * moments and states of gradients. In the two functions below, `plain` means that all of the step is f32 in the order
 * of memory. */
V_OP struct fused_slot state_start(const int role, fused_starter *f1, fused_starter *f2, fused_starter *fg,
                                   const struct hstep_fused *a, struct fused_scratch *scratch, const int state,
                                   int64_t t, int64_t n)
{
    if (role == HALFSTEP_ROLE_SIGNED) return f1(a, scratch, state, 0, t, n);
    if (role == HALFSTEP_ROLE_NONNEG) return f2(a, scratch, state, 1, t, n);
    if (role == HALFSTEP_ROLE_GRADIENT) return fg(a, scratch, state, 0, t, n);
    /* The codes of a state of role WEIGHT are touched only if they are f32. */
    return fused_begin(a, scratch, state, 32, 0, role ? t : 0);
}

V_OP void state_load(const int role, const int plain, fused_loader *f1, fused_loader *f2, fused_loader *fg,
                     const struct fused_slot *s, int64_t r, vf *e, vf *o)
{
    if (!role) {
        *e = *o = v_set(0.0f);
    } else if (plain) {
        *e = v_loadu(s->code + 4 * r);
        *o = v_loadu(s->code + 4 * (r + VL));
    } else if (role == HALFSTEP_ROLE_WEIGHT) {
        *e = v_load(s->scratch->old + r);
        *o = v_load(s->scratch->old + r + VL);
    } else if (role == HALFSTEP_ROLE_SIGNED) {
        f1(s, 0, r, e, o);
    } else if (role == HALFSTEP_ROLE_NONNEG) {
        f2(s, 1, r, e, o);
    } else {
        fg(s, 0, r, e, o);
    }
}

/* Stores the weights e - de and o - d_o as f32. Adding 0 first keeps a weight of -0 (apply_any()). */
V_OP void plain_apply(char *code, int64_t r, vf e, vf o, vf de, vf d_o)
{
    v_storeu(code + 4 * r, v_sub(e, v_add(de, v_set(0.0f))));
    v_storeu(code + 4 * (r + VL), v_sub(o, v_add(d_o, v_set(0.0f))));
}

V_OP void state_store(const int role, const int plain, fused_storer *f1, fused_storer *f2, fused_storer *fg,
                      struct fused_slot *s, int64_t r, vf e, vf o)
{
    if (!role) return;
    if (role == HALFSTEP_ROLE_WEIGHT && plain) {
        plain_apply(s->code, r, v_loadu(s->code + 4 * r), v_loadu(s->code + 4 * (r + VL)), e, o);
    } else if (plain) {
        v_storeu(s->code + 4 * r, v_from_bits(hstep_flush(v_bits(e))));
        v_storeu(s->code + 4 * (r + VL), v_from_bits(hstep_flush(v_bits(o))));
    } else if (role == HALFSTEP_ROLE_WEIGHT) {
        v_store(s->scratch->stash + r, e);
        v_store(s->scratch->stash + r + VL, o);
    } else if (role == HALFSTEP_ROLE_SIGNED) {
        f1(s, 0, r, e, o);
    } else if (role == HALFSTEP_ROLE_NONNEG) {
        f2(s, 1, r, e, o);
    } else {
        fg(s, 0, r, e, o);
    }
}

/* Returns the kind of parts that a variant has, from the kind of its rule. */
V_OP int fused_parts(const int kind, const int variant)
{
    return kind == HSTEP_PARTS_UNLESS_OPTION ? (variant ? 0 : HSTEP_PARTS_ROOT) : kind;
}

/* Constants of a loop, known at compile time. Bit 0 of `blocks` is set if `first` has blocks, bit 1 if `second` has. */
struct fused_what {
    int parts, variant, gradient, first, second, blocks;
    struct hstep_roles states;
};

V_OP int is_f32_state(const int role, const struct fused_what w)
{
    return role == HALFSTEP_ROLE_NONNEG ? w.second == HSTEP_FORMAT_f32
                                        : !role || role == HALFSTEP_ROLE_WEIGHT || w.first == HSTEP_FORMAT_f32;
}

V_OP int fused_mode(const struct fused_what w, const int roles)
{
    const int clamp = (w.blocks & 1 && roles & HALFSTEP_ROLE_SIGNED) || (w.blocks & 2 && roles & HALFSTEP_ROLE_NONNEG);
    return (clamp ? RULE_CLAMP : 0) | (w.variant ? RULE_OPTION : 0);
}

/* Stands in for PREFIX_start() in rules that are not in parts. It is never called. */
V_OP vf whole_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    (void)k, (void)s, (void)mode;
    *root = g;
    return g;
}

/* Runs the first loop on n elements from t on. Stores the new states, or stashes them for block formats. Leaves the
 * change, or numerator and root for a rule in parts, in scratch memory. A step that is all f32 updates the weight at
 * once instead, unless its parts have a root. Parameters: b begins, l loads and w stores a slot. The suffix g is for
 * the gradient, 1 for signed states, 2 for second moments. */
V_OP void fused_rule(const struct hstep_fused *a, struct fused_scratch *scratch, const struct fused_what w,
                     vf (*rule)(const vf *, vf, vf, vf *, int), vf (*start)(const vf *, vf, vf *, int, vf *),
                     fused_loader *lg, fused_starter *b1, fused_loader *l1, fused_storer *w1, fused_starter *b2,
                     fused_loader *l2, fused_storer *w2, int64_t t, int64_t n)
{
    const int r0 = fused_role(0, &w.states, w.variant), r1 = fused_role(1, &w.states, w.variant);
    const int r2 = fused_role(2, &w.states, w.variant), r3 = fused_role(3, &w.states, w.variant);
    const int mode = fused_mode(w, r0 | r1 | r2 | r3), wide = w.gradient == HSTEP_FORMAT_f32;
    /* No 16-bit format asks for pairs, so elements stay in the order of memory and need no shuffles. */
    const int plain = wide && is_f32_state(r0, w) && is_f32_state(r1, w) && is_f32_state(r2, w) && is_f32_state(r3, w);
    /* The formats that hstep_fused_format() gives. */
    fused_starter *const b3 = !(w.blocks & 1) ? b1 : wide ? fused_start_f32 : fused_start_bf16_sr;
    fused_loader *const l3 = !(w.blocks & 1) ? l1 : wide ? fused_load_f32 : fused_load_bf16_sr;
    fused_storer *const w3 = !(w.blocks & 1) ? w1 : wide ? fused_store_f32 : fused_store_bf16_sr;
    struct fused_slot s0 = state_start(r0, b1, b2, b3, a, scratch, 0, t, n);
    struct fused_slot s1 = state_start(r1, b1, b2, b3, a, scratch, 1, t, n);
    struct fused_slot s2 = state_start(r2, b1, b2, b3, a, scratch, 2, t, n);
    struct fused_slot s3 = state_start(r3, b1, b2, b3, a, scratch, 3, t, n);
    struct fused_slot g = {.code = w.gradient == HSTEP_FORMAT_any
                                       ? (char *)scratch->gradient
                                       : a->code[HALFSTEP_SLOT_GRADIENT] + (wide ? 4 : 2) * t};
    char *weight = a->code[HALFSTEP_SLOT_WEIGHT] + (plain ? 4 * t : 0);
    vf k[HSTEP_MAX_SCALARS];
    const struct gradient_terms terms = gradient_terms(a->gradient_scale, 0.0f, 0.0f);
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);

    for (int64_t b = 0; b < n; b += HSTEP_CELL)
        for (int64_t r = b; r < b + HSTEP_CELL; r += PAIR) {
            vf ge, go, se[HALFSTEP_MAX_STATES], so[HALFSTEP_MAX_STATES];
            if (plain) ge = v_loadu(g.code + 4 * r), go = v_loadu(g.code + 4 * (r + VL));
            else lg(&g, 0, r, &ge, &go);
            state_load(r0, plain, l1, l2, l3, &s0, r, &se[0], &so[0]);
            state_load(r1, plain, l1, l2, l3, &s1, r, &se[1], &so[1]);
            state_load(r2, plain, l1, l2, l3, &s2, r, &se[2], &so[2]);
            state_load(r3, plain, l1, l2, l3, &s3, r, &se[3], &so[3]);
            if (w.gradient != HSTEP_FORMAT_any) {
                ge = effective_gradient(terms, ge, ge);
                go = effective_gradient(terms, go, go);
            }
            if (w.parts == HSTEP_PARTS_ROOT || (w.parts == HSTEP_PARTS_ROOTLESS && !plain)) {
                vf re, ro;
                v_store(scratch->change + r, start(k, ge, se, mode, &re));
                v_store(scratch->change + r + VL, start(k, go, so, mode, &ro));
                if (w.parts == HSTEP_PARTS_ROOT) {
                    v_store(scratch->root + r, re);
                    v_store(scratch->root + r + VL, ro);
                }
            } else {
                vf we = plain ? v_loadu(weight + 4 * r) : v_load(scratch->weight + r);
                vf wo = plain ? v_loadu(weight + 4 * (r + VL)) : v_load(scratch->weight + r + VL);
                vf de = rule(k, we, ge, se, mode), d_o = rule(k, wo, go, so, mode);
                if (plain) {
                    plain_apply(weight, r, we, wo, de, d_o);
                } else {
                    v_store(scratch->change + r, de);
                    v_store(scratch->change + r + VL, d_o);
                }
            }
            state_store(r0, plain, w1, w2, w3, &s0, r, se[0], so[0]);
            state_store(r1, plain, w1, w2, w3, &s1, r, se[1], so[1]);
            state_store(r2, plain, w1, w2, w3, &s2, r, se[2], so[2]);
            state_store(r3, plain, w1, w2, w3, &s3, r, se[3], so[3]);
        }
}

/* ---- Sums over the tensor that come before its update ---- */

/* One sum of squares within the loop, and the largest magnitude in it. */
struct fused_sum {
    va lanes;
    vi largest;
};

V_OP struct fused_sum fused_no_sum(void) { return (struct fused_sum){va_zero(), vi_set(0)}; }

/* Adds the squares of pair number `part` of a cell to the sum. With `plain`, the vectors are in the order of memory.
 * They then first become a pair, by way of the scratch memory `plain_pair`. */
V_OP void fused_square(struct fused_sum *s, const int part, vf e, vf o, const int plain, float *plain_pair)
{
    if (plain) {
        v_store(plain_pair, e);
        v_store(plain_pair + VL, o);
        vp_load_f32(plain_pair, &e, &o);
    }
    va_add_product(&s->lanes, part, e, e);
    va_add_product(&s->lanes, part, o, o);
    s->largest = vi_max(s->largest, vi_max(v_bits(v_abs(e)), v_bits(v_abs(o))));
}

/* Returns the sum, or 0 if any of the values is not finite. */
V_OP double fused_total(const struct fused_sum *s)
{
    double lanes[16];
    va_store(s->lanes, lanes);
    return vi_hmax(s->largest) < 0x7f800000 ? hstep_tree_sum(lanes) : 0.0;
}

/* Writes the sums of the squares of n elements from t on, at most 256, to sums[0 .. count). docs/numerics.md gives the
 * order: in pairs. A sum with a value that is not finite counts as 0. The weight is in scratch memory unless all is
 * f32. */
V_OP void fused_norms(const struct hstep_fused *a, struct fused_scratch *scratch, const struct fused_what w,
                      void (*norms)(const vf *, vf, vf, vf *, vf *, int), const int count, fused_loader *lg,
                      fused_starter *b1, fused_loader *l1, fused_starter *b2, fused_loader *l2, int64_t t, int64_t n,
                      double *sums)
{
    const int r0 = fused_role(0, &w.states, w.variant), r1 = fused_role(1, &w.states, w.variant);
    const int r2 = fused_role(2, &w.states, w.variant), r3 = fused_role(3, &w.states, w.variant);
    const int mode = fused_mode(w, r0 | r1 | r2 | r3), wide = w.gradient == HSTEP_FORMAT_f32;
    /* Vectors in the order of memory become pairs when they are summed. */
    const int plain = wide && is_f32_state(r0, w) && is_f32_state(r1, w) && is_f32_state(r2, w) && is_f32_state(r3, w);
    const char *weight = a->code[HALFSTEP_SLOT_WEIGHT] + (plain ? 4 * t : 0);
    /* As in fused_rule(). */
    fused_starter *const b3 = !(w.blocks & 1) ? b1 : wide ? fused_start_f32 : fused_start_bf16_sr;
    fused_loader *const l3 = !(w.blocks & 1) ? l1 : wide ? fused_load_f32 : fused_load_bf16_sr;
    struct fused_slot s0 = state_start(r0, b1, b2, b3, a, scratch, 0, t, n);
    struct fused_slot s1 = state_start(r1, b1, b2, b3, a, scratch, 1, t, n);
    struct fused_slot s2 = state_start(r2, b1, b2, b3, a, scratch, 2, t, n);
    struct fused_slot s3 = state_start(r3, b1, b2, b3, a, scratch, 3, t, n);
    struct fused_slot g = {.code = w.gradient == HSTEP_FORMAT_any
                                       ? (char *)scratch->gradient
                                       : a->code[HALFSTEP_SLOT_GRADIENT] + (wide ? 4 : 2) * t};
    vf k[HSTEP_MAX_SCALARS];
    const struct gradient_terms terms = gradient_terms(a->gradient_scale, 0.0f, 0.0f);
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);
    struct fused_sum sum0 = fused_no_sum(), sum1 = fused_no_sum(), sum2 = fused_no_sum(), sum3 = fused_no_sum();
    for (int64_t b = 0; b < n; b += HSTEP_CELL)
        for (int part = 0; part < PAIRS; part++) {
            const int64_t r = b + part * PAIR;
            vf ge, go, se[HALFSTEP_MAX_STATES], so[HALFSTEP_MAX_STATES], xe[HSTEP_MAX_NORMS], xo[HSTEP_MAX_NORMS];
            if (plain) ge = v_loadu(g.code + 4 * r), go = v_loadu(g.code + 4 * (r + VL));
            else lg(&g, 0, r, &ge, &go);
            state_load(r0, plain, l1, l2, l3, &s0, r, &se[0], &so[0]);
            state_load(r1, plain, l1, l2, l3, &s1, r, &se[1], &so[1]);
            state_load(r2, plain, l1, l2, l3, &s2, r, &se[2], &so[2]);
            state_load(r3, plain, l1, l2, l3, &s3, r, &se[3], &so[3]);
            vf we = plain ? v_loadu(weight + 4 * r) : v_load(scratch->weight + r);
            vf wo = plain ? v_loadu(weight + 4 * (r + VL)) : v_load(scratch->weight + r + VL);
            if (w.gradient != HSTEP_FORMAT_any) {
                ge = effective_gradient(terms, ge, ge);
                go = effective_gradient(terms, go, go);
            }
            norms(k, we, ge, se, xe, mode);
            norms(k, wo, go, so, xo, mode);
            if (count > 0) fused_square(&sum0, part, xe[0], xo[0], plain, scratch->state[0].stash + r);
            if (count > 1) fused_square(&sum1, part, xe[1], xo[1], plain, scratch->state[1].stash + r);
            if (count > 2) fused_square(&sum2, part, xe[2], xo[2], plain, scratch->state[2].stash + r);
            if (count > 3) fused_square(&sum3, part, xe[3], xo[3], plain, scratch->state[3].stash + r);
        }
    if (count > 0) sums[0] = fused_total(&sum0);
    if (count > 1) sums[1] = fused_total(&sum1);
    if (count > 2) sums[2] = fused_total(&sum2);
    if (count > 3) sums[3] = fused_total(&sum3);
}

/* ---- Gradients that are changed before the rule sees them ---- */

/* Writes the gradient as the rule takes it to scratch memory. If l2 is not 0, the weight must be in scratch memory, or
 * in place if plain. */
V_OP void fused_gradient(const int bits, const int extra_bits, const int plain,
                         void (*decode)(const char *, const char *, int64_t, vf *, vf *), const struct hstep_fused *a,
                         struct fused_scratch *scratch, int64_t t, int64_t n)
{
    const char *code = a->code[HALFSTEP_SLOT_GRADIENT] + t * bits / 8;
    const char *extra = a->extra[HALFSTEP_SLOT_GRADIENT] + t * extra_bits / 8;
    const char *weight = a->code[HALFSTEP_SLOT_WEIGHT] + (plain ? 4 * t : 0);
    const struct gradient_terms terms = gradient_terms(a->gradient_scale, a->mean, a->l2);
    for (int64_t r = 0; r < n; r += PAIR) {
        vf ge, go;
        if (plain) ge = v_loadu(code + 4 * r), go = v_loadu(code + 4 * (r + VL));
        else decode(code, extra, r, &ge, &go);
        vf we = v_set(0.0f), wo = v_set(0.0f);
        if (terms.decayed) {
            we = plain ? v_loadu(weight + 4 * r) : v_load(scratch->weight + r);
            wo = plain ? v_loadu(weight + 4 * (r + VL)) : v_load(scratch->weight + r + VL);
        }
        v_store(scratch->gradient + r, effective_gradient(terms, ge, we));
        v_store(scratch->gradient + r + VL, effective_gradient(terms, go, wo));
    }
}

typedef void fused_gradient_function(const struct hstep_fused *, struct fused_scratch *, int64_t, int64_t);

#if VL > 1
/* For a step that is all f32, in the order of memory. */
static void fused_gradient_plain(const struct hstep_fused *a, struct fused_scratch *scratch, int64_t t, int64_t n)
{
    fused_gradient(32, 0, 1, f32_decode, a, scratch, t, n);
}
#endif

/* ---- The weight, and states that are stored as it is ---- */

/* Subtracts `change` from the values `old` and stores the result in the slot. */
V_OP void fused_apply(const int format, const struct hstep_fused *a, int slot, const float *old, const float *change,
                      int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    char *code = a->code[slot] + code_place(c, t), *extra = a->extra[slot] + extra_place(c, t);
    struct fused_words words = fused_words_from(a, slot, t);
    for (int64_t r = 0; r < n; r += PAIR)
        apply_any(format, code, extra, r, v_load(old + r), v_load(old + r + VL), v_load(change + r),
                  v_load(change + r + VL), fused_words(&words));
}

/* Returns the change of a vector in a packed weight's loop, from r on: the end of a rule in parts, or what is in
 * scratch memory. */
V_OP vf packed_change(vf (*end)(const vf *, vf, vf, vf), const vf *k, vf weight, const float *change, const float *root,
                      int64_t r)
{
    return end ? end(k, weight, v_load(change + r), v_load(root + r)) : v_load(change + r);
}

/* Does fused_apply() or fused_end() for a packed format. `end` is NULL unless the rule's end comes here. */
V_OP void fused_packed(const int format, vf (*end)(const vf *, vf, vf, vf), const struct hstep_fused *a, int slot,
                       const float *change, const float *root, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    char *code = a->code[slot] + code_place(c, t), *extra = a->extra[slot] + extra_place(c, t);
    struct fused_words words = fused_words_from(a, slot, t);
    const struct packed_scales scales = packed_scales_of(format, code, n);
    vf k[HSTEP_MAX_SCALARS];
    for (int j = 0; end && j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);
    for (int64_t b = 0; b < n; b += HSTEP_PACKED_BLOCK) {
        char *block = code + code_place(c, b), *errors = extra + extra_place(c, b);
        const vf unit = v_set(scales.unit[b / HSTEP_PACKED_BLOCK]);
        const struct positions p = load_block(format, block, errors);
        vf changes[2 * PAIRS];
        vi drawn[PAIRS];
        for (int j = 0; j < 2 * PAIRS; j++)
            changes[j] = packed_change(end, k, hstep_packed_value(p.x[j], unit), change, root, b + j * VL);
        for (int j = 0; j < PAIRS; j++) drawn[j] = fused_words(&words);
        change_block(format, block, errors, &p, unit, v_set(scales.factor[b / HSTEP_PACKED_BLOCK]), changes, drawn);
    }
}

/* Computes and stores the weight under a rule in parts, from the numerator and the root in scratch memory. */
V_OP void fused_end(const int bits, const int extra_bits, const int plain,
                    void (*decode)(const char *, const char *, int64_t, vf *, vf *),
                    void (*apply)(char *, char *, int64_t, vf, vf, vf, vf, vi), vf (*end)(const vf *, vf, vf, vf),
                    const struct hstep_fused *a, const struct fused_scratch *scratch, int64_t t, int64_t n)
{
    char *code = a->code[HALFSTEP_SLOT_WEIGHT] + t * bits / 8;
    char *extra = a->extra[HALFSTEP_SLOT_WEIGHT] + t * extra_bits / 8;
    struct fused_words words = fused_words_from(a, HALFSTEP_SLOT_WEIGHT, t);
    const vf zero = v_set(0.0f);
    vf k[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);
    for (int64_t r = 0; r < n; r += PAIR) {
        vf we, wo;
        if (plain) we = v_loadu(code + 4 * r), wo = v_loadu(code + 4 * (r + VL));
        else decode(code, extra, r, &we, &wo);
        vf de = end(k, we, v_load(scratch->change + r), v_load(scratch->root + r));
        vf d_o = end(k, wo, v_load(scratch->change + r + VL), v_load(scratch->root + r + VL));
        /* Adds zero as apply_any() does. */
        if (plain) plain_apply(code, r, we, wo, de, d_o);
        else apply(code, extra, r, we, wo, v_add(de, zero), v_add(d_o, zero), fused_words(&words));
    }
}

/* Replaces the numerator in scratch memory by the change. The weight must be in scratch memory. */
V_OP void fused_change(vf (*end)(const vf *, vf, vf, vf), const struct hstep_fused *a, struct fused_scratch *scratch,
                       int64_t n)
{
    vf k[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);
    for (int64_t r = 0; r < n; r += VL)
        v_store(scratch->change + r,
                end(k, v_load(scratch->weight + r), v_load(scratch->change + r), v_load(scratch->root + r)));
}

typedef void fused_end_function(const struct hstep_fused *, struct fused_scratch *, int64_t, int64_t);

typedef void fused_summer(const struct hstep_fused *, struct fused_scratch *, int64_t, int64_t, double *);
typedef void fused_tile(const struct hstep_fused *, struct fused_scratch *, int64_t, int64_t);
typedef void fused_apply_function(const struct hstep_fused *, int, const float *, const float *, int64_t, int64_t);

/* ---- Codes of block states ---- */

/* Stores the scales of a block state, from the maxima of its cells, and keeps their inverses. */
V_OP void fused_scales(const int format, const int nonneg, const struct hstep_fused *a, struct fused_state *scratch,
                       int slot, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    HSTEP_ALIGNED uint32_t maxima[16];
    block_maxima(scratch->maxima, n / HSTEP_CELL, maxima);
    encode_scales(format, nonneg, maxima, a->extra[slot] + t / c.block * hstep_scale_bytes(c.scale), scratch->inverses,
                  n);
}

V_OP void fused_codes(const int format, const int nonneg, const struct hstep_fused *a, struct fused_state *scratch,
                      int slot, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    char *code = a->code[slot] + t * c.bits / 8;
    struct fused_words words = fused_words_from(a, slot, t);
    fused_scales(format, nonneg, a, scratch, slot, t, n);
    for (int64_t r = 0; r < n; r += PAIR)
        encode_codes(format, nonneg, scratch->stash, scratch->inverses, code, r,
                     c.stochastic ? mixer_next(&words.x, words.k1) : vi_set(0x80008000));
}

/* Encodes a signed state and a second moment in one loop. The codes of one often wait for roots, and the other needs
 * none. */
V_OP void fused_both(const int first, const int second, const struct hstep_fused *a, struct fused_scratch *scratch,
                     int j0, int j1, int64_t t, int64_t n)
{
    const struct columns c0 = columns_of(first), c1 = columns_of(second);
    const int p = HALFSTEP_SLOT_STATE + j0, q = HALFSTEP_SLOT_STATE + j1;
    struct fused_state *const s0 = &scratch->state[j0], *const s1 = &scratch->state[j1];
    char *code0 = a->code[p] + t * c0.bits / 8, *code1 = a->code[q] + t * c1.bits / 8;
    struct fused_words words0 = fused_words_from(a, p, t), words1 = fused_words_from(a, q, t);
    const vi half = vi_set(0x80008000);
    fused_scales(first, 0, a, s0, p, t, n);
    fused_scales(second, 1, a, s1, q, t, n);
    for (int64_t r = 0; r < n; r += PAIR) {
        encode_codes(first, 0, s0->stash, s0->inverses, code0, r,
                     c0.stochastic ? mixer_next(&words0.x, words0.k1) : half);
        encode_codes(second, 1, s1->stash, s1->inverses, code1, r,
                     c1.stochastic ? mixer_next(&words1.x, words1.k1) : half);
    }
}

typedef void fused_both_function(const struct hstep_fused *, struct fused_scratch *, int, int, int64_t, int64_t);
typedef void fused_codes_function(const struct hstep_fused *, struct fused_state *, int, int64_t, int64_t);

#if VL > 1
/* ---- By format, at run time ---- */

#define FUSED_ELEMENT_FUNCTIONS(fn)                                                                                   \
    static void fused_gradient_##fn(const struct hstep_fused *a, struct fused_scratch *scratch, int64_t t, int64_t n) \
    {                                                                                                                 \
        fused_gradient(fn##_code_bits, fn##_extra_bits, 0, fn##_decode, a, scratch, t, n);                            \
    }                                                                                                                 \
    static void fused_apply_##fn(const struct hstep_fused *a, int slot, const float *old, const float *change,        \
                                 int64_t t, int64_t n)                                                                \
    {                                                                                                                 \
        fused_apply(HSTEP_FORMAT_##fn, a, slot, old, change, t, n);                                                   \
    }
#define FUSED_PACKED_APPLY(fn)                                                                                 \
    static void fused_apply_##fn(const struct hstep_fused *a, int slot, const float *old, const float *change, \
                                 int64_t t, int64_t n)                                                         \
    {                                                                                                          \
        (void)old;                                                                                             \
        fused_packed(HSTEP_FORMAT_##fn, NULL, a, slot, change, NULL, t, n);                                    \
    }
#define FUSED_CODES(fn, nonneg)                                                                                 \
    static void fused_codes_##fn##_##nonneg(const struct hstep_fused *a, struct fused_state *scratch, int slot, \
                                            int64_t t, int64_t n)                                               \
    {                                                                                                           \
        fused_codes(HSTEP_FORMAT_##fn, nonneg, a, scratch, slot, t, n);                                         \
    }
#define FORMAT(id, fn)                          \
    IF_ELEMENT(fn, FUSED_ELEMENT_FUNCTIONS(fn)) \
    IF_PACKED(fn, FUSED_PACKED_APPLY(fn))       \
    IF_BLOCK(fn, FUSED_CODES(fn, 0) FUSED_CODES(fn, 1))
#include "formats/formats.def"
#undef FORMAT

/* NULL if the format has no such function. */
static const struct {
    fused_gradient_function *gradient[HSTEP_FORMATS];
    fused_apply_function *apply[HSTEP_FORMATS];
    fused_codes_function *codes[HSTEP_FORMATS][2];
    void (*decode[HSTEP_FORMATS])(float *, const char *, const char *, int64_t);
} fused_formats = {
#define FORMAT(id, fn)                                                                                               \
    IF_ELEMENT(fn, .gradient[HSTEP_FORMAT_##fn] = fused_gradient_##fn, .apply[HSTEP_FORMAT_##fn] = fused_apply_##fn, \
               .decode[HSTEP_FORMAT_##fn] = decode_##fn##_0, )                                                       \
    IF_PACKED(fn, .apply[HSTEP_FORMAT_##fn] = fused_apply_##fn, .decode[HSTEP_FORMAT_##fn] = decode_##fn##_0, )      \
    IF_BLOCK(fn, .codes[HSTEP_FORMAT_##fn] = {fused_codes_##fn##_0, fused_codes_##fn##_1}, )
#include "formats/formats.def"
#undef FORMAT
};

static void fused_copy(const struct hstep_fused *a, int to, int from, int64_t t, int64_t n)
{
    const struct columns c = columns_of(a->format[from]);
    memcpy(a->code[to] + code_place(c, t), a->code[from] + code_place(c, t), (size_t)code_place(c, n));
    if (c.extra_bits)
        memcpy(a->extra[to] + extra_place(c, t), a->extra[from] + extra_place(c, t), (size_t)extra_place(c, n));
}

/* Decodes n elements of the weight, or of a state that is stored as the weight is. */
static void fused_decode(const struct hstep_fused *a, int slot, float *x, int64_t t, int64_t n)
{
    const int format = a->format[slot];
    /* gcc for aarch64 takes the index for one out of bounds, unless it is told this. */
    if (format < 0 || format >= HSTEP_FORMATS) return;
    const struct columns c = columns_of(format);
    fused_formats.decode[format](x, a->code[slot] + code_place(c, t), a->extra[slot] + extra_place(c, t), n);
}
#endif
#endif
