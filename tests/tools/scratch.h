/* Makes a scratch folder, which is removed when the process ends, and files in it. */
#ifndef HALFSTEP_TESTS_SCRATCH_H
#define HALFSTEP_TESTS_SCRATCH_H

#include <stdlib.h>

#include "folders.h"

static char scratch[256];

static void remove_scratch(void) { remove_tree(scratch); }

/* Makes the folder, below TMPDIR if that is set. Ends the program if it cannot. */
static void make_scratch(const char *name)
{
    const char *base = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%.200s/halfstep-%s-XXXXXX", base && *base ? base : P_tmpdir, name);
    if (!mkdtemp(scratch)) {
        perror(scratch);
        exit(1);
    }
    atexit(remove_scratch);
}

/* Writes a whole file. Ends the program if it cannot. */
__attribute__((unused)) static void put_file(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file)) {
        perror(path);
        exit(1);
    }
}

#endif
