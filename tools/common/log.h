/* The training log: a CSV file with one line per step (train lm) or epoch (train mnist), flushed line by line so that
 * it can be watched while it grows. */
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

/* resumed < 0: a new log, what the file held is gone. Otherwise the file is continued: rows after step `resumed`,
 * written by a run that went on after its last checkpoint, and a line cut off by a kill are removed. NULL and one line
 * on error. */
struct log *log_open(const char *path, int64_t resumed, char *error, size_t error_bytes);
/* 0, or -1 when the file system refuses (errno is set). */
int log_write(struct log *log, const struct log_row *row);

/* A log with columns of its own: the header and every row are given as they are to stand there, without the line's
 * end. */
struct log *log_create(const char *path, const char *header, char *error, size_t error_bytes);
int log_line(struct log *log, const char *line);

/* 0, or -1 if anything written to it was lost. NULL is fine. */
int log_close(struct log *log);

#endif
