#include "common/log.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/interrupt.h"
#include "io/files.h"

static const char header[] = "step,train_loss,val_loss,lr,gradient_norm,tokens_per_s,seconds,skipped_steps";

struct log {
    FILE *file;
    int failed;
};

static struct log *give_up(struct log *log, char *error, size_t error_bytes, const char *path, const char *why)
{
    snprintf(error, error_bytes, "cannot write the log %s: %s", path, why);
    if (log && log->file) fclose(log->file);
    free(log);
    return NULL;
}

/* Returns the length of the part to keep: the header and the complete rows up to step `resumed`. Returns 0 for an empty
 * file, -1 if the file is not such a log, -2 if it cannot be read. */
static long kept_bytes(FILE *file, int64_t resumed)
{
    char line[512];
    if (!fgets(line, sizeof line, file)) return ferror(file) ? -2 : 0;
    size_t n = strlen(header);
    if (strncmp(line, header, n) != 0 || strcmp(line + n, "\n") != 0) return -1;
    long kept = ftell(file);
    while (kept >= 0 && fgets(line, sizeof line, file)) {
        char *end;
        long long step = strtoll(line, &end, 10);
        if (!strchr(line, '\n') || end == line || *end != ',' || step > resumed) break;
        kept = ftell(file);
    }
    return kept < 0 || ferror(file) ? -2 : kept;
}

/* Returns 0 if the file may be overwritten, because it is empty or a log of train lm or train mnist. Returns -1 if not,
 * and -2 if the file cannot be read. */
static long replaceable(FILE *file)
{
    static const char *const starts[] = {"step,", "epoch,"};
    char start[8] = "";
    size_t n = fread(start, 1, 6, file);
    if (ferror(file)) return -2;
    for (int i = 0; i < 2; i++)
        if (strncmp(start, starts[i], n < strlen(starts[i]) ? n : strlen(starts[i])) == 0) return 0;
    return -1;
}

/* Opens the file without changing it. Locks a regular file, because two runs that write to one log would destroy both
 * logs. Returns NULL with one line in error. */
static FILE *open_file(const char *path, int *regular, char *error, size_t error_bytes)
{
    struct stat status;
    /* Opening a pipe waits for a reader, possibly for ever, so signals must end the process here. */
    interrupt_pause();
    *regular = stat(path, &status) != 0 || S_ISREG(status.st_mode);
    int fd = open(path, (*regular ? O_RDWR : O_WRONLY) | O_CREAT | O_CLOEXEC | O_NOCTTY, 0666);
    interrupt_resume();
    FILE *file = fd < 0 ? NULL : fdopen(fd, *regular ? "r+" : "w");
    char why[1024];
    if (!file) give_up(NULL, error, error_bytes, path, hstep_reason(path, why, sizeof why));
    if (!file && fd >= 0) close(fd);
    if (file && *regular && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        give_up(NULL, error, error_bytes, path, "another run is writing to it");
        fclose(file);
        file = NULL;
    }
    return file;
}

/* Opens a log. With resumed < 0 it starts a new one with this header, otherwise it continues a log of train lm. */
static struct log *open_log(const char *path, const char *first_line, int64_t resumed, char *error, size_t error_bytes)
{
    struct log *log = calloc(1, sizeof *log);
    int regular;
    long kept = 0;
    if (!log) return give_up(log, error, error_bytes, path, "out of memory");
    log->file = open_file(path, &regular, error, error_bytes);
    if (!log->file) {
        free(log);
        return NULL;
    }
    if (regular) kept = resumed < 0 ? replaceable(log->file) : kept_bytes(log->file, resumed);
    if (kept == -1)
        return give_up(log, error, error_bytes, path,
                       resumed < 0 ? "the file exists and is not a log; choose another name"
                                   : "the file is not a log that can be continued");
    if (regular && (kept < 0 || fseek(log->file, kept, SEEK_SET) != 0 || ftruncate(fileno(log->file), kept) != 0))
        return give_up(log, error, error_bytes, path, strerror(errno));
    if (kept == 0 && log_line(log, first_line) != 0) return give_up(log, error, error_bytes, path, strerror(errno));
    return log;
}

struct log *log_open(const char *path, int64_t resumed, char *error, size_t error_bytes)
{
    return open_log(path, header, resumed, error, error_bytes);
}

struct log *log_create(const char *path, const char *header, char *error, size_t error_bytes)
{
    return open_log(path, header, -1, error, error_bytes);
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
