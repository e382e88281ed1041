/* Loads a library of halfstep at run time, as Python does: load LIBRARY FUNCTIONS, where FUNCTIONS is a file with a name
 * a line. Fails if a function is missing, or if the library is not of the header that this was compiled with. Prints what
 * the library says of itself and of GPUs. */
#define HALFSTEP_ADVANCED
#include <stdio.h>
#include <string.h>

#include "halfstep.h"

#ifdef _WIN32
#include <windows.h>
static void *load(const char *path) { return (void *)LoadLibraryA(path); }
static void *find(void *library, const char *name) { return (void *)GetProcAddress((HMODULE)library, name); }
static const char *reason(void) { return "LoadLibrary"; }
#else
#include <dlfcn.h>
static void *load(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void *find(void *library, const char *name) { return dlsym(library, name); }
static const char *reason(void) { return dlerror(); }
#endif

/* Declares a pointer to a function of the library, under the name without "halfstep_". */
#define FUNCTION(name) __typeof__(halfstep_##name) *name = (__typeof__(halfstep_##name) *)find(library, "halfstep_" #name)

int main(int argc, char **argv)
{
    char name[256];
    int functions = 0, missing = 0;
    FILE *list = argc == 3 ? fopen(argv[2], "r") : NULL;
    void *library = argc == 3 ? load(argv[1]) : NULL;
    if (!list || !library) {
        printf("cannot open %s\n", argc != 3 ? "a library and a list; give both" : list ? reason() : argv[2]);
        return 1;
    }
    while (fscanf(list, "%255s", name) == 1) {
        functions++;
        if (find(library, name)) continue;
        missing++;
        printf("no function %s\n", name);
    }
    fclose(list);
    if (!functions || missing) return 1;
    FUNCTION(abi);
    FUNCTION(version);
    FUNCTION(isa);
    FUNCTION(device_code);
    FUNCTION(get_device_info);
    FUNCTION(error_detail);
    const int expected = HALFSTEP_VERSION_MAJOR * 10000 + HALFSTEP_VERSION_MINOR * 100 + HALFSTEP_VERSION_PATCH;
    if (abi() != HALFSTEP_ABI || version() != expected) {
        printf("ABI %d and version %d; the header has %d and %d\n", (int)abi(), (int)version(), HALFSTEP_ABI, expected);
        return 1;
    }
    halfstep_device_info gpu = {.struct_size = sizeof gpu};
    if (get_device_info("cuda", &gpu)) return 1;
    printf("%d functions; %s; device code: %s; GPU: %s\n", functions, isa(), device_code(),
           gpu.usable ? gpu.name : error_detail(NULL));
    return 0;
}
