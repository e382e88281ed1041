/* The training log: a CSV file with one line per step (train lm) or epoch (train mnist). Every line is flushed, so that
 * the file can be watched while it grows. */
#ifndef HALFSTEP_LOG_H
#define HALFSTEP_LOG_H

#include <stddef.h>
#include <stdint.h>

struct log;

struct log_row {
    int64_t step; /* counted from 1: this many steps are done */
    double train_loss;
    double val_loss; /* NaN: not measured after this step; the field stays empty */
    double lr, gradient_norm, tokens_per_s, seconds;
    uint64_t skipped_steps;
};

/* Opens the log of train lm. If resumed < 0, it starts a new log, and an older log in the file is lost. Otherwise it
 * continues the log after step `resumed`. It removes later rows, which a run wrote after its last checkpoint, and a
 * line cut off by a kill. A file that is not a log is refused. Returns NULL with one line in error. */
struct log *log_open(const char *path, int64_t resumed, char *error, size_t error_bytes);
/* Appends a row. Returns 0, or -1 with errno set if the file system refuses. */
int log_write(struct log *log, const struct log_row *row);

/* A log with columns of its own. The header and every row are complete lines without the line break. Both functions
 * return what log_open() and log_write() return. */
struct log *log_create(const char *path, const char *header, char *error, size_t error_bytes);
int log_line(struct log *log, const char *line);

/* Closes the log, which may be NULL. Returns 0, or -1 if anything written to it was lost. */
int log_close(struct log *log);

#endif
