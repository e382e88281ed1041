/* A warp holds a tile: 256 places of index space, in whole grains. Each lane has eight consecutive places.
 *
 * A lane copies its places of a slot into scratch memory of its own, with zeros at places that are not held here. Whole
 * tiles, tails and rows that begin within a grain therefore take one path. The formats then decode and encode in
 * scratch memory. Blocks of 32, 128 and 256 elements are 4, 16 and 32 lanes, which find their maximum by exchanges. All
 * formats are possible. They are arguments here, the same for all lanes of a warp. Over 500 lines because formats,
 * random words and sums share the places of a lane. */
#ifndef HSTEP_CUDA_LANE_H
#define HSTEP_CUDA_LANE_H

#include "base/exact.h"
#include "base/grid.h"
#include "decide/pass.h"
#include "kernels/pair.h"

#include "rules/rules.h"

enum { LANES = 32, PLACES = HSTEP_TILE / LANES, WARPS = 256 / LANES };

_Static_assert(PLACES == PAIR, "the places of a lane are a pair");

/* Place i of a pair, which stands in the vector of even places or in that of odd ones. */
#define PLACE(pair, i) (pair)[(i) % 2].x[(i) / 2]

/* The places of one lane. first .. last - 1 of the eight are held here. */
struct lane {
    int first, last;
    int begins;         /* the first element of the stretch is here */
    int64_t element;    /* at place 0, held or not */
    int64_t begin, end; /* elements of the stretch */
    uint64_t index;
};

struct scratch {
    __attribute__((aligned(16))) char code[PLACES * 4], extra[PLACES * 2];
};

/* Lanes that hold a packed block. In scratch memory its scale lies so far into the code that the lane's own codes,
 * which follow, are aligned. */
enum { PACKED_LANES = HSTEP_PACKED_BLOCK / PLACES, PACKED_SCALE = 4 - HSTEP_PACKED_SCALE, PACKED_CODES = 4 };

CUDA_DEVICE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CUDA_DEVICE int within(int64_t x, int64_t most) { return x < 0 ? 0 : (int)least(x, most); }
CUDA_DEVICE int lane_of_thread(void) { return CUDA_THREAD % LANES; }
CUDA_DEVICE int lane_of_block(void) { return CUDA_THREAD & (PACKED_LANES - 1); }
CUDA_DEVICE int warp_of_thread(void) { return CUDA_THREAD / LANES; }

CUDA_DEVICE int is_finite(double x) { return (hstep_bits64(x) >> 52 & 2047) != 2047; }

/* Returns the lane's places in tile number `tile` of a stretch. The first element of the stretch lies `lead` places
 * into a grain. */
CUDA_DEVICE struct lane lane_at(struct hstep_stretch s, int64_t lead, int64_t tile)
{
    int64_t place = tile * HSTEP_TILE + lane_of_thread() * PLACES;
    struct lane l;
    l.first = within(lead - place, PLACES);
    l.last = within(lead + s.n - place, PLACES);
    l.begins = lead >= place && lead < place + PLACES && s.n > 0;
    l.element = s.element - lead + place;
    l.begin = s.element;
    l.end = s.element + s.n;
    l.index = s.index - (uint64_t)lead + (uint64_t)place;
    return l;
}

/* Returns the lane's places in n elements of memory, without index space. */
CUDA_DEVICE struct lane lane_of(int64_t element, int64_t n)
{
    const struct hstep_stretch s = {element, 0, n};
    return lane_at(s, 0, 0);
}

/* Returns how many tiles n elements need if the first lies `lead` places into a grain. */
CUDA_DEVICE int64_t tiles_of(int64_t lead, int64_t n) { return (lead + n + HSTEP_TILE - 1) / HSTEP_TILE; }

/* ---- Between slots and scratch memory ---- */

CUDA_DEVICE void copy_bytes(char *to, const char *from, int n)
{
    if (n % 4 == 0 && ((uintptr_t)to | (uintptr_t)from) % 4 == 0)
        for (int i = 0; i < n; i += 4)
            memcpy(__builtin_assume_aligned(to + i, 4), __builtin_assume_aligned(from + i, 4), 4);
    else
        for (int i = 0; i < n; i++) to[i] = from[i];
}

CUDA_DEVICE void clear_scratch(struct scratch *r)
{
    for (int i = 0; i < PLACES * 4; i++) r->code[i] = 0;
    for (int i = 0; i < PLACES * 2; i++) r->extra[i] = 0;
}

/* Returns an element that is held here of the block that the lane's places are in, or -1 if there is none. */
CUDA_DEVICE int64_t held_in_block(const struct lane *l, int block)
{
    const int64_t first = l->element - lane_of_thread() * PLACES % block, from = first < l->begin ? l->begin : first;
    return from < least(first + block, l->end) ? from : -1;
}

/* The lane's part of a packed block: the addresses of its codes, of the block's scale and of its error codes. */
struct packed {
    char *code, *scale, *extra;
};

/* Returns the lane's part of the packed block that `element` is in. */
CUDA_DEVICE struct packed packed_of(const struct hstep_tensor *t, int format, const char *code, const char *extra,
                                    int64_t element)
{
    const int at = lane_of_block() * PLACES;
    struct packed p;
    p.scale = (char *)code + hstep_code_offset(t, format, element);
    p.code = p.scale + HSTEP_PACKED_SCALE + at;
    p.extra = (char *)extra + hstep_extra_offset(t, format, element) + at * hstep_formats[format].extra_bits / 8;
    return p;
}

/* Copies the lane's places of a slot to scratch memory. code and extra belong to the whole slot. extra may be NULL. */
CUDA_DEVICE void fetch(const struct hstep_tensor *t, int format, const char *code, const char *extra,
                       const struct lane *l, struct scratch *r)
{
    const struct hstep_format *f = &hstep_formats[format];
    int n = l->last - l->first;
    int64_t element = l->element + l->first;
    const int64_t in_block = f->block ? held_in_block(l, f->block) : -1;
    clear_scratch(r);
    if (f->geometry == HALFSTEP_GEOMETRY_PACKED) {
        if (in_block < 0) return;
        /* Whole blocks are copied, with the codes beyond the end of a row. */
        const struct packed p = packed_of(t, format, code, extra, in_block);
        copy_bytes(r->code + PACKED_SCALE, p.scale, HSTEP_PACKED_SCALE);
        copy_bytes(r->code + PACKED_CODES, p.code, PLACES);
        copy_bytes(r->extra, p.extra, PLACES * f->extra_bits / 8);
        return;
    }
    /* All lanes of a block get its scale, even those that hold none of it. Padding decodes as code 0, whose value may
     * depend on the scale. */
    if (extra && in_block >= 0)
        copy_bytes(r->extra, extra + hstep_extra_offset(t, format, in_block), f->scale_bits / 8);
    if (n <= 0) return;
    copy_bytes(r->code + l->first * f->code_bits / 8, code + hstep_code_offset(t, format, element),
               (n * f->code_bits + 7) / 8);
    if (extra && !f->block)
        copy_bytes(r->extra + l->first * f->extra_bits / 8, extra + hstep_extra_offset(t, format, element),
                   n * f->extra_bits / 8);
}

/* Copies the lane's places from scratch memory to a slot. Does not store the second plane or scales if extra is
 * NULL. */
CUDA_DEVICE void put(const struct hstep_tensor *t, int format, char *code, char *extra, const struct lane *l,
                     const struct scratch *r)
{
    const struct hstep_format *f = &hstep_formats[format];
    int n = l->last - l->first;
    int64_t element = l->element + l->first;
    if (f->geometry == HALFSTEP_GEOMETRY_PACKED) {
        const int64_t in_block = held_in_block(l, f->block);
        if (in_block < 0) return;
        const struct packed p = packed_of(t, format, code, extra, in_block);
        copy_bytes(p.code, r->code + PACKED_CODES, PLACES);
        copy_bytes(p.extra, r->extra, PLACES * f->extra_bits / 8);
        if (lane_of_block() == 0) copy_bytes(p.scale, r->code + PACKED_SCALE, HSTEP_PACKED_SCALE);
        return;
    }
    if (n <= 0) return;
    copy_bytes(code + hstep_code_offset(t, format, element), r->code + l->first * f->code_bits / 8,
               (n * f->code_bits + 7) / 8);
    if (!extra) return;
    extra += hstep_extra_offset(t, format, element);
    if (!f->block) copy_bytes(extra, r->extra + l->first * f->extra_bits / 8, n * f->extra_bits / 8);
    /* One lane of a block stores its scale: the first, or the one that the stretch begins in. */
    else if (l->begins || lane_of_thread() % (f->block / PLACES) == 0) copy_bytes(extra, r->extra, f->scale_bits / 8);
}

/* Copies the numbers of a vector over rows or columns to scratch memory, one for each place. Those of rows are
 * multiplied by the factor of their matrix. */
CUDA_DEVICE void fetch_vector(const struct hstep_work *w, int s, const struct lane *l, struct scratch *r)
{
    const int64_t columns = w->t->n_columns;
    const int over_rows = w->t->slot[s].extent == HALFSTEP_EXTENT_ROWS;
    const float *factors = over_rows ? hstep_factors_of(w, s) : NULL;
    clear_scratch(r);
    for (int i = l->first; i < l->last; i++) {
        const int64_t element = l->element + i, row = element / columns, matrix = hstep_matrix_of(w->t, row);
        const int64_t at = over_rows ? row : matrix * columns + element % columns;
        float number;
        memcpy(&number, w->code[s] + 4 * at, 4);
        if (over_rows) number *= factors[matrix];
        copy_bytes(r->code + 4 * i, (const char *)&number, 4);
    }
}

CUDA_DEVICE void fetch_slot(const struct hstep_work *w, int s, const struct lane *l, struct scratch *r)
{
    if (hstep_extent_of(w, s) != HALFSTEP_EXTENT_ELEMENTS) fetch_vector(w, s, l, r);
    else fetch(w->t, w->format[s], w->code[s], w->extra[s], l, r);
}

/* ---- Whole, aligned tiles: in registers, where the format is a constant ---- */

/* Copies go through registers of 32 bits, because bytes are cheaper to take from these than from wider ones. */
V_OP void copy_word(char *to, const char *from) { memcpy(to, from, 4); }

V_OP void copy_8(void *to, const void *from)
{
    char *t = (char *)__builtin_assume_aligned(to, 8);
    const char *f = (const char *)__builtin_assume_aligned(from, 8);
    copy_word(t, f);
    copy_word(t + 4, f + 4);
}

V_OP void copy_16(void *to, const void *from)
{
    char *t = (char *)__builtin_assume_aligned(to, 16);
    const char *f = (const char *)__builtin_assume_aligned(from, 16);
    copy_word(t, f);
    copy_word(t + 4, f + 4);
    copy_word(t + 8, f + 8);
    copy_word(t + 12, f + 12);
}

/* Copies n bytes, a power of two up to 16. Both addresses are aligned to n. */
V_OP void copy_aligned(void *to, const void *from, const int n)
{
    switch (n) {
    case 1: memcpy(to, from, 1); break;
    case 2: memcpy(__builtin_assume_aligned(to, 2), __builtin_assume_aligned(from, 2), 2); break;
    case 4: copy_word((char *)__builtin_assume_aligned(to, 4), (const char *)__builtin_assume_aligned(from, 4)); break;
    case 8: copy_8(to, from); break;
    default: copy_16(to, from); break;
    }
}

/* Copies the codes of a lane's places, up to 32 bytes. */
V_OP void copy_codes(void *to, const void *from, const int n)
{
    if (n == 32) copy_16((char *)to + 16, (const char *)from + 16);
    copy_aligned(to, from, n < 32 ? n : 16);
}

/* ---- Formats ---- */

V_OP void load_scratch(const int format, const int nonneg, const struct scratch *r, vf *x)
{
    load_any(format, nonneg, r->code + (columns_of(format).steps ? PACKED_SCALE : 0), r->extra, 0, &x[0], &x[1]);
}

CUDA_DEVICE void decode(int format, int nonneg, const struct scratch *r, vf *x) { load_scratch(format, nonneg, r, x); }

/* Returns 1 if load_aligned() knows the format. */
CUDA_DEVICE int is_fused_gradient(int format)
{
#define GRADIENT(fn) || format == HSTEP_FORMAT_##fn
    return 0 HSTEP_CUDA_FUSED_GRADIENTS(GRADIENT);
#undef GRADIENT
}

/* Loads all places of a lane whose codes are aligned to 16 bytes. Returns 0 unless the fused kernels know the format as
 * one of gradients. */
V_OP int load_aligned(int format, const char *code, vf *x)
{
    struct scratch r = {{0}, {0}};
    switch (format) {
#define GRADIENT(fn)                                          \
    case HSTEP_FORMAT_##fn:                                   \
        copy_codes(r.code, code, PLACES *fn##_code_bits / 8); \
        decode(HSTEP_FORMAT_##fn, 0, &r, x);                  \
        return 1;
        HSTEP_CUDA_FUSED_GRADIENTS(GRADIENT)
#undef GRADIENT
    default: return 0;
    }
}

V_OP void scale_pair(vf *x, float factor)
{
    x[0] = v_mul(x[0], v_set(factor));
    x[1] = v_mul(x[1], v_set(factor));
}

/* Stores the scale of a block with this largest magnitude, and returns its inverse. A scale for the whole tensor is
 * read from `extra` instead. */
V_OP float encode_scale(int format, int nonneg, uint32_t largest, char *extra)
{
    vf inverse = v_set(0.0f);
    vi pattern;
    switch (format) {
#define FORMAT(id, fn)                                                                                               \
    IF_LARGEST(fn, FORMAT_CASE(fn) pattern = fn##_scale(block_maximum_of(vi_set(largest)), nonneg);                  \
               hstep_scale_store(fn##_scale_dtype, extra, 0, pattern.x[0]); inverse = fn##_inverse(pattern, nonneg); \
               break;)                                                                                               \
    IF_TENSOR(fn, FORMAT_CASE(fn) pattern = vi_set(hstep_scale_load(fn##_scale_dtype, extra, 0));                    \
              inverse = fn##_inverse(pattern, nonneg); break;)
#include "formats/formats.def"
#undef FORMAT
    default: break;
    }
    return inverse.x[0];
}

V_OP uint32_t shared_by_block(uint32_t largest, const int block)
{
    CUDA_UNROLL for (int mask = 1; mask < LANES && mask * PLACES < block; mask *= 2)
    {
        const uint32_t other = CUDA_SHUFFLE(largest, mask);
        largest = other > largest ? other : largest;
    }
    return largest;
}

/* Stashes a lane's pair for a block format. All lanes of the warp must call it at once. Returns the pattern that the
 * block's scale is made from. */
V_OP uint32_t stash_pair(const int format, const int nonneg, const vf *x, vf onto, float *stash)
{
    const struct columns c = columns_of(format);
    vf magnitude[2]; /* as by magnitude_of() */
    CUDA_UNROLL for (int i = 0; i < 2; i++)
    {
        vf y = stash_any(format, x[i], nonneg);
        if (has_grid(format, nonneg)) y = onto_grid(c.root, y, onto);
        v_store(stash + i * VL, y);
        magnitude[i] = nonneg ? y : x[i];
    }
    return shared_by_block(hstep_cuda_largest(magnitude[0], magnitude[1]), c.block);
}

/* Puts a lane's pair of weights on a new scale of their packed block: 2^16 times their positions. All lanes of the warp
 * must call it at once. Returns the scale. */
V_OP uint32_t place_packed(const int steps, const vf *weights, vi *placed)
{
    const vi scale =
        hstep_packed_scale(vi_set(shared_by_block(hstep_cuda_largest(weights[0], weights[1]), HSTEP_PACKED_BLOCK)));
    const vf factor = hstep_packed_factor(v_from_bits(scale), steps);
    CUDA_UNROLL for (int i = 0; i < 2; i++) placed[i] = hstep_packed_placed(weights[i], scale, factor);
    return scale.x[0];
}

V_OP void store_packed_pair(const int format, const vi *placed, struct scratch *r, vi words)
{
    store_positions(format, r->code + PACKED_SCALE, r->extra, 0, hstep_packed_even(placed[0], words),
                    hstep_packed_odd(placed[1], words));
}

V_OP uint32_t largest_of_pair(const vi *x)
{
    const vi a = vi_max(x[0], x[1]);
    const uint32_t low = a.x[0] > a.x[1] ? a.x[0] : a.x[1], high = a.x[2] > a.x[3] ? a.x[2] : a.x[3];
    return low > high ? low : high;
}

/* Subtracts a lane's changes from its pair of a packed weight. All lanes of the warp must call it at once, because they
 * exchange what is largest in their blocks. */
V_OP void apply_packed(const int format, const vf *d, struct scratch *r, vi words)
{
    const struct columns c = columns_of(format);
    const vf scale = v_from_bits(vi_set(hstep_scale_load(c.scale, r->code + PACKED_SCALE, 0)));
    const vf factor = hstep_packed_factor(scale, c.steps);
    vi position[2], moved[2], magnitude[2];
    load_positions(format, r->code + PACKED_SCALE, r->extra, 0, &position[0], &position[1]);
    CUDA_UNROLL for (int i = 0; i < 2; i++)
    {
        moved[i] = hstep_packed_moved(position[i], d[i], factor);
        magnitude[i] = hstep_packed_magnitude(moved[i]);
    }
    const vi largest = vi_set(shared_by_block(largest_of_pair(magnitude), HSTEP_PACKED_BLOCK));
    const int is_kept =
        vm_any(hstep_packed_reaches(largest, c.steps)) & !vm_any(hstep_packed_exceeds(largest, c.steps));
    if (__builtin_expect(CUDA_ANY(!is_kept), 0)) {
        const vf unit = hstep_packed_unit(scale, c.steps);
        vf weight[2];
        vi placed[2];
        /* What lies in memory is read again, because registers are scarce. */
        CUDA_WARP_BARRIER();
        load_positions(format, r->code + PACKED_SCALE, r->extra, 0, &position[0], &position[1]);
        CUDA_UNROLL for (int i = 0; i < 2; i++) weight[i] = v_sub(hstep_packed_value(position[i], unit), d[i]);
        const uint32_t made = place_packed(c.steps, weight, placed);
        if (!is_kept) {
            hstep_scale_store(c.scale, r->code + PACKED_SCALE, 0, made);
            moved[0] = placed[0];
            moved[1] = placed[1];
        }
    }
    store_packed_pair(format, moved, r, words);
}

/* Encodes a lane's pair. All lanes of the warp must call it at once. x has values for all places, held or not. r->extra
 * must hold a scale for the whole tensor. Functions that are not inlined take vectors by their addresses, because clang
 * reads one that is passed by value in a way that PTX does not have. */
CUDA_DEVICE void encode(int format, int nonneg, const vf *x, struct scratch *r, const vi *words, int state, float onto)
{
    __attribute__((aligned(16))) float stash[PLACES];
    float inverse;
    const struct columns c = columns_of(format);
    if (c.steps) {
        vi placed[2];
        hstep_scale_store(c.scale, r->code + PACKED_SCALE, 0, place_packed(c.steps, x, placed));
        store_packed_pair(format, placed, r, *words);
        return;
    }
    if (!is_block(format)) {
        store_any(format, r->code, r->extra, 0, x[0], x[1], *words, state);
        return;
    }
    inverse = encode_scale(format, nonneg, stash_pair(format, nonneg, x, v_set(onto), stash), r->extra);
    encode_codes(format, nonneg, stash, &inverse, r->code, 0, *words);
}

/* Subtracts a lane's changes from its pair of a weight. All lanes of the warp must call it at once. */
CUDA_DEVICE void apply(int format, const vf *w, const vf *d, struct scratch *r, const vi *words)
{
    if (columns_of(format).steps) apply_packed(format, d, r, *words);
    else apply_any(format, r->code, r->extra, 0, w[0], w[1], d[0], d[1], *words);
}

/* Returns the value whose square is summed for a format whose scale is a sum over the tensor. */
CUDA_DEVICE vf norm_value(int format, int nonneg, vf x)
{
    switch (format) {
#define FORMAT(id, fn) IF_TENSOR(fn, FORMAT_CASE(fn) return fn##_norm(x, nonneg);)
#include "formats/formats.def"
#undef FORMAT
    default: return x;
    }
}

/* ---- Random words ---- */

V_OP vi nearest_words(void) { return vi_set(0x80008000u); }

/* Returns the words of four pairs from `pair` on, a multiple of four, in the segment of the key. A generator without
 * lattices has a factor and an offset that leave its words as they are. That costs less than a test of the
 * generator. */
V_OP vi segment_words(const struct hstep_key *key, uint64_t pair)
{
    const uint32_t first = (uint32_t)pair & (HSTEP_SEGMENT_WORDS - 1);
    return V_LANES(vi, hstep_lattice_word(key, hstep_mixer_word(key, first + I)));
}

/* Returns the words of eight places from element `index` on, a multiple of eight. *key must be that of *segment in the
 * mixer. Both are renewed if the places lie in another segment. */
CUDA_DEVICE vi random_words(int generator, const struct hstep_key *strand, uint64_t index, struct hstep_key *key,
                            uint64_t *segment)
{
    uint64_t pair = index / 2;
    if (generator == HSTEP_GENERATOR_PHILOX7) {
        vi words;
        hstep_philox_block(strand, pair / 4, words.x);
        return words;
    }
    if (pair >> HSTEP_SEGMENT_SHIFT != *segment) {
        *segment = pair >> HSTEP_SEGMENT_SHIFT;
        *key = hstep_key_segment(strand, *segment);
    }
    return segment_words(key, pair);
}

/* ---- Sums ---- */

/* Shared memory of a warp. A meeting of the warp stands before each write and after it. */
struct exchange {
    union {
        float x[HSTEP_TILE];
        int64_t limbs[HSTEP_EXACT_LIMBS];
    };
    double sum[16];
};

/* The same with what each lane has of its own. */
struct room {
    struct exchange e;
    struct scratch scratch[LANES];
    struct lane lane[LANES];
};

/* Keeps the lane's places where functions can look at them. */
CUDA_DEVICE struct lane *place_of(struct room *room, struct lane l)
{
    room->lane[lane_of_thread()] = l;
    return &room->lane[lane_of_thread()];
}

CUDA_DEVICE struct scratch *scratch_of(struct room *room) { return &room->scratch[lane_of_thread()]; }

/* Returns the sum of a chunk of up to 256 values, or of their squares, to all lanes. Lanes hold eight consecutive
 * values each. The 16 partial sums and their tree are those of docs/numerics.md 4. */
CUDA_DEVICE double warp_total(struct exchange *e, const vf *x, int squared)
{
    int lane = lane_of_thread();
    CUDA_WARP_BARRIER();
    for (int i = 0; i < PLACES; i++) e->x[lane * PLACES + i] = PLACE(x, i);
    CUDA_WARP_BARRIER();
    if (lane < 16) {
        double sum = 0.0;
        for (int i = 2 * lane; i < HSTEP_TILE; i += HSTEP_CELL) {
            double even = (double)e->x[i], odd = (double)e->x[i + 1];
            sum += squared ? even * even : even;
            sum += squared ? odd * odd : odd;
        }
        e->sum[lane] = sum;
    }
    CUDA_WARP_BARRIER();
    return hstep_tree_sum(e->sum);
}

/* Adds to limbs that other threads add to. */
CUDA_DEVICE void add_shared(int64_t *limbs, double x)
{
    int64_t part[3];
    const int first = hstep_exact_parts(x, part);
    CUDA_UNROLL for (int k = 0; k < 3; k++)
    {
        if (part[k]) CUDA_ADD(&limbs[first + k], part[k]);
    }
}

/* The limbs of a warp's sum, in registers: lane k % LANES has limb k. Atomic additions to one address wait for each
 * other. A warp therefore makes them once a chunk and not once a tile. */
enum { SPREAD = (HSTEP_EXACT_LIMBS + LANES - 1) / LANES };
struct spread {
    int64_t limb[SPREAD];
};

V_OP void spread_clear(struct spread *s) { CUDA_UNROLL for (int j = 0; j < SPREAD; j++) s->limb[j] = 0; }

/* Adds the parts of a number to the limbs from `first` on, if `wanted`. They must be the same in all lanes of the
 * warp. */
V_OP void spread_take(struct spread *s, int first, const int64_t part[3], int wanted)
{
    CUDA_UNROLL for (int k = 0; k < 3; k++)
    {
        const int limb = first + k, mine = wanted && limb % LANES == lane_of_thread();
        CUDA_UNROLL for (int j = 0; j < SPREAD; j++) s->limb[j] += mine && limb / LANES == j ? part[k] : 0;
    }
}

/* Adds x, which must be the same in all lanes of the warp. */
V_OP void spread_add(struct spread *s, double x)
{
    int64_t part[3];
    const int first = hstep_exact_parts(x, part);
    spread_take(s, first, part, 1);
}

/* Returns the sum of a warp, rounded, to all lanes. */
CUDA_DEVICE double spread_round(const struct spread *s, struct exchange *e)
{
    CUDA_WARP_BARRIER();
    CUDA_UNROLL for (int j = 0; j < SPREAD; j++)
    {
        const int limb = j * LANES + lane_of_thread();
        if (limb < HSTEP_EXACT_LIMBS) e->limbs[limb] = s->limb[j];
    }
    CUDA_WARP_BARRIER();
    return hstep_exact_round(e->limbs);
}

/* Adds the sum to limbs that other warps add to. */
V_OP void spread_flush(const struct spread *s, int64_t *limbs)
{
    CUDA_UNROLL for (int j = 0; j < SPREAD; j++)
    {
        if (s->limb[j]) CUDA_ADD(&limbs[j * LANES + lane_of_thread()], s->limb[j]);
    }
}

#endif
