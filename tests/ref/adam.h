/* The equations of adamw.h, usually with l2 decay. */
#ifndef HALFSTEP_REF_ADAM_H
#define HALFSTEP_REF_ADAM_H

#include "ref/adamw.h"

#define ref_adam_ROWS(X)              \
    X("adam", ref_adamw, 1e-3, "", 0) \
    X("adam", ref_adamw, 1e-3, "amsgrad=1", 1)

#endif
