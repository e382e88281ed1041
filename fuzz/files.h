/* For fuzz targets that need files: a scratch folder, in memory where possible, and small files in it. */
#ifndef HALFSTEP_FUZZ_FILES_H
#define HALFSTEP_FUZZ_FILES_H

#include <fcntl.h>
#include <sys/stat.h>

#include "../tests/tools/folders.h"

/* FOLDER/halfstep-fuzz-PID; removed when the process ends. */
static char scratch[512];

static void remove_scratch(void) { remove_tree(scratch); }

static void make_scratch(void)
{
    const char *base = getenv("TMPDIR");
    if (!base || !*base) base = access("/dev/shm", W_OK) ? P_tmpdir : "/dev/shm";
    snprintf(scratch, sizeof scratch, "%.400s/halfstep-fuzz-%ld", base, (long)getpid());
    remove_tree(scratch);
    demand(!mkdir(scratch, 0777), "no folder for files");
    atexit(remove_scratch);
}

/* Writes a file into the scratch folder. Returns its path, valid until the next call. */
__attribute__((unused)) static const char *put_file(const char *name, const void *data, size_t bytes)
{
    static char path[1024];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    FILE *file = fopen(path, "wb");
    demand(file && fwrite(data, 1, bytes, file) == bytes && !fclose(file), "a file cannot be written");
    return path;
}

__attribute__((unused)) static size_t get_file(const char *name, uint8_t *data, size_t room)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    FILE *file = fopen(path, "rb");
    demand(file != NULL, "a file cannot be read");
    size_t bytes = fread(data, 1, room, file);
    fclose(file);
    return bytes;
}

#endif
