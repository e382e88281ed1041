/* The host's device table. All its calls are synchronous. */
#include <string.h>

#include "decide/prepare.h"
#include "device/host/host.h"
#include "kernels/kernels.h"

/* Returns the number of the fused step for the first row of fused.def that fits the tensor's formats, or -1. The
 * variant says which conditional states the tensor stores. */
static int find_fused(const struct hstep_context *c, const struct hstep_tensor *t, enum hstep_way way)
{
    static const struct {
        int gradient, first, second;
    } rows[HSTEP_FUSED_ROWS] = {
#define FUSED_ROW(gradient, first, second, ...) {HSTEP_FORMAT_##gradient, HSTEP_FORMAT_##first, HSTEP_FORMAT_##second},
        HSTEP_FUSED_RECIPES(FUSED_ROW, )
#undef FUSED_ROW
    };
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    const int weight = t->slot[HALFSTEP_SLOT_WEIGHT].format;
    int variant = 0, conditional = 0;
    if (!c->kernels->find_fused || t->matrix || t->pairs || hstep_rule_states(t->rule) > HSTEP_FUSED_STATES) return -1;
    for (int j = 0; j < hstep_rule_states(t->rule); j++)
        if (rule->state[j].unless) variant |= (t->slot[HALFSTEP_SLOT_STATE + j].format >= 0) << conditional++;
    if (variant >= HSTEP_FUSED_VARIANTS) return -1;
    for (int i = 0; i < HSTEP_FUSED_ROWS; i++) {
        const int any = rows[i].gradient == HSTEP_FORMAT_any;
        int plain = rows[i].gradient == HSTEP_FORMAT_f32,
            fits = any || rows[i].gradient == t->slot[HALFSTEP_SLOT_GRADIENT].format;
        for (int j = 0; fits && j < hstep_rule_states(t->rule); j++) {
            int format = t->slot[HALFSTEP_SLOT_STATE + j].format;
            if (format < 0) {
                fits = rule->state[j].unless != NULL;
                continue;
            }
            const int role = rule->state[j].role;
            if (role == HALFSTEP_ROLE_WEIGHT) {
                fits = format == weight;
                continue;
            }
            fits = format == hstep_fused_format(role, rows[i].gradient, rows[i].first, rows[i].second,
                                                hstep_formats[rows[i].first].block);
            plain = plain && format == HSTEP_FORMAT_f32;
        }
        /* If all other slots are f32 in the order of memory, the weight must be so too. */
        const int any_gradient = way == HSTEP_WAY_COMPARED || (way == HSTEP_WAY_ADJUSTED && !plain);
        if (!fits || (plain && weight != HSTEP_FORMAT_f32) || (any_gradient && !any)) continue;
        int step = c->kernels->find_fused(t->rule, i, variant);
        if (step >= 0) return step;
    }
    return -1;
}

static size_t workspace(const struct hstep_tensor *t)
{
    return t->matrix ? hstep_host_workspace(t) : hstep_host_cross_workspace(t);
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
    .workspace = workspace,
    .scan = hstep_host_scan,
    .decide = hstep_decide,
    .sum = hstep_host_sum,
    .decide_sums = hstep_decide_sums,
    .cross = hstep_host_cross,
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
