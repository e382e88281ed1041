#include "device/cuda/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "device/cuda/driver/images.h"
#include "device/cuda/driver/unpack.h"

/* The most GPUs that the library can use in one process. */
#define MOST_GPUS 64

int hstep_gpu_result(struct hstep_gpu *g, int result, const char *call)
{
    int lasting = 0, error = hstep_cuda_result(g->driver, result, call, &lasting);
    if (lasting && !atomic_load(&g->broken)) {
        snprintf(g->why, sizeof g->why, "%s", hstep_cuda_why());
        atomic_store(&g->broken, 1);
    }
    return error;
}

int hstep_gpu_enter(struct hstep_gpu *g)
{
    if (atomic_load(&g->broken)) return hstep_cuda_fail(HALFSTEP_ERROR_DEVICE, "%s", g->why);
    return HSTEP_GPU(g, cuCtxPushCurrent, g->context);
}

void hstep_gpu_leave(struct hstep_gpu *g)
{
    void *context;
    g->driver->cuCtxPopCurrent(&context);
}

/* ---- Device code ---- */

/* Returns the contents of the file that HALFSTEP_CUDA_IMAGE names, which replaces the build's device code. Returns NULL
 * if the file cannot be read. Sets *size to their bytes. The caller frees them. */
static char *read_image(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    long bytes = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1;
    if (bytes >= 0 && (text = calloc(1, (size_t)bytes + 1)))
        if (fseek(file, 0, SEEK_SET) || fread(text, 1, (size_t)bytes, file) != (size_t)bytes) bytes = -1;
    if (file) fclose(file);
    *size = (size_t)bytes;
    if (bytes >= 0) return text;
    free(text);
    return NULL;
}

static const char *image_path(void)
{
    const char *path = getenv("HALFSTEP_CUDA_IMAGE");
    return path && *path ? path : NULL;
}

static int count_images(void)
{
    int n = 0;
    while (hstep_cuda_images[n].bytes) n++;
    return n ? n : image_path() != NULL;
}

const char *hstep_gpu_code(void)
{
    return image_path() ? "what the file that HALFSTEP_CUDA_IMAGE names is for" : hstep_cuda_code_text;
}

/* Loads device code and keeps its hash (FNV-1a). */
static int load_image(struct hstep_gpu *g, const char *data, size_t bytes)
{
    g->image = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++) g->image = (g->image ^ (unsigned char)data[i]) * 0x100000001B3u;
    return HSTEP_GPU(g, cuModuleLoadDataEx, &g->module, data, 0, NULL, NULL);
}

static int load_embedded(struct hstep_gpu *g, const struct hstep_cuda_image *image)
{
    char *data = malloc(image->bytes + 1);
    if (!data) return hstep_cuda_fail(HALFSTEP_ERROR_MEMORY, "no memory for device code");
    data[image->bytes] = 0; /* PTX is a text */
    int error = hstep_unpack(data, image->bytes, image->data, image->packed)
                    ? hstep_cuda_fail(HALFSTEP_ERROR_DEVICE, "the device code of this build is damaged; build it again")
                    : load_image(g, data, image->bytes);
    free(data);
    return error;
}

/* Loads machine code of the GPU's compute capability, or of a lower one with the same major number, the newest first.
 * If the driver refuses an image, the next is tried. The last is PTX, which the driver compiles. */
static int load_images(struct hstep_gpu *g)
{
    const char *path = image_path();
    if (path) {
        size_t bytes;
        char *text = read_image(path, &bytes);
        if (!text)
            return hstep_cuda_fail(
                HALFSTEP_ERROR_DEVICE,
                "HALFSTEP_CUDA_IMAGE: %.150s cannot be read; unset it to use the build's own device code", path);
        int error = load_image(g, text, bytes);
        free(text);
        return error;
    }
    if (!hstep_cuda_images[0].bytes)
        return hstep_cuda_fail(HALFSTEP_ERROR_DEVICE,
                               "this build of halfstep has no device code: " HSTEP_CUDA_MAKE_CODE);
    int error = HALFSTEP_ERROR_DEVICE;
    for (const struct hstep_cuda_image *i = hstep_cuda_images; error && i->bytes; i++)
        if (!i->compute || (i->compute / 10 == g->compute / 10 && i->compute <= g->compute))
            error = load_embedded(g, i);
    return error;
}

static int load_kernels(struct hstep_gpu *g)
{
    static const struct {
        const char *name;
        int shape;
    } kernels[HSTEP_CUDA_KERNELS] = {
#define KERNEL(name, shape) {"halfstep_cuda_" #name, shape},
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#include "device/cuda/code/kernels.def"
    };
    int error = load_images(g);
    for (int k = 0; k < HSTEP_CUDA_KERNELS && !error; k++) {
        int blocks = 0;
        g->blocks[k] = 1;
        error = HSTEP_GPU(g, cuModuleGetFunction, &g->function[k], g->module, kernels[k].name);
        if (error || kernels[k].shape == HSTEP_CUDA_ONE) continue;
        error = HSTEP_GPU(g, cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, g->function[k], HSTEP_CUDA_THREADS,
                          (size_t)0);
        /* As many blocks as run at once. Each goes on to its next chunk by itself. */
        g->blocks[k] = (unsigned)((blocks > 0 ? blocks : 1) * g->multiprocessors);
    }
    return error;
}

/* ---- GPUs ---- */

static int parse_ordinal(const char *name, int devices, int *ordinal)
{
    char *end;
    long n = *name ? strtol(name, &end, 10) : 0;
    if (*name && (*end || *name < '0' || *name > '9'))
        return hstep_cuda_fail(HALFSTEP_ERROR_NAME, "unknown device 'cuda:%.40s'; write cuda:N for GPU number N", name);
    if (n >= devices || n >= MOST_GPUS)
        return hstep_cuda_fail(HALFSTEP_ERROR_DEVICE, "unknown GPU number %ld; the driver shows %d, numbered from 0", n,
                               devices);
    *ordinal = (int)n;
    return HALFSTEP_OK;
}

/* Reads the properties of a GPU without creating a context on it. Fails if its compute capability is too low. */
static int describe(struct hstep_gpu *g)
{
    int major = 0, minor = 0, *processors = &g->multiprocessors;
    size_t bytes = 0;
    int error = HSTEP_GPU(g, cuDeviceGet, &g->device, g->ordinal);
    if (!error) error = HSTEP_GPU(g, cuDeviceGetName, g->name, (int)sizeof g->name, g->device);
    if (!error) error = HSTEP_GPU(g, cuDeviceTotalMem, &bytes, g->device);
    if (!error) error = HSTEP_GPU(g, cuDeviceGetAttribute, &major, HSTEP_CU_ATTRIBUTE_COMPUTE_MAJOR, g->device);
    if (!error) error = HSTEP_GPU(g, cuDeviceGetAttribute, &minor, HSTEP_CU_ATTRIBUTE_COMPUTE_MINOR, g->device);
    if (!error) error = HSTEP_GPU(g, cuDeviceGetAttribute, processors, HSTEP_CU_ATTRIBUTE_MULTIPROCESSORS, g->device);
    if (error) return error;
    g->memory = bytes;
    g->compute = 10 * major + minor;
    if (g->compute < HSTEP_CUDA_MINIMUM_COMPUTE)
        return hstep_cuda_fail(HALFSTEP_ERROR_DEVICE, "%s has compute capability %d.%d; it must be at least %d.%d",
                               g->name, major, minor, HSTEP_CUDA_MINIMUM_COMPUTE / 10, HSTEP_CUDA_MINIMUM_COMPUTE % 10);
    return HALFSTEP_OK;
}

static int find_gpu(const char *name, int *version, int *devices, struct hstep_gpu *g)
{
    *devices = 0;
    g->driver = hstep_cuda_driver(version);
    if (!g->driver) return HALFSTEP_ERROR_DEVICE;
    int error = HSTEP_GPU(g, cuDeviceGetCount, devices);
    if (!error) error = parse_ordinal(name, *devices, &g->ordinal);
    return error ? error : describe(g);
}

static int start_gpu(struct hstep_gpu *g)
{
    int error = HSTEP_GPU(g, cuDevicePrimaryCtxRetain, &g->context, g->device);
    if (error || (error = hstep_gpu_enter(g))) return error;
    error = load_kernels(g);
    hstep_gpu_leave(g);
    return error;
}

struct hstep_gpu *hstep_gpu_open(const char *name, int *error)
{
    static atomic_flag lock = ATOMIC_FLAG_INIT;
    static struct hstep_gpu *gpus[MOST_GPUS];
    struct hstep_gpu found = {0}, *g = NULL;
    int version = 0, devices;
    if ((*error = find_gpu(name, &version, &devices, &found))) return NULL;
    hstep_lock(&lock);
    g = gpus[found.ordinal];
    if (!g && !(*error = start_gpu(&found))) {
        g = malloc(sizeof *g);
        if (g) {
            memcpy(g, &found, sizeof *g);
            gpus[found.ordinal] = g;
        } else {
            *error = hstep_cuda_fail(HALFSTEP_ERROR_MEMORY, "no memory for a GPU");
        }
    }
    hstep_unlock(&lock);
    return g;
}

void hstep_gpu_inform(const char *name, halfstep_device_info *info)
{
    static char shown[MOST_GPUS][sizeof((struct hstep_gpu *)0)->name];
    struct hstep_gpu g = {0};
    int version = 0, devices = 0, error = find_gpu(name, &version, &devices, &g);
    info->devices = devices;
    info->driver = version;
    info->minimum_driver = HSTEP_CUDA_MINIMUM_DRIVER;
    info->images = count_images();
    info->code = image_path() ? "HALFSTEP_CUDA_IMAGE" : hstep_cuda_code;
    info->compute = g.compute;
    info->multiprocessors = g.multiprocessors;
    info->memory = g.memory;
    if (g.name[0]) {
        memcpy(shown[g.ordinal], g.name, sizeof g.name);
        info->name = shown[g.ordinal];
    }
    if (!error) hstep_gpu_open(name, &error);
    info->usable = !error;
}
