#include "common/args/args_internal.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/args/recipes.h"

/* ---- Reading values ---------------------------------------------------------------------------------------------- */

static void *variable(const struct option_group *group, const struct option *option)
{
    return (char *)group->target + option->offset;
}

/* Keeps `memory` until args_free() and returns it. If there is no memory for that, frees it and returns NULL. */
static void *own(struct args *args, void *memory)
{
    char **grown = memory ? realloc(args->owned, (size_t)(args->n_owned + 1) * sizeof *grown) : NULL;
    if (grown) args->owned = grown;
    if (grown) args->owned[args->n_owned++] = memory;
    else free(memory);
    return grown ? memory : NULL;
}

const char *args_keep(struct args *args, const char *text) { return own(args, strdup(text)); }

char *args_format(struct args *args, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = n < 0 ? NULL : malloc((size_t)n + 1);
    va_start(arguments, format);
    if (text) vsnprintf(text, (size_t)n + 1, format, arguments);
    va_end(arguments);
    return own(args, text);
}

static int check_bounds(const struct option *option, const char *text, double v, char *error, size_t error_bytes)
{
    if (option->minimum == 0 && option->maximum == 0) return 0;
    int exclusive = (option->flags & OPTION_EXCLUSIVE_MAXIMUM) != 0;
    if (v < option->minimum) {
        snprintf(error, error_bytes, "--%s is %s; it must be at least %.15g", option->name, text, option->minimum);
        return 2;
    }
    if (v > option->maximum || (exclusive && v == option->maximum)) {
        snprintf(error, error_bytes, "--%s is %s; it must be %s %.15g", option->name, text,
                 exclusive ? "below" : "at most", option->maximum);
        return 2;
    }
    return 0;
}

static int set_number(const struct option *option, void *target, const char *text, char *error, size_t error_bytes)
{
    double v;
    int bytes = option->kind == OPTION_BYTES, whole = option->kind != OPTION_NUMBER;
    if ((bytes ? parse_bytes(text, &v) : parse_number(text, &v)) != 0) {
        snprintf(error, error_bytes, "--%s: \"%s\" is not a %s", option->name, text,
                 bytes   ? "number of bytes (such as 24G)"
                 : whole ? "whole number (such as 2000 or 2k)"
                         : "number (such as 7e9, 7B or 0.001)");
        return 2;
    }
    /* A double above 2^53 may stand for another integer than the one typed. */
    if (whole && (v != floor(v) || fabs(v) > 0x1p53)) {
        snprintf(error, error_bytes, "--%s is %s; it must be a whole number", option->name, text);
        return 2;
    }
    if (bytes && v < 0) {
        snprintf(error, error_bytes, "--%s is %s; it must be at least 0", option->name, text);
        return 2;
    }
    if (check_bounds(option, text, v, error, error_bytes) != 0) return 2;
    if (option->kind == OPTION_NUMBER) *(double *)target = v;
    else if (bytes) *(uint64_t *)target = (uint64_t)v;
    else *(int64_t *)target = (int64_t)v;
    return 0;
}

static int set_seed(const struct option *option, void *target, const char *text, char *error, size_t error_bytes)
{
    char *end;
    errno = 0;
    int base = text[0] == '0' && (text[1] == 'x' || text[1] == 'X') ? 16 : 10;
    unsigned long long v = strtoull(text, &end, base);
    if (!(text[0] >= '0' && text[0] <= '9') || *end || errno == ERANGE) {
        snprintf(error, error_bytes, "--%s is %s; it must be a whole number from 0 to 2^64 - 1", option->name, text);
        return 2;
    }
    *(uint64_t *)target = v;
    return 0;
}

static const char *next_choice(void *context, int index)
{
    const struct option *option = context;
    return option->choice(index);
}

static int set_choice(const struct option *option, void *target, const char *text, char *error, size_t error_bytes)
{
    const char *name;
    for (int32_t i = 0; (name = option->choice(i)) != NULL; i++) {
        if (strcmp(name, text) != 0) continue;
        *(const char **)target = name;
        return 0;
    }
    char all[512];
    args_choices(option, all, sizeof all);
    const char *near = args_suggest(text, next_choice, (void *)option);
    if (near) snprintf(error, error_bytes, "--%s is %s; did you mean %s? (one of %s)", option->name, text, near, all);
    else snprintf(error, error_bytes, "--%s is %s; it must be one of %s", option->name, text, all);
    return 2;
}

/* Sets a string to a copy of text. */
static int set_string(struct args *args, const char **string, const char *text, char *error, size_t error_bytes)
{
    *string = args_keep(args, text);
    return *string ? 0 : no_memory(error, error_bytes);
}

static int list_add(struct args *args, struct string_list *list, const struct option *option, const char *text,
                    char *error, size_t error_bytes)
{
    if (list->n == STRING_LIST_MAX) {
        snprintf(error, error_bytes, "--%s: more than %d values", option->name, STRING_LIST_MAX);
        return 2;
    }
    return set_string(args, &list->item[list->n++], text, error, error_bytes);
}

static int set_recipe(struct args *args, const struct option *option, void *target, const char *text, char *error,
                      size_t error_bytes)
{
    char full[RECIPE_BYTES], why[400];
    if (recipe_check(text, full, why, sizeof why) != 0) {
        snprintf(error, error_bytes, "--%s: %s", option->name, why);
        return 2;
    }
    if (option->kind == OPTION_RECIPES) return list_add(args, target, option, full, error, error_bytes);
    return set_string(args, target, full, error, error_bytes);
}

static int set_recipes(struct args *args, const struct option *option, void *target, const char *text, char *error,
                       size_t error_bytes)
{
    struct string_list *list = target;
    list->n = 0;
    while (*text) {
        size_t n = strcspn(text, ",");
        /* Larger than any recipe, so that a recipe that is too long is refused and not cut off. */
        char one[2 * RECIPE_BYTES];
        snprintf(one, sizeof one, "%.*s", (int)n, text);
        int status = set_recipe(args, option, target, one, error, error_bytes);
        if (status) return status;
        for (int i = 0; i + 1 < list->n; i++)
            if (strcmp(list->item[i], list->item[list->n - 1]) == 0) {
                snprintf(error, error_bytes, "--%s names %s twice", option->name, list->item[i]);
                return 2;
            }
        text += n;
        if (*text == ',') text++;
    }
    if (list->n == 0) {
        snprintf(error, error_bytes, "--%s is empty", option->name);
        return 2;
    }
    return 0;
}

/* Adds NAME=VALUE to the list, or replaces an earlier value of NAME. */
static int keep_hyper(struct args *args, const struct option *option, struct string_list *list, const char *word,
                      char *error, size_t error_bytes)
{
    size_t name = strcspn(word, "=") + 1;
    for (int i = 0; i < list->n; i++)
        if (strncmp(list->item[i], word, name) == 0) return set_string(args, &list->item[i], word, error, error_bytes);
    return list_add(args, list, option, word, error, error_bytes);
}

/* Adds a hyper-parameter to the list. Checks only that its value is a number or a name, because the library knows the
 * bounds of each hyper-parameter. */
static int set_hyper(struct args *args, const struct option *option, void *target, const char *text, char *error,
                     size_t error_bytes)
{
    if (option->kind == OPTION_HYPER) {
        const char *equals = strchr(text, '=');
        if (!equals || equals == text || !equals[1]) {
            snprintf(error, error_bytes, "--%s is %s; it must be NAME=VALUE", option->name, text);
            return 2;
        }
    }
    hstep_buffer word = {0};
    if (option->kind == OPTION_HYPER) hstep_append_text(&word, text);
    else hstep_append_format(&word, "%s=%s", option->name, text);
    int status = word.failed ? no_memory(error, error_bytes) : 0;
    for (char *c = word.data; !status && *c != '='; c++)
        if (*c == '-') *c = '_';
    char why[300];
    if (!status && hyper_check(word.data, why, sizeof why) != 0) {
        snprintf(error, error_bytes, "--%s: %s", option->name, why);
        status = 2;
    }
    if (!status) status = keep_hyper(args, option, target, word.data, error, error_bytes);
    text_free(&word);
    return status;
}

/* Adds the names in text, one a line. The array doubles, and the smaller ones are kept until args_free(). */
static int set_paths(struct args *args, struct path_list *list, const char *text, char *error, size_t error_bytes)
{
    char *rest = own(args, strdup(text)), *name;
    if (!rest) return no_memory(error, error_bytes);
    while ((name = strsep(&rest, "\n")) != NULL) {
        if ((list->n & (list->n - 1)) == 0) {
            const char **grown = own(args, malloc((list->n ? 2 * (size_t)list->n : 1) * sizeof *grown));
            if (!grown) return no_memory(error, error_bytes);
            if (list->n) memcpy(grown, list->item, (size_t)list->n * sizeof *grown);
            list->item = grown;
        }
        if (*name) list->item[list->n++] = name;
    }
    return 0;
}

int args_set(struct args *args, const struct option_group *group, const struct option *option, const char *text,
             char *error, size_t error_bytes)
{
    void *target = variable(group, option);
    switch (option->kind) {
    case OPTION_FLAG: *(int *)target = strcmp(text, "0") != 0; return 0;
    case OPTION_INTEGER:
    case OPTION_NUMBER:
    case OPTION_BYTES: return set_number(option, target, text, error, error_bytes);
    case OPTION_SEED: return set_seed(option, target, text, error, error_bytes);
    case OPTION_STRING: return set_string(args, target, text, error, error_bytes);
    case OPTION_CHOICE: return set_choice(option, target, text, error, error_bytes);
    case OPTION_RECIPE: return set_recipe(args, option, target, text, error, error_bytes);
    case OPTION_RECIPES: return set_recipes(args, option, target, text, error, error_bytes);
    case OPTION_HYPER:
    case OPTION_HYPER_AS: return set_hyper(args, option, target, text, error, error_bytes);
    case OPTION_PATHS: return set_paths(args, target, text, error, error_bytes);
    case OPTION_HEADING: break;
    }
    return 2;
}

void args_text(const struct option_group *group, const struct option *option, hstep_buffer *out)
{
    const void *target = variable(group, option);
    const char *const *string = target;
    const struct string_list *list = target;
    switch (option->kind) {
    case OPTION_FLAG: hstep_append_format(out, "%d", *(const int *)target != 0); return;
    case OPTION_INTEGER: hstep_append_format(out, "%lld", (long long)*(const int64_t *)target); return;
    case OPTION_SEED:
    case OPTION_BYTES: hstep_append_format(out, "%llu", (unsigned long long)*(const uint64_t *)target); return;
    case OPTION_NUMBER: {
        char number[32];
        exact_number(*(const double *)target, number, sizeof number);
        hstep_append_text(out, number);
        return;
    }
    case OPTION_STRING:
    case OPTION_CHOICE:
    case OPTION_RECIPE: hstep_append_text(out, *string ? *string : ""); return;
    case OPTION_RECIPES:
    case OPTION_HYPER:
        for (int i = 0; i < list->n; i++) hstep_append_format(out, "%s%s", i ? "," : "", list->item[i]);
        return;
    case OPTION_PATHS: {
        const struct path_list *list = target;
        for (int i = 0; i < list->n; i++) hstep_append_format(out, "%s%s", i ? "\n" : "", list->item[i]);
        return;
    }
    case OPTION_HYPER_AS:
    case OPTION_HEADING: return;
    }
}

/* ---- The command line -------------------------------------------------------------------------------------------- */

static const struct option *find(const struct option_group *groups, int n_groups, const char *name, size_t n,
                                 const struct option_group **group, int *number)
{
    int count = 0;
    for (int g = 0; g < n_groups; g++)
        for (int i = 0; i < groups[g].n; i++, count++) {
            const struct option *option = &groups[g].rows[i];
            if (option->kind == OPTION_HEADING || strlen(option->name) != n) continue;
            size_t k = 0;
            /* The library writes hyper-parameters with underscores, and users type either. */
            while (k < n && (name[k] == option->name[k] || (name[k] == '_' && option->name[k] == '-'))) k++;
            if (k < n) continue;
            *group = &groups[g];
            *number = count;
            return option;
        }
    return NULL;
}

static const char *next_option(void *context, int index)
{
    const struct args *args = context;
    for (int g = 0; g < args->n_groups; g++) {
        if (index < args->groups[g].n) return args->groups[g].rows[index].name;
        index -= args->groups[g].n;
    }
    return index == 0 ? "help" : NULL;
}

static int unknown_option(struct args *args, const char *word, int bare_n)
{
    char bare[64];
    snprintf(bare, sizeof bare, "%.*s", bare_n, word[1] == '-' ? word + 2 : word + 1);
    for (char *c = bare; *c; c++)
        if (*c == '_') *c = '-';
    if (args->command->absent && strcmp(bare, args->command->absent) == 0)
        return usage_error(args->command->name, "unknown option --%s; %s", bare, args->command->instead);
    const char *near = args_suggest(bare, next_option, args);
    return usage_error(args->command->name, "unknown option %.*s%s%s%s", (int)strcspn(word, "="), word,
                       near ? ", did you mean --" : "", near ? near : "", near ? "?" : "");
}

static const size_t variable_bytes[] = {
    [OPTION_FLAG] = sizeof(int),
    [OPTION_INTEGER] = sizeof(int64_t),
    [OPTION_SEED] = sizeof(uint64_t),
    [OPTION_NUMBER] = sizeof(double),
    [OPTION_BYTES] = sizeof(uint64_t),
    [OPTION_STRING] = sizeof(char *),
    [OPTION_CHOICE] = sizeof(char *),
    [OPTION_RECIPE] = sizeof(char *),
    [OPTION_RECIPES] = sizeof(struct string_list),
    [OPTION_HYPER] = sizeof(struct string_list),
    [OPTION_HYPER_AS] = sizeof(struct string_list),
    [OPTION_PATHS] = sizeof(struct path_list),
    [OPTION_HEADING] = 0,
};

int args_defaults(struct args *args, const struct command *command, const struct option_group *groups, int n_groups)
{
    char error[1024];
    memset(args, 0, sizeof *args);
    args->command = command;
    args->groups = groups;
    args->n_groups = n_groups;
    int count = 0;
    for (int g = 0; g < n_groups; g++)
        for (int i = 0; i < groups[g].n; i++, count++) {
            const struct option *option = &groups[g].rows[i];
            void *target = variable(&groups[g], option);
            memset(target, 0, variable_bytes[option->kind]);
            if (option->initial && option->kind != OPTION_HYPER_AS &&
                args_set(args, &groups[g], option, option->initial, error, sizeof error) != 0)
                return failure(command->name, "default of --%s: %s", option->name, error);
        }
    if (count > ARGS_MAX_OPTIONS) return failure(command->name, "too many options in the tables");
    return ARGS_RUN;
}

static int read_option(struct args *args, int argc, char **argv, int *at)
{
    const char *word = argv[*at], *name = word + 2, *value = NULL, *equals = strchr(word, '=');
    size_t n = equals ? (size_t)(equals - name) : strlen(name);
    const struct option_group *group;
    int number;
    const struct option *option = find(args->groups, args->n_groups, name, n, &group, &number);
    if (!option && n == 4 && strncmp(name, "help", n) == 0)
        return usage_error(args->command->name, "--help takes no value");
    if (!option) return unknown_option(args, word, (int)n);
    args->given[number] = 1;
    if (option->kind == OPTION_FLAG) {
        if (equals) return usage_error(args->command->name, "--%s takes no value", option->name);
        value = "1";
    } else if (equals) {
        value = equals + 1;
    } else {
        /* A single dash may begin a negative number or a file name; two begin the next option. */
        if (*at + 1 >= argc || strncmp(argv[*at + 1], "--", 2) == 0)
            return usage_error(args->command->name, "--%s needs a value: --%s %s", option->name, option->name,
                               option->value ? option->value : "X");
        value = argv[++*at];
    }
    char error[1024];
    int status = 0, more;
    do {
        if (option->kind != OPTION_FLAG && !*value && option->kind != OPTION_STRING)
            return usage_error(args->command->name, "--%s has an empty value; write --%s %s", option->name,
                               option->name, option->value ? option->value : "X");
        if (option->kind == OPTION_PATHS && strchr(value, '\n'))
            return usage_error(args->command->name, "--%s: \"%s\" contains a line break; rename the file", option->name,
                               value);
        status = args_set(args, group, option, value, error, sizeof error);
        more = status == 0 && option->kind == OPTION_PATHS && *at + 1 < argc && argv[*at + 1][0] != '-';
        if (more) value = argv[++*at];
    } while (more);
    if (status == 2) return usage_error(args->command->name, "%s", error);
    return status ? failure(args->command->name, "%s", error) : ARGS_RUN;
}

static int check_required(const struct args *args)
{
    int number = 0;
    for (int g = 0; g < args->n_groups; g++)
        for (int i = 0; i < args->groups[g].n; i++, number++) {
            const struct option *option = &args->groups[g].rows[i];
            if ((option->flags & OPTION_REQUIRED) && !args->given[number])
                return usage_error(args->command->name, "--%s %s is missing", option->name,
                                   option->value ? option->value : "");
        }
    return ARGS_RUN;
}

static int read_words(struct args *args, int argc, char **argv)
{
    int only_words = 0;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (!only_words && strcmp(word, "--") == 0) {
            only_words = 1;
        } else if (!only_words && word[0] == '-' && word[1] == '-') {
            int status = read_option(args, argc, argv, &i);
            if (status != ARGS_RUN) return status;
        } else if (!only_words && word[0] == '-' && word[1]) {
            return unknown_option(args, word, (int)strlen(word) - 1);
        } else {
            if (args->n_words == args->command->max_words)
                return args->command->max_words ? usage_error(args->command->name, "one argument too many: %s", word)
                                                : usage_error(args->command->name, "unexpected argument %s", word);
            args->word[args->n_words++] = word;
        }
    }
    int status = check_required(args);
    if (status != ARGS_RUN) return status;
    if (args->n_words < args->command->min_words)
        return usage_error(args->command->name, "missing argument; usage: halfstep %s %s", args->command->name,
                           args->command->usage);
    return ARGS_RUN;
}

int args_parse(struct args *args, const struct command *command, const struct option_group *groups, int n_groups,
               int argc, char **argv)
{
    memset(args, 0, sizeof *args);
    if (argc > 1 && (strcmp(argv[1], ARGS_CANDIDATES) == 0 || strcmp(argv[1], ARGS_MANUAL) == 0)) {
        if (strcmp(argv[1], ARGS_MANUAL) == 0) args_manual(command, groups, n_groups);
        else if (argc > 4) args_candidates(groups, n_groups, argv[2], argv[3], argv[4]);
        return 0;
    }
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            args_help(command, groups, n_groups);
            return 0;
        }
    int status = args_defaults(args, command, groups, n_groups);
    args->argc = argc;
    args->argv = argv;
    if (status == ARGS_RUN) status = read_words(args, argc, argv);
    if (status != ARGS_RUN) args_free(args);
    return status;
}

int command_run(const struct command *command, int argc, char **argv)
{
    void *options = calloc(1, command->options_bytes + 1);
    const struct option_group group = {"Options", command->rows, command->n_rows, options};
    struct args args;
    int status = options ? args_parse(&args, command, &group, command->n_rows > 0, argc, argv)
                         : failure(command->name, "out of memory");
    if (status == ARGS_RUN) {
        status = command->run(&args, options);
        args_free(&args);
    }
    free(options);
    return status;
}

void args_free(struct args *args)
{
    for (int i = 0; i < args->n_owned; i++) free(args->owned[i]);
    free(args->owned);
    args->owned = NULL;
    args->n_owned = 0;
}

int args_given(const struct args *args, const char *name)
{
    const struct option_group *group;
    int number;
    return find(args->groups, args->n_groups, name, strlen(name), &group, &number) && args->given[number];
}
