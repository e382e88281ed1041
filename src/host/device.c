/* The host as a device: everything is done when a call returns. */
#include <string.h>

#include "core/prepare.h"
#include "host/host.h"
#include "host/kernels.h"

static int find_fused(const struct hstep_context *c, const struct hstep_tensor *t)
{
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    for (int s = HALFSTEP_SLOT_STATE + 2; s < HSTEP_SLOTS; s++)
        if (t->slot[s].format >= 0) return -1;
    if (t->sums || rule->kind != HSTEP_ELEMENTWISE) return -1;
    for (int i = 0; i < c->kernels->fused_rows; i++) {
        const struct hstep_fused_row *row = &c->kernels->fused[i];
        if (!strcmp(row->rule, rule->kernel) && row->weight == t->slot[HALFSTEP_SLOT_WEIGHT].format &&
            row->gradient == t->slot[HALFSTEP_SLOT_GRADIENT].format &&
            row->state[0] == t->slot[HALFSTEP_SLOT_STATE].format &&
            row->state[1] == t->slot[HALFSTEP_SLOT_STATE + 1].format)
            return i;
    }
    return -1;
}

static int carry(const struct hstep_context *c, int64_t *limbs, int64_t n)
{
    (void)c;
    for (int64_t i = 0; i < n; i++) hstep_exact_normalize(limbs + i * HSTEP_EXACT_LIMBS);
    return HALFSTEP_OK;
}

static int wait(const struct hstep_context *c)
{
    (void)c;
    return HALFSTEP_OK;
}

const struct hstep_device hstep_host_device = {
    .name = "host",
    .shared = 1,
    .allocate = hstep_host_allocate,
    .release = hstep_host_release,
    .zero = hstep_host_zero,
    .touch = hstep_host_touch,
    .copy = hstep_host_copy,
    .wait = wait,
    .find_fused = find_fused,
    .workspace = hstep_host_workspace,
    .scan = hstep_host_scan,
    .decide = hstep_decide,
    .sum = hstep_host_sum,
    .decide_sums = hstep_decide_sums,
    .carry = carry,
    .update = hstep_host_update,
    .transform = hstep_host_transform,
    .count = hstep_count,
    .end_round = hstep_end_round,
    .accumulate = hstep_host_accumulate,
    .read = hstep_host_read,
    .write = hstep_host_write,
    .saturated = hstep_host_saturated,
};

const struct hstep_device *hstep_default_device = &hstep_host_device;
