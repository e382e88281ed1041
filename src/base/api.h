/* Includes the public header with its advanced part. The library's own files include this header instead. */
#ifndef HSTEP_API_H
#define HSTEP_API_H

#define HALFSTEP_ADVANCED
#include "halfstep.h"

#endif
