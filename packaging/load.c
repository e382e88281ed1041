/* Loads libraries at run time, as Python does: load HALFSTEP FUNCTIONS [HALFSTEP_IO FUNCTIONS], where FUNCTIONS is a
 * file with a name a line. Fails if a function is missing, or if halfstep is not of the header that this was compiled
 * with. Fails if halfstep_io uses another copy of it. Prints what the library says of itself and of GPUs. */
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

/* Opens a library and finds the functions of a list in it. Returns NULL if that fails, after a sentence. */
static void *open_with(const char *path, const char *list, int *functions)
{
    char name[256];
    int found = 0, missing = 0;
    FILE *names = fopen(list, "r");
    void *library = load(path);
    if (!names || !library) {
        printf("cannot open %s\n", names ? reason() : list);
        return NULL;
    }
    while (fscanf(names, "%255s", name) == 1) {
        if (find(library, name)) {
            found++;
        } else {
            missing++;
            printf("%s has no function %s\n", path, name);
        }
    }
    fclose(names);
    *functions += found;
    return found && !missing ? library : NULL;
}

int main(int argc, char **argv)
{
    int functions = 0;
    if (argc != 3 && argc != 5) {
        printf("give a library and a list of its functions, or two of each\n");
        return 1;
    }
    void *library = open_with(argv[1], argv[2], &functions);
    void *io = argc == 5 ? open_with(argv[3], argv[4], &functions) : library;
    if (!library || !io) return 1;
    if (find(io, "halfstep_abi") != find(library, "halfstep_abi")) {
        printf("%s uses another library than %s\n", argv[3], argv[1]);
        return 1;
    }
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
