/* Parses recipes, "rule/weight format/state formats", by the tables, and writes them in full. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/process/detail.h"
#include "tables/tables.h"

enum {
    WEIGHT = HALFSTEP_ROLE_WEIGHT,
    GRADIENT = HALFSTEP_ROLE_GRADIENT,
};

static int fail(int code, char *detail, size_t size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (size) vsnprintf(detail, size, format, arguments);
    va_end(arguments);
    return code;
}

/* Lists the states for which a recipe names a format: all but copies of the weight and vectors. Returns their number.
 * The last `optional` of them need not be named. */
static int named_states(int rule, int *which, int *optional)
{
    int n = 0;
    *optional = 0;
    for (int i = 0; i < hstep_rule_states(rule); i++) {
        const struct hstep_state *state = &hstep_rules[rule].state[i];
        if (state->role == WEIGHT || state->extent != HALFSTEP_EXTENT_ELEMENTS) continue;
        *optional += state->unless != NULL;
        which[n++] = i;
    }
    return n;
}

/* Returns the format of an optional state that was not named: that of the last state before it with its role. */
static int inherited_format(const struct hstep_recipe *recipe, int state)
{
    const struct hstep_state *states = hstep_rules[recipe->rule].state;
    for (int i = state - 1; i >= 0; i--)
        if (states[i].role == states[state].role && states[i].extent == HALFSTEP_EXTENT_ELEMENTS)
            return recipe->state[i];
    return recipe->state[0];
}

/* Parses the part of a recipe that names the formats of states. */
static int parse_states(const char *text, const char *part, struct hstep_recipe *recipe, char *detail, size_t size)
{
    int which[HALFSTEP_MAX_STATES], optional, given = 0, formats[HALFSTEP_MAX_STATES];
    int named = named_states(recipe->rule, which, &optional);
    const struct hstep_rule *rule = &hstep_rules[recipe->rule];
    for (;; part++) {
        size_t length = strcspn(part, "+/");
        int format = hstep_find_format(part, length);
        if (format < 0)
            return fail(HALFSTEP_ERROR_NAME, detail, size,
                        "recipe '%s': unknown format '%.*s'; 'halfstep info' lists the formats", text, (int)length,
                        part);
        if (given >= named)
            return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size,
                        "recipe '%s': too many state formats; %s takes formats for %d state%s", text, rule->name, named,
                        named == 1 ? "" : "s");
        formats[given++] = format;
        part += length;
        if (*part != '+') break;
    }
    if (*part)
        return fail(HALFSTEP_ERROR_NAME, detail, size,
                    "recipe '%s': text after the state formats; write rule/weight format/state formats", text);
    if (given != 1 && given < named - optional)
        return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size,
                    "recipe '%s': give one state format, or one for each of the %d states of %s", text,
                    named - optional, rule->name);
    for (int i = 0; i < named; i++) {
        int state = which[i], role = rule->state[state].role;
        /* A single format leaves out the states that hold gradients, if it cannot serve them. */
        if (given == 1 && named > 1 && role == GRADIENT && !hstep_format_serves(formats[0], role)) continue;
        recipe->state[state] = given == 1 ? formats[0] : i < given ? formats[i] : inherited_format(recipe, state);
        if (!hstep_format_serves(recipe->state[state], role))
            return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size, "recipe '%s': '%s' cannot store %s", text,
                        hstep_formats[recipe->state[state]].name, rule->state[state].name);
    }
    return HALFSTEP_OK;
}

int hstep_recipe_parse(const char *text, struct hstep_recipe *recipe, char *detail, size_t size)
{
    size_t length = strcspn(text, "/");
    recipe->rule = hstep_find_rule(text, length);
    if (recipe->rule < 0)
        return fail(HALFSTEP_ERROR_NAME, detail, size,
                    "recipe '%s': unknown rule '%.*s'; 'halfstep info' lists the rules", text, (int)length, text);
    const struct hstep_rule *rule = &hstep_rules[recipe->rule];
    const char *part = text + length;

    recipe->weight = HSTEP_FORMAT_f32;
    if (*part) {
        part++;
        length = strcspn(part, "/");
        recipe->weight = hstep_find_format(part, length);
        if (recipe->weight < 0)
            return fail(HALFSTEP_ERROR_NAME, detail, size,
                        "recipe '%s': unknown format '%.*s'; 'halfstep info' lists the formats", text, (int)length,
                        part);
        if (!(hstep_formats[recipe->weight].roles & WEIGHT))
            return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size, "recipe '%s': '%s' cannot store weights", text,
                        hstep_formats[recipe->weight].name);
        part += length;
    }

    for (int i = 0; i < HALFSTEP_MAX_STATES; i++)
        recipe->state[i] = i >= hstep_rule_states(recipe->rule)                ? HSTEP_FORMAT_NONE
                           : rule->state[i].role == WEIGHT                     ? recipe->weight
                           : recipe->weight == HSTEP_FORMAT_f32                ? HSTEP_FORMAT_f32
                           : rule->state[i].extent != HALFSTEP_EXTENT_ELEMENTS ? HSTEP_FORMAT_f32
                                                                               : HSTEP_FORMAT_bf16_sr;
    if (*part) return parse_states(text, part + 1, recipe, detail, size);
    return rule->formats ? parse_states(text, rule->formats, recipe, detail, size) : HALFSTEP_OK;
}

int hstep_recipe_text(const struct hstep_recipe *r, char *text, size_t size)
{
    char full[160];
    int n = snprintf(full, sizeof full, "%s/%s", hstep_rules[r->rule].name, hstep_formats[r->weight].name);
    int which[HALFSTEP_MAX_STATES], optional, named = named_states(r->rule, which, &optional), same = 1, inherits = 1;
    for (int i = 1; i < named; i++) {
        same &= r->state[which[i]] == r->state[which[0]];
        if (i >= named - optional) inherits &= r->state[which[i]] == inherited_format(r, which[i]);
    }
    int shown = same && named ? 1 : inherits ? named - optional : named;
    for (int i = 0; i < shown; i++)
        n += snprintf(full + n, sizeof full - (size_t)n, "%c%s", i ? '+' : '/', hstep_formats[r->state[which[i]]].name);
    if ((size_t)n >= size) return HALFSTEP_ERROR_RANGE;
    memcpy(text, full, (size_t)n + 1);
    return HALFSTEP_OK;
}

/* Parses the recipe of a call without a handle. */
static int parse_alone(const char *function, const char *recipe, struct hstep_recipe *r)
{
    char detail[HSTEP_DETAIL_BYTES];
    if (!recipe) return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s: recipe is NULL", function);
    const int error = hstep_recipe_parse(recipe, r, detail, sizeof detail);
    return error ? hstep_fail_alone(error, "%s", detail) : HALFSTEP_OK;
}

/* Fails because the caller's buffer is too small. */
static int fail_room(const char *function, size_t size, int enough)
{
    return hstep_fail_alone(HALFSTEP_ERROR_RANGE, "%s: a buffer of %llu bytes is too small; %d are enough", function,
                            (unsigned long long)size, enough);
}

int halfstep_recipe_full(const char *recipe, char *text, size_t size)
{
    struct hstep_recipe r;
    const int error = parse_alone(__func__, recipe, &r);
    if (error) return error;
    if (!text) return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s: text is NULL", __func__);
    return hstep_recipe_text(&r, text, size) ? fail_room(__func__, size, 64) : HALFSTEP_OK;
}

int halfstep_recipe_caveat(const char *recipe, char *text, size_t size)
{
    struct hstep_recipe r;
    const int error = parse_alone(__func__, recipe, &r);
    if (error) return error;
    if (!text || !size) return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s: text is NULL, or has no room", __func__);
    *text = 0;
    for (int i = 0; i < hstep_rule_states(r.rule); i++) {
        const struct hstep_state *state = &hstep_rules[r.rule].state[i];
        if (r.state[i] < 0 || hstep_formats[r.state[i]].code_bits >= state->fewest_bits) continue;
        int n = snprintf(text, size, "%s: %s in %s %s", hstep_rules[r.rule].name, state->name,
                         hstep_formats[r.state[i]].name, state->coarse);
        return (size_t)n < size ? HALFSTEP_OK : fail_room(__func__, size, 256);
    }
    return HALFSTEP_OK;
}
