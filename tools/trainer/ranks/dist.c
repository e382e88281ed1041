#include "trainer/ranks/dist.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

/* Set by Open MPI; by MPICH, Intel MPI and Slurm's PMI; and by PMIx, which srun supports, too. */
static const char *const rank_variables[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};

int dist_launched_rank(void)
{
    for (int i = 0; i < COUNT_OF(rank_variables); i++) {
        const char *text = getenv(rank_variables[i]);
        char *end;
        long rank = text ? strtol(text, &end, 10) : -1;
        if (text && end != text && !*end && rank >= 0 && rank < 1 << 30) return (int)rank;
    }
    return -1;
}

int dist_launched(void)
{
    const char *asked = getenv("HALFSTEP_MPI");
    if (asked && *asked) return strcmp(asked, "0") != 0;
    return dist_launched_rank() >= 0;
}

struct dist *dist_open(char *error, size_t error_bytes)
{
    /* RTLD_GLOBAL, because Open MPI's own modules need its symbols. */
    void *module = dlopen("libhalfstep_mpi.so", RTLD_NOW | RTLD_GLOBAL);
    struct dist *dist = module ? dlsym(module, "halfstep_dist") : NULL;
    if (!dist) {
        snprintf(error, error_bytes,
                 "started as one of several processes, but this build has no MPI (%s); set HALFSTEP_MPI=0 to run each "
                 "by itself",
                 dlerror());
        return NULL;
    }
    if (dist->version != HALFSTEP_DIST_VERSION) {
        snprintf(error, error_bytes, "libhalfstep_mpi.so does not fit this program; install both from the same build");
        return NULL;
    }
    if (dist->start(dist) == 0) return dist;
    snprintf(error, error_bytes, "%s", dist->error());
    return NULL;
}
