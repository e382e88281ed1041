/* Computes the constants of an update, in double, from plain values alone. Devices compile prepare.c and decide.c
 * too. */
#ifndef HSTEP_PREPARE_H
#define HSTEP_PREPARE_H

#include "tables/call.h"

/* 0 makes every step take the tile path. Tests use it to compare the bits of fused kernels. */
extern HSTEP_TABLE int hstep_use_fused;

/* Computes the constants k of a group's rule from its hyper-parameters. The caller has filled in the other members of
 * p. */
void hstep_prepare_rule(const struct hstep_group *group, struct hstep_prepare *p, float *k);
/* Returns what a pair's vector of rows is multiplied by in one matrix, from the mean over the new vector. */
float hstep_factor_of(const struct hstep_group *group, double mean, int pair);
/* Returns the group's lr at its next step. */
double hstep_group_lr(const struct hstep_group *group);
/* Returns the group's weight decay at its next step. */
double hstep_group_decay(const struct hstep_group *group);
/* Returns the factor by which a write decays a state, or 1 for a state without a decay rate, such as a maximum. */
double hstep_state_beta(const struct hstep_group *group, int state);
/* Returns the hyper-parameter without which a state is needless, or 1 for a state that is always needed. */
double hstep_state_option(const struct hstep_group *group, int state);
/* Returns 1 if the group's hyper-parameters need the state. Example: sgd without momentum needs none. */
int hstep_state_needed(const struct hstep_group *group, int state);
/* Returns the scale of a state whose format has one scale for the tensor. norm: root of the state's sum. elements:
 * their number. */
float hstep_tensor_scale(int format, double norm, double elements);

/* Returns the lr at which fully decoupled decay equals weight_decay: reference_lr if it is set, else the lr as first
 * set. */
double hstep_reference_lr(const struct hstep_group *group);

/* Returns why a tensor with these hyper-parameters cannot be stepped, as the end of an error text, and sets *code.
 * Returns NULL if it can be stepped. */
const char *hstep_unpreparable(const struct hstep_group *g, const struct hstep_tensor *t, int *code);

/* Returns 1 if every tensor of the group can be stepped (hstep_unpreparable()). */
int hstep_is_preparable(const struct hstep_group *g);

/* Prepares the update of a tensor that can be stepped. It takes the constants from `same`, the update of a tensor with
 * the same group and step counts, unless that is NULL. Those constants must not come from that tensor itself. The roots
 * of the tensor's sums are `norms`, or NULL before they are known. */
void hstep_prepare_update(const struct hstep_call *call, int tensor, double clip, const double *norms,
                          const struct hstep_update *same, struct hstep_update *u);
/* Prepares an update that differs little from `same`, the update of tensor `before`, at a time when no sums are known.
 * Both tensors are stored alike and have equal step counts. The constants must not come from `before` itself. */
void hstep_repeat_update(const struct hstep_call *call, int tensor, const struct hstep_tensor *before,
                         const struct hstep_update *same, struct hstep_update *u);

/* Entries of the same names in device.h, for devices whose memory these functions can read. Two of them, decide() and
 * count(), also exist in two parts. One part is for the step. The other is for tensors first .. first + n - 1, which
 * threads may share out. Call hstep_judge() before hstep_decide_tensors(). */
int hstep_decide(const struct hstep_call *call);
void hstep_judge(const struct hstep_call *call);
void hstep_decide_tensors(const struct hstep_call *call, int first, int n);
int hstep_decide_sums(const struct hstep_call *call, int first, int n);
/* The same with room for HSTEP_MAX_SUMS numbers, for devices whose threads have little memory of their own. */
int hstep_decide_sums_in(const struct hstep_call *call, int first, int n, double *sums);
int hstep_count(const struct hstep_call *call);
void hstep_count_tensors(const struct hstep_call *call, int first, int n);
void hstep_count_step(const struct hstep_call *call);
int hstep_end_round(const struct hstep_call *call);

#endif
