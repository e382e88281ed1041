/* Fuzzes training text, gzip or not, and the IDX files of digits. Data that is accepted must be complete.
 *
 * The first byte of an input selects the kind: 0 is text, others are one of the four IDX files. Its upper bit gives the
 * file a name in .gz. */
#define FUZZ_NAME "fuzz_data"
#include "fuzz.h"

#include "files.h"
#include "trainer/data/data.h"
#include "trainer/data/idx.h"
#include <zlib.h>

static const char *const names[] = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                                    "t10k-labels-idx1-ubyte"};
enum { IMAGES = 3, SIDE = 4 };

/* Writes a good file of that kind. Returns its size in bytes. */
static size_t good(int which, uint8_t *out)
{
    int images = which % 2 == 0;
    uint32_t words[] = {images ? 0x803 : 0x801, IMAGES, SIDE, SIDE};
    size_t used = 0;
    for (int w = 0; w < (images ? 4 : 2); w++)
        for (int shift = 24; shift >= 0; shift -= 8) out[used++] = (uint8_t)(words[w] >> shift);
    for (int i = 0; i < (images ? IMAGES * SIDE * SIDE : IMAGES); i++) out[used++] = (uint8_t)(images ? 37 * i : i);
    return used;
}

static void prepare(void)
{
    uint8_t data[256];
    if (scratch[0]) return;
    make_scratch();
    for (int i = 0; i < 4; i++) put_file(names[i], data, good(i, data));
}

static void judge(int failed, const char *error)
{
    if (failed) {
        fuzz_rejected++;
        demand(strlen(error) > 10 && !strchr(error, '\n'), "no sentence");
    } else {
        fuzz_accepted++;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char error[512] = "", name[64];
    if (!size) return 0;
    prepare();
    int which = data[0] & 127;
    volatile uint64_t sum = 0;
    if (which == 0) {
        struct data_file file;
        struct data_part train, validation;
        uint8_t windows[2 * 17];
        int failed = data_load(put_file("text", data + 1, size - 1), &file, error, sizeof error);
        judge(failed, error);
        demand(failed || file.n > 0, "an empty file is taken");
        for (size_t i = 0; i < file.n; i++) sum += file.bytes[i];
        char path[1024];
        snprintf(path, sizeof path, "%s/text", scratch);
        struct data_file joined;
        size_t files;
        int refused = data_load_all((const char *[]){path, path}, 2, &joined, &files, error, sizeof error);
        demand(!refused == !failed, "two of it are judged otherwise");
        demand(failed || (joined.n == 2 * file.n && !memcmp(joined.bytes, file.bytes, file.n) &&
                          !memcmp(joined.bytes + file.n, file.bytes, file.n)),
               "not twice the same");
        data_free(&joined);
        if (failed) return 0;
        data_split(&file, &train, &validation);
        demand(train.n + validation.n == file.n, "the parts are not the whole");
        if (!data_check(&train, 16, "text", error, sizeof error))
            for (uint64_t step = 0; step < 50; step++) data_batch(&train, size, step, 0, 2, 16, windows);
        data_free(&file);
        return 0;
    }
    which = (which - 1) % 4;
    snprintf(name, sizeof name, "%s%s", names[which], data[0] & 128 ? ".gz" : "");
    const char *path = put_file(name, data + 1, size - 1);
    char plain[1024];
    snprintf(plain, sizeof plain, "%s/%s", scratch, names[which]);
    if (data[0] & 128) unlink(plain);
    struct image_set train, test;
    int failed = idx_load(scratch, &train, &test, error, sizeof error);
    judge(failed, error);
    const struct image_set *sets[] = {&train, &test};
    for (int s = 0; s < 2; s++) {
        demand(!failed || (!sets[s]->images && !sets[s]->n), "a set after an error");
        for (int64_t i = 0; i < sets[s]->n; i++) {
            demand(sets[s]->labels[i] < IMAGE_CLASSES, "a label out of range");
            for (int p = 0; p < sets[s]->side * sets[s]->side; p++)
                sum += sets[s]->images[i * sets[s]->side * sets[s]->side + p];
        }
    }
    (void)sum;
    image_set_free(&train);
    image_set_free(&test);
    if (data[0] & 128) unlink(path);
    uint8_t again[256];
    put_file(names[which], again, good(which, again));
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER
static size_t pack(const uint8_t *in, size_t bytes, uint8_t *out, size_t room)
{
    z_stream stream = {
        .next_in = (uint8_t *)(uintptr_t)in, .avail_in = (unsigned)bytes, .next_out = out, .avail_out = (unsigned)room};
    demand(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "no deflate");
    demand(deflate(&stream, Z_FINISH) == Z_STREAM_END, "no room");
    deflateEnd(&stream);
    return stream.total_out;
}

static size_t make_input(uint8_t *data, size_t room)
{
    uint8_t plain[1024];
    size_t bytes;
    data[0] = (uint8_t)draw(5);
    if (data[0] == 0) {
        bytes = draw(400);
        for (size_t i = 0; i < bytes; i++) plain[i] = (uint8_t)(32 + draw(90));
    } else {
        bytes = good(data[0] - 1, plain);
        if (draw(3) == 0) bytes = mutate(plain, bytes, sizeof plain, "\377\200\001\002\003\004\010");
    }
    if (draw(2) == 0) {
        if (data[0]) data[0] |= 128;
        size_t packed = pack(plain, bytes, data + 1, room / 2);
        if (draw(8) == 0) packed += pack(plain, bytes, data + 1 + packed, room / 2); /* another gzip member */
        bytes = packed;
    } else {
        memcpy(data + 1, plain, bytes);
    }
    return 1 + (draw(2) ? mutate(data + 1, bytes, room - 1, "\037\213\010\377\200") : bytes);
}
#endif
