#include "ui/log.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char header[] = "step,train_loss,val_loss,lr,gradient_norm,tokens_per_s,seconds,skipped_steps\n";

struct log {
    FILE *file;
    int failed;
};

/* Length of the part to keep: the header and the complete rows up to `resumed`. -1: not such a log. */
static long kept_bytes(FILE *file, int64_t resumed)
{
    char line[512];
    if (!fgets(line, sizeof line, file)) return 0;
    if (strcmp(line, header) != 0) return -1;
    long kept = ftell(file);
    while (fgets(line, sizeof line, file)) {
        char *end;
        long long step = strtoll(line, &end, 10);
        if (!strchr(line, '\n') || end == line || *end != ',' || step > resumed) break;
        kept = ftell(file);
    }
    return kept;
}

static struct log *give_up(struct log *log, char *error, size_t error_bytes, const char *path, const char *why)
{
    snprintf(error, error_bytes, "cannot write the log %s: %s", path, why);
    if (log && log->file) fclose(log->file);
    free(log);
    return NULL;
}

struct log *log_open(const char *path, int64_t resumed, char *error, size_t error_bytes)
{
    struct log *log = calloc(1, sizeof *log);
    if (!log) return give_up(log, error, error_bytes, path, "out of memory");
    struct stat status;
    int regular = stat(path, &status) == 0 && S_ISREG(status.st_mode);
    long kept = 0;
    if (resumed >= 0 && regular) {
        log->file = fopen(path, "r+");
        if (!log->file) return give_up(log, error, error_bytes, path, strerror(errno));
        kept = kept_bytes(log->file, resumed);
        if (kept < 0) return give_up(log, error, error_bytes, path, "it holds something else than a log to continue");
        if (ftruncate(fileno(log->file), kept) != 0 || fseek(log->file, kept, SEEK_SET) != 0)
            return give_up(log, error, error_bytes, path, strerror(errno));
    } else {
        log->file = fopen(path, "w");
        if (!log->file) return give_up(log, error, error_bytes, path, strerror(errno));
    }
    if (kept == 0 && (fputs(header, log->file) == EOF || fflush(log->file) != 0))
        return give_up(log, error, error_bytes, path, strerror(errno));
    return log;
}

struct log *log_create(const char *path, const char *header, char *error, size_t error_bytes)
{
    struct log *log = calloc(1, sizeof *log);
    if (!log) return give_up(log, error, error_bytes, path, "out of memory");
    log->file = fopen(path, "w");
    if (!log->file || log_line(log, header) != 0) return give_up(log, error, error_bytes, path, strerror(errno));
    return log;
}

static void put(FILE *file, double v, int digits)
{
    if (isnan(v)) fputc(',', file);
    else fprintf(file, ",%.*g", digits, v);
}

static int flush(struct log *log)
{
    if (fflush(log->file) == 0 && !ferror(log->file)) return 0;
    log->failed = 1;
    clearerr(log->file);
    return -1;
}

int log_write(struct log *log, const struct log_row *row)
{
    fprintf(log->file, "%lld", (long long)row->step);
    put(log->file, row->train_loss, 8);
    put(log->file, row->val_loss, 8);
    put(log->file, row->lr, 8);
    put(log->file, row->gradient_norm, 8);
    put(log->file, row->tokens_per_s, 6);
    fprintf(log->file, ",%.3f,%llu\n", row->seconds, (unsigned long long)row->skipped_steps);
    return flush(log);
}

int log_line(struct log *log, const char *line)
{
    fprintf(log->file, "%s\n", line);
    return flush(log);
}

int log_close(struct log *log)
{
    if (!log) return 0;
    int bad = fclose(log->file) != 0 || log->failed;
    free(log);
    return bad ? -1 : 0;
}
