/* The public functions that describe the rows of the tables. They are apart from tables.c, which devices compile too,
 * because they have error texts. */
#include <string.h>

#include "base/process/detail.h"
#include "base/structs.h"
#include "tables/tables.h"

int32_t halfstep_rule_count(void) { return HSTEP_RULES; }
int32_t halfstep_format_count(void) { return HSTEP_FORMATS; }
int32_t halfstep_rule_find(const char *name) { return name ? hstep_find_rule(name, strlen(name)) : -1; }
int32_t halfstep_format_find(const char *name) { return name ? hstep_find_format(name, strlen(name)) : -1; }

/* Copies the description of a row to the caller's structure. */
static int give(const char *function, void *info, const void *ours, size_t size)
{
    if (hstep_give_struct(info, ours, size)) return HALFSTEP_OK;
    char text[HSTEP_DETAIL_BYTES];
    hstep_describe_struct(text, function, info);
    return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s", text);
}

/* Fails unless there is such a row, and a structure to describe it in. */
static int check_row(const char *function, int32_t row, int count, const void *info)
{
    if (!info) return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s: info is NULL", function);
    if (row >= 0 && row < count) return HALFSTEP_OK;
    return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s: there is no row %d; rows are 0 to %d", function, (int)row,
                            count - 1);
}

int halfstep_get_rule_info(int32_t row, halfstep_rule_info *given)
{
    const int error = check_row(__func__, row, HSTEP_RULES, given);
    if (error) return error;
    const struct hstep_rule *rule = &hstep_rules[row];
    halfstep_rule_info ours = {0}, *info = &ours;
    info->id = rule->id;
    info->name = rule->name;
    info->title = rule->title;
    info->label = rule->label;
    info->decay = rule->decay;
    info->states = hstep_rule_states(row);
    for (int i = 0; i < info->states; i++) {
        info->state_role[i] = rule->state[i].role;
        info->state_name[i] = rule->state[i].name;
        info->state_extent[i] = rule->state[i].extent;
        info->precise_if[i] = rule->state[i].precise_while;
        info->precise_format[i] = rule->state[i].precise_while ? hstep_formats[rule->state[i].precise].name : NULL;
        info->average |= rule->state[i].role == HALFSTEP_ROLE_WEIGHT && rule->state[i].beta;
    }
    info->scalars = hstep_rule_scalars(row);
    for (int i = 0; i < info->scalars; i++) info->scalar_name[i] = rule->scalar[i].name;
    info->two_pass = rule->norms > 0;
    info->totals = rule->totals ? rule->norms : 0;
    info->matrix = hstep_has_matrices(row);
    info->accumulates = rule->keeps != NULL;
    info->cautious = !rule->not_cautious;
    info->cautious_decay = !rule->no_cautious_decay;
    info->raw_gradient = rule->kind == HSTEP_RAW_GRADIENT;
    info->hypers = HSTEP_COMMON_HYPERS + hstep_rule_hypers(row);
    return give(__func__, given, &ours, sizeof ours);
}

int halfstep_get_format_info(int32_t row, halfstep_format_info *info)
{
    const int error = check_row(__func__, row, HSTEP_FORMATS, info);
    if (error) return error;
    const struct hstep_format *format = &hstep_formats[row];
    halfstep_format_info ours = {.id = format->id,
                                 .name = format->name,
                                 .title = format->title,
                                 .roles = format->roles,
                                 .code_bits = format->code_bits,
                                 .extra_bits = format->extra_bits,
                                 .block = format->block,
                                 .scale_bytes = format->scale_bits / 8,
                                 .geometry = format->geometry,
                                 .stochastic = format->stochastic,
                                 .grid = format->root != 0,
                                 .code_dtype = format->code_dtype,
                                 .extra_dtype = format->extra_dtype};
    return give(__func__, info, &ours, sizeof ours);
}

int halfstep_get_hyper_info(int32_t rule, int32_t index, halfstep_hyper_info *info)
{
    int error = check_row(__func__, rule, HSTEP_RULES, info);
    if (!error) error = check_row(__func__, index, HSTEP_COMMON_HYPERS + hstep_rule_hypers(rule), info);
    if (error) return error;
    struct hstep_hyper hyper = hstep_rule_hyper(rule, index);
    halfstep_hyper_info ours = {.name = hyper.name,
                                .title = hyper.title,
                                .initial = hyper.initial,
                                .minimum = hyper.minimum,
                                .maximum = hyper.maximum,
                                .exclusive_maximum = hyper.exclusive,
                                .per_optimizer = index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS};
    return give(__func__, info, &ours, sizeof ours);
}
