/* Tests the public interface: every error that include/halfstep.h documents, sizes of structs, slots, and the promises
 * about halves of steps, threads, counters and memory. Over 500 lines because each promise is one short group. A run
 * without arguments resumes a fifth of the recipes; --short: a 37th; --all: all. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED

#ifndef _WIN32
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#include "ref/fixture.h"

/* One test starts threads in the child of a process with threads. TSan refuses that unless it is told otherwise. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "die_after_fork=0"; }

static halfstep_tensor matrix(const char *name, int64_t rows, int64_t row_length)
{
    return (halfstep_tensor){.struct_size = sizeof(halfstep_tensor),
                             .name = name,
                             .ndim = 2,
                             .rows = rows,
                             .row_length = row_length,
                             .gradient = "f32"};
}

/* ---- Tables ------------------------------------------------------------------------------------------------------ */

static void test_tables(void)
{
    TEST("version, ABI and error texts") {
        EQUAL(halfstep_version(),
              HALFSTEP_VERSION_MAJOR * 10000 + HALFSTEP_VERSION_MINOR * 100 + HALFSTEP_VERSION_PATCH);
        EQUAL(halfstep_abi(), HALFSTEP_ABI);
        const int codes[] = {0, -10, -11, -12, -13, -14, -15, -20, -30, -40, -41, -42, -50};
        for (size_t i = 0; i < COUNT(codes); i++)
            CHECK(*halfstep_strerror(codes[i]) && strcmp(halfstep_strerror(codes[i]), halfstep_strerror(12345)),
                  "code %d has no text", codes[i]);
    }
    TEST("infos need their struct_size and a row that exists") {
        SIZED(halfstep_rule_info, rule);
        SIZED(halfstep_format_info, format);
        SIZED(halfstep_hyper_info, hyper);
        EXPECT(halfstep_get_rule_info(halfstep_rule_count(), &rule), ARGUMENT);
        EXPECT(halfstep_get_rule_info(-1, &rule), ARGUMENT);
        EXPECT(halfstep_get_format_info(halfstep_format_count(), &format), ARGUMENT);
        EXPECT(halfstep_get_hyper_info(0, -1, &hyper), ARGUMENT);
        EXPECT(halfstep_get_hyper_info(-1, 0, &hyper), ARGUMENT);
        EXPECT(halfstep_get_rule_info(0, &rule), OK);
        EXPECT(halfstep_get_hyper_info(0, rule.hypers, &hyper), ARGUMENT);
        rule.struct_size--, format.struct_size = 0, hyper.struct_size++;
        EXPECT(halfstep_get_rule_info(0, &rule), ARGUMENT);
        EXPECT(halfstep_get_format_info(0, &format), ARGUMENT);
        EXPECT(halfstep_get_hyper_info(0, 0, &hyper), ARGUMENT);
        CHECK(halfstep_rule_find("nonsense") == -1 && halfstep_rule_find(NULL) == -1, "a rule that is none was found");
        CHECK(halfstep_format_find("") == -1 && halfstep_format_find(NULL) == -1, "a format that is none was found");
        CHECK(!halfstep_choice_value("decay", 99) && !halfstep_choice_value("nonsense", 0) &&
                  !halfstep_choice_value(NULL, 0) && !halfstep_choice_value("scan", -1),
              "choices go on past their end");
        CHECK(!halfstep_isa_name(-1) && !halfstep_isa_name(halfstep_isa_count()),
              "instruction sets go on past their end");
        EXPECT(halfstep_set_isa("nonsense"), NAME);
    }
    TEST("labels are identifiers, no two alike, and the titles of switches say so") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            halfstep_rule_info rule = rule_info(row);
            CHECK(rule.label && *rule.label >= 'A' && *rule.label <= 'Z' &&
                      strspn(rule.label, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789") ==
                          strlen(rule.label),
                  "%s: the label '%s' names no class", rule.name, rule.label ? rule.label : "(null)");
            for (int32_t i = 0; i < row; i++) {
                halfstep_rule_info other = rule_info(i);
                CHECK(strcmp(rule.label, other.label), "%s and %s have one label, %s", rule.name, other.name,
                      rule.label);
            }
            for (int32_t i = 0; i < rule.hypers; i++) {
                SIZED(halfstep_hyper_info, hyper);
                MUST(halfstep_get_hyper_info(row, i, &hyper));
                if (strncmp(hyper.title, "0:", 2) && strncmp(hyper.title, "1:", 2)) continue;
                CHECK(hyper.minimum == 0 && hyper.maximum == 1 && !hyper.exclusive_maximum &&
                          (hyper.initial == 0 || hyper.initial == 1),
                      "%s: '%s' of %s is no switch", rule.name, hyper.title, hyper.name);
            }
        }
    }
    TEST("names have the ids that tensors get") {
        halfstep_tensor d = matrix("layer.weight", 2, 2);
        halfstep_optimizer *o = optimizer_of("adamw", &d);
        halfstep_record c = counters_of(o, 0);
        CHECK(halfstep_name_id("layer.weight") == c.id && c.id, "id %016llx", (unsigned long long)c.id);
        /* The hash must never change, because files keep ids. */
        CHECK(c.id == 0x3e70bd8e9d8d95ba, "id %016llx of a name changed", (unsigned long long)c.id);
        CHECK(halfstep_name_id("layer.bias") != c.id && halfstep_name_id("") && !halfstep_name_id(NULL),
              "ids of other names");
        halfstep_destroy(o);
    }
    TEST("recipes") {
        char text[64];
        static const struct {
            const char *recipe, *full;
        } good[] = {{"adamw", "adamw/f32/f32"},
                    {"adamw/bf16", "adamw/bf16/bf16-sr"},
                    {"lion/bf16-kahan", "lion/bf16-kahan/bf16-sr"},
                    {"adamw/bf16-sr/int8+bf16-sr", "adamw/bf16-sr/int8+bf16-sr"},
                    {"adam/f32/int8+int8", "adam/f32/int8"},
                    {"sgd", "sgd/f32/f32"},
                    {"adamw/f16/bf16", "adamw/f16/bf16"},
                    {"lamb16", "lamb16/f32/fp8+fp8-e5m2"},
                    {"adan/bf16-sr/int8", "adan/bf16-sr/int8+int8+int8+bf16-sr"},
                    {"adan/f32/f32", "adan/f32/f32"},
                    {"ranger/bf16-kahan/int8", "ranger/bf16-kahan/int8"},
                    {"ema/bf16-ecc8", "ema/bf16-ecc8"},
                    {"rmsprop/f32/int8", "rmsprop/f32/int8"},
                    {"adamw/f32/bf16+f32+int8", "adamw/f32/bf16+f32+int8"}};
        for (size_t i = 0; i < COUNT(good); i++) {
            EXPECT(halfstep_recipe_full(good[i].recipe, text, sizeof text), OK);
            CHECK(!strcmp(text, good[i].full), "%s became %s", good[i].recipe, text);
        }
        static const char *const unknown[] = {
            "",           "adamx",  "adamw/",     "adamw/bf17", "adamw/f32/x", "adamw/f32/f32/f32", "adamw/f32/f32+",
            "adamw//f32", " adamw", "adamw/f32/", "ADAMW"};
        for (size_t i = 0; i < COUNT(unknown); i++) EXPECT(halfstep_recipe_full(unknown[i], text, sizeof text), NAME);
        static const char *const impossible[] = {"adamw/int8",
                                                 "adamw/dyn4",
                                                 "lion/f32/f32+f32",
                                                 "adamw/f32/f16",
                                                 "adamw/f32/f32+f32+f32+f32",
                                                 "adamw/f32/f32+bf16-kahan",
                                                 "adan/f32/int8+int8+int8+int8",
                                                 "ema/f32/f32"};
        for (size_t i = 0; i < COUNT(impossible); i++)
            EXPECT(halfstep_recipe_full(impossible[i], text, sizeof text), UNSUPPORTED);
        CHECK(halfstep_recipe_full("adamw", text, 5) != OK, "a recipe fits into too little room");
        static const char *const sound[] = {"muon/f32/int8", "muon/f32/f32+int4", "muon/bf16-sr", "adamw/f32/int4"};
        char caveat[256];
        for (size_t i = 0; i < COUNT(sound); i++) {
            EXPECT(halfstep_recipe_caveat(sound[i], caveat, sizeof caveat), OK);
            CHECK(!*caveat, "%s: %s", sound[i], caveat);
        }
        EXPECT(halfstep_recipe_caveat("muon/f32/int4+int8", caveat, sizeof caveat), OK);
        CHECK(!strncmp(caveat, "muon: momentum_buffer in int4 ends ", 35) && strstr(caveat, "int8"), "%s", caveat);
        EXPECT(halfstep_recipe_caveat("muon/f32/int4", caveat, 35), RANGE);
        EXPECT(halfstep_recipe_caveat("muon/f32/int5", caveat, sizeof caveat), NAME);
        uint64_t w, e, s;
        EXPECT(halfstep_recipe_bytes("adamw/bf16-ecc8/int8", 2, 10, 64, &w, &e, &s), OK);
        CHECK(w == 1280 && e == 640 && s == 2 * (640 + 40), "bytes %d %d %d", (int)w, (int)e, (int)s);
        EXPECT(halfstep_recipe_bytes("adamw/bf16-ecc8/int8", 2, 10, 33, &w, NULL, &s), OK);
        CHECK(w == 660 && s == 2 * (330 + 40), "bytes %d %d", (int)w, (int)s);
        EXPECT(halfstep_recipe_bytes("adamw/bf16-sr/int8", 1, 10000, 1, NULL, NULL, &s), OK);
        EQUAL(s, 40000);
        EXPECT(halfstep_recipe_bytes("adamw/bf16-sr/int8", 1, 1, 10000, NULL, NULL, &s), OK);
        EQUAL(s, 2 * (10000 + 626));
        EXPECT(halfstep_recipe_bytes("adamw", 2, -1, 10, &w, &e, &s), SHAPE);
        EXPECT(halfstep_recipe_bytes("adamw", 2, INT64_MAX / 2, 16, &w, &e, &s), SHAPE);
    }
    TEST("schedule factors") {
        double f;
        EXPECT(halfstep_schedule_factor("constant", 3, 0, 0, 0, 0, 0, &f), OK);
        EQUAL(f, 1);
        EXPECT(halfstep_schedule_factor("nonsense", 3, 0, 0, 0, 0, 0, &f), NAME);
        EXPECT(halfstep_schedule_factor("linear", 3, -1, 0, 0, 0, 0, &f), RANGE);
        EXPECT(halfstep_schedule_factor("linear", 3, 0, 10, NAN, 0, 0, &f), RANGE);
        uint32_t word;
        EXPECT(halfstep_random_words("nonsense", 0, 0, 0, 0, 0, &word, 1), NAME);
        EXPECT(halfstep_bf16_stochastic(NULL, NULL, 0, NULL), OK);
    }
}

/* ---- Handles, groups, tensors ------------------------------------------------------------------------------------ */

static void test_building(void)
{
    TEST("options are checked") {
        halfstep_optimizer *o = (halfstep_optimizer *)&o;
        halfstep_options options = {.struct_size = sizeof options, .threads = 1025};
        EXPECT(halfstep_create(&options, &o), RANGE);
        CHECK(!o, "the handle is not NULL after an error");
        options.threads = -1;
        EXPECT(halfstep_create(&options, &o), RANGE);
        options.threads = 1;
        options.struct_size = 0;
        EXPECT(halfstep_create(&options, &o), ARGUMENT);
        MUST(halfstep_create(NULL, &o));
        EXPECT_NAMED(o, halfstep_set_threads(o, 1025), RANGE, "1025");
        EXPECT(halfstep_set_threads(o, -1), RANGE);
        EXPECT(halfstep_set_threads(o, 1024), OK);
        EXPECT(halfstep_set_threads(o, 0), OK);
        halfstep_destroy(o);
        halfstep_destroy(NULL);
    }
    TEST("devices by name, and what the processor has of them") {
        halfstep_optimizer *o;
        int32_t group;
        halfstep_options options = {.struct_size = sizeof options, .device = "cpu"};
        SIZED(halfstep_device_info, info);
        void *memory;
        double lr = 0.25, infinite = INFINITY;
        float values[4] = {1, 2, 3, 4};
        MUST(halfstep_create(&options, &o));
        MUST(halfstep_add_group(o, "adamw", &group));
        EXPECT(halfstep_synchronize(o), OK);
        EXPECT(halfstep_set_stream(o, NULL), OK);
        EXPECT_NAMED(o, halfstep_set_stream(o, &options), ARGUMENT, "no streams");
        EXPECT_NAMED(o, halfstep_bind_hyper(o, 0, "beta1", &lr), NAME, "'beta1' cannot be bound");
        EXPECT_NAMED(o, halfstep_bind_hyper(o, 0, "gradient_scale", &lr), NAME, "gradient_scale");
        EXPECT_NAMED(o, halfstep_bind_hyper(o, 7, "lr", &lr), ARGUMENT, "no group 7");
        EXPECT_NAMED(o, halfstep_add_group(o, "lion", &group), OK, "");
        ADD_TENSOR(o, .name = "w", .ndim = 0, .rows = 1, .gradient = "f32");
        MUST(halfstep_bind_hyper(o, ALL_GROUPS, "lr", &lr));
        EXPECT_NAMED(o, halfstep_add_group(o, "lion", &group), ORDER, "before the lr of one is bound");
        MUST(halfstep_allocate_states(o));
        void *weights[1] = {values};
        const void *none[1] = {NULL};
        MUST(halfstep_step(o, weights, none));
        EQUAL(get_hyper(o, 0, "lr"), lr);
        MUST(halfstep_bind_hyper(o, 0, "lr", NULL));
        lr = 0.5;
        MUST(halfstep_step(o, weights, none));
        EQUAL(get_hyper(o, 0, "lr"), 1e-3);
        MUST(halfstep_bind_hyper(o, ALL_GROUPS, "gradient_scale", &infinite));
        EXPECT(halfstep_step(o, weights, none), HALFSTEP_NONFINITE);
        MUST(halfstep_bind_hyper(o, ALL_GROUPS, "gradient_scale", NULL));
        EXPECT(halfstep_step(o, weights, none), OK);
        MUST(halfstep_device_allocate(o, sizeof values, &memory));
        MUST(halfstep_device_copy(o, memory, values, sizeof values));
        CHECK((uintptr_t)memory % 64 == 0 && !memcmp(memory, values, sizeof values), "memory of the device");
        halfstep_device_release(o, memory);
        halfstep_destroy(o);
        EXPECT(halfstep_get_device_info("cpu", &info), NAME);
        EXPECT(halfstep_get_device_info("tpu", &info), NAME);
        EXPECT(halfstep_get_device_info("cuda:", &info), NAME);
        EXPECT(halfstep_get_device_info("cuda", &info), OK);
        EQUAL(info.minimum_driver, 12000);
        CHECK(info.usable || halfstep_error_detail(NULL)[0], "nothing is said of a device that is not usable");
        info.struct_size = 3;
        EXPECT(halfstep_get_device_info("cuda", &info), ARGUMENT);
        options.device = "tpu";
        EXPECT(halfstep_create(&options, &o), NAME);
        options.device = NULL;
        options.stream = &options;
        EXPECT(halfstep_create(&options, &o), ARGUMENT);
    }
    TEST("hyper-parameters and choices are checked, and a failed call changes nothing") {
        halfstep_optimizer *o;
        int32_t g, h;
        double value;
        MUST(halfstep_create(NULL, &o));
        EXPECT_NAMED(o, halfstep_add_group(o, "adamx", &g), NAME, "adamx");
        EXPECT_NAMED(o, halfstep_add_group(o, "adamw/int8", &g), UNSUPPORTED, "int8");
        MUST(halfstep_add_group(o, "adamw", &g));
        MUST(halfstep_add_group(o, "sgd", &h));
        CHECK(g == 0 && h == 1, "groups are %d and %d", (int)g, (int)h);
        EXPECT_NAMED(o, halfstep_set_hyper(o, g, "momentum", 0.9), NAME, "momentum");
        EXPECT_NAMED(o, halfstep_set_hyper(o, g, "lr", -1), RANGE, "lr");
        EXPECT(halfstep_set_hyper(o, g, "lr", NAN), RANGE);
        EXPECT(halfstep_set_hyper(o, g, "lr", INFINITY), RANGE);
        EXPECT(halfstep_set_hyper(o, g, "beta1", 1), RANGE);
        EXPECT(halfstep_set_hyper(o, 2, "lr", 1), ARGUMENT);
        EXPECT(halfstep_set_hyper(o, -2, "lr", 1), ARGUMENT);
        EXPECT(halfstep_set_hyper(o, g, "clip_norm", 1), ARGUMENT);
        EXPECT(halfstep_set_hyper(o, ALL_GROUPS, "nonsense", 1), NAME);
        EXPECT(halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", -1), RANGE);
        EQUAL(get_hyper(o, g, "lr"), 1e-3);
        EXPECT(halfstep_get_hyper(o, g, "nonsense", &value), NAME);
        MUST(halfstep_set_hyper(o, ALL_GROUPS, "lr", 0.25));
        MUST(halfstep_set_hyper(o, ALL_GROUPS, "momentum", 0.5));
        for (int i = 0; i < 2; i++) {
            CHECK(get_hyper(o, i, "lr") == 0.25, "group %d: lr is %g", i, get_hyper(o, i, "lr"));
        }
        /* Checks the bounds of every hyper-parameter, taken from the table itself. */
        for (int32_t group = 0; group < 2; group++) {
            int32_t rule = halfstep_rule_find(group ? "sgd" : "adamw");
            SIZED(halfstep_hyper_info, info);
            for (int32_t i = 0; halfstep_get_hyper_info(rule, i, &info) == OK; i++) {
                int32_t where = info.per_optimizer ? ALL_GROUPS : group;
                EXPECT(halfstep_set_hyper(o, where, info.name, info.minimum), OK);
                EXPECT(halfstep_set_hyper(o, where, info.name, info.maximum), info.exclusive_maximum ? RANGE : OK);
                EXPECT(halfstep_set_hyper(o, where, info.name, info.minimum - 1), RANGE);
                EXPECT(halfstep_set_hyper(o, where, info.name, info.maximum * 1.001 + 1), RANGE);
            }
        }
        EXPECT_NAMED(o, halfstep_set_choice(o, g, "decay", "nonsense"), NAME, "nonsense");
        EXPECT_NAMED(o, halfstep_set_choice(o, g, "nonsense", "l2"), NAME, "nonsense");
        EXPECT(halfstep_set_choice(o, g, "scan", "scan"), ARGUMENT);
        EXPECT(halfstep_set_choice(o, 7, "decay", "l2"), ARGUMENT);
        MUST(halfstep_set_choice(o, ALL_GROUPS, "decay", "l2"));
        CHECK(!strcmp(halfstep_get_choice(o, g, "decay"), "l2") && !strcmp(halfstep_get_choice(o, h, "decay"), "l2"),
              "decay is not l2");
        CHECK(!halfstep_get_choice(o, g, "nonsense") && !halfstep_get_choice(o, 7, "decay"),
              "a choice that is none has a value");
        CHECK(!strcmp(halfstep_get_choice(o, ALL_GROUPS, "scan"), "scan"), "scan is not the default");
        halfstep_destroy(o);
    }
    TEST("shapes, shards and ids are checked") {
        enum { PLAIN, BLOCKS };
#define TENSOR(title, dimensions, n, length, ...) \
    {.struct_size = sizeof(halfstep_tensor),      \
     .name = title,                               \
     .ndim = dimensions,                          \
     .rows = n,                                   \
     .row_length = length,                        \
     __VA_ARGS__}
#define PART(title, which, row, rows, column, columns)                                             \
    TENSOR(title, 2, 10, 100, .gradient = "f32", .group = which, .first_row = row, .n_rows = rows, \
           .first_column = column, .n_columns = columns)
#define WHOLE(title, dimensions, n, length) TENSOR(title, dimensions, n, length, .gradient = "f32")
        static const struct {
            halfstep_tensor tensor;
            int code;
            const char *says;
        } rows[] = {
            {{.struct_size = 8, .name = "w", .ndim = 2, .rows = 10, .row_length = 100, .gradient = "f32"},
             ARGUMENT,
             ""},
            {TENSOR("w", 2, 10, 100, .gradient = "f32", .may_be_empty = 2), ARGUMENT, "may_be_empty = 2"},
            {WHOLE(NULL, 2, 10, 100), ARGUMENT, ""},
            {TENSOR("w", 2, 10, 100, .gradient = "f32", .group = 2), ARGUMENT, ""},
            {TENSOR("w", 2, 10, 100, .gradient = "nonsense"), NAME, "w"},
            {TENSOR("w", 2, 10, 100, .gradient = NULL), ARGUMENT, "gradient is NULL"},
            {TENSOR("w", 2, 10, 100, .gradient = "int8"), UNSUPPORTED, ""},
            {WHOLE("enormous", 2, -1, 100), SHAPE, "enormous"},
            {WHOLE("enormous", 2, 10, -1), SHAPE, "enormous"},
            {WHOLE("enormous", 2, INT64_MAX, 1), SHAPE, "enormous"},
            {WHOLE("enormous", 2, 1, INT64_MAX), SHAPE, "enormous"},
            {WHOLE("enormous", 2, INT64_MAX / 100, 101), SHAPE, "enormous"},
            {WHOLE("enormous", 2, (int64_t)1 << 32, (int64_t)1 << 32), SHAPE, "enormous"},
            {WHOLE("enormous", 2, (int64_t)1 << 40, (int64_t)1 << 20), SHAPE, "enormous"},
            {PART("part", PLAIN, -1, 5, 0, 100), SHAPE, "part"},
            {PART("part", PLAIN, 0, 11, 0, 100), SHAPE, "part"},
            {PART("part", PLAIN, 6, 5, 0, 100), SHAPE, "part"},
            {PART("part", PLAIN, 0, 10, 0, 101), SHAPE, "part"},
            {PART("part", PLAIN, 0, 10, -1, 5), SHAPE, "part"},
            {PART("part", PLAIN, 0, 10, 50, 51), SHAPE, "part"},
            {PART("part", PLAIN, INT64_MAX, 1, 0, 100), SHAPE, "part"},
            {PART("part", PLAIN, 0, 10, INT64_MAX, 1), SHAPE, "part"},
            {PART("part", PLAIN, 0, -1, 0, 100), SHAPE, "part"},
            /* Block formats cut on blocks only; others anywhere; the row's end is always a cut. */
            {PART("cut", BLOCKS, 0, 10, 33, 67), SHAPE, "33"},
            {PART("cut", BLOCKS, 0, 10, 32, 33), SHAPE, ""},
            {PART("cut", BLOCKS, 0, 10, 32, 68), OK, ""},
            {PART("anywhere", PLAIN, 0, 10, 33, 20), OK, ""},
            /* Tensors of one dimension have n rows of 1 or, from 4096 elements on, one row. */
            {WHOLE("vector", 1, 1, 4095), SHAPE, ""},
            {WHOLE("vector", 1, 4095, 1), OK, ""},
            {WHOLE("flat", 1, 1, 4096), OK, ""},
            {WHOLE("negative", -1, 1, 4096), SHAPE, ""},
            {TENSOR("empty", 2, 0, 10, .gradient = "f32", .may_be_empty = 1), OK, ""},
            {WHOLE("flat", 2, 3, 3), DUPLICATE, "flat"},
            {TENSOR("other", 2, 3, 3, .gradient = "f32", .id = 77), OK, ""},
            {TENSOR("third", 2, 3, 3, .gradient = "f32", .id = 77), DUPLICATE, "third"},
        };
        halfstep_optimizer *o = new_optimizer("adamw/bf16-sr/bf16-sr", 0, 0);
        int32_t index;
        MUST(halfstep_add_group(o, "adamw/bf16-sr/int8", &index));
        for (size_t i = 0; i < COUNT(rows); i++)
            CHECK(halfstep_add_tensor(o, &rows[i].tensor, &index) == rows[i].code &&
                      (rows[i].code == OK || strstr(halfstep_error_detail(o), rows[i].says)),
                  "row %zu: not %d and '%s' but '%s'", i, rows[i].code, rows[i].says, halfstep_error_detail(o));
        EQUAL(halfstep_tensor_count(o), 6);
        CHECK(halfstep_tensor_find(o, "other") == 5 && halfstep_tensor_find(o, "third") == -1,
              "tensors are not found by name");
        halfstep_destroy(o);
    }
    TEST("groups and tensors tell what they were added as") {
        halfstep_optimizer *o;
        int32_t g, h;
        char text[64];
        MUST(halfstep_create(NULL, &o));
        CHECK(halfstep_group_count(o) == 0 && halfstep_group_count(NULL) == 0, "groups of an empty handle");
        MUST(halfstep_add_group(o, "adamw/bf16-sr/int8", &g));
        MUST(halfstep_add_group(o, "lion", &h));
        EQUAL(halfstep_group_count(o), 2);
        for (int i = 0; i < 2; i++) {
            char full[64];
            MUST(halfstep_recipe_full(i ? "lion" : "adamw/bf16-sr/int8", full, sizeof full));
            EXPECT(halfstep_get_group_recipe(o, i, text, sizeof text), OK);
            CHECK(!strcmp(text, full), "group %d is %s, not %s", i, text, full);
        }
        EXPECT_NAMED(o, halfstep_get_group_recipe(o, 2, text, sizeof text), ARGUMENT, "2");
        EXPECT_NAMED(o, halfstep_get_group_recipe(o, 0, text, 5), RANGE, "5");
        halfstep_tensor t = matrix("whole", 7, 64), found = {.struct_size = sizeof found};
        t.group = h;
        EXPECT(halfstep_get_tensor(o, add_tensor(o, &t), &found), OK);
        CHECK(!strcmp(found.name, "whole") && found.name != t.name && found.group == h && found.ndim == 2 &&
                  found.id == halfstep_name_id("whole") && found.rows == 7 && found.row_length == 64 &&
                  !found.first_row && found.n_rows == 7 && !found.first_column && found.n_columns == 64 &&
                  !strcmp(found.gradient, t.gradient),
              "a whole tensor");
        t = matrix("part", 7, 64);
        t.id = 5, t.first_row = 2, t.n_rows = 3, t.first_column = 32, t.n_columns = 32;
        EXPECT(halfstep_get_tensor(o, add_tensor(o, &t), &found), OK);
        CHECK(found.group == g && found.id == 5 && found.first_row == 2 && found.n_rows == 3 &&
                  found.first_column == 32 && found.n_columns == 32 && found.rows == 7 && found.row_length == 64,
              "a part of a tensor");
        EXPECT_NAMED(o, halfstep_get_tensor(o, 2, &found), ARGUMENT, "2");
        found.struct_size = 5;
        EXPECT(halfstep_get_tensor(o, 0, &found), ARGUMENT);
        halfstep_destroy(o);
    }
    TEST("sgd's momentum decides about its state until states exist") {
        halfstep_optimizer *o = new_optimizer("sgd/bf16-sr/int8", 0, 0);
        halfstep_tensor t = matrix("w", 4, 64);
        uint64_t bytes;
        add_tensor(o, &t);
        halfstep_slot_info info = slot_info(o, 0, STATE);
        CHECK(info.format == -1 && info.code_bytes == 0, "without momentum the state takes %d bytes",
              (int)info.code_bytes);
        MUST(halfstep_set_hyper(o, 0, "momentum", 0.9));
        info = slot_info(o, 0, STATE);
        CHECK(info.format >= 0 && info.code_bytes == 256,
              "with momentum, set after the tensor, the state takes %d bytes", (int)info.code_bytes);
        MUST(halfstep_state_bytes(o, &bytes));
        CHECK(bytes >= 256 + 16, "state bytes are %d", (int)bytes);
        MUST(halfstep_allocate_states(o));
        EXPECT(halfstep_set_hyper(o, 0, "momentum", 0), ORDER);
        EXPECT(halfstep_set_hyper(o, 0, "momentum", 0.5), OK);
        EXPECT(halfstep_set_hyper(o, ALL_GROUPS, "momentum", 0), ORDER);
        halfstep_destroy(o);
    }
}

/* ---- Order, binding, slots --------------------------------------------------------------------------------------- */

/* Writes and reads the weights of a format in one call, with three threads, and row by row, with one. The first two
 * tensors are too large for one task, and the third has no elements. */
static void all_weights(const char *format)
{
    enum { TENSORS = 4, MOST = 150000 };
    static const int64_t shape[TENSORS][3] = {{2, 150, 1000}, {1, MOST, 1}, {2, 0, 7}, {2, 3, 50}};
    halfstep_optimizer *o[2];
    void *weights[2][TENSORS];
    float *values[2][TENSORS];
    uint64_t bytes[2][TENSORS];
    for (int k = 0; k < 2; k++) {
        struct source s = {11};
        o[k] = new_optimizer(text_of("sgd/%s", format), k ? 3 : 1, 0);
        for (int i = 0; i < TENSORS; i++) {
            ADD_TENSOR(o[k], .name = text_of("%d", i), .ndim = (int32_t)shape[i][0], .may_be_empty = !shape[i][1],
                       .rows = shape[i][1], .row_length = shape[i][2], .gradient = "f32");
            bytes[k][i] = slot_info(o[k], i, WEIGHT).code_bytes;
            weights[k][i] = zeroed(bytes[k][i]);
            values[k][i] = zeroed(MOST * 4);
            for (int64_t j = 0; j < shape[i][1] * shape[i][2]; j++) values[k][i][j] = (float)next_normal(&s);
        }
        MUST(halfstep_allocate_states(o[k]));
    }
    MUST(halfstep_write_weights(o[1], weights[1], values[1]));
    for (int i = 0; i < TENSORS; i++)
        for (int64_t r = 0; r < shape[i][1]; r += shape[i][0] == 1 ? 1000 : 1)
            MUST(halfstep_write_slot(o[0], i, WEIGHT, weights[0][i], r, shape[i][0] == 1 ? 1000 : 1,
                                     values[0][i] + r * shape[i][2]));
    for (int i = 0; i < TENSORS; i++) {
        const halfstep_slot_info slot[2] = {slot_info(o[0], i, WEIGHT), slot_info(o[1], i, WEIGHT)};
        CHECK(!memcmp(weights[0][i], weights[1][i], bytes[0][i]) &&
                  (!slot[0].extra_bytes || !memcmp(slot[0].extra, slot[1].extra, slot[0].extra_bytes)),
              "%s: tensor %d was written otherwise", format, i);
        for (int64_t r = 0; r < shape[i][1]; r += shape[i][0] == 1 ? 1000 : 1)
            MUST(halfstep_read_slot(o[0], i, WEIGHT, weights[0][i], r, shape[i][0] == 1 ? 1000 : 1,
                                    values[0][i] + r * shape[i][2]));
    }
    MUST(halfstep_read_weights(o[1], weights[1], values[1]));
    for (int i = 0; i < TENSORS; i++)
        CHECK(!memcmp(values[0][i], values[1][i], (size_t)(shape[i][1] * shape[i][2]) * 4),
              "%s: tensor %d was read otherwise", format, i);
    /* Nothing is written if the last tensor lacks its weight, or its values. */
    void *last = weights[1][TENSORS - 1], *copy = zeroed(bytes[1][0]);
    memcpy(copy, weights[1][0], bytes[1][0]);
    values[1][0][0] += 8;
    weights[1][TENSORS - 1] = NULL;
    EXPECT_NAMED(o[1], halfstep_write_weights(o[1], weights[1], values[1]), ARGUMENT, "'3': NULL data");
    weights[1][TENSORS - 1] = last;
    CHECK(!memcmp(copy, weights[1][0], bytes[1][0]), "%s: a refused call has written", format);
    free(copy);
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < TENSORS; i++) free(weights[k][i]), free(values[k][i]);
        halfstep_destroy(o[k]);
    }
}

static void test_order(void)
{
    TEST("calls at the wrong time") {
        halfstep_optimizer *o;
        int32_t g, index;
        float w[64] = {0}, grad[64] = {0};
        void *weights[1] = {w};
        const void *gradients[1] = {grad};
        int64_t statistics[256];
        MUST(halfstep_create(NULL, &o));
        MUST(halfstep_add_group(o, "adamw", &g));
        halfstep_tensor t = matrix("w", 1, 64);
        add_tensor(o, &t);
        EXPECT(halfstep_step(o, weights, gradients), ORDER);
        EXPECT(step_tensor(o, 0, w, grad), ORDER);
        EXPECT(step_begin(o, gradients, statistics), ORDER);
        EXPECT(step_finish(o, weights, gradients, statistics), ORDER);
        float value;
        EXPECT(halfstep_read_slot(o, 0, STATE, NULL, 0, 1, &value), ORDER);
        /* One slot of two: still not ready, and by name. */
        float m[64], v[64];
        MUST(halfstep_bind_slot(o, 0, STATE, m, NULL));
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), ORDER, "exp_avg_sq");
        memset(m, 0, sizeof m), memset(v, 0, sizeof v);
        MUST(halfstep_bind_slot(o, 0, STATE + 1, v, NULL));
        EXPECT(halfstep_step(o, weights, gradients), OK);
        t = matrix("late", 1, 64);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), ORDER, "late");
        EXPECT(halfstep_add_group(o, "adamw", &g), ORDER);
        weights[0] = NULL;
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), ARGUMENT, "w");
        gradients[0] = NULL;
        EXPECT(halfstep_step(o, weights, gradients), OK);
        EXPECT(step_tensor(o, 1, w, grad), ARGUMENT);
        EXPECT(step_tensor(o, -1, w, grad), ARGUMENT);
        EXPECT(step_tensor(o, 0, w, NULL), OK);
        halfstep_destroy(o);
    }
    TEST("memory for states is checked") {
        static char memory[1 << 16] __attribute__((aligned(64)));
        halfstep_optimizer *o = new_optimizer("adamw/bf16-ecc8/int8", 0, 0);
        halfstep_tensor t = matrix("w", 10, 100);
        uint64_t bytes;
        add_tensor(o, &t);
        MUST(halfstep_state_bytes(o, &bytes));
        CHECK(bytes >= 1000 + 2 * (1000 + 80) && bytes < sizeof memory, "state bytes are %d", (int)bytes);
        EXPECT(halfstep_bind_states(o, NULL, bytes), ARGUMENT);
        EXPECT(halfstep_bind_states(o, memory + 8, bytes), ARGUMENT);
        EXPECT(halfstep_bind_states(o, memory, bytes - 1), RANGE);
        memset(memory, 0x55, sizeof memory);
        EXPECT(halfstep_bind_states(o, memory, bytes), OK);
        EXPECT_NAMED(o, halfstep_bind_states(o, memory, bytes), ORDER, "have memory already");
        CHECK(memory[bytes] == 0x55, "more memory than asked for was written");
        for (int slot = 0; slot < 4; slot++) {
            halfstep_slot_info info = slot_info(o, 0, slot);
            const char *places[2] = {info.code, info.extra};
            for (int i = 0; i < 2; i++) {
                if (!places[i]) continue;
                CHECK((uintptr_t)places[i] % 64 == 0, "slot %d is not on 64 bytes", slot);
                CHECK(places[i] >= memory && places[i] < memory + bytes, "slot %d lies outside", slot);
            }
        }
        EXPECT(halfstep_bind_slot(o, 5, 2, memory, NULL), ARGUMENT);
        EXPECT(halfstep_bind_slot(o, 0, GRADIENT, memory, NULL), ARGUMENT);
        EXPECT(halfstep_bind_slot(o, 0, STATE, NULL, memory), ARGUMENT);
        halfstep_slot_info info = {.struct_size = 3};
        EXPECT(halfstep_get_slot_info(o, 0, 0, &info), ARGUMENT);
        halfstep_record c = {.struct_size = 3};
        EXPECT(get_counters(o, 0, &c), ARGUMENT);
        EXPECT(halfstep_set_record(o, &c), ARGUMENT);
        EXPECT(halfstep_bind_record(o, 0, &(halfstep_record_places){.struct_size = 3}), ARGUMENT);
        EXPECT(halfstep_run(o, &(halfstep_call){.struct_size = 3}), ARGUMENT);
        EXPECT(set_group_steps(o, 3, 1), ARGUMENT);
        halfstep_destroy(o);
    }
    TEST("slots are read and written by rows, and refuse what they cannot hold") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *format = format_for(row, HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG);
            if (!format) continue;
            struct one t;
            float values[7 * 70], back[7 * 70], again[7 * 70];
            struct source s = {61};
            one_new(&t, text_of("adamw/f32/%s", format), 2, 7, 70, "f32");
            for (int i = 0; i < 490; i++) values[i] = (float)next_unit(&s);
            /* The format may fall back to another one. */
            halfstep_format_info info = format_info(slot_info(t.o, 0, 2).format);
            /* Reading in pieces of rows or at once gives the same. Values that were read can be written back unchanged.
             * Only a block whose largest element was rounded down gets another scale. */
            int in_rows = !info.block || info.geometry == HALFSTEP_GEOMETRY_ROWS;
            for (int slot = 2; slot < 4; slot++) {
                one_write(&t, slot, values);
                one_read(&t, slot, back);
                for (int r = 0; in_rows && r < 7; r++)
                    EXPECT(halfstep_write_slot(t.o, 0, slot, NULL, r, 1, values + 70 * r), OK);
                EXPECT(halfstep_read_slot(t.o, 0, slot, NULL, 0, 3, again), OK);
                EXPECT(halfstep_read_slot(t.o, 0, slot, NULL, 3, 4, again + 210), OK);
                CHECK(!memcmp(back, again, sizeof back), "%s: rows differ from the whole", format);
                one_write(&t, slot, back);
                one_read(&t, slot, again);
                CHECK(info.block || !memcmp(back, again, sizeof back), "%s: a second trip changes values", format);
            }
            EXPECT(halfstep_read_slot(t.o, 0, 2, NULL, 5, 3, again), RANGE);
            EXPECT(halfstep_read_slot(t.o, 0, 2, NULL, -1, 1, again), RANGE);
            EXPECT(halfstep_write_slot(t.o, 0, 2, NULL, INT64_MAX, 1, again), RANGE);
            EXPECT(halfstep_read_slot(t.o, 0, 0, NULL, 0, 1, again), ARGUMENT);
            EXPECT(halfstep_read_slot(t.o, 0, 2, NULL, 0, 1, NULL), ARGUMENT);
            EXPECT(halfstep_read_slot(t.o, 0, 2, NULL, 0, 0, NULL), OK);
            one_read(&t, 3, back);
            values[100] = -1;
            EXPECT(halfstep_write_slot(t.o, 0, 3, NULL, 0, 7, values), RANGE);
            values[100] = NAN;
            EXPECT(halfstep_write_slot(t.o, 0, 2, NULL, 0, 7, values), info.block ? RANGE : OK);
            one_read(&t, 3, again);
            CHECK(!memcmp(back, again, sizeof back), "%s: a refused write changed something", format);
            one_close(&t);
        }
    }
    TEST("all weights are read and written at once, by several threads, with the bits of row by row") {
        for (int32_t row = 0; row < halfstep_format_count(); row++)
            if (format_for(row, HALFSTEP_ROLE_WEIGHT)) all_weights(format_for(row, HALFSTEP_ROLE_WEIGHT));
    }
}

/* ---- A small training run, to be repeated in other ways ---------------------------------------------------------- */

enum { RUN_TENSORS = 4 };
static const int64_t run_shape[RUN_TENSORS][3] = {{2, 5, 300}, {1, 77, 1}, {2, 40, 7}, {2, 3, 1000}};

struct run {
    halfstep_optimizer *o;
    int first, n; /* tensors of the whole that this handle has */
    void *weight[RUN_TENSORS], *gradient[RUN_TENSORS];
    char *memory;
    char rule[32];
};

static void run_open(struct run *r, const char *recipe, int first, int n, int bind, const halfstep_options *options)
{
    int32_t group;
    char name[16];
    memset(r, 0, sizeof *r);
    r->first = first;
    r->n = n;
    snprintf(r->rule, sizeof r->rule, "%.*s", (int)strcspn(recipe, "/"), recipe);
    MUST(halfstep_create(options, &r->o));
    MUST(halfstep_add_group(r->o, recipe, &group));
    if (!strncmp(recipe, "sgd", 3)) MUST(halfstep_set_hyper(r->o, group, "momentum", 0.9));
    MUST(halfstep_set_hyper(r->o, group, "weight_decay", 0.1));
    MUST(halfstep_set_hyper(r->o, group, "warmup_steps", 5));
    for (int i = 0; i < n; i++) {
        const int64_t *shape = run_shape[first + i];
        snprintf(name, sizeof name, "t%d", first + i);
        halfstep_tensor t = matrix(name, shape[1], shape[2]);
        t.ndim = (int32_t)shape[0];
        t.gradient = "bf16";
        add_tensor(r->o, &t);
        r->weight[i] = zeroed((size_t)(shape[1] * shape[2]) * 4);
        r->gradient[i] = zeroed((size_t)(shape[1] * shape[2]) * 2);
    }
    if (bind) {
        uint64_t bytes;
        MUST(halfstep_state_bytes(r->o, &bytes));
        r->memory = zeroed(bytes + 64);
        MUST(halfstep_bind_states(r->o, r->memory + (64 - (uintptr_t)r->memory % 64) % 64, bytes));
    } else {
        MUST(halfstep_allocate_states(r->o));
    }
    for (int i = 0; i < n; i++) {
        const int64_t *shape = run_shape[first + i];
        struct source s = {(uint64_t)(first + i) + 500};
        float *values = zeroed((size_t)(shape[1] * shape[2]) * 4);
        for (int64_t j = 0; j < shape[1] * shape[2]; j++) values[j] = (float)next_normal(&s);
        MUST(halfstep_write_slot(r->o, i, WEIGHT, r->weight[i], 0, shape[1], values));
        free(values);
    }
}

/* Opens a run of all tensors. */
static void run_whole(struct run *r, const char *recipe, const halfstep_options *options)
{
    run_open(r, recipe, 0, RUN_TENSORS, 0, options);
}

static void run_close(struct run *r)
{
    halfstep_destroy(r->o);
    for (int i = 0; i < r->n; i++) free(r->weight[i]), free(r->gradient[i]);
    free(r->memory);
}

static void run_gradient(struct run *r, int i, int step)
{
    const int64_t *shape = run_shape[r->first + i];
    struct source s = {(uint64_t)(1000 * step + r->first + i)};
    for (int64_t j = 0; j < shape[1] * shape[2]; j++)
        ((uint16_t *)r->gradient[i])[j] = (uint16_t)(to_bits((float)(next_unit(&s) - 0.5)) >> 16);
}

static void run_gradients(struct run *r, int step)
{
    for (int i = 0; i < r->n; i++) run_gradient(r, i, step);
}

/* Returns the gradients as calls take them. */
static const void *const *gradients_of(const struct run *r) { return (const void *const *)r->gradient; }

static void run_steps(struct run *r, int from, int to)
{
    for (int step = from; step < to; step++) {
        run_gradients(r, step);
        MUST(halfstep_step(r->o, r->weight, gradients_of(r)));
    }
}

/* Compares every byte of a tensor of two runs. Returns -1, or the first slot that differs. */
static int run_differs(const struct run *a, int i, const struct run *b, int j)
{
    for (int slot = 0; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
        halfstep_slot_info x = {.struct_size = sizeof x}, y = {.struct_size = sizeof y};
        if (!stored_slot(a->o, i, slot, &x)) continue;
        if (halfstep_get_slot_info(b->o, j, slot, &y) != OK || x.code_bytes != y.code_bytes) return slot;
        const void *p = slot ? x.code : a->weight[i], *q = slot ? y.code : b->weight[j];
        if (memcmp(p, q, x.code_bytes) || (x.extra && memcmp(x.extra, y.extra, x.extra_bytes))) return slot;
    }
    return -1;
}

static void compare_runs(const struct run *a, const struct run *b, const char *what)
{
    for (int i = 0; i < b->n; i++) {
        int slot = run_differs(a, b->first - a->first + i, b, i);
        CHECK(slot < 0, "%s: slot %d of tensor %d differs", what, slot, b->first + i);
    }
}

/* Copies all that a checkpoint keeps, from one run into a fresh one. */
static void copy_run(const struct run *from, struct run *to)
{
    for (int i = 0; i < from->n; i++) {
        for (int slot = 0; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
            halfstep_slot_info x = {.struct_size = sizeof x}, y = {.struct_size = sizeof y};
            if (!stored_slot(from->o, i, slot, &x)) continue;
            y = slot_info(to->o, i, slot);
            memcpy(slot ? y.code : to->weight[i], slot ? x.code : from->weight[i], x.code_bytes);
            if (x.extra) memcpy(y.extra, x.extra, x.extra_bytes);
        }
        halfstep_record c = counters_of(from->o, i);
        MUST(set_counters(to->o, i, &c));
        halfstep_rule_info rule = rule_info(halfstep_rule_find(from->rule));
        for (int j = 0; j < rule.scalars; j++) {
            double value;
            MUST(get_scalar(from->o, i, rule.scalar_name[j], &value));
            MUST(set_scalar(to->o, i, rule.scalar_name[j], value));
        }
        copy_grids(from->o, to->o, i);
    }
    uint64_t steps;
    MUST(get_group_steps(from->o, 0, &steps));
    MUST(set_group_steps(to->o, 0, steps));
    MUST(set_seed(to->o, get_seed(from->o)));
    MUST(set_skipped_steps(to->o, halfstep_skipped_steps(from->o)));
}

/* Calls f for every rule with every weight format and every state format that serves all its states. Shorter runs take
 * some of these recipes, in which every rule and format occurs. */
static void every_recipe(void (*f)(const char *recipe))
{
    int n = 0;
    for (int32_t rule = 0; rule < halfstep_rule_count(); rule++)
        for (int32_t w = 0; w < halfstep_format_count(); w++)
            for (int32_t s = 0; s < halfstep_format_count(); s++) {
                char recipe[96], full[64];
                const char *weight = format_for(w, HALFSTEP_ROLE_WEIGHT), *state = format_for(s, 0);
                if (!weight) continue;
                snprintf(recipe, sizeof recipe, "%s/%s/%s", rule_info(rule).name, weight, state);
                if (halfstep_recipe_full(recipe, full, sizeof full) != OK) continue;
                if (n++ % BY_LENGTH(37, 5, 1) == 0) f(full);
            }
}

static void resume_recipe(const char *recipe)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 9};
    struct run whole, half, rest;
    run_whole(&whole, recipe, &options);
    run_open(&half, recipe, 0, RUN_TENSORS, 1, &options);
    run_steps(&whole, 0, 6);
    run_steps(&half, 0, 3);
    options.seed = 1;
    run_whole(&rest, recipe, &options);
    copy_run(&half, &rest);
    run_steps(&rest, 3, 6);
    compare_runs(&whole, &rest, recipe);
    run_close(&whole);
    run_close(&half);
    run_close(&rest);
}

/* Makes one step with one handle per tensor. The handles agree on the first n of their sums. */
static void step_together(struct run *single, int step, int64_t n)
{
    enum { MOST = 1024 };
    int64_t totals[MOST] = {0}, statistics[RUN_TENSORS][MOST], offset = norms_offset(single->o);
    for (int i = 0; i < RUN_TENSORS; i++) {
        struct run *r = &single[i];
        CHECK(statistics_count(r->o) <= MOST && n <= statistics_count(r->o) - offset, "tensor %d", i);
        run_gradients(r, step);
        MUST(step_begin(r->o, gradients_of(r), statistics[i]));
        MUST(step_norms(r->o, r->weight, gradients_of(r), statistics[i]));
        for (int64_t j = 0; j < n; j++) totals[j] += statistics[i][offset + j];
    }
    for (int i = 0; i < RUN_TENSORS; i++) {
        struct run *r = &single[i];
        memcpy(statistics[i] + offset, totals, (size_t)n * 8);
        MUST(step_finish(r->o, r->weight, gradients_of(r), statistics[i]));
    }
}

static void split_recipe(const char *recipe)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 9};
    struct run whole, halves, release, single[RUN_TENSORS];
    run_whole(&whole, recipe, &options);
    run_whole(&halves, recipe, &options);
    halfstep_rule_info info = rule_info(halfstep_rule_find(whole.rule));
    run_whole(&release, recipe, &options);
    for (int i = 0; i < RUN_TENSORS; i++) run_open(&single[i], recipe, i, 1, 0, &options);
    run_steps(&whole, 0, 4);
    int64_t *statistics = zeroed((size_t)statistics_count(halves.o) * 8);
    for (int step = 0; step < 4; step++) {
        run_gradients(&halves, step);
        MUST(step_begin(halves.o, gradients_of(&halves), statistics));
        MUST(step_finish(halves.o, halves.weight, gradients_of(&halves), statistics));
        run_gradients(&release, step);
        if (info.totals) {
            EXPECT(step_tensor(release.o, 0, release.weight[0], release.gradient[0]), UNSUPPORTED);
            CHECK(strstr(halfstep_error_detail(release.o), "over all tensors"), "%s: '%s'", recipe,
                  halfstep_error_detail(release.o));
            step_together(single, step, info.totals * round_statistics_count(single[0].o));
            continue;
        }
        for (int i = RUN_TENSORS - 1; i >= 0; i--)
            MUST(step_tensor(release.o, i, release.weight[i], release.gradient[i]));
        MUST(end_round(release.o));
    }
    compare_runs(&whole, &halves, "begin and finish");
    if (!info.totals) compare_runs(&whole, &release, "tensor by tensor");
    for (int i = 0; i < RUN_TENSORS; i++) {
        if (!info.totals) run_steps(&single[i], 0, 4);
        compare_runs(&whole, &single[i], "one optimizer per tensor");
        run_close(&single[i]);
    }
    free(statistics);
    run_close(&whole);
    run_close(&halves);
    run_close(&release);
}

static void test_equalities(void)
{
    TEST("counters, states and weights are all that a resumed run needs, under every recipe") {
        every_recipe(resume_recipe);
    }
    TEST("whole, in halves, tensor by tensor, one handle per tensor: the same bits, under every recipe") {
        every_recipe(split_recipe);
    }
    TEST("bound counters and scalars are current after every call") {
        struct run a;
        run_whole(&a, "lamb/bf16-sr/int8", NULL);
        int64_t bound[3] = {-1, -1, -1};
        double ratio = -1, asked = -2;
        halfstep_record_places places = {
            .struct_size = sizeof places, .state_steps = &bound[0], .full_steps = &bound[1], .writes = &bound[2]};
        SIZED(halfstep_record, any);
        const int64_t kept = record_place(a.o, &any, "trust_ratio") - any.scalar;
        places.scalar[kept] = &ratio;
        EXPECT(halfstep_bind_record(a.o, 0, &places), OK);
        for (int call = 0; call < 4; call++) {
            if (call == 0) run_steps(&a, 0, 2);
            if (call == 1) EXPECT(accumulate_states(a.o, gradients_of(&a)), OK);
            if (call == 2) EXPECT(halfstep_accumulate(a.o, 0, a.gradient[0], "bf16-sr", a.gradient[0], "bf16", 1), OK);
            if (call == 3) EXPECT(set_scalar(a.o, 0, "trust_ratio", 0.5), OK);
            SIZED(halfstep_record, c);
            EXPECT(get_counters(a.o, 0, &c), OK);
            EXPECT(get_scalar(a.o, 0, "trust_ratio", &asked), OK);
            CHECK((uint64_t)bound[0] == c.state_steps && (uint64_t)bound[1] == c.full_steps &&
                      (uint64_t)bound[2] == c.writes && ratio == asked,
                  "call %d: %lld %lld %lld and %g are shown", call, (long long)bound[0], (long long)bound[1],
                  (long long)bound[2], ratio);
        }
        CHECK(ratio == 0.5 && bound[0] == 3 && bound[1] == 2 && bound[2] == 4, "counts %lld %lld %lld",
              (long long)bound[0], (long long)bound[1], (long long)bound[2]);
        places.scalar[kept] = NULL;
        EXPECT(halfstep_bind_record(a.o, 0, &places), OK);
        EXPECT(set_scalar(a.o, 0, "trust_ratio", 0.25), OK);
        EQUAL(ratio, 0.5);
        places.scalar[HALFSTEP_MAX_SCALARS - 1] = &ratio;
        EXPECT(halfstep_bind_record(a.o, 0, &places), ARGUMENT);
        run_close(&a);
    }
    TEST("a bound step follows the count of updates") {
        struct run a;
        run_whole(&a, "adamw/bf16-sr", NULL);
        float step[RUN_TENSORS];
        for (int i = 0; i < RUN_TENSORS; i++) {
            step[i] = -1;
            EXPECT(bind_step(a.o, i, step + i), OK);
            CHECK(step[i] == 0, "tensor %d: %g when bound", i, step[i]);
        }
        run_steps(&a, 0, 2);
        for (int i = 0; i < RUN_TENSORS; i++) CHECK(step[i] == 2, "tensor %d: %g after two steps", i, step[i]);

        /* A tensor that is refused or left out gets no update and no count. */
        run_gradients(&a, 2);
        uint16_t *first = a.gradient[1], kept = *first;
        *first = 0x7F80;
        EXPECT(halfstep_step(a.o, a.weight, gradients_of(&a)), HALFSTEP_NONFINITE);
        *first = kept;
        void *absent = a.gradient[2];
        a.gradient[2] = NULL;
        EXPECT(halfstep_step(a.o, a.weight, gradients_of(&a)), OK);
        a.gradient[2] = absent;
        for (int i = 0; i < RUN_TENSORS; i++)
            CHECK(step[i] == (i == 2 ? 2 : 3), "tensor %d: %g after a refused and a partial step", i, step[i]);

        EXPECT(step_tensor(a.o, 2, a.weight[2], a.gradient[2]), OK);
        EXPECT(end_round(a.o), OK);
        EXPECT(accumulate_states(a.o, gradients_of(&a)), OK);
        for (int i = 0; i < RUN_TENSORS; i++) CHECK(step[i] == 4, "tensor %d: %g after a micro-step", i, step[i]);

        halfstep_record c = {.struct_size = sizeof c, .state_steps = 1000};
        EXPECT(set_counters(a.o, 0, &c), OK);
        EQUAL(step[0], 1000);
        EXPECT(bind_step(a.o, 1, NULL), OK);
        run_steps(&a, 3, 4);
        CHECK(step[0] == 1001 && step[1] == 4 && step[2] == 5, "%g %g %g", step[0], step[1], step[2]);
        float late = 0;
        EXPECT(bind_step(a.o, 1, &late), OK);
        EQUAL(late, 5);

        EXPECT(bind_step(a.o, RUN_TENSORS, step), ARGUMENT);
        run_close(&a);
    }
    TEST("clipping: halves agree with the whole, and the norm is told") {
        struct run a, b;
        halfstep_options options = {.struct_size = sizeof options, .threads = 1};
        run_whole(&a, "adamw/bf16-sr/int8", &options);
        run_whole(&b, "adamw/bf16-sr/int8", &options);
        MUST(halfstep_set_hyper(a.o, ALL_GROUPS, "clip_norm", 0.5));
        MUST(halfstep_set_hyper(a.o, ALL_GROUPS, "gradient_scale", 2));
        run_gradients(&a, 0);
        double sum = 0;
        for (int i = 0; i < RUN_TENSORS; i++)
            for (int64_t j = 0; j < run_shape[i][1] * run_shape[i][2]; j++)
                sum += pow((double)from_bits((uint32_t)((uint16_t *)a.gradient[i])[j] << 16), 2);
        double norm = 2 * sqrt(sum);
        run_steps(&a, 0, 1);
        CHECK(fabs(halfstep_gradient_norm(a.o) / norm - 1) < 1e-12, "the norm is %.17g, expected %.17g",
              halfstep_gradient_norm(a.o), norm);
        /* Clips by hand: another handle gets the factor as its gradient scale. */
        MUST(halfstep_set_hyper(b.o, ALL_GROUPS, "gradient_scale", 2 * (0.5 / (halfstep_gradient_norm(a.o) + 1e-6))));
        run_steps(&b, 0, 1);
        compare_runs(&a, &b, "clipping by hand");
        run_close(&a);
        run_close(&b);
    }
    TEST("accumulation adds, and with bf16-sr it draws random bits of its own") {
        struct one t;
        float sum[100];
        one_new(&t, "adamw/f32/f32", 2, 1, 100, "f32");
        memset(sum, 0, sizeof sum);
        one_fill(&t, GRADIENT, 1.5f);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "f32", t.gradient, "f32", 0.5), OK);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "f32", t.gradient, "f32", 2), OK);
        for (int i = 0; i < 100; i++) CHECK(sum[i] == 3.75f, "element %d is %g", i, sum[i]);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "int8", t.gradient, "f32", 1), UNSUPPORTED);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "bf16-kahan", t.gradient, "f32", 1), UNSUPPORTED);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "x", t.gradient, "f32", 1), NAME);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "f32", t.gradient, "bf16-sr", 1), UNSUPPORTED);
        EXPECT(halfstep_accumulate(t.o, 1, sum, "f32", t.gradient, "f32", 1), ARGUMENT);
        EXPECT(halfstep_accumulate(t.o, 0, sum, "f32", t.gradient, "f32", NAN), RANGE);
        uint16_t sr[100];
        double mean = 0;
        for (int k = 0; k < 400; k++) {
            memset(sr, 0, sizeof sr);
            one_fill(&t, GRADIENT, 1.0f);
            MUST(halfstep_accumulate(t.o, 0, sr, "bf16-sr", t.gradient, "f32", 1));
            one_fill(&t, GRADIENT, 0.001f);
            MUST(halfstep_accumulate(t.o, 0, sr, "bf16-sr", t.gradient, "f32", 1));
            for (int i = 0; i < 100; i++) mean += ((double)from_bits((uint32_t)sr[i] << 16) - 1) / 40000;
        }
        CHECK(fabs(mean / 0.001 - 1) < 0.06, "1 + 0.001 is 1 + %g on average", mean);
        halfstep_record c = counters_of(t.o, 0);
        CHECK(c.writes == 800 && c.state_steps == 0, "%d writes counted", (int)c.writes);
        one_close(&t);
    }
    TEST("memory is told, and tensors that fall back from blocks are counted") {
        struct run r;
        uint64_t w, g, e, s;
        int32_t fell;
        run_whole(&r, "adamw/bf16-ecc8/int8", NULL);
        MUST(halfstep_memory(r.o, &w, &g, &e, &s, &fell));
        uint64_t n = 1500 + 77 + 280 + 3000, blocks = 5 * 10 + 3 * 32;
        CHECK(w == 2 * n && g == 2 * n && e == n, "weights %d, gradients %d, extras %d", (int)w, (int)g, (int)e);
        EQUAL(s, 2 * (4500 + 2 * blocks) + 2 * 2 * (77 + 280));
        EQUAL(fell, 2);
        run_close(&r);
    }
}

/* ---- Threads and processes --------------------------------------------------------------------------------------- */

#ifndef _WIN32

static void *run_in_thread(void *argument)
{
    struct run *r = argument;
    run_steps(r, 0, 30);
    return NULL;
}

struct one_tensor {
    struct run *run;
    int tensor, steps;
};

static void *tensor_in_thread(void *argument)
{
    struct one_tensor *a = argument;
    for (int step = 0; step < a->steps; step++) {
        run_gradient(a->run, a->tensor, step);
        MUST(step_tensor(a->run->o, a->tensor, a->run->weight[a->tensor], a->run->gradient[a->tensor]));
    }
    return NULL;
}

static void test_threads(void)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 3, .seed = 9};
    static const char recipe[] = "adamw/bf16-kahan/int8";
    struct run reference;
    run_whole(&reference, recipe, &options);
    run_steps(&reference, 0, 30);
    TEST("the number of threads may change between steps") {
        struct run a, b;
        halfstep_options options = {.struct_size = sizeof options, .threads = 1};
        run_whole(&a, "adamw/bf16-sr/int8", &options);
        run_whole(&b, "adamw/bf16-sr/int8", &options);
        run_steps(&a, 0, 3);
        for (int step = 0; step < 3; step++) {
            MUST(halfstep_set_threads(b.o, 3 - step));
            run_steps(&b, step, step + 1);
        }
        compare_runs(&a, &b, "3, 2 and 1 threads");
        run_close(&a);
        run_close(&b);
    }
    TEST("two handles step at once") {
        struct run r[2];
        pthread_t thread[2];
        for (int i = 0; i < 2; i++) run_whole(&r[i], recipe, &options);
        for (int i = 0; i < 2; i++) CHECK(!pthread_create(&thread[i], NULL, run_in_thread, &r[i]), "pthread_create");
        for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
        for (int i = 0; i < 2; i++) {
            compare_runs(&reference, &r[i], "beside another handle");
            run_close(&r[i]);
        }
    }
    TEST("tensors of one handle are stepped from several threads") {
        struct run whole, r;
        pthread_t thread[RUN_TENSORS];
        struct one_tensor task[RUN_TENSORS];
        run_whole(&whole, recipe, &options);
        run_whole(&r, recipe, &options);
        /* With a constant lr, rounds end only after all steps here. */
        MUST(halfstep_set_hyper(whole.o, 0, "warmup_steps", 0));
        MUST(halfstep_set_hyper(r.o, 0, "warmup_steps", 0));
        run_steps(&whole, 0, 20);
        for (int i = 0; i < RUN_TENSORS; i++) {
            task[i] = (struct one_tensor){&r, i, 20};
            CHECK(!pthread_create(&thread[i], NULL, tensor_in_thread, &task[i]), "pthread_create");
        }
        for (int i = 0; i < RUN_TENSORS; i++) pthread_join(thread[i], NULL);
        compare_runs(&whole, &r, "from several threads");
        run_close(&whole);
        run_close(&r);
    }
    TEST_UNLESS_EMULATED("a child goes on with its copy after fork") {
        struct run r;
        run_whole(&r, recipe, &options);
        run_steps(&r, 0, 15);
        pid_t child = fork();
        if (!child) {
            run_steps(&r, 15, 30);
            int bad = 0;
            for (int i = 0; i < RUN_TENSORS; i++) bad |= run_differs(&reference, i, &r, i) >= 0;
            test_leave(bad);
        }
        run_steps(&r, 15, 30);
        CHECK(test_child_status(child) == 0, "the child failed");
        compare_runs(&reference, &r, "the parent");
        run_close(&r);
    }
    run_close(&reference);
}

/* A sanitizer's own allocator needs more room than this limit leaves. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif

static void test_memory(void)
{
    TEST("states that do not fit into memory are refused, and the handle lives on") {
        pid_t child = fork();
        if (!child) {
            halfstep_optimizer *o;
            int32_t group, index;
            int bad = halfstep_create(NULL, &o) || halfstep_add_group(o, "adamw/f32/f32", &group);
            halfstep_tensor t = matrix("w", 1 << 20, 1 << 16);
            bad |= halfstep_add_tensor(o, &t, &index);
#ifndef SANITIZED
            struct rlimit limit = {(rlim_t)1 << 30, (rlim_t)1 << 30};
            bad |= setrlimit(RLIMIT_AS, &limit);
            bad |= halfstep_allocate_states(o) != MEMORY || !*halfstep_error_detail(o);
            /* The handle is not settled, so another tensor may still be added. */
            t = matrix("x", 4, 4);
            bad |= halfstep_add_tensor(o, &t, &index) != OK;
#endif
            halfstep_destroy(o);
            test_leave(bad);
        }
        CHECK(test_child_status(child) == 0, "the child failed");
    }
}
#endif

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_tables();
    test_building();
    test_order();
    test_equalities();
#ifndef _WIN32
    test_threads();
    test_memory();
#endif
    return test_done();
}
