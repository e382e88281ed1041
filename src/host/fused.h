/* Whole steps over tiles that stay in the first cache, for the recipes of fused.def under every rule. For kernels.c.
 *
 * A tile goes through short loops, each with a chain of instructions that a processor sees to its end while it waits
 * for the divider: what comes before the weight (gradient and states decoded, the rule, states encoded), the weight,
 * and the codes of block states. Only the first is compiled for each rule and recipe; the others are shared. */
#ifndef HSTEP_FUSED_H
#define HSTEP_FUSED_H

#include "host/tiles.h"

/* Sixteen groups: their maxima fill one vector of the widest instruction set. */
#define FUSED_TILE 512
#define FUSED_GROUPS (FUSED_TILE / HSTEP_GROUP)

/* Of a state that is stored as the weight is: fp32 scratch, which the driver decodes and encodes. */
#define FUSED_AS_WEIGHT (-2)

/* What one state keeps of a tile: new values, or what a block format makes of them; scales are the stored ones as fp32,
 * so that a loop reads them at no cost. */
struct fused_state {
    HSTEP_ALIGNED float stash[FUSED_TILE];
    HSTEP_ALIGNED float old[FUSED_TILE]; /* of one that is stored as the weight is */
    HSTEP_ALIGNED float scales[FUSED_GROUPS];
    HSTEP_ALIGNED float inverses[FUSED_GROUPS];
    HSTEP_ALIGNED uint32_t maxima[FUSED_GROUPS][VL];
};

struct fused_room {
    HSTEP_ALIGNED float weight[FUSED_TILE];
    HSTEP_ALIGNED float change[FUSED_TILE];
    struct fused_state state[HALFSTEP_MAX_STATES];
};

/* Random words of one slot on their way through a loop. */
struct fused_words {
    vi x, k1, factor, offset;
};

V_OP struct fused_words fused_words_from(const struct hstep_fused *a, int slot, int64_t element)
{
    const struct hstep_key *key = &a->key[slot];
    return (struct fused_words){mixer_start(key, (a->index + (uint64_t)element) / 2), vi_set(key->k[1]),
                                vi_set(key->factor), vi_set(key->offset)};
}

/* Words of an element format. Block codes take the mixer's as they are, and do not pay for factor and offset. */
V_OP vi fused_words(struct fused_words *w) { return lattice_of(mixer_next(&w->x, w->k1), w->factor, w->offset); }

/* ---- What comes before the weight ---- */

/* One state on its way through the first loop of a tile. */
struct fused_slot {
    char *code, *extra; /* of the tile */
    struct fused_words words;
    vi largest;    /* of the group's magnitudes */
    vf grid, onto; /* of a second moment */
    struct fused_state *room;
};

/* Format and role are constants at every call, and calls are written out instead of looped over: a loop that the
 * compiler leaves rolled would turn the switches on formats into real ones. */
V_OP struct fused_slot fused_start(const struct hstep_fused *a, struct fused_room *room, const int state,
                                   const int format, const int nonneg, int64_t t, int64_t n)
{
    const int slot = HALFSTEP_SLOT_STATE + state;
    const struct columns c = columns_of(format);
    struct fused_slot s = {.room = &room->state[state], .largest = vi_set(0)};
    if (format == HSTEP_FORMAT_NONE) return s;
    if (format == FUSED_AS_WEIGHT) {
        /* Read and written here where it is f32, and nothing else is smaller. */
        s.code = a->code[slot] + 4 * t;
        return s;
    }
    s.code = a->code[slot] + t * c.bits / 8;
    s.extra = a->extra[slot] + (c.block ? t / c.block * hstep_scale_bytes(c.scale) : t * c.extra_bits / 8);
    if (!c.block) s.words = fused_words_from(a, slot, t);
    if (has_grid(format, nonneg)) s.grid = v_set(a->grid[slot]), s.onto = v_set(a->onto[slot]);
    if (c.block)
        for (int64_t b = 0; b * c.block < n; b++) {
            uint32_t scale = hstep_scale_load(c.scale, s.extra, b);
            memcpy(&s.room->scales[b], &scale, 4);
        }
    return s;
}

/* plain: scratch is in the order of memory, and what is stored as weights is f32. */
V_OP void fused_load(const struct fused_slot *s, const int format, const int nonneg, const int plain, int64_t r, vf *e,
                     vf *o)
{
    if (format == HSTEP_FORMAT_NONE) {
        *e = *o = v_set(0.0f);
    } else if (plain) {
        *e = v_loadu(s->code + 4 * r);
        *o = v_loadu(s->code + 4 * (r + VL));
    } else if (format == FUSED_AS_WEIGHT) {
        *e = v_load(s->room->old + r);
        *o = v_load(s->room->old + r + VL);
    } else if (is_block(format)) {
        load_scaled(format, nonneg, s->code, v_set(s->room->scales[r / columns_of(format).block]), r, e, o);
        if (has_grid(format, nonneg)) *e = v_mul(*e, s->grid), *o = v_mul(*o, s->grid);
    } else {
        load_any(format, nonneg, s->code, s->extra, r, e, o);
    }
}

V_OP void fused_apply_plain(char *code, int64_t r, vf e, vf o, vf de, vf d_o)
{
    v_storeu(code + 4 * r, v_sub(e, v_add(de, v_set(0.0f))));
    v_storeu(code + 4 * (r + VL), v_sub(o, v_add(d_o, v_set(0.0f))));
}

V_OP void fused_store(struct fused_slot *s, const int format, const int nonneg, const int plain, int64_t r, vf e, vf o)
{
    if (format == HSTEP_FORMAT_NONE) return;
    if (format == FUSED_AS_WEIGHT && plain) {
        fused_apply_plain(s->code, r, v_loadu(s->code + 4 * r), v_loadu(s->code + 4 * (r + VL)), e, o);
    } else if (plain) {
        v_storeu(s->code + 4 * r, v_from_bits(hstep_flush(v_bits(e))));
        v_storeu(s->code + 4 * (r + VL), v_from_bits(hstep_flush(v_bits(o))));
    } else if (format == FUSED_AS_WEIGHT) {
        v_store(s->room->stash + r, e);
        v_store(s->room->stash + r + VL, o);
    } else if (is_block(format)) {
        vf stashed_e = stash_any(format, e, nonneg), stashed_o = stash_any(format, o, nonneg);
        if (has_grid(format, nonneg)) {
            stashed_e = onto_grid(format, stashed_e, s->onto);
            stashed_o = onto_grid(format, stashed_o, s->onto);
        }
        v_store(s->room->stash + r, stashed_e);
        v_store(s->room->stash + r + VL, stashed_o);
        vi larger = vi_max(magnitude_of(e, stashed_e, nonneg), magnitude_of(o, stashed_o, nonneg));
        s->largest = r % HSTEP_GROUP ? vi_max(s->largest, larger) : larger;
        vi_store(s->room->maxima[r / HSTEP_GROUP], s->largest);
    } else {
        store_any(format, s->code, s->extra, r, e, o, fused_words(&s->words), 1);
    }
}

/* States of a rule, one byte each: the role, and this where variant v of the rule stores it only if bit i of v is set, i
 * counting such states. */
#define FUSED_CONDITIONAL 16

V_OP int fused_role(const int j, const int states, const int variant)
{
    const int conditional = states >> 4 & 0x01010101, before = conditional & ((1 << 8 * j) - 1);
    const int i = (before & 1) + (before >> 8 & 1) + (before >> 16 & 1);
    if (conditional >> 8 * j & 1 && !(variant >> i & 1)) return 0;
    return states >> 8 * j & 15;
}

V_OP int fused_format(const int role, const int gradient, const int first, const int second)
{
    if (!role) return HSTEP_FORMAT_NONE;
    if (role == HALFSTEP_ROLE_WEIGHT) return FUSED_AS_WEIGHT;
    return hstep_fused_format(role, gradient, first, second, is_block(first));
}

V_OP int is_f32_or_none(const int format)
{
    return format == HSTEP_FORMAT_f32 || format == HSTEP_FORMAT_NONE || format == FUSED_AS_WEIGHT;
}

V_OP void fused_rule(const struct hstep_fused *a, struct fused_room *room, vf (*rule)(const vf *, vf, vf, vf *, int),
                     const int states, const int variant, const int gradient, const int first, const int second,
                     int64_t t, int64_t n)
{
    const int r0 = fused_role(0, states, variant), r1 = fused_role(1, states, variant);
    const int r2 = fused_role(2, states, variant), r3 = fused_role(3, states, variant);
    const int n0 = r0 == HALFSTEP_ROLE_NONNEG, n1 = r1 == HALFSTEP_ROLE_NONNEG;
    const int n2 = r2 == HALFSTEP_ROLE_NONNEG, n3 = r3 == HALFSTEP_ROLE_NONNEG;
    const int f0 = fused_format(r0, gradient, first, second), f1 = fused_format(r1, gradient, first, second);
    const int f2 = fused_format(r2, gradient, first, second), f3 = fused_format(r3, gradient, first, second);
    const int mode =
        (is_block(f0) || is_block(f1) || is_block(f2) || is_block(f3) ? RULE_CLAMP : 0) | (variant ? RULE_OPTION : 0);
    /* No 16-bit neighbour asks for pairs: elements stay in memory order and need no shuffles. */
    const int plain = gradient == HSTEP_FORMAT_f32 && is_f32_or_none(f0) && is_f32_or_none(f1) && is_f32_or_none(f2) &&
                      is_f32_or_none(f3);
    struct fused_slot s0 = fused_start(a, room, 0, f0, n0, t, n), s1 = fused_start(a, room, 1, f1, n1, t, n);
    struct fused_slot s2 = fused_start(a, room, 2, f2, n2, t, n), s3 = fused_start(a, room, 3, f3, n3, t, n);
    struct fused_slot g = {.code = a->code[HALFSTEP_SLOT_GRADIENT] + t * columns_of(gradient).bits / 8};
    char *weight = a->code[HALFSTEP_SLOT_WEIGHT] + 4 * t;
    vf k[HSTEP_MAX_SCALARS], scale = v_set(a->gradient_scale);
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);

    for (int64_t b = 0; b < n; b += HSTEP_GROUP)
        for (int64_t r = b; r < b + HSTEP_GROUP; r += PAIR) {
            vf ge, go, se[HALFSTEP_MAX_STATES], so[HALFSTEP_MAX_STATES];
            vf we = plain ? v_loadu(weight + 4 * r) : v_load(room->weight + r);
            vf wo = plain ? v_loadu(weight + 4 * (r + VL)) : v_load(room->weight + r + VL);
            fused_load(&g, gradient, 0, plain, r, &ge, &go);
            fused_load(&s0, f0, n0, plain, r, &se[0], &so[0]);
            fused_load(&s1, f1, n1, plain, r, &se[1], &so[1]);
            fused_load(&s2, f2, n2, plain, r, &se[2], &so[2]);
            fused_load(&s3, f3, n3, plain, r, &se[3], &so[3]);
            vf de = rule(k, we, v_mul(ge, scale), se, mode), d_o = rule(k, wo, v_mul(go, scale), so, mode);
            if (plain) {
                fused_apply_plain(weight, r, we, wo, de, d_o);
            } else {
                v_store(room->change + r, de);
                v_store(room->change + r + VL, d_o);
            }
            fused_store(&s0, f0, n0, plain, r, se[0], so[0]);
            fused_store(&s1, f1, n1, plain, r, se[1], so[1]);
            fused_store(&s2, f2, n2, plain, r, se[2], so[2]);
            fused_store(&s3, f3, n3, plain, r, se[3], so[3]);
        }
}

/* ---- The weight, and states that are stored as it is ---- */

V_OP void fused_apply(const int format, const struct hstep_fused *a, int slot, const float *old, const float *change,
                      int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    char *code = a->code[slot] + t * c.bits / 8, *extra = a->extra[slot] + t * c.extra_bits / 8;
    struct fused_words words = fused_words_from(a, slot, t);
    for (int64_t r = 0; r < n; r += PAIR)
        apply_any(format, code, extra, r, v_load(old + r), v_load(old + r + VL), v_load(change + r),
                  v_load(change + r + VL), fused_words(&words));
}

typedef void fused_apply_function(const struct hstep_fused *, int, const float *, const float *, int64_t, int64_t);

#if VL > 1
#define ELEMENT_FORMAT(id, name, fn, ...)                                                                      \
    static void fused_apply_##fn(const struct hstep_fused *a, int slot, const float *old, const float *change, \
                                 int64_t t, int64_t n)                                                         \
    {                                                                                                          \
        fused_apply(HSTEP_FORMAT_##fn, a, slot, old, change, t, n);                                            \
    }
#define BLOCK_FORMAT(id, name, fn, ...)
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
#endif

/* ---- Codes of block states ---- */

V_OP void fused_scales(const int format, const int nonneg, const struct hstep_fused *a, struct fused_state *room,
                       int slot, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    HSTEP_ALIGNED uint32_t maxima[16];
    block_maxima(room->maxima, n / HSTEP_GROUP, maxima);
    encode_scales(format, nonneg, maxima, a->extra[slot] + t / c.block * hstep_scale_bytes(c.scale), room->inverses, n);
}

V_OP void fused_codes(const int format, const int nonneg, const struct hstep_fused *a, struct fused_state *room,
                      int slot, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    char *code = a->code[slot] + t * c.bits / 8;
    struct fused_words words = fused_words_from(a, slot, t);
    fused_scales(format, nonneg, a, room, slot, t, n);
    for (int64_t r = 0; r < n; r += PAIR)
        encode_codes(format, nonneg, room->stash, room->inverses, code, r,
                     c.stochastic ? mixer_next(&words.x, words.k1) : vi_set(0x80008000));
}

typedef void fused_codes_function(const struct hstep_fused *, struct fused_state *, int, int64_t, int64_t);

#if VL > 1
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, ...)                                                                          \
    static void fused_codes_##fn##_0(const struct hstep_fused *a, struct fused_state *room, int slot, int64_t t, \
                                     int64_t n)                                                                  \
    {                                                                                                            \
        fused_codes(HSTEP_FORMAT_##fn, 0, a, room, slot, t, n);                                                  \
    }                                                                                                            \
    static void fused_codes_##fn##_1(const struct hstep_fused *a, struct fused_state *room, int slot, int64_t t, \
                                     int64_t n)                                                                  \
    {                                                                                                            \
        fused_codes(HSTEP_FORMAT_##fn, 1, a, room, slot, t, n);                                                  \
    }
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
#endif

/* ---- Steps ---- */

#if VL > 1
static fused_apply_function *const fused_appliers[HSTEP_FORMATS] = {
#define ELEMENT_FORMAT(id, name, fn, ...) fused_apply_##fn,
#define BLOCK_FORMAT(id, name, fn, ...) NULL,
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
};

static fused_codes_function *const fused_coders[HSTEP_FORMATS][2] = {
#define ELEMENT_FORMAT(id, name, fn, ...) {NULL, NULL},
#define BLOCK_FORMAT(id, name, fn, ...) {fused_codes_##fn##_0, fused_codes_##fn##_1},
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
};

static void (*const fused_decoders[HSTEP_FORMATS])(float *, const char *, const char *, int64_t) = {
#define ELEMENT_FORMAT(id, name, fn, ...) decode_##fn##_0,
#define BLOCK_FORMAT(id, name, fn, ...) NULL,
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
};

static void fused_copy(const struct hstep_fused *a, int to, int from, int64_t t, int64_t n)
{
    const struct columns c = columns_of(a->format[from]);
    memcpy(a->code[to] + t * c.bits / 8, a->code[from] + t * c.bits / 8, (size_t)(n * c.bits / 8));
    if (c.extra_bits)
        memcpy(a->extra[to] + t * c.extra_bits / 8, a->extra[from] + t * c.extra_bits / 8,
               (size_t)(n * c.extra_bits / 8));
}

static void fused_step(const struct hstep_fused *a, hstep_fused_tile *tile)
{
    const int weight = a->format[HALFSTEP_SLOT_WEIGHT];
    const struct columns c = columns_of(weight);
    struct fused_room room;
    int plain = weight == HSTEP_FORMAT_f32;
    for (int s = HALFSTEP_SLOT_GRADIENT; s < HSTEP_SLOTS; s++)
        plain &= a->format[s] == HSTEP_FORMAT_NONE || a->format[s] == HSTEP_FORMAT_f32;
    for (int64_t t = 0; t < a->n; t += FUSED_TILE) {
        int64_t n = a->n - t < FUSED_TILE ? a->n - t : FUSED_TILE;
        for (int j = 0; j < HALFSTEP_MAX_STATES; j++) {
            int s = HALFSTEP_SLOT_STATE + j;
            if (!(a->as_weight >> s & 1)) continue;
            if (a->first >> s & 1) fused_copy(a, s, HALFSTEP_SLOT_WEIGHT, t, n);
            if (!plain)
                fused_decoders[weight](room.state[j].old, a->code[s] + t * c.bits / 8,
                                       a->extra[s] + t * c.extra_bits / 8, n);
        }
        if (!plain)
            fused_decoders[weight](room.weight, a->code[HALFSTEP_SLOT_WEIGHT] + t * c.bits / 8,
                                   a->extra[HALFSTEP_SLOT_WEIGHT] + t * c.extra_bits / 8, n);
        tile(a, &room, t, n);
        if (!plain) fused_appliers[weight](a, HALFSTEP_SLOT_WEIGHT, room.weight, room.change, t, n);
        for (int j = 0; j < HALFSTEP_MAX_STATES; j++) {
            int s = HALFSTEP_SLOT_STATE + j;
            struct fused_state *state = &room.state[j];
            if (a->as_weight >> s & 1) {
                if (!plain) fused_appliers[weight](a, s, state->old, state->stash, t, n);
                if (a->copy >> s & 1) fused_copy(a, HALFSTEP_SLOT_WEIGHT, s, t, n);
            } else if (a->format[s] >= 0 && fused_coders[a->format[s]][0]) {
                fused_coders[a->format[s]][a->nonneg >> s & 1](a, state, s, t, n);
            }
        }
    }
}
#endif

/* ---- Every rule with every recipe ---- */

#if VL > 1
/* Columns of STATES(...) become one byte for each state: its role, and FUSED_CONDITIONAL where hyper-parameters may
 * make it needless. */
#define FUSED_ROLE_0 0
#define FUSED_ROLE_SIGNED HALFSTEP_ROLE_SIGNED
#define FUSED_ROLE_NONNEG HALFSTEP_ROLE_NONNEG
#define FUSED_ROLE_GRADIENT HALFSTEP_ROLE_GRADIENT
#define FUSED_ROLE_WEIGHT HALFSTEP_ROLE_WEIGHT
#undef STATE
#undef STATES
#define STATE(name, role, beta, unless) (FUSED_ROLE_##role | _Generic((unless), char *: FUSED_CONDITIONAL, default: 0))
#define STATES(...) FUSED_BYTES(__VA_ARGS__, 0, 0, 0, 0)
#define FUSED_BYTES(s0, s1, s2, s3, ...) ((s0) | (s1) << 8 | (s2) << 16 | (s3) << 24)
#define FUSED_CONDITIONALS(states) \
    (((states) >> 4 & 1) + ((states) >> 12 & 1) + ((states) >> 20 & 1) + ((states) >> 28 & 1))
#define FUSED_HAS(states, role) \
    ((((states) | (states) >> 8 | (states) >> 16 | (states) >> 24) & HALFSTEP_ROLE_##role) != 0)
/* Not where one of the first variants is the same. */
#define FUSED_WORTH(states, variant, first, second) \
    ((variant) < 1 << FUSED_CONDITIONALS(states) && \
     (HSTEP_FORMAT_##first == HSTEP_FORMAT_##second || (FUSED_HAS(states, SIGNED) && FUSED_HAS(states, NONNEG))))

#define FUSED_FUNCTION(gradient, first, second, id, fn, states, variant)                                   \
    __attribute__((unused)) static void fused_##id##_##gradient##_##first##_##second##_##variant(          \
        const struct hstep_fused *a, struct fused_room *room, int64_t t, int64_t n)                        \
    {                                                                                                      \
        if (FUSED_WORTH(states, variant, first, second))                                                   \
            fused_rule(a, room, fn##_rule, states, variant, HSTEP_FORMAT_##gradient, HSTEP_FORMAT_##first, \
                       HSTEP_FORMAT_##second, t, n);                                                       \
    }
#define RULE(id, name, fn, label, title, lr, wd, decay, states, ...) \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 0)           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 1)           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 2)           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 3)
#include "rules/rules.def"
#undef RULE

#define FUSED_ENTRY(gradient, first, second, id, states, variant) \
    (FUSED_WORTH(states, variant, first, second) ? fused_##id##_##gradient##_##first##_##second##_##variant : NULL)
#define FUSED_ROW(gradient, first, second, id, states)                                                         \
    {FUSED_ENTRY(gradient, first, second, id, states, 0), FUSED_ENTRY(gradient, first, second, id, states, 1), \
     FUSED_ENTRY(gradient, first, second, id, states, 2), FUSED_ENTRY(gradient, first, second, id, states, 3)},
static hstep_fused_tile *const fused_tiles[HSTEP_RULES][HSTEP_FUSED_ROWS][HSTEP_FUSED_VARIANTS] = {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, ...) \
    [HSTEP_RULE_ROW_##id] = {HSTEP_FUSED_RECIPES(FUSED_ROW, id, states)},
#include "rules/rules.def"
#undef RULE
};
#define FUSED_TILES fused_tiles
#define FUSED_STEP fused_step
#else
#define FUSED_TILES NULL
#define FUSED_STEP NULL
#endif
#endif
