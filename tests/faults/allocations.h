/* Makes allocations fail in sources that are compiled into a test. Include this before the sources, and undefine the
 * four names behind them. Allocation number allocation_at fails once. Allocations and the bytes they hold are
 * counted. */
#ifndef HALFSTEP_TESTS_ALLOCATIONS_H
#define HALFSTEP_TESTS_ALLOCATIONS_H

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

static long allocation_at = -1, allocations, allocations_failed;
/* Bytes that the sources hold now, and the most they have held. */
static size_t held, held_most;

static int refuse_allocation(void)
{
    if (allocations++ != allocation_at) return 0;
    allocations_failed++;
    errno = ENOMEM;
    return 1;
}

static void *count_held(void *block)
{
    held += malloc_usable_size(block);
    if (held > held_most) held_most = held;
    return block;
}

static void faulty_free(void *block)
{
    held -= malloc_usable_size(block);
    free(block);
}

static void *faulty_malloc(size_t bytes) { return refuse_allocation() ? NULL : count_held(malloc(bytes)); }
static void *faulty_calloc(size_t count, size_t bytes)
{
    return refuse_allocation() ? NULL : count_held(calloc(count, bytes));
}

static void *faulty_realloc(void *old, size_t bytes)
{
    /* Always moves the block, as realloc() may. Both blocks exist for a while. */
    void *block = refuse_allocation() ? NULL : count_held(malloc(bytes));
    size_t before = malloc_usable_size(old);
    if (!block || !old) return block;
    memcpy(block, old, before < bytes ? before : bytes);
    faulty_free(old);
    return block;
}

#define malloc(bytes) faulty_malloc(bytes)
#define calloc(count, bytes) faulty_calloc(count, bytes)
#define realloc(old, bytes) faulty_realloc(old, bytes)
#define free(block) faulty_free(block)

#endif
