/* What a training checkpoint holds, and how it maps to an optimizer and a model:
 *
 *   model.safetensors      the weights as stored (F32, BF16 or F16) under the usual Llama names, with config.json
 *   optimizer.safetensors  NAME/STATE, NAME/STATE.scale or .extra, NAME/weight.extra; counters, the rule's numbers for
 *                          each tensor, seed, generator, recipe and hyper-parameters as metadata
 *   history.safetensors    losses so far
 *   trainer.json           the options of the run, its step, the identity of its data
 *
 * docs/checkpoints.md describes them. Functions return 0, or -1 and one line. */
#ifndef HALFSTEP_CHECKPOINT_H
#define HALFSTEP_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "trainer/run/train.h"

/* A model with its optimizer: tensor i of one is tensor i of the other. weights[i] has the type lm_dtype. */
struct holding {
    const struct lm_config *shape;
    halfstep_optimizer *optimizer;
    void **weights;
    int32_t tensors, groups;
    int32_t rule; /* row of the rule of all groups */
};

/* The LM_* type of a weight stored in this format's main stream, or -1. */
int weight_dtype(int32_t format);
/* The row's description, zeroed for a row that does not exist. */
halfstep_format_info checkpoint_format(int32_t row);
/* The gradient format whose codes have this safetensors dtype, or NULL. */
const char *gradient_format_of(const char *dtype);

/* Hash of every weight and state bit, tensor after tensor: weight codes, its extra stream, then codes and scales or
 * extras of each state. */
uint64_t holding_hash(const struct holding *holding);

/* trainer is the text of trainer.json. After success error is empty, or a line that begins with "note: ". */
int checkpoint_save(const char *directory, const halfstep_save_options *options, const struct holding *holding,
                    const char *recipe, const char *trainer, const struct run_history *history, char *error,
                    size_t error_bytes);
/* The files of a checkpoint, by number; NULL past the last. A save replaces what has these names in the directory. */
const char *checkpoint_file_name(int index);

/* Takes everything back. The optimizer must have the same tensors, recipe and hyper-parameters; a difference is named.
 * The schedule's total_steps is the caller's to judge. */
int checkpoint_load(const halfstep_checkpoint *checkpoint, const struct holding *holding, struct run_history *history,
                    char *error, size_t error_bytes);

/* Only the weights, from a checkpoint directory or files of another program (model_files.h), into whatever format
 * holding has. They must be the tensors of holding's shape and no others. With a checkpoint's error codes or residuals
 * they are read in full precision; where its rule averages (schedulefree), what is read are the weights that it
 * evaluates. */
int checkpoint_init(const char *path, const struct holding *holding, char *error, size_t error_bytes);

/* Weights of one tensor as fp32, from the same places: for comparing with the start. */
struct weight_source;
struct weight_source *weight_source_open(const char *path, char *error, size_t error_bytes);
void weight_source_close(struct weight_source *source);
int weight_source_read(struct weight_source *source, const struct lm_tensor *tensor, float *out, char *error,
                       size_t error_bytes);

/* The model that config.json describes, in a checkpoint, in a folder, or beside the safetensors file or index that path
 * names. It is refused unless this program's model computes the same (docs/checkpoints.md). context: what takes the
 * place of max_position_embeddings, 0: nothing. note: a line about members that are unknown, "" or cut short. Returns 1
 * where files of another program are without config.json. */
int checkpoint_read_shape(const char *path, int64_t context, struct lm_config *shape, char *note, size_t note_bytes,
                          char *error, size_t error_bytes);

#endif
