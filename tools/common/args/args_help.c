#include "common/args/args_internal.h"

#include <stdio.h>
#include <string.h>

#define HELP_COLUMN 28
#define HELP_WIDTH 100

void args_choices(const struct option *option, char *text, size_t text_bytes)
{
    text[0] = 0;
    const char *name;
    for (int32_t i = 0; (name = option->choice(i)) != NULL; i++) append(text, text_bytes, "%s%s", i ? ", " : "", name);
}

/* Prints text from column `column` on, wrapped at HELP_WIDTH. `at` is the column reached so far. */
static void print_wrapped(const char *text, int at, int column)
{
    if (at > 0 && at >= column) {
        putchar('\n');
        at = 0;
    }
    printf("%*s", column - at, "");
    at = column;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (at > column && at + 1 + n > HELP_WIDTH) {
            printf("\n%*s", column, "");
            at = column;
        } else if (at > column) {
            putchar(' ');
            at++;
        }
        printf("%.*s", n, text);
        at += n;
        text += n;
        while (*text == ' ') text++;
    }
    putchar('\n');
}

void args_describe(const struct option *option, char *text, size_t text_bytes)
{
    char choices[512];
    snprintf(text, text_bytes, "%s", option->help);
    if (option->kind == OPTION_CHOICE) {
        args_choices(option, choices, sizeof choices);
        append(text, text_bytes, ": %s", choices);
    }
    const char *separator = " (";
    if (option->flags & OPTION_REQUIRED) {
        append(text, text_bytes, "%srequired", separator);
        separator = "; ";
    }
    /* Leaves out huge bounds, which only keep the arithmetic from overflowing, and a minimum of 0. */
    int above = option->minimum != 0, below = option->maximum != 0 && option->maximum < 1e9;
    if (option->kind != OPTION_FLAG && (above || below)) {
        append(text, text_bytes, "%s", separator);
        if (below)
            append(text, text_bytes, "%.15g to %s%.15g", option->minimum,
                   option->flags & OPTION_EXCLUSIVE_MAXIMUM ? "below " : "", option->maximum);
        else append(text, text_bytes, "at least %.15g", option->minimum);
        separator = "; ";
    }
    if (option->initial) {
        append(text, text_bytes, "%sdefault %s", separator, option->initial[0] ? option->initial : "\"\"");
        separator = "; ";
    }
    if (separator[0] == ';') append(text, text_bytes, ")");
}

static void print_option(const struct option *option)
{
    char right[1600];
    int at = printf("  --%s%s%s", option->name, option->value ? " " : "", option->value ? option->value : "");
    args_describe(option, right, sizeof right);
    print_wrapped(right, at, HELP_COLUMN);
}

void args_help(const struct command *command, const struct option_group *groups, int n_groups)
{
    printf("Usage: halfstep %s %s\n\n", command->name, command->usage);
    print_wrapped(command->summary, 0, 0);
    for (int g = 0; g < n_groups; g++) {
        printf("\n");
        if (groups[g].n && groups[g].rows[0].kind != OPTION_HEADING) printf("%s:\n", groups[g].title);
        for (int i = 0; i < groups[g].n; i++)
            if (groups[g].rows[i].kind == OPTION_HEADING) printf("%s%s:\n", i ? "\n" : "", groups[g].rows[i].help);
            else print_option(&groups[g].rows[i]);
    }
    if (command->notes) printf("\n%s", command->notes);
}
