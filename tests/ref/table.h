/* Which reference belongs to which rule, and how hyper-parameters reach both sides. A rule of the library without a row
 * here fails the tests that use this table; so does a hyper-parameter of its own that REF_HYPERS lacks. */
#ifndef HALFSTEP_REF_TABLE_H
#define HALFSTEP_REF_TABLE_H

#include <stddef.h>

#include "ref/fixture.h"
#include "ref/rules.h"

struct reference {
    const char *rule;
    void (*step)(const struct ref_hyper *h, struct ref_tensor *r);
    /* For long runs, of which a rule may have several: a learning rate that moves weights by about 1e-3 a step where
     * gradients are about 1e-2, options as "name=value ...", and whether block formats are followed too. */
    double lr;
    const char *options;
    int blocks;
};

static const struct reference references[] = {
    {"sgd", ref_sgd, 3e-2, "momentum=0.9 nesterov=1", 1},
    {"sgd", ref_sgd, 1e-1, "", 0},
    {"adam", ref_adamw, 1e-3, "", 0},
    {"adam", ref_adamw, 1e-3, "amsgrad=1", 1},
    {"adamw", ref_adamw, 1e-3, "", 1},
    {"lion", ref_lion, 1e-3, "", 1},
    {"adan", ref_adan, 1e-3, "", 1},
    {"radam", ref_radam, 1e-3, "", 1},
    {"ranger", ref_ranger, 2e-3, "", 1},
    {"stableadamw", ref_stableadamw, 1e-3, "", 1},
    {"rmsprop", ref_rmsprop, 1e-4, "momentum=0.9", 1},
    {"rmsprop", ref_rmsprop, 1e-3, "debias=1", 0},
    /* v - mean^2 is a difference, of which coarse codes leave nothing. */
    {"rmsprop", ref_rmsprop, 1e-4, "momentum=0.9 centered=1", 0},
    {"compass", ref_compass, 1e-3, "", 1},
    {"compass", ref_compass, 1e-3, "published=1", 0},
    {"lpfadamw", ref_lpfadamw, 1e-3, "", 1},
    {"lpfadamw", ref_lpfadamw, 1e-3, "published=1", 0},
    {"lamb", ref_lamb, 2e-3, "", 1},
    {"lamb", ref_lamb, 2e-3, "debias=0 trust_scale=0.5", 0},
    {"lamb16", ref_lamb16, 2e-3, "", 1},
    {"adamw-delayed", ref_delayed, 1e-3, "", 1},
    {"ema", ref_ema, 1, "beta=0.99", 1},
    {"ema", ref_ema, 1, "debias=1", 0},
    {"muon", ref_muon, 1e-2, "", 1},
    {"schedulefree", ref_schedulefree, 1e-3, "", 1},
    {"adopt", ref_adopt, 1e-3, "", 1},
    {"adopt", ref_adopt, 1e-3, "clipped=0 beta2=0.99", 0},
    {"ademamix", ref_ademamix, 1e-3, "", 1},
    {"ademamix", ref_ademamix, 1e-3, "alpha_warmup=300 beta3_warmup=600", 0},
    {"mars", ref_mars, 1e-3, "", 1},
    {"mars", ref_mars, 1e-3, "max_norm=0", 0},
    {"prodigy", ref_prodigy, 1e-3, "d0=1", 1},
    /* Gradients that no weight answers to would let the estimate grow without end. */
    {"prodigy", ref_prodigy, 1e-1, "d0=1e-2 growth_rate=1.001", 0},
    {"prodigy", ref_prodigy, 1e-3, "d0=1 slice_p=11", 0},
    {"came", ref_came, 1e-3, "", 1},
    {"came", ref_came, 1e-3, "clip_threshold=0 beta3=0.99", 0},
    {"adafactor", ref_adafactor, 1e-2, "relative_step=0 beta1=0.9", 1},
    {"adafactor", ref_adafactor, 1e-2, "published=1 eps=1e-30 scale_parameter=0", 0},
};
enum { REFERENCES = sizeof references / sizeof references[0] };

static inline const struct reference *reference_of(const char *rule)
{
    for (int i = 0; i < REFERENCES; i++)
        if (!strcmp(references[i].rule, rule)) return &references[i];
    return NULL;
}

/* ---- Rules of the library ---------------------------------------------------------------------------------------- */

static inline halfstep_hyper_info hyper_info(int32_t row, int32_t index)
{
    halfstep_hyper_info info = {.struct_size = sizeof info};
    MUST(halfstep_get_hyper_info(row, index, &info));
    return info;
}

/* Hyper-parameters that are common to all rules come first: their number. */
static inline int32_t common_hypers(void)
{
    int32_t common = rule_info(0).hypers;
    for (int32_t row = 1; row < halfstep_rule_count(); row++) {
        int32_t hypers = rule_info(row).hypers, same = 0;
        while (same < common && same < hypers && !strcmp(hyper_info(0, same).name, hyper_info(row, same).name)) same++;
        common = same;
    }
    return common;
}

/* Where a reference keeps a rule's own hyper-parameter. */
static inline double *ref_hyper_at(struct ref_hyper *h, const char *name)
{
    static const struct {
        const char *name;
        size_t offset;
    } known[] = {
#define X(name) {#name, offsetof(struct ref_hyper, name)},
        REF_HYPERS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (!strcmp(known[i].name, name)) return (double *)(void *)((char *)h + known[i].offset);
    printf("FAIL REF_HYPERS of tests/ref/ref.h lacks the hyper-parameter '%s' (docs/adding.md)\n", name);
    exit(1);
}

static inline enum ref_decay ref_decay_of(const char *name)
{
    static const char *const names[] = {"l2", "decoupled", "fully-decoupled", "proximal"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(names[i], name)) return (enum ref_decay)i;
    printf("FAIL no reference for decay '%s'\n", name);
    exit(1);
}

/* The library's defaults. */
static inline struct ref_hyper ref_defaults(int32_t row)
{
    struct ref_hyper h = {.reference_lr = 1};
    halfstep_rule_info info = rule_info(row);
    h.decay = ref_decay_of(info.decay);
    for (int32_t i = 0; i < info.hypers; i++) {
        halfstep_hyper_info hyper = hyper_info(row, i);
        if (!strcmp(hyper.name, "lr")) h.lr = hyper.initial;
        if (!strcmp(hyper.name, "weight_decay")) h.weight_decay = hyper.initial;
        if (i >= common_hypers()) *ref_hyper_at(&h, hyper.name) = hyper.initial;
    }
    return h;
}

/* "name=value name=value ..." */
static inline void ref_options(struct ref_hyper *h, const char *options)
{
    char name[32];
    double value;
    int length;
    for (; sscanf(options, " %31[^=]=%lf%n", name, &value, &length) == 2; options += length)
        *ref_hyper_at(h, name) = value;
}

/* From the reference's hyper-parameters to the library's. */
static inline void ref_apply(struct one *t, int32_t row, const struct ref_hyper *h)
{
    struct ref_hyper own = *h;
    static const char *const names[] = {"l2", "decoupled", "fully-decoupled", "proximal"};
    one_hyper(t, "lr", h->lr);
    one_hyper(t, "weight_decay", h->weight_decay);
    one_hyper(t, "reference_lr", h->reference_lr);
    MUST(halfstep_set_choice(t->o, 0, "decay", names[h->decay]));
    for (int32_t i = common_hypers(); i < rule_info(row).hypers; i++) {
        const char *name = hyper_info(row, i).name;
        one_hyper(t, name, *ref_hyper_at(&own, name));
    }
}

/* Whether a state exists with the hyper-parameters and shape at hand. */
static inline int state_stored(const struct one *t, int state)
{
    halfstep_slot_info info = {.struct_size = sizeof info};
    return halfstep_get_slot_info(t->o, 0, HALFSTEP_SLOT_STATE + state, &info) == HALFSTEP_OK && info.format >= 0;
}

/* After a step: what was new is old. */
static inline void ref_advance(struct ref_tensor *r)
{
    for (int i = 0; i < r->n; i++) {
        r->x[i].w = r->x[i].w_new;
        memcpy(r->x[i].s, r->x[i].s_new, sizeof r->x[i].s);
    }
}

#endif
