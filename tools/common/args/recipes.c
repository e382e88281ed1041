#include "common/args/recipes.h"

#include <stdio.h>
#include <string.h>

#include "common/args/args.h"

halfstep_rule_info rule_info(int32_t row)
{
    halfstep_rule_info info = {.struct_size = sizeof info};
    return halfstep_get_rule_info(row, &info) == HALFSTEP_OK ? info : (halfstep_rule_info){0};
}

halfstep_format_info format_info(int32_t row)
{
    halfstep_format_info info = {.struct_size = sizeof info};
    return halfstep_get_format_info(row, &info) == HALFSTEP_OK ? info : (halfstep_format_info){0};
}

halfstep_format_info format_named(const char *name) { return format_info(halfstep_format_find(name)); }

halfstep_slot_info slot_info(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot)
{
    halfstep_slot_info info = {.struct_size = sizeof info};
    if (halfstep_get_slot_info(optimizer, tensor, slot, &info) != HALFSTEP_OK)
        info = (halfstep_slot_info){.format = -1};
    return info;
}

int32_t recipe_rule(const char *recipe)
{
    struct recipe_parts parts;
    recipe_split(recipe, &parts);
    return halfstep_rule_find(parts.rule);
}

/* Returns the name of the index-th format that serves any of the given roles, or NULL past the last. */
static const char *format_name(int32_t roles, int32_t index)
{
    halfstep_format_info info;
    int32_t row = 0;
    do info = format_info(row++);
    while (info.name && (!(info.roles & roles) || index-- > 0));
    return info.name;
}

const char *rule_name(int32_t index) { return rule_info(index).name; }

const char *weight_format_name(int32_t index) { return format_name(HALFSTEP_ROLE_WEIGHT, index); }
const char *gradient_format_name(int32_t index) { return format_name(HALFSTEP_ROLE_GRADIENT, index); }
const char *state_format_name(int32_t index) { return format_name(HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG, index); }

void recipe_split(const char *recipe, struct recipe_parts *parts)
{
    char *to[3] = {parts->rule, parts->weight, parts->states};
    for (int i = 0; i < 3; i++) {
        size_t n = strcspn(recipe, "/");
        snprintf(to[i], RECIPE_BYTES, "%.*s", (int)n, recipe);
        recipe += n;
        if (*recipe == '/') recipe++;
    }
}

typedef const char *(*names)(int32_t index);

static const char *next_name(void *context, int index) { return (*(names *)context)(index); }

static int known(const char *name, names all)
{
    const char *each;
    for (int32_t i = 0; (each = all(i)) != NULL; i++)
        if (strcmp(each, name) == 0) return 1;
    return 0;
}

/* Writes an error such as: unknown rule "adamx", did you mean adam? (one of sgd, adam, ...) */
static void complain(const char *what, const char *name, names all, char *error, size_t error_bytes)
{
    const char *near = args_suggest(name, next_name, &all), *each;
    snprintf(error, error_bytes, "unknown %s \"%s\"%s%s%s (one of", what, name, near ? ", did you mean " : "",
             near ? near : "", near ? "?" : "");
    for (int32_t i = 0; (each = all(i)) != NULL; i++) append(error, error_bytes, "%s %s", i ? "," : "", each);
    append(error, error_bytes, ")");
}

static int serves(const halfstep_format_info *format, int32_t role)
{
    return role == HALFSTEP_ROLE_GRADIENT ? (format->roles & HALFSTEP_ROLE_SIGNED) && !format->block
                                          : format->roles & role;
}

/* Returns 1 with one line in error if a known format cannot hold what a state of the rule holds, otherwise 0. */
static int unfit_state(const struct recipe_parts *parts, const halfstep_rule_info *rule, char *error,
                       size_t error_bytes)
{
    const char *at = parts->states;
    int one_for_all = !strchr(at, '+');
    for (int32_t i = 0; i < rule->states && *at; i++) {
        char one[RECIPE_BYTES];
        /* Copies of the weight have the format of the weight. If one format is given for all states, a state that holds
         * a gradient takes another format where that one does not fit. */
        if (rule->state_role[i] == HALFSTEP_ROLE_WEIGHT) continue;
        if (rule->state_role[i] == HALFSTEP_ROLE_GRADIENT && one_for_all) continue;
        size_t n = strcspn(at, "+");
        snprintf(one, sizeof one, "%.*s", (int)n, at);
        halfstep_format_info info = format_named(one);
        if (info.name && !serves(&info, rule->state_role[i])) {
            snprintf(error, error_bytes, "%s cannot store %s of %s, which is %s", one, rule->state_name[i], rule->name,
                     rule->state_role[i] == HALFSTEP_ROLE_NONNEG   ? "never negative"
                     : rule->state_role[i] == HALFSTEP_ROLE_SIGNED ? "of either sign"
                                                                   : "a gradient, and has no blocks");
            return 1;
        }
        /* A single format stands for all states. */
        if (at[n] == '+') at += n + 1;
        else if (!one_for_all) break;
    }
    return 0;
}

int recipe_check(const char *recipe, char full[RECIPE_BYTES], char *error, size_t error_bytes)
{
    int code = halfstep_recipe_full(recipe, full, RECIPE_BYTES);
    if (code == HALFSTEP_OK) return 0;
    if (strlen(recipe) >= RECIPE_BYTES) {
        snprintf(error, error_bytes, "\"%.20s...\" is too long for a recipe; it may have at most %d characters", recipe,
                 RECIPE_BYTES - 1);
        return -1;
    }
    struct recipe_parts parts;
    recipe_split(recipe, &parts);
    if (!known(parts.rule, rule_name)) {
        complain("rule", parts.rule, rule_name, error, error_bytes);
        return -1;
    }
    if (parts.weight[0] && !known(parts.weight, weight_format_name)) {
        complain("weight format", parts.weight, weight_format_name, error, error_bytes);
        return -1;
    }
    int given = 0;
    for (const char *at = parts.states; *at;) {
        char one[RECIPE_BYTES];
        size_t n = strcspn(at, "+");
        snprintf(one, sizeof one, "%.*s", (int)n, at);
        if (!known(one, state_format_name)) {
            complain("state format", one, state_format_name, error, error_bytes);
            return -1;
        }
        given++;
        at += n;
        if (*at == '+') at++;
    }
    const halfstep_rule_info rule = rule_info(halfstep_rule_find(parts.rule));
    int states = 0;
    if (unfit_state(&parts, &rule, error, error_bytes)) return -1;
    for (int32_t i = 0; i < rule.states; i++) states += rule.state_role[i] != HALFSTEP_ROLE_WEIGHT;
    if (given > states || (given > 1 && given != states)) {
        snprintf(error, error_bytes, "%s names %d state format%s; %s has %d state%s that can be given one", recipe,
                 given, given == 1 ? "" : "s", parts.rule, states, states == 1 ? "" : "s");
        return -1;
    }
    snprintf(error, error_bytes, "\"%s\" is not a recipe: %s (a recipe is rule/weight format/state format)", recipe,
             halfstep_strerror(code));
    return -1;
}

void precise_states_text(const halfstep_rule_info *rule, char *text, size_t size)
{
    const char *option = NULL, *format = "";
    *text = 0;
    /* All such states of a rule share one option and one format. */
    for (int32_t i = 0; i < rule->states; i++) {
        if (!rule->precise_if[i]) continue;
        if (option) append(text, size, " and %s", rule->state_name[i]);
        else append(text, size, "with %s %s", rule->precise_if[i], rule->state_name[i]);
        option = rule->precise_if[i];
        format = rule->precise_format[i];
    }
    if (option)
        append(text, size, " in %s and not in blocks, because errors of coarse codes would not average out", format);
}

int hyper_check(const char *word, char *error, size_t error_bytes)
{
    char name[96], names[200] = "";
    const char *value = strchr(word, '=') + 1, *known;
    double number;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    if (parse_number(value, &number) == 0) return 0;
    for (int32_t i = 0; (known = halfstep_choice_value(name, i)); i++) {
        if (strcmp(known, value) == 0) return 0;
        append(names, sizeof names, "%s%s", i ? ", " : "", known);
    }
    if (*names) snprintf(error, error_bytes, "\"%s\" is unknown; known: %s", value, names);
    else snprintf(error, error_bytes, "\"%s\" is not a number (such as 0.9 or 1e-3)", value);
    return -1;
}
