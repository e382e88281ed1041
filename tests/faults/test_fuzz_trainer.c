/* Runs the fuzz target's corpus and seeded rounds as a test. --short runs fewer, --all four times as many. */
#include "common/args/args.h"

#include "fuzz/fuzz_trainer.c"

int main(int argc, char **argv) { return fuzz_main(argc, argv, 60, 400); }
