/* Looks at every access of emulated threads to memory that they share.
 *
 * A race is two accesses to one byte, one of them a write, if no barrier and no end of a launch lies between them. An
 * exchange is no barrier. Atomic additions and volatile reads are in no race with each other. The watch also reports
 * reads of shared or local memory that nothing has written. If AddressSanitizer's heap is in the program, it reports
 * accesses outside of allocations too. */
#ifndef HSTEP_TESTS_CUDA_WATCH_H
#define HSTEP_TESTS_CUDA_WATCH_H

#include <stdint.h>

/* Which warp, and the times of the last barrier of its block and of the warp alone. */
struct hstep_place {
    uint32_t block, warp;
    uint64_t block_since, warp_since;
};
enum hstep_access_kind { HSTEP_READS, HSTEP_READS_CONSTANT, HSTEP_READS_VOLATILE, HSTEP_WRITES, HSTEP_ADDS };

enum { HSTEP_LANES = 255 };

/* Returns 1 if the program has AddressSanitizer's heap. */
int hstep_watch_knows_heap(void);
void hstep_watch_launch(const char *name);
/* Returns the time after a barrier. */
uint64_t hstep_watch_now(void);
/* lane: HSTEP_LANES stands for several lanes of the warp. */
void hstep_watch(char *p, unsigned n, enum hstep_access_kind kind, const struct hstep_place *place, int lane, int line);
/* Marks n bytes as written by lanes, or reports that some lane reads a byte that it has not written. */
void hstep_watch_written(uint32_t *written, unsigned n, uint32_t lanes, enum hstep_access_kind kind,
                         const struct hstep_place *place, int lane, int line);
/* Forgets accesses to memory that now belongs to another block. */
void hstep_watch_forget(char *p, unsigned n);

#endif
