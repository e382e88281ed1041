/* The contents of a training checkpoint, and how they map to an optimizer and a model:
 *
 *   model.safetensors      the weights as stored (F32, BF16, F16, or U8 in packed blocks) under the usual Llama names,
 *                          with config.json
 *   optimizer.safetensors  NAME/STATE, NAME/STATE.scale or .extra, NAME/weight.extra; counters, the rule's numbers for
 *                          each tensor, seed, generator, recipe and hyper-parameters as metadata
 *   history.safetensors    losses so far
 *   trainer.json           the options of the run, its step, the identity of its data
 *
 * docs/checkpoints.md describes them. Functions return 0, or -1 with an error text. */
#ifndef HALFSTEP_CHECKPOINT_H
#define HALFSTEP_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "trainer/run/run.h"

/* A model with its optimizer. Both have the same tensors in the same order. weights[i] has the type lm_dtype. */
struct holding {
    const struct lm_config *shape;
    halfstep_optimizer *optimizer;
    void **weights;
    int32_t tensors;
};

/* Returns the LM_* type of the codes of a weight format, or -1. */
int weight_dtype(int32_t format);
/* Returns the gradient format whose codes have this safetensors dtype, or NULL. */
const char *gradient_format_of(const char *dtype);

/* Describes a tensor of the model for the optimizer, with a gradient of this format. */
halfstep_tensor checkpoint_tensor(const struct lm_tensor *tensor, const char *gradient);
/* Creates an optimizer that has only this tensor, as its number 0. The caller destroys it, also after a failure, unless
 * it is NULL. Returns a code of the library. */
int checkpoint_decoder(const char *recipe, const halfstep_tensor *tensor, halfstep_optimizer **optimizer);
struct weight_source;
/* The first weights of a run: one tensor of a source, or `values` without a source. */
struct first_weights {
    struct weight_source *source;
    const struct lm_tensor *tensor;
    const float *values;
};
/* Counts the weights of a tensor that are no longer what they were first, stored in the weight format of the recipe.
 * `now` is the tensor's weight slot and `codes` its codes. Returns 0, or -1 with an error text that is empty if memory
 * is out. */
int checkpoint_count_changes(const char *recipe, const halfstep_tensor *tensor, const halfstep_slot_info *now,
                             const void *codes, const struct first_weights *from, uint64_t *changed, char *error,
                             size_t error_bytes);

/* Computes a hash of every weight and state bit, tensor after tensor: weight codes, their extra plane, then codes and
 * scales or extras of each state. */
uint64_t holding_hash(const struct holding *holding);

/* Opens a checkpoint without verifying checksums. Returns a code of the library. */
int checkpoint_open_quickly(halfstep_checkpoint **checkpoint, const char *path, char *error, size_t error_bytes);
/* Saves a checkpoint. `trainer` is the text of trainer.json. On success error is empty, or a text that begins with
 * "note: ". */
int checkpoint_save(const char *directory, const halfstep_save_options *options, const struct holding *holding,
                    const char *recipe, const char *trainer, const struct run_history *history, char *error,
                    size_t error_bytes);
/* Returns the name of a checkpoint's file by number, NULL past the last. A save replaces files of these names in the
 * directory. */
const char *checkpoint_file_name(int index);

/* Loads everything. The optimizer must have the same tensors, recipe and hyper-parameters; the error names a
 * difference. The caller checks the schedule's total_steps. */
int checkpoint_load(const halfstep_checkpoint *checkpoint, const struct holding *holding, struct run_history *history,
                    char *error, size_t error_bytes);

/* Loads only the weights, from a checkpoint directory or files of another program (model_files.h), into the format of
 * `holding`. They must be the tensors of holding's shape and no others. Error codes or residuals of a checkpoint are
 * used, so that the weights are read in full precision. If the checkpoint's rule averages (schedulefree), the averaged
 * weights are read. */
int checkpoint_init(const char *path, const struct holding *holding, char *error, size_t error_bytes);

/* Reads the weights of one tensor from the same places: as fp32, or into the weight slot of tensor `index` of an
 * optimizer, whose codes are `codes`. There packed weights stay packed to the bit. */
struct weight_source *weight_source_open(const char *path, char *error, size_t error_bytes);
void weight_source_close(struct weight_source *source);
int weight_source_read(struct weight_source *source, const struct lm_tensor *tensor, float *out, char *error,
                       size_t error_bytes);
int weight_source_write(struct weight_source *source, const struct lm_tensor *tensor, halfstep_optimizer *optimizer,
                        int32_t index, void *codes, char *error, size_t error_bytes);

/* Reads the model's shape from config.json: in a checkpoint, in a folder, or beside the safetensors file or index that
 * `path` names. Fails unless this program's model computes the same (docs/checkpoints.md). A `context` that is not 0
 * replaces max_position_embeddings. Sets `note` to a text about unknown members, or to "". Returns 1 if files of
 * another program have no config.json. */
int checkpoint_read_shape(const char *path, int64_t context, struct lm_config *shape, char *note, size_t note_bytes,
                          char *error, size_t error_bytes);

#endif
