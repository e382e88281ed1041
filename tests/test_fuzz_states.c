/* The fuzz target's corpus and seeded rounds, run as a test ("--short" runs fewer). */
#include "halfstep.h"

#include "../fuzz/fuzz_states.c"

int main(int argc, char **argv) { return fuzz_main(argc, argv, 800, 4000); }
