/* What optimizer.c needs from checkpoint.c beyond the public header. */
#ifndef HALFSTEP_IO_CHECKPOINT_H
#define HALFSTEP_IO_CHECKPOINT_H

#include "io/text.h"

/* Keeps the first failure of a save, which a commit repeats. Returns code. */
int hstep_note_failure(halfstep_checkpoint_save *save, int code, const hstep_error *error);

#endif
