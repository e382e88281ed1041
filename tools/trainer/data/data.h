/* Training text: whole files of bytes in memory, cut into a training and a validation part, and the windows taken from
 * it. Windows are a function of (seed, step, micro-step, sequence): every recipe of a comparison sees the same data in
 * the same order, and a resumed run needs the step number only. */
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

/* Reads a file as it is, or unpacks it when its content is gzip (several members may follow each other). 0, or -1 and
 * one line that names the file; then out is empty. An empty file is an error. */
int data_load(const char *path, struct data_file *out, char *error, size_t error_bytes);
void data_free(struct data_file *file);
/* The same after what out holds already, *capacity bytes of which are allocated: what cannot be read leaves it as it
 * was. An empty file adds nothing and is no error. */
int data_append(const char *path, struct data_file *out, size_t *capacity, char *error, size_t error_bytes);

/* The files behind names: a name is that file, of whatever kind, or a folder, which stands for the regular files in it
 * and in its folders, in the order of the bytes of their names. In a folder, names that begin with a dot, empty files,
 * links to folders and what is no file are passed over. */
struct data_list {
    struct {
        char *path;
        int named; /* itself, and not a folder that it is in */
    } *file;
    size_t n, capacity;
};
/* 0, or -1 and one line that names all that are not there or cannot be read; then out is empty. */
int data_list(const char *const *names, int n, struct data_list *out, char *error, size_t error_bytes);
void data_list_free(struct data_list *list);
/* All of them joined in their order, with nothing in between. files: how many. Likewise; a file of no bytes is wrong
 * where it was named. */
int data_load_all(const char *const *names, int n, struct data_file *out, size_t *files, char *error,
                  size_t error_bytes);

/* The first nine tenths for training, the rest for validation. */
void data_split(const struct data_file *file, struct data_part *train, struct data_part *validation);

/* -1 and one line that names what, when part is too short for one window of context + 1 bytes and a choice (context + 2
 * bytes). what: for example "training part of FILE". */
int data_check(const struct data_part *part, int context, const char *what, char *error, size_t error_bytes);

/* batch windows of context + 1 bytes each, one after the other in out. */
void data_batch(const struct data_part *part, uint64_t seed, uint64_t step, uint64_t micro_step, int batch, int context,
                uint8_t *out);

/* Where one of them starts. */
size_t data_window(const struct data_part *part, uint64_t seed, uint64_t step, uint64_t micro_step, uint64_t sequence,
                   int context);

/* Evaluation: window number index of count, spread evenly over the part; overlap only where the part is short.
 * data_eval_count: how many windows fit without overlap, at most limit (0: no limit), at least 1. */
size_t data_eval_count(const struct data_part *part, int context, size_t limit);
void data_eval_window(const struct data_part *part, size_t index, size_t count, int context, uint8_t *out);

#endif
