/* A byte-level language model of the Llama type: RMSNorm, rotary positions, causal attention, SwiGLU, untied output
 * head, no biases; forward, backward and generation. Tensors have the names and the [out, in] layout of the usual
 * Llama checkpoints.
 *
 * The model owns no weights: each call is given them in whatever type they are stored, and converts one layer at a
 * time to the matrix-product type (`compute`). Products accumulate in fp32; norms, softmax, positions, SwiGLU, the
 * residual stream and the loss are fp32. Work is cut into tasks whose shapes depend on the model and the batch only,
 * so on one machine the bits do not depend on the number of threads.
 *
 * One model is used by one thread at a time. Functions that can fail write one line of text and return NULL or -1. */
#ifndef HALFSTEP_LLAMA_H
#define HALFSTEP_LLAMA_H

#include <stddef.h>
#include <stdint.h>

enum lm_dtype { LM_F32, LM_BF16, LM_F16 };

size_t lm_dtype_bytes(int dtype);

/* Zero means the default, where one is given. */
struct lm_config {
    int vocab; /* 256, the only value: the tokens are bytes */
    int width; /* multiple of heads */
    int depth;
    int heads;           /* width / heads must be even */
    int context;         /* longest sequence */
    int intermediate;    /* 8/3 of the width rounded up to a multiple of 32 */
    double rms_norm_eps; /* 1e-5 */
    double rope_theta;   /* 10000 */
};

/* Fills in the defaults and judges the shape. 0, or -1 and one line in error. */
int lm_config_check(struct lm_config *config, char *error, size_t error_bytes);

/* The text of config.json as other tools read it (LlamaForCausalLM). torch_dtype is the type in which the weights of
 * the checkpoint are stored: "float32", "bfloat16" or "float16". Returns the length without the final NUL, or -1 where
 * the text does not fit. */
int lm_config_json(const struct lm_config *config, const char *torch_dtype, char *text, size_t text_bytes);

/* The tensors of a shape, without building a model. Their order is fixed: embedding, layers from first to last, final
 * norm, output head. */
struct lm_tensor {
    char name[80];
    int ndim; /* 1 (norms: rows elements, row_length 1) or 2 */
    int64_t rows, row_length;
    double init_std; /* normal with this deviation; 0 for norms, which start at 1 */
};
int lm_tensor_count(const struct lm_config *config);
int lm_tensor_info(const struct lm_config *config, int tensor, struct lm_tensor *out);
int64_t lm_parameter_count(const struct lm_config *config);

/* The initial values, rows * row_length of them: a function of (config, seed, tensor) only, the same bits
 * everywhere. */
void lm_init_tensor(const struct lm_config *config, int tensor, uint64_t seed, float *out);

struct lm_options {
    int batch;     /* most sequences in one call; 0: the model will only generate */
    int training;  /* keep what lm_backward needs */
    int compute;   /* LM_F32 or LM_BF16 */
    int gradients; /* LM_F32, LM_BF16 or LM_F16 (saturating), rounded to nearest even */
    int release;   /* gradients go to on_gradient one tensor at a time instead of into buffers */
    int threads;   /* 0: one per processor this process may use */
};

struct lm;
struct lm *lm_create(const struct lm_config *config, const struct lm_options *options, char *error, size_t error_bytes);
void lm_destroy(struct lm *model);
const struct lm_config *lm_get_config(const struct lm *model); /* with the defaults filled in */
int lm_threads(const struct lm *model);

struct lm_weight {
    const void *data;
    int dtype;
};

/* Mean loss in nats over batch * length predictions. tokens holds batch sequences of length + 1 bytes: byte t of a
 * sequence predicts byte t + 1. 1 <= batch <= options.batch, 1 <= length <= context. Returns a negative number and sets
 * lm_error where the arguments are impossible or a product fails. A loss that is not finite is returned as it is. */
double lm_forward(struct lm *model, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length);

/* The same loss, keeping nothing for lm_backward (it makes an earlier lm_forward's state unusable). */
double lm_eval(struct lm *model, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length);

/* Where gradients go. With options.release the callback: `gradient` holds rows * row_length values and is only valid
 * during the call, which may overwrite the weights of that tensor (and of no other): the model has finished with them.
 * Each tensor comes once, the output head first, the embedding last. Without release: one buffer for each tensor, all
 * written (not added to). */
struct lm_sink {
    void *const *buffers;
    void (*on_gradient)(void *arg, int tensor, const void *gradient);
    void *arg;
};

/* Gradients of scale times the mean loss of the last lm_forward, with the weights of that call. A power of two as scale
 * is exact (loss scaling for LM_F16). 0 or -1. Each lm_forward serves one lm_backward. */
int lm_backward(struct lm *model, const struct lm_weight *weights, double scale, const struct lm_sink *sink);

/* Bytes of gradient memory that the model itself holds, all of it from the start: with release the larger half of a
 * layer (or the output head, where that is larger); without, only the shares of the norms' gradients, and the caller's
 * buffers come on top. Then the bytes of everything else it has allocated: activations, converted weights. */
size_t lm_gradient_peak_bytes(const struct lm *model);
size_t lm_activation_bytes(const struct lm *model);

/* Continues the prompt by n bytes. Computes in fp32 from the stored weights whatever `compute` is: the same bytes on
 * every machine for the same weights. temperature 0 takes the likeliest byte. An empty prompt begins with a newline.
 * Past the context the last half of it is kept. 0 or -1. */
int lm_generate(struct lm *model, const struct lm_weight *weights, const uint8_t *prompt, size_t prompt_bytes,
                double temperature, uint64_t seed, uint8_t *out, size_t n);

/* Text of the last failure on this model. */
const char *lm_error(const struct lm *model);

#endif
