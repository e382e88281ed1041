/* halfstep trains, compares, plans and inspects models whose weights and optimizer states are stored in few bits. */
#define HALFSTEP_ADVANCED
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "trainer/compare/compare.h"
#include "trainer/ranks/dist.h"

static const struct command completion_command, man_command;
static int compare_kind(int argc, char **argv);

/* One of the two models of train and compare, which is the second word of the command line. */
struct kind {
    const char *name, *model, *usage;
    int (*run)(int argc, char **argv);
};

static const struct entry {
    const char *name, *summary;
    const struct command *command; /* NULL: there are two kinds */
    const char *purpose, *example; /* --help of a command that has two kinds */
    struct kind kind[2];
} commands[] = {
    {"train",
     "train a language model (train lm) or a digit network (train mnist)",
     NULL,
     "Trains a model with the storage formats of one recipe.",
     "halfstep train lm --data book.txt --recipe adamw/bf16-sr/int8",
     {{"lm", "a byte-level language model", "--data FILE... [options]", train_lm},
      {"mnist", "a network that reads digits", "[--data DIR] [options]", train_mnist}}},
    {"generate", "continue a text with a trained model", .command = &generate_command},
    {"compare",
     "train under several recipes and report (compare lm, compare mnist)",
     NULL,
     "Trains the same model under several recipes and reports how losses and memory differ.",
     "halfstep compare lm --data book.txt --recipes adamw/f32,adamw/bf16-sr/int8",
     {{"lm", "a byte-level language model", "--data FILE... --recipes R,R,... [options]", compare_kind},
      {"mnist", "a network that reads digits", "[--data DIR] --recipes R@LR,R@LR,... [options]", compare_kind}}},
    {"convert", "convert a model's weights to 8 bits and back", .command = &convert_command},
    {"demo", "compare fp32 with BF16 weights, to show what stochastic rounding does", .command = &demo_command},
    {"plan", "forecast the memory of each recipe, and whether it fits", .command = &plan_command},
    {"bench", "time the optimizer step of each recipe", .command = &bench_command},
    {"info", "list instruction sets, threads, GPUs, rules and formats", .command = &info_command},
    {"inspect", "list the contents of a checkpoint or safetensors file", .command = &inspect_command},
    {"verify", "check that this machine computes the promised bits", .command = &verify_command},
    {"random", "write raw random words to stdout, for statistical tests", .command = &random_command},
    {"completion", "print a script with which a shell completes commands and options", .command = &completion_command},
    {"man", "print the manual page of all commands", .command = &man_command},
};

enum { COMMANDS = COUNT_OF(commands) };

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

static int compare_kind(int argc, char **argv)
{
    int lm = strcmp(argv[1], "lm") == 0;
    const struct comparison comparison = {lm ? "compare lm" : "compare mnist",
                                          lm ? "halfstep compare lm" : "halfstep compare mnist", argc, argv};
    return (lm ? compare_lm : compare_mnist)(&comparison, argc - 1, argv + 1);
}

/* Prints the help of a command that has two kinds. */
static void print_kinds(const struct entry *entry)
{
    for (int k = 0; k < 2; k++)
        printf("%s halfstep %s %s %s\n", k ? "      " : "Usage:", entry->name, entry->kind[k].name,
               entry->kind[k].usage);
    printf("\n%s\n\n", entry->purpose);
    for (int k = 0; k < 2; k++)
        printf("  %-7s %s; see halfstep %s %s --help\n", entry->kind[k].name, entry->kind[k].model, entry->name,
               entry->kind[k].name);
    printf("\n  %s\n", entry->example);
}

/* Runs a command with its words, of which the first is its name. */
static int run(const struct entry *entry, int argc, char **argv)
{
    if (entry->command) return command_run(entry->command, argc, argv);
    for (int k = 0; k < 2 && argc > 1; k++)
        if (strcmp(argv[1], entry->kind[k].name) == 0) return entry->kind[k].run(argc, argv);
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        print_kinds(entry);
        return 0;
    }
    if (argc > 1 && argv[1][0] != '-') return usage_error(entry->name, "unknown model '%s'; known: lm, mnist", argv[1]);
    return usage_error(entry->name, "the model is missing; known: lm, mnist");
}

static int unknown_command(const char *name)
{
    const char *near = args_suggest(name, command_name, NULL);
    char shown[400];
    plain_text(shown, sizeof shown, name);
    fprintf(stderr, "halfstep: unknown %s %s%s%s%s (see halfstep --help)\n", name[0] == '-' ? "option" : "command",
            shown, near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
    return 2;
}

/* ---- Shells and man(1) ---- */

/* Prints what the last word can be completed to. The scripts below run it as: halfstep complete WORD... */
static int complete(int n, char **words)
{
    if (n < 1) return 0;
    char *word = words[n - 1];
    for (int i = 0; i < COMMANDS; i++) {
        if (n == 1) {
            if (strncmp(commands[i].name, word, strlen(word)) == 0) puts(commands[i].name);
            continue;
        }
        if (strcmp(commands[i].name, words[0]) != 0) continue;
        int kinds = commands[i].command == NULL;
        for (int k = 0; kinds && n == 2 && k < 2; k++)
            if (strncmp(commands[i].kind[k].name, word, strlen(word)) == 0) puts(commands[i].kind[k].name);
        if (kinds && n == 2) return 0;
        char *asked[6] = {words[0], words[1]};
        char **rest = asked + 1 + kinds;
        int last = n - 2;
        while (last > 0 && words[last][0] != '-') last--;
        rest[0] = (char[]){ARGS_CANDIDATES};
        rest[1] = words[last];
        rest[2] = words[n - 2];
        rest[3] = word;
        return run(&commands[i], 5 + kinds, asked);
    }
    return 0;
}

static const struct {
    const char *name, *script;
} shells[] = {
    {"bash", "_halfstep() {\n"
             "    local IFS=$'\\n'\n"
             "    COMPREPLY=($(halfstep complete \"${COMP_WORDS[@]:1:COMP_CWORD}\" 2>/dev/null))\n"
             "    [[ ${COMPREPLY-} == */ ]] && compopt -o nospace\n"
             "}\n"
             "complete -o default -F _halfstep halfstep\n"},
    {"zsh", "#compdef halfstep\n"
            "_halfstep() {\n"
            "    local -a found\n"
            "    found=(${(f)\"$(halfstep complete \"${(@)words[2,CURRENT]}\" 2>/dev/null)\"})\n"
            "    if (( $#found )); then compadd -- $found; else _files; fi\n"
            "}\n"
            /* A file that zsh loads by the function's name is run in place of the first completion. */
            "if [[ $funcstack[1] = _halfstep ]]; then _halfstep \"$@\"; else compdef _halfstep halfstep; fi\n"},
    {"fish", "complete -c halfstep -a '(halfstep complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'\n"},
};

static int print_script(struct args *args, void *options)
{
    (void)options;
    for (int i = 0; i < COUNT_OF(shells); i++)
        if (strcmp(args->word[0], shells[i].name) == 0) return fputs(shells[i].script, stdout) == EOF;
    return usage_error("completion", "unknown shell '%s'; known: bash, zsh, fish", args->word[0]);
}

static const struct command completion_command = {
    .name = "completion",
    .usage = "SHELL",
    .summary = "Prints a script for bash, zsh or fish that completes commands, options and their values, including "
               "recipes.",
    .notes = "  eval \"$(halfstep completion bash)\"                       in ~/.bashrc\n"
             "  halfstep completion zsh >~/.zfunc/_halfstep               a folder of fpath\n"
             "  halfstep completion fish >~/.config/fish/completions/halfstep.fish\n",
    .min_words = 1,
    .max_words = 1,
    .run = print_script,
};

static int print_manual(struct args *args, void *options)
{
    int32_t v = halfstep_version();
    (void)args;
    (void)options;
    printf(".TH HALFSTEP 1 \"\" \"halfstep %d.%d.%d\" \"User Commands\"\n.ad l\n.SH NAME\nhalfstep \\- training with "
           "weights and optimizer "
           "states in 16, 8 or 4 bits\n.SH SYNOPSIS\n.B halfstep\n\\fICOMMAND\\fR [\\fIoptions\\fR]\n.SH COMMANDS\n",
           v / 10000, v / 100 % 100, v % 100);
    for (int i = 0; i < COMMANDS; i++) {
        const struct entry *entry = &commands[i];
        char name[] = "halfstep", page[] = ARGS_MANUAL, *words[] = {name, page};
        if (entry->command) command_run(entry->command, 2, words);
        for (int k = 0; k < 2 && !entry->command; k++) {
            char kind[8], *more[] = {name, kind, page};
            snprintf(kind, sizeof kind, "%s", entry->kind[k].name);
            entry->kind[k].run(3, more);
        }
    }
    printf(".SH EXIT STATUS\n0; 1 after an error; 2 after a wrong command line.\n");
    return 0;
}

static const struct command man_command = {
    .name = "man",
    .usage = "",
    .summary = "Prints the manual page of all commands, in the language of man(1).",
    .notes = "  halfstep man | man -l -\n",
    .run = print_manual,
};

/* Returns the exit status of the program. It is not 0 if results could not be written, such as to a full disk. */
static int finish(int status)
{
    int bad = fflush(stdout) != 0 || ferror(stdout);
    if (bad && status == 0) {
        fprintf(stderr, "halfstep: cannot write to stdout\n");
        return 1;
    }
    return status;
}

/* Opens /dev/null for each standard stream that is closed. Otherwise the next file that is opened would get the
 * stream's number, and a log would receive the progress lines. Using the stream still fails, as on a closed one.
 * Returns 0 or -1. */
static int occupy_standard_streams(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        if (open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) return -1;
    }
    return 0;
}

/* Refuses malformed environment variables of ours before anything is done. The library refuses its own when it makes an
 * optimizer. Returns 0 or the exit status. */
static int refuse_environment(void)
{
    halfstep_optimizer *optimizer;
    char error[400] = "", shown[400];
    if (halfstep_create(NULL, &optimizer) == HALFSTEP_ERROR_NAME)
        snprintf(error, sizeof error, "%s", halfstep_error_detail(NULL));
    else dist_asked(error, sizeof error);
    halfstep_destroy(optimizer);
    if (!error[0]) return 0;
    plain_text(shown, sizeof shown, error);
    fprintf(stderr, "halfstep: %s\n", shown);
    return 1;
}

int main(int argc, char **argv)
{
    /* A write beyond a limit of file sizes fails then, as on a full disk, and does not kill the program. */
    signal(SIGXFSZ, SIG_IGN);
    if (occupy_standard_streams() != 0) return 1;
    if (halfstep_abi() != HALFSTEP_ABI) {
        fprintf(stderr, "halfstep: the library has ABI %d, this program needs %d; install both from the same build\n",
                halfstep_abi(), HALFSTEP_ABI);
        return 1;
    }
    if (refuse_environment()) return 1;
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
    if (strcmp(name, "complete") == 0) return finish(complete(argc - 2, argv + 2));
    int help = strcmp(name, "help") == 0;
    if (help) name = argv[2];
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(name, commands[i].name) != 0) continue;
        if (!help) return finish(run(&commands[i], argc - 1, argv + 1));
        /* "help train lm" asks what "train lm --help" asks. */
        char *words[3] = {argv[2], argc > 3 ? argv[3] : "--help", "--help"};
        return finish(run(&commands[i], argc > 3 ? 3 : 2, words));
    }
    return unknown_command(name);
}
