/* The subcommands. main.c holds their list. A function for one of the two kinds of train and compare gets all words of
 * the command as argv, where argv[1] is the kind. It returns the exit status: 0 success, 1 failure, 2 wrong usage,
 * 128 + n ended by signal n. */
#ifndef HALFSTEP_COMMANDS_H
#define HALFSTEP_COMMANDS_H

#include "common/args/args.h"

extern const struct command generate_command, convert_command, demo_command, plan_command, bench_command, info_command,
    inspect_command, verify_command, random_command;
int train_lm(int argc, char **argv);
int train_mnist(int argc, char **argv);
/* Returns 0 if the device can be used (NULL: the CPU), otherwise 1 after printing one line that says why not. */
int check_device(const char *command, const char *device);
/* Prints text from a file, made safe for a terminal, between two strings of this program. Returns the number of
 * characters of the text. */
int print_words(const char *before, const char *text, const char *after);
/* Prints what a file of states says. Returns the exit status. */
int inspect_store(const char *path, int json);

#endif
