#include "trainer/data/idx.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "trainer/data/data.h"

enum { MAGIC_IMAGES = 0x803, MAGIC_LABELS = 0x801, PATH_BYTES = 4096 };

static uint32_t big_endian(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* Reads NAME or NAME.gz and checks its size against its own header. Sets size[] to the dimensions and `*start` to the
 * offset of the values. */
static int load(const char *directory, const char *name, uint32_t magic, uint32_t size[3], size_t *start,
                char path[PATH_BYTES], struct data_file *file, char *error, size_t error_bytes)
{
    static const char *const endings[] = {"", ".gz"};
    int dims = (int)(magic & 0xFF), found = 0;
    for (int i = 0; i < 2 && !found; i++) {
        if (snprintf(path, PATH_BYTES, "%s/%s%s", directory, name, endings[i]) >= PATH_BYTES) {
            snprintf(error, error_bytes, "the name of the folder is too long");
            return -1;
        }
        found = access(path, F_OK) == 0;
    }
    if (!found) {
        snprintf(error, error_bytes, "%s: has neither %s nor %s.gz", directory, name, name);
        return -1;
    }
    if (data_load(path, file, error, error_bytes) != 0) return -1;
    *start = 4 + 4 * (size_t)dims;
    if (file->n < *start) {
        snprintf(error, error_bytes, "%s: %zu bytes are too short for an IDX file", path, file->n);
        return -1;
    }
    if (big_endian(file->bytes) != magic) {
        snprintf(error, error_bytes, "%s: begins with %08x; IDX %s begin with %08x", path, big_endian(file->bytes),
                 magic == MAGIC_IMAGES ? "images" : "labels", magic);
        return -1;
    }
    double wanted = (double)*start, values = 1;
    for (int i = 0; i < dims; i++) {
        size[i] = big_endian(file->bytes + 4 + 4 * i);
        values *= size[i];
    }
    wanted += values;
    if ((double)file->n == wanted) return 0;
    snprintf(error, error_bytes, "%s: %s; its header asks for %.0f bytes, the file has %zu", path,
             (double)file->n < wanted ? "truncated" : "too long", wanted, file->n);
    return -1;
}

static int load_images(const char *directory, const char *name, struct image_set *set, char *error, size_t error_bytes)
{
    struct data_file file;
    char path[PATH_BYTES];
    uint32_t size[3] = {0};
    size_t start;
    memset(&file, 0, sizeof file);
    int status = load(directory, name, MAGIC_IMAGES, size, &start, path, &file, error, error_bytes);
    if (!status && (size[0] < 1 || size[1] < 1 || size[1] != size[2] || size[0] > INT32_MAX || size[1] > 4096)) {
        snprintf(error, error_bytes, "%s: holds %u images of %u x %u; expected square ones of at most 4096 x 4096",
                 path, size[0], size[1], size[2]);
        status = -1;
    }
    if (status) {
        data_free(&file);
        return -1;
    }
    set->memory[0] = (char *)file.bytes;
    set->images = file.bytes + start;
    set->n = size[0];
    set->side = (int)size[1];
    return 0;
}

static int load_labels(const char *directory, const char *name, struct image_set *set, char *error, size_t error_bytes)
{
    struct data_file file;
    char path[PATH_BYTES];
    uint32_t size[3] = {0};
    size_t start;
    memset(&file, 0, sizeof file);
    int status = load(directory, name, MAGIC_LABELS, size, &start, path, &file, error, error_bytes);
    if (!status && size[0] != set->n) {
        snprintf(error, error_bytes, "%s: has %u labels for %lld images", path, size[0], (long long)set->n);
        status = -1;
    }
    for (uint32_t i = 0; !status && i < size[0]; i++)
        if (file.bytes[start + i] >= IMAGE_CLASSES) {
            snprintf(error, error_bytes, "%s: label %u is %d; classes are 0 to %d", path, i, file.bytes[start + i],
                     IMAGE_CLASSES - 1);
            status = -1;
        }
    if (status) {
        data_free(&file);
        return -1;
    }
    set->memory[1] = (char *)file.bytes;
    set->labels = file.bytes + start;
    return 0;
}

void image_set_free(struct image_set *set)
{
    free(set->memory[0]);
    free(set->memory[1]);
    memset(set, 0, sizeof *set);
}

int idx_load(const char *directory, struct image_set *train, struct image_set *test, char *error, size_t error_bytes)
{
    memset(train, 0, sizeof *train);
    memset(test, 0, sizeof *test);
    int bad = load_images(directory, "train-images-idx3-ubyte", train, error, error_bytes) ||
              load_labels(directory, "train-labels-idx1-ubyte", train, error, error_bytes) ||
              load_images(directory, "t10k-images-idx3-ubyte", test, error, error_bytes) ||
              load_labels(directory, "t10k-labels-idx1-ubyte", test, error, error_bytes);
    if (!bad && train->side != test->side) {
        snprintf(error, error_bytes, "%s: training images have %d x %d pixels, test images %d x %d; they must agree",
                 directory, train->side, train->side, test->side, test->side);
        bad = 1;
    }
    if (!bad) return 0;
    image_set_free(train);
    image_set_free(test);
    return -1;
}
