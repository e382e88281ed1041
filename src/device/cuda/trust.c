#include "device/cuda/trust.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#ifdef _WIN32
#include <direct.h>
#include <process.h>
#define CACHE_VARIABLE "LOCALAPPDATA"
#define CACHE_IN_HOME "/AppData/Local"
#define make_folder(path) _mkdir(path)
#define process_id() _getpid()
#else
#include <unistd.h>
#define CACHE_VARIABLE "XDG_CACHE_HOME"
#define CACHE_IN_HOME "/.cache"
#define make_folder(path) mkdir(path, 0700)
#define process_id() (int)getpid()
#endif

#include "base/process/environment.h"

/* In the order of the variable's words. */
enum { ALWAYS, ONCE, NEVER };

static int find_policy(void)
{
    const int policy = hstep_setting(HSTEP_SET_DEVICE_CHECK);
    return policy == HSTEP_NOT_SET ? ONCE : policy;
}

/* Kernels that are not fused are trusted together, under the name of the first. */
static int kernel_of(int fused) { return fused < 0 ? 0 : fused; }

static const char *name_of(int kernel)
{
    static const char *const names[HSTEP_CUDA_KERNELS] = {
#define KERNEL(name, shape) #name,
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#include "device/cuda/code/kernels.def"
    };
    return kernel ? names[kernel] : "general";
}

/* Writes the path of the file of trusted kernels. Makes its folders if `make` is set. Returns 0 if there is none. */
static int file_of(struct hstep_gpu *g, int make, char *path, size_t size)
{
    const char *cache = getenv(CACHE_VARIABLE), *home = getenv("HOME");
    unsigned char uuid[16] = {0};
    char folder[3072];
    if (!cache || !*cache) cache = home, home = CACHE_IN_HOME;
    else home = "";
    if (!cache || !*cache || g->driver->cuDeviceGetUuid(uuid, g->device)) return 0;
    int used = snprintf(folder, sizeof folder, "%s%s", cache, home);
    if (used < 0 || used >= (int)sizeof folder - 32) return 0;
    if (make) make_folder(folder);
    snprintf(folder + used, sizeof folder - (size_t)used, "/halfstep");
    if (make) make_folder(folder);
    uint64_t id[2];
    memcpy(id, uuid, sizeof id);
    used =
        snprintf(path, size, "%s/gpu-%016" PRIx64 "%016" PRIx64 "-%016" PRIx64 "-%d-%d.%d.%d", folder, id[0], id[1],
                 g->image, g->driver->version, HALFSTEP_VERSION_MAJOR, HALFSTEP_VERSION_MINOR, HALFSTEP_VERSION_PATCH);
    return used > 0 && used < (int)size - 32;
}

/* Adds the kernels of the file, one name in each line, to those that this process trusts. */
static void read_file(struct hstep_gpu *g)
{
    char path[4096], line[128];
    FILE *file = file_of(g, 0, path, sizeof path) ? fopen(path, "r") : NULL;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        for (int k = 0; k < HSTEP_CUDA_KERNELS; k++)
            if (!strcmp(line, name_of(k))) atomic_store(&g->trusted[k], 1);
    }
    fclose(file);
}

/* Replaces the file by one with all kernels that this process trusts. Another process may do the same at this time:
 * what its file lacks is checked again one day. */
static void write_file(struct hstep_gpu *g)
{
    char path[4096], other[4096 + 32];
    if (!file_of(g, 1, path, sizeof path)) return;
    snprintf(other, sizeof other, "%s.%d", path, process_id());
    FILE *file = fopen(other, "w");
    if (!file) return;
    int failed = 0;
    for (int k = 0; k < HSTEP_CUDA_KERNELS; k++)
        if (atomic_load(&g->trusted[k])) failed |= fprintf(file, "%s\n", name_of(k)) < 0;
    failed |= fclose(file) != 0;
#ifdef _WIN32
    if (!failed) remove(path);
#endif
    if (failed || rename(other, path)) remove(other);
}

int hstep_cuda_trusted(struct hstep_gpu *g, int fused)
{
    const int kernel = kernel_of(fused), policy = find_policy();
    if (policy == NEVER) return 1;
    if (policy == ONCE && !atomic_load(&g->trusted[kernel])) read_file(g);
    return atomic_load(&g->trusted[kernel]);
}

void hstep_cuda_trust(struct hstep_gpu *g, int fused)
{
    const int in_a_file = find_policy() == ONCE;
    if (in_a_file) read_file(g); /* what other processes have added */
    atomic_store(&g->trusted[kernel_of(fused)], 1);
    if (in_a_file) write_file(g);
}
