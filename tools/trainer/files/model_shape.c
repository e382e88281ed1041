/* Reads the config.json of a model. The program has one kind of model, but a file may describe another. Numbers that
 * the model has are taken over. All other members must agree with this model; a member that does not is refused by
 * name. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/model_files.h"
#include "trainer/files/trainer_file.h"

/* The numbers of a config.json: first the whole ones, beginning with those of struct lm_config. */
enum {
    VOCAB,
    WIDTH,
    DEPTH,
    HEADS,
    CONTEXT,
    INTERMEDIATE,
    KEY_HEADS,
    HEAD_DIM,
    WINDOW,
    WHOLE,
    EPS = WHOLE,
    THETA,
    NUMBERS
};

static const char *const number_names[NUMBERS] = {
    "vocab_size",        "hidden_size",         "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "intermediate_size", "num_key_value_heads", "head_dim",          "sliding_window",      "rms_norm_eps",
    "rope_theta"};

/* Members that change what a model computes, here or in a relative of Llama, with the values that leave it a Llama. |
 * separates alternatives. Every element of a list must be one of them. */
static const struct {
    const char *name, *allowed;
} fixed[] = {
    {"model_type", "\"llama\"|\"mistral\""},
    {"architectures", "\"LlamaForCausalLM\"|\"MistralForCausalLM\""},
    {"hidden_act", "\"silu\"|\"swish\""},
    {"hidden_activation", "\"silu\"|\"swish\"|null"},
    {"layer_types", "\"full_attention\"|null"},
    {"attention_bias", "false|null"},
    {"mlp_bias", "false|null"},
    {"bias", "false|null"},
    {"qkv_bias", "false|null"},
    {"attention_qkv_bias", "false|null"},
    {"attention_out_bias", "false|null"},
    {"lm_head_bias", "false|null"},
    {"tie_word_embeddings", "false|null"},
    {"use_sliding_window", "false|null"},
    {"use_qk_norm", "false|null"},
    {"qk_norm", "false|null"},
    {"qk_layernorm", "false|null"},
    {"rope_interleaved", "false|null"},
    {"use_parallel_residual", "false|null"},
    {"parallel_attn", "false|null"},
    {"is_encoder_decoder", "false|null"},
    {"add_cross_attention", "false|null"},
    {"partial_rotary_factor", "1|null"},
    {"rotary_pct", "1|null"},
    {"embedding_multiplier", "1|null"},
    {"residual_multiplier", "1|null"},
    {"logits_scaling", "1|null"},
    {"logit_scale", "1|null"},
    {"attention_multiplier", "null"},
    {"query_pre_attn_scalar", "null"},
    {"attn_logit_softcapping", "null"},
    {"final_logit_softcapping", "null"},
    {"clip_qkv", "null"},
    {"no_rope_layers", "null"},
    {"num_local_experts", "null"},
    {"num_experts", "null"},
    {"quantization_config", "null"},
    {"compression_config", "null"},
    {"auto_map", "null"},
};

/* Members that do not change the output of a trained model. They are about storage, training or prompts. */
static const char *const ignored[] = {
    "_name_or_path",        "_attn_implementation",
    "attn_implementation",  "attention_dropout",
    "bos_token_id",         "dtype",
    "eos_token_id",         "initializer_range",
    "pad_token_id",         "pretraining_tp",
    "torch_dtype",          "transformers_version",
    "unk_token_id",         "use_cache",
    "is_decoder",           "output_attentions",
    "output_hidden_states", "return_dict",
    "max_window_layers",
};

struct reading {
    hstep_json json;
    double number[NUMBERS]; /* NAN: missing or null */
    int seen[NUMBERS + COUNT_OF(fixed) + 1];
    char type[16]; /* model_type with its quotes */
    char *complaint, *note;
    size_t complaint_bytes, note_bytes;
};

/* Keeps the first complaint about the contents. Reading goes on, to find malformed JSON. */
__attribute__((format(printf, 2, 3))) static void refuse(struct reading *r, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (!r->complaint[0]) vsnprintf(r->complaint, r->complaint_bytes, format, arguments);
    va_end(arguments);
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

/* Reads a value of any kind into `token`, as text for errors and comparisons. Sets `*number` to NAN if it is not a
 * number. Returns 0 for malformed JSON. */
static int read_token(hstep_json *json, char *token, size_t token_bytes, double *number)
{
    const char *text;
    char first = hstep_json_peek(json);
    *number = NAN;
    if (first == '"') {
        if (!hstep_json_string(json, &text)) return 0;
        snprintf(token, token_bytes, "\"%s\"", text);
        return 1;
    }
    if (first == 't' || first == 'f' || first == 'n') {
        text = first == 't' ? "true" : first == 'f' ? "false" : "null";
        snprintf(token, token_bytes, "%s", text);
        return hstep_json_word(json, text);
    }
    if (first == '{' || first == '[') {
        snprintf(token, token_bytes, "%s", first == '{' ? "an object" : "a list");
        return hstep_json_skip(json);
    }
    if (!hstep_json_real(json, number)) return 0;
    exact_number(*number, token, token_bytes);
    return 1;
}

static int is_allowed(const char *allowed, const char *token)
{
    for (size_t n; *allowed; allowed += n + (allowed[n] == '|')) {
        n = strcspn(allowed, "|");
        if (strlen(token) == n && memcmp(allowed, token, n) == 0) return 1;
    }
    return 0;
}

static void refuse_token(struct reading *r, const char *name, const char *token, const char *allowed)
{
    char list[200] = "";
    const char *last = strrchr(allowed, '|');
    for (; *allowed; allowed++)
        append(list, sizeof list, "%.*s", *allowed != '|' ? 1 : 4,
               *allowed != '|'   ? allowed
               : allowed == last ? " or "
                                 : ", ");
    refuse(r, "\"%s\" is %s; it must be %s, because this program's model is a plain Llama: choose another file", name,
           token, list);
}

static int read_fixed(struct reading *r, const char *name, const char *allowed)
{
    char token[100];
    double number;
    int list = hstep_json_take(&r->json, '[');
    if (list && hstep_json_take(&r->json, ']')) return 1;
    do {
        if (!read_token(&r->json, token, sizeof token, &number)) return 0;
        if (!is_allowed(allowed, token)) refuse_token(r, name, token, allowed);
        if (strcmp(name, "model_type") == 0) snprintf(r->type, sizeof r->type, "%s", token);
    } while (list && hstep_json_take(&r->json, ','));
    return !list || hstep_json_expect(&r->json, ']');
}

static int read_number(struct reading *r, const char *name, int which)
{
    char token[100];
    double number;
    if (!read_token(&r->json, token, sizeof token, &number)) return 0;
    int good = which < WHOLE ? number >= 1 && number <= 1 << 24 && number == floor(number) : number > 0;
    if (strcmp(token, "null") == 0) return 1;
    if (!good) {
        refuse(r, "\"%s\" is %s; it must be a %s", name, token,
               which < WHOLE ? "whole number from 1 to 16777216" : "number above 0");
    } else if (!isnan(r->number[which]) && r->number[which] != number) {
        refuse(r, "\"%s\" is %s, but another member says %.17g; they must agree", name, token, r->number[which]);
    } else {
        r->number[which] = number;
    }
    return 1;
}

/* Reads rope_scaling or rope_parameters. In the latter, transformers 5 also keeps rope_theta. */
static int read_rope(struct reading *r, const char *name)
{
    static const char allowed[] = "\"default\"|null";
    char token[100], inner[160], extra[160] = "", type[100] = "null";
    const char *key;
    double number;
    if (hstep_json_peek(&r->json) != '{') {
        if (!read_token(&r->json, token, sizeof token, &number)) return 0;
        if (strcmp(token, "null") != 0) refuse(r, "\"%s\" is %s; it must be an object or null", name, token);
        return 1;
    }
    for (size_t n = 0; hstep_json_member(&r->json, &n, &key);) {
        snprintf(inner, sizeof inner, "%s.%s", name, key);
        if (strcmp(key, number_names[THETA]) == 0) {
            if (!read_number(r, inner, THETA)) return 0;
            continue;
        }
        if (!read_token(&r->json, token, sizeof token, &number)) return 0;
        if (strcmp(key, "rope_type") == 0 || strcmp(key, "type") == 0) {
            if (is_allowed(allowed, type)) snprintf(type, sizeof type, "%s", token);
        } else if (strcmp(token, "null") != 0 && !(strcmp(key, "partial_rotary_factor") == 0 && number == 1)) {
            snprintf(extra, sizeof extra, "%s", inner);
        }
    }
    snprintf(inner, sizeof inner, "%s.rope_type", name);
    if (!is_allowed(allowed, type)) refuse_token(r, inner, type, allowed);
    else if (extra[0]) refuse(r, "\"%s\" is given; without a rope_type that uses it, it must be left out", extra);
    return !r->json.problem;
}

/* Notes an unknown member, because it may change the model. null and false count as missing. */
static int read_unknown(struct reading *r, const char *name)
{
    char token[100];
    double number;
    for (int i = 0; i < COUNT_OF(ignored); i++)
        if (strcmp(ignored[i], name) == 0) return hstep_json_skip(&r->json);
    if (!read_token(&r->json, token, sizeof token, &number)) return 0;
    if (!is_allowed("null|false", token)) append(r->note, r->note_bytes, "%s%s", r->note[0] ? ", " : "", name);
    return 1;
}

static int read_value(struct reading *r, const char *name)
{
    int which = 0, place = 0;
    while (which < NUMBERS && strcmp(number_names[which], name) != 0) which++;
    while (place < COUNT_OF(fixed) && strcmp(fixed[place].name, name) != 0) place++;
    int known = which < NUMBERS || place < COUNT_OF(fixed), *seen = &r->seen[which < NUMBERS ? which : NUMBERS + place];
    if (known && (*seen)++) return hstep_json_fail(&r->json, "a name twice");
    if (which < NUMBERS) return read_number(r, name, which);
    if (known) return read_fixed(r, name, fixed[place].allowed);
    if (strcmp(name, "rope_scaling") == 0 || strcmp(name, "rope_parameters") == 0) return read_rope(r, name);
    return read_unknown(r, name);
}

static int parse(struct reading *r)
{
    const char *key;
    for (size_t n = 0; hstep_json_member(&r->json, &n, &key);)
        if (!read_value(r, key)) return -1;
    return hstep_json_end(&r->json) ? 0 : -1;
}

/* ---- The model --------------------------------------------------------------------------------------------------- */

/* Fills in and checks the shape. Missing numbers get transformers' defaults. */
static void judge(struct reading *r, int64_t context, struct lm_config *shape)
{
    int *const values[] = {&shape->vocab, &shape->width,   &shape->depth,
                           &shape->heads, &shape->context, &shape->intermediate};
    double *number = r->number;
    int mistral = strcmp(r->type, "\"mistral\"") == 0;
    if (!r->type[0]) refuse(r, "\"model_type\" is missing; it must be \"llama\" or \"mistral\"");
    for (int i = 0; i < COUNT_OF(values); i++) {
        if (isnan(number[i])) refuse(r, "\"%s\" is missing", number_names[i]);
        else *values[i] = (int)number[i];
    }
    if (context) shape->context = (int)context;
    if (r->complaint[0]) return;
    shape->rms_norm_eps = isnan(number[EPS]) ? 1e-6 : number[EPS];
    shape->rope_theta = isnan(number[THETA]) ? 10000 : number[THETA];
    if (isnan(number[KEY_HEADS])) number[KEY_HEADS] = mistral && !r->seen[KEY_HEADS] ? 8 : number[HEADS];
    if (isnan(number[WINDOW]) && mistral && !r->seen[WINDOW]) number[WINDOW] = 4096;
    if (number[KEY_HEADS] != number[HEADS])
        refuse(
            r,
            "\"num_key_value_heads\" is %.0f; it must be \"num_attention_heads\", which is %.0f: choose another file",
            number[KEY_HEADS], number[HEADS]);
    if (!isnan(number[HEAD_DIM]) && number[HEAD_DIM] * number[HEADS] != number[WIDTH])
        refuse(
            r,
            "\"head_dim\" is %.0f; it must be \"hidden_size\" / \"num_attention_heads\" = %.0f / %.0f: choose another "
            "file",
            number[HEAD_DIM], number[WIDTH], number[HEADS]);
    if (number[WINDOW] < shape->context)
        refuse(r,
               "\"sliding_window\" is %.0f; it must be null or at least the context, which is %d bytes: choose a "
               "shorter context or another file",
               number[WINDOW], shape->context);
    if (!r->complaint[0]) lm_config_check(shape, r->complaint, r->complaint_bytes);
}

int checkpoint_read_shape(const char *path, int64_t context, struct lm_config *shape, char *note, size_t note_bytes,
                          char *error, size_t error_bytes)
{
    struct model_files files;
    char complaint[500] = "", unknown[300] = "";
    size_t bytes;
    memset(shape, 0, sizeof *shape);
    if (note_bytes) note[0] = 0;
    if (model_files_find(path, 1, &files, error, error_bytes) != 0) return -1;
    int status = !files.config[0];
    char *text = status ? NULL : text_file_read(files.config, &bytes, error, error_bytes);
    if (!status && !text) status = -1;
    if (text) {
        struct reading r = {.json = {text, bytes, 0, NULL},
                            .complaint = complaint,
                            .complaint_bytes = sizeof complaint,
                            .note = unknown,
                            .note_bytes = sizeof unknown};
        for (int i = 0; i < NUMBERS; i++) r.number[i] = NAN;
        if (parse(&r) != 0) refuse(&r, "byte %zu: %s", r.json.at, r.json.problem ? r.json.problem : "malformed");
        if (r.json.problem) snprintf(complaint, sizeof complaint, "byte %zu: %s", r.json.at, r.json.problem);
        else judge(&r, context, shape);
        if (complaint[0]) snprintf(error, error_bytes, "%s: %s", files.config, complaint);
        if (unknown[0]) snprintf(note, note_bytes, "note: %s: unknown members are ignored: %s", files.config, unknown);
        status = complaint[0] ? -1 : 0;
        free(text);
    }
    model_files_close(&files);
    return status;
}
