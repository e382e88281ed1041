/* Between args.c, args_help.c and args_shell.c. */
#ifndef HALFSTEP_ARGS_INTERNAL_H
#define HALFSTEP_ARGS_INTERNAL_H

#include "common/args/args.h"

/* All values of an OPTION_CHOICE, between commas. */
void args_choices(const struct option *option, char *text, size_t text_bytes);
/* What an option is, its bounds and its default in words. */
void args_describe(const struct option *option, char *text, size_t text_bytes);
/* What --help prints. */
void args_help(const struct command *command, const struct option_group *groups, int n_groups);
/* The same for man(1). */
void args_manual(const struct command *command, const struct option_group *groups, int n_groups);
/* What `word`, which comes after `previous`, may become, a line each: names and values of options. `option` is the last
 * word before it that begins with a dash. */
void args_candidates(const struct option_group *groups, int n_groups, const char *option, const char *previous,
                     const char *word);

#endif
