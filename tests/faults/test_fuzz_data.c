/* Runs the fuzz target's corpus and seeded rounds as a test. --short runs fewer, --all four times as many. */
#include "trainer/data/data.h"

#include "fuzz/fuzz_data.c"

int main(int argc, char **argv) { return fuzz_main(argc, argv, 1500, 20000); }
