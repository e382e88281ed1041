/* The files of a model: a checkpoint of train lm, a folder or a safetensors file of another program, or the index of
 * several such files. Functions return 0, or -1 with an error text. */
#ifndef HALFSTEP_MODEL_FILES_H
#define HALFSTEP_MODEL_FILES_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep_io.h"

#include "trainer/models/llama.h"

enum { MODEL_PATH_BYTES = 4096 };

struct model_files {
    halfstep_checkpoint *checkpoint; /* NULL: files of another program */
    char model[MODEL_PATH_BYTES];    /* the safetensors file, or the index */
    char config[MODEL_PATH_BYTES];   /* "" without one */
};

/* Finds the files. quick: does not verify a checkpoint's checksums. Call model_files_close() afterwards, also on
 * failure. */
int model_files_find(const char *path, int quick, struct model_files *files, char *error, size_t error_bytes);
void model_files_close(struct model_files *files);
/* Returns 1 if the path is a file that begins as one with the states of an optimizer does (halfstep_store_create). */
int store_file_is(const char *path);
/* Lists what is read for a path: `files` is the file itself or, if any file of a folder may be read, that folder.
 * `config` is the config.json, which may be missing. */
void model_files_inputs(const char *path, char files[MODEL_PATH_BYTES], char config[MODEL_PATH_BYTES]);

struct model_part {
    halfstep_safetensors *file;
    char *path;
};

/* The tensors of a model, in one file or several. */
struct model_tensors {
    struct model_part *part;
    size_t parts;
    char *path; /* the file, or the index that names the others */
};

/* Opens a safetensors file, or all files that an index (NAME.json) names. Call model_tensors_close() afterwards, also
 * on failure. */
int model_tensors_open(const char *path, struct model_tensors *tensors, char *error, size_t error_bytes);
void model_tensors_close(struct model_tensors *tensors);
/* Finds one tensor of the model. Fails if its shape differs. */
int model_tensors_find(const struct model_tensors *tensors, const struct lm_tensor *tensor,
                       const struct model_part **part, uint64_t *index, halfstep_safetensor_info *info, char *error,
                       size_t error_bytes);
/* Fails unless the files hold each tensor of the model once, with its shape, and no other tensor. */
int model_tensors_check(const struct model_tensors *tensors, const struct lm_config *shape, char *error,
                        size_t error_bytes);
/* Fails unless a tensor of a file has the shape of the model's, or this number of columns if that is not 0. */
int model_tensor_fits(const char *path, const char *name, const halfstep_safetensor_info *info,
                      const struct lm_tensor *tensor, uint64_t columns, char *error, size_t error_bytes);
/* Returns the type of a weight in a file. Fails unless weights may have it. */
int model_tensor_dtype(const char *path, const halfstep_safetensor_info *info, const struct lm_tensor *tensor,
                       char *error, size_t error_bytes);

#endif
