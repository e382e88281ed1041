/* Learning-rate schedules. A schedule is a factor on the group's lr, by the number of its accepted steps. */
#ifndef HSTEP_SCHEDULE_H
#define HSTEP_SCHEDULE_H

#include <stdint.h>

enum hstep_schedule_kind {
#define SCHEDULE(constant, id, name, title) HSTEP_SCHEDULE_##constant = id,
#include "base/schedules.def"
#undef SCHEDULE
    HSTEP_SCHEDULE_END
};

enum {
#define SCHEDULE(constant, id, name, title) +1
    HSTEP_SCHEDULE_COUNT = 0
#include "base/schedules.def"
#undef SCHEDULE
};

struct hstep_schedule {
    int kind;
    uint64_t warmup;    /* steps of rising rate; for inverse-power the preheat, where 0 counts as 1 */
    uint64_t total;     /* steps of the whole run; 0 in a schedule that does not fall */
    double final;       /* factor at and after `total` */
    double decay_start; /* wsd: fraction of `total` where the fall begins; 0.8 is usual */
    double power;       /* inverse-power: exponent, at most 0; -0.5 is usual */
};

/* Returns the factor for the step that follows `step` accepted ones. The bits are the same on every machine. */
double hstep_schedule_factor(const struct hstep_schedule *schedule, uint64_t step);

/* Returns 1 for a kind that falls until `total`, and so needs it. */
int hstep_schedule_falls(int kind);

/* Returns the id of a name, or -1 if it is unknown. The other two return NULL if the id is unknown. */
int hstep_schedule_find(const char *name);
const char *hstep_schedule_name(int kind);
const char *hstep_schedule_title(int kind);

#endif
