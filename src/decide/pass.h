/* What a pass over a tensor is, decided before any element is touched: which function of the rule runs and in what
 * mode, which slots are read and which of them written, what a scan looks for, what is summed. Hosts and devices
 * compile it; tiles, lanes and scratch memory are their own. */
#ifndef HSTEP_PASS_H
#define HSTEP_PASS_H

#include <string.h>

#include "decide/prepare.h"
#include "tables/layout.h"

/* ---- What is done to the elements ---- */

/* Beside the slots of a tensor, fp32 elements of the workspace: the direction of a matrix step. */
enum { HSTEP_SLOT_WORK = HSTEP_SLOTS, HSTEP_WORK_SLOTS };

/* The functions of a rule (rules/rule.h). */
enum hstep_function {
    HSTEP_FUNCTION_RULE,
    HSTEP_FUNCTION_NORMS,
    HSTEP_FUNCTION_CROSS,
    HSTEP_FUNCTION_DIRECTION,
    HSTEP_FUNCTION_CHANGE
};

/* What a task or a warp carries through a tensor. */
struct hstep_work {
    const struct hstep_context *context; /* of the call */
    const struct hstep_tensor *t;
    const struct hstep_update *u;
    enum hstep_pass pass;
    int pair; /* of vectors whose values are summed, or -1 */
    enum hstep_function function;
    int mode;                     /* of the function */
    int format[HSTEP_WORK_SLOTS]; /* of the slots that this pass touches, else HSTEP_FORMAT_NONE */
    char *code[HSTEP_WORK_SLOTS], *extra[HSTEP_WORK_SLOTS]; /* of the whole part held here */
    uint32_t written;                                       /* bit per slot */
    float mean;                                             /* taken from the scaled gradient */
};

HSTEP_INLINE char *hstep_code_of(const struct hstep_call *call, int tensor, int slot)
{
    if (slot == HALFSTEP_SLOT_WEIGHT) return call->weights ? (char *)call->weights[tensor - call->first] : NULL;
    if (slot == HALFSTEP_SLOT_GRADIENT) return (char *)(uintptr_t)call->gradients[tensor - call->first];
    return call->plan.tensors[tensor].slot[slot].code;
}

/* The passes of a matrix share out the slots between them, and pair 0 is of gradients alone, which may need the weight
 * for their decay; a micro-step leaves out the weight and its copies. */
HSTEP_INLINE int hstep_is_touched(const struct hstep_work *w, int s)
{
    const int alone = w->pass == HSTEP_PASS_DIRECTION || w->pair == 0;
    if (s == HALFSTEP_SLOT_WEIGHT) return !w->u->micro && (!alone || w->u->l2 != 0.0f);
    if (w->pass == HSTEP_PASS_CHANGE) return 0;
    if (s == HALFSTEP_SLOT_GRADIENT) return 1;
    return w->pair != 0 && !(w->u->micro && hstep_slot_role(w->t, s) == HALFSTEP_ROLE_WEIGHT);
}

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

/* pair: of vectors that a pass of SUMS is about; -1: it is about the tensor's sums, or there is none. */
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
    for (int s = 0; s < t->slots; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        w->format[s] = touches_all || hstep_is_touched(w, s) ? slot->format : HSTEP_FORMAT_NONE;
        w->code[s] = slot->code;
        w->extra[s] = slot->extra_bytes ? slot->extra : NULL;
        if (w->format[s] >= 0 && hstep_is_written(w, s)) w->written |= 1u << s;
    }
    w->code[HALFSTEP_SLOT_WEIGHT] = hstep_code_of(call, tensor, HALFSTEP_SLOT_WEIGHT);
    w->code[HALFSTEP_SLOT_GRADIENT] = hstep_code_of(call, tensor, HALFSTEP_SLOT_GRADIENT);
    const int works = pass == HSTEP_PASS_DIRECTION || pass == HSTEP_PASS_CHANGE;
    for (int s = t->slots; s < HSTEP_SLOTS; s++) w->format[s] = HSTEP_FORMAT_NONE;
    w->format[HSTEP_SLOT_WORK] = works ? HSTEP_FORMAT_f32 : HSTEP_FORMAT_NONE;
    w->code[HSTEP_SLOT_WORK] = works ? (char *)call->plan.workspace : NULL;
    w->extra[HSTEP_SLOT_WORK] = NULL;
}

HSTEP_INLINE int hstep_writes(const struct hstep_work *w, int s) { return w->written >> s & 1; }

/* The slot whose codes the pass takes for those of slot s. */
HSTEP_INLINE int hstep_source_of(const struct hstep_work *w, int s)
{
    return w->u->weight_to_slot >> s & 1 ? HALFSTEP_SLOT_WEIGHT : s;
}

/* The vectors of HSTEP_SLOTS slots hold a number for each row or column; WORK is of elements. */
HSTEP_INLINE int hstep_extent_of(const struct hstep_work *w, int s)
{
    return s < HSTEP_SLOTS ? w->t->slot[s].extent : HALFSTEP_EXTENT_ELEMENTS;
}

/* Whether each row has a mean of its own taken from it, so that rows that touch in memory are taken apart. */
HSTEP_INLINE int hstep_is_by_rows(const struct hstep_work *w)
{
    return w->u->centralize != 0.0 && w->format[HALFSTEP_SLOT_GRADIENT] >= 0;
}

/* Whether there is anything to do in a pass that is no sum. */
HSTEP_INLINE int hstep_is_updated(const struct hstep_tensor *t, const struct hstep_update *u, enum hstep_pass pass)
{
    return !u->skip && !(t->matrix && pass == HSTEP_PASS_UPDATE) && !(u->zero_lr && pass == HSTEP_PASS_CHANGE);
}

/* The device's row for an update, or -1. */
HSTEP_INLINE int hstep_fused_row(const struct hstep_tensor *t, const struct hstep_update *u)
{
    return u->adjusted ? t->adjusted : t->fused;
}

/* ---- What a scan looks for ---- */

/* The main stream of a format alone, as a format: the first row that stores the same codes and nothing beside them. */
HSTEP_INLINE int hstep_plain_format(int format)
{
    for (int i = 0; i < HSTEP_FORMATS && hstep_formats[format].extra_bits; i++)
        if (!hstep_formats[i].extra_bits && !strcmp(hstep_formats[i].code_dtype, hstep_formats[format].code_dtype))
            return i;
    return format;
}

struct hstep_scan {
    int format;   /* that the gradient is read as */
    int summed;   /* its squares are, in chunks of columns */
    double limit; /* the least magnitude of an element that it is refused for */
};

HSTEP_INLINE int hstep_is_scanned(const struct hstep_call *call)
{
    return call->scan != HSTEP_SCAN_NONE || hstep_is_clipped(call);
}

/* Gradients that are clipped by their own norm end below clip_norm, so only NaN and infinities can offend, and a weight
 * that is followed may be as large as it likes. */
HSTEP_INLINE struct hstep_scan hstep_scan_of(const struct hstep_call *call, const struct hstep_tensor *t)
{
    const int raw = hstep_rules[t->rule].kind == HSTEP_RAW_GRADIENT;
    const double factor = hstep_gradient_scale(call);
    struct hstep_scan scan = {hstep_plain_format(t->slot[HALFSTEP_SLOT_GRADIENT].format),
                              !raw && hstep_is_clipped(call), (double)INFINITY};
    if (!raw && !hstep_is_clipped_by_own_norm(call)) scan.limit = HSTEP_GRADIENT_LIMIT / (factor > 0.0 ? factor : 1.0);
    return scan;
}

/* What is said of a gradient with that largest magnitude, a pattern: a flag, or 0. */
HSTEP_INLINE int64_t hstep_flag_of(const struct hstep_call *call, const struct hstep_scan *scan, uint32_t largest)
{
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    if (call->scan == HSTEP_SCAN_NONE || (double)magnitude < scan->limit) return 0;
    return magnitude < INFINITY ? HSTEP_FLAG_TOO_LARGE : HSTEP_FLAG_NONFINITE;
}

/* ---- What is summed ---- */

/* Whether sum number j is of squares; those that are not are over all tensors. */
HSTEP_INLINE int hstep_is_squared(const struct hstep_tensor *t, int j)
{
    return !hstep_rules[t->rule].totals || j >= hstep_rules[t->rule].norms;
}

/* Only every so many-th element of the whole tensor is in sum number j. */
HSTEP_INLINE int64_t hstep_every(const struct hstep_work *w, int j)
{
    return hstep_is_squared(w->t, j) || w->u->every < 2 ? 1 : w->u->every;
}

/* Sums over columns of a matrix with vectors are added up within so many rows, and then over these blocks in order. */
#define HSTEP_CROSS_ROWS 64

/* The slot of a pair's vector over rows, or over columns. */
HSTEP_INLINE struct hstep_slot *hstep_vector_of(struct hstep_tensor *t, int pair, int extent)
{
    int s = HALFSTEP_SLOT_STATE;
    while (t->slot[s].extent != extent || pair--) s++;
    return &t->slot[s];
}

#endif
