/* Describes a pass over a tensor before it touches any element. It says which function of the rule runs in which mode,
 * and which slots the pass reads and writes. It also says what a scan looks for, and what is summed. The host and
 * devices compile this header. Tiles, lanes and scratch memory are their own. */
#ifndef HSTEP_PASS_H
#define HSTEP_PASS_H

#include <string.h>

#include "decide/prepare.h"
#include "tables/layout.h"

/* ---- What is done to the elements ---- */

/* A slot in addition to those of a tensor: fp32 elements of the workspace, which hold the direction of a matrix
 * step. */
enum { HSTEP_SLOT_WORK = HSTEP_SLOTS, HSTEP_WORK_SLOTS };

/* The functions of a rule (rules/rule.h). */
enum hstep_function {
    HSTEP_FUNCTION_RULE,
    HSTEP_FUNCTION_NORMS,
    HSTEP_FUNCTION_CROSS,
    HSTEP_FUNCTION_DIRECTION,
    HSTEP_FUNCTION_CHANGE
};

/* One pass over one tensor, as a task or a warp sees it. */
struct hstep_work {
    const struct hstep_context *context; /* of the call */
    const struct hstep_tensor *t;
    const struct hstep_update *u;
    enum hstep_pass pass;
    int pair; /* the pair of vectors whose values are summed, or -1 */
    enum hstep_function function;
    int mode;                     /* of the function */
    int format[HSTEP_WORK_SLOTS]; /* of the slots that the pass touches; HSTEP_FORMAT_NONE for others */
    char *code[HSTEP_WORK_SLOTS], *extra[HSTEP_WORK_SLOTS]; /* addresses of the part held here */
    uint32_t written;                                       /* bit per slot */
    const float *factors; /* of vectors over rows: for each pair, one number for each matrix; else NULL */
    float mean;           /* subtracted from the scaled gradient */
};

/* Returns the address of a slot's codes, or NULL for the weight in a micro-step. */
HSTEP_INLINE char *hstep_code_of(const struct hstep_call *call, int tensor, int slot)
{
    if (slot == HALFSTEP_SLOT_WEIGHT) return call->weights ? (char *)call->weights[tensor - call->first] : NULL;
    if (slot == HALFSTEP_SLOT_GRADIENT) return (char *)(uintptr_t)call->gradients[tensor - call->first];
    return call->plan.tensors[tensor].slot[slot].code;
}

/* Returns 1 if the pass reads or writes slot s. The first pass of a matrix (DIRECTION) and pair 0 need the weight only
 * for l2 decay. Pair 0 uses no states, and CHANGE uses only the weight. A micro-step leaves out the weight and the
 * states of role WEIGHT. The state over rows of a transformed matrix is its transformation's (decide/rows.h). */
HSTEP_INLINE int hstep_is_touched(const struct hstep_work *w, int s)
{
    if (w->t->matrix && w->t->slot[s].extent != HALFSTEP_EXTENT_ELEMENTS) return 0;
    const int alone = w->pass == HSTEP_PASS_DIRECTION || w->pair == 0;
    if (s == HALFSTEP_SLOT_WEIGHT) return !w->u->micro && (!alone || w->u->l2 != 0.0f);
    if (w->pass == HSTEP_PASS_CHANGE) return 0;
    if (s == HALFSTEP_SLOT_GRADIENT) return 1;
    return w->pair != 0 && !(w->u->micro && hstep_slot_role(w->t, s) == HALFSTEP_ROLE_WEIGHT);
}

/* Returns 1 if the pass writes slot s, one that it touches. */
HSTEP_INLINE int hstep_is_written(const struct hstep_work *w, int s)
{
    if (w->pass == HSTEP_PASS_SUMS || s == HALFSTEP_SLOT_GRADIENT) return 0;
    if (s == HALFSTEP_SLOT_WEIGHT) return w->pass != HSTEP_PASS_DIRECTION && !w->u->zero_lr;
    return w->t->slot[s].extent == HALFSTEP_EXTENT_ELEMENTS;
}

HSTEP_INLINE enum hstep_function hstep_function_of(const struct hstep_work *w)
{
    if (w->pass == HSTEP_PASS_CHANGE) return HSTEP_FUNCTION_CHANGE;
    if (w->pair >= 0) return HSTEP_FUNCTION_CROSS;
    if (w->pass == HSTEP_PASS_DIRECTION || w->t->matrix) return HSTEP_FUNCTION_DIRECTION;
    return w->pass == HSTEP_PASS_SUMS && hstep_rules[w->t->rule].norms ? HSTEP_FUNCTION_NORMS : HSTEP_FUNCTION_RULE;
}

/* Prepares a pass over a tensor. The argument `pair` is the pair of vectors whose values a SUMS pass computes. It is -1
 * for the tensor's own sums, and in other passes. */
HSTEP_INLINE void hstep_work_start(const struct hstep_call *call, int tensor, enum hstep_pass pass, int pair,
                                   struct hstep_work *w)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const int touches_all = pass == HSTEP_PASS_UPDATE && !call->plan.updates[tensor].micro;
    w->context = call->context;
    w->t = t;
    w->u = &call->plan.updates[tensor];
    w->pass = pass;
    w->pair = pair;
    w->function = hstep_function_of(w);
    w->mode = w->function == HSTEP_FUNCTION_RULE ? w->u->mode : w->u->mode & RULE_CLAMP;
    w->written = pass == HSTEP_PASS_DIRECTION ? 1u << HSTEP_SLOT_WORK : 0;
    w->mean = 0.0f;
    w->factors = t->pairs ? call->plan.workspace : NULL;
    for (int s = 0; s < t->slots; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        w->format[s] = touches_all || hstep_is_touched(w, s) ? slot->format : HSTEP_FORMAT_NONE;
        w->code[s] = slot->code;
        w->extra[s] = slot->extra_bytes ? slot->extra : NULL;
        if (w->format[s] >= 0 && hstep_is_written(w, s)) w->written |= 1u << s;
    }
    w->code[HALFSTEP_SLOT_WEIGHT] = hstep_code_of(call, tensor, HALFSTEP_SLOT_WEIGHT);
    w->code[HALFSTEP_SLOT_GRADIENT] = hstep_code_of(call, tensor, HALFSTEP_SLOT_GRADIENT);
    const int works = hstep_is_for_matrix(pass);
    /* Elements are counted in the part held here, but the workspace holds only one matrix. */
    const int64_t before =
        works ? hstep_matrix_start(t, call->matrix) * t->row_length * (int64_t)sizeof *call->plan.workspace : 0;
    for (int s = t->slots; s < HSTEP_SLOTS; s++) w->format[s] = HSTEP_FORMAT_NONE;
    w->format[HSTEP_SLOT_WORK] = works ? HSTEP_FORMAT_f32 : HSTEP_FORMAT_NONE;
    w->code[HSTEP_SLOT_WORK] = works ? (char *)((uintptr_t)call->plan.workspace - (uintptr_t)before) : NULL;
    w->extra[HSTEP_SLOT_WORK] = NULL;
}

HSTEP_INLINE int hstep_writes(const struct hstep_work *w, int s) { return w->written >> s & 1; }

/* Returns the slot whose codes the pass reads as those of slot s. */
HSTEP_INLINE int hstep_source_of(const struct hstep_work *w, int s)
{
    return w->u->weight_to_slot >> s & 1 ? HALFSTEP_SLOT_WEIGHT : s;
}

/* Returns the extent of slot s. A slot of HSTEP_SLOTS may be a vector, which holds one number for each row or column.
 * WORK holds elements. */
HSTEP_INLINE int hstep_extent_of(const struct hstep_work *w, int s)
{
    return s < HSTEP_SLOTS ? w->t->slot[s].extent : HALFSTEP_EXTENT_ELEMENTS;
}

/* Returns 1 if the mean of each row is subtracted from its gradient. Rows are then handled one by one, even if they are
 * contiguous in memory. */
HSTEP_INLINE int hstep_is_by_rows(const struct hstep_work *w)
{
    return w->u->centralize != 0.0 && w->format[HALFSTEP_SLOT_GRADIENT] >= 0;
}

/* Returns 1 if the tensor has work in a pass other than SUMS. */
HSTEP_INLINE int hstep_is_updated(const struct hstep_tensor *t, const struct hstep_update *u, enum hstep_pass pass)
{
    return !u->skip && !(t->matrix && pass == HSTEP_PASS_UPDATE) && !(u->zero_lr && pass == HSTEP_PASS_CHANGE);
}

/* Returns 1 if the pass has a change to which cautious decay is to be added. */
HSTEP_INLINE int hstep_decays_cautiously(const struct hstep_work *w)
{
    return w->u->cautious_decay != 0.0f && hstep_writes(w, HALFSTEP_SLOT_WEIGHT);
}

/* Returns the device's fused row for an update, or -1. */
HSTEP_INLINE int hstep_fused_row(const struct hstep_tensor *t, const struct hstep_update *u)
{
    return t->fused[u->way];
}

/* ---- What a scan looks for ---- */

/* Returns the format of the main plane alone: the first format with the same codes and no second plane. A format
 * without a second plane is returned as it is. */
HSTEP_INLINE int hstep_plain_format(int format)
{
    for (int i = 0; i < HSTEP_FORMATS && hstep_formats[format].extra_bits; i++)
        if (!hstep_formats[i].extra_bits && !strcmp(hstep_formats[i].code_dtype, hstep_formats[format].code_dtype))
            return i;
    return format;
}

struct hstep_scan {
    int format;   /* to read the gradient as */
    int summed;   /* its squares are summed, in chunks of columns */
    double limit; /* elements of this magnitude or more are refused */
};

HSTEP_INLINE int hstep_is_scanned(const struct hstep_call *call)
{
    return call->scan != HSTEP_SCAN_NONE || hstep_is_clipped(call);
}

/* Returns what a scan of the tensor's gradient looks for. Gradients that are clipped by their own norm end below
 * clip_norm, so the scan refuses only NaN and infinities there. The same holds for rules of a RAW_GRADIENT, because
 * they follow weights, which may have any finite magnitude. */
HSTEP_INLINE struct hstep_scan hstep_scan_of(const struct hstep_call *call, const struct hstep_tensor *t)
{
    const int raw = hstep_rules[t->rule].kind == HSTEP_RAW_GRADIENT;
    const double factor = hstep_gradient_scale(call);
    struct hstep_scan scan = {hstep_plain_format(t->slot[HALFSTEP_SLOT_GRADIENT].format),
                              !raw && hstep_is_clipped(call), (double)INFINITY};
    if (!raw && !hstep_is_clipped_by_own_norm(call)) scan.limit = HSTEP_GRADIENT_LIMIT / (factor > 0.0 ? factor : 1.0);
    return scan;
}

/* Returns the flag of a gradient whose largest magnitude is this fp32 pattern, or 0 if it passes the scan. */
HSTEP_INLINE int64_t hstep_flag_of(const struct hstep_call *call, const struct hstep_scan *scan, uint32_t largest)
{
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    if (call->scan == HSTEP_SCAN_NONE || (double)magnitude < scan->limit) return 0;
    return magnitude < INFINITY ? HSTEP_FLAG_TOO_LARGE : HSTEP_FLAG_NONFINITE;
}

/* ---- What is summed ---- */

/* Returns 1 if sum number j is of squares. Other sums are of values, over all tensors. */
HSTEP_INLINE int hstep_is_squared(const struct hstep_tensor *t, int j)
{
    return !hstep_rules[t->rule].totals || j >= hstep_rules[t->rule].norms;
}

/* Returns n if only every n-th element of the whole tensor counts in sum number j. */
HSTEP_INLINE int64_t hstep_every(const struct hstep_work *w, int j)
{
    return hstep_is_squared(w->t, j) || w->u->every < 2 ? 1 : w->u->every;
}

/* Sums over the columns of a matrix with vectors are added up within blocks of this many rows. The sums of the blocks
 * are then added in order. */
#define HSTEP_CROSS_ROWS 64

/* Returns the floats at the start of the workspace that hold the factors of all pairs. They fill whole lines. */
HSTEP_INLINE int64_t hstep_factor_floats(const struct hstep_tensor *t)
{
    return (HSTEP_MAX_PAIRS * t->matrices + 15) / 16 * 16;
}

/* Returns the factors of the matrices in a slot that is a vector over rows. */
HSTEP_INLINE const float *hstep_factors_of(const struct hstep_work *w, int slot)
{
    int pair = 0;
    for (int s = HALFSTEP_SLOT_STATE; s < slot; s++) pair += w->t->slot[s].extent == HALFSTEP_EXTENT_ROWS;
    return w->factors + pair * w->t->matrices;
}

/* Returns the slot of a pair's vector over rows, or over columns, by the extent. */
HSTEP_INLINE struct hstep_slot *hstep_vector_of(struct hstep_tensor *t, int pair, int extent)
{
    int s = HALFSTEP_SLOT_STATE;
    while (t->slot[s].extent != extent || pair--) s++;
    return &t->slot[s];
}

#endif
