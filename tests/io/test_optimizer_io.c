/* Tests optimizers in files. Every rule and format comes back to the bit and goes on as if nothing had happened. A file
 * that does not fit is refused with the reason, and nothing changes. The library's sources are compiled into this file,
 * so that its allocations and its reading can fail and its locale can be another one. A run without arguments takes a
 * third of the recipes; --short: a fifth; --all: all. Over 500 lines because each thing that a file may say wrong is a
 * row. */
#define HALFSTEP_ADVANCED
#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/stat.h>
#include <unistd.h>

#include "folders.h"
#include "halfstep_io.h"
#include "messages.h"
#include "ref/fixture.h"
#include "scratch.h"

/* ---- What can go wrong around the library ------------------------------------------------------------------------ */

static long read_at = -1, reads;
static int failed;
static const char *point = ".";

static ssize_t faulty_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (reads++ == read_at) {
        failed = 1;
        errno = EIO;
        return -1;
    }
    return pread(fd, data, bytes, offset);
}

/* snprintf and strtod of a locale with another decimal point. */
__attribute__((format(printf, 3, 4))) static int local_snprintf(char *text, size_t size, const char *format, ...)
{
    char local[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(local, 512, format, arguments);
    va_end(arguments);
    char *dot = strchr(local, '.');
    if (dot) {
        size_t bytes = strlen(point);
        memmove(dot + bytes, dot + 1, strlen(dot));
        memcpy(dot, point, bytes);
        length += (int)bytes - 1;
    }
    if ((size_t)length >= size) exit(1);
    memcpy(text, local, (size_t)length + 1);
    return length;
}

static double local_strtod(const char *text, char **end)
{
    char plain[512], *stopped;
    size_t used = 0, bytes = strlen(point);
    for (const char *from = text; *from && used < sizeof plain - 1; used++) {
        int here = !strncmp(from, point, bytes);
        if (!here && *from == '.') break; /* A dot means nothing where it is not the point. */
        plain[used] = here ? '.' : *from;
        from += here ? bytes : 1;
    }
    plain[used] = 0;
    double value = strtod(plain, &stopped);
    used = (size_t)(stopped - plain);
    *end = (char *)text + used + (memchr(plain, '.', used) ? bytes - 1 : 0);
    return value;
}

/* test_checkpoints.c tests that written files survive a loss of power. */
static int quick_fsync(int fd)
{
    (void)fd;
    return 0;
}

#define fsync(fd) quick_fsync(fd)
#define pread(fd, data, bytes, offset) faulty_pread(fd, data, bytes, offset)
#include "faults/allocations.h"
#include "io/checkpoint/directory.c"
#include "io/checkpoint/open.c"
#include "io/checkpoint/save.c"
#include "io/files.c"
#include "io/safetensors.c"
#include "io/planes.c"
#include "io/optimizer/load.c"
#include "io/optimizer/read.c"
#include "io/optimizer/record.c"
#include "io/optimizer/write.c"
#define snprintf local_snprintf
#define strtod local_strtod
#include "io/json.c"
#include "io/numbers.c"
#undef snprintf
#undef strtod
#undef fsync
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef pread

/* ---- Runs -------------------------------------------------------------------------------------------------------- */

static const char *at(const char *name) { return path_in(scratch, name); }

typedef struct shape {
    const char *name;
    int32_t group, ndim;
    int64_t rows, row_length;
} shape;

/* Shapes of every kind: a scalar, vectors that blocks take or do not take, and rows that end within a block. Also more
 * dimensions, whole blocks of every length, and an empty tensor. */
static const shape shapes[] = {
    {"scalar", 0, 0, 1, 1},    {"norm.weight", 0, 1, 100, 1}, {"flat/vector", 1, 1, 1, 4096}, {"embed", 0, 2, 5, 300},
    {"linear", 1, 2, 40, 128}, {"conv", 0, 4, 8, 72},         {"empty", 1, 2, 0, 7},
};
enum { TENSORS = COUNT(shapes), GROUPS = 2, MOST = 5120 };

typedef struct run {
    halfstep_optimizer *o;
    int n;
    void *weights[TENSORS];
    struct source random;
    int64_t bytes[TENSORS];
    int raw; /* its gradients are weights */
} run;

typedef struct plan {
    const char *recipe[GROUPS];
    int order[TENSORS], count; /* which shapes, in which order; count 0: all */
    int swapped;               /* groups are added the other way round */
    uint64_t seed;
    double momentum; /* of rules that have it */
    int bare;        /* states get no memory */
} plan;

static const plan usual = {.recipe = {"adamw/bf16-sr/int8", "adamw/bf16-sr/int8"}, .seed = 7};

/* Makes the optimizer of a plan. Returns 0 if its recipes do not work with its shapes. */
static int build(run *r, const plan *p)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = p->seed};
    memset(r, 0, sizeof *r);
    MUST(halfstep_create(&options, &r->o));
    int32_t group[GROUPS];
    for (int k = 0; k < GROUPS; k++) {
        int g = p->swapped ? GROUPS - 1 - k : k;
        if (halfstep_add_group(r->o, p->recipe[g], &group[g])) return 0;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(p->recipe[g], "/"), p->recipe[g]);
        halfstep_rule_info rule = rule_info(halfstep_rule_find(name));
        r->raw |= rule.raw_gradient;
        for (int32_t i = 0; i < rule.hypers; i++) {
            SIZED(halfstep_hyper_info, hyper);
            MUST(halfstep_get_hyper_info(halfstep_rule_find(name), i, &hyper));
            if (!strcmp(hyper.name, "momentum")) MUST(halfstep_set_hyper(r->o, group[g], "momentum", p->momentum));
            /* Rates differ, so estimates of them do. */
            if (!strcmp(hyper.name, "d_group")) MUST(halfstep_set_hyper(r->o, group[g], "d_group", g));
            /* Switches that add states. */
            if (!strcmp(hyper.name, "amsgrad") || !strcmp(hyper.name, "centered"))
                MUST(halfstep_set_hyper(r->o, group[g], hyper.name, p->momentum > 0));
        }
        MUST(halfstep_set_hyper(r->o, group[g], "lr", 0.01 / (g + 1)));
        MUST(halfstep_set_hyper(r->o, group[g], "weight_decay", 0.1));
        MUST(halfstep_set_choice(r->o, group[g], "schedule", g ? "cosine" : "linear"));
        MUST(halfstep_set_hyper(r->o, group[g], "total_steps", 100 + g));
    }
    MUST(halfstep_set_hyper(r->o, ALL_GROUPS, "clip_norm", 1.0));
    r->n = p->count ? p->count : TENSORS;
    for (int i = 0; i < r->n; i++) {
        const shape *s = &shapes[p->count ? p->order[i] : i];
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = group[s->group],
                             .name = s->name,
                             .ndim = s->ndim,
                             .may_be_empty = 1,
                             .rows = s->rows,
                             .row_length = s->row_length,
                             .gradient = "f32"};
        int32_t index;
        if (halfstep_add_tensor(r->o, &t, &index)) return 0;
        halfstep_slot_info slot = slot_info(r->o, index, WEIGHT);
        r->bytes[i] = (int64_t)slot.code_bytes;
        r->weights[i] = zeroed((size_t)slot.code_bytes);
    }
    if (p->bare) return 1;
    MUST(halfstep_allocate_states(r->o));
    float values[MOST];
    for (int i = 0; i < r->n; i++) {
        const shape *s = &shapes[p->count ? p->order[i] : i];
        struct source start = {halfstep_name_id(s->name)};
        for (int k = 0; k < s->rows * s->row_length; k++) values[k] = (float)next_normal(&start);
        if (s->rows) MUST(halfstep_write_slot(r->o, i, WEIGHT, r->weights[i], 0, s->rows, values));
    }
    return 1;
}

static void end(run *r)
{
    for (int i = 0; i < r->n; i++) free(r->weights[i]);
    halfstep_destroy(r->o);
}

/* Makes an optimizer that must work. */
static void start(run *r, const plan *p)
{
    if (!build(r, p)) FAIL("%s cannot be built", p->recipe[1]);
}

static int write_run(const char *name, const run *r)
{
    return halfstep_write_optimizer(at(name), r->o, r->weights, NULL, TEXT);
}

static int read_run(const char *name, run *r, const halfstep_file_options *options)
{
    return halfstep_read_optimizer(at(name), r->o, r->weights, options, TEXT);
}

/* Checks that two optimizers are the same. */
#define SAME(a, b, what) CHECK(fingerprint(a) == fingerprint(b), "%s", what)

/* Checks that an optimizer has not changed. */
#define UNCHANGED(r, before) CHECK(fingerprint(r) == (before), "a refused file changed the optimizer")

/* Gradients follow from the tensor's name and the step, so that the order of tensors does not matter. */
static void step(run *r, int from, int steps)
{
    static float gradients[TENSORS][MOST];
    const void *pointers[TENSORS];
    for (int s = from; s < from + steps; s++) {
        for (int i = 0; i < r->n; i++) {
            SIZED(halfstep_tensor, t);
            MUST(halfstep_get_tensor(r->o, i, &t));
            struct source random = {halfstep_name_id(t.name) + (uint64_t)s * 1000};
            for (int k = 0; k < t.rows * t.row_length; k++) gradients[i][k] = (float)next_normal(&random);
            pointers[i] = gradients[i];
        }
        MUST(halfstep_step(r->o, r->weights, pointers));
    }
}

static uint64_t mix_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *next = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ next[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Returns a hash of everything of an optimizer that a file keeps, tensors by name. */
static uint64_t fingerprint(const run *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->n; i++) {
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        SIZED(halfstep_tensor, t);
        MUST(halfstep_get_tensor(r->o, i, &t));
        halfstep_record c = counters_of(r->o, i);
        c.index = 0;
        hash = mix_bytes(hash, t.name, strlen(t.name));
        hash = mix_bytes(hash, &c, sizeof c);
        hash = mix_bytes(hash, r->weights[i], (size_t)r->bytes[i]);
        for (int32_t slot = 0; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
            SIZED(halfstep_slot_info, info);
            if (!stored_slot(r->o, i, slot, &info)) continue;
            if (info.code) hash = mix_bytes(hash, info.code, info.code_bytes);
            if (info.extra) hash = mix_bytes(hash, info.extra, info.extra_bytes);
            char name[64];
            double grid;
            snprintf(name, sizeof name, "%s.grid", info.name);
            if (!get_scalar(r->o, i, name, &grid)) hash = mix_bytes(hash, &grid, sizeof grid);
        }
        SIZED(halfstep_rule_info, rule);
        for (int32_t row = 0; !halfstep_get_rule_info(row, &rule); row++)
            for (int32_t k = 0; k < rule.scalars; k++) {
                double value;
                if (!get_scalar(r->o, i, rule.scalar_name[k], &value)) hash = mix_bytes(hash, &value, sizeof value);
            }
        uint64_t steps;
        MUST(get_group_steps(r->o, t.group, &steps));
        hash = mix_bytes(hash, &steps, sizeof steps);
        static const char *const choices[] = {"decay", "schedule"};
        for (int k = 0; k < 2; k++) {
            const char *choice = halfstep_get_choice(r->o, t.group, choices[k]);
            hash = mix_bytes(hash, choice, strlen(choice));
        }
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            SIZED(halfstep_hyper_info, hyper);
            for (int32_t k = 0; !halfstep_get_hyper_info(row, k, &hyper); k++) {
                double value;
                if (!halfstep_get_hyper(r->o, t.group, hyper.name, &value))
                    hash = mix_bytes(hash, &value, sizeof value);
            }
        }
        sum += hash;
    }
    double numbers[3] = {halfstep_gradient_norm(r->o), 0, 0};
    uint64_t counts[2] = {halfstep_skipped_steps(r->o), get_seed(r->o)};
    MUST(halfstep_get_hyper(r->o, ALL_GROUPS, "clip_norm", &numbers[1]));
    MUST(halfstep_get_hyper(r->o, ALL_GROUPS, "gradient_scale", &numbers[2]));
    static const char *const choices[] = {"generator", "scan", "clip", "missing"};
    for (int k = 0; k < 4; k++) {
        const char *choice = halfstep_get_choice(r->o, ALL_GROUPS, choices[k]);
        sum += mix_bytes((uint64_t)k, choice, strlen(choice));
    }
    return mix_bytes(mix_bytes(sum, numbers, sizeof numbers), counts, sizeof counts);
}

/* ---- There and back ---------------------------------------------------------------------------------------------- */

/* A run of three steps goes on for two: by itself, from a file and from a checkpoint. */
static int check_resume(const plan *p)
{
    run original, other;
    if (!build(&original, p)) {
        end(&original);
        return 0;
    }
    step(&original, 0, 3);
    CHECK(!write_run("one", &original), "%s: write: %s", p->recipe[1], message);
    halfstep_checkpoint_save *save;
    halfstep_checkpoint *checkpoint;
    halfstep_save_options fast = {.struct_size = sizeof fast, .no_sync = 1};
    CHECK(!halfstep_begin_checkpoint(&save, at("run"), &fast, TEXT) &&
              !halfstep_save_optimizer(save, original.o, original.weights, NULL, TEXT) &&
              !halfstep_commit_checkpoint(save, TEXT),
          "%s: save: %s", p->recipe[1], message);
    uint64_t saved = fingerprint(&original);
    step(&original, 3, 2);
    uint64_t ended = fingerprint(&original);
    for (int way = 0; way < 3; way++) {
        plan changed = *p;
        halfstep_file_options compare = {.struct_size = sizeof compare, .settings = HALFSTEP_SETTINGS_COMPARE};
        changed.seed = way == 1 ? p->seed + 5 : p->seed;
        if (!build(&other, &changed)) FAIL("%s cannot be built again", p->recipe[1]);
        /* Reads into fresh states, into used ones of other settings, and with the settings compared. */
        if (way == 1) {
            step(&other, 50, 1);
            MUST(halfstep_set_hyper(other.o, 0, "lr", 0.5));
            MUST(halfstep_set_choice(other.o, 1, "schedule", "constant"));
            MUST(halfstep_set_choice(other.o, ALL_GROUPS, "scan", "per-tensor"));
            MUST(halfstep_set_hyper(other.o, ALL_GROUPS, "clip_norm", 0.0));
        }
        if (way == 2) {
            CHECK(!halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT), "%s: open: %s", p->recipe[1], message);
            CHECK(!halfstep_load_optimizer(checkpoint, other.o, other.weights, &compare, TEXT), "%s: load: %s",
                  p->recipe[1], message);
            halfstep_close_checkpoint(checkpoint);
        } else {
            CHECK(!read_run("one", &other, NULL), "%s: read: %s", p->recipe[1], message);
        }
        CHECK(fingerprint(&other) == saved, "%s, way %d: something did not come back", p->recipe[1], way);
        step(&other, 3, 2);
        CHECK(fingerprint(&other) == ended, "%s, way %d: it goes on differently", p->recipe[1], way);
        end(&other);
    }
    end(&original);
    return 1;
}

static void test_every_recipe(void)
{
    int checked = 0;
    char recipe[128];
    for (int32_t rule = 0; rule < halfstep_rule_count(); rule++)
        for (int32_t weight = 0; weight < halfstep_format_count(); weight++)
            for (int32_t state = 0; state < halfstep_format_count(); state++) {
                halfstep_rule_info r = rule_info(rule);
                halfstep_format_info w = format_info(weight);
                halfstep_format_info s = format_info(state);
                /* Takes every rule with every weight and every state, but not all of both. */
                if (strcmp(w.name, "f32") && strcmp(s.name, "int8")) continue;
                snprintf(recipe, sizeof recipe, "%s/%s/%s", r.name, w.name, s.name);
                plan p = {.recipe = {r.name, recipe}, .seed = 3, .momentum = 0.9};
                char full[64];
                if (!(w.roles & HALFSTEP_ROLE_WEIGHT) || halfstep_recipe_full(recipe, full, sizeof full)) continue;
                if ((rule + weight + state) % BY_LENGTH(5, 3, 1) == 0) checked += check_resume(&p);
            }
    CHECK(checked > BY_LENGTH(60, 100, 300), "only %d recipes", checked);
    printf("     %d recipes\n", checked);
}

/* Two groups of different rules, and groups and tensors that come in another order where they are read. */
static void test_order(void)
{
    plan mixed = {.recipe = {"muon/bf16-kahan/bf16-sr", "adamw/f32/dyn8"}, .seed = 1, .momentum = 0.95}, turned = mixed;
    CHECK(check_resume(&mixed), "the recipes cannot be built");
    run first, second;
    turned.swapped = 1;
    turned.count = TENSORS;
    for (int i = 0; i < TENSORS; i++) turned.order[i] = TENSORS - 1 - i;
    start(&first, &mixed);
    start(&second, &turned);
    step(&first, 0, 3);
    WORKS(write_run("one", &first));
    MUST(halfstep_set_hyper(second.o, 0, "lr", 0.7));
    MUST(halfstep_set_hyper(second.o, 1, "lr", 0.8));
    WORKS(read_run("one", &second, NULL));
    SAME(&first, &second, "in another order something did not come back");
    step(&first, 3, 2);
    step(&second, 3, 2);
    SAME(&first, &second, "in another order it goes on differently");
    end(&first);
    end(&second);
}

static void test_two_in_one_checkpoint(void)
{
    run a, b, c;
    plan other = usual;
    other.recipe[0] = other.recipe[1] = "lion/f32/f32";
    halfstep_checkpoint_save *save;
    halfstep_checkpoint *checkpoint;
    const char *const model = "critic.safetensors";
    halfstep_file_options critic = {
        .struct_size = sizeof critic, .optimizer_file = "critic-optimizer.safetensors", .model_file = model};
    start(&a, &usual);
    start(&b, &other);
    start(&c, &other);
    step(&a, 0, 2);
    step(&b, 5, 2);
    WORKS(halfstep_begin_checkpoint(&save, at("two"), NULL, TEXT));
    WORKS(halfstep_save_optimizer(save, a.o, a.weights, NULL, TEXT));
    WORKS(halfstep_save_optimizer(save, b.o, b.weights, &critic, TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    WORKS(halfstep_open_checkpoint(&checkpoint, at("two"), NULL, TEXT));
    WORKS(halfstep_load_optimizer(checkpoint, c.o, c.weights, &critic, TEXT));
    SAME(&b, &c, "the second optimizer");
    uint64_t before = fingerprint(&c);
    FAILS(halfstep_load_optimizer(checkpoint, c.o, c.weights, NULL, TEXT), MISMATCH, "recipe"); /* the other's states */
    critic.model_file = "actor.safetensors";
    FAILS(halfstep_load_optimizer(checkpoint, c.o, c.weights, &critic, TEXT), MISMATCH,
          "actor.safetensors"); /* no such file */
    UNCHANGED(&c, before);
    halfstep_close_checkpoint(checkpoint);
    /* Saves only the states, because the caller has the weights. */
    WORKS(halfstep_begin_checkpoint(&save, at("two"), NULL, TEXT));
    WORKS(halfstep_save_optimizer(save, a.o, NULL, NULL, TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    WORKS(halfstep_open_checkpoint(&checkpoint, at("two"), NULL, TEXT));
    CHECK(!halfstep_checkpoint_path(checkpoint, "model.safetensors"), "weights that nobody gave");
    FAILS(halfstep_load_optimizer(checkpoint, a.o, a.weights, NULL, TEXT), MISMATCH, "model.safetensors");
    /* A run that takes this for no checkpoint, and saves, does not remove it, then or later. */
    const halfstep_save_options later = {.struct_size = sizeof later, .step = 1};
    for (int loaded = 0; loaded < 2; loaded++) {
        if (loaded) WORKS(halfstep_load_optimizer(checkpoint, a.o, NULL, NULL, TEXT));
        halfstep_close_checkpoint(checkpoint);
        WORKS(halfstep_begin_checkpoint(&save, at("two"), &later, TEXT));
        WORKS(halfstep_save_optimizer(save, a.o, NULL, NULL, TEXT));
        WORKS(halfstep_commit_checkpoint(save, TEXT));
        CHECK(strstr(message, "such as checkpoint-0-2,") != NULL, "loaded %d: \"%s\"", loaded, message);
        WORKS(halfstep_open_checkpoint(&checkpoint, at("two"), NULL, TEXT));
    }
    halfstep_close_checkpoint(checkpoint);
    /* A failed call decides the commit's result. */
    void *none[TENSORS] = {NULL};
    WORKS(halfstep_begin_checkpoint(&save, at("two"), NULL, TEXT));
    FAILS(halfstep_save_optimizer(save, a.o, none, NULL, TEXT), ARGUMENT, "scalar");
    FAILS(halfstep_commit_checkpoint(save, TEXT), ARGUMENT, "scalar");
    end(&a);
    end(&b);
    end(&c);
}

/* ---- Files that were changed ------------------------------------------------------------------------------------- */

typedef struct change {
    int (*skip)(const char *name); /* chooses tensors and metadata that are left out */
    const char *key, *value;       /* metadata: the new value; NULL removes it */
    const char *drop, *rename;     /* a tensor to leave out, or its new name */
    const char *retype;            /* a tensor whose dtype becomes another one of the same width */
    const char *reshape;           /* a tensor that becomes a vector, or gets `ndim` sizes */
    uint64_t sizes[16], ndim;
    const char *add;  /* an extra vector of zeros, of `element` bytes */
    const char *poke; /* a tensor whose element `element` gets `bytes` bytes of `bits` */
    uint64_t element, bits, bytes;
    double norm; /* what "update_norm" of the tensor "linear" becomes; 0: anything */
} change;

/* Returns 1 if a name is the wanted one. No name is NULL. */
static int is(const char *name, const char *wanted) { return wanted && !strcmp(name, wanted); }

/* A file that is copied with a change. number: which tensor of the file each written one is; UINT64_MAX: none. */
typedef struct copy {
    halfstep_safetensors *file;
    const change *c;
    uint64_t number[64];
} copy;

static int copy_bytes(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    const copy *from = context;
    const change *c = from->c;
    SIZED(halfstep_safetensor_info, info);
    if (from->number[tensor] == UINT64_MAX) {
        memset(data, 0, bytes);
        return 0;
    }
    int code = halfstep_get_safetensor_info(from->file, from->number[tensor], &info);
    if (!code) code = halfstep_read_safetensor(from->file, from->number[tensor], offset, data, bytes, NULL, 0);
    if (!code && is(info.name, c->poke) && !offset) memcpy((char *)data + c->element * c->bytes, &c->bits, c->bytes);
    return code;
}

/* Writes at("changed") from at("one"). */
static void make_changed(const change *c)
{
    copy from = {.c = c};
    halfstep_safetensors_writer *writer;
    uint64_t n = 0;
    int found = !c->key || c->value;
    MUST(halfstep_open_safetensors(&from.file, at("one"), TEXT));
    MUST(halfstep_create_safetensors_writer(&writer));
    for (uint64_t i = 0; i < halfstep_safetensor_count(from.file); i++) {
        SIZED(halfstep_safetensor_info, info);
        MUST(halfstep_get_safetensor_info(from.file, i, &info));
        if (c->skip && c->skip(info.name)) continue;
        if (is(info.name, c->drop)) {
            found = 1;
            if (!c->rename) continue;
            info.name = c->rename;
        }
        if (is(info.name, c->retype)) info.dtype = is(info.dtype, "I8") ? "U8" : is(info.dtype, "BF16") ? "F16" : "I8";
        if (is(info.name, c->reshape)) {
            info.shape = c->ndim ? c->sizes : &info.elements;
            info.ndim = c->ndim ? c->ndim : 1;
        }
        from.number[n++] = i;
        MUST(halfstep_declare_safetensor(writer, info.name, info.dtype, info.ndim, info.shape, NULL, TEXT));
    }
    from.number[n] = UINT64_MAX;
    if (c->add) MUST(halfstep_declare_safetensor(writer, c->add, "U8", 1, &c->element, NULL, TEXT));
    for (uint64_t i = 0; i < halfstep_safetensors_metadata_count(from.file); i++) {
        const char *key, *value;
        MUST(halfstep_get_safetensors_metadata(from.file, i, &key, &value));
        found |= is(key, c->key);
        if (is(key, c->key) || (c->skip && c->skip(key))) continue;
        MUST(halfstep_declare_safetensors_metadata(writer, key, value, TEXT));
    }
    if (c->key && c->value) MUST(halfstep_declare_safetensors_metadata(writer, c->key, c->value, TEXT));
    if (!found) FAIL("there is no %s to change", c->key ? c->key : c->drop);
    MUST(halfstep_write_safetensors(writer, at("changed"), copy_bytes, &from, TEXT));
    halfstep_destroy_safetensors_writer(writer);
    halfstep_close_safetensors(from.file);
}

typedef struct refusal {
    change c;
    int code;
    const char *says;
} refusal;

#define BIG INT64_MAX
#define META(k, v) {.key = k, .value = v}
/* Metadata that make a file corrupt. The message names the key. */
#define CORRUPT(k, v) {META(k, v), FORMAT, k}
#define POKE(tensor, place, pattern, width) {.poke = tensor, .element = place, .bits = pattern, .bytes = width}
#define RESHAPE(tensor, n, ...) {.reshape = tensor, .sizes = {__VA_ARGS__}, .ndim = n}
static const refusal refusals[] = {
    {META("format", NULL), FORMAT, "not an optimizer file"},
    {META("format", "halfstep optimizer 2"), FORMAT, "halfstep optimizer 1"},
    CORRUPT("counters.linear", "state_steps 1 full_steps 1 writes 1 id 0"),
    CORRUPT("counters.linear", "state_steps 1 full_steps 1 writes 1 id 5 "),
    CORRUPT("counters.linear", "state_steps 1 full_steps 1 writes 1"),
    CORRUPT("counters.linear", "state_steps -1 full_steps 1 writes 1 id 5"),
    CORRUPT("counters.linear", "state_steps 1 writes 1 full_steps 1 id 5"),
    CORRUPT("counters.linear", "state_steps 9223372036854775808 full_steps 1 writes 1 id 5"),
    CORRUPT("counters.linear", "state_steps 1 full_steps 1 writes 99999999999999999999 id 5"),
    CORRUPT("counters.linear", "state_steps 1 full_steps 9223372036854775808 writes 1 id 5"),
    CORRUPT("counters.linear", "state_steps 1 full_steps 1 writes 9223372036854775808 id 5"),
    CORRUPT("counters.linear", ""),
    CORRUPT("counters.linear", NULL),
    {META("counters.stranger", "state_steps 1 full_steps 1 writes 1 id 5"), MISMATCH, "\"stranger\" that this"},
    {META("group_of.stranger", "0"), MISMATCH, "\"stranger\" that this"},
    CORRUPT("group_of.linear", "zero"),
    {META("group_of.linear", "0"), MISMATCH, "\"linear\" is in group 0 of the file"},
    CORRUPT("group_of.linear", "4294967296"),
    CORRUPT("group_of.linear", NULL),
    CORRUPT("recipe.linear", NULL),
    {META("recipe.linear", "adamw/bf16-sr/int4"), MISMATCH,
     "\"linear\" is adamw/bf16-sr/int8 here but adamw/bf16-sr/int4 in"},
    {META("recipe.linear", "adamw/bf17"), MISMATCH, "adamw/bf17"},
    {META("seed", NULL), FORMAT, "\"seed\""},
    {META("seed", "-7"), FORMAT, "\"seed\""},
    {META("seed", "18446744073709551616"), FORMAT, "\"seed\""},
    CORRUPT("generator", NULL),
    CORRUPT("skipped_steps", NULL),
    CORRUPT("skipped_steps", "9223372036854775808"),
    CORRUPT("skipped_steps", "1.5"),
    CORRUPT("gradient_norm", NULL),
    CORRUPT("gradient_norm", "-1"),
    CORRUPT("gradient_norm", "inf"),
    CORRUPT("gradient_norm", "nan"),
    CORRUPT("gradient_norm", "1.0.0"),
    CORRUPT("group.1.steps", NULL),
    CORRUPT("group.1.steps", "many"),
    CORRUPT("group.1.steps", "9223372036854775808"),
    {META("group.0.beta1", "1"), RANGE, "group.0.beta1 is 1, not in"},
    CORRUPT("group.0.beta1", "nan"),
    CORRUPT("group.0.beta1", "0x1.ccccccccccccdp-1"),
    CORRUPT("group_of.linear", "01"),
    CORRUPT("seed", "07"),
    CORRUPT("skipped_steps", "00"),
    CORRUPT("group.1.steps", "03"),
    CORRUPT("scalars.norm.weight", "else 1"),
    CORRUPT("scalars.linear", "exp_avg_sq.grid 1 max_exp_avg_sq.grid 1 max_exp_avg_sq.grid 1"),
    CORRUPT("scalars.linear", "exp_avg_sq.grid 1 exp_avg.grid 1"),
    CORRUPT("group.0.beta1", "0,9"),
    CORRUPT("group.0.beta1", ""),
    {META("group.1.decay", "rotten"), MISMATCH, "group.1.decay is rotten"},
    {META("scan", "glance"), MISMATCH, "scan is glance"},
    {META("clip_norm", "-1"), RANGE, "clip_norm is -1"},
    {{.drop = "linear/exp_avg"}, MISMATCH, "no tensor \"linear/exp_avg\""},
    {{.drop = "linear/exp_avg.scale"}, MISMATCH, "no tensor \"linear/exp_avg.scale\""},
    {{.drop = "linear/weight"}, MISMATCH, "no tensor \"linear/weight\""},
    {{.drop = "linear/exp_avg", .rename = "linear/exp_average"}, MISMATCH, "\"linear/exp_avg\""},
    {{.reshape = "linear/exp_avg"}, MISMATCH, "shape [5120], this optimizer needs [40, 128]"},
    {{.reshape = "linear/exp_avg.scale"}, MISMATCH, "shape [160], this optimizer needs [40, 4]"},
    {{.reshape = "linear/weight"}, MISMATCH, "\"linear/weight\" has shape [5120]"},
    {RESHAPE("linear/exp_avg", 2, 128, 40), MISMATCH, "shape [128, 40], this optimizer needs [40, 128]"},
    {RESHAPE("linear/exp_avg", 2, 40, 127), MISMATCH, "shape [40, 127], this optimizer needs [40, 128]"},
    {RESHAPE("norm.weight/exp_avg", 2, 10, 10), MISMATCH, "shape [10, 10], this optimizer needs [100]"},
    {RESHAPE("linear/exp_avg", 16, 0, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG, BIG),
     MISMATCH, "shape [0, 9223372036854775807, 9223372036854775807, "},
    {{.add = "stranger", .element = 3}, MISMATCH, "has \"stranger\", which this optimizer does not store"},
    {{.add = "stranger/exp_avg", .element = 3},
     MISMATCH,
     "has \"stranger/exp_avg\", which this optimizer does not store"},
    {{.add = "linear/exp_bvg", .element = 3}, MISMATCH, "has \"linear/exp_bvg\", which this optimizer does not store"},
    {{.retype = "linear/exp_avg"}, MISMATCH, "\"linear/exp_avg\" is U8, this optimizer needs I8"},
    {{.retype = "linear/weight"}, MISMATCH, "\"linear/weight\" is F16, this optimizer needs BF16"},
    {POKE("linear/exp_avg.scale", 3, 0x7fc0, 2), FORMAT, "element 3 of \"linear/exp_avg.scale\""},
    {POKE("linear/exp_avg_sq.scale", 0, 0x8001, 2), FORMAT, "element 0 of \"linear/exp_avg_sq.scale\""},
    {POKE("norm.weight/exp_avg_sq", 99, 0xbf80, 2), FORMAT, "element 99 of \"norm.weight/exp_avg_sq\""},
    {POKE("norm.weight/exp_avg_sq", 5, 0xffff, 2), FORMAT, "element 5 of"},
    {POKE("norm.weight/exp_avg_sq", 5, 0x7f81, 2), FORMAT, "element 5 of"},
    {POKE("norm.weight/exp_avg_sq", 5, 0x7f80, 2), FORMAT, "not finite"},
    /* Files that look odd but are allowed. */
    {POKE("norm.weight/exp_avg_sq", 5, 0x8000, 2), 0, ""},
    {POKE("linear/exp_avg_sq.scale", 5, 0x7f80, 2), 0, ""},
    {POKE("norm.weight/exp_avg", 5, 0xffff, 2), 0, ""},
    {POKE("norm.weight/weight", 5, 0xffff, 2), 0, ""},
    {RESHAPE("linear/exp_avg", 3, 40, 64, 2), 0, ""},
    {{.add = "stranger", .element = 0}, 0, ""},
    {META("group.0.beta1", "90e-2"), 0, ""},
    {META("group.0.beta1", NULL), 0, ""},
    {META("group.7.beta1", "3"), 0, ""},
    {META("recipe.linear", "adamw/bf16-sr/int8+int8"), 0, ""},
    {META("missing", NULL), 0, ""},
    {META("scalars.linear", "exp_avg_sq.grid 1 max_exp_avg_sq.grid 1"), 0, ""},
};

/* States in single precision, scales over the flattened tensor, and packed weights. */
static const plan single = {.recipe = {"adamw", "adamw"}, .seed = 7};
static const plan flat = {.recipe = {"adamw/f32/dyn8", "adamw/f32/dyn8"}, .seed = 7};
static const plan packed = {.recipe = {"adamw/int8-sr", "adamw/int8-ecc4/int8"}, .seed = 7};
static const refusal refusals_single[] = {
    {POKE("norm.weight/exp_avg_sq", 5, 0xbf800000, 4), FORMAT, "element 5 of"},
    {POKE("norm.weight/exp_avg_sq", 99, 0x7fc00000, 4), FORMAT, "element 99 of"},
    {POKE("norm.weight/exp_avg_sq", 5, 0x7f800000, 4), FORMAT, "not finite"},
    {POKE("norm.weight/exp_avg_sq", 5, 0x80000000, 4), 0, ""},
    {POKE("norm.weight/exp_avg_sq", 5, 0x7f7fffff, 4), 0, ""},
};
static const refusal refusals_flat[] = {
    {POKE("linear/exp_avg_sq.scale", 1, 0xff800000, 4), FORMAT, "element 1 of"},
    {RESHAPE("linear/exp_avg.scale", 1, 19), MISMATCH, "shape [19], this optimizer needs [20]"},
    {RESHAPE("linear/exp_avg.scale", 2, 4, 5), 0, ""},
};
static const refusal refusals_packed[] = {
    {{.drop = "linear/weight.extra"}, MISMATCH, "no tensor \"linear/weight.extra\""},
    {{.reshape = "linear/weight"}, MISMATCH, "shape [5440], this optimizer needs [40, 136]"},
    {RESHAPE("linear/weight.extra", 2, 64, 40), MISMATCH, "shape [64, 40], this optimizer needs [40, 64]"},
    {{.retype = "embed/weight"}, MISMATCH, "\"embed/weight\" is I8, this optimizer needs U8"},
    {META("recipe.linear", "adamw/int8-sr/int8"), MISMATCH, "\"linear\" is adamw/int8-ecc4/int8 here"},
    {POKE("linear/weight", 0, 0x7fc0, 2), 0, ""},
};

static void refuse(const plan *p, const refusal *rows, size_t count)
{
    run original, other;
    start(&original, p);
    step(&original, 0, 3);
    WORKS(write_run("one", &original));
    for (size_t i = 0; i < count; i++) {
        const refusal *r = &rows[i];
        start(&other, p);
        step(&other, 20, 1);
        uint64_t before = fingerprint(&other);
        make_changed(&r->c);
        int code = read_run("changed", &other, NULL);
        CHECK(code == r->code && strstr(message, r->says) && (!code || strstr(message, "changed")),
              "row %zu: %d \"%s\", not %d \"%s\"", i, code, message, r->code, r->says);
        CHECK(!code || fingerprint(&other) == before, "row %zu: a refused file changed the optimizer", i);
        if (r->c.norm) {
            double value;
            MUST(get_scalar(other.o, 4, "update_norm", &value));
            CHECK(value == r->c.norm, "row %zu: update_norm is %g", i, value);
        }
        end(&other);
    }
    end(&original);
}

static void test_refusals(void)
{
    refuse(&usual, refusals, COUNT(refusals));
    refuse(&single, refusals_single, COUNT(refusals_single));
    refuse(&flat, refusals_flat, COUNT(refusals_flat));
    refuse(&packed, refusals_packed, COUNT(refusals_packed));
}

static void test_packed_list(void)
{
    run r;
    halfstep_checkpoint_save *save;
    halfstep_safetensors *file;
    start(&r, &packed);
    WORKS(halfstep_begin_checkpoint(&save, at("packed"), NULL, TEXT));
    WORKS(halfstep_save_optimizer(save, r.o, r.weights, NULL, TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    WORKS(halfstep_open_safetensors(&file, at("packed/model.safetensors"), TEXT));
    const char *list = halfstep_safetensors_metadata_find(file, HALFSTEP_PACKED_KEY);
    CHECK(is(list, "{\"conv\": {\"format\": \"int8-sr\", \"columns\": 72}, "
                   "\"embed\": {\"format\": \"int8-sr\", \"columns\": 300}, "
                   "\"linear\": {\"format\": \"int8-ecc4\", \"columns\": 128}}"),
          "packed weights: %s", list ? list : "none");
    halfstep_close_safetensors(file);
    end(&r);
}

/* Checks every setting that is compared, and what is left alone. */
static void test_settings(void)
{
    run a, b;
    static const char *const left[] = {"lr", "seed", "total_steps", "scan", NULL};
    halfstep_file_options compare = {.struct_size = sizeof compare, .settings = HALFSTEP_SETTINGS_COMPARE},
                          leave = {.struct_size = sizeof leave, .leave = left};
    start(&a, &usual);
    step(&a, 0, 3);
    WORKS(write_run("one", &a));
    for (int kind = 0; kind < 7; kind++) {
        static const char *const says[] = {"lr is 0.5 here but 0.005 in ",
                                           "decay is l2 here but decoupled in ",
                                           "scan is known-finite here but scan in ",
                                           "clip_norm is 3 here but 1 in ",
                                           "seed is 8 here but 7 in ",
                                           "beta2 is 0.99900000000000011 here but 0.999 in ",
                                           ""};
        plan p = usual;
        if (kind == 4) p.seed = 8;
        start(&b, &p);
        if (kind == 0) MUST(halfstep_set_hyper(b.o, 1, "lr", 0.5));
        if (kind == 1) MUST(halfstep_set_choice(b.o, 1, "decay", "l2"));
        if (kind == 2) MUST(halfstep_set_choice(b.o, ALL_GROUPS, "scan", "known-finite"));
        if (kind == 3) MUST(halfstep_set_hyper(b.o, ALL_GROUPS, "clip_norm", 3));
        if (kind == 5) MUST(halfstep_set_hyper(b.o, 0, "beta2", nextafter(0.999, 1)));
        uint64_t before = fingerprint(&b);
        int code = read_run("one", &b, &compare);
        CHECK(code == (kind < 6 ? MISMATCH : 0) && strstr(message, says[kind]) &&
                  (kind != 0 || strstr(message, "one, group 1")),
              "%d: %d %s", kind, code, message);
        CHECK(!code || fingerprint(&b) == before, "%d: a comparison changed something", kind);
        end(&b);
    }
    /* A setting that the file does not know had its default. */
    make_changed(&(change)META("scan", NULL));
    start(&b, &usual);
    WORKS(read_run("changed", &b, &compare));
    make_changed(&(change)META("group.0.lr", NULL));
    FAILS(read_run("changed", &b, &compare), MISMATCH, "lr is 0.01 here but 0.001 in");
    make_changed(&(change)META("group.1.decay", NULL));
    WORKS(read_run("changed", &b, &compare)); /* the rule's own decay */
    end(&b);
    plan p = usual;
    p.seed = 99;
    start(&b, &p);
    MUST(halfstep_set_hyper(b.o, 0, "lr", 0.25));
    MUST(halfstep_set_hyper(b.o, 0, "beta1", 0.5));
    MUST(halfstep_set_choice(b.o, ALL_GROUPS, "scan", "known-finite"));
    WORKS(read_run("one", &b, &leave));
    CHECK(get_hyper(b.o, 0, "lr") == 0.25 && get_seed(b.o) == 99 &&
              !strcmp(halfstep_get_choice(b.o, ALL_GROUPS, "scan"), "known-finite"),
          "what was to be left was not");
    EQUAL(get_hyper(b.o, 0, "beta1"), 0.9);
    end(&b);
    /* The reference of fully decoupled decay is the first lr, whatever the lr became. */
    start(&b, &usual);
    MUST(halfstep_set_choice(a.o, 0, "decay", "fully-decoupled"));
    MUST(halfstep_set_hyper(a.o, 0, "lr", 0.002));
    WORKS(write_run("one", &a));
    MUST(halfstep_set_hyper(b.o, 0, "reference_lr", 0.5));
    WORKS(read_run("one", &b, NULL));
    EQUAL(get_hyper(b.o, 0, "reference_lr"), 0.01);
    step(&a, 3, 2);
    step(&b, 3, 2);
    SAME(&a, &b, "decay goes on differently");
    end(&a);
    end(&b);
    /* Nobody has set it so far, and reading does not either. */
    static const halfstep_tensor t = {
        .struct_size = sizeof t, .name = "t", .ndim = 1, .rows = 3, .row_length = 1, .gradient = "f32"};
    halfstep_optimizer *first = optimizer_of("adamw", &t), *second = optimizer_of("adamw", &t);
    WORKS(halfstep_write_optimizer(at("one"), first, NULL, NULL, TEXT));
    WORKS(halfstep_read_optimizer(at("one"), second, NULL, NULL, TEXT));
    halfstep_destroy(first);
    MUST(halfstep_set_hyper(second, 0, "lr", 0.5));
    CHECK(get_hyper(second, 0, "reference_lr") == 0.5, "the reference is not the lr that is set first");
    /* With one group there is no need to say which. */
    FAILS(halfstep_read_optimizer(at("one"), second, NULL, &compare, TEXT), MISMATCH, "lr is 0.5 here but 0.001 in ");
    CHECK(!strstr(message, "group"), "%s", message);
    /* A group without tensors continues none. It keeps its settings and its steps. */
    int32_t group;
    first = new_optimizer("adamw", 0, 0);
    MUST(halfstep_add_group(first, "lion", &group));
    add_tensor(first, &t);
    MUST(halfstep_allocate_states(first));
    MUST(halfstep_set_hyper(first, group, "lr", 0.75));
    MUST(set_group_steps(first, group, 9));
    WORKS(halfstep_write_optimizer(at("one"), second, NULL, NULL, TEXT));
    WORKS(halfstep_read_optimizer(at("one"), first, NULL, NULL, TEXT));
    uint64_t steps;
    MUST(get_group_steps(first, group, &steps));
    CHECK(get_hyper(first, group, "lr") == 0.75 && steps == 9, "a group without tensors has changed");
    CHECK(get_hyper(first, 0, "lr") == 0.5, "the other group has not");
    halfstep_destroy(first);
    halfstep_destroy(second);
    /* An optimizer without tensors does not take a file that has some. */
    MUST(halfstep_create(NULL, &first));
    FAILS(halfstep_read_optimizer(at("one"), first, NULL, NULL, TEXT), MISMATCH, "\"t\"");
    halfstep_destroy(first);
}

static void test_scalars(void)
{
    static const plan delayed = {.recipe = {"adamw-delayed", "lamb/bf16-kahan/int8"}, .seed = 2};
    static const refusal rows[] = {
        CORRUPT("scalars.conv", NULL),
        CORRUPT("scalars.conv", "accumulated_decay"),
        CORRUPT("scalars.conv", "accumulated_decay inf"),
        CORRUPT("scalars.conv", "accumulated_decay nan"),
        CORRUPT("scalars.conv", "accumulated_decay 1 accumulated_decay 1"),
        CORRUPT("scalars.conv", "accumulated_decay 1 "),
        CORRUPT("scalars.conv", "accumulated_decay 1, "),
        CORRUPT("scalars.conv", "else 1"),
        {META("scalars.conv", "accumulated_decay 1e300"), RANGE, "accumulated_decay"},
        CORRUPT("scalars.linear", "weight_norm 1 update_norm 1"),
        CORRUPT("scalars.linear", "trust_ratio 0.5 weight_norm 1 update_norm 2.5"),
        /* A tensor without elements may be missing. */
        {META("scalars.empty", NULL), 0, ""},
        {{.key = "scalars.linear",
          .value = "trust_ratio 1 weight_norm 1 exp_avg_sq.grid 0.5 update_norm 2.5",
          .norm = 2.5},
         0,
         ""},
        {META("scalars.linear", "trust_ratio 1 weight_norm 1 update_norm 2.5 exp_avg_sq.grid 0.2"), RANGE,
         "exp_avg_sq.grid"},
        CORRUPT("scalars.linear", "trust_ratio 1 weight_norm 1 update_norm 2.5 exp_avg_sq.grid nan"),
        CORRUPT("scalars.linear", "exp_avg_sq.grid 0.5"),
        CORRUPT("scalars.linear", "trust_ratio 1 weight_norm 1 update_norm 2.5 exp_avg.grids 1"),
        CORRUPT("scalars.linear", "exp_avg_sq.grid 1 trust_ratio 1 weight_norm 1 update_norm 2.5 exp_avg_sq.grid 1"),
    };
    refuse(&delayed, rows, COUNT(rows));
}

/* What spells a number, and what does not: the list that Python's reader is held to as well. */
static void test_spellings(void)
{
    enum { COUNT_, NUMBER_, COUNTERS_, SCALARS_ };
    static const char *const keys[] = {"", "", "counters.linear", "scalars.linear"};
    static const struct {
        int kind, good;
        const char *text;
        uint64_t bits;
    } list[] = {
#define SPELLING(kind, text, good, bits) {kind##_, good, text, UINT64_C(bits)},
#include "spellings.def"
#undef SPELLING
    };
    static const plan lamb = {.recipe = {"adamw", "lamb/bf16-kahan/int8"}, .seed = 2};
    static refusal rows[COUNT(list)];
    size_t lines = 0;
    for (size_t i = 0; i < COUNT(list); i++) {
        uint64_t bits = 0;
        double number = 0;
        if (list[i].kind == COUNT_) {
            const int good = hstep_is_uint64(list[i].text, &bits);
            CHECK(good == list[i].good && (!good || bits == list[i].bits), "count \"%s\"", list[i].text);
        } else if (list[i].kind == NUMBER_) {
            const int good = hstep_is_double(list[i].text, &number);
            memcpy(&bits, &number, sizeof bits);
            CHECK(good == list[i].good && (!good || bits == list[i].bits), "number \"%s\" is %.17g", list[i].text,
                  number);
        } else {
            const char *key = keys[list[i].kind];
            rows[lines++] = (refusal){META(key, list[i].text), list[i].good ? 0 : FORMAT, list[i].good ? "" : key};
        }
    }
    refuse(&lamb, rows, lines);
}

static int python_lacks(const char *name)
{
    return !strncmp(name, "linear/exp", 10) || is(name, "counters.linear") || is(name, "recipe.linear") ||
           is(name, "recipe");
}

/* Files of other writers. Python keeps nothing of a parameter that has not been stepped, and knows the sizes of all
 * dimensions. */
static void test_other_writers(void)
{
    run a, b;
    start(&a, &usual);
    step(&a, 0, 3);
    static const uint64_t conv[4] = {8, 8, 3, 3};
    const uint64_t *sizes[TENSORS] = {[5] = conv};
    halfstep_file_options shaped = {.struct_size = sizeof shaped, .shapes = sizes};
    WORKS(halfstep_write_optimizer(at("one"), a.o, a.weights, &shaped, TEXT));
    halfstep_safetensors *file;
    MUST(halfstep_open_safetensors(&file, at("one"), TEXT));
    uint64_t index;
    SIZED(halfstep_safetensor_info, info);
    MUST(halfstep_safetensor_find(file, "conv/exp_avg", &index));
    MUST(halfstep_get_safetensor_info(file, index, &info));
    CHECK(info.ndim == 4 && info.shape[3] == 3, "the shape was not taken");
    MUST(halfstep_safetensor_find(file, "conv/exp_avg.scale", &index));
    MUST(halfstep_get_safetensor_info(file, index, &info));
    CHECK(info.ndim == 2 && info.shape[0] == 8 && info.shape[1] == 3, "scales have rows and blocks");
    halfstep_close_safetensors(file);
    start(&b, &usual);
    WORKS(read_run("one", &b, NULL));
    SAME(&a, &b, "with shapes");
    static const uint64_t wrong[][4] = {{8, 8, 3, 2}, {8, UINT64_MAX, UINT64_MAX, 9}, {8, 0, 3, 3}, {9, 8, 3, 3}};
    for (int i = 0; i < 4; i++) {
        sizes[5] = wrong[i];
        FAILS(halfstep_write_optimizer(at("unwanted"), a.o, a.weights, &shaped, TEXT), SHAPE, "\"conv\"");
    }
    CHECK(access(at("unwanted"), F_OK), "a refused file was written");
    end(&b);

    make_changed(&(change){.skip = python_lacks});
    start(&b, &usual);
    step(&b, 9, 1);
    WORKS(read_run("changed", &b, NULL));
    halfstep_record c = counters_of(b.o, 4);
    halfstep_slot_info slot = slot_info(b.o, 4, STATE);
    int bits = 0;
    for (uint64_t i = 0; i < slot.code_bytes; i++) bits |= ((char *)slot.code)[i];
    for (uint64_t i = 0; i < slot.extra_bytes; i++) bits |= ((char *)slot.extra)[i];
    CHECK(!c.state_steps && !c.full_steps && !c.writes && c.id == halfstep_name_id("linear") && !bits,
          "a tensor without steps");
    CHECK(!memcmp(a.weights[4], b.weights[4], (size_t)b.bytes[4]), "its weight");
    end(&b);
    end(&a);
}

/* ---- Which tensors ----------------------------------------------------------------------------------------------- */

static void test_which_tensors(void)
{
    run a, b;
    plan few = usual;
    few.count = 2;
    few.order[0] = 4, few.order[1] = 1;
    halfstep_file_options subset = {.struct_size = sizeof subset, .subset = 1};
    start(&a, &usual);
    step(&a, 0, 3);
    WORKS(write_run("one", &a));
    start(&b, &few);
    uint64_t before = fingerprint(&b);
    FAILS(read_run("one", &b, NULL), MISMATCH, "\"conv\" that this optimizer does not have");
    UNCHANGED(&b, before);
    /* The same for a tensor that is in no list of the file's, with options and without. Not where a subset is
     * enough. */
    halfstep_file_options compare = {.struct_size = sizeof compare, .settings = HALFSTEP_SETTINGS_COMPARE};
    make_changed(&(change){.add = "stranger/exp_avg", .element = 3});
    run whole;
    start(&whole, &usual);
    FAILS(read_run("changed", &whole, &compare), MISMATCH, "\"stranger/exp_avg\"");
    WORKS(read_run("changed", &whole, &subset));
    SAME(&whole, &a, "a file with a tensor too many");
    /* Its weights are not unknown to a caller who has them elsewhere. */
    WORKS(halfstep_read_optimizer(at("one"), whole.o, NULL, NULL, TEXT));
    end(&whole);
    WORKS(read_run("one", &b, &subset));
    CHECK(!memcmp(a.weights[4], b.weights[0], (size_t)a.bytes[4]) &&
              !memcmp(a.weights[1], b.weights[1], (size_t)a.bytes[1]),
          "the weights");
    WORKS(write_run("few", &b));
    FAILS(read_run("few", &a, &subset), MISMATCH, "does not have tensor \"scalar\"");
    end(&b);

    /* Ids that have changed places, and ids that two tensors claim. */
    halfstep_record first = counters_of(a.o, 3);
    halfstep_record second = counters_of(a.o, 4);
    uint64_t id = first.id;
    first.id = 1;
    MUST(set_counters(a.o, 3, &first));
    first.id = second.id, second.id = id;
    MUST(set_counters(a.o, 4, &second));
    MUST(set_counters(a.o, 3, &first));
    WORKS(write_run("one", &a));
    start(&b, &usual);
    WORKS(read_run("one", &b, NULL)); /* ids that changed places */
    SAME(&a, &b, "ids that changed places");
    /* Ids that are parked while they change places must differ from all ids of the file and the optimizer. */
    run c;
    start(&c, &usual);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) {
            halfstep_record small = counters_of(i ? c.o : b.o, 3 + k);
            small.id = (uint64_t)(i == k ? 1 : 2);
            MUST(set_counters(i ? c.o : b.o, 3 + k, &small));
        }
    WORKS(write_run("small", &b));
    WORKS(read_run("small", &c, NULL));
    SAME(&b, &c, "small ids that changed places");
    end(&c);
    end(&b);
    start(&b, &usual);
    WORKS(read_run("one", &b, NULL));
    char text[256];
    snprintf(text, sizeof text, "state_steps 3 full_steps 3 writes 3 id %" PRIu64, first.id);
    make_changed(&(change){.key = "counters.linear", .value = text});
    before = fingerprint(&b);
    FAILS(read_run("changed", &b, NULL), DUPLICATE, "\"linear\"");
    SAYS("\"embed\"");
    UNCHANGED(&b, before);
    end(&b);

    halfstep_tensor t = {
        .struct_size = sizeof t, .name = "twin", .id = 5, .ndim = 1, .rows = 3, .row_length = 1, .gradient = "f32"};
    /* A name that is longer than any of its keys' beginnings. */
    char name[301] = "";
    for (int i = 0; i < 30; i++) strcat(name, "layers.10.");
    t.name = name;
    halfstep_optimizer *o = optimizer_of("lamb", &t);
    MUST(set_scalar(o, 0, "update_norm", 2.5));
    WORKS(halfstep_write_optimizer(at("long"), o, NULL, NULL, TEXT));
    MUST(set_scalar(o, 0, "update_norm", 1));
    double norm;
    WORKS(halfstep_read_optimizer(at("long"), o, NULL, NULL, TEXT));
    MUST(get_scalar(o, 0, "update_norm", &norm));
    EQUAL(norm, 2.5);
    halfstep_destroy(o);
    /* A part of a tensor. */
    t = (halfstep_tensor){
        .struct_size = sizeof t, .name = "shard", .ndim = 2, .rows = 10, .row_length = 64, .gradient = "f32"};
    for (int wide = 0; wide < 2; wide++) {
        t.n_rows = wide ? 5 : 10;
        t.n_columns = wide ? 64 : 32;
        o = optimizer_of("adamw", &t);
        FAILS(halfstep_write_optimizer(at("unwanted"), o, NULL, NULL, TEXT), UNSUPPORTED,
              wide ? "5 x 64 of 10 x 64" : "10 x 32 of 10 x 64");
        SAYS("\"shard\"");
        FAILS(halfstep_read_optimizer(at("one"), o, NULL, NULL, TEXT), UNSUPPORTED, "\"shard\"");
        halfstep_destroy(o);
    }
    CHECK(access(at("unwanted"), F_OK), "a refused file was written");
    /* No memory yet. */
    plan bare = usual;
    bare.bare = 1;
    start(&b, &bare);
    FAILS(write_run("bare", &b), ORDER, "no memory yet");
    FAILS(read_run("one", &b, NULL), ORDER, "no memory yet");
    end(&b);
    plan residual = {.recipe = {"sgd/bf16-kahan", "sgd/bf16-kahan"}, .seed = 7, .bare = 1};
    start(&b, &residual);
    FAILS(write_run("bare", &b), ORDER, "\"scalar\": weight has no memory yet");
    end(&b);
    /* Nothing at all. */
    MUST(halfstep_create(NULL, &o));
    WORKS(halfstep_write_optimizer(at("nothing"), o, NULL, NULL, TEXT));
    WORKS(halfstep_read_optimizer(at("nothing"), o, NULL, NULL, TEXT));
    halfstep_destroy(o);
    end(&a);
}

/* Switches decide which states there are. A file has too many of them, or too few. */
static void test_switches(void)
{
    run with, without;
    plan p = {.recipe = {"adamw", "adamw/bf16-sr/int8"}, .seed = 1, .momentum = 1.0}, q = p;
    q.momentum = 0.0;
    start(&with, &p);
    start(&without, &q);
    step(&with, 0, 2);
    step(&without, 0, 1);
    uint64_t before[2] = {fingerprint(&with), fingerprint(&without)};
    WORKS(write_run("with", &with));
    WORKS(write_run("without", &without));
    FAILS(read_run("with", &without, NULL), MISMATCH, "exp_avg_sq\" is BF16, this optimizer needs I8");
    FAILS(read_run("without", &with, NULL), MISMATCH, "there is no tensor");
    SAYS("/max_exp_avg_sq");
    CHECK(fingerprint(&with) == before[0] && fingerprint(&without) == before[1], "a refused file changed an optimizer");
    end(&with);
    end(&without);
    /* A state in blocks is not decoded where a switch asks for a finer format. */
    p.count = q.count = 1;
    p.order[0] = q.order[0] = 4;
    start(&with, &p);
    start(&without, &q);
    before[0] = fingerprint(&with);
    WORKS(write_run("without", &without));
    FAILS(read_run("without", &with, NULL), MISMATCH, "linear/exp_avg_sq\" is I8, this optimizer needs BF16");
    UNCHANGED(&with, before[0]);
    end(&with);
    end(&without);
}

/* Settings that cannot be set once the states exist show up only when they are applied. All settings before them are
 * put back. */
static void test_rollback(void)
{
    run a, b;
    plan p = {.recipe = {"lion", "sgd"}, .seed = 1, .momentum = 0.9, .count = 2, .order = {1, 6}};
    start(&a, &p);
    step(&a, 0, 2);
    MUST(halfstep_set_hyper(a.o, 0, "lr", 0.3));
    MUST(halfstep_set_choice(a.o, 0, "schedule", "wsd"));
    WORKS(write_run("one", &a));
    p.momentum = 0.0;
    p.seed = 2;
    start(&b, &p);
    uint64_t before = fingerprint(&b);
    FAILS(read_run("one", &b, NULL), ORDER, "momentum");
    UNCHANGED(&b, before);
    end(&a);
    end(&b);
}

static void test_arguments(void)
{
    run a;
    halfstep_checkpoint *checkpoint;
    halfstep_checkpoint_save *save;
    halfstep_file_options bad[] = {
        {.struct_size = 5}, {.struct_size = sizeof *bad, .settings = 2}, {.struct_size = sizeof *bad, .reserved = 1}};
    start(&a, &usual);
    WORKS(halfstep_begin_checkpoint(&save, at("arguments"), NULL, TEXT));
    WORKS(halfstep_save_optimizer(save, a.o, a.weights, NULL, TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    WORKS(halfstep_open_checkpoint(&checkpoint, at("arguments"), NULL, TEXT));
    FAILS(halfstep_read_optimizer(at("absent"), a.o, NULL, NULL, TEXT), IO, "absent");
    for (size_t i = 0; i < COUNT(bad); i++) {
        WORKS(halfstep_begin_checkpoint(&save, at("arguments"), NULL, TEXT));
        CHECK(halfstep_save_optimizer(save, a.o, a.weights, &bad[i], TEXT) == ARGUMENT, "options %zu", i);
        CHECK(halfstep_commit_checkpoint(save, TEXT) == ARGUMENT, "options %zu", i);
        CHECK(halfstep_load_optimizer(checkpoint, a.o, a.weights, &bad[i], TEXT) == ARGUMENT, "options %zu", i);
        CHECK(halfstep_write_optimizer(at("x"), a.o, a.weights, &bad[i], TEXT) == ARGUMENT, "options %zu", i);
        CHECK(halfstep_read_optimizer(at("x"), a.o, a.weights, &bad[i], TEXT) == ARGUMENT, "options %zu", i);
    }
    halfstep_close_checkpoint(checkpoint);
    end(&a);
}

/* ---- What fails around it ---------------------------------------------------------------------------------------- */

static void test_failing_memory(void)
{
    run a, b;
    plan scalars = {.recipe = {"lamb", "adamw/bf16-kahan/int4"}, .seed = 4};
    start(&a, &scalars);
    start(&b, &scalars);
    step(&a, 0, 3);
    WORKS(write_run("kept", &a));
    step(&a, 3, 1);
    step(&b, 9, 1);
    uint64_t before = fingerprint(&b);
    enum { WRITING, SAVING, READING, LOADING, WAYS };
    static const char *const what[WAYS] = {"writing", "saving", "reading", "loading"};
    long calls[WAYS] = {0};
    halfstep_checkpoint *checkpoint = NULL;
    for (int way = 0; way < WAYS; way++) {
        if (way == LOADING) MUST(halfstep_open_checkpoint(&checkpoint, at("memory"), NULL, TEXT));
        for (long call = 0;; call++) {
            halfstep_checkpoint_save *save = NULL;
            if (way == SAVING) MUST(halfstep_begin_checkpoint(&save, at("memory"), NULL, TEXT));
            allocations = allocations_failed = 0;
            allocation_at = call;
            int code = way == WRITING   ? write_run("one", &a)
                       : way == SAVING  ? halfstep_save_optimizer(save, a.o, a.weights, NULL, TEXT)
                       : way == READING ? read_run("one", &b, NULL)
                                        : halfstep_load_optimizer(checkpoint, b.o, b.weights, NULL, TEXT);
            allocation_at = -1;
            if (!allocations_failed) {
                CHECK(!code, "%s", message);
                if (save) WORKS(halfstep_commit_checkpoint(save, TEXT));
                break;
            }
            calls[way]++;
            CHECK(code == MEMORY && strstr(message, "memory"), "%s, allocation %ld: %d %s", what[way], call, code,
                  message);
            if (save) CHECK(halfstep_commit_checkpoint(save, TEXT) == MEMORY, "allocation %ld: %s", call, message);
            if (way >= READING) CHECK(fingerprint(&b) == before, "allocation %ld: the optimizer was changed", call);
        }
        CHECK(calls[way] > (way < READING ? 100 : 40), "%s: %ld allocations", what[way], calls[way]);
        if (way < READING) continue;
        CHECK(fingerprint(&a) == fingerprint(&b), "%s: after all failures something did not come back", what[way]);
        step(&b, 9, 1);
        before = fingerprint(&b);
    }
    halfstep_close_checkpoint(checkpoint);
    end(&a);
    end(&b);
}

static void test_failing_disk(void)
{
    run a, b;
    start(&a, &usual);
    start(&b, &usual);
    step(&a, 0, 3);
    WORKS(write_run("one", &a));
    int untouched = 0, partly = 0;
    for (long call = 0;; call++) {
        uint64_t before = fingerprint(&b);
        reads = failed = 0;
        read_at = call;
        int code = read_run("one", &b, NULL);
        read_at = -1;
        if (!failed) {
            CHECK(!code && fingerprint(&a) == fingerprint(&b), "%s", message);
            break;
        }
        int said = strstr(message, "partly loaded") != NULL;
        CHECK(code == IO && strstr(message, "one"), "call %ld: %d %s", call, code, message);
        CHECK(said || fingerprint(&b) == before, "call %ld changed the optimizer and did not say so: %s", call,
              message);
        untouched += !said;
        partly += said;
    }
    CHECK(untouched > 3 && partly > 3, "%d and %d", untouched, partly);
    end(&a);
    end(&b);
}

/* Changes each byte of the header. The file is refused and nothing changes, or it says the same or another number. */
static void test_mutations(void)
{
    run a, b;
    plan few = {.recipe = {"lamb", "adamw/f32/int4"}, .seed = 4, .count = 2, .order = {0, 4}};
    start(&a, &few);
    start(&b, &few);
    step(&a, 0, 2);
    WORKS(write_run("one", &a));
    size_t bytes = 0;
    static char data[1 << 20];
    FILE *stream = fopen(at("one"), "rb");
    if (stream) bytes = fread(data, 1, sizeof data, stream), fclose(stream);
    size_t header = 8 + (unsigned char)data[0] + 256u * (unsigned char)data[1];
    int refused = 0, accepted = 0;
    uint64_t before = fingerprint(&b);
    for (size_t i = 8; i < header; i++) {
        char was = data[i];
        data[i] = (char)(was ^ (1 << i % 7));
        put_file(at("changed"), data, bytes);
        data[i] = was;
        int code = read_run("changed", &b, NULL);
        CHECK(!code || strlen(message) > 10, "byte %zu: %d and no text", i, code);
        if (code) {
            CHECK(fingerprint(&b) == before, "byte %zu (%s): the optimizer was changed", i, message);
            refused++;
        } else {
            before = fingerprint(&b);
            accepted++;
        }
    }
    CHECK(refused > 1000 && accepted > 50, "%d refused, %d accepted", refused, accepted);
    end(&a);
    end(&b);
}

/* The states are many times larger than the memory that reading or writing may take. */
static void test_memory(void)
{
    enum { ROWS = 4096, LENGTH = 4096 };
    halfstep_tensor t = {
        .struct_size = sizeof t, .name = "large", .ndim = 2, .rows = ROWS, .row_length = LENGTH, .gradient = "bf16"};
    halfstep_optimizer *o = optimizer_of("adamw/bf16/int8+bf16", &t);
    void *weights[1] = {zeroed((size_t)ROWS * LENGTH * 2)};
    held = held_most = 0;
    WORKS(halfstep_write_optimizer(at("large"), o, weights, NULL, TEXT));
    CHECK(held_most < 64 << 10, "writing held %zu bytes", held_most);
    held_most = 0;
    WORKS(halfstep_read_optimizer(at("large"), o, weights, NULL, TEXT));
    CHECK(held_most < 512 << 10, "reading held %zu bytes", held_most);
    unlink(at("large"));
    free(weights[0]);
    halfstep_destroy(o);
}

/* A program may have set a locale that writes numbers in its own way. */
static void test_locale(void)
{
    run a, b;
    static const char *const points[] = {".", ",", "\xd9\xab"};
    static const double numbers[] = {0.1, -1.5, 0.0, 3.0, 1e300, 5e-324, 0x1.fffffffffffffp-3};
    start(&a, &usual);
    step(&a, 0, 2);
    for (int i = 0; i < 3; i++) {
        char text[HSTEP_NUMBER_BYTES];
        double back;
        point = points[i];
        for (size_t k = 0; k < COUNT(numbers); k++) {
            hstep_write_double(text, numbers[k]);
            CHECK(strspn(text, "0123456789e+-.") == strlen(text), "with %s: %s", points[i], text);
            CHECK(hstep_is_double(text, &back) && back == numbers[k], "with %s: %s", points[i], text);
        }
        test_spellings();
        /* A comma of JSON stands between numbers. */
        char list[] = "[0.5, -12.25e-1,3,4,1e2]";
        static const double listed[] = {0.5, -1.225, 3, 4, 100};
        hstep_json json = {list, strlen(list), 0, NULL};
        for (size_t k = 0; k < COUNT(listed); k++)
            CHECK(hstep_json_expect(&json, k ? ',' : '[') && hstep_json_real(&json, &back) && back == listed[k],
                  "with %s: number %zu of a list is %g: %s", points[i], k, back, json.problem);
        CHECK(hstep_json_expect(&json, ']') && hstep_json_end(&json), "with %s: %s", points[i], json.problem);
        WORKS(write_run(i ? "local" : "one", &a));
        point = points[(i + 1) % 3];
        start(&b, &usual);
        WORKS(read_run(i ? "local" : "one", &b, NULL));
        SAME(&a, &b, points[i]);
        end(&b);
    }
    point = ".";
    end(&a);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch("optimizer");
    TEST("a run goes on from a file and from a checkpoint: every rule, weight and state") test_every_recipe();
    TEST("groups of different rules, groups and tensors in another order") test_order();
    TEST("two optimizers in one checkpoint, files by other names, states alone") test_two_in_one_checkpoint();
    TEST("what a file says wrong is named, and changes nothing") test_refusals();
    TEST("a model's file tells which weights are packed") test_packed_list();
    TEST("numbers of the rule for each tensor") test_scalars();
    TEST("what spells a number") test_spellings();
    TEST("settings: taken, compared, left") test_settings();
    TEST("files of the program and of Python") test_other_writers();
    TEST("tensors: some, too many, parts, ids that changed places") test_which_tensors();
    TEST("switches that decide about states") test_switches();
    TEST("what was taken is put back") test_rollback();
    TEST("arguments") test_arguments();
    TEST("every allocation failing once") test_failing_memory();
    TEST("every read failing once") test_failing_disk();
    TEST("every byte of a header wrong") test_mutations();
    TEST("memory does not grow with the states") test_memory();
    TEST("another locale") test_locale();
    return test_done();
}
