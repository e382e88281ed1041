/* Maps each rule to its reference, and hyper-parameters to both sides. Each header of a reference ends with its rows,
 * ref_NAME_ROWS. A rule of the library without rows does not compile here. A rule's own hyper-parameter that REF_HYPERS
 * lacks fails the tests that use this table. */
#ifndef HALFSTEP_REF_TABLE_H
#define HALFSTEP_REF_TABLE_H

#include <stddef.h>

#include "ref/fixture.h"
#include "ref/rules.h"

struct reference {
    const char *rule;
    void (*step)(const struct ref_hyper *h, struct ref_tensor *r);
    /* Settings for long runs; a rule may have several rows. The lr moves weights by about 1e-3 a step where gradients
     * are about 1e-2. The options are "name=value ...". The flag `blocks` is 1 if block formats are followed too. */
    double lr;
    const char *options;
    int blocks;
};

static const struct reference references[] = {
#define ROW(...) {__VA_ARGS__},
#define RULE(id, name) ref_##name##_ROWS(ROW)
#include "rules/rules.def"
#undef RULE
#undef ROW
};
enum { REFERENCES = COUNT(references) };

static inline const struct reference *reference_of(const char *rule)
{
    for (int i = 0; i < REFERENCES; i++)
        if (!strcmp(references[i].rule, rule)) return &references[i];
    return NULL;
}

/* ---- Rules of the library ---------------------------------------------------------------------------------------- */

static inline halfstep_hyper_info hyper_info(int32_t row, int32_t index)
{
    SIZED(halfstep_hyper_info, info);
    MUST(halfstep_get_hyper_info(row, index, &info));
    return info;
}

/* Returns the number of hyper-parameters that all rules share. These come first in every row. */
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

/* Returns the address of a rule's own hyper-parameter in the reference's struct. */
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
    for (size_t i = 0; i < COUNT(known); i++)
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

/* Returns the library's default hyper-parameters of a rule. */
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

/* Sets hyper-parameters from a text "name=value name=value ...". */
static inline void ref_options(struct ref_hyper *h, const char *options)
{
    char name[32];
    double value;
    int length;
    for (; sscanf(options, " %31[^=]=%lf%n", name, &value, &length) == 2; options += length)
        *ref_hyper_at(h, name) = value;
}

/* Sets the library's hyper-parameters to the reference's. */
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

/* Returns 1 if the state exists with these hyper-parameters and this shape. */
static inline int state_stored(const struct one *t, int state)
{
    SIZED(halfstep_slot_info, info);
    return halfstep_get_slot_info(t->o, 0, STATE + state, &info) == OK && info.format >= 0;
}

/* Ends a step: the new values become the old ones. */
static inline void ref_advance(struct ref_tensor *r)
{
    for (int i = 0; i < r->n; i++) {
        r->x[i].w = r->x[i].w_new;
        memcpy(r->x[i].s, r->x[i].s_new, sizeof r->x[i].s);
    }
}

#endif
