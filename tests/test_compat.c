/* Loads the checkpoints in tests/compat, tests/compat-2 and so on, which cover every format that stores weights or
 * states. Goes on from each on every instruction set, and compares the bits with its expected.txt. Files of an older
 * version must stay readable: a new format gets a checkpoint beside the existing ones.
 *
 *   test_compat                  The test. HALFSTEP_SOURCE is the source tree, else the working directory.
 *   test_compat --write FOLDER   Writes a checkpoint and its list, of all that no other folder has. FOLDER is the first
 *                                unused name, or an older folder whose bits are meant to change. */
#define HALFSTEP_ADVANCED
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

#include "halfstep_io.h"
#include "ref/fixture.h"

enum { MOST = 64, COLUMNS = 256, SAVED = 20, MORE = 10, MOST_FOLDERS = 99 };

struct member {
    char recipe[64];
    int64_t rows;
    uint64_t loaded, ended; /* sums of all that it stores */
};

/* All that there should be, and those of the folder at hand. */
static struct member wanted[MOST], members[MOST];
static int wanted_count, count;

static void add(int64_t rows, const char *rule, const char *weight, const char *states)
{
    if (wanted_count == MOST) {
        printf("FAIL MOST of tests/test_compat.c is too small\n");
        exit(1);
    }
    struct member *m = &wanted[wanted_count++];
    m->rows = rows;
    snprintf(m->recipe, sizeof m->recipe, "%s/%s%s%s", rule, weight, states ? "/" : "", states ? states : "");
}

/* One tensor for every weight format and for every state format, and some for what rules keep besides. */
static void list_wanted(void)
{
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        halfstep_format_info info = format_info(row);
        char states[32];
        snprintf(states, sizeof states, info.roles & HALFSTEP_ROLE_NONNEG ? "%.23s" : "%.23s+f32", info.name);
        if (info.roles & HALFSTEP_ROLE_WEIGHT) add(2, "adamw", info.name, NULL);
        /* Blocks of the flattened tensor begin at 4096 elements. */
        if (info.roles & HALFSTEP_ROLE_SIGNED)
            add(info.geometry == HALFSTEP_GEOMETRY_FLAT ? 16 : 2,
                info.geometry == HALFSTEP_GEOMETRY_TENSOR ? "lamb16" : "adamw", "f32", states);
    }
    add(2, "schedulefree", "bf16-sr", "int8");
    add(2, "schedulefree", "int8-ecc4", "int8");
    add(2, "ranger", "bf16-ecc8", "int4");
    add(2, "adamw-delayed", "bf16-kahan", "fp8");
    add(2, "lamb", "f16-sr", "int8");
    add(2, "adan", "bf16-sr", "int8");
    add(2, "muon", "bf16-sr", "int8");
    add(2, "lion", "bf16-sr", "int4");
    add(2, "adam", "bf16-sr", "int8"); /* with amsgrad */
}

struct run {
    halfstep_optimizer *o;
    void *weight[MOST], *gradient[MOST];
    size_t weight_bytes[MOST];
};

static void open_run(struct run *r)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 20};
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
    MUST(halfstep_allocate_states(r->o));
    for (int i = 0; i < count; i++) {
        halfstep_slot_info info = slot_info(r->o, i, WEIGHT);
        r->weight_bytes[i] = (size_t)info.code_bytes;
        r->weight[i] = zeroed(r->weight_bytes[i]);
        r->gradient[i] = zeroed((size_t)members[i].rows * COLUMNS * 4);
    }
}

static void close_run(struct run *r)
{
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

/* Weight, states and numbers of one tensor. */
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
        if (info.code) hash = mix(hash, info.code, (size_t)info.code_bytes);
        if (info.extra) hash = mix(hash, info.extra, (size_t)info.extra_bytes);
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

static int write_all(const char *folder)
{
    static const char *const old[] = {"checkpoint-20/manifest.json",
                                      "checkpoint-20/model.safetensors",
                                      "checkpoint-20/optimizer.safetensors",
                                      "checkpoint-20",
                                      "manifest.json",
                                      "expected.txt"};
    char text[512] = "";
    struct run r;
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .step = SAVED, .keep = 1, .no_links = 1};
    for (size_t i = 0; i < COUNT(old); i++) remove(at(folder, old[i]));
    open_run(&r);
    for (int i = 0; i < count; i++) {
        struct source s = {(uint64_t)i};
        float values[16 * COLUMNS];
        for (int64_t j = 0; j < members[i].rows * COLUMNS; j++) values[j] = (float)(next_unit(&s) - 0.5);
        MUST(halfstep_write_slot(r.o, i, WEIGHT, r.weight[i], 0, members[i].rows, values));
    }
    make_steps(&r, 0, SAVED);
    int code = halfstep_begin_checkpoint(&save, folder, &options, text, sizeof text);
    if (!code) code = halfstep_save_optimizer(save, r.o, r.weight, NULL, text, sizeof text);
    if (!code) code = halfstep_commit_checkpoint(save, text, sizeof text);
    FILE *file = code ? NULL : fopen(at(folder, "expected.txt"), "w");
    if (!file) {
        printf("cannot write %s: %s\n", folder, text);
        return 1;
    }
    for (int i = 0; i < count; i++) members[i].loaded = sum_of(&r, i);
    make_steps(&r, SAVED, MORE);
    for (int i = 0; i < count; i++)
        fprintf(file, "%d %s %016" PRIx64 " %016" PRIx64 "\n", i, members[i].recipe, members[i].loaded, sum_of(&r, i));
    close_run(&r);
    return fclose(file) != 0;
}

static void judge(const char *folder)
{
    char text[512] = "";
    struct run r;
    halfstep_checkpoint *checkpoint;
    open_run(&r);
    int code = halfstep_open_checkpoint(&checkpoint, folder, NULL, text, sizeof text);
    CHECK(!code, "%s", text);
    if (!code) {
        code = halfstep_load_optimizer(checkpoint, r.o, r.weight, NULL, text, sizeof text);
        CHECK(!code, "%s", text);
        halfstep_close_checkpoint(checkpoint);
    }
    for (int i = 0; i < count && !code; i++)
        CHECK(sum_of(&r, i) == members[i].loaded, "tensor %d, %s: %016" PRIx64 " was loaded, not %016" PRIx64, i,
              members[i].recipe, sum_of(&r, i), members[i].loaded);
    if (!code) make_steps(&r, SAVED, MORE);
    for (int i = 0; i < count && !code; i++)
        CHECK(sum_of(&r, i) == members[i].ended, "tensor %d, %s: goes on to %016" PRIx64 ", not %016" PRIx64, i,
              members[i].recipe, sum_of(&r, i), members[i].ended);
    close_run(&r);
}

static struct member *wanted_member(const char *recipe)
{
    for (int i = 0; i < wanted_count; i++)
        if (!strcmp(wanted[i].recipe, recipe)) return &wanted[i];
    return NULL;
}

/* The members of a folder, in the order of its list; 0 where there is no folder, -1 where a line is none of
 * `wanted`. */
static int read_list(const char *folder)
{
    FILE *file = fopen(at(folder, "expected.txt"), "r");
    int number, result = file != NULL;
    char recipe[64];
    uint64_t loaded, ended;
    count = 0;
    while (file && count < MOST &&
           fscanf(file, "%d %63s %" SCNx64 " %" SCNx64, &number, recipe, &loaded, &ended) == 4) {
        const struct member *m = wanted_member(recipe);
        if (number != count || !m) result = -1;
        if (result < 0) break;
        members[count] = *m;
        members[count].loaded = loaded;
        members[count++].ended = ended;
    }
    if (file && !feof(file)) result = -1;
    if (file) fclose(file);
    return result && !count ? -1 : result;
}

/* tests/compat, tests/compat-2, ... beside a source tree. */
static const char *folder_at(int index)
{
    static char folder[900];
    const char *source = getenv("HALFSTEP_SOURCE");
    snprintf(folder, sizeof folder, index ? "%s/tests/compat-%d" : "%s/tests/compat", source ? source : ".", index + 1);
    return folder;
}

/* Marks what the folders have, but for one or NULL, by its sum, which is never 0. */
static void read_folders(const char *but)
{
    for (int index = 0; index < MOST_FOLDERS; index++) {
        struct stat a, b;
        const char *folder = folder_at(index);
        if (but && !stat(folder, &a) && !stat(but, &b) && a.st_ino == b.st_ino && a.st_dev == b.st_dev) continue;
        int result = read_list(folder);
        if (!result) return;
        CHECK(result > 0, "%s/expected.txt has a line of a tensor that test_compat.c does not list, or out of order",
              folder);
        for (int i = 0; i < count; i++) wanted_member(members[i].recipe)->loaded = members[i].loaded;
    }
}

/* The members are what no folder but this one has. */
static int write_missing(const char *folder)
{
    read_folders(folder);
    count = 0;
    for (int i = 0; i < wanted_count; i++)
        if (!wanted[i].loaded) members[count++] = wanted[i];
    if (count) return write_all(folder);
    printf("other folders have every format\n");
    return 1;
}

int main(int argc, char **argv)
{
    list_wanted();
    if (argc == 3 && !strcmp(argv[1], "--write")) return write_missing(argv[2]);
    test_init(argc, argv);
    int folders = 0;
    while (folders < MOST_FOLDERS && read_list(folder_at(folders))) folders++;
    TEST("the lists name every format") {
        read_folders(NULL);
        CHECK(folders > 0, "%s/expected.txt is missing", folder_at(0));
        for (int i = 0; i < wanted_count; i++)
            CHECK(wanted[i].loaded, "no checkpoint has %s: 'test_compat --write tests/compat-%d' (docs/adding.md)",
                  wanted[i].recipe, folders + 1);
    }
    for (int32_t i = 0; i < halfstep_isa_count(); i++) {
        char title[96];
        if (!halfstep_isa_available(i)) continue;
        snprintf(title, sizeof title, "a checkpoint of every format is loaded and gone on from, %s",
                 halfstep_isa_name(i));
        TEST(title) {
            MUST(halfstep_set_isa(halfstep_isa_name(i)));
            for (int index = 0; index < folders; index++) {
                CHECK(read_list(folder_at(index)) > 0, "%s/expected.txt is no list", folder_at(index));
                judge(folder_at(index));
            }
            test_close_group();
        }
    }
    return test_done();
}
