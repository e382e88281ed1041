#ifndef HSTEP_STEP_H
#define HSTEP_STEP_H

/* 0 sends everything through tiles: tests hold the fused kernels to the same bits. */
extern int hstep_use_fused;

#endif
