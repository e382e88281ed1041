/* Locks a checkpoint directory for one run at a time. The run holds a lock on a file in the directory from its start to
 * its end. The run's saves, and all that read the checkpoint meanwhile, take another lock, the directory's own.
 *
 * The kernel releases the lock when the process ends in any way, so the file of a dead run does no harm. On NFS, Linux
 * keeps the lock at the server. The server releases it after the lease's time if the holder's machine is gone (NFS 4,
 * 90 seconds by default). If a file system has no locks, run_lock_take() says so in a note. */
#ifndef HALFSTEP_RUN_LOCK_H
#define HALFSTEP_RUN_LOCK_H

#include <stddef.h>

struct run_lock;

/* Locks a directory, and creates it if it is missing (its parent must exist). Returns NULL with an error text if
 * another run has the lock, or on failure. On success error is empty, or a text that begins with "note: ". */
struct run_lock *run_lock_take(const char *directory, char *error, size_t error_bytes);
/* Releases the lock and removes its file. Also removes the directory if run_lock_take() created it and it is still
 * empty. NULL does nothing. */
void run_lock_release(struct run_lock *lock);

#endif
