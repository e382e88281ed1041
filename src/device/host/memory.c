/* Memory for states, aligned and in huge pages where they pay. */
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#include <malloc.h>
#elif defined(__linux__)
#include <sys/mman.h>
#endif

#include "device/host/host.h"

#define HUGE_PAGE ((size_t)2 << 20)

int hstep_host_allocate(const struct hstep_context *c, uint64_t wanted, void **memory)
{
    size_t alignment = wanted >= 4 * HUGE_PAGE ? HUGE_PAGE : 64;
    (void)c;
    if (wanted > SIZE_MAX - alignment) return HALFSTEP_ERROR_MEMORY;
    size_t bytes = ((size_t)wanted + alignment - 1) / alignment * alignment;
    if (!bytes) bytes = alignment;
#if defined(_WIN32)
    *memory = _aligned_malloc(bytes, alignment);
#else
    *memory = aligned_alloc(alignment, bytes);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (*memory && alignment == HUGE_PAGE) madvise(*memory, bytes, MADV_HUGEPAGE);
#endif
#endif
    return *memory ? HALFSTEP_OK : HALFSTEP_ERROR_MEMORY;
}

void hstep_host_release(const struct hstep_context *c, void *memory)
{
    (void)c;
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

struct zeroing {
    char *memory;
    uint64_t bytes;
};

#define ZERO_PIECE ((uint64_t)4 << 20)

/* Zeroes one piece. The threads share the pieces, because large states are much to write. */
static void zero_piece(void *arg, int64_t i)
{
    struct zeroing *z = arg;
    uint64_t start = (uint64_t)i * ZERO_PIECE, rest = z->bytes - start;
    memset(z->memory + start, 0, rest < ZERO_PIECE ? rest : ZERO_PIECE);
}

int hstep_host_zero(const struct hstep_context *c, void *memory, uint64_t bytes)
{
    struct zeroing zeroing = {memory, bytes};
    hstep_run(c, zero_piece, &zeroing, (int64_t)((bytes + ZERO_PIECE - 1) / ZERO_PIECE));
    return HALFSTEP_OK;
}

int hstep_host_copy(const struct hstep_context *c, void *to, const void *from, uint64_t bytes)
{
    (void)c;
    memcpy(to, from, (size_t)bytes);
    return HALFSTEP_OK;
}
