/* Adam, with the arithmetic of adamw.h. Its decay is part of the gradient (l2) unless a group says otherwise.
 *
 * Use: to go on with a run of torch.optim.Adam, whose decay is part of the gradient.
 * Source: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1
 * Equations: adamw */
#ifndef HSTEP_ADAM_H
#define HSTEP_ADAM_H

#include "rules/adamw.h"

#define adam_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)             \
    RULE("adam", ELEMENTWISE, PARTS(adamw), CAUTIOUS(ADAMW_DECAY), \
         .label = "Adam", .title = "Adam (Kingma & Ba 2015)",      \
         .lr = 1e-3, .decay = "l2", .keeps = "exp_avg")            \
    ADAMW_STATES_AND_HYPERS(STATE, OPTIONAL, HYPER)

enum { adam_constants = adamw_constants };

HSTEP_INLINE void adam_prepare(float *k, struct hstep_prepare *p) { adamw_prepare(k, p); }

#endif
