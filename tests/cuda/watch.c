/* See watch.h. */
#ifndef _WIN32
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda/watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/emulate.h"

/* Threads that have accessed a byte since `time`: one, or several of a warp, of a block, of blocks. */
enum { MANY = HSTEP_LANES };
struct access {
    uint32_t time, block;
    uint8_t warp, lane, is_add;
    int32_t line;
};
struct cell {
    struct access write, read;
};

enum { PAGE = 4096, SLOTS = 1 << 16 };
static struct page {
    uint64_t number;
    struct cell *cells;
} pages[SLOTS];
static uint32_t now = 1, launched;
static const char *kernel = "";
static long reports;

long hstep_emulated_reports(void) { return reports; }

void hstep_watch_launch(const char *name)
{
    kernel = name;
    launched = ++now;
}

uint64_t hstep_watch_now(void) { return ++now; }

static struct cell *cell_of(const char *p)
{
    const uint64_t address = (uint64_t)(uintptr_t)p, number = address / PAGE;
    uint64_t i = number * 0x9E3779B97F4A7C15 >> 48;
    while (pages[i].cells && pages[i].number != number) i = (i + 1) % SLOTS;
    if (!pages[i].cells) {
        pages[i].number = number;
        pages[i].cells =
            mmap(NULL, PAGE * sizeof(struct cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages[i].cells == MAP_FAILED) abort();
    }
    return &pages[i].cells[address % PAGE];
}

/* Prints a finding once for each pair of lines. */
static void report(const char *what, const struct hstep_place *place, int lane, int line, int other)
{
    enum { MOST = 64 };
    static int seen[MOST][2];
    for (long i = 0; i < reports && i < MOST; i++)
        if (seen[i][0] == line && seen[i][1] == other) return;
    if (reports < MOST) {
        seen[reports][0] = line;
        seen[reports][1] = other;
        fprintf(stderr, "%s: %s: block %d, warp %d, lane %d, PTX line %d, after line %d\n", kernel, what,
                (int)place->block, (int)place->warp, lane, line, other);
    }
    reports++;
}

/* Returns 1 if an access of this launch has no barrier between itself and the lane. */
static int is_unordered(const struct access *a, const struct hstep_place *place, int lane)
{
    if (a->time < launched) return 0;
    if (a->block != place->block) return 1;
    if (a->time < place->block_since) return 0;
    if (a->warp != place->warp) return 1;
    return a->time >= place->warp_since && (a->lane != lane || lane == MANY);
}

/* Adds a reader to those that are not known to come before it. */
static void add_reader(struct access *a, const struct access *reader, int is_new)
{
    if (is_new) {
        *a = *reader;
    } else if (a->block != reader->block) {
        a->block = UINT32_MAX;
    } else if (a->warp != reader->warp) {
        a->warp = MANY;
    } else if (a->lane != reader->lane) {
        a->lane = MANY;
    }
}

__attribute__((weak)) void *__asan_region_is_poisoned(void *p, size_t n);

void hstep_watch(char *p, unsigned n, enum hstep_access_kind kind, const struct hstep_place *place, int lane, int line)
{
    const struct access mine = {now, place->block, (uint8_t)place->warp, (uint8_t)lane, kind == HSTEP_ADDS, line};
    if (__asan_region_is_poisoned && __asan_region_is_poisoned(p, n))
        report("beyond an allocation", place, lane, line, 0);
    for (unsigned i = 0; i < n; i++) {
        struct cell *c = cell_of(p + i);
        if (kind == HSTEP_READS_CONSTANT && c->write.time >= launched)
            report("a read as constant of what the launch writes", place, lane, line, c->write.line);
        if (!(mine.is_add && c->write.is_add) && is_unordered(&c->write, place, lane))
            report(kind < HSTEP_WRITES ? "a race, a read and a write" : "a race of two writes", place, lane, line,
                   c->write.line);
        if (kind < HSTEP_WRITES) {
            add_reader(&c->read, &mine, !is_unordered(&c->read, place, lane));
        } else {
            if (is_unordered(&c->read, place, lane))
                report("a race, a write and a read", place, lane, line, c->read.line);
            c->write = mine;
            c->read.time = 0;
        }
    }
}

void hstep_watch_written(uint32_t *written, unsigned n, uint32_t lanes, enum hstep_access_kind kind,
                         const struct hstep_place *place, int lane, int line)
{
    for (unsigned i = 0; i < n; i++) {
        if (kind >= HSTEP_WRITES) written[i] |= lanes;
        if (lanes & ~written[i]) {
            report("a read of memory that nothing has written", place, lane, line, 0);
            return;
        }
    }
}

void hstep_watch_forget(char *p, unsigned n)
{
    for (unsigned i = 0; i < n; i++) *cell_of(p + i) = (struct cell){{0}, {0}};
}

#endif
