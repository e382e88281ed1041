/* Recipes as users type them: their full forms, and errors that name the unknown part and the known ones. */
#ifndef HALFSTEP_RECIPES_H
#define HALFSTEP_RECIPES_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"

#define RECIPE_BYTES 64

/* Writes the full form of a recipe. Returns 0, or -1 with one line in error. */
int recipe_check(const char *recipe, char full[RECIPE_BYTES], char *error, size_t error_bytes);

/* Checks that the value in NAME=VALUE is a number, or the name of a value of the hyper-parameter. Returns 0, or -1 with
 * one line in error. */
int hyper_check(const char *word, char *error, size_t error_bytes);

/* The parts of a recipe, such as "adamw", "bf16-sr", "int8+bf16-sr". A missing part is "". */
struct recipe_parts {
    char rule[RECIPE_BYTES], weight[RECIPE_BYTES], states[RECIPE_BYTES];
};
void recipe_split(const char *recipe, struct recipe_parts *parts);

/* Writes which states of the rule have a finer format than the block format of a recipe, and under which option: "with
 * amsgrad exp_avg_sq and max_exp_avg_sq in bf16-sr, ...". Writes "" if no state has. */
void precise_states_text(const halfstep_rule_info *rule, char *text, size_t size);

/* Return the description of a row of the library's tables, or zeros if there is no such row. */
halfstep_rule_info rule_info(int32_t row);
halfstep_format_info format_info(int32_t row);
halfstep_format_info format_named(const char *name);
/* Returns the description of a slot. Its format is negative if the tensor has no such slot. */
halfstep_slot_info slot_info(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot);
/* Returns the row of a recipe's rule, or a negative number. */
int32_t recipe_rule(const char *recipe);

/* Return the index-th name, or NULL past the last, for option tables and listings. */
const char *rule_name(int32_t index);
const char *weight_format_name(int32_t index);
const char *gradient_format_name(int32_t index);
const char *state_format_name(int32_t index);

#endif
