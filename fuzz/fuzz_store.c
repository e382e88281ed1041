/* Fuzzes the opening of a file of states. A file that is accepted must describe itself, and the optimizer must step and
 * go on from there. A refused one gives one sentence. fuzz.h says how to run it.
 *
 * An input is a byte of flags, then header and two records, each behind its length in two bytes. They are laid over a
 * good file. A flag of a part sets its length and checksum right, so that its contents are what is judged. */
#define FUZZ_NAME "fuzz_store"
#define HALFSTEP_ADVANCED
#include "fuzz.h"

#include <fcntl.h>

#include "halfstep_io.h"

enum { TENSORS = 2, ELEMENTS = 40, PARTS = 3, HEADER_HEAD = 72, RECORD_HEAD = 32, ROOM = 1 << 14 };

/* A good file: its descriptor, where its parts are, and their bytes. */
static struct {
    int fd;
    char path[64];
    uint64_t begin[PARTS];
    size_t bytes[PARTS];
    uint8_t part[PARTS][ROOM];
    char weights[TENSORS][4 * ELEMENTS];
} good;

static halfstep_optimizer *make_optimizer(void)
{
    static const char *const recipes[TENSORS] = {"adamw/bf16-ecc8/int8", "lion/f32/bf16-sr"};
    halfstep_optimizer *o;
    demand(!halfstep_create(&(halfstep_options){.struct_size = sizeof(halfstep_options), .threads = 1}, &o),
           "no optimizer");
    for (int i = 0; i < TENSORS; i++) {
        halfstep_tensor tensor = {.struct_size = sizeof tensor,
                                  .name = i ? "b/weight" : "a",
                                  .gradient = "f32",
                                  .ndim = 2,
                                  .rows = 4,
                                  .row_length = ELEMENTS / 4};
        int32_t index;
        demand(!halfstep_add_group(o, recipes[i], &tensor.group) && !halfstep_add_tensor(o, &tensor, &index),
               "no tensor");
    }
    return o;
}

static int step(halfstep_optimizer *o)
{
    static float gradient[ELEMENTS] = {1.0f, -2.0f};
    void *weights[TENSORS] = {good.weights[0], good.weights[1]};
    const void *gradients[TENSORS] = {gradient, gradient};
    return halfstep_step(o, weights, gradients);
}

static uint64_t number_at(const uint8_t *bytes)
{
    uint64_t number;
    memcpy(&number, bytes, sizeof number);
    return number;
}

/* Makes the good file, in memory but for its creation, with two records. */
static void make_good(void)
{
    void *weights[TENSORS] = {good.weights[0], good.weights[1]};
    char path[600], error[1024] = "", copy[4096];
    const char *base = getenv("TMPDIR");
    halfstep_store *store;
    halfstep_optimizer *o = make_optimizer();
    snprintf(path, sizeof path, "%.500s/halfstep-fuzz-store-%ld", base && *base ? base : P_tmpdir, (long)getpid());
    demand(!halfstep_store_create(path, o, weights, NULL, &store, error, sizeof error) && !step(o), error);
    demand(!halfstep_store_set_value(store, "k", "v\n", error, sizeof error) && !step(o), error);
    halfstep_store_close(store);
    halfstep_destroy(o);
    good.fd = memfd_create("fuzz", MFD_CLOEXEC);
    snprintf(good.path, sizeof good.path, "/proc/self/fd/%d", good.fd);
    int from = open(path, O_RDONLY);
    demand(good.fd >= 0 && from >= 0, "no memory file");
    for (ssize_t n; (n = read(from, copy, sizeof copy)) > 0;) demand(write(good.fd, copy, (size_t)n) == n, "write");
    close(from);
    unlink(path);
    for (int i = 0; i < PARTS; i++) {
        uint8_t head[HEADER_HEAD];
        demand(pread(good.fd, head, sizeof head, (off_t)good.begin[i]) == sizeof head, "read");
        good.bytes[i] = i ? RECORD_HEAD + (size_t)number_at(head + 16) : HEADER_HEAD + (size_t)number_at(head + 56);
        demand(good.bytes[i] <= ROOM && pread(good.fd, good.part[i], ROOM, (off_t)good.begin[i]) == ROOM,
               "a part is too large");
        memset(good.part[i] + good.bytes[i], 0, ROOM - good.bytes[i]);
        if (i == 0) good.begin[1] = (good.bytes[0] + 4095) / 4096 * 4096;
        if (i == 0) good.begin[2] = good.begin[1] + number_at(head + 40);
    }
}

/* The bit-by-bit form of docs/checkpoints.md. */
static uint64_t crc64(const uint8_t *data, size_t bytes)
{
    uint64_t crc = ~UINT64_C(0);
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? UINT64_C(0xc96c5795d7870f42) : 0);
    }
    return ~crc;
}

static void put_right(uint8_t *part, size_t head, size_t bytes)
{
    const uint64_t length = bytes - head;
    memcpy(part + head - 16, &length, sizeof length);
    memset(part + head - 8, 0, 8);
    const uint64_t crc = crc64(part, bytes);
    memcpy(part + head - 8, &crc, sizeof crc);
}

static void check_accepted(halfstep_store *store, halfstep_optimizer *o)
{
    halfstep_store_info info = {.struct_size = sizeof info};
    char error[1024];
    demand(!halfstep_store_get_info(good.path, &info, error, sizeof error), "it does not describe itself");
    demand(info.generation > 0 && info.pieces == TENSORS && info.has_weights, "an odd description");
    halfstep_store_free_info(&info);
    demand(!halfstep_store_set_value(store, "key", "value", error, sizeof error), error);
    demand(!strcmp(halfstep_store_value(store, "key"), "value"), "the value");
    const int code = step(o);
    demand(code == HALFSTEP_OK || code == HALFSTEP_NONFINITE || code == HALFSTEP_ERROR_RANGE, halfstep_error_detail(o));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t part[ROOM];
    if (!good.path[0]) make_good();
    const int flags = size ? data[0] : 0;
    size_t at = size > 0;
    for (int i = 0; i < PARTS; i++) {
        size_t bytes = size - at >= 2 ? data[at] | (size_t)data[at + 1] << 8 : 0;
        at += size - at >= 2 ? 2 : 0;
        if (bytes > size - at) bytes = size - at;
        if (bytes > ROOM) bytes = ROOM;
        memset(part, 0, sizeof part);
        memcpy(part, data + at, bytes);
        const size_t head = i ? RECORD_HEAD : HEADER_HEAD;
        if (flags >> i & 1 && bytes >= head) put_right(part, head, bytes);
        /* The header's room ends where the records begin. */
        const size_t room = i ? ROOM : (size_t)good.begin[1];
        demand(pwrite(good.fd, part, room < ROOM ? room : ROOM, (off_t)good.begin[i]) > 0, "write");
        at += bytes;
    }
    void *weights[TENSORS] = {good.weights[0], good.weights[1]};
    char error[1024];
    halfstep_store *store;
    halfstep_optimizer *o = make_optimizer();
    const int code = halfstep_store_open(good.path, o, weights, NULL, &store, error, sizeof error);
    demand((code == HALFSTEP_OK) == (store != NULL), "code and store disagree");
    if (store) {
        fuzz_accepted++;
        check_accepted(store, o);
    } else {
        fuzz_rejected++;
        demand(code == HALFSTEP_ERROR_FORMAT || code == HALFSTEP_ERROR_MISMATCH || code == HALFSTEP_ERROR_RANGE ||
                   code == HALFSTEP_ERROR_DUPLICATE || code == HALFSTEP_ERROR_ARGUMENT,
               error);
        demand(strlen(error) > 20 && !strchr(error, '\n'), "an odd failure");
    }
    halfstep_store_close(store);
    halfstep_destroy(o);
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER

static size_t make_input(uint8_t *data, size_t room)
{
    if (!good.path[0]) make_good();
    size_t size = 1;
    data[0] = (uint8_t)(draw(4) ? 7 : draw(8));
    const uint64_t changed = draw(PARTS + 1);
    for (uint64_t i = 0; i < PARTS; i++) {
        const size_t begin = size + 2;
        memcpy(data + begin, good.part[i], good.bytes[i]);
        size = begin + good.bytes[i];
        if (i == changed) size = begin + mutate(data + begin, good.bytes[i], room - begin, "{}[]\",:0123456789.axf- ");
        data[begin - 2] = (uint8_t)(size - begin);
        data[begin - 1] = (uint8_t)((size - begin) >> 8);
    }
    return size;
}

#endif
