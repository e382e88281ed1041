/* The processes of one job, ranks 0 .. ranks - 1, and their communication.
 *
 * All use of MPI is in mpi.c, which is a module of its own (libhalfstep_mpi). The program loads it only if a launcher
 * has started the process. Otherwise it runs without MPI.
 *
 * Functions return 0, or -1 with a text in error(). One thread makes all calls. sum() and share() are collective: every
 * rank makes the same calls in the same order. share(), send() and receive() are asynchronous: they end at wait(), and
 * until then the caller leaves their memory alone. Messages with the same tag between two ranks arrive in the order of
 * the calls. */
#ifndef HALFSTEP_DIST_H
#define HALFSTEP_DIST_H

#include <stddef.h>
#include <stdint.h>

#define HALFSTEP_DIST_VERSION 2

struct dist {
    int version;
    int rank, ranks;
    int local_ranks; /* on this machine */
    /* Joins the job and fills in the numbers above. */
    int (*start)(struct dist *dist);
    /* Replaces values[i] by the sum over all ranks, modulo 2^64. The order of the ranks does not matter. */
    int (*sum)(int64_t *values, size_t n);
    /* Copies the bytes of rank `from` to all ranks. */
    int (*share)(void *data, size_t bytes, int from);
    /* tag is 0 .. 32767. */
    int (*send)(const void *data, size_t bytes, int to, int tag);
    int (*receive)(void *data, size_t bytes, int from, int tag);
    /* Gives pending communication a chance to advance. */
    int (*progress)(void);
    int (*wait)(void);
    const char *(*error)(void);
    /* Returns the bytes that this rank has received by share() and receive(). */
    uint64_t (*received)(void);
    /* Leaves the job when all ranks have called it. */
    void (*leave)(void);
    /* Ends the processes of all ranks with this exit status. */
    void (*end_job)(int status);
};

/* Returns HALFSTEP_MPI, 0 or 1. Returns a number below 0 if it is not set, and HSTEP_MALFORMED with an error text if it
 * has another value. */
int dist_asked(char *error, size_t error_bytes);
/* True if a launcher (mpirun, srun) has started this process as one of a job. HALFSTEP_MPI decides if it is set. */
int dist_launched(void);
/* For commands that run in one process: fails if a launcher has started several, unless HALFSTEP_MPI is 0. Returns 0 or
 * the exit status. */
int dist_refuse(const char *command);
/* Loads libhalfstep_mpi and joins the job. Returns NULL with an error text on failure, also if the launcher says that
 * there are other processes and MPI does not find them. */
struct dist *dist_open(char *error, size_t error_bytes);

#endif
