/* Which files a command reads and which it writes: an output that would destroy an input, or another output, is refused
 * before either is opened. */
#ifndef HALFSTEP_PATHS_H
#define HALFSTEP_PATHS_H

#include <stddef.h>

struct named_path {
    const char *what; /* how the command line calls it: "--data" */
    const char *path; /* NULL: not given */
};

/* Two names of one file are found out by device and inode, links of both kinds included; names of files that are not
 * there yet by their folder. Of an input that is a folder, every file counts that lies in it or in a checkpoint-N of
 * it. Devices and pipes hold nothing that could be lost. 0, or 2 and one line. */
int paths_check(const struct named_path *inputs, int n_inputs, const struct named_path *outputs, int n_outputs,
                char *error, size_t error_bytes);

/* An output in the folder `input`, or in one below it, is refused; where input is no folder, none is. Likewise. */
int paths_outside(struct named_path input, const struct named_path *outputs, int n_outputs, char *error,
                  size_t error_bytes);

#endif
