/* The shape of the model: checks, tensor names, initial values, config.json. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "trainer/products/rows.h"
#include "trainer/models/llama_internal.h"

size_t lm_dtype_bytes(int dtype) { return dtype == LM_F32 ? 4 : 2; }

size_t lm_row_bytes(int dtype, int64_t row_length)
{
    if (dtype != LM_PACKED) return lm_dtype_bytes(dtype) * (size_t)row_length;
    return (size_t)((row_length + ROW_BLOCK - 1) / ROW_BLOCK) * ROW_BLOCK_BYTES;
}

int lm_dtype_named(const char *name)
{
    static const char *const names[] = {[LM_F32] = "F32", [LM_BF16] = "BF16", [LM_F16] = "F16", [LM_PACKED] = "U8"};
    for (int i = 0; i < (int)(sizeof names / sizeof names[0]); i++)
        if (name && strcmp(names[i], name) == 0) return i;
    return -1;
}

__attribute__((format(printf, 3, 4))) static int complain(char *error, size_t error_bytes, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (error && error_bytes) vsnprintf(error, error_bytes, format, arguments);
    va_end(arguments);
    return -1;
}

/* The limits keep every product of two sizes far from overflow. lm_create() checks that there is enough memory. */
int lm_config_check(struct lm_config *c, char *error, size_t n)
{
    if (c->vocab == 0) c->vocab = 256;
    if (c->rms_norm_eps == 0) c->rms_norm_eps = 1e-5;
    if (c->rope_theta == 0) c->rope_theta = 10000;
    if (c->vocab != 256)
        return complain(error, n, "vocabulary size %d is not 256, that of a byte-level model", c->vocab);
    if (c->width < 1 || c->width > 65536) return complain(error, n, "width %d is not in 1..65536", c->width);
    if (c->depth < 1 || c->depth > 1024) return complain(error, n, "depth %d is not in 1..1024", c->depth);
    if (c->heads < 1 || c->heads > c->width)
        return complain(error, n, "%d heads do not fit a width of %d", c->heads, c->width);
    if (c->width % c->heads) return complain(error, n, "width %d is not a multiple of %d heads", c->width, c->heads);
    if (c->width / c->heads % 2)
        return complain(error, n, "width %d / %d heads = %d is odd: rotary positions need pairs", c->width, c->heads,
                        c->width / c->heads);
    if (c->context < 1 || c->context > 1048576)
        return complain(error, n, "context %d is not in 1..1048576", c->context);
    if (c->intermediate == 0) c->intermediate = ((8 * c->width + 2) / 3 + 31) / 32 * 32;
    if (c->intermediate < 1 || c->intermediate > 1048576)
        return complain(error, n, "intermediate size %d is not in 1..1048576", c->intermediate);
    if (!(c->rms_norm_eps > 0 && c->rms_norm_eps < 1))
        return complain(error, n, "rms_norm_eps %.10g is not between 0 and 1", c->rms_norm_eps);
    if (!(c->rope_theta >= 1 && c->rope_theta <= 1e12))
        return complain(error, n, "rope_theta %.10g is not in 1..1e12", c->rope_theta);
    return 0;
}

int lm_config_json(const struct lm_config *c, const char *torch_dtype, char *text, size_t text_bytes)
{
    char theta[40];
    /* Other readers take a number for a float only if it has a point. */
    snprintf(theta, sizeof theta, c->rope_theta == floor(c->rope_theta) ? "%.1f" : "%.17g", c->rope_theta);
    int n = snprintf(text, text_bytes,
                     "{\n"
                     "  \"architectures\": [\"LlamaForCausalLM\"],\n"
                     "  \"model_type\": \"llama\",\n"
                     "  \"vocab_size\": %d,\n"
                     "  \"hidden_size\": %d,\n"
                     "  \"intermediate_size\": %d,\n"
                     "  \"num_hidden_layers\": %d,\n"
                     "  \"num_attention_heads\": %d,\n"
                     "  \"num_key_value_heads\": %d,\n"
                     "  \"max_position_embeddings\": %d,\n"
                     "  \"rms_norm_eps\": %.17g,\n"
                     "  \"rope_theta\": %s,\n"
                     "  \"hidden_act\": \"silu\",\n"
                     "  \"attention_bias\": false,\n"
                     "  \"mlp_bias\": false,\n"
                     "  \"tie_word_embeddings\": false,\n"
                     "  \"torch_dtype\": \"%s\"\n"
                     "}\n",
                     c->vocab, c->width, c->intermediate, c->depth, c->heads, c->heads, c->context, c->rms_norm_eps,
                     theta, torch_dtype);
    return n < 0 || (size_t)n >= text_bytes ? -1 : n;
}

int lm_tensor_count(const struct lm_config *c) { return 1 + c->depth * PER_LAYER + 2; }

int lm_tensor_info(const struct lm_config *c, int tensor, struct lm_tensor *out)
{
    static const struct {
        const char *name;
        char rows, columns;
    } parts[PER_LAYER] = {
        [IN_NORM] = {"input_layernorm", 'w', 0}, [Q] = {"self_attn.q_proj", 'w', 'w'},
        [K] = {"self_attn.k_proj", 'w', 'w'},    [V] = {"self_attn.v_proj", 'w', 'w'},
        [O] = {"self_attn.o_proj", 'w', 'w'},    [POST_NORM] = {"post_attention_layernorm", 'w', 0},
        [GATE] = {"mlp.gate_proj", 'f', 'w'},    [UP] = {"mlp.up_proj", 'f', 'w'},
        [DOWN] = {"mlp.down_proj", 'w', 'f'},
    };
    int count = lm_tensor_count(c);
    if (tensor < 0 || tensor >= count) return -1;
    memset(out, 0, sizeof *out);
    out->ndim = 2;
    out->rows = c->vocab;
    out->row_length = c->width;
    out->init_std = 0.02;
    out->is_end = tensor == 0 || tensor == count - 1;
    if (tensor == 0) {
        snprintf(out->name, sizeof out->name, "model.embed_tokens.weight");
    } else if (tensor == count - 1) {
        snprintf(out->name, sizeof out->name, "lm_head.weight");
    } else if (tensor == count - 2) {
        snprintf(out->name, sizeof out->name, "model.norm.weight");
        out->ndim = 1;
    } else {
        int layer = (tensor - 1) / PER_LAYER, part = (tensor - 1) % PER_LAYER;
        snprintf(out->name, sizeof out->name, "model.layers.%d.%s.weight", layer, parts[part].name);
        out->ndim = parts[part].columns ? 2 : 1;
        out->rows = parts[part].rows == 'f' ? c->intermediate : c->width;
        out->row_length = parts[part].columns == 'f' ? c->intermediate : c->width;
        /* Layers add their outputs to the residual stream. Small initial values keep the sum over the layers from
         * growing. */
        if (part == O || part == DOWN) out->init_std /= sqrt(2.0 * c->depth);
    }
    if (out->ndim == 1) {
        out->rows = c->width;
        out->row_length = 1;
        out->init_std = 0;
    }
    return 0;
}

int64_t lm_parameter_count(const struct lm_config *c)
{
    int64_t sum = 0;
    struct lm_tensor info;
    for (int i = 0; lm_tensor_info(c, i, &info) == 0; i++) sum += info.rows * info.row_length;
    return sum;
}

void lm_init_tensor(const struct lm_config *c, int tensor, uint64_t seed, float *out)
{
    struct lm_tensor info;
    if (lm_tensor_info(c, tensor, &info)) return;
    int64_t n = info.rows * info.row_length;
    if (info.init_std == 0) {
        for (int64_t i = 0; i < n; i++) out[i] = 1.0f;
        return;
    }
    /* Marsaglia's polar method: a point in the unit disc gives two independent normal values. */
    for (int64_t i = 0; i < n; i += 2) {
        double x = 0, y = 0, square = 0;
        for (uint64_t attempt = 0; !(square > 0 && square < 1); attempt++) {
            uint64_t h = hash_counters(seed, (uint64_t)tensor, (uint64_t)i, attempt);
            x = (double)(int32_t)(uint32_t)h * 0x1p-31;
            y = (double)(int32_t)(uint32_t)(h >> 32) * 0x1p-31;
            square = x * x + y * y;
        }
        double factor = info.init_std * sqrt(-2.0 * exact_log(square) / square);
        out[i] = (float)(x * factor);
        if (i + 1 < n) out[i + 1] = (float)(y * factor);
    }
}
