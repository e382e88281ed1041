/* Large transfers between memory and one file, by threads, past the page cache where the file system allows that.
 * engine.c implements it for POSIX. Offsets, sizes and addresses are multiples of HSTEP_PAGE. */
#ifndef HALFSTEP_IO_STORE_ENGINE_H
#define HALFSTEP_IO_STORE_ENGINE_H

#include "io/store/layout.h"

typedef struct hstep_engine hstep_engine;

/* Makes a file of so many bytes, reserves them on the disk, and locks it. Until it is published it has another name, so
 * that a path never leads to an unfinished file. Takes over what a killed creation left. Fails if the path exists. */
int hstep_engine_create(hstep_engine **engine, const char *path, uint64_t bytes, int buffered, hstep_error *error);
int hstep_engine_publish(hstep_engine *engine, hstep_error *error);
/* Opens and locks a file for reading and writing. */
int hstep_engine_open(hstep_engine **engine, const char *path, int buffered, hstep_error *error);
/* Waits for all transfers and closes the file. Removes it if it was not published. NULL is allowed. */
void hstep_engine_close(hstep_engine *engine);

/* Begins to read or write. The memory must stay until hstep_engine_wait(). With `sums`, which stay too, adds up there
 * what is written, or compares with them what is read: a piece or its head. Fails only in a process that did not open
 * the file. */
int hstep_engine_begin(hstep_engine *engine, int writes, uint64_t offset, void *memory, uint64_t bytes,
                       hstep_sums *sums, hstep_error *error);
/* Fails with ORDER if the file has lost its name since it was opened, or does not have so many bytes any more. */
int hstep_engine_check(const hstep_engine *engine, uint64_t bytes, hstep_error *error);
/* Waits until all transfers have ended, and fails with the first failure among them. *lost is set to 1 if that was one
 * of writing. */
int hstep_engine_wait(hstep_engine *engine, int *lost, hstep_error *error);
/* Makes durable what was written. */
int hstep_engine_sync(hstep_engine *engine, hstep_error *error);

#endif
