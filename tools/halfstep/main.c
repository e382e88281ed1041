/* halfstep: trains, compares, plans and inspects models whose weights and optimizer states are stored in few bits. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"

#include "args.h"
#include "commands.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"train", "train a language model (train lm) or a digit network (train mnist)", cmd_train},
    {"generate", "continue a text with a trained model", cmd_generate},
    {"compare", "train under several recipes (compare lm, compare mnist) and report", cmd_compare},
    {"demo", "the comparison that shows what stochastic rounding is for", cmd_demo},
    {"plan", "forecast the memory of every recipe, and which of them fit", cmd_plan},
    {"bench", "time the optimizer step of each recipe", cmd_bench},
    {"info", "instruction sets, threads, rules and formats", cmd_info},
    {"inspect", "list what a checkpoint or safetensors file holds", cmd_inspect},
    {"verify", "check that this machine computes the promised bits", cmd_verify},
    {"random", "write raw random words to stdout, for statistical testers", cmd_random},
};

enum { COMMANDS = sizeof commands / sizeof commands[0] };

static const char *command_name(void *context, int index)
{
    (void)context;
    return index < COMMANDS ? commands[index].name : NULL;
}

static void print_help(FILE *out)
{
    fprintf(out, "Usage: halfstep COMMAND [options]\n\n"
                 "Optimizer steps on weights and states stored in 32, 16, 8 or 4 bits and computed in fp32.\n\n");
    for (int i = 0; i < COMMANDS; i++) fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(out, "\n  halfstep COMMAND --help    options of a command\n"
                 "  halfstep --version         version of program and library\n");
}

static void print_version(void)
{
    int32_t v = halfstep_version();
    printf("halfstep %d.%d.%d (ABI %d, %s)\n", v / 10000, v / 100 % 100, v % 100, halfstep_abi(), halfstep_isa());
}

static int unknown_command(const char *name)
{
    const char *near = args_suggest(name, command_name, NULL);
    fprintf(stderr, "halfstep: unknown %s %s%s%s%s (see halfstep --help)\n", name[0] == '-' ? "option" : "command",
            name, near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
    return 2;
}

/* Results that cannot be written (a full disk behind stdout) must not end as success. */
static int finish(int status)
{
    int bad = fflush(stdout) != 0 || ferror(stdout);
    if (bad && status == 0) {
        fprintf(stderr, "halfstep: cannot write to stdout\n");
        return 1;
    }
    return status;
}

/* A standard stream that is closed leaves its number to the next file that is opened, and a log would get the progress
 * lines. What takes the place here fails as a closed stream does. */
static int occupy_standard_streams(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        if (open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) return -1;
    }
    return 0;
}

/* The library goes on with the best kernels. Whoever asked for others would measure or check the wrong ones. */
static int refuse_isa(void)
{
    const char *asked = getenv("HALFSTEP_ISA"), *separator = "";
    fprintf(stderr, "halfstep: HALFSTEP_ISA is %s, which this build or this processor does not have; there are: ",
            asked ? asked : "");
    for (int32_t i = 0; i < halfstep_isa_count(); i++) {
        if (!halfstep_isa_available(i)) continue;
        fprintf(stderr, "%s%s", separator, halfstep_isa_name(i));
        separator = ", ";
    }
    fprintf(stderr, "\n");
    return 2;
}

int main(int argc, char **argv)
{
    if (occupy_standard_streams() != 0) return 1;
    if (halfstep_abi() != HALFSTEP_ABI) {
        fprintf(stderr, "halfstep: the library has ABI %d, this program needs %d\n", halfstep_abi(), HALFSTEP_ABI);
        return 1;
    }
    if (halfstep_isa_warning()) return refuse_isa();
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) {
        print_version();
        return finish(0);
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || (strcmp(name, "help") == 0 && argc == 2)) {
        print_help(stdout);
        return finish(0);
    }
    int help = strcmp(name, "help") == 0;
    if (help) name = argv[2];
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(name, commands[i].name) != 0) continue;
        if (!help) return finish(commands[i].run(argc - 1, argv + 1));
        /* "help train lm" asks what "train lm --help" asks. */
        char *words[3] = {argv[2], argc > 3 ? argv[3] : "--help", "--help"};
        return finish(commands[i].run(argc > 3 ? 3 : 2, words));
    }
    return unknown_command(name);
}
