#define HALFSTEP_ADVANCED
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "io/json.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/args/recipes.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/model_files.h"
#include "trainer/files/packed_list.h"
#include "trainer/files/trainer_file.h"
#include "trainer/products/rows.h"

struct convert {
    const char *to;
    struct path_list tensors;
    int json;
};

#define AT(member) offsetof(struct convert, member)

/* Returns the formats that weights can be converted to: those of packed weights, then plain ones. */
static const char *target_name(int32_t position)
{
    static const char *const plain[] = {"bf16", "f32"};
    const char *packed;
    int32_t n = 0;
    while ((packed = packed_format_name(n)) != NULL)
        if (n++ == position) return packed;
    position -= n;
    return position < COUNT_OF(plain) ? plain[position] : NULL;
}

static const struct option rows[] = {
    {"to", OPTION_CHOICE, AT(to), "FORMAT", NULL, 0, 0, OPTION_REQUIRED, target_name,
     "format of the converted tensors"},
    {"tensors", OPTION_PATHS, AT(tensors), "PATTERN...", NULL, 0, 0, 0, NULL,
     "convert only tensors with such names, such as '*_proj.weight' (default: all matrices with rows of at least 32 "
     "elements, embeddings too)"},
    OPTION_JSON(struct convert),
};

/* ---- What happens to each tensor --------------------------------------------------------------------------------- */

struct job {
    const struct model_part *part;
    uint64_t index;
    halfstep_safetensor_info info;
    const struct packed_weight *packed; /* NULL: the tensor is not packed in the input */
    int64_t columns;                    /* of a matrix, without padding; 0 for tensors that are always copied */
    int converts;                       /* 1: it gets the new format */
    int copies;                         /* 1: it keeps its bytes */
};

struct work {
    const struct convert *options;
    halfstep_format_info target;
    struct model_files files;
    struct model_tensors model;
    struct packed_list *lists; /* one for each part */
    struct job *job;
    uint64_t jobs;
    unsigned char *buffer; /* the converted tensor at hand */
    char error[1024];
};

static int is_packed(const halfstep_format_info *format) { return format->geometry == HALFSTEP_GEOMETRY_PACKED; }

static int matches(const struct path_list *patterns, const char *name, unsigned char *used)
{
    int found = !patterns->n;
    for (int i = 0; i < patterns->n; i++)
        if (fnmatch(patterns->item[i], name, 0) == 0) found = used[i] = 1;
    return found;
}

/* Decides what happens to one tensor. */
static void judge(const struct work *w, struct job *job, unsigned char *used)
{
    const halfstep_safetensor_info *info = &job->info;
    const int plain = info->ndim == 2 && gradient_format_of(info->dtype) && info->shape[1] >= ROW_BLOCK &&
                      info->shape[1] <= INT32_MAX;
    job->columns = job->packed ? job->packed->columns : plain ? (int64_t)info->shape[1] : 0;
    job->converts = job->columns && info->elements && matches(&w->options->tensors, info->name, used);
    /* Both formats of packed weights have the same bytes in a model's file. */
    job->copies = !job->converts || (job->packed ? is_packed(&w->target) : !strcmp(info->dtype, w->target.code_dtype));
    if (job->copies && !job->packed) job->converts = 0;
    if (job->packed && !strcmp(job->packed->format, w->target.name)) job->converts = 0;
}

/* ---- Models of other quantizers ---------------------------------------------------------------------------------- */

/* Returns whose tensor this is, or NULL. */
static const char *quantizer_of(const halfstep_safetensor_info *info)
{
    static const struct {
        const char *end, *quantizer;
    } names[] = {{".qweight", "AWQ or GPTQ"},
                 {".qzeros", "AWQ or GPTQ"},
                 {".weight_scale", "FP8"},
                 {".weight_scale_inv", "FP8"},
                 {".weight_packed", "compressed-tensors"},
                 {".SCB", "bitsandbytes"},
                 {".absmax", "bitsandbytes"}};
    const size_t length = strlen(info->name);
    for (int i = 0; i < COUNT_OF(names); i++) {
        const size_t n = strlen(names[i].end);
        if (length > n && strcmp(info->name + length - n, names[i].end) == 0) return names[i].quantizer;
    }
    return strncmp(info->dtype, "F8_", 3) == 0 ? "FP8" : NULL;
}

/* Copies the method that config.json says the weights are quantized by, or leaves "". */
static void read_method(const char *config, char *method, size_t method_bytes)
{
    char error[256];
    const char *key, *text = "a method that it does not name";
    size_t bytes = 0;
    char *contents = config[0] ? text_file_read(config, &bytes, error, sizeof error) : NULL;
    hstep_json json = {contents, bytes, 0, NULL};
    for (size_t n = 0; contents && hstep_json_member(&json, &n, &key);) {
        if (strcmp(key, "quantization_config") != 0 || hstep_json_peek(&json) != '{') {
            if (!hstep_json_skip(&json)) break;
            continue;
        }
        for (size_t k = 0; hstep_json_member(&json, &k, &key);)
            if (strcmp(key, "quant_method") != 0 || hstep_json_peek(&json) != '"') hstep_json_skip(&json);
            else hstep_json_string(&json, &text);
        snprintf(method, method_bytes, "%s", text);
    }
    free(contents);
}

/* Fails for a model whose weights another quantizer has stored, because its scales would be taken for weights. */
static int refuse_quantized(struct work *w)
{
    static const char advice[] = "convert the model that it was made of";
    char method[64] = "";
    for (uint64_t i = 0; i < w->jobs; i++) {
        const struct job *job = &w->job[i];
        const char *quantizer = job->packed ? NULL : quantizer_of(&job->info);
        if (!quantizer) continue;
        snprintf(w->error, sizeof w->error, "%s: %s is of a model in %s, whose scales are no weights; %s",
                 job->part->path, job->info.name, quantizer, advice);
        return -1;
    }
    read_method(w->files.config, method, sizeof method);
    if (!method[0]) return 0;
    snprintf(w->error, sizeof w->error, "%.700s: the weights are quantized by %s, whose scales are no weights; %s",
             w->files.config, method, advice);
    return -1;
}

static int open_jobs(struct work *w, const char *path)
{
    char *error = w->error;
    if (model_files_find(path, 0, &w->files, error, sizeof w->error) != 0 ||
        model_tensors_open(w->files.model, &w->model, error, sizeof w->error) != 0)
        return -1;
    uint64_t all = 0;
    for (size_t i = 0; i < w->model.parts; i++) all += halfstep_safetensor_count(w->model.part[i].file);
    w->lists = calloc(w->model.parts, sizeof *w->lists);
    w->job = calloc((size_t)all + 1, sizeof *w->job);
    if (!w->lists || !w->job) return no_memory(error, sizeof w->error), -1;
    for (size_t i = 0; i < w->model.parts; i++) {
        const struct model_part *part = &w->model.part[i];
        if (packed_list_read(part->file, part->path, &w->lists[i], error, sizeof w->error) != 0) return -1;
        for (uint64_t k = 0; k < halfstep_safetensor_count(part->file); k++) {
            struct job *job = &w->job[w->jobs++];
            *job = (struct job){.part = part, .index = k, .info = {.struct_size = sizeof job->info}};
            halfstep_get_safetensor_info(part->file, k, &job->info);
            job->packed = packed_list_find(&w->lists[i], job->info.name);
        }
    }
    return 0;
}

/* Decides what happens to each tensor. Fails if a pattern matches nothing that can be converted, or if nothing is left
 * to do. */
static int judge_all(struct work *w, const char *path)
{
    const struct path_list *patterns = &w->options->tensors;
    unsigned char *used = calloc((size_t)patterns->n + 1, 1);
    uint64_t converted = 0;
    int unused = 0;
    if (!used) return no_memory(w->error, sizeof w->error), -1;
    for (uint64_t i = 0; i < w->jobs; i++) {
        judge(w, &w->job[i], used);
        converted += (uint64_t)w->job[i].converts;
    }
    while (unused < patterns->n && used[unused]) unused++;
    free(used);
    if (unused < patterns->n)
        snprintf(w->error, sizeof w->error, "--tensors '%s' matches no matrix with rows of at least 32 elements in %s",
                 patterns->item[unused], path);
    else if (!converted)
        snprintf(w->error, sizeof w->error,
                 "%s has nothing to convert to %s; only packed weights, and matrices of F32, BF16 or F16 with rows of "
                 "at least 32 elements, are converted",
                 path, w->target.name);
    else return 0;
    return -1;
}

/* ---- Converting -------------------------------------------------------------------------------------------------- */

/* Some rows of a tensor, in its old and its new format. */
struct stretch {
    int64_t rows;
    halfstep_optimizer *from, *to;
    int slot; /* of `from` */
    unsigned char *in;
    float *values;
    uint64_t in_row, out_row; /* bytes of a row */
};

static int open_stretch(const struct work *w, const struct job *job, struct stretch *s)
{
    enum { ELEMENTS = 1 << 18 };
    char from[RECIPE_BYTES], to[RECIPE_BYTES];
    const int64_t rows = (int64_t)job->info.shape[0];
    const char *plain = job->packed ? "f32" : gradient_format_of(job->info.dtype);
    s->rows = job->columns < ELEMENTS ? ELEMENTS / job->columns : 1;
    if (s->rows > rows) s->rows = rows;
    const struct lm_tensor shape = {.name = "weight", .ndim = 2, .rows = s->rows, .row_length = job->columns};
    const halfstep_tensor t = checkpoint_tensor(&shape, plain);
    /* A file has no error codes. The nearest codes without them are those of int8-sr. int8-ecc4 rounds twice. */
    snprintf(from, sizeof from, "sgd/%s", job->packed ? "int8-sr" : "f32");
    snprintf(to, sizeof to, "sgd/%s", is_packed(&w->target) ? "int8-sr" : w->target.name);
    s->slot = job->packed ? HALFSTEP_SLOT_WEIGHT : HALFSTEP_SLOT_GRADIENT;
    int code = checkpoint_decoder(from, &t, &s->from);
    if (code == HALFSTEP_OK) code = checkpoint_decoder(to, &t, &s->to);
    if (code != HALFSTEP_OK) return code;
    s->in_row = job->info.bytes / (uint64_t)rows;
    s->out_row = slot_info(s->to, 0, HALFSTEP_SLOT_WEIGHT).code_bytes / (uint64_t)s->rows;
    s->in = malloc(s->in_row * (uint64_t)s->rows);
    s->values = malloc((size_t)(s->rows * job->columns) * sizeof *s->values);
    return s->in && s->values ? HALFSTEP_OK : HALFSTEP_ERROR_MEMORY;
}

static void close_stretch(struct stretch *s)
{
    halfstep_destroy(s->from);
    halfstep_destroy(s->to);
    free(s->in);
    free(s->values);
}

/* Returns the number of values before the first that is not finite, or n. */
static int64_t finite_values(const float *values, int64_t n)
{
    int64_t i = 0;
    while (i < n && isfinite(values[i])) i++;
    return i;
}

/* Converts rows from `row` on. A weight that is not finite is refused, because its block would lose 31 others. */
static int convert_rows(struct work *w, const struct job *job, const struct stretch *s, int64_t row)
{
    const int64_t left = (int64_t)job->info.shape[0] - row, n = left < s->rows ? left : s->rows, all = n * job->columns;
    int code = halfstep_read_safetensor(job->part->file, job->index, (uint64_t)row * s->in_row, s->in,
                                        (uint64_t)n * s->in_row, w->error, sizeof w->error);
    if (code == HALFSTEP_OK) code = halfstep_read_slot(s->from, 0, s->slot, s->in, 0, n, s->values);
    int64_t good = code == HALFSTEP_OK && is_packed(&w->target) ? finite_values(s->values, all) : all;
    if (good < all) {
        snprintf(
            w->error, sizeof w->error,
            "%s: %s is not finite in row %lld, column %lld; %s cannot hold such a weight; leave this tensor out by "
            "--tensors",
            job->part->path, job->info.name, (long long)(row + good / job->columns), (long long)(good % job->columns),
            w->target.name);
        return HALFSTEP_ERROR_FORMAT;
    }
    if (code == HALFSTEP_OK)
        code = halfstep_write_slot(s->to, 0, HALFSTEP_SLOT_WEIGHT, w->buffer + (uint64_t)row * s->out_row, 0, n,
                                   s->values);
    return code;
}

/* Converts a tensor into w->buffer. */
static int convert_tensor(struct work *w, const struct job *job)
{
    struct stretch s = {0};
    const int64_t rows = (int64_t)job->info.shape[0];
    free(w->buffer);
    w->buffer = NULL;
    int code = open_stretch(w, job, &s);
    if (code == HALFSTEP_OK && !(w->buffer = malloc((uint64_t)rows * s.out_row))) code = HALFSTEP_ERROR_MEMORY;
    for (int64_t row = 0; row < rows && code == HALFSTEP_OK; row += s.rows) code = convert_rows(w, job, &s, row);
    close_stretch(&s);
    if (code != HALFSTEP_OK && !w->error[0])
        snprintf(w->error, sizeof w->error, "%s: %s: %s", job->part->path, job->info.name, halfstep_strerror(code));
    return code;
}

static int fill(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    struct work *w = context;
    const struct job *job = &w->job[tensor];
    if (job->copies)
        return halfstep_read_safetensor(job->part->file, job->index, offset, data, bytes, w->error, sizeof w->error);
    int code = offset ? HALFSTEP_OK : convert_tensor(w, job);
    if (code == HALFSTEP_OK) memcpy(data, w->buffer + offset, bytes);
    return code;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------- */

/* Copies the metadata of all files. The first file that has a key decides. */
static int declare_metadata(struct work *w, halfstep_safetensors_writer *writer)
{
    int code = HALFSTEP_OK;
    for (size_t i = w->model.parts; i-- > 0;)
        for (uint64_t k = 0; k < halfstep_safetensors_metadata_count(w->model.part[i].file) && !code; k++) {
            const char *key, *value;
            code = halfstep_get_safetensors_metadata(w->model.part[i].file, k, &key, &value);
            if (!code && strcmp(key, HALFSTEP_PACKED_KEY) != 0)
                code = halfstep_declare_safetensors_metadata(writer, key, value, w->error, sizeof w->error);
        }
    return code;
}

static int declare_all(struct work *w, halfstep_safetensors_writer *writer)
{
    hstep_buffer list = {0};
    int code = declare_metadata(w, writer);
    for (uint64_t i = 0; i < w->jobs && !code; i++) {
        const struct job *job = &w->job[i];
        const int packed = job->converts ? is_packed(&w->target) : job->packed != NULL;
        const uint64_t shape[2] = {job->columns ? job->info.shape[0] : 0,
                                   packed ? lm_row_bytes(LM_PACKED, job->columns) : (uint64_t)job->columns};
        if (packed)
            packed_list_add(&list, job->info.name, job->converts ? w->target.name : job->packed->format, job->columns);
        code = halfstep_declare_safetensor(writer, job->info.name, job->copies ? job->info.dtype : w->target.code_dtype,
                                           job->copies ? job->info.ndim : 2, job->copies ? job->info.shape : shape,
                                           NULL, w->error, sizeof w->error);
    }
    if (!code && list.bytes) {
        packed_list_end(&list);
        code = list.failed ? HALFSTEP_ERROR_MEMORY
                           : halfstep_declare_safetensors_metadata(writer, HALFSTEP_PACKED_KEY, list.data, w->error,
                                                                   sizeof w->error);
    }
    text_free(&list);
    return code;
}

static int write_file(struct work *w, const char *path)
{
    char why[1024] = "";
    halfstep_safetensors_writer *writer = NULL;
    int code = halfstep_create_safetensors_writer(&writer);
    if (!code) code = declare_all(w, writer);
    if (!code) code = halfstep_write_safetensors(writer, path, fill, w, why, sizeof why);
    halfstep_destroy_safetensors_writer(writer);
    if (code && !w->error[0]) snprintf(w->error, sizeof w->error, "%s", *why ? why : halfstep_strerror(code));
    return code ? -1 : 0;
}

/* Returns the bytes of a tensor in the new file. */
static uint64_t new_bytes(const struct work *w, const struct job *job)
{
    if (job->copies) return job->info.bytes;
    return job->info.shape[0] * (is_packed(&w->target) ? lm_row_bytes(LM_PACKED, job->columns)
                                                       : (uint64_t)job->columns * (uint64_t)w->target.code_bits / 8);
}

static int print_result(const struct work *w, const char *path)
{
    uint64_t before = 0, converted = 0, after = 0;
    for (uint64_t i = 0; i < w->jobs; i++) {
        converted += (uint64_t)w->job[i].converts;
        before += w->job[i].info.bytes;
        after += new_bytes(w, &w->job[i]);
    }
    if (w->options->json) {
        struct document d;
        json_t *object = document_begin(&d);
        put_text(&d, object, "file", path);
        put_text(&d, object, "format", w->target.name);
        put_integer(&d, object, "bytes_before", (int64_t)before);
        put_integer(&d, object, "bytes", (int64_t)after);
        json_t *names[2] = {put_array(&d, object, "copied"), put_array(&d, object, "converted")};
        for (uint64_t i = 0; i < w->jobs; i++) put_text(&d, names[w->job[i].converts], NULL, w->job[i].info.name);
        return document_print(&d);
    }
    plain_print(stdout, path);
    printf(": %llu tensors converted to %s, %llu copied as they are; %llu bytes of tensors, before %llu\n",
           (unsigned long long)converted, w->target.name, (unsigned long long)(w->jobs - converted),
           (unsigned long long)after, (unsigned long long)before);
    return 0;
}

static int convert(struct args *args, void *options)
{
    const char *from = args->word[0], *to = args->word[1];
    struct work w = {.options = options};
    struct stat there;
    if (stat(to, &there) == 0) return failure("convert", "%s exists already; remove it, or choose another name", to);
    w.target = format_named(w.options->to);
    int bad =
        open_jobs(&w, from) != 0 || refuse_quantized(&w) != 0 || judge_all(&w, from) != 0 || write_file(&w, to) != 0;
    int status = bad ? failure("convert", "%s", w.error) : print_result(&w, to);
    for (size_t i = 0; w.lists && i < w.model.parts; i++) packed_list_free(&w.lists[i]);
    free(w.lists);
    free(w.job);
    free(w.buffer);
    model_tensors_close(&w.model);
    model_files_close(&w.files);
    return status;
}

const struct command convert_command = {
    .name = "convert",
    .usage = "FROM TO --to FORMAT [options]",
    .summary =
        "Converts the matrices of a model between BF16 or F32 and the packed weights of 8 bits, to nearest, and copies "
        "all other tensors. FROM is a safetensors file, an index of several, a folder with either, or a checkpoint. "
        "Its weights are read as they are stored, without error codes and residuals, which belong to an optimizer. So "
        "int8-sr and int8-ecc4 are the same bytes here. TO is one new safetensors file. It is written whole or not "
        "at "
        "all, and takes the memory of its largest tensor.",
    .notes = "The metadata " HALFSTEP_PACKED_KEY
             " of TO say which tensors are packed. docs/formats.md shows how numpy reads them.\n"
             "\n"
             "  halfstep convert model.safetensors small.safetensors --to int8-sr\n"
             "  halfstep convert model/ small.safetensors --to int8-ecc4 --tensors '*_proj.weight'\n"
             "  halfstep convert small.safetensors again.safetensors --to bf16\n",
    .min_words = 2,
    .max_words = 2,
    COMMAND_OPTIONS(rows, struct convert),
    .run = convert,
};
