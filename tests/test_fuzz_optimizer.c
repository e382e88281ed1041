/* The fuzz target's own seeded mutations, run as a test ("--short" runs fewer). */
#include "halfstep_io.h"

#include "../fuzz/fuzz_optimizer.c"
