/* Tests arguments that no caller should pass to halfstep_io, and contents that no file should hold. Every pointer of
 * every public function is NULL once. Structures have odd sizes, and numbers are beyond every end. Manifests say
 * something wrong under a checksum that fits. Nothing may crash, the code must be the documented one, the sentence must
 * name the thing, and existing data must stay. Over 500 lines because each function and each member of a manifest has
 * its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "halfstep_io.h"
#include "messages.h"
#include "ref/fixture.h"
#include "scratch.h"

/* Makes a call that is refused: with room for a sentence, which must be there; with no room; and with a NULL buffer. */
#define REFUSED(code, says, function, ...)                                                                            \
    do {                                                                                                              \
        EXPECT(function(__VA_ARGS__, TEXT), code);                                                                    \
        CHECK(strstr(message, says) && !strchr(message, '\n'), "line %d: the sentence \"%s\" lacks \"%s\"", __LINE__, \
              message, says);                                                                                         \
        EXPECT(function(__VA_ARGS__, NULL, 0), code);                                                                 \
        message[0] = '?';                                                                                             \
        EXPECT(function(__VA_ARGS__, message, 0), code);                                                              \
        CHECK(message[0] == '?', "line %d: %s writes beyond its room", __LINE__, #function);                          \
    } while (0)
#define REFUSED_NULL(function, ...) REFUSED(ARGUMENT, #function ": NULL", function, __VA_ARGS__)

/* ---- Scratch ----------------------------------------------------------------------------------------------------- */

static const char *at(const char *name) { return path_in(scratch, name); }

/* Returns a small file as a string, empty if there is none. */
static const char *get_file(const char *path)
{
    static char data[1 << 16];
    FILE *file = fopen(path, "rb");
    data[file ? fread(data, 1, sizeof data - 1, file) : 0] = 0;
    if (file) fclose(file);
    return data;
}

/* Saves one file and one value, which are valid. */
static int save_step(const char *dir, uint64_t step, uint32_t keep)
{
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .step = step, .keep = keep, .no_sync = 1};
    int code = halfstep_begin_checkpoint(&save, dir, &options, TEXT);
    if (code) return code;
    code = halfstep_save_file(save, "empty", NULL, 0, TEXT);
    if (!code) code = halfstep_save_file(save, "model.bin", "model", 5, TEXT);
    if (!code) code = halfstep_save_value(save, "recipe", "adamw/f32", TEXT);
    if (code) halfstep_abandon_checkpoint(save);
    return code ? code : halfstep_commit_checkpoint(save, TEXT);
}

/* Returns the step that a directory opens with, or the negative code. */
static int64_t opened_step(const char *dir, int fallback)
{
    halfstep_checkpoint *checkpoint;
    halfstep_open_options options = {.struct_size = sizeof options, .fallback = (uint32_t)fallback};
    SIZED(halfstep_checkpoint_info, info);
    int code = halfstep_open_checkpoint(&checkpoint, dir, &options, TEXT);
    CHECK((code == OK) == (checkpoint != NULL), "%s: code and handle disagree", dir);
    if (code) return code;
    MUST(halfstep_get_checkpoint_info(checkpoint, &info));
    CHECK(!info.fell_back || fallback, "%s: an unwanted fallback", dir);
    halfstep_close_checkpoint(checkpoint);
    return (int64_t)info.step;
}

/* Checks the step that a directory opens with. */
#define OPENS(dir, fallback, step) CHECK(opened_step(dir, fallback) == (step), "%s", message)

/* ---- Arguments --------------------------------------------------------------------------------------------------- */

/* One of everything. */
static struct {
    halfstep_optimizer *optimizer;
    halfstep_safetensors_writer *writer;
    halfstep_safetensors *file;
    halfstep_checkpoint *checkpoint;
    float weight[64];
    void *weights[1];
} good;

static void make_good(void)
{
    uint64_t three = 3;
    good.optimizer = optimizer_of("adamw", &(halfstep_tensor){.struct_size = sizeof(halfstep_tensor),
                                                              .name = "w",
                                                              .ndim = 2,
                                                              .rows = 1,
                                                              .row_length = 64,
                                                              .gradient = "f32"});
    good.weights[0] = good.weight;
    MUST(halfstep_create_safetensors_writer(&good.writer));
    MUST(halfstep_declare_safetensor(good.writer, "a", "U8", 1, &three, "abc", TEXT));
    MUST(halfstep_declare_safetensor(good.writer, "b", "U8", 0, NULL, "b", TEXT));
    MUST(halfstep_declare_safetensors_metadata(good.writer, "k", "v", TEXT));
    MUST(halfstep_write_safetensors(good.writer, at("good"), NULL, NULL, TEXT));
    MUST(halfstep_open_safetensors(&good.file, at("good"), TEXT));
    MUST(save_step(at("good-run"), 1, 1));
    MUST(halfstep_open_checkpoint(&good.checkpoint, at("good-run"), NULL, TEXT));
}

static void drop_good(void)
{
    halfstep_destroy(good.optimizer);
    halfstep_destroy_safetensors_writer(good.writer);
    halfstep_close_safetensors(good.file);
    halfstep_close_checkpoint(good.checkpoint);
}

static void test_null(void)
{
    TEST("no function takes NULL for anything that it needs") {
        uint64_t index, three = 3;
        char data[8];
        const char *key, *value;
        SIZED(halfstep_safetensor_info, info);
        halfstep_safetensors *file = good.file;
        REFUSED_NULL(halfstep_open_safetensors, NULL, at("good"));
        REFUSED_NULL(halfstep_open_safetensors, &file, NULL);
        CHECK(!file, "a handle in spite of the error");
        halfstep_close_safetensors(NULL);
        CHECK(!halfstep_safetensors_dtype_bits(NULL) && !halfstep_safetensor_count(NULL) &&
                  !halfstep_safetensors_metadata_count(NULL) && !halfstep_safetensors_metadata_find(NULL, "k") &&
                  !halfstep_safetensors_metadata_find(good.file, NULL),
              "something of nothing");
        EXPECT(halfstep_get_safetensor_info(NULL, 0, &info), ARGUMENT);
        EXPECT(halfstep_get_safetensor_info(good.file, 0, NULL), ARGUMENT);
        EXPECT(halfstep_get_safetensor_info(good.file, 2, &info), ARGUMENT);
        EXPECT(halfstep_safetensor_find(NULL, "a", &index), ARGUMENT);
        EXPECT(halfstep_safetensor_find(good.file, NULL, &index), ARGUMENT);
        EXPECT(halfstep_safetensor_find(good.file, "a", NULL), ARGUMENT);
        EXPECT(halfstep_safetensor_find(good.file, "c", &index), NAME);
        REFUSED_NULL(halfstep_read_safetensor, NULL, 0, 0, data, 1);
        REFUSED_NULL(halfstep_read_safetensor, good.file, 0, 0, NULL, 1);
        REFUSED(ARGUMENT, "no tensor number 2", halfstep_read_safetensor, good.file, 2, 0, data, 1);
        REFUSED(RANGE, "\"a\" has 3 bytes; cannot read 3 from byte 1", halfstep_read_safetensor, good.file, 0, 1, data,
                3);
        EXPECT(halfstep_get_safetensors_metadata(NULL, 0, &key, &value), ARGUMENT);
        EXPECT(halfstep_get_safetensors_metadata(good.file, 0, NULL, &value), ARGUMENT);
        EXPECT(halfstep_get_safetensors_metadata(good.file, 0, &key, NULL), ARGUMENT);
        EXPECT(halfstep_get_safetensors_metadata(good.file, 1, &key, &value), ARGUMENT);

        EXPECT(halfstep_create_safetensors_writer(NULL), ARGUMENT);
        halfstep_destroy_safetensors_writer(NULL);
        REFUSED_NULL(halfstep_declare_safetensor, NULL, "c", "U8", 1, &three, data);
        REFUSED_NULL(halfstep_declare_safetensor, good.writer, NULL, "U8", 1, &three, data);
        REFUSED_NULL(halfstep_declare_safetensor, good.writer, "c", NULL, 1, &three, data);
        REFUSED_NULL(halfstep_declare_safetensor, good.writer, "c", "U8", 1, NULL, data);
        REFUSED_NULL(halfstep_declare_safetensors_metadata, NULL, "k", "v");
        REFUSED_NULL(halfstep_declare_safetensors_metadata, good.writer, NULL, "v");
        REFUSED_NULL(halfstep_declare_safetensors_metadata, good.writer, "k", NULL);
        REFUSED_NULL(halfstep_write_safetensors, NULL, at("x"), NULL, NULL);
        REFUSED_NULL(halfstep_write_safetensors, good.writer, NULL, NULL, NULL);
        halfstep_store *store = (halfstep_store *)data;
        SIZED(halfstep_store_info, description);
        REFUSED_NULL(halfstep_store_create, NULL, good.optimizer, good.weights, NULL, &store);
        REFUSED_NULL(halfstep_store_create, at("x"), NULL, good.weights, NULL, &store);
        REFUSED_NULL(halfstep_store_create, at("x"), good.optimizer, good.weights, NULL, NULL);
        REFUSED_NULL(halfstep_store_create, at("x"), good.optimizer, NULL, NULL, &store);
        REFUSED_NULL(halfstep_store_open, NULL, good.optimizer, good.weights, NULL, &store);
        REFUSED_NULL(halfstep_store_open, at("x"), NULL, good.weights, NULL, &store);
        REFUSED_NULL(halfstep_store_open, at("x"), good.optimizer, good.weights, NULL, NULL);
        CHECK(!store, "a store in spite of the error");
        REFUSED_NULL(halfstep_store_bind, NULL, good.optimizer);
        REFUSED_NULL(halfstep_store_set_value, NULL, "k", "v");
        REFUSED_NULL(halfstep_store_get_info, NULL, &description);
        REFUSED_NULL(halfstep_store_get_info, at("good"), NULL);
        REFUSED(FORMAT, "not a file of states", halfstep_store_get_info, at("good"), &description);
        CHECK(!halfstep_store_value(NULL, "k"), "a value of nothing");
        halfstep_store_free_info(NULL);
        halfstep_store_close(NULL);
        REFUSED_NULL(halfstep_write_file_atomic, NULL, "x", 1);
        REFUSED_NULL(halfstep_write_file_atomic, at("x"), NULL, 1);
        CHECK(access(at("x"), F_OK), "a refused call has written a file");

        halfstep_checkpoint_save *save = (halfstep_checkpoint_save *)data;
        REFUSED_NULL(halfstep_begin_checkpoint, NULL, at("run"), NULL);
        REFUSED_NULL(halfstep_begin_checkpoint, &save, NULL, NULL);
        REFUSED_NULL(halfstep_begin_checkpoint, &save, "", NULL);
        CHECK(!save && access(at("run"), F_OK), "a refused call has begun a save");
        MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
        REFUSED_NULL(halfstep_save_file, NULL, "a", "x", 1);
        REFUSED_NULL(halfstep_save_file, save, NULL, "x", 1);
        REFUSED_NULL(halfstep_save_file, save, "a", NULL, 1);
        REFUSED_NULL(halfstep_save_safetensors, NULL, "a", good.writer, NULL, NULL);
        REFUSED_NULL(halfstep_save_safetensors, save, NULL, good.writer, NULL, NULL);
        REFUSED_NULL(halfstep_save_safetensors, save, "a", NULL, NULL, NULL);
        REFUSED_NULL(halfstep_save_value, NULL, "k", "v");
        REFUSED_NULL(halfstep_save_value, save, NULL, "v");
        REFUSED_NULL(halfstep_save_value, save, "k", NULL);
        REFUSED_NULL(halfstep_save_optimizer, NULL, good.optimizer, good.weights, NULL);
        REFUSED_NULL(halfstep_save_optimizer, save, NULL, good.weights, NULL);
        EXPECT(halfstep_commit_checkpoint(NULL, TEXT), ARGUMENT);
        EXPECT(halfstep_commit_checkpoint(NULL, NULL, 0), ARGUMENT);
        halfstep_abandon_checkpoint(NULL);
        /* The refused calls have neither spoilt the save nor added to it. */
        MUST(halfstep_save_file(save, "a", "x", 1, NULL, 0));
        MUST(halfstep_save_value(save, "k", "v", NULL, 0));
        MUST(halfstep_save_optimizer(save, good.optimizer, good.weights, NULL, NULL, 0));
        MUST(halfstep_commit_checkpoint(save, NULL, 0));

        halfstep_checkpoint *checkpoint = good.checkpoint;
        SIZED(halfstep_checkpoint_info, about);
        SIZED(halfstep_checkpoint_file, one);
        REFUSED_NULL(halfstep_open_checkpoint, NULL, at("run"), NULL);
        REFUSED_NULL(halfstep_open_checkpoint, &checkpoint, NULL, NULL);
        CHECK(!checkpoint, "a handle in spite of the error");
        MUST(halfstep_open_checkpoint(&checkpoint, at("run"), NULL, NULL, 0));
        EXPECT(halfstep_get_checkpoint_info(NULL, &about), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_info(checkpoint, NULL), ARGUMENT);
        MUST(halfstep_get_checkpoint_info(checkpoint, &about));
        CHECK(about.files == 3 && about.values == 1, "%d files, %d values", (int)about.files, (int)about.values);
        EXPECT(halfstep_get_checkpoint_file(NULL, 0, &one), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_file(checkpoint, 0, NULL), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_file(checkpoint, 3, &one), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_value(NULL, 0, &key, &value), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_value(checkpoint, 0, NULL, &value), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_value(checkpoint, 0, &key, NULL), ARGUMENT);
        EXPECT(halfstep_get_checkpoint_value(checkpoint, 1, &key, &value), ARGUMENT);
        CHECK(!halfstep_checkpoint_path(NULL, "a") && !halfstep_checkpoint_path(checkpoint, NULL) &&
                  !halfstep_checkpoint_path(checkpoint, "b") && !halfstep_checkpoint_value(NULL, "k") &&
                  !halfstep_checkpoint_value(checkpoint, NULL) && !halfstep_checkpoint_value(checkpoint, "l"),
              "found nothing");
        REFUSED_NULL(halfstep_load_optimizer, NULL, good.optimizer, good.weights, NULL);
        REFUSED_NULL(halfstep_load_optimizer, checkpoint, NULL, good.weights, NULL);
        MUST(halfstep_load_optimizer(checkpoint, good.optimizer, good.weights, NULL, NULL, 0));
        REFUSED_NULL(halfstep_write_optimizer, NULL, good.optimizer, good.weights, NULL);
        REFUSED_NULL(halfstep_write_optimizer, at("x"), NULL, good.weights, NULL);
        REFUSED_NULL(halfstep_read_optimizer, NULL, good.optimizer, good.weights, NULL);
        REFUSED_NULL(halfstep_read_optimizer, at("x"), NULL, good.weights, NULL);
        MUST(halfstep_write_optimizer(at("x"), good.optimizer, good.weights, NULL, NULL, 0));
        MUST(halfstep_read_optimizer(at("x"), good.optimizer, good.weights, NULL, NULL, 0));
        void *no_weight[1] = {NULL};
        REFUSED(ARGUMENT, "\"w\": its weight is NULL", halfstep_read_optimizer, at("x"), good.optimizer, no_weight,
                NULL);
        halfstep_close_checkpoint(checkpoint);
        halfstep_close_checkpoint(NULL);
    }
    TEST("every public function of halfstep_io that takes a pointer is in this file") {
        int functions = test_calls_all("include/halfstep_io.h", "tests/io/test_io_arguments.c");
        CHECK(functions > 30, "the header shows %d functions only", functions);
    }
}

static void test_sizes(void)
{
    TEST("structures of other versions: what is unknown here is refused, what is zero is not") {
        /* Sizes as a caller's header may have them: longer than ours, or sizes that no header has. */
        _Alignas(8) unsigned char room[512] = {0};
        static const uint32_t odd[] = {0, 3, 5, 4100, UINT32_MAX};
        halfstep_checkpoint_save *save;
        halfstep_checkpoint *checkpoint;
        for (size_t i = 0; i < COUNT(odd); i++) {
            memset(room, 0x55, sizeof room);
            memcpy(room, &odd[i], 4);
            EXPECT(halfstep_get_safetensor_info(good.file, 0, (void *)room), ARGUMENT);
            EXPECT(halfstep_get_checkpoint_info(good.checkpoint, (void *)room), ARGUMENT);
            EXPECT(halfstep_get_checkpoint_file(good.checkpoint, 0, (void *)room), ARGUMENT);
            CHECK(room[4] == 0x55, "size %u: something was written", odd[i]);
            memset(room + 4, 0, sizeof room - 4);
            REFUSED(ARGUMENT, "struct_size", halfstep_begin_checkpoint, &save, at("sizes"), (void *)room);
            REFUSED(ARGUMENT, "struct_size", halfstep_open_checkpoint, &checkpoint, at("good-run"), (void *)room);
            REFUSED(ARGUMENT, "struct_size", halfstep_write_optimizer, at("y"), good.optimizer, NULL, (void *)room);
            REFUSED(ARGUMENT, "struct_size", halfstep_read_optimizer, at("x"), good.optimizer, NULL, (void *)room);
            REFUSED(ARGUMENT, "struct_size", halfstep_load_optimizer, good.checkpoint, good.optimizer, NULL,
                    (void *)room);
        }
        const uint32_t longer = sizeof room, head = 12;
        for (int unknown = 0; unknown < 2; unknown++) {
            memset(room, 0, sizeof room);
            memcpy(room, &longer, 4);
            room[sizeof room - 1] = (unsigned char)unknown;
            int code = halfstep_begin_checkpoint(&save, at("sizes"), (void *)room, TEXT);
            CHECK(code == (unknown ? ARGUMENT : OK), "unknown %d: %s", unknown, message);
            halfstep_abandon_checkpoint(save);
            code = halfstep_open_checkpoint(&checkpoint, at("good-run"), (void *)room, TEXT);
            CHECK(code == (unknown ? ARGUMENT : OK), "unknown %d: %s", unknown, message);
            halfstep_close_checkpoint(checkpoint);
        }
        CHECK(access(at("sizes"), F_OK) && access(at("y"), F_OK), "a refused save has left something");
        /* Room for no more than the size, and for more than we know, which becomes zero. */
        memset(room, 0x55, sizeof room);
        memcpy(room, &head, 4);
        MUST(halfstep_get_checkpoint_info(good.checkpoint, (void *)room));
        CHECK(room[12] == 0x55, "written beyond the structure");
        memcpy(room, &longer, 4);
        MUST(halfstep_get_checkpoint_file(good.checkpoint, 1, (void *)room));
        CHECK(!strcmp(((halfstep_checkpoint_file *)room)->name, "model.bin") && !room[sizeof room - 1], "file 1");
        halfstep_file_options unknown = {.struct_size = sizeof unknown, .reserved = 1};
        REFUSED(ARGUMENT, "invalid options", halfstep_write_optimizer, at("y"), good.optimizer, NULL, &unknown);
    }
}

static void test_names(void)
{
    char name[140];
    memset(name, 'n', sizeof name);
    TEST("names, values and steps that a checkpoint cannot have") {
        halfstep_checkpoint_save *save;
        halfstep_save_options options = {.struct_size = sizeof options, .step = (uint64_t)INT64_MAX + 1};
        REFUSED(RANGE, "9223372036854775808", halfstep_begin_checkpoint, &save, at("run"), &options);
        static const char *const not_utf8[] = {"\x80",
                                               "\xc1\x81",
                                               "\xc3",
                                               "\xe0\x9f\x80",
                                               "\xed\xa0\x80",
                                               "\xe2\x82x",
                                               "\xf0\x8f\xbf\xbf",
                                               "\xf4\x90\x80\x80",
                                               "\xf5\x80\x80\x80",
                                               "\xf0\x9f\x98x"};
        name[129] = 0;
        for (int kind = 0; kind < 4; kind++) {
            const char *says = kind == 0   ? "cannot be named \"nnn"
                               : kind == 1 ? "two files are named \"a\""
                                           : "is not UTF-8";
            int code = kind == 1 ? DUPLICATE : NAME;
            for (size_t i = 0; i < (kind < 2 ? 1 : COUNT(not_utf8)); i++) {
                int64_t before = opened_step(at("run"), 0);
                MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
                MUST(halfstep_save_file(save, "a", "x", 1, TEXT));
                if (kind == 0) FAILS(halfstep_save_file(save, name, "x", 1, TEXT), code, says);
                if (kind == 1) FAILS(halfstep_save_file(save, "a", "y", 1, TEXT), code, says);
                if (kind == 2) FAILS(halfstep_save_value(save, not_utf8[i], "v", TEXT), code, says);
                if (kind == 3) FAILS(halfstep_save_value(save, "k", not_utf8[i], TEXT), code, says);
                /* Later calls fail alike, and so does the commit. */
                FAILS(halfstep_save_file(save, "b", "x", 1, TEXT), code, says);
                FAILS(halfstep_commit_checkpoint(save, TEXT), code, says);
                CHECK(opened_step(at("run"), 0) == before && !count_entries(at("run"), ".halfstep"),
                      "a refused save has left something");
            }
        }
        /* A failure that nobody wanted to read has no message to repeat. */
        MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
        EXPECT(halfstep_save_file(save, name, "x", 1, NULL, 0), NAME);
        FAILS(halfstep_commit_checkpoint(save, TEXT), NAME, "an earlier call failed");
        name[128] = 0;
        options.step = INT64_MAX;
        options.no_links = 1;
        MUST(halfstep_begin_checkpoint(&save, at("last"), &options, TEXT));
        MUST(halfstep_save_file(save, name, "x", 1, TEXT));
        MUST(halfstep_save_value(save, "\xf4\x8f\xbf\xbf\xed\x9f\xbf\xe2\x82\xac", "\xc3\xa9", TEXT));
        MUST(halfstep_commit_checkpoint(save, TEXT));
        OPENS(at("last"), 0, INT64_MAX);
        CHECK(!count_entries(at("last"), "nnn"), "a link that was not wanted");
    }
}

static int fill_nothing(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    (void)tensor, (void)offset, (void)data, (void)bytes;
    return *(int *)context;
}

static void test_tensors(void)
{
    TEST("tensors and metadata that a file cannot have") {
        halfstep_safetensors_writer *writer;
        uint64_t most = UINT64_MAX / 8, two[2] = {(uint64_t)INT64_MAX + 1, 0};
        put_file(at("kept"), "old", 3);
        MUST(halfstep_create_safetensors_writer(&writer));
        REFUSED(SHAPE, "\"c\": dimension 0 is too large", halfstep_declare_safetensor, writer, "c", "U8", 2, two, NULL);
        REFUSED(NAME, "\"k\" is not UTF-8", halfstep_declare_safetensors_metadata, writer, "k", "\xff");
        REFUSED(NAME, "is not UTF-8", halfstep_declare_safetensors_metadata, writer, "\xff", "v");
        /* A fill function fails: its code is passed on if it is an error code. */
        MUST(halfstep_declare_safetensor(writer, "c", "U8", 1, &most, NULL, NULL, 0));
        int says = MISMATCH;
        REFUSED(MISMATCH, "\"c\" could not be supplied (code -41)", halfstep_write_safetensors, writer, at("kept"),
                fill_nothing, &says);
        says = 7;
        REFUSED(ARGUMENT, "\"c\" could not be supplied (code 7)", halfstep_write_safetensors, writer, at("kept"),
                fill_nothing, &says);
        static const char *const more[] = {"d", "e", "f", "g"};
        for (int i = 0; i < 4; i++) MUST(halfstep_declare_safetensor(writer, more[i], "U8", 1, &most, NULL, TEXT));
        REFUSED(SHAPE, "too large for one file", halfstep_write_safetensors, writer, at("kept"), fill_nothing, &says);
        halfstep_destroy_safetensors_writer(writer);
        CHECK(!strcmp(get_file(at("kept")), "old") && !count_entries(scratch, ".halfstep"),
              "a refused call has written");
    }
    TEST("more tensors, pairs of metadata and bytes of a header than a file may have") {
        halfstep_safetensors_writer *writer;
        char name[16];
        int code = halfstep_create_safetensors_writer(&writer);
        unsigned count = 0;
        for (; !code && count < 2u << 20; count++) {
            snprintf(name, sizeof name, "%08x", count);
            code = halfstep_declare_safetensors_metadata(writer, name, "", TEXT);
        }
        CHECK(code == RANGE && count == (1u << 20) + 1 && strstr(message, "1048576 pairs"), "%u: %d %s", count, code,
              message);
        MUST(halfstep_declare_safetensors_metadata(writer, "00000000", "replaced", TEXT));
        for (code = 0, count = 0; !code && count < 2u << 20; count++) {
            snprintf(name, sizeof name, "%08x", count);
            code = halfstep_declare_safetensor(writer, name, "U8", 0, NULL, "", TEXT);
        }
        CHECK(code == RANGE && count == (1u << 20) + 1 && strstr(message, "1048576 tensors"), "%u: %d %s", count, code,
              message);
        halfstep_destroy_safetensors_writer(writer);
        /* Seventeen million characters, each escaped in six bytes. */
        enum { CHARACTERS = 100000000 / 6 + 1 };
        char *value = malloc(CHARACTERS + 1);
        if (!value) exit(1);
        memset(value, 1, CHARACTERS);
        value[CHARACTERS] = 0;
        put_file(at("kept"), "old", 3);
        MUST(halfstep_create_safetensors_writer(&writer));
        MUST(halfstep_declare_safetensors_metadata(writer, "k", value, TEXT));
        free(value);
        FAILS(halfstep_write_safetensors(writer, at("kept"), NULL, NULL, TEXT), RANGE, "kept: a header of 1000000");
        CHECK(!strcmp(get_file(at("kept")), "old") && !count_entries(scratch, ".halfstep"),
              "a refused call has written");
        halfstep_destroy_safetensors_writer(writer);
    }
}

/* ---- Files ------------------------------------------------------------------------------------------------------- */

static void test_places(void)
{
    TEST("places where no file can be written") {
        char path[600];
        put_file(at("kept"), "old", 3);
        REFUSED(IO, "kept/x", halfstep_write_file_atomic, at("kept/x"), "new", 3);
        REFUSED(IO, "kept/x", halfstep_write_safetensors, good.writer, at("kept/x"), NULL, NULL);
        REFUSED(IO, "Is a directory", halfstep_write_file_atomic, scratch, "new", 3);
        REFUSED(IO, "absent/x", halfstep_write_file_atomic, at("absent/x"), "new", 3);
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        snprintf(path, sizeof path, "%s", at("socket"));
        if (fd < 0 || strlen(path) >= sizeof address.sun_path) exit(1);
        memcpy(address.sun_path, path, strlen(path) + 1);
        if (bind(fd, (struct sockaddr *)&address, sizeof address)) exit(1);
        REFUSED(IO, "cannot open ", halfstep_write_file_atomic, path, "new", 3);
        close(fd);
        CHECK(!strcmp(get_file(at("kept")), "old"), "a refused call has written");
        /* A path without a folder, and one with a slash too many. */
        char home[400];
        if (!getcwd(home, sizeof home) || chdir(scratch)) exit(1);
        MUST(halfstep_write_file_atomic("plain", "1", 1, TEXT));
        MUST(halfstep_write_file_atomic(".//plain", "22", 2, TEXT));
        EQUAL_TEXT(get_file("plain"), "22");
        MUST(save_step("relative", 3, 1));
        MUST(save_step("relative//", 4, 1));
        CHECK(opened_step("relative/", 0) == 4 && count_entries("relative", "checkpoint-") == 1, "relative: %s",
              message);
        if (chdir(home)) exit(1);
        /* A save whose name leads nowhere, or to a file. */
        halfstep_checkpoint_save *save;
        if (symlink("nowhere", at("dangling"))) exit(1);
        REFUSED(IO, "dangling: it is a link to nowhere, which does not exist", halfstep_begin_checkpoint, &save,
                at("dangling"), NULL);
        REFUSED(IO, "kept", halfstep_begin_checkpoint, &save, at("kept"), NULL);
    }
    TEST("temporary names that a process of this number has left are passed over") {
        char name[64];
        if (mkdir(at("left"), 0777)) exit(1);
        MUST(halfstep_write_file_atomic(at("left/x"), "1", 1, TEXT));
        for (unsigned i = 0; i < 600; i += 2) {
            snprintf(name, sizeof name, "left/.halfstep-write-%ld-%u", (long)getpid(), i);
            put_file(at(name), "left", 4);
        }
        for (int i = 0; i < 4; i++) MUST(halfstep_write_file_atomic(at("left/x"), "22", 2, TEXT));
        CHECK(!strcmp(get_file(at("left/x")), "22") && count_entries(at("left"), ".halfstep-write-") == 300,
              "what was left has changed");
    }
}

/* ---- Manifests that say something wrong -------------------------------------------------------------------------- */

/* Computes CRC-64/XZ, one bit at a time. */
static unsigned long long slow_crc(const char *data, size_t bytes)
{
    uint64_t crc = ~UINT64_C(0);
    for (size_t i = 0; i < bytes; i++) {
        crc ^= (unsigned char)data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT64_C(0xC96C5795D7870F42) : 0);
    }
    return ~crc;
}

static const char seal[] = ",\n  \"crc64\": \"";

/* Writes the manifest with `from` replaced by `to` (in both, ' stands for ") and a checksum that fits. */
static void change_manifest(const char *path, const char *manifest, const char *from, const char *to)
{
    static char changed[1 << 16];
    char find[256], put[512];
    snprintf(find, sizeof find, "%s", from);
    snprintf(put, sizeof put, "%s", to);
    for (char *c = find; (c = strchr(c, '\'')) != NULL;) *c = '"';
    for (char *c = put; (c = strchr(c, '\'')) != NULL;) *c = '"';
    const char *place = strstr(manifest, find), *end = manifest;
    for (const char *next = manifest; (next = strstr(next, seal)) != NULL; next++) end = next;
    if (!place || place > end) {
        CHECK(0, "%s has no %s", path, find);
        return;
    }
    int bytes = snprintf(changed, sizeof changed, "%.*s%s%.*s", (int)(place - manifest), manifest, put,
                         (int)(end - place) - (int)strlen(find), place + strlen(find));
    bytes += snprintf(changed + bytes, sizeof changed - (size_t)bytes, "%s%016llx\"\n}\n", seal,
                      slow_crc(changed, (size_t)bytes));
    put_file(path, changed, (size_t)bytes);
}

/* Returns the path of a directory's pointer, or of the manifest of its newest checkpoint. */
enum { POINTER, INNER };
#define OTHER "unexpected content of a manifest"
#define LONG "1234567890123456789012345678901234567890123456789012345678901234567890"

static const struct {
    int which;
    const char *from, *to, *says; /* says: NULL if nothing is wrong */
} wrong[] = {
    {POINTER, "{\n", " {\t\r\n", NULL},
    {INNER, "{\n", " {\t\r\n", NULL},
    {POINTER, "{\n", "[\n", "expected '{'"},
    {POINTER, "'format'", "format", "expected a string"},
    {POINTER, "'format'", "'Format'", OTHER},
    {POINTER, "'format':", "'format'", "expected ':'"},
    {POINTER, "'halfstep-checkpoint-directory'", "7", "expected a string"},
    {POINTER, "directory',", "directory'", "expected ','"},
    {POINTER, "'version'", "version", "expected a string"},
    {POINTER, "'version'", "'Version'", OTHER},
    {POINTER, "'version':", "'version'", "expected ':'"},
    {POINTER, "-directory'", "-directories'", OTHER},
    {POINTER, "'version': 1", "'version': one", "plain decimal"},
    {POINTER, "'version': 1", "'version': 2", "manifest.json has version 2; this program reads version 1"},
    {POINTER, "'sequence'", "sequence", "expected a string"},
    {POINTER, "'sequence':", "'sequence'", "expected ':'"},
    {POINTER, "'sequence': 2", "'sequence': two", "plain decimal"},
    {POINTER, "'sequence': 2", "'sequence': 2, 'sequence': 2", OTHER},
    {POINTER, "'sequence': 2", "'sequence': 2, 'step': 4", OTHER},
    {POINTER, "'sequence': 2", "'sequence': 2, 'crc64': '0'", OTHER},
    {POINTER, "'sequence': 2", "'crc64': 0", "expected a string"},
    {POINTER, "'sequence': 2,", "", OTHER},
    {POINTER, "'sequence': 2,", "'sequence': 2", "expected ',' or '}'"},
    {POINTER, "'sequence'", "'sequel'", OTHER},
    {POINTER, "'checkpoint-4'", "4", "expected a string"},
    {POINTER, "'checkpoint-4'", "'checkpoint-'", OTHER},
    {POINTER, "'checkpoint-4'", "'checkpoint-x'", OTHER},
    {POINTER, "'checkpoint-4'", "'checkpoint-4-'", OTHER},
    {POINTER, "'checkpoint-4'", "'checkpoint-4-x'", OTHER},
    {POINTER, "'checkpoint-4'", "'checkpoint-4-5x'", OTHER},
    {POINTER, "'checkpoint-4'", "'checkpoint-4_5'", OTHER},
    {POINTER, "'checkpoint-4'", "'../checkpoint-4'", OTHER},
    {POINTER, "'checkpoint-4'", "'checkpoint-" LONG LONG "'", OTHER},
    {POINTER, "'current': 'checkpoint-4'", "'step': 4", OTHER},
    {POINTER, "'sequence': 2", "'sequence': 3", "is not the checkpoint that its parent's"},
    {POINTER, "'checkpoint-4'", "'checkpoint-5'", "checkpoint-5: No such file"},
    {INNER, "'version': 1", "'version': 2", "checkpoint-4/manifest.json has version 2; this program reads version 1"},
    {INNER, "halfstep-checkpoint", "checkpoint", OTHER},
    {INNER, "'sequence': 2", "'sequence': 2, 'current': 'checkpoint-4'", OTHER},
    {INNER, "'step': 4", "'step': -4", "plain decimal"},
    {INNER, "'step': 4", "'step': 9223372036854775808", "plain decimal integer from 0 to 2^63 - 1"},
    {INNER, "'step': 4", "'step': 4, 'step': 4", OTHER},
    {INNER, "'step'", "'steps'", OTHER},
    {INNER, "[", "{", "expected '['"},
    {INNER, "[\n", "[], 'values': [", "expected '{'"},
    {INNER, "[\n", "[7, ", "expected '{'"},
    {INNER, "{'name'", "{name", "expected a string"},
    {INNER, "'name':", "'name'", "expected ':'"},
    {INNER, "'name'", "'names'", OTHER},
    {INNER, "'name': 'empty'", "'name': 'empty', 'name': 'empty'", OTHER},
    {INNER, "'name': 'empty'", "'name': 7", "expected a string"},
    {INNER, "'name': 'empty', ", "", OTHER},
    {INNER, "'empty'", "'.empty'", OTHER},
    {INNER, "'empty'", "'../empty'", OTHER},
    {INNER, "'empty'", "''", OTHER},
    {INNER, "'empty'", "'manifest.json'", OTHER},
    {INNER, "'empty'", "'checkpoint-3'", OTHER},
    {INNER, "'empty'", "'" LONG LONG "'", OTHER},
    {INNER, "'empty'", "'full'", "full: No such file"},
    {INNER, "'bytes': 0", "'bytes': 0, 'bytes': 0", OTHER},
    {INNER, "'bytes': 0", "'bytes': none", "plain decimal"},
    {INNER, "'bytes': 0, ", "", OTHER},
    {INNER, "'bytes': 0", "'bytes': 1", "it has 0 bytes, its manifest says 1"},
    {INNER, ", 'crc64': '0000000000000000'", "", OTHER},
    {INNER, "'crc64': '0000000000000000'", "'crc64': 0", "expected a string"},
    {INNER, "'crc64': '0000000000000000'", "'crc64': '0000000000000000', 'crc64': '0000000000000000'", OTHER},
    {INNER, "'0000000000000000'", "'000000000000000'", OTHER},
    {INNER, "'0000000000000000'", "'000000000000000G'", OTHER},
    {INNER, "'0000000000000000'", "'0000000000000001'",
     "its checksum is 0000000000000000, its manifest says 0000000000000001"},
    {INNER, "'0000000000000000'}", "'0000000000000000']", "expected ',' or '}'"},
    {INNER, "\n  ]", "\n  }", "expected ',' or ']'"},
    {INNER, "'values': {", "'values': [", "expected '{'"},
    {INNER, "'recipe'", "recipe", "expected a string"},
    {INNER, "'recipe':", "'recipe'", "expected ':'"},
    {INNER, "'adamw/f32'", "adamw", "expected a string"},
    {INNER, "'adamw/f32'\n  }", "'adamw/f32'\n  ]", "expected ',' or '}'"},
    {INNER, "'recipe': 'adamw/f32'\n  }", "}, 'extra': {}", OTHER},
};

static void test_manifests(void)
{
    char pointer[4096], inner[4096], dir[600];
    snprintf(dir, sizeof dir, "%s", at("manifests"));
    TEST("manifests that say something wrong, under a checksum that fits") {
        MUST(save_step(dir, 3, 1));
        MUST(save_step(dir, 4, 2));
        snprintf(pointer, sizeof pointer, "%s", get_file(at("manifests/manifest.json")));
        snprintf(inner, sizeof inner, "%s", get_file(at("manifests/checkpoint-4/manifest.json")));
        for (size_t i = 0; i < COUNT(wrong); i++) {
            int which = wrong[i].which;
            const char *path =
                at(which == POINTER ? "manifests/manifest.json" : "manifests/checkpoint-4/manifest.json");
            const char *says = wrong[i].says, *original = which == POINTER ? pointer : inner;
            change_manifest(path, original, wrong[i].from, wrong[i].to);
            int64_t code = opened_step(dir, 0);
            if (!says) {
                CHECK(code == 4, "row %zu: %s", i, message);
            } else {
                int version = strstr(says, "has version") != NULL, absent = strstr(says, "No such file") != NULL;
                int contents = strstr(says, "is not the checkpoint") || strstr(says, "its manifest");
                CHECK(code == (version  ? UNSUPPORTED
                               : absent ? IO
                                        : FORMAT) &&
                          strstr(message, says),
                      "row %zu: %d \"%s\", not \"%s\"", i, (int)code, message, says);
                CHECK(version || absent || contents || (strstr(message, path) && strstr(message, "is corrupt: byte ")),
                      "row %zu: %s", i, message);
                /* The error names the other checkpoint. A newer version is no reason to fall back. */
                int good_one = which == POINTER && !strstr(says, "is not the") ? 4 : 3;
                CHECK(strstr(message, good_one == 4 ? "there is another checkpoint: " : "checkpoint-3"), "row %zu: %s",
                      i, message);
                code = opened_step(dir, 1);
                CHECK(version ? code == UNSUPPORTED : code == good_one && !strncmp(message, "note: ", 6),
                      "row %zu, with a fallback: %d %s", i, (int)code, message);
            }
            put_file(path, original, strlen(original));
        }
        OPENS(dir, 0, 4);
    }
    TEST("a manifest of more bytes than any has") {
        size_t bytes = (4u << 20) + 1;
        char *large = malloc(bytes);
        if (!large) exit(1);
        remove_tree(dir);
        MUST(save_step(dir, 3, 1));
        memset(large, ' ', bytes);
        put_file(at("manifests/manifest.json"), large, bytes);
        CHECK(opened_step(dir, 0) == FORMAT && strstr(message, "has 4194305 bytes, more than the 4194304 allowed"),
              "%s", message);
        OPENS(dir, 1, 3);
        free(large);
    }
    TEST("sequence numbers: the last one, one twice, one that is nothing") {
        remove_tree(dir);
        MUST(save_step(dir, 3, 1));
        snprintf(pointer, sizeof pointer, "%s", get_file(at("manifests/manifest.json")));
        /* No number can follow it: the save is refused, and the existing checkpoint stays. */
        snprintf(inner, sizeof inner, "%s", get_file(at("manifests/checkpoint-3/manifest.json")));
        change_manifest(at("manifests/manifest.json"), pointer, "'sequence': 1", "'sequence': 9223372036854775807");
        change_manifest(at("manifests/checkpoint-3/manifest.json"), inner, "'sequence': 1",
                        "'sequence': 9223372036854775807");
        EXPECT(save_step(dir, 4, 1), RANGE);
        CHECK(strstr(message, dir) && strstr(message, "sequence numbers are used up"), "%s", message);
        CHECK(opened_step(dir, 0) == 3 && count_entries(dir, "checkpoint-") == 1 && !count_entries(dir, ".halfstep"),
              "%s", message);
        /* Without a pointer the newest generation has it. */
        unlink(at("manifests/manifest.json"));
        EXPECT(save_step(dir, 4, 1), RANGE);
        OPENS(dir, 1, 3);
        change_manifest(at("manifests/checkpoint-3/manifest.json"), inner, "'sequence': 1", "'sequence': 1");
        /* A folder that was copied. Of two with one number the name decides, whatever the order on the disk. */
        if (mkdir(at("manifests/checkpoint-2"), 0777)) exit(1);
        change_manifest(at("manifests/checkpoint-2/manifest.json"), inner, "'step': 3", "'step': 2");
        put_file(at("manifests/checkpoint-2/empty"), "", 0);
        put_file(at("manifests/checkpoint-2/model.bin"), "model", 5);
        OPENS(dir, 1, 2);
        /* A pointer whose number is invalid, to a checkpoint that does not exist. */
        change_manifest(at("manifests/manifest.json"), pointer, "1,\n  'current': 'checkpoint-3'",
                        "0,\n  'current': 'checkpoint-9'");
        OPENS(dir, 0, IO);
        SAYS("checkpoint-9");
        /* A pointer whose number is invalid, to one that exists. Any number fits. */
        change_manifest(at("manifests/manifest.json"), pointer, "'sequence': 1", "'sequence': 0");
        OPENS(dir, 0, 3);
    }
    TEST("a pointer in the place of a checkpoint's manifest") {
        remove_tree(dir);
        MUST(save_step(dir, 3, 1));
        MUST(save_step(at("manifests/checkpoint-7"), 1, 1));
        CHECK(opened_step(dir, 0) == 3 && opened_step(at("manifests/checkpoint-7"), 0) == 1, "%s", message);
        snprintf(pointer, sizeof pointer, "%s", get_file(at("manifests/manifest.json")));
        change_manifest(at("manifests/manifest.json"), pointer, "checkpoint-3", "checkpoint-7");
        OPENS(dir, 0, FORMAT);
        SAYS("checkpoint-7 is not the checkpoint that its parent's");
        OPENS(dir, 1, 3);
        /* It is no checkpoint of this directory, so it is never removed. A leftover with such a manifest is not removed
         * either. */
        if (mkdir(at("manifests/.halfstep-tmp-1-0"), 0777)) exit(1);
        put_file(at("manifests/.halfstep-tmp-1-0/manifest.json"), pointer, strlen(pointer));
        if (mkdir(at("manifests/.halfstep-tmp-1-1"), 0777)) exit(1);
        put_file(at("manifests/.halfstep-tmp-1-1/.halfstep-part-.x"), "x", 1);
        MUST(save_step(dir, 8, 1));
        CHECK(strstr(message, ".halfstep-tmp-1-0 stays: it holds \"manifest.json\"") &&
                  strstr(message, ".halfstep-tmp-1-1 stays: it holds \".halfstep-part-.x\""),
              "%s", message);
        CHECK(opened_step(dir, 0) == 8 && opened_step(at("manifests/checkpoint-7"), 0) == 1, "%s", message);
        CHECK(count_entries(dir, "checkpoint-") == 2 && count_entries(dir, ".halfstep-tmp-1-") == 2,
              "something was removed");
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch("io-arguments");
    make_good();
    test_null();
    test_sizes();
    test_names();
    test_tensors();
    test_places();
    test_manifests();
    drop_good();
    return test_done();
}
