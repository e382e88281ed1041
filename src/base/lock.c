#include "base/lock.h"

#ifdef _WIN32
#include <windows.h>
void hstep_yield(void) { SwitchToThread(); }
#else
#include <sched.h>
void hstep_yield(void) { sched_yield(); }
#endif

void hstep_lock(atomic_flag *lock)
{
    while (atomic_flag_test_and_set(lock)) hstep_yield();
}

void hstep_unlock(atomic_flag *lock) { atomic_flag_clear(lock); }
