/* The rules in plain double precision, one element at a time, written from their published equations and independent of
 * src/. A reference takes the hyper-parameters as doubles and the stored values as they are. */
#ifndef HALFSTEP_REF_RULES_H
#define HALFSTEP_REF_RULES_H

#include "ref/adamw.h"
#include "ref/lion.h"
#include "ref/sgd.h"

#endif
