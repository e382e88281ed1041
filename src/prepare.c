/* The host side of the rules: constants of a step, in double, by the rule's own function. */
#include "optimizer.h"
#include "vec/scalar.h"

#define HSTEP_INCLUDE_RULES
#include "rules/rules.def"
#undef HSTEP_INCLUDE_RULES

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
