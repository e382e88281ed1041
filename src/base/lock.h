/* Locks for a few instructions. A thread that waits yields its processor. */
#ifndef HSTEP_LOCK_H
#define HSTEP_LOCK_H

#include <stdatomic.h>

void hstep_yield(void);
void hstep_lock(atomic_flag *lock);
void hstep_unlock(atomic_flag *lock);

#endif
