/* Fuzzes halfstep_read_optimizer(). A file is either loaded whole, or refused with an error text and every bit of the
 * optimizer unchanged. fuzz.h says how to run it. */
#define FUZZ_NAME "fuzz_optimizer"
#include "fuzz.h"

#include <fcntl.h>

#include "halfstep_io.h"

enum { TENSORS = 3, ROWS = 4, LENGTH = 40, ROOM = 1 << 16 };

static halfstep_optimizer *optimizer;
static uint16_t stored[TENSORS][ROWS * LENGTH];
static void *weights[TENSORS] = {stored[0], stored[1], stored[2]};
static uint8_t good[ROOM];
static size_t good_bytes;

static uint64_t mix(uint64_t hash, const void *data, uint64_t bytes)
{
    const unsigned char *next = data;
    for (uint64_t i = 0; i < bytes; i++) hash = (hash ^ next[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Returns a hash of everything that a file may change. */
static uint64_t fingerprint(void)
{
    uint64_t hash = mix(1, stored, sizeof stored);
    double value;
    for (int i = 0; i < TENSORS; i++) {
        halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR, .index = i};
        demand(!halfstep_get_record(optimizer, &record), "no record");
        hash = mix(hash, &record, sizeof record);
        for (int32_t slot = 0; slot < HALFSTEP_SLOT_STATE + 3; slot++) {
            halfstep_slot_info info = {.struct_size = sizeof info};
            if (halfstep_get_slot_info(optimizer, i, slot, &info)) continue;
            if (info.code) hash = mix(hash, info.code, info.code_bytes);
            if (info.extra) hash = mix(hash, info.extra, info.extra_bytes);
        }
    }
    for (int32_t g = 0; g < halfstep_group_count(optimizer); g++) {
        static const char *const names[] = {"lr", "beta1", "beta2", "weight_decay", "warmup_steps", "reference_lr"};
        halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_GROUP, .index = g};
        demand(!halfstep_get_record(optimizer, &record), "no steps");
        hash = mix(hash, &record, sizeof record);
        for (int i = 0; i < 6; i++)
            if (!halfstep_get_hyper(optimizer, g, names[i], &value)) hash = mix(hash, &value, sizeof value);
        hash = mix(hash, halfstep_get_choice(optimizer, g, "schedule"), 4);
    }
    halfstep_record record = {.struct_size = sizeof record};
    demand(!halfstep_get_record(optimizer, &record), "no seed");
    return mix(hash, &record, sizeof record);
}

static void build(void)
{
    static const char *const recipes[2] = {"adamw/bf16-ecc8/int4", "lamb/bf16-kahan/f32"}, *const names[] = {"a", "b/c",
                                                                                                             "d"};
    float values[ROWS * LENGTH], gradients[TENSORS][ROWS * LENGTH];
    const void *pointers[TENSORS] = {gradients[0], gradients[1], gradients[2]};
    int32_t group[2], index;
    demand(!halfstep_create(NULL, &optimizer), "no optimizer");
    for (int i = 0; i < 2; i++) demand(!halfstep_add_group(optimizer, recipes[i], &group[i]), "no group");
    for (int i = 0; i < TENSORS; i++) {
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = group[i % 2],
                             .name = names[i],
                             .ndim = 2,
                             .rows = ROWS,
                             .row_length = LENGTH,
                             .gradient = "f32"};
        demand(!halfstep_add_tensor(optimizer, &t, &index), "no tensor");
    }
    demand(!halfstep_allocate_states(optimizer), "no states");
    for (int i = 0; i < ROWS * LENGTH; i++) {
        values[i] = (float)(i % 17) - 8;
        for (int k = 0; k < TENSORS; k++) gradients[k][i] = 0.01f * values[i];
    }
    for (int i = 0; i < TENSORS; i++)
        demand(!halfstep_write_slot(optimizer, i, HALFSTEP_SLOT_WEIGHT, weights[i], 0, ROWS, values), "no weights");
    for (int i = 0; i < 2; i++) demand(!halfstep_step(optimizer, weights, pointers), "no step");

    const char *base = getenv("TMPDIR");
    char path[600], error[512];
    snprintf(path, sizeof path, "%.500s/halfstep-fuzz-%ld", base && *base ? base : P_tmpdir, (long)getpid());
    demand(!halfstep_write_optimizer(path, optimizer, weights, NULL, error, sizeof error), "cannot write");
    FILE *stream = fopen(path, "rb");
    demand(stream != NULL, "cannot read");
    good_bytes = fread(good, 1, sizeof good, stream);
    fclose(stream);
    unlink(path);
    demand(good_bytes > 1000 && good_bytes < sizeof good / 2, "an odd file");
}

/* Returns 1 if the text is one line and its end does not say that the optimizer is partly loaded. What the text quotes
 * of the file may say that. */
static int is_text_of_refusal(const char *text)
{
    static const char partly[] = "is only partly loaded: load it again";
    const size_t length = strlen(text), end = sizeof partly - 1;
    return length > 10 && !strchr(text, '\n') && (length < end || strcmp(text + length - end, partly) != 0);
}

static int read_bytes(const uint8_t *data, size_t size, char *error, size_t error_size)
{
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    demand(fd >= 0 && write(fd, data, size) == (ssize_t)size, "no memory file");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int code = halfstep_read_optimizer(path, optimizer, weights, NULL, error, error_size);
    close(fd);
    return code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char error[512];
    if (!optimizer) build();
    uint64_t before = fingerprint();
    int code = read_bytes(data, size, error, sizeof error);
    if (code) {
        fuzz_rejected++;
        demand(fingerprint() == before, "a refused file changed the optimizer");
        demand(is_text_of_refusal(error), "an odd text");
    } else {
        fuzz_accepted++;
        /* Loading is repeatable: from the same start it must lead to the same end. The good file in between resets
         * everything, because a file leaves alone what it does not mention. */
        uint64_t taken[2];
        for (int i = 0; i < 2; i++) {
            demand(!read_bytes(good, good_bytes, error, sizeof error), "the good file is refused");
            demand(!read_bytes(data, size, error, sizeof error), "it is refused the second time");
            taken[i] = fingerprint();
        }
        demand(taken[0] == taken[1], "it is not the same again");
    }
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER

/* Replaces a digit at or after `at` by another one, so that numbers stay valid but differ. */
static void change_digit(uint8_t *data, size_t size, size_t at)
{
    while (at < size && (data[at] < '0' || data[at] > '9')) at++;
    if (at < size) data[at] = (uint8_t)('0' + draw(10));
}

static size_t make_input(uint8_t *data, size_t room)
{
    if (!optimizer) build();
    memcpy(data, good, good_bytes);
    size_t header = 8 + data[0] + 256u * data[1], size = good_bytes;
    for (uint64_t count = draw(4); count; count--) change_digit(data, header, 8 + draw(header - 8));
    if (draw(3) == 0) data[draw(size)] ^= (uint8_t)(1u << draw(8));
    return draw(3) ? size : mutate(data, size, room, "{}[]\",:0123456789\\.-xpe ");
}

#endif
