/* Training text: whole files of bytes in memory, their split into training and validation, and windows of them. Windows
 * depend on (seed, step, micro-step, sequence) only. So every recipe of a comparison sees the same data in the same
 * order, and a resumed run needs the step number only. */
#ifndef HALFSTEP_DATA_H
#define HALFSTEP_DATA_H

#include <stddef.h>
#include <stdint.h>

struct data_file {
    uint8_t *bytes;
    size_t n;
};

struct data_part {
    const uint8_t *bytes;
    size_t n;
};

/* Reads a file, and unpacks it if it is gzip, with all its members. Returns 0, or -1 with an error text that names the
 * file; then out is empty. An empty file is an error, and so are other compressed files, archives and files of tables,
 * which the text names. */
int data_load(const char *path, struct data_file *out, char *error, size_t error_bytes);
void data_free(struct data_file *file);
/* Does the same, and appends to what out holds. `*capacity` is the number of allocated bytes. On failure out keeps its
 * contents. An empty file adds nothing and is no error. */
int data_append(const char *path, struct data_file *out, size_t *capacity, char *error, size_t error_bytes);

/* The files that names stand for. A name is a file of any kind, or a folder. A folder stands for the regular files in
 * it and in its folders, sorted by the bytes of their names. In folders, names that begin with a dot, empty files,
 * links to folders and special files are ignored. */
struct data_list {
    struct {
        char *path;
        int named; /* listed by its own name, not by a folder */
    } *file;
    size_t n, capacity;
};
/* Returns 0, or -1 with an error text that names all missing or unreadable files; then out is empty. */
int data_list(const char *const *names, int n, struct data_list *out, char *error, size_t error_bytes);
void data_list_free(struct data_list *list);
/* Reads and joins all files in order, with nothing in between. Sets `*files` to their number. Fails like data_list();
 * an empty file that is named itself is an error, too. */
int data_load_all(const char *const *names, int n, struct data_file *out, size_t *files, char *error,
                  size_t error_bytes);

/* Splits a file: the first nine tenths are for training, the rest for validation. */
void data_split(const struct data_file *file, struct data_part *train, struct data_part *validation);

/* Fails if `part` is too short: it needs context + 2 bytes, so that windows of context + 1 bytes can differ. Returns 0,
 * or -1 with an error text that names `what`, for example "training part of FILE". */
int data_check(const struct data_part *part, int context, const char *what, char *error, size_t error_bytes);

/* Copies `batch` windows of context + 1 bytes each to out, one after the other. */
void data_batch(const struct data_part *part, uint64_t seed, uint64_t step, uint64_t micro_step, int batch, int context,
                uint8_t *out);

/* Returns the start of one of these windows. */
size_t data_window(const struct data_part *part, uint64_t seed, uint64_t step, uint64_t micro_step, uint64_t sequence,
                   int context);

/* Windows for evaluation, spread evenly over the part. data_eval_count() returns how many fit without overlap, at least
 * 1 and at most `limit` (0: no limit). data_eval_window() copies window `index` of `count`; windows overlap only if the
 * part is short. */
size_t data_eval_count(const struct data_part *part, int context, size_t limit);
void data_eval_window(const struct data_part *part, size_t index, size_t count, int context, uint8_t *out);

#endif
