/* Shared by the files of the language model. */
#ifndef HALFSTEP_LLAMA_INTERNAL_H
#define HALFSTEP_LLAMA_INTERNAL_H

#include "trainer/products/rows.h"
#include "trainer/products/team.h"
#include "trainer/models/llama.h"

/* Tensors of one layer, in the order of the tensor list. */
enum { IN_NORM, Q, K, V, O, POST_NORM, GATE, UP, DOWN, PER_LAYER };

/* What a layer keeps for the backward pass. "Stored" values are in the matrix-product type. */
struct layer {
    float *x, *mid;       /* residual stream before attention and before the MLP, [rows, width] */
    float *in_r, *post_r; /* 1 / root mean square of each of these rows */
    void *qkv;            /* stored, rotated, [rows, 3 width]; the backward pass replaces them by their gradients */
    void *o;              /* stored attention output, [rows, width] */
    struct row_softmax *softmax; /* [batch, heads, length]: of each row of scores */
    void *gate, *up;             /* stored, [rows, intermediate]; the backward pass replaces them by their gradients */
};

struct scratch {             /* one per thread */
    float *wide, *narrow;    /* fp32 outputs of products of one block of rows */
    void *stored, *stored2;  /* stored: inputs of products of one block of rows */
    float *scores, *dscores; /* attention, [ATTENTION_ROWS, length + ROW_LANES] */
    void *p, *dp;            /* the same, stored */
    float *dk, *dv, *dq;
};

struct cache; /* keys and values of generation */

struct lm {
    struct lm_config config;
    struct lm_options options;
    int count; /* number of tensors */
    struct team team;
    struct scratch *scratch;
    float *cosine, *sine; /* [context, half a head] */

    void *arena, *converted;
    size_t arena_bytes, converted_bytes, gradient_bytes;
    struct layer *layers; /* depth + 1 when training (the last has only x), else 1 */
    float *final_r;
    void *dlogits; /* stored, [rows, vocab] */
    double *block_loss;

    float *dx;                   /* gradient of the residual stream */
    void *dx_mlp, *dx_attention; /* stored: dx at the outputs of a layer's MLP and attention */
    void *dout;                  /* stored: gradient of the attention output */
    void *hidden;                /* stored: a norm's output, computed again */
    void *activated;             /* stored: SwiGLU's output, computed again */
    float *partial;              /* norm gain gradients of each block of rows */
    void *region;                /* with release: gradients of one group of tensors */

    float *gains[3];               /* fp32: input norm, post-attention norm, final norm */
    const void *matrix[PER_LAYER]; /* the layer's matrices in the matrix-product type */
    const void *head;
    struct lm_weight embedding;

    const uint8_t *tokens;   /* of the call in progress */
    uint8_t *kept_tokens;    /* copy of the last lm_forward()'s tokens */
    int batch, length, keep; /* keep: lm_backward() may follow */
    int64_t rows;
    int ready; /* an lm_forward() is complete, so lm_backward() may follow */
    int layer; /* the current one */
    struct cache *cache;
    char error[256];
};

void lm_cache_free(struct lm *model);

#endif
