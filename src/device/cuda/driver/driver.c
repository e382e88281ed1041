#include "device/cuda/driver/driver.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "device/cuda/driver/library.h"
#include "base/api.h"

#ifdef _WIN32
#define LIBRARY "nvcuda.dll"
#else
#define LIBRARY "libcuda.so.1"
#endif

/* ---- Error texts ---- */

static _Thread_local char error_text[256];

int hstep_cuda_fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return code;
}

const char *hstep_cuda_why(void) { return error_text[0] ? error_text : NULL; }

static const char lost[] =
    "this process has lost its context on the GPU; save what is not there and start a new process";

/* The code and the advice for results that can be expected. After a lasting one the process can reach nothing on the
 * GPU any more. */
static const struct {
    int result, code, lasting;
    const char *advice;
} known[] = {
    {1, HALFSTEP_ERROR_DEVICE, 0, "the driver rejects the arguments; check that all memory passed is still allocated"},
    {2, HALFSTEP_ERROR_MEMORY, 0, "free memory of the GPU, or store states in fewer bits"},
    {3, HALFSTEP_ERROR_DEVICE, 0,
     "a child of fork() cannot use a GPU that its parent has used; make the first handle in the child"},
    {4, HALFSTEP_ERROR_DEVICE, 1, "the process is ending; make no call after main() has returned"},
    {100, HALFSTEP_ERROR_DEVICE, 0, "there is no GPU, or CUDA_VISIBLE_DEVICES hides it"},
    {101, HALFSTEP_ERROR_DEVICE, 0, "there is no such GPU; 'halfstep info' lists those that there are"},
    {200, HALFSTEP_ERROR_DEVICE, 0, "the device code does not fit this driver; install a newer driver"},
    {201, HALFSTEP_ERROR_DEVICE, 0, "no context is current, as after a reset of the GPU; start a new process"},
    {209, HALFSTEP_ERROR_DEVICE, 0, "the build has no device code for this GPU; build it again for this GPU"},
    {214, HALFSTEP_ERROR_DEVICE, 1, lost},
    {218, HALFSTEP_ERROR_DEVICE, 0, "the driver rejects the PTX of this build; install a newer driver"},
    {222, HALFSTEP_ERROR_DEVICE, 0, "the driver is too old for the PTX of this build; install a newer driver"},
    {500, HALFSTEP_ERROR_DEVICE, 0, "the device code is from another version; build it again"},
    {700, HALFSTEP_ERROR_DEVICE, 1, lost},
    {701, HALFSTEP_ERROR_DEVICE, 0, "the GPU has too few registers for the kernel; build it again for this GPU"},
    {702, HALFSTEP_ERROR_DEVICE, 1, lost},
    {710, HALFSTEP_ERROR_DEVICE, 1, lost},
    {714, HALFSTEP_ERROR_DEVICE, 1, lost},
    {715, HALFSTEP_ERROR_DEVICE, 1, lost},
    {716, HALFSTEP_ERROR_DEVICE, 1, lost},
    {717, HALFSTEP_ERROR_DEVICE, 1, lost},
    {718, HALFSTEP_ERROR_DEVICE, 1, lost},
    {719, HALFSTEP_ERROR_DEVICE, 1, lost},
    {721, HALFSTEP_ERROR_DEVICE, 1, lost},
    {802, HALFSTEP_ERROR_DEVICE, 0, "the system's services for GPUs are not up yet; try again later"},
    {803, HALFSTEP_ERROR_DEVICE, 0, "libcuda and the kernel's driver have different versions; restart the machine"},
    {804, HALFSTEP_ERROR_DEVICE, 0, "this GPU does not support a forward-compatible libcuda; install a newer driver"},
    {900, HALFSTEP_ERROR_ORDER, 0, "the stream is being captured; make this call outside the capture"},
    {901, HALFSTEP_ERROR_ORDER, 0, "the capture has already failed; end it and capture again"},
    {905, HALFSTEP_ERROR_ORDER, 0,
     "a captured stream cannot wait for one that is not; give the captured one by halfstep_set_stream()"},
    {906, HALFSTEP_ERROR_ORDER, 0,
     "the default stream cannot be used while another is captured; give the handle its own by halfstep_set_stream()"},
    {999, HALFSTEP_ERROR_DEVICE, 1, lost},
};

int hstep_cuda_result(const struct hstep_cuda_driver *d, int result, const char *call, int *lasting)
{
    const char *name = NULL, *text = NULL, *advice = "see the driver's manual";
    int code = HALFSTEP_ERROR_DEVICE;
    if (result == HSTEP_CU_SUCCESS) return HALFSTEP_OK;
    if (d->cuGetErrorName(result, &name) || !name) name = "unknown result";
    if (d->cuGetErrorString(result, &text) || !text) text = "no description";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].result == result) {
            code = known[i].code;
            advice = known[i].advice;
            if (lasting) *lasting |= known[i].lasting;
        }
    return hstep_cuda_fail(code, "%s: %s (%s): %s", call, name, text, advice);
}

/* ---- The library ---- */

static struct hstep_cuda_driver driver;

/* Finds all functions. Returns NULL, or the first symbol that is missing. */
static const char *find_all(void *library)
{
    const struct {
        const char *symbol;
        void *place;
    } functions[] = {
#define FUNCTION(name, symbol, since, parameters) {symbol, &driver.name},
#include "device/cuda/driver/driver.def"
#undef FUNCTION
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found;
        hstep_library_find(library, functions[i].symbol, functions[i].place);
        memcpy(&found, functions[i].place, sizeof found);
        if (!found) return functions[i].symbol;
    }
    return NULL;
}

#define DOT(version) (version) / 1000, (version) % 1000 / 10

static int load(int *version)
{
    static const char *const names[] = {LIBRARY, NULL};
    void *library = hstep_library_open(names);
    if (!library)
        return hstep_cuda_fail(HALFSTEP_ERROR_DEVICE,
                               "there is no NVIDIA driver: %s cannot be loaded; install one of CUDA %d.%d or newer",
                               LIBRARY, DOT(HSTEP_CUDA_MINIMUM_DRIVER));
    /* Checked before the rest, so that an old driver is reported as old and not as incomplete. */
    hstep_library_find(library, "cuDriverGetVersion", &driver.cuDriverGetVersion);
    if (!driver.cuDriverGetVersion || driver.cuDriverGetVersion(version)) *version = 0;
    const char *missing = NULL;
    int error = HALFSTEP_OK;
    if (*version < HSTEP_CUDA_MINIMUM_DRIVER)
        error =
            hstep_cuda_fail(HALFSTEP_ERROR_DEVICE,
                            "the NVIDIA driver supports CUDA %d.%d; it must support %d.%d or newer: install a newer "
                            "driver",
                            DOT(*version), DOT(HSTEP_CUDA_MINIMUM_DRIVER));
    else if ((missing = find_all(library)))
        error = hstep_cuda_fail(HALFSTEP_ERROR_DEVICE, "%s has no %s; the driver is incomplete: install it again",
                                LIBRARY, missing);
    else error = hstep_cuda_result(&driver, driver.cuInit(0), "cuInit", NULL);
    if (error) hstep_library_close(library);
    return error;
}

const struct hstep_cuda_driver *hstep_cuda_driver(int *version)
{
    static atomic_flag lock = ATOMIC_FLAG_INIT;
    hstep_lock(&lock);
    int error = driver.version ? HALFSTEP_OK : load(version);
    if (!error && !driver.version) driver.version = *version;
    if (driver.version) *version = driver.version;
    hstep_unlock(&lock);
    return error ? NULL : &driver;
}
