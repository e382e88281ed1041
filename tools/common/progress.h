/* What a long run says on stderr: on a terminal one line that is rewritten, with the time left; elsewhere plain lines,
 * few of them. NO_COLOR and TERM=dumb are respected. */
#ifndef HALFSTEP_PROGRESS_H
#define HALFSTEP_PROGRESS_H

#include <stdint.h>
#include <stdio.h>

struct progress {
    FILE *out;
    int quiet, colour;
    int live;  /* one line of a terminal is rewritten, */
    int drawn; /* and stands there now */
    char label[96];
    int64_t first, total;
    double started, shown; /* seconds of a monotonic clock */
    int64_t next_plain;    /* step of the next plain line */
    char line[256];
};

struct progress_values {
    double loss, val_loss, gradient_norm, lr, tokens_per_s; /* NaN: not known, left out */
    uint64_t skipped;
    const char *extra; /* more to say, after the losses; NULL: nothing */
};

/* quiet: only notes. */
void progress_open(struct progress *progress, FILE *out, int quiet);
/* What lines begin with from now on, for example a recipe; "" after progress_open(). */
void progress_label(struct progress *progress, const char *label);
/* first: steps that are already done. */
void progress_begin(struct progress *progress, int64_t first, int64_t total);
/* After each step. important: print a plain line now (a validation, the end). */
void progress_update(struct progress *progress, int64_t step, const struct progress_values *values, int important);
/* A line of its own that stays. */
__attribute__((format(printf, 2, 3))) void progress_note(struct progress *progress, const char *format, ...);
/* Leaves the last state of the live line standing. */
void progress_end(struct progress *progress);

/* Seconds of a clock that never goes back. */
double progress_clock(void);

#endif
