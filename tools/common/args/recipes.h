/* Recipes as users type them: their full forms, and errors that name the unknown part and the known ones. */
#ifndef HALFSTEP_RECIPES_H
#define HALFSTEP_RECIPES_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"

#define RECIPE_BYTES 64

/* Writes the full form of a recipe. Returns 0, or -1 with one line in error. */
int recipe_check(const char *recipe, char full[RECIPE_BYTES], char *error, size_t error_bytes);

/* The parts of a recipe, such as "adamw", "bf16-sr", "int8+bf16-sr". A missing part is "". */
struct recipe_parts {
    char rule[RECIPE_BYTES], weight[RECIPE_BYTES], states[RECIPE_BYTES];
};
void recipe_split(const char *recipe, struct recipe_parts *parts);

/* Writes which states of the rule have a finer format than the block format of a recipe, and under which option: "with
 * amsgrad exp_avg_sq and max_exp_avg_sq in bf16-sr, ...". Writes "" if no state has. */
void precise_states_text(const halfstep_rule_info *rule, char *text, size_t size);

/* Return the index-th name, or NULL past the last, for option tables and listings. */
const char *rule_name(int32_t index);
const char *weight_format_name(int32_t index);
const char *gradient_format_name(int32_t index);
const char *state_format_name(int32_t index);
/* Returns the row of the index-th format that serves any of the given roles, or -1 past the last. */
int32_t format_with_roles(int32_t roles, int32_t index);

#endif
