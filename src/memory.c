/* Memory for states: aligned, and in huge pages where that pays. */
#include <stdlib.h>

#if defined(_WIN32)
#include <malloc.h>
#elif defined(__linux__)
#include <sys/mman.h>
#endif

#include "optimizer.h"

#define HUGE_PAGE ((size_t)2 << 20)

void *hstep_allocate(size_t bytes)
{
    size_t alignment = bytes >= 4 * HUGE_PAGE ? HUGE_PAGE : 64;
    if (bytes > SIZE_MAX - alignment) return NULL;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    if (!bytes) bytes = alignment;
#if defined(_WIN32)
    return _aligned_malloc(bytes, alignment);
#else
    void *memory = aligned_alloc(alignment, bytes);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (memory && alignment == HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
#endif
}

void hstep_free(void *memory)
{
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}
