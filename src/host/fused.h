/* Steps fused in registers: the rows of fused.def. For kernels.c. */
#ifndef HSTEP_FUSED_H
#define HSTEP_FUSED_H

#include "host/tiles.h"

/* Sixteen groups: their maxima fill one vector of the widest instruction set. */
#define FUSED_TILE 512

/* What a block format needs for a tile; scales are the stored ones as fp32, so that a loop reads them at no cost. */
struct fused_room {
    HSTEP_ALIGNED float stash[FUSED_TILE];
    HSTEP_ALIGNED float scales[16];
    HSTEP_ALIGNED float inverses[16];
    HSTEP_ALIGNED uint32_t maxima[16][VL];
};

/* One slot on its way through a fused loop. */
struct fused_slot {
    char *code, *extra;
    vi x, k1, factor, offset; /* of its random words */
    vi largest;               /* of the group's magnitudes */
    vf grid, onto;            /* of a second moment */
    struct fused_room *room;
};

V_OP struct fused_slot fused_start(const struct hstep_fused *a, int slot, struct fused_room *room)
{
    struct fused_slot s = {.code = a->code[slot], .extra = a->extra[slot], .room = room};
    s.x = mixer_start(&a->key[slot], a->index / 2);
    s.k1 = vi_set(a->key[slot].k[1]);
    s.factor = vi_set(a->key[slot].factor);
    s.offset = vi_set(a->key[slot].offset);
    s.largest = vi_set(0);
    s.grid = v_set(a->grid);
    s.onto = v_set(a->onto_grid);
    return s;
}

/* Words of an element format. Block codes take the mixer's as they are, and do not pay for factor and offset. */
V_OP vi fused_words(struct fused_slot *s) { return lattice_of(mixer_next(&s->x, s->k1), s->factor, s->offset); }

/* Format and role are constants at every call, and calls are written out instead of looped over: a loop that the
 * compiler leaves rolled would turn the switches on formats into real ones. Element i is the r-th of its tile. */
V_OP void fused_load(const struct fused_slot *s, const int format, const int nonneg, const int plain, int64_t i,
                     int64_t r, vf *e, vf *o)
{
    if (format == HSTEP_FORMAT_NONE) {
        *e = *o = v_set(0.0f);
    } else if (plain) {
        *e = v_loadu(s->code + 4 * i);
        *o = v_loadu(s->code + 4 * (i + VL));
    } else if (is_block(format)) {
        load_scaled(format, nonneg, s->code, v_set(s->room->scales[r / columns_of(format).block]), i, e, o);
        if (has_grid(format, nonneg)) *e = v_mul(*e, s->grid), *o = v_mul(*o, s->grid);
    } else {
        load_any(format, nonneg, s->code, s->extra, i, e, o);
    }
}

V_OP void fused_store(struct fused_slot *s, const int format, const int nonneg, const int plain, int64_t i, int64_t r,
                      vf e, vf o)
{
    if (format == HSTEP_FORMAT_NONE) return;
    if (plain) {
        v_storeu(s->code + 4 * i, v_from_bits(hstep_flush(v_bits(e))));
        v_storeu(s->code + 4 * (i + VL), v_from_bits(hstep_flush(v_bits(o))));
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
        store_any(format, s->code, s->extra, i, e, o, fused_words(s), 1);
    }
}

V_OP char *fused_extra(const struct fused_slot *s, const int format, int64_t t)
{
    const struct columns c = columns_of(format);
    return s->extra + t / c.block * hstep_scale_bytes(c.scale);
}

/* Scales of the n elements from t on, before a tile. */
V_OP void fused_read_scales(const struct fused_slot *s, const int format, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    if (!c.block) return;
    for (int64_t b = 0; b * c.block < n; b++) {
        uint32_t scale = hstep_scale_load(c.scale, fused_extra(s, format, t), b);
        memcpy(&s->room->scales[b], &scale, 4);
    }
}

/* And after it. */
V_OP void fused_write_scales(const struct fused_slot *s, const int format, const int nonneg, int64_t t, int64_t n)
{
    HSTEP_ALIGNED uint32_t maxima[16];
    if (!is_block(format)) return;
    block_maxima(s->room->maxima, n / HSTEP_GROUP, maxima);
    encode_scales(format, nonneg, maxima, fused_extra(s, format, t), s->room->inverses, n);
}

/* Codes of both states in one loop: one often waits for roots that the other does not need. */
V_OP void fused_codes(struct fused_slot *p, struct fused_slot *q, const int s0, const int s1, int64_t t, int64_t n)
{
    const struct columns c0 = columns_of(s0), c1 = columns_of(s1);
    const vi half = vi_set(0x80008000);
    for (int64_t i = 0; i < n; i += PAIR) {
        if (c0.block)
            encode_codes(s0, 0, p->room->stash, p->room->inverses, p->code + t * c0.bits / 8, i,
                         c0.stochastic ? mixer_next(&p->x, p->k1) : half);
        if (c1.block)
            encode_codes(s1, 1, q->room->stash, q->room->inverses, q->code + t * c1.bits / 8, i,
                         c1.stochastic ? mixer_next(&q->x, q->k1) : half);
    }
}

V_OP void fused_step(const struct hstep_fused *a, vf (*rule)(const vf *, vf, vf, vf *, int), const int weight,
                     const int gradient, const int s0, const int s1)
{
    const int mode = is_block(s0) || is_block(s1) ? RULE_CLAMP : 0;
    /* No 16-bit neighbour asks for pairs: elements stay in memory order and need no shuffles. */
    const int plain = weight == HSTEP_FORMAT_f32 && gradient == HSTEP_FORMAT_f32 && s0 == HSTEP_FORMAT_f32 &&
                      (s1 == HSTEP_FORMAT_f32 || s1 == HSTEP_FORMAT_NONE);
    /* Block codes are decoded one turn ahead: processors look for independent work within about half a turn. */
    const int early = is_block(s0) || is_block(s1);
    struct fused_room room0, room1;
    struct fused_slot w = fused_start(a, HALFSTEP_SLOT_WEIGHT, NULL), g = fused_start(a, HALFSTEP_SLOT_GRADIENT, NULL);
    struct fused_slot p = fused_start(a, HALFSTEP_SLOT_STATE, &room0),
                      q = fused_start(a, HALFSTEP_SLOT_STATE + 1, &room1);
    const int64_t total = a->n;
    vf k[HSTEP_MAX_SCALARS], scale = v_set(a->gradient_scale);
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);

    for (int64_t t = 0; t < total; t += FUSED_TILE) {
        int64_t n = total - t < FUSED_TILE ? total - t : FUSED_TILE;
        fused_read_scales(&p, s0, t, n);
        fused_read_scales(&q, s1, t, n);
        vf next_e[2], next_o[2];
        if (early) {
            fused_load(&p, s0, 0, plain, t, 0, &next_e[0], &next_o[0]);
            fused_load(&q, s1, 1, plain, t, 0, &next_e[1], &next_o[1]);
        }
        for (int64_t b = 0; b < n; b += HSTEP_GROUP)
            for (int64_t r = b; r < b + HSTEP_GROUP; r += PAIR) {
                int64_t i = t + r, at = !early ? r : r + PAIR < n ? r + PAIR : r;
                vf we, wo, ge, go, se[HALFSTEP_MAX_STATES], so[HALFSTEP_MAX_STATES];
                fused_load(&w, weight, 0, plain, i, r, &we, &wo);
                fused_load(&g, gradient, 0, plain, i, r, &ge, &go);
                if (early) se[0] = next_e[0], so[0] = next_o[0], se[1] = next_e[1], so[1] = next_o[1];
                fused_load(&p, s0, 0, plain, t + at, at, &next_e[0], &next_o[0]);
                fused_load(&q, s1, 1, plain, t + at, at, &next_e[1], &next_o[1]);
                if (!early) se[0] = next_e[0], so[0] = next_o[0], se[1] = next_e[1], so[1] = next_o[1];
                vf de = rule(k, we, v_mul(ge, scale), se, mode), d_o = rule(k, wo, v_mul(go, scale), so, mode);
                if (plain) {
                    v_storeu(w.code + 4 * i, v_sub(we, v_add(de, v_set(0.0f))));
                    v_storeu(w.code + 4 * (i + VL), v_sub(wo, v_add(d_o, v_set(0.0f))));
                } else {
                    apply_any(weight, w.code, w.extra, i, we, wo, de, d_o, fused_words(&w));
                }
                fused_store(&p, s0, 0, plain, i, r, se[0], so[0]);
                fused_store(&q, s1, 1, plain, i, r, se[1], so[1]);
            }
        fused_write_scales(&p, s0, 0, t, n);
        fused_write_scales(&q, s1, 1, t, n);
        fused_codes(&p, &q, s0, s1, t, n);
    }
}

/* In a fused row the first state is signed and the second, if there is one, a second moment. */
#if VL > 1
#define HSTEP_FORMAT_none HSTEP_FORMAT_NONE
#define FUSED(fn, weight, gradient, s0, s1)                                                         \
    static void fused_##fn##_##weight##_##gradient##_##s0##_##s1(const struct hstep_fused *a)       \
    {                                                                                               \
        fused_step(a, fn##_rule, HSTEP_FORMAT_##weight, HSTEP_FORMAT_##gradient, HSTEP_FORMAT_##s0, \
                   HSTEP_FORMAT_##s1);                                                              \
    }
#include "fused.def"
#undef FUSED
#endif

static const struct hstep_fused_row fused_rows[] = {
#if VL > 1
#define FUSED(fn, weight, gradient, s0, s1)  \
    {#fn,                                    \
     HSTEP_FORMAT_##weight,                  \
     HSTEP_FORMAT_##gradient,                \
     {HSTEP_FORMAT_##s0, HSTEP_FORMAT_##s1}, \
     fused_##fn##_##weight##_##gradient##_##s0##_##s1},
#include "fused.def"
#undef FUSED
#endif
    {NULL, 0, 0, {0, 0}, NULL},
};

#endif
