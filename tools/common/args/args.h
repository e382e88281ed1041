/* Command lines from tables. A row of struct option gives an option its name, type, bounds, default and help text. The
 * same row parses the option, prints it in --help, writes it into a checkpoint and compares it on resume.
 *
 *   struct plan { double params; uint64_t memory; int json; };
 *   static const struct option rows[] = {
 *       {"params", OPTION_NUMBER, offsetof(struct plan, params), "N", NULL, 1, 1e15, OPTION_REQUIRED,
 *        NULL, "parameters"},
 *       {"memory", OPTION_BYTES, offsetof(struct plan, memory), "BYTES", "24G", 0, 1e18, 0,
 *        NULL, "memory to fit into"},
 *       OPTION_JSON(struct plan),
 *   };
 *   static int plan_all(struct args *args, void *options) { const struct plan *plan = options; ... }
 *   const struct command plan_command = {.name = "plan",
 *                                        .usage = "",
 *                                        .summary = "memory forecast ...",
 *                                        COMMAND_OPTIONS(rows, struct plan),
 *                                        .run = plan_all};
 *   command_run(&plan_command, argc, argv);
 *
 * An option takes its value as the next word or after "=": --steps 100, --steps=100, --steps 1e2. Numbers take the
 * suffixes k, M, G, T, B (powers of 1000; B is 10^9). Bytes take K, M, G, T (powers of 1024) and KB, MB, GB, TB (powers
 * of 1000). --help needs no row. If an option is repeated, the last one counts, except for lists. --data and other
 * lists of paths take all words up to the next one that begins with a dash. */
#ifndef HALFSTEP_ARGS_H
#define HALFSTEP_ARGS_H

#include <stddef.h>
#include <stdint.h>

#include "common/text.h"

enum option_kind {
    OPTION_FLAG,     /* int: 1 when given */
    OPTION_INTEGER,  /* int64_t */
    OPTION_SEED,     /* uint64_t, all 64 bits, decimal or 0x hexadecimal */
    OPTION_NUMBER,   /* double */
    OPTION_BYTES,    /* uint64_t */
    OPTION_STRING,   /* const char *, NULL when not given and without a default */
    OPTION_CHOICE,   /* const char *, one of choice(0), choice(1) ... */
    OPTION_RECIPE,   /* const char *, the full form of the recipe */
    OPTION_RECIPES,  /* struct string_list: recipes between commas, full forms */
    OPTION_HYPER,    /* struct string_list: the words of a repeatable --hyper NAME=VALUE */
    OPTION_HYPER_AS, /* the same list, for an option that is itself called NAME: --beta1 0.8 adds "beta1=0.8" */
    OPTION_PATHS,    /* struct path_list: names of files or folders, one or more words each time it is given */
    OPTION_HEADING   /* not an option but a heading in --help: its text is in help, its name is "" */
};

#define OPTION_REQUIRED 1
#define OPTION_EXCLUSIVE_MAXIMUM 2
#define OPTION_IDENTITY 4 /* must be the same when a run is resumed */
#define OPTION_SAVED 8    /* kept in a checkpoint as the value to resume with, but may be changed */

#define STRING_LIST_MAX 64
struct string_list {
    const char *item[STRING_LIST_MAX];
    int n;
};

/* As text, one name a line, so no name may contain a line break. */
struct path_list {
    const char **item;
    int n;
};

struct option {
    const char *name; /* without dashes */
    enum option_kind kind;
    size_t offset;           /* of its variable in the group's target */
    const char *value;       /* placeholder of its value in --help, such as "N" */
    const char *initial;     /* the default, as a user would type it; NULL: zero, NULL or an empty list */
    double minimum, maximum; /* bounds of a number, inclusive; both 0: none */
    unsigned flags;
    const char *(*choice)(int32_t index); /* of OPTION_CHOICE: the values; NULL past the last */
    const char *help;                     /* names the unit */
};

#define OPTION_JSON(type) \
    {"json", OPTION_FLAG, offsetof(type, json), NULL, NULL, 0, 0, 0, NULL, "print the results as one JSON object"}

/* The options of a command, of which each is a member of a struct of this type. */
#define COMMAND_OPTIONS(table, type) .rows = table, .n_rows = COUNT_OF(table), .options_bytes = sizeof(type)

struct option_group {
    const char *title; /* heading in --help, unless the first row is a heading */
    const struct option *rows;
    int n;
    void *target; /* the struct that offsets count from */
};

struct args;

struct command {
    const char *name;         /* "train lm" */
    const char *usage;        /* after the name in the usage line: "--data FILE [options]" */
    const char *summary;      /* first paragraph of --help */
    const char *notes;        /* last paragraphs of --help, printed as they are; NULL: none */
    int min_words, max_words; /* arguments that are not options */
    /* An option that users look for here, and what to do instead. NULL: none. */
    const char *absent, *instead;
    /* For command_run(): the options, the size of the struct that their offsets count from, and the work. */
    const struct option *rows;
    int n_rows;
    size_t options_bytes;
    int (*run)(struct args *args, void *options);
};

#define ARGS_MAX_WORDS 16
#define ARGS_MAX_OPTIONS 128

struct args {
    const struct command *command;
    const struct option_group *groups;
    int n_groups;
    int argc; /* the command line, as given to args_parse() */
    char **argv;
    const char *word[ARGS_MAX_WORDS];
    int n_words;
    unsigned char given[ARGS_MAX_OPTIONS];
    char **owned; /* strings made while parsing */
    int n_owned;
};

#define ARGS_RUN (-1)
/* First words with which main() asks a command for other output. ARGS_MANUAL asks for the command's part of the manual
 * page. ARGS_CANDIDATES asks what a word can be completed to. Three words follow it: the last option before the word,
 * the word before it, and the word. */
#define ARGS_MANUAL "--man-page"
#define ARGS_CANDIDATES "--candidates"

/* Sets all defaults, then reads argv[1] .. argv[argc - 1]. Returns ARGS_RUN or an exit status: 0 after printing --help,
 * 2 after one line of error, 1 after running out of memory. Only after ARGS_RUN must args be freed. `groups` must
 * outlive args. */
int args_parse(struct args *args, const struct command *command, const struct option_group *groups, int n_groups,
               int argc, char **argv);
/* Parses a command line into a struct of the command's options and runs the command with it. Returns the exit
 * status. */
int command_run(const struct command *command, int argc, char **argv);
/* Only sets the defaults, for structs that no command line fills. Returns ARGS_RUN or an exit status. */
int args_defaults(struct args *args, const struct command *command, const struct option_group *groups, int n_groups);
void args_free(struct args *args);

/* Returns 1 if the command line gave this option, otherwise 0. */
int args_given(const struct args *args, const char *name);
/* Return a copy of text, and a text made as printf() makes it, that live as long as args, or NULL without memory. */
const char *args_keep(struct args *args, const char *text);
__attribute__((format(printf, 2, 3))) char *args_format(struct args *args, const char *format, ...);
/* Reads text into an option's variable, as the command line does. Returns 0, or an exit status with one line in error.
 * The status is 2 if the text is wrong, and the line names the option then; it is 1 without memory. */
int args_set(struct args *args, const struct option_group *group, const struct option *option, const char *text,
             char *error, size_t error_bytes);
/* Appends the option's value as text that args_set() reads back exactly. Appends nothing for an option that is not
 * set. */
void args_text(const struct option_group *group, const struct option *option, hstep_buffer *out);

/* Returns the candidate closest to a mistyped word, or NULL if none is close. next(context, i) returns the i-th
 * candidate, or NULL past the last. */
const char *args_suggest(const char *word, const char *(*next)(void *context, int index), void *context);

/* Print one line "halfstep: COMMAND: ..." on stderr. usage_error() points to --help and returns 2. failure() returns
 * 1. */
__attribute__((format(printf, 2, 3))) int usage_error(const char *command, const char *format, ...);
__attribute__((format(printf, 2, 3))) int failure(const char *command, const char *format, ...);
/* Calls usage_error() if status is 2 (wrong usage), otherwise failure(). */
void report_failure(const char *command, int status, const char *error);

/* Read the whole text as a number with an optional suffix. Return 0, or -1 if it is something else. */
int parse_number(const char *text, double *value);
int parse_bytes(const char *text, double *value);

#endif
