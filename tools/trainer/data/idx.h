/* Labelled square grey images in memory: read from the IDX files of MNIST and its relatives, or drawn by
 * trainer/data/digits.h.
 *
 * IDX is big-endian: u32 magic (0x803 for images, 0x801 for labels), u32 count, for images u32 rows and u32 columns,
 * then one byte per pixel, row by row, or one per label. */
#ifndef HALFSTEP_IDX_H
#define HALFSTEP_IDX_H

#include <stddef.h>
#include <stdint.h>

enum { IMAGE_CLASSES = 10 };

struct image_set {
    uint8_t *images, *labels; /* n * side * side pixels, n labels below IMAGE_CLASSES */
    int64_t n;
    int side;
    char *memory[2]; /* holds images and labels */
};

/* Reads train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte in the
 * directory, each as it is or with .gz. Returns 0, or -1 with an error text that names the file; then both sets are
 * empty. */
int idx_load(const char *directory, struct image_set *train, struct image_set *test, char *error, size_t error_bytes);
void image_set_free(struct image_set *set);

#endif
