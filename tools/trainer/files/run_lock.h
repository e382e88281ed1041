/* One run at a time has a checkpoint directory: a lock file in it that the run holds from its start to its end. The
 * directory's own lock is another one, which each save takes for itself.
 *
 * The kernel gives the lock back when the process ends, however it ends, so the file of a dead run is no obstacle.
 * Linux keeps the lock of a file on NFS at the server, which gives it back when the machine of its holder has been gone
 * for the lease's time (NFS 4, 90 seconds by default). Where a file system has no locks, run_lock_take() says so in a
 * note. */
#ifndef HALFSTEP_RUN_LOCK_H
#define HALFSTEP_RUN_LOCK_H

#include <stddef.h>

struct run_lock;

/* Makes the directory if it is not there (its parent must be). NULL and one line where another run has it, or on
 * failure; otherwise error is empty, or a line that begins with "note: ". */
struct run_lock *run_lock_take(const char *directory, char *error, size_t error_bytes);
/* Removes the file, and a directory that was made for it and is still empty. NULL is fine. */
void run_lock_release(struct run_lock *lock);

#endif
