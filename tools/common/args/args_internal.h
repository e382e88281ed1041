/* Shared by args.c, args_help.c and args_shell.c. */
#ifndef HALFSTEP_ARGS_INTERNAL_H
#define HALFSTEP_ARGS_INTERNAL_H

#include "common/args/args.h"

/* Writes all values of an OPTION_CHOICE, separated by commas. */
void args_choices(const struct option *option, char *text, size_t text_bytes);
/* Writes an option's help text with its choices, bounds and default. */
void args_describe(const struct option *option, char *text, size_t text_bytes);
/* Prints the text of --help. */
void args_help(const struct command *command, const struct option_group *groups, int n_groups);
/* Prints the command's part of the manual page, in the language of man(1). */
void args_manual(const struct command *command, const struct option_group *groups, int n_groups);
/* Prints what `word` can be completed to, one candidate a line: names and values of options. `previous` is the word
 * before it. `option` is the last word before it that begins with a dash. */
void args_candidates(const struct option_group *groups, int n_groups, const char *option, const char *previous,
                     const char *word);

#endif
