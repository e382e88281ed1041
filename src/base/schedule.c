#include "base/schedule.h"

#include <stddef.h>
#include <string.h>

#include "base/detmath.h"

_Static_assert((int)HSTEP_SCHEDULE_COUNT == (int)HSTEP_SCHEDULE_END, "schedule ids must count from 0 without gaps");

static HSTEP_TABLE const struct {
    const char *name, *title;
} schedules[] = {
#define SCHEDULE(constant, id, name, title) [id] = {name, title},
#include "base/schedules.def"
#undef SCHEDULE
};

int hstep_schedule_find(const char *name)
{
    for (int kind = 0; kind < HSTEP_SCHEDULE_COUNT; kind++)
        if (strcmp(name, schedules[kind].name) == 0) return kind;
    return -1;
}

const char *hstep_schedule_name(int kind)
{
    return kind >= 0 && kind < HSTEP_SCHEDULE_COUNT ? schedules[kind].name : NULL;
}

const char *hstep_schedule_title(int kind)
{
    return kind >= 0 && kind < HSTEP_SCHEDULE_COUNT ? schedules[kind].title : NULL;
}

/* Returns the factor of "inverse-power". adamw_bfloat16 asks for its rate after it has counted the step, and adds one
 * more. So the first step uses 2 / preheat, and the peak is at step preheat - 2. The schedule has no end. */
static double inverse_power(const struct hstep_schedule *s, uint64_t step)
{
    double preheat = s->warmup ? (double)s->warmup : 1.0;
    double x = ((double)step + 2.0) / preheat;
    return x <= 1.0 ? x : hstep_pow(x, s->power);
}

/* Returns a value that falls from 1 to `final` as weight goes from 1 to 0. Both ends are exact. */
static double between(double final, double weight)
{
    double span = 1.0 - final;
    double part = span * weight;
    return weight >= 1.0 ? 1.0 : final + part;
}

int hstep_schedule_falls(int kind) { return kind != HSTEP_SCHEDULE_CONSTANT && kind != HSTEP_SCHEDULE_INVERSE_POWER; }

double hstep_schedule_factor(const struct hstep_schedule *s, uint64_t step)
{
    if (s->kind == HSTEP_SCHEDULE_INVERSE_POWER) return inverse_power(s, step);
    int falls = hstep_schedule_falls(s->kind) && s->total > 0;
    if (falls && step >= s->total) return s->final;
    if (step < s->warmup) return ((double)step + 1.0) / (double)s->warmup;
    if (!falls) return 1.0;

    uint64_t start = s->warmup;
    if (s->kind == HSTEP_SCHEDULE_WSD) {
        double begin = s->decay_start * (double)s->total;
        start = begin >= (double)s->total ? s->total : begin > 0 ? (uint64_t)begin : 0;
        if (step < start) return 1.0;
    }
    double r = (double)(step - start) / (double)(s->total - start);
    double weight;
    switch (s->kind) {
    case HSTEP_SCHEDULE_LINEAR: weight = 1.0 - r; break;
    case HSTEP_SCHEDULE_COSINE:
        weight = HSTEP_PI * r;
        weight = 1.0 + hstep_cos(weight);
        weight = 0.5 * weight;
        break;
    default: weight = 1.0 - sqrt(r); break;
    }
    return between(s->final, weight);
}
