/* Implements dist.h by MPI. The program loads this module, see dist.c. */
#include "trainer/ranks/dist.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* MPI counts are ints, so longer messages go in pieces. */
#define PIECE ((size_t)1 << 30)

static MPI_Comm job = MPI_COMM_NULL;
static int own_rank;
static MPI_Request *requests;
static int n_requests, request_capacity;
static uint64_t bytes_received;
static char text[MPI_MAX_ERROR_STRING + 128];

static int judge(int code, const char *what)
{
    char reason[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (code == MPI_SUCCESS) return 0;
    if (MPI_Error_string(code, reason, &length) != MPI_SUCCESS) reason[0] = 0;
    snprintf(text, sizeof text, "MPI: %s failed on rank %d: %s", what, own_rank, reason);
    return -1;
}

static MPI_Request *new_request(void)
{
    if (n_requests == request_capacity) {
        int capacity = request_capacity ? 2 * request_capacity : 256;
        MPI_Request *grown = realloc(requests, (size_t)capacity * sizeof *grown);
        if (!grown) {
            snprintf(text, sizeof text, "out of memory");
            return NULL;
        }
        requests = grown;
        request_capacity = capacity;
    }
    requests[n_requests] = MPI_REQUEST_NULL;
    return &requests[n_requests];
}

static int count_local_ranks(int *local_ranks)
{
    MPI_Comm machine;
    int code = MPI_Comm_split_type(job, MPI_COMM_TYPE_SHARED, own_rank, MPI_INFO_NULL, &machine);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(machine, local_ranks);
    if (code == MPI_SUCCESS) code = MPI_Comm_free(&machine);
    return judge(code, "counting the processes of a machine");
}

static int start(struct dist *dist)
{
    int provided = 0;
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    /* A communicator of its own keeps messages apart from those of others. It inherits the error handler. */
    if (code == MPI_SUCCESS) code = MPI_Comm_dup(MPI_COMM_WORLD, &job);
    if (code == MPI_SUCCESS) code = MPI_Comm_rank(job, &own_rank);
    if (code == MPI_SUCCESS) code = MPI_Comm_size(job, &dist->ranks);
    if (judge(code, "the start") != 0) return -1;
    if (provided < MPI_THREAD_FUNNELED) {
        snprintf(text, sizeof text, "this MPI does not allow a program to have threads");
        return -1;
    }
    dist->rank = own_rank;
    return count_local_ranks(&dist->local_ranks);
}

static int sum(int64_t *values, size_t n)
{
    for (size_t at = 0; at < n; at += PIECE / 8) {
        int count = (int)(n - at < PIECE / 8 ? n - at : PIECE / 8);
        /* Unsigned, because overflow is intended. */
        if (judge(MPI_Allreduce(MPI_IN_PLACE, values + at, count, MPI_UINT64_T, MPI_SUM, job), "a sum") != 0) return -1;
    }
    return 0;
}

enum way { SHARING, SENDING, RECEIVING };

/* Starts to move bytes, in pieces. `other` is the other rank, or the one whose bytes all ranks get. */
static int start_moving(enum way way, char *data, size_t bytes, int other, int tag)
{
    static const char *const what[] = {"handing out data", "sending", "receiving"};
    for (size_t at = 0; at < bytes; at += PIECE, n_requests++) {
        MPI_Request *request = new_request();
        int count = (int)(bytes - at < PIECE ? bytes - at : PIECE), code;
        if (!request) return -1;
        if (way == SHARING) code = MPI_Ibcast(data + at, count, MPI_BYTE, other, job, request);
        else if (way == SENDING) code = MPI_Isend(data + at, count, MPI_BYTE, other, tag, job, request);
        else code = MPI_Irecv(data + at, count, MPI_BYTE, other, tag, job, request);
        if (judge(code, what[way]) != 0) return -1;
    }
    if (way != SENDING && other != own_rank) bytes_received += bytes;
    return 0;
}

static int share(void *data, size_t bytes, int from) { return start_moving(SHARING, data, bytes, from, 0); }

static int send(const void *data, size_t bytes, int to, int tag)
{
    return start_moving(SENDING, (char *)(uintptr_t)data, bytes, to, tag);
}

static int receive(void *data, size_t bytes, int from, int tag)
{
    return start_moving(RECEIVING, data, bytes, from, tag);
}

static int progress(void)
{
    int done, index;
    return judge(MPI_Testany(n_requests, requests, &index, &done, MPI_STATUS_IGNORE), "communication");
}

static int wait_all(void)
{
    int code = MPI_Waitall(n_requests, requests, MPI_STATUSES_IGNORE);
    n_requests = 0;
    return judge(code, "communication");
}

static const char *error(void) { return text; }
static uint64_t received(void) { return bytes_received; }

static void leave(void)
{
    MPI_Comm_free(&job);
    MPI_Finalize();
    free(requests);
    requests = NULL;
    n_requests = request_capacity = 0;
}

static void end_job(int status) { MPI_Abort(MPI_COMM_WORLD, status); }

__attribute__((visibility("default"))) struct dist halfstep_dist;
struct dist halfstep_dist = {.version = HALFSTEP_DIST_VERSION,
                             .start = start,
                             .sum = sum,
                             .share = share,
                             .send = send,
                             .receive = receive,
                             .progress = progress,
                             .wait = wait_all,
                             .error = error,
                             .received = received,
                             .leave = leave,
                             .end_job = end_job};
