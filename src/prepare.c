/* The host side of the rules: constants of a step, in double, by the rule's own function. */
#include "optimizer.h"
#include "vec/scalar.h"

#define HSTEP_INCLUDE_RULES
#include "rules/rules.def"
#undef HSTEP_INCLUDE_RULES

/* Lists of a row, counted: one entry each. A row that is wrong does not compile, and the message names it. */
#define ROW(condition, name, text) _Static_assert(condition, name ": " text);
#define STATE(...) 0
#define STATES(...) sizeof((char[]){__VA_ARGS__})
#define HYPER(...) 0
#define HYPERS(...) sizeof((char[]){__VA_ARGS__})
#define SCALAR(...) 0
#define SCALARS(...) sizeof((char[]){__VA_ARGS__})
#define NO_NORMS 0
#define NORMS_1 1
#define NORMS_2 2
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind)          \
    ROW((id) > 0, name, "ids count from 1")                                                                            \
    ROW(sizeof name > 1 && sizeof name <= 24, name, "names have 1 to 23 characters")                                   \
    ROW((states) <= HALFSTEP_MAX_STATES, name, "more states than HALFSTEP_MAX_STATES")                                 \
    ROW((hypers) <= HSTEP_MAX_OWN_HYPERS, name, "more hyper-parameters than HSTEP_MAX_OWN_HYPERS")                     \
    ROW((scalars) <= HSTEP_MAX_NAMED_SCALARS, name, "more scalars than HSTEP_MAX_NAMED_SCALARS")                       \
    ROW((norms) <= HSTEP_MAX_NORMS, name, "more norms than HSTEP_MAX_NORMS")                                           \
    ROW((int)fn##_constants <= HSTEP_MAX_SCALARS, name, "more constants than HSTEP_MAX_SCALARS")
#include "rules/rules.def"
#undef RULE

static void (*const prepares[HSTEP_RULES])(float *, struct hstep_prepare *) = {
#define RULE(id, name, fn, ...) [HSTEP_RULE_ROW_##id] = fn##_prepare,
#include "rules/rules.def"
#undef RULE
};

void hstep_prepare_rule(const struct hstep_group *group, struct hstep_prepare *p, float *k)
{
    p->hyper = group->own;
    for (int i = 0; i < HSTEP_MAX_SCALARS; i++) k[i] = 0.0f;
    prepares[group->recipe.rule](k, p);
}

double hstep_group_lr(const struct hstep_group *group)
{
    struct hstep_schedule schedule = {
        .kind = group->schedule,
        .warmup = (uint64_t)group->hyper[HSTEP_WARMUP_STEPS],
        .total = (uint64_t)group->hyper[HSTEP_TOTAL_STEPS],
        .final = group->hyper[HSTEP_FINAL_FRACTION],
        .decay_start = group->hyper[HSTEP_DECAY_START],
        .power = group->hyper[HSTEP_POWER],
    };
    return group->hyper[HSTEP_LR] * hstep_schedule_factor(&schedule, group->steps);
}
