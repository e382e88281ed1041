/* Changes single rows of translated PTX, to find out who would notice (lab/device_faults.c). */
#ifndef HSTEP_TESTS_CUDA_CHANGE_H
#define HSTEP_TESTS_CUDA_CHANGE_H

#include "cuda/machine.h"

enum { HSTEP_EXECUTED = 1, HSTEP_DIFFERS = 2 };

struct hstep_change {
    int row;
    struct row before, after;
    unsigned char seen; /* HSTEP_EXECUTED; HSTEP_DIFFERS if the changed row would have given another result */
};

#pragma GCC visibility push(default)
/* Watches rows from now on: sets `seen` of their changes, without making these. A jump, and an access to memory, counts
 * as different whenever it is executed. The changes must stay where they are. */
void hstep_watch_changes(struct hstep_change *changes, int n);
/* Makes a change, or takes it back. */
void hstep_make_change(const struct hstep_change *change, int back);
#pragma GCC visibility pop

#endif
