/* Runs the fuzz target's corpus and seeded rounds as a test. --short runs fewer, --all four times as many. */
#include "halfstep_io.h"

#include "fuzz/fuzz_checkpoint.c"

int main(int argc, char **argv) { return fuzz_main(argc, argv, 2000, 20000); }
