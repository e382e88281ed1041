/* Compiling this file is the test: each public header stands alone, whatever the order, and may come twice. */
#include "halfstep.h"
#include "halfstep_io.h"
