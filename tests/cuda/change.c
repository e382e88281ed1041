/* See change.h. A watched row is one of the instruction `change`, whose first operand is the number of a change. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda/change.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/warp.h"

static struct hstep_change *watched;

static void set_row(int row, struct row to)
{
    static int is_open;
    if (!is_open++) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE), first = (size_t)(uintptr_t)ptx_rows / page * page,
                     end = (size_t)(uintptr_t)(ptx_rows + ptx_row_count);
        if (mprotect((void *)(uintptr_t)first, end - first, PROT_READ | PROT_WRITE)) abort();
    }
    memcpy((char *)(uintptr_t)ptx_rows + (size_t)row * sizeof to, &to, sizeof to);
}

void hstep_make_change(const struct hstep_change *change, int back)
{
    set_row(change->row, back ? change->before : change->after);
}

void hstep_watch_changes(struct hstep_change *changes, int n)
{
    watched = changes;
    for (int i = 0; i < n; i++) {
        struct row r = changes[i].before;
        r.op = HSTEP_ROW_change;
        r.x[0] = (U32)i;
        set_row(changes[i].row, r);
    }
}

/* Runs the row as it is. Runs the changed row too, into the register behind the pool, and compares the results. A row
 * that has differed once is not watched any longer. */
void hstep_run_change(struct warp *w, const struct row *r)
{
    struct hstep_change *c = &watched[r->x[0]];
    struct row after = c->after;
    int differs = 1;
    c->seen |= HSTEP_EXECUTED;
    if (c->before.op >= HSTEP_ROW_change) {
        enum { BYTES = LANES * sizeof(U64) };
        after.x[0] = 1u << 31 | (U32)ptx_pool_bytes;
        char *result = at(w, c->before.x[0]), *other = at(w, after.x[0]);
        memcpy(other, result, BYTES);
        hstep_instructions[after.op](w, &after);
        hstep_instructions[c->before.op](w, &c->before);
        differs = memcmp(other, result, BYTES) != 0;
    } else {
        hstep_instructions[c->before.op](w, &c->before);
    }
    if (!differs) return;
    c->seen |= HSTEP_DIFFERS;
    hstep_make_change(c, 1);
}
