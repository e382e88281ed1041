/* The public header with all that it has: the library's own files include this one. */
#ifndef HSTEP_API_H
#define HSTEP_API_H

#define HALFSTEP_ADVANCED
#include "halfstep.h"

#endif
