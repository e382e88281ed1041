/* The subcommands. Each gets its own words as argv, where argv[0] is its name. It returns the exit status: 0 success, 1
 * failure, 2 wrong usage, 128 + n ended by signal n. main.c holds the table. */
#ifndef HALFSTEP_COMMANDS_H
#define HALFSTEP_COMMANDS_H

int cmd_train(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_compare(int argc, char **argv);
int cmd_demo(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
/* Returns 0 if the device can be used (NULL: the CPU), otherwise 1 after printing one line that says why not. */
int check_device(const char *command, const char *device);
int cmd_verify(int argc, char **argv);
int cmd_random(int argc, char **argv);

#endif
