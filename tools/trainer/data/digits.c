#include "trainer/data/digits.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"
#include "trainer/products/rows.h"

enum { MOST_POINTS = 24, PIXELS = DIGITS_SIDE * DIGITS_SIDE, UP = -1 };

/* Ways to write each digit: points on a square of 100 x 100, y downwards; UP lifts the pen. */
struct glyph {
    int8_t digit, n;
    int8_t point[MOST_POINTS][2];
};

static const struct glyph glyphs[] = {
    {0,
     13,
     {{50, 9},
      {34, 16},
      {26, 34},
      {25, 52},
      {28, 70},
      {37, 86},
      {50, 91},
      {63, 86},
      {72, 70},
      {75, 50},
      {73, 32},
      {65, 15},
      {50, 9}}},
    {1, 3, {{36, 26}, {52, 10}, {50, 90}}},
    {1, 2, {{53, 9}, {49, 91}}},
    {1, 6, {{35, 27}, {50, 10}, {50, 90}, {UP, UP}, {33, 90}, {67, 90}}},
    {2, 9, {{25, 30}, {32, 15}, {49, 9}, {67, 15}, {73, 31}, {66, 47}, {45, 68}, {25, 90}, {77, 89}}},
    {2,
     13,
     {{26, 28},
      {36, 13},
      {54, 10},
      {70, 22},
      {68, 42},
      {52, 66},
      {38, 84},
      {27, 86},
      {26, 76},
      {38, 74},
      {54, 86},
      {66, 90},
      {78, 82}}},
    {3,
     12,
     {{27, 18},
      {44, 9},
      {64, 15},
      {70, 30},
      {60, 44},
      {42, 48},
      {60, 51},
      {72, 63},
      {71, 78},
      {60, 89},
      {42, 91},
      {25, 82}}},
    {3, 9, {{28, 12}, {70, 12}, {47, 42}, {64, 48}, {73, 62}, {70, 80}, {54, 91}, {36, 89}, {25, 79}}},
    {4, 6, {{58, 10}, {22, 62}, {80, 62}, {UP, UP}, {63, 38}, {62, 91}}},
    {4, 7, {{30, 12}, {26, 48}, {34, 54}, {72, 50}, {UP, UP}, {71, 10}, {66, 91}}},
    {5,
     11,
     {{72, 10}, {34, 11}, {29, 45}, {46, 39}, {63, 42}, {73, 54}, {74, 70}, {65, 84}, {49, 91}, {34, 89}, {24, 80}}},
    {6,
     13,
     {{66, 11},
      {48, 20},
      {34, 40},
      {27, 62},
      {30, 80},
      {43, 90},
      {58, 90},
      {70, 80},
      {72, 66},
      {62, 55},
      {48, 53},
      {35, 60},
      {28, 70}}},
    {7, 3, {{23, 12}, {76, 11}, {43, 91}}},
    {7, 6, {{23, 14}, {76, 11}, {45, 91}, {UP, UP}, {36, 50}, {68, 49}}},
    {8,
     17,
     {{50, 47},
      {35, 38},
      {31, 24},
      {39, 12},
      {51, 9},
      {64, 13},
      {69, 25},
      {64, 38},
      {50, 47},
      {34, 57},
      {27, 72},
      {34, 87},
      {50, 91},
      {67, 86},
      {74, 71},
      {66, 56},
      {50, 47}}},
    {9,
     13,
     {{70, 33},
      {64, 16},
      {50, 9},
      {36, 14},
      {29, 27},
      {33, 41},
      {45, 49},
      {59, 45},
      {68, 35},
      {70, 33},
      {69, 55},
      {64, 75},
      {57, 91}}},
    {9,
     12,
     {{68, 30},
      {60, 13},
      {45, 10},
      {32, 20},
      {31, 37},
      {44, 47},
      {60, 42},
      {68, 30},
      {70, 60},
      {64, 82},
      {50, 91},
      {34, 85}}},
};

enum { GLYPHS = COUNT_OF(glyphs) };

/* A sequence of random numbers for one image. */
struct dice {
    uint64_t seed, part, image, count;
};

/* Returns a number in [low, high), uniformly distributed. */
static double roll(struct dice *dice, double low, double high)
{
    uint64_t h = hash_counters(dice->seed, dice->part, dice->image, dice->count++);
    return low + (high - low) * ((double)(h >> 11) * 0x1p-53);
}

static double square(double x) { return x * x; }

/* Updates the distances of the pixels near the line from a to b. Each pixel keeps its smallest distance to any line. */
static void stroke(float *distance, const double a[2], const double b[2], double reach)
{
    double dx = b[0] - a[0], dy = b[1] - a[1], length = dx * dx + dy * dy;
    int left = (int)floor(fmin(a[0], b[0]) - reach), right = (int)ceil(fmax(a[0], b[0]) + reach);
    int top = (int)floor(fmin(a[1], b[1]) - reach), bottom = (int)ceil(fmax(a[1], b[1]) + reach);
    if (left < 0) left = 0;
    if (top < 0) top = 0;
    for (int y = top; y <= bottom && y < DIGITS_SIDE; y++)
        for (int x = left; x <= right && x < DIGITS_SIDE; x++) {
            double along = length > 0 ? ((x - a[0]) * dx + (y - a[1]) * dy) / length : 0;
            along = along < 0 ? 0 : along > 1 ? 1 : along;
            double d = sqrt(square(x - a[0] - along * dx) + square(y - a[1] - along * dy));
            float *here = &distance[y * DIGITS_SIDE + x];
            if (d < *here) *here = (float)d;
        }
}

static int pick_glyph(struct dice *dice, int digit)
{
    int first = 0, n = 0;
    for (int i = 0; i < GLYPHS; i++)
        if (glyphs[i].digit == digit && n++ == 0) first = i;
    return first + (int)roll(dice, 0, n);
}

static void draw(struct dice *dice, int digit, uint8_t *image)
{
    const struct glyph *glyph = &glyphs[pick_glyph(dice, digit)];
    double sine, cosine, point[MOST_POINTS][2];
    float distance[PIXELS];
    uint64_t bits = 0;
    exact_sincos(roll(dice, -0.28, 0.28), &sine, &cosine);
    double shear = roll(dice, -0.3, 0.3), wide = roll(dice, 0.17, 0.25), high = roll(dice, 0.19, 0.25);
    double middle_x = 13.5 + roll(dice, -2, 2), middle_y = 13.5 + roll(dice, -2, 2);
    double pen = roll(dice, 0.7, 1.8), ink = roll(dice, 170, 255), noise = roll(dice, 0, 40);
    for (int i = 0; i < glyph->n; i++) {
        double x = (glyph->point[i][0] - 50 + roll(dice, -4, 4)) * wide;
        double y = (glyph->point[i][1] - 50 + roll(dice, -4, 4)) * high;
        x -= shear * y;
        point[i][0] = middle_x + cosine * x - sine * y;
        point[i][1] = middle_y + sine * x + cosine * y;
    }
    for (int i = 0; i < PIXELS; i++) distance[i] = 100;
    for (int i = 0; i + 1 < glyph->n; i++)
        if (glyph->point[i][0] != UP && glyph->point[i + 1][0] != UP) stroke(distance, point[i], point[i + 1], pen + 1);
    for (int i = 0; i < PIXELS; i++) {
        /* The ink fades out over one pixel at the edge of a line. */
        double cover = pen + 0.5 - distance[i];
        if (i % 4 == 0) bits = hash_counters(dice->seed, dice->part, dice->image, dice->count++);
        /* The sum of two bytes: a triangular distribution from -1 to 1. */
        double grain = ((double)(bits & 0xFF) + (double)(bits >> 8 & 0xFF) - 255) / 255;
        double value = ink * (cover < 0 ? 0 : cover > 1 ? 1 : cover) + noise * grain;
        bits >>= 16;
        image[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value + 0.5);
    }
}

int digits_render(uint64_t seed, uint64_t part, int64_t n, struct image_set *out)
{
    memset(out, 0, sizeof *out);
    out->memory[0] = malloc((size_t)n * PIXELS);
    out->memory[1] = malloc((size_t)n);
    if (!out->memory[0] || !out->memory[1]) {
        image_set_free(out);
        return -1;
    }
    out->images = (uint8_t *)out->memory[0];
    out->labels = (uint8_t *)out->memory[1];
    out->n = n;
    out->side = DIGITS_SIDE;
    for (int64_t i = 0; i < n; i++) {
        struct dice dice = {seed, part, (uint64_t)i, 0};
        int digit = (int)roll(&dice, 0, IMAGE_CLASSES);
        out->labels[i] = (uint8_t)digit;
        draw(&dice, digit, out->images + i * PIXELS);
    }
    return 0;
}
