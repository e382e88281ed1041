/* Writes one file of each kind that halfstep_io has. The checkpoint has every format that stores weights or states.
 * Reads them on every instruction set, and goes on from them. Both give the bits of a run that never stopped.
 * scripts/compat.sh calls it for files that later versions have to read.
 *
 *   test_compat                  The test, in a scratch folder.
 *   test_compat --write FOLDER   Writes a checkpoint, a file of an optimizer, a file of states, and expected.txt.
 *   test_compat --read FOLDER    Reads what is in expected.txt. */
#define HALFSTEP_ADVANCED
#include <inttypes.h>

#include "halfstep_io.h"
#include "ref/fixture.h"
#include "scratch.h"

enum { MOST = 64, COLUMNS = 256, SAVED = 20, MORE = 10 };
enum { CHECKPOINT, SINGLE, STORE, KINDS };
static const char *const kinds[KINDS] = {"checkpoint", "optimizer.safetensors", "run.states"};

/* A tensor: its recipe, and sums of all that it stores. */
struct member {
    char recipe[64];
    int64_t rows;
    uint64_t loaded, ended;
};

static struct member members[MOST];
static int count;

static void add(int64_t rows, const char *rule, const char *weight, const char *states)
{
    if (count == MOST) {
        printf("FAIL MOST of tests/io/test_compat.c is too small\n");
        exit(1);
    }
    struct member *m = &members[count++];
    m->rows = rows;
    snprintf(m->recipe, sizeof m->recipe, "%s/%s%s%s", rule, weight, states ? "/" : "", states ? states : "");
}

/* Lists what a file of this kind gets. A checkpoint has one tensor for every weight format and for every state format,
 * and some for what rules keep besides. */
static void list_members(int kind)
{
    count = 0;
    for (int32_t row = 0; kind == CHECKPOINT && row < halfstep_format_count(); row++) {
        halfstep_format_info info = format_info(row);
        char states[32];
        snprintf(states, sizeof states, info.roles & HALFSTEP_ROLE_NONNEG ? "%.23s" : "%.23s+f32", info.name);
        if (info.roles & HALFSTEP_ROLE_WEIGHT) add(2, "adamw", info.name, NULL);
        /* Blocks of the flattened tensor begin at 4096 elements. */
        if (info.roles & HALFSTEP_ROLE_SIGNED)
            add(info.geometry == HALFSTEP_GEOMETRY_FLAT ? 16 : 2,
                info.geometry == HALFSTEP_GEOMETRY_TENSOR ? "lamb16" : "adamw", "f32", states);
    }
    add(2, "schedulefree", "int8-ecc4", "int8");
    add(2, "adamw-delayed", "bf16-kahan", "fp8");
    if (kind != CHECKPOINT) return;
    add(2, "schedulefree", "bf16-sr", "int8");
    add(2, "ranger", "bf16-ecc8", "int4");
    add(2, "lamb", "f16-sr", "int8");
    add(2, "adan", "bf16-sr", "int8");
    add(2, "muon", "bf16-sr", "int8");
    add(2, "lion", "bf16-sr", "int4");
    add(2, "adam", "bf16-sr", "int8"); /* with amsgrad */
}

struct run {
    halfstep_optimizer *o;
    halfstep_store *store;
    void *weight[MOST], *gradient[MOST];
    size_t weight_bytes[MOST];
};

/* Makes an optimizer of the members with their first weights. Its states get memory unless a file is to keep them. */
static void open_run(struct run *r, int kind)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 20};
    r->store = NULL;
    MUST(halfstep_create(&options, &r->o));
    for (int i = 0; i < count; i++) {
        int32_t group;
        char name[80];
        snprintf(name, sizeof name, "%d.%.63s", i, members[i].recipe);
        MUST(halfstep_add_group(r->o, members[i].recipe, &group));
        if (!strncmp(members[i].recipe, "adam/", 5)) MUST(halfstep_set_hyper(r->o, group, "amsgrad", 1));
        ADD_TENSOR(r->o, .group = group, .name = name, .ndim = 2, .rows = members[i].rows, .row_length = COLUMNS,
                   .gradient = "f32");
    }
    if (kind != STORE) MUST(halfstep_allocate_states(r->o));
    for (int i = 0; i < count; i++) {
        struct source s = {(uint64_t)i};
        float values[16 * COLUMNS];
        halfstep_slot_info info = slot_info(r->o, i, WEIGHT);
        r->weight_bytes[i] = (size_t)info.code_bytes;
        r->weight[i] = zeroed(r->weight_bytes[i]);
        r->gradient[i] = zeroed((size_t)members[i].rows * COLUMNS * 4);
        for (int64_t j = 0; j < members[i].rows * COLUMNS; j++) values[j] = (float)(next_unit(&s) - 0.5);
        if (kind != STORE) MUST(halfstep_write_slot(r->o, i, WEIGHT, r->weight[i], 0, members[i].rows, values));
    }
}

static void close_run(struct run *r)
{
    halfstep_store_close(r->store);
    halfstep_destroy(r->o);
    for (int i = 0; i < count; i++) {
        free(r->weight[i]);
        free(r->gradient[i]);
    }
}

/* Values that need no C library. */
static void make_steps(struct run *r, int first, int n)
{
    for (int k = first; k < first + n; k++) {
        for (int i = 0; i < count; i++) {
            struct source s = {(uint64_t)k * MOST + (uint64_t)i};
            float *g = r->gradient[i];
            for (int64_t j = 0; j < members[i].rows * COLUMNS; j++) {
                float scale = j % 3 ? 1.0f : 0x1p-8f;
                g[j] = scale * (float)(next_unit(&s) - 0.5);
            }
        }
        MUST(halfstep_step(r->o, r->weight, (const void *const *)r->gradient));
    }
}

static uint64_t mix(uint64_t hash, const void *data, size_t n)
{
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Adds the bytes of a plane to a hash, from memory or from a file of states. */
static uint64_t mix_stream(uint64_t hash, const struct run *r, int i, int32_t slot, int extra, const void *data,
                           uint64_t bytes)
{
    void *copy = NULL;
    if (!data) MUST(halfstep_read_bytes(r->o, i, slot, extra, 0, bytes, copy = zeroed((size_t)bytes + 1)));
    hash = mix(hash, data ? data : copy, (size_t)bytes);
    free(copy);
    return hash;
}

/* Returns a sum of the weight, states and numbers of one tensor. */
static uint64_t sum_of(const struct run *r, int i)
{
    uint64_t hash = mix(UINT64_C(0xcbf29ce484222325), r->weight[i], r->weight_bytes[i]);
    char name[64];
    double value;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(members[i].recipe, "/"), members[i].recipe);
    halfstep_rule_info rule = rule_info(halfstep_rule_find(name));
    for (int32_t slot = 0; slot < STATE + rule.states; slot++) {
        halfstep_slot_info info = slot_info(r->o, i, slot);
        if (slot == GRADIENT || info.format < 0) continue;
        if (slot != WEIGHT && info.code_bytes) hash = mix_stream(hash, r, i, slot, 0, info.code, info.code_bytes);
        if (info.extra_bytes) hash = mix_stream(hash, r, i, slot, 1, info.extra, info.extra_bytes);
        snprintf(name, sizeof name, "%s.grid", info.name);
        if (!info.grid) continue;
        MUST(get_scalar(r->o, i, name, &value));
        hash = mix(hash, &value, sizeof value);
    }
    for (int k = 0; k < rule.scalars; k++) {
        MUST(get_scalar(r->o, i, rule.scalar_name[k], &value));
        hash = mix(hash, &value, sizeof value);
    }
    halfstep_record c = counters_of(r->o, i);
    return mix(mix(mix(hash, &c.state_steps, 8), &c.full_steps, 8), &c.writes, 8);
}

static const char *at(const char *folder, const char *name)
{
    static char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int save(const struct run *r, int kind, const char *path, char *text, size_t size)
{
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .step = SAVED, .keep = 1, .no_links = 1};
    if (kind == SINGLE) return halfstep_write_optimizer(path, r->o, r->weight, NULL, text, size);
    int code = halfstep_begin_checkpoint(&save, path, &options, text, size);
    if (!code) code = halfstep_save_optimizer(save, r->o, r->weight, NULL, text, size);
    return code ? code : halfstep_commit_checkpoint(save, text, size);
}

static int load(struct run *r, int kind, const char *path, char *text, size_t size)
{
    halfstep_checkpoint *checkpoint;
    if (kind == SINGLE) return halfstep_read_optimizer(path, r->o, r->weight, NULL, text, size);
    if (kind == STORE) return halfstep_store_open(path, r->o, r->weight, NULL, &r->store, text, size);
    int code = halfstep_open_checkpoint(&checkpoint, path, NULL, text, size);
    if (code) return code;
    code = halfstep_load_optimizer(checkpoint, r->o, r->weight, NULL, text, size);
    halfstep_close_checkpoint(checkpoint);
    return code;
}

/* Makes a run that begins with zero states and the weights of another. */
static void open_beside(struct run *r, const struct run *first)
{
    open_run(r, STORE);
    for (int i = 0; i < count; i++) memcpy(r->weight[i], first->weight[i], r->weight_bytes[i]);
}

/* Writes a file of this kind, and lines of its tensors to the list. A file of states is stepped in place, so a run in
 * memory tells how it goes on. */
static int write_kind(const char *folder, int kind, FILE *list)
{
    char text[512] = "";
    struct run first, r;
    int code = 0;
    list_members(kind);
    if (kind == STORE) {
        open_run(&first, SINGLE);
        open_beside(&r, &first);
        code = halfstep_store_create(at(folder, kinds[kind]), r.o, r.weight, NULL, &r.store, text, sizeof text);
        if (!code) make_steps(&r, 0, SAVED);
        close_run(&r);
        open_beside(&r, &first);
        MUST(halfstep_allocate_states(r.o));
        close_run(&first);
    } else {
        open_run(&r, kind);
    }
    make_steps(&r, 0, SAVED);
    if (!code && kind != STORE) code = save(&r, kind, at(folder, kinds[kind]), text, sizeof text);
    for (int i = 0; i < count; i++) members[i].loaded = sum_of(&r, i);
    make_steps(&r, SAVED, MORE);
    for (int i = 0; i < count && !code; i++)
        fprintf(list, "%s %s %" PRId64 " %016" PRIx64 " %016" PRIx64 "\n", kinds[kind], members[i].recipe,
                members[i].rows, members[i].loaded, sum_of(&r, i));
    close_run(&r);
    if (code) printf("cannot write %s: %s\n", at(folder, kinds[kind]), text);
    return code;
}

static int write_all(const char *folder)
{
    FILE *list = fopen(at(folder, "expected.txt"), "w");
    int code = !list;
    for (int kind = 0; kind < KINDS && !code; kind++) code = write_kind(folder, kind, list);
    if (!list) printf("cannot write %s\n", at(folder, "expected.txt"));
    return (list && fclose(list)) || code;
}

/* Takes the members of a kind from the list. */
static void read_list(const char *folder, int kind)
{
    FILE *file = fopen(at(folder, "expected.txt"), "r");
    char name[32], *recipe = members[0].recipe;
    int lines = 0;
    for (count = 0; file && count < MOST; recipe = members[count].recipe) {
        struct member *m = &members[count];
        if (fscanf(file, "%31s %63s %" SCNd64 " %" SCNx64 " %" SCNx64, name, recipe, &m->rows, &m->loaded, &m->ended) !=
            5)
            break;
        lines++;
        count += !strcmp(name, kinds[kind]);
    }
    CHECK(file && feof(file) && count, "%s/expected.txt has %d lines, %d of %s", folder, lines, count, kinds[kind]);
    if (file) fclose(file);
}

static void copy_file(const char *from, const char *to)
{
    FILE *source = fopen(from, "rb"), *target = fopen(to, "wb");
    char bytes[1 << 16];
    for (size_t n; source && target && (n = fread(bytes, 1, sizeof bytes, source)) != 0;) fwrite(bytes, 1, n, target);
    if (source) fclose(source);
    if (target) fclose(target);
}

static void judge(const char *folder, int kind)
{
    char text[512] = "", path[1024];
    struct run r;
    read_list(folder, kind);
    snprintf(path, sizeof path, "%s", at(folder, kinds[kind]));
    if (kind == STORE) {
        copy_file(path, at(scratch, "copy"));
        snprintf(path, sizeof path, "%s", at(scratch, "copy"));
    }
    open_run(&r, kind);
    int code = load(&r, kind, path, text, sizeof text);
    CHECK(!code, "%s", text);
    for (int i = 0; i < count && !code; i++)
        CHECK(sum_of(&r, i) == members[i].loaded, "%s, tensor %d, %s: %016" PRIx64 " was loaded, not %016" PRIx64,
              kinds[kind], i, members[i].recipe, sum_of(&r, i), members[i].loaded);
    if (!code) make_steps(&r, SAVED, MORE);
    for (int i = 0; i < count && !code; i++)
        CHECK(sum_of(&r, i) == members[i].ended, "%s, tensor %d, %s: goes on to %016" PRIx64 ", not %016" PRIx64,
              kinds[kind], i, members[i].recipe, sum_of(&r, i), members[i].ended);
    close_run(&r);
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--write")) return write_all(argv[2]);
    const char *folder = argc == 3 && !strcmp(argv[1], "--read") ? argv[2] : NULL;
    test_init(folder ? 1 : argc, argv);
    make_scratch("compat");
    if (!folder && write_all(scratch)) return 1;
    for (int32_t i = 0; i < halfstep_isa_count(); i++) {
        char title[96];
        if (!halfstep_isa_available(i)) continue;
        snprintf(title, sizeof title, "files of every kind are read and gone on from, %s", halfstep_isa_name(i));
        TEST(title) {
            MUST(halfstep_set_isa(halfstep_isa_name(i)));
            for (int kind = 0; kind < KINDS; kind++) judge(folder ? folder : scratch, kind);
            test_close_group();
        }
    }
    return test_done();
}
