/* Labelled digits for machines without a data set. Each is drawn from a few strokes. Their points are moved a little,
 * and the whole digit is turned, sheared, stretched and shifted. The width and ink of the pen vary, and noise is
 * added. */
#ifndef HALFSTEP_DIGITS_H
#define HALFSTEP_DIGITS_H

#include "trainer/data/idx.h"

enum { DIGITS_SIDE = 28 };

/* Draws n images. Image i depends on (seed, part, i) only, with the same bytes everywhere. Two parts of a seed share no
 * image. Returns 0, or -1 if out of memory. */
int digits_render(uint64_t seed, uint64_t part, int64_t n, struct image_set *out);

#endif
