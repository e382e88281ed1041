/* Prints the option tables for shells (completion) and for man(1). */
#include "common/args/args_internal.h"

#include <stdio.h>
#include <string.h>

#include "halfstep.h"

static void offer(const char *before, const char *name, const char *after, const char *word)
{
    char text[160];
    snprintf(text, sizeof text, "%s%s%s", before, name, after);
    if (strncmp(text, word, strlen(word)) == 0) printf("%s\n", text);
}

/* Offers the next part of a recipe: the rule, then the weight format, then the state format. */
static void offer_recipes(const char *word)
{
    char before[120];
    const char *last = strrchr(word, '/');
    int parts = 0;
    for (const char *at = word; *at; at++) parts += *at == '/';
    snprintf(before, sizeof before, "%.*s", last ? (int)(last - word) + 1 : 0, word);
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    for (int32_t i = 0; parts == 0 && halfstep_get_rule_info(i, &rule) == HALFSTEP_OK; i++)
        offer(before, rule.name, "/", word);
    halfstep_format_info format = {.struct_size = sizeof format};
    const int32_t roles = parts > 1 ? HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG : HALFSTEP_ROLE_WEIGHT;
    for (int32_t i = 0; parts > 0 && parts < 3 && halfstep_get_format_info(i, &format) == HALFSTEP_OK; i++)
        if (format.roles & roles) offer(before, format.name, "", word);
}

void args_candidates(const struct option_group *groups, int n_groups, const char *last, const char *previous,
                     const char *word)
{
    for (int g = 0; g < n_groups; g++)
        for (int i = 0; i < groups[g].n; i++) {
            const struct option *option = &groups[g].rows[i];
            if (option->kind == OPTION_HEADING || option->kind == OPTION_FLAG) continue;
            /* A list of paths takes more than one word. */
            const char *asked = option->kind == OPTION_PATHS && word[0] != '-' ? last : previous;
            if (strncmp(asked, "--", 2) != 0 || strcmp(asked + 2, option->name) != 0) continue;
            const char *name;
            for (int32_t c = 0; option->kind == OPTION_CHOICE && (name = option->choice(c)) != NULL; c++)
                offer("", name, "", word);
            if (option->kind == OPTION_RECIPE) offer_recipes(word);
            return; /* the shell itself completes values of any other kind */
        }
    for (int g = 0; g < n_groups; g++)
        for (int i = 0; i < groups[g].n; i++)
            if (groups[g].rows[i].kind != OPTION_HEADING) offer("--", groups[g].rows[i].name, "", word);
    offer("--", "help", "", word);
}

/* Prints text with the characters escaped that troff would obey. */
static void print_plain(const char *text)
{
    for (int begins = 1; *text; text++) {
        if (begins && (*text == '.' || *text == '\'')) printf("\\&");
        if (*text == '\\') printf("\\e");
        else if (*text == '-') printf("\\-");
        else putchar(*text);
        begins = *text == '\n';
    }
}

void args_manual(const struct command *command, const struct option_group *groups, int n_groups)
{
    char text[1600];
    printf(".SS halfstep %s ", command->name);
    print_plain(command->usage);
    printf("\n");
    print_plain(command->summary);
    printf("\n");
    for (int g = 0; g < n_groups; g++)
        for (int i = 0; i < groups[g].n; i++) {
            const struct option *option = &groups[g].rows[i];
            if (option->kind == OPTION_HEADING) continue;
            printf(".TP\n\\fB\\-\\-");
            print_plain(option->name);
            printf("\\fR");
            if (option->value) {
                printf(" \\fI");
                print_plain(option->value);
                printf("\\fR");
            }
            printf("\n");
            args_describe(option, text, sizeof text);
            print_plain(text);
            printf("\n");
        }
    if (!command->notes) return;
    printf(".PP\n.nf\n");
    print_plain(command->notes);
    printf(".fi\n");
}
