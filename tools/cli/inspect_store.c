/* inspect of a file that keeps the states of an optimizer (halfstep_store_create). The library opens it read-only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep_io.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/document.h"
#include "io/json.h"

struct pair {
    const char *key, *value;
};

struct slot {
    const char *name, *format;
    uint64_t bytes[2]; /* of codes and of the extra plane */
};

struct tensor {
    const char *name, *recipe;
    uint64_t shape[2]; /* rows and row length */
    struct slot slot[HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES];
    size_t slots;
};

/* What a file says. The strings are parts of `info`. */
struct about {
    halfstep_store_info info;
    struct pair *metadata;
    struct tensor *tensor;
    size_t pairs, pair_capacity, tensors, tensor_capacity;
};

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

/* Makes room for one more item. Returns 0 without memory. */
static int grow(hstep_json *json, void *items, size_t n, size_t *capacity, size_t bytes)
{
    return io_grow(items, n, capacity, bytes) || hstep_json_fail(json, "out of memory");
}

/* Goes to the next item of a list, the first one if n is 0. Returns 0 behind the last, and after an error. */
static int next_item(hstep_json *json, size_t n)
{
    if (json->problem || (n == 0 && !hstep_json_expect(json, '['))) return 0;
    if (hstep_json_take(json, ']')) return 0;
    return n == 0 || hstep_json_expect(json, ',');
}

/* Reads a list of at most two numbers. */
static void read_two(hstep_json *json, uint64_t numbers[2])
{
    for (size_t n = 0; next_item(json, n); n++)
        if (n == 2) hstep_json_fail(json, "too many numbers");
        else hstep_json_number(json, &numbers[n]);
}

static void read_slots(hstep_json *json, struct tensor *tensor)
{
    const char *key;
    for (; next_item(json, tensor->slots); tensor->slots++) {
        struct slot slot = {"", "", {0, 0}};
        for (size_t n = 0; hstep_json_member(json, &n, &key);) {
            if (strcmp(key, "slot") == 0) hstep_json_string(json, &slot.name);
            else if (strcmp(key, "format") == 0) hstep_json_string(json, &slot.format);
            else if (strcmp(key, "bytes") == 0) read_two(json, slot.bytes);
            else hstep_json_skip(json);
        }
        if (tensor->slots == COUNT_OF(tensor->slot)) hstep_json_fail(json, "too many slots");
        else tensor->slot[tensor->slots] = slot;
    }
}

static void read_tensor(hstep_json *json, struct tensor *tensor)
{
    const char *key;
    *tensor = (struct tensor){.name = "", .recipe = ""};
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (strcmp(key, "name") == 0) hstep_json_string(json, &tensor->name);
        else if (strcmp(key, "recipe") == 0) hstep_json_string(json, &tensor->recipe);
        else if (strcmp(key, "shape") == 0) read_two(json, tensor->shape);
        else if (strcmp(key, "slots") == 0) read_slots(json, tensor);
        else hstep_json_skip(json);
    }
}

static void read_tensors(hstep_json *json, struct about *about)
{
    for (; next_item(json, about->tensors); about->tensors++)
        if (grow(json, &about->tensor, about->tensors, &about->tensor_capacity, sizeof *about->tensor))
            read_tensor(json, &about->tensor[about->tensors]);
}

static void read_metadata(hstep_json *json, struct about *about)
{
    struct pair pair;
    for (size_t n = 0; hstep_json_member(json, &n, &pair.key);)
        if (hstep_json_string(json, &pair.value) &&
            grow(json, &about->metadata, about->pairs, &about->pair_capacity, sizeof pair))
            about->metadata[about->pairs++] = pair;
}

/* Reads one member of an object, and skips the others. Returns the problem, or NULL. */
static const char *read_member(char *text, const char *name, void (*read)(hstep_json *json, struct about *about),
                               struct about *about)
{
    hstep_json json = {text, strlen(text), 0, NULL};
    const char *key;
    for (size_t n = 0; hstep_json_member(&json, &n, &key);) {
        if (strcmp(key, name) == 0) read(&json, about);
        else hstep_json_skip(&json);
    }
    return json.problem;
}

static int about_read(const char *path, struct about *about, char *error, size_t error_bytes)
{
    if (halfstep_store_get_info(path, &about->info, error, error_bytes) != HALFSTEP_OK) return -1;
    const char *header = read_member(about->info.header, "tensors", read_tensors, about);
    const char *commit = read_member(about->info.commit, "metadata", read_metadata, about);
    if (!header && !commit) return 0;
    snprintf(error, error_bytes, "%s: the %s: %s", path, header ? "header" : "last record", header ? header : commit);
    return -1;
}

static const char *seed_of(const struct about *about)
{
    for (size_t i = 0; i < about->pairs; i++)
        if (strcmp(about->metadata[i].key, "seed") == 0) return about->metadata[i].value;
    return NULL;
}

/* Returns the recipe that all tensors have, or the number of recipes in words. */
static const char *recipe_of_all(const struct about *about)
{
    for (size_t i = 1; i < about->tensors; i++)
        if (strcmp(about->tensor[i].recipe, about->tensor[0].recipe) != 0) return "of several groups";
    return about->tensors ? about->tensor[0].recipe : "unknown";
}

/* ---- Printing ---------------------------------------------------------------------------------------------------- */

static void put_store(struct document *d, const char *path, const struct about *about)
{
    json_t *object = document_begin(d);
    put_text(d, object, "file", path);
    put_integer(d, object, "step", (int64_t)about->info.steps);
    put_integer(d, object, "saves", (int64_t)about->info.generation);
    put_text(d, object, "recipe", recipe_of_all(about));
    const char *seed = seed_of(about);
    if (seed) put_text(d, object, "seed", seed);
    put_integer(d, object, "bytes", (int64_t)about->info.bytes);
    put_flag(d, object, "weights", about->info.has_weights);
    json_t *metadata = put_object(d, object, "metadata");
    for (size_t i = 0; i < about->pairs; i++) put_text(d, metadata, about->metadata[i].key, about->metadata[i].value);
    json_t *tensors = put_array(d, object, "tensors");
    for (size_t i = 0; i < about->tensors; i++) {
        const struct tensor *t = &about->tensor[i];
        json_t *tensor = put_object(d, tensors, NULL), *slots;
        put_text(d, tensor, "name", t->name);
        put_text(d, tensor, "recipe", t->recipe);
        json_t *shape = put_array(d, tensor, "shape");
        for (int k = 0; k < 2; k++) put_integer(d, shape, NULL, (int64_t)t->shape[k]);
        slots = put_object(d, tensor, "slots");
        for (size_t k = 0; k < t->slots; k++) {
            json_t *slot = put_object(d, slots, t->slot[k].name);
            put_text(d, slot, "format", t->slot[k].format);
            put_integer(d, slot, "bytes", (int64_t)(t->slot[k].bytes[0] + t->slot[k].bytes[1]));
        }
    }
}

static void print_store(const char *path, const struct about *about)
{
    const char *seed = seed_of(about);
    uint64_t bytes = 0;
    print_words("", path, "\n");
    printf("step %llu", (unsigned long long)about->info.steps);
    print_words(", recipe ", recipe_of_all(about), "");
    print_words(", seed ", seed ? seed : "unknown", "");
    printf(", %llu bytes in all, %s weights\n", (unsigned long long)about->info.bytes,
           about->info.has_weights ? "with" : "without");
    for (size_t i = 0; i < about->pairs; i++) {
        print_words("  ", about->metadata[i].key, "");
        print_words(" = ", about->metadata[i].value, "\n");
    }
    for (size_t i = 0; i < about->tensors; i++) {
        const struct tensor *t = &about->tensor[i];
        print_words("  ", t->name, "");
        printf("  %llu x %llu", (unsigned long long)t->shape[0], (unsigned long long)t->shape[1]);
        for (size_t k = 0; k < t->slots; k++) {
            print_words(", ", t->slot[k].name, "");
            print_words(" ", t->slot[k].format, "");
            bytes += t->slot[k].bytes[0] + t->slot[k].bytes[1];
        }
        printf("\n");
    }
    printf("  %zu tensors in %llu pieces, %llu bytes\n", about->tensors, (unsigned long long)about->info.pieces,
           (unsigned long long)bytes);
}

int inspect_store(const char *path, int json)
{
    struct about about = {.info = {.struct_size = sizeof about.info}};
    struct document document = {0};
    char error[1024] = "";
    int status = 0;
    if (about_read(path, &about, error, sizeof error) != 0) {
        status = failure("inspect", "%s", error);
    } else if (json) {
        put_store(&document, path, &about);
        status = document_print(&document);
    } else {
        print_store(path, &about);
    }
    document_free(&document);
    free(about.tensor);
    free(about.metadata);
    halfstep_store_free_info(&about.info);
    return status;
}
