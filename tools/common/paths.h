/* Checks of the files that a command reads and writes, before any is opened. An output must not destroy an input or
 * another output. Also the path of the program itself. */
#ifndef HALFSTEP_PATHS_H
#define HALFSTEP_PATHS_H

#include <stddef.h>

struct named_path {
    const char *what; /* how the command line calls it: "--data" */
    const char *path; /* NULL: not given */
};

/* Refuses an output that is one of the inputs, or the same file as another output. Files are compared by device and
 * inode, so links of both kinds are found. A file that does not exist yet is compared by its folder and name. A folder
 * as input stands for every file in it and in its folders checkpoint-*. Character devices and pipes are never refused,
 * because they hold nothing that could be lost. Returns 0, or 2 with one line in error. */
int paths_check(const struct named_path *inputs, int n_inputs, const struct named_path *outputs, int n_outputs,
                char *error, size_t error_bytes);

/* Refuses an output in the folder `input` or below it. Accepts every output if input is not a folder. Returns 0, or 2
 * with one line in error. */
int paths_outside(struct named_path input, const struct named_path *outputs, int n_outputs, char *error,
                  size_t error_bytes);

/* Writes the path of the running program. Returns 0, or -1 if the system does not tell it or it is too long. */
int paths_program(char *path, size_t path_bytes);

#endif
