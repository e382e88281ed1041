/* Recipes as people type them: full forms, and errors that say which part is unknown and what there is instead. */
#ifndef HALFSTEP_RECIPES_H
#define HALFSTEP_RECIPES_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"

#define RECIPE_BYTES 64

/* 0 and the full form, or -1 and one line. */
int recipe_check(const char *recipe, char full[RECIPE_BYTES], char *error, size_t error_bytes);

/* The parts of a full form: "adamw", "bf16-sr", "int8+bf16-sr". */
struct recipe_parts {
    char rule[RECIPE_BYTES], weight[RECIPE_BYTES], states[RECIPE_BYTES];
};
void recipe_split(const char *full, struct recipe_parts *parts);

/* "with amsgrad exp_avg_sq and max_exp_avg_sq in bf16-sr, ...": which states of the rule have a finer format than the
 * block format of a recipe, and under which option; empty if none has. */
void precise_states_text(const halfstep_rule_info *rule, char *text, size_t size);

/* Names by position, for option tables and listings; NULL past the last. */
const char *rule_name(int32_t index);
const char *weight_format_name(int32_t index);
const char *gradient_format_name(int32_t index);
const char *state_format_name(int32_t index);
/* Rows of the format table that serve all (or any) of the given roles, by position; -1 past the last. */
int32_t format_with_roles(int32_t roles, int32_t index);

#endif
