/* A byte-level language model of the Llama type: RMSNorm, rotary positions, causal attention, SwiGLU, untied output
 * head, no biases. Forward, backward and generation. Tensors have the names and the [out, in] layout of the usual Llama
 * checkpoints.
 *
 * The model owns no weights. Each call receives them in the type in which they are stored, and converts one layer at a
 * time to the matrix-product type (`compute`). Products accumulate in fp32; norms, softmax, positions, SwiGLU, the
 * residual stream and the loss are fp32. The shapes of tasks depend on the model and the batch only. So on one machine
 * the bits do not depend on the number of threads.
 *
 * One thread at a time may use a model. Functions that can fail write an error text and return NULL or -1. */
#ifndef HALFSTEP_LLAMA_H
#define HALFSTEP_LLAMA_H

#include <stddef.h>
#include <stdint.h>

/* LM_PACKED: the rows of a matrix in blocks of 8-bit codes (int8-sr and int8-ecc4, docs/formats.md). Only weights have
 * this type. */
enum lm_dtype { LM_F32, LM_BF16, LM_F16, LM_PACKED };

/* Returns the bytes of one element. LM_PACKED has none. */
size_t lm_dtype_bytes(int dtype);
/* Returns the bytes of a row of a weight. */
size_t lm_row_bytes(int dtype, int64_t row_length);
/* Returns the type of a weight with this safetensors dtype, or -1. "U8" is LM_PACKED. */
int lm_dtype_named(const char *name);

/* Zero means the default of the members that have one. */
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

/* Fills in the defaults and checks the shape. Returns 0, or -1 with an error text. */
int lm_config_check(struct lm_config *config, char *error, size_t error_bytes);

/* Writes config.json in the form that other tools read (LlamaForCausalLM). torch_dtype is the type of the stored
 * weights: "float32", "bfloat16" or "float16". Returns the length without the final NUL, or -1 if the text does not
 * fit. */
int lm_config_json(const struct lm_config *config, const char *torch_dtype, char *text, size_t text_bytes);

/* The tensors of a shape; no model is needed. Their order is fixed: embedding, layers from first to last, final norm,
 * output head. */
struct lm_tensor {
    char name[80];
    int ndim;   /* 1 (norms: rows elements, row_length 1) or 2 */
    int is_end; /* 1: the embedding or the head */
    int64_t rows, row_length;
    double init_std; /* normal with this deviation; 0 for norms, which start at 1 */
};
int lm_tensor_count(const struct lm_config *config);
int lm_tensor_info(const struct lm_config *config, int tensor, struct lm_tensor *out);
int64_t lm_parameter_count(const struct lm_config *config);

/* Computes the initial values, rows * row_length of them. They depend on (config, seed, tensor) only, with the same
 * bits everywhere. */
void lm_init_tensor(const struct lm_config *config, int tensor, uint64_t seed, float *out);

struct lm_options {
    int batch;     /* most sequences in one call; 0: generation only */
    int training;  /* lm_backward() will be called */
    int compute;   /* LM_F32 or LM_BF16 */
    int gradients; /* LM_F32, LM_BF16 or LM_F16; rounded to nearest even, LM_F16 saturates */
    int release;   /* lm_backward() calls on_gradient for one tensor after the other and fills no buffers */
    int threads;   /* 0: one per processor this process may use */
};

struct lm;
struct lm *lm_create(const struct lm_config *config, const struct lm_options *options, char *error, size_t error_bytes);
void lm_destroy(struct lm *model);
int lm_threads(const struct lm *model);

struct lm_weight {
    const void *data;
    int dtype;
};

/* Returns the mean loss in nats over batch * length predictions. `tokens` holds `batch` sequences of length + 1 bytes:
 * byte t of a sequence predicts byte t + 1. 1 <= batch <= options.batch, 1 <= length <= context. Returns a negative
 * number and sets lm_error() if the arguments are out of range or a product fails. A loss that is not finite is
 * returned as it is. */
double lm_forward(struct lm *model, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length);

/* Returns the same loss without keeping anything for lm_backward(). Invalidates an earlier lm_forward(). */
double lm_eval(struct lm *model, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length);

/* The destination of gradients. Without release: one buffer for each tensor, which is written, not added to. With
 * release: `on_gradient`, called once per tensor, the output head first, the embedding last. `gradient` holds rows *
 * row_length values and is valid during the call only. The call may overwrite the weights of that tensor, and of no
 * other. */
struct lm_sink {
    void *const *buffers;
    void (*on_gradient)(void *arg, int tensor, const void *gradient);
    void *arg;
};

/* Computes the gradients of scale times the mean loss of the last lm_forward(), with the weights of that call. A scale
 * that is a power of two is exact (loss scaling for LM_F16). Each lm_forward() serves one lm_backward(). Returns 0 or
 * -1. */
int lm_backward(struct lm *model, const struct lm_weight *weights, double scale, const struct lm_sink *sink);

/* lm_gradient_peak_bytes() returns the model's own gradient memory, which is allocated from the start. With release it
 * holds the larger half of a layer, or the output head if that is larger. Without release it holds only the shares of
 * the norms' gradients; the caller's buffers are extra. lm_activation_bytes() returns all its other memory: activations
 * and converted weights. */
size_t lm_gradient_peak_bytes(const struct lm *model);
size_t lm_activation_bytes(const struct lm *model);

/* Continues the prompt by n bytes. Computes in fp32 from the stored weights, whatever `compute` is, so that equal
 * weights give equal bytes on every machine. Temperature 0 takes the likeliest byte. An empty prompt counts as a
 * newline. When the context is full, its last half is kept. Returns 0 or -1. */
int lm_generate(struct lm *model, const struct lm_weight *weights, const uint8_t *prompt, size_t prompt_bytes,
                double temperature, uint64_t seed, uint8_t *out, size_t n);

/* Returns the error text of the last failure on this model. */
const char *lm_error(const struct lm *model);

#endif
