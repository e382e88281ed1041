/* Labelled digits for machines that have no data set: each is drawn from a few strokes, whose points are moved a
 * little, turned, sheared, stretched and shifted as a whole, with a pen of its own width and ink, and covered with
 * noise. */
#ifndef HALFSTEP_DIGITS_H
#define HALFSTEP_DIGITS_H

#include "trainer/data/idx.h"

enum { DIGITS_SIDE = 28 };

/* Image i is a function of (seed, part, i): the same bytes everywhere. Two parts of one seed share no image. 0, or -1
 * when memory is out. */
int digits_render(uint64_t seed, uint64_t part, int64_t n, struct image_set *out);

#endif
