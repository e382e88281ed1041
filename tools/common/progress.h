/* Progress on stderr. A terminal gets one line, rewritten in place, with the time left. A file or pipe gets a plain
 * line now and then. NO_COLOR and TERM=dumb are respected. */
#ifndef HALFSTEP_PROGRESS_H
#define HALFSTEP_PROGRESS_H

#include <stdint.h>
#include <stdio.h>

struct progress {
    FILE *out;
    int quiet, colour;
    int live;  /* a line on a terminal is rewritten in place */
    int drawn; /* the live line is on the screen */
    char label[96];
    int64_t first, total;
    double started, shown; /* progress_clock() at the beginning, and when the live line was last drawn */
    int64_t next_plain;    /* step of the next plain line */
    char line[256];
};

struct progress_values {
    double loss, val_loss, gradient_norm, lr, tokens_per_s; /* NaN: unknown, left out */
    uint64_t skipped;
    const char *extra; /* text after the losses, or NULL */
};

/* quiet: only progress_note() prints. */
void progress_open(struct progress *progress, FILE *out, int quiet);
/* Sets the text that lines begin with, such as a recipe. It is "" after progress_open(). */
void progress_label(struct progress *progress, const char *label);
/* Starts the clock of a run of `total` steps, of which `first` are already done. */
void progress_begin(struct progress *progress, int64_t first, int64_t total);
/* Shows the state after a step. important: shows it now, after a validation or at the end. */
void progress_update(struct progress *progress, int64_t step, const struct progress_values *values, int important);
/* Prints a line of its own, which stays. */
__attribute__((format(printf, 2, 3))) void progress_note(struct progress *progress, const char *format, ...);
/* Ends the live line and leaves its last state on the screen. */
void progress_end(struct progress *progress);

/* Returns the seconds of a clock that never goes back. */
double progress_clock(void);

#endif
