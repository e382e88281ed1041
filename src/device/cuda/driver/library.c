#include "device/cuda/driver/library.h"

#include <stddef.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>

static void *open_one(const char *name, int loaded)
{
    HMODULE found = NULL;
    if (!loaded) return (void *)LoadLibraryA(name);
    /* The handle is counted, as one of LoadLibraryA() is. */
    return GetModuleHandleExA(0, name, &found) ? (void *)found : NULL;
}

void hstep_library_close(void *library) { FreeLibrary((HMODULE)library); }

void hstep_library_find(void *library, const char *name, void *place)
{
    FARPROC found = GetProcAddress((HMODULE)library, name);
    memcpy(place, &found, sizeof found);
}
#else
#include <dlfcn.h>

static void *open_one(const char *name, int loaded)
{
    return dlopen(name, RTLD_NOW | RTLD_LOCAL | (loaded ? RTLD_NOLOAD : 0));
}

void hstep_library_close(void *library) { dlclose(library); }

void hstep_library_find(void *library, const char *name, void *place)
{
    void *found = dlsym(library, name);
    memcpy(place, &found, sizeof found);
}
#endif

void *hstep_library_open(const char *const *names)
{
    void *found = NULL;
    for (int loaded = 1; !found && loaded >= 0; loaded--)
        for (int i = 0; !found && names[i]; i++) found = open_one(names[i], loaded);
    return found;
}
