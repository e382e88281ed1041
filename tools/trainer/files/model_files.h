/* The files of a model: a checkpoint of train lm, a folder or a safetensors file of another program, or the index of
 * several such files. Functions return 0, or -1 and one line. */
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
    char config[MODEL_PATH_BYTES];   /* "": there is none */
};

/* Finds the files. quick: a checkpoint's checksums are not verified. After each, also a failed one,
 * model_files_close(). */
int model_files_find(const char *path, int quick, struct model_files *files, char *error, size_t error_bytes);
void model_files_close(struct model_files *files);
/* What is read for a path: the file itself, or a folder any of whose files may be read; and the config.json, which need
 * not be there. */
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

/* Opens a safetensors file, or all files that an index (NAME.json) names. After each, also a failed one,
 * model_tensors_close(). */
int model_tensors_open(const char *path, struct model_tensors *tensors, char *error, size_t error_bytes);
void model_tensors_close(struct model_tensors *tensors);
/* Finds one tensor of the model, and fails if its shape differs. */
int model_tensors_find(const struct model_tensors *tensors, const struct lm_tensor *tensor,
                       const struct model_part **part, uint64_t *index, halfstep_safetensor_info *info, char *error,
                       size_t error_bytes);
/* Fails unless the files hold each tensor of the model once, with its shape, and no other tensor. */
int model_tensors_check(const struct model_tensors *tensors, const struct lm_config *shape, char *error,
                        size_t error_bytes);
/* Compares a tensor of a file with the model's. */
int model_tensor_fits(const char *path, const char *name, const halfstep_safetensor_info *info,
                      const struct lm_tensor *tensor, char *error, size_t error_bytes);

#endif
