/* The rules in plain double precision, one tensor at a time. They are written from the published equations and
 * independent of src/. A reference takes the hyper-parameters as doubles and the stored values as they are. */
#ifndef HALFSTEP_REF_RULES_H
#define HALFSTEP_REF_RULES_H

#include "ref/adafactor.h"
#include "ref/adam.h"
#include "ref/adamw.h"
#include "ref/adan.h"
#include "ref/ademamix.h"
#include "ref/adopt.h"
#include "ref/came.h"
#include "ref/compass.h"
#include "ref/delayed.h"
#include "ref/ema.h"
#include "ref/lamb.h"
#include "ref/lamb16.h"
#include "ref/lion.h"
#include "ref/lpfadamw.h"
#include "ref/mars.h"
#include "ref/muon.h"
#include "ref/prodigy.h"
#include "ref/radam.h"
#include "ref/ranger.h"
#include "ref/rmsprop.h"
#include "ref/schedulefree.h"
#include "ref/sgd.h"
#include "ref/stableadamw.h"

#endif
