/* Between args.c and args_help.c. */
#ifndef HALFSTEP_ARGS_INTERNAL_H
#define HALFSTEP_ARGS_INTERNAL_H

#include "args.h"

/* All values of an OPTION_CHOICE, between commas. */
void args_choices(const struct option *option, char *text, size_t text_bytes);
/* What --help prints. */
void args_help(const struct command *command, const struct option_group *groups, int n_groups);

#endif
