/* Files that keep the states of an optimizer (halfstep_store_create): what one says, and an optimizer made from that.
 * Functions return 0, or -1 with an error text. */
#ifndef HALFSTEP_STORE_FILE_H
#define HALFSTEP_STORE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "trainer/models/llama.h"

struct store_pair {
    const char *key, *value;
};

struct store_pairs {
    struct store_pair *pair;
    size_t n, capacity;
};

struct store_slot {
    const char *slot, *format;
    uint64_t bytes[2]; /* of codes and of the extra stream */
};

struct store_tensor {
    const char *name, *recipe;
    uint64_t ndim, matrix_rows, shape[2], part[4]; /* rows and row length; first row, rows, first column, columns */
    uint64_t split[HALFSTEP_MAX_SPLIT];
    struct store_slot slot[HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES];
    size_t slots, splits;
};

/* What a file says. Strings live as long as it. */
struct store_about {
    halfstep_store_info info;
    struct store_pairs metadata, values; /* as in the file of an optimizer; texts of the program that made the file */
    struct store_tensor *tensor;
    size_t tensors, capacity;
};

/* Returns 1 if the path is a file that begins as a file of states does. */
int store_file_is(const char *path);
/* Reads what a file says, also while another process trains with it. Call store_about_free() afterwards, also on
 * failure. */
int store_about_read(const char *path, struct store_about *about, char *error, size_t error_bytes);
void store_about_free(struct store_about *about);
/* Returns the value of a key, or NULL. */
const char *store_pairs_find(const struct store_pairs *pairs, const char *key);
/* Returns a copy of a text that the program keeps in a file, for the caller to free. */
char *store_file_text(const char *path, const char *key, char *error, size_t error_bytes);

/* Makes an optimizer of these tensors without states, with the recipes, groups and settings of the metadata. `from`
 * names the file in errors. The caller destroys it, also after a failure, unless it is NULL. */
int store_make_optimizer(const struct store_pairs *metadata, const halfstep_tensor *tensors, size_t n, const char *from,
                         halfstep_optimizer **optimizer, char *error, size_t error_bytes);

/* A file opened with an optimizer of its own. All weights are in memory, states stay in the file. */
struct store_file {
    struct store_about about;
    halfstep_optimizer *optimizer;
    halfstep_store *store;
    void **weights;
};

/* Opens a file. Call store_file_close() afterwards, also on failure. */
int store_file_open(const char *path, struct store_file *file, char *error, size_t error_bytes);
void store_file_close(struct store_file *file);
/* Returns the number of a tensor of the model, or -1 if the file has none of that name and shape. */
int32_t store_file_find(const struct store_file *file, const struct lm_tensor *tensor, char *error, size_t error_bytes);
/* Fails unless the file has the tensors of the model and no others. */
int store_file_check(const struct store_file *file, const struct lm_config *shape, char *error, size_t error_bytes);
/* Allocates memory for the weights of an optimizer. NULL without memory. Free it with store_free_weights(). */
void **store_make_weights(const halfstep_optimizer *optimizer);
void store_free_weights(const halfstep_optimizer *optimizer, void **weights);

#endif
