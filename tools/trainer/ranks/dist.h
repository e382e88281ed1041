/* The processes of one job, as the trainer sees them: ranks 0 .. ranks - 1, and what they do together.
 *
 * What MPI is needed for is in a module of its own (mpi.c, libhalfstep_mpi), which is loaded where a launcher has
 * started the program: the program needs no MPI, and nothing else of it knows of one.
 *
 * Functions return 0, or -1 with one line in error(). All are called by one thread. sum() and share() are collective:
 * every rank makes the same calls in the same order. What is under way (share, send, receive) is done when wait()
 * returns; until then its memory is left alone. Messages between two ranks with one tag arrive in the order of the
 * calls. */
#ifndef HALFSTEP_DIST_H
#define HALFSTEP_DIST_H

#include <stddef.h>
#include <stdint.h>

#define HALFSTEP_DIST_VERSION 1

struct dist {
    int version;
    int rank, ranks;
    int local_ranks; /* on this machine */
    /* Joins the job; fills in the numbers above. */
    int (*start)(struct dist *dist);
    /* values[i] becomes the sum over all ranks, modulo 2^64: whatever the order, the same bits. */
    int (*sum)(int64_t *values, size_t n);
    /* All ranks get the bytes of `from`. */
    int (*share)(void *data, size_t bytes, int from);
    /* tag: 0 .. 32767. */
    int (*send)(const void *data, size_t bytes, int to, int tag);
    int (*receive)(void *data, size_t bytes, int from, int tag);
    /* Lets what is under way get on. */
    int (*progress)(void);
    int (*wait)(void);
    const char *(*error)(void);
    /* Bytes that this rank has given to send(), and received by share() and receive(). */
    uint64_t (*sent)(void);
    uint64_t (*received)(void);
    /* Leaves the job, after all ranks have come so far. */
    void (*leave)(void);
    /* Ends the processes of all ranks with this status. */
    void (*end_job)(int status);
};

/* Whether a launcher (mpirun, srun) has started this process as one of a job. HALFSTEP_MPI=0 in the environment
 * says that it has not, HALFSTEP_MPI=1 that it has. */
int dist_launched(void);
/* The rank that the launcher's environment tells, before anything has been joined; -1 if it tells none. */
int dist_launched_rank(void);
/* Loads the module and joins. NULL and one line on failure. */
struct dist *dist_open(char *error, size_t error_bytes);

#endif
