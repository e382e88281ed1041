/* Runs the program inside this one: its main() as a function, with its output kept in memory. */
#ifndef HALFSTEP_FUZZ_PROGRAM_H
#define HALFSTEP_FUZZ_PROGRAM_H

#include <fcntl.h>
#include <sys/mman.h>

#define main program_main
#include "cli/main.c"
#undef main

enum { MAX_WORDS = 40 };

static int own_streams[2] = {-1, -1}, taken[2];
static char program_errors[4096];

/* The function that runs it. A test may define a wrapper. */
#ifndef PROGRAM_MAIN
#define PROGRAM_MAIN program_main
#endif

/* Runs the program. Returns its exit status; program_errors holds its stderr. */
static int run_program(int argc, char **argv)
{
    fflush(NULL);
    for (int i = 0; i < 2; i++) {
        if (own_streams[i] < 0) {
            own_streams[i] = fcntl(i + 1, F_DUPFD_CLOEXEC, 10);
            taken[i] = memfd_create("output", MFD_CLOEXEC);
            demand(own_streams[i] >= 0 && taken[i] >= 0, "no memory file");
        }
        demand(!ftruncate(taken[i], 0) && lseek(taken[i], 0, SEEK_SET) == 0, "no memory file");
        dup2(taken[i], i + 1);
    }
    int status = PROGRAM_MAIN(argc, argv);
    fflush(NULL);
    clearerr(stdout);
    for (int i = 0; i < 2; i++) dup2(own_streams[i], i + 1);
    ssize_t got = pread(taken[1], program_errors, sizeof program_errors - 1, 0);
    program_errors[got > 0 ? got : 0] = 0;
    return status;
}

/* Runs the program and demands status 0, or 1 or 2 and one sentence. Returns the status. */
__attribute__((unused)) static int judge_program(int argc, char **argv)
{
    int status = run_program(argc, argv);
    if (status == 0) return 0;
    size_t length = strlen(program_errors), lines = 0;
    for (const char *line = program_errors; *line; line = strchr(line, '\n') + 1) {
        lines += strncmp(line, "halfstep: note: ", 16) && strncmp(line, "note: ", 6) && strncmp(line, "warning: ", 9);
        if (!strchr(line, '\n')) break;
    }
    if ((status == 1 || status == 2) && lines == 1 && length > 12 && length < sizeof program_errors - 1) return status;
    for (int i = 0; i < argc; i++) fprintf(stderr, "%s%c", argv[i], i + 1 < argc ? ' ' : '\n');
    fprintf(stderr, "status %d: %s\n", status, program_errors);
    demand(0, "a failure without one sentence");
    return status;
}

#endif
