/* The constants of an update, in double, from plain values alone: devices compile prepare.c and decide.c too. */
#ifndef HSTEP_PREPARE_H
#define HSTEP_PREPARE_H

#include "tables/call.h"

/* 0 sends everything through tiles: tests hold the fused kernels to the same bits. */
extern HSTEP_TABLE int hstep_use_fused;

/* From a group's hyper-parameters, with the rest of p filled in by the caller, to the constants of its rule. */
void hstep_prepare_rule(const struct hstep_group *group, struct hstep_prepare *p, float *k);
/* The group's lr at its next step. */
double hstep_group_lr(const struct hstep_group *group);
/* What a write leaves of a state: 1 of one that has no decay rate, such as a maximum. */
double hstep_state_beta(const struct hstep_group *group, int state);
/* 1 where these hyper-parameters need it at all (sgd without momentum does not). */
int hstep_state_needed(const struct hstep_group *group, int state);
/* The scale of a state of that format, which has one for the tensor, from the root of its sum and the number of
 * elements. */
float hstep_tensor_scale(int format, double norm, double elements);

/* The lr at which fully decoupled decay is weight_decay: as set, else the lr as first set. */
double hstep_reference_lr(const struct hstep_group *group);

/* Why a tensor with these hyper-parameters cannot be stepped, as the end of a sentence, and the code; NULL where it
 * can. */
const char *hstep_unpreparable(const struct hstep_group *g, const struct hstep_tensor *t, int *code);

/* Whether no tensor of this group can be unpreparable. */
int hstep_is_preparable(const struct hstep_group *g);

/* The update of a tensor that is not unpreparable. same: the update of a tensor with the same group and step counts,
 * whose constants are taken over, or NULL; they must not be its own. norms: roots of the tensor's sums, or NULL before
 * they are known. */
void hstep_prepare_update(const struct hstep_call *call, int tensor, double clip, const double *norms,
                          const struct hstep_update *same, struct hstep_update *u);
/* The same, before sums are known, where it differs little from that of tensor `before`, which is like this one and has
 * made as many steps; that may not be its own. */
void hstep_repeat_update(const struct hstep_call *call, int tensor, const struct hstep_tensor *before,
                         const struct hstep_update *same, struct hstep_update *u);

/* The entries of these names (device.h) for devices whose memory these functions can read. decide() and count() exist
 * in parts too. One part is for the step, the other for tensors first .. first + n - 1, which threads may share out.
 * hstep_judge() comes before hstep_decide_tensors(). */
int hstep_decide(const struct hstep_call *call);
void hstep_judge(const struct hstep_call *call);
void hstep_decide_tensors(const struct hstep_call *call, int first, int n);
int hstep_decide_sums(const struct hstep_call *call, int first, int n);
/* What ends a device's cross(): the update again, with the mean over the pair's new vector of rows. */
int hstep_decide_mean(const struct hstep_call *call, int tensor, int pair, double mean);
int hstep_count(const struct hstep_call *call);
void hstep_count_tensors(const struct hstep_call *call, int first, int n);
void hstep_count_step(const struct hstep_call *call);
int hstep_end_round(const struct hstep_call *call);

#endif
