/* See watch.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda/watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/emulate.h"

/* Who has accessed a byte: a thread, or several of a warp (lane is MANY), of a block (warp too), of all (block too). */
enum { MANY = HSTEP_LANES, MANY_BLOCKS = 0xffff };
struct access {
    uint32_t time;
    uint16_t block;
    uint8_t warp, lane;
};
struct cell {
    struct access write, read;
    int32_t write_line, read_line; /* negative for atomic additions, and if all reads were volatile */
};

/* Freed memory comes back soon, so that the watch sees few pages. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=1"; }

enum { PAGE = 4096, SLOTS = 1 << 16, MOST_PAGES = 1 << 13 };
static struct page {
    uint64_t number;
    struct cell *cells;
} pages[SLOTS], last;
static int page_count;
static uint32_t now = 1, launched;
static const char *kernel = "";
static long reports;

long hstep_emulated_reports(void) { return reports; }

void hstep_watch_launch(const char *name)
{
    kernel = name;
    launched = ++now;
    if (page_count < MOST_PAGES) return;
    /* What earlier launches have done is in order with all that follows. */
    for (int i = 0; i < SLOTS; i++)
        if (pages[i].cells) munmap(pages[i].cells, PAGE * sizeof(struct cell));
    memset(pages, 0, sizeof pages);
    last.cells = NULL;
    page_count = 0;
}

uint64_t hstep_watch_now(void) { return ++now; }

static struct cell *cell_of(const char *p)
{
    const uint64_t address = (uint64_t)(uintptr_t)p, number = address / PAGE;
    if (last.cells && last.number == number) return &last.cells[address % PAGE];
    uint64_t i = number * 0x9E3779B97F4A7C15 >> 48;
    while (pages[i].cells && pages[i].number != number) i = (i + 1) % SLOTS;
    if (!pages[i].cells) {
        pages[i].number = number;
        page_count++;
        pages[i].cells =
            mmap(NULL, PAGE * sizeof(struct cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages[i].cells == MAP_FAILED) abort();
    }
    last = pages[i];
    return &last.cells[address % PAGE];
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
    if (a->block != (uint16_t)place->block) return 1;
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
        a->block = MANY_BLOCKS;
    } else if (a->warp != reader->warp) {
        a->warp = MANY;
    } else if (a->lane != reader->lane) {
        a->lane = MANY;
    }
}

__attribute__((weak)) void *__asan_region_is_poisoned(void *p, size_t n);

int hstep_watch_knows_heap(void) { return __asan_region_is_poisoned != NULL; }

void hstep_watch(char *p, unsigned n, enum hstep_access_kind kind, const struct hstep_place *place, int lane, int line)
{
    const struct access mine = {now, (uint16_t)place->block, (uint8_t)place->warp, (uint8_t)lane};
    const int is_read = kind < HSTEP_WRITES, is_strong = kind == HSTEP_ADDS || kind == HSTEP_READS_VOLATILE;
    if (__asan_region_is_poisoned && __asan_region_is_poisoned(p, n))
        report("beyond an allocation", place, lane, line, 0);
    /* n is a power of two and p a multiple of it, so that all cells lie in one page. */
    for (struct cell *c = cell_of(p), *end = c + n; c < end; c++) {
        const int other = abs(c->write_line);
        if (kind == HSTEP_READS_CONSTANT && c->write.time >= launched)
            report("a read as constant of what the launch writes", place, lane, line, other);
        if (is_unordered(&c->write, place, lane) && !(is_strong && c->write_line < 0))
            report(is_read ? "a race, a read and a write" : "a race of two writes", place, lane, line, other);
        const int readers = is_unordered(&c->read, place, lane);
        if (is_read) {
            add_reader(&c->read, &mine, !readers);
            if (!readers || !is_strong || c->read_line < 0) c->read_line = is_strong ? -line : line;
        } else {
            if (readers && !(is_strong && c->read_line < 0))
                report("a race, a write and a read", place, lane, line, abs(c->read_line));
            c->write = mine;
            c->write_line = is_strong ? -line : line;
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
    for (unsigned i = 0; i < n; i++) *cell_of(p + i) = (struct cell){.write_line = 0};
}
