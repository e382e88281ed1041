/* The subcommands. Each gets its own words as argv (argv[0] is the subcommand's name) and returns the exit status:
 * 0 success, 1 failure, 2 usage, 128 + n ended by signal n. main.c holds the table. */
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
/* 0, or 1 after a line that says why a device cannot be used. */
int check_device(const char *command, const char *device);
int cmd_verify(int argc, char **argv);
int cmd_random(int argc, char **argv);

#endif
