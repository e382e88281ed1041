/* The general kernels and the fused ones of one rule, for `make test`. The fused kernels of other rules are there and
 * do nothing, so that this compiles in a fraction of the time. */
#define HSTEP_CUDA_IS_CHOSEN(rule) (HSTEP_RULE_##rule == HSTEP_RULE_adamw)
#include "device/cuda/code/kernels.cu"
