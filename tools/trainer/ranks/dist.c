#include "trainer/ranks/dist.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/process/environment.h"

#include "common/args/args.h"
#include "common/text.h"

/* What launchers set: a process's rank, and the number of processes, which some leave out. */
static const struct launcher {
    const char *rank, *processes;
    int others; /* 1: processes that it has not started have the rank, too */
} launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", 0}, /* Open MPI */
    {"PMI_RANK", "PMI_SIZE", 0},                         /* MPICH, Intel MPI, Slurm's PMI, HPE's PALS */
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", 0},   /* MVAPICH */
    {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", 0},     /* IBM's jsrun */
    {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", 0},              /* Flux */
    /* srun. Batch scripts have a rank of 0. They, and shells of salloc, have SLURM_NTASKS, too. */
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", 1},
    {"PMIX_RANK", NULL, 0},
    {"PALS_RANKID", NULL, 0},
};

/* Returns a variable's number, or -1 if it is not set or no such number. */
static int number_in(const char *variable)
{
    const char *text = variable ? getenv(variable) : NULL;
    return text ? hstep_parse_number(text, (1 << 30) - 1, 0) : -1;
}

/* Returns how many processes the launcher of this one has started, at least; 0 without a launcher. Sets *variable to
 * the one that says so. */
static int launched(const char **variable)
{
    int least = 0;
    for (int i = 0; i < COUNT_OF(launchers); i++) {
        const struct launcher *l = &launchers[i];
        const int rank = number_in(l->rank), processes = number_in(l->processes);
        if (rank < 0) continue;
        if (processes > l->others) {
            *variable = l->processes;
            return processes;
        }
        if (rank + !l->others > least) {
            *variable = l->rank;
            least = rank + 1;
        }
    }
    return least;
}

int dist_asked(char *error, size_t error_bytes)
{
    static const struct hstep_variable variable = {"HALFSTEP_MPI", "0, 1", 0};
    return hstep_read_variable(&variable, error, error_bytes);
}

int dist_launched(void)
{
    char text[128];
    const char *variable;
    const int asked = dist_asked(text, sizeof text);
    return asked >= 0 ? asked : launched(&variable) > 0;
}

int dist_refuse(const char *command)
{
    char text[128];
    const char *variable;
    if (dist_asked(text, sizeof text) == 0 || launched(&variable) < 2) return 0;
    return failure(command,
                   "%s is %s, and this command runs in one process; start it without a launcher, or set HALFSTEP_MPI=0 "
                   "to run each process by itself",
                   variable, getenv(variable));
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
    /* The start may set a launcher's variables in a process that has none. */
    const char *variable;
    char value[32] = "";
    const int processes = launched(&variable);
    if (processes > 1) snprintf(value, sizeof value, "%s", getenv(variable));
    if (dist->start(dist) != 0) {
        snprintf(error, error_bytes, "%s", dist->error());
        return NULL;
    }
    if (dist->ranks > 1 || processes < 2) return dist;
    snprintf(
        error, error_bytes,
        "%s is %s, but MPI finds one process: the launcher belongs to another MPI than this build; start with that "
        "MPI's mpirun, or set HALFSTEP_MPI=0 to run each process by itself",
        variable, value);
    dist->leave();
    return NULL;
}
