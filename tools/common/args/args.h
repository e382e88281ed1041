/* Command lines from tables. One row of struct option gives an option its name, type, bounds, default and help text;
 * the same row parses it, prints it in --help, writes it into a checkpoint and compares it on resume.
 *
 *   struct plan { double params; uint64_t memory; int json; };
 *   static const struct option rows[] = {
 *       {"params", OPTION_NUMBER, offsetof(struct plan, params), "N", NULL, 1, 1e15, OPTION_REQUIRED,
 *        NULL, "parameters"},
 *       {"memory", OPTION_BYTES, offsetof(struct plan, memory), "BYTES", "24G", 0, 1e18, 0,
 *        NULL, "memory to fit into"},
 *       OPTION_JSON(struct plan),
 *   };
 *   static const struct command command = {"plan", "", "memory forecast ...", NULL, 0, 0};
 *   struct plan plan;
 *   struct args args;
 *   const struct option_group groups[] = {{"Options", rows, OPTION_COUNT(rows), &plan}};
 *   int status = args_parse(&args, &command, groups, 1, argc, argv);
 *   if (status != ARGS_RUN) return status;
 *   ...
 *   args_free(&args);
 *
 * Every option takes its value as the next word or after "=": --steps 100, --steps=100, --steps 1e2. Numbers take the
 * suffixes k, M, G, T, B (powers of 1000; B is 10^9), bytes take K, M, G, T (powers of 1024) and KB, MB, GB, TB (of
 * 1000). --help is there without a row. After a repeated option the last one counts, except for lists; --data and other
 * lists of paths take words up to the next that begins with a dash. */
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
    OPTION_HEADING   /* no option: a heading in --help, its text in help, its name "" */
};

#define OPTION_REQUIRED 1
#define OPTION_EXCLUSIVE_MAXIMUM 2
#define OPTION_IDENTITY 4 /* must be the same when a run is resumed */
#define OPTION_SAVED 8    /* kept in a checkpoint as the value to resume with, but may be changed */
#define OPTION_HIDDEN 16  /* not in --help */

#define STRING_LIST_MAX 64
struct string_list {
    const char *item[STRING_LIST_MAX];
    int n;
};

/* As text one a line, so no name may have a line break. */
struct path_list {
    const char **item;
    int n;
};

struct option {
    const char *name; /* without dashes */
    enum option_kind kind;
    size_t offset;           /* of its variable in the group's target */
    const char *value;       /* what --help calls its value */
    const char *initial;     /* the default, as it could be typed; NULL: zero, NULL or an empty list */
    double minimum, maximum; /* of numbers; both 0: no bounds */
    unsigned flags;
    const char *(*choice)(int32_t index); /* of OPTION_CHOICE; NULL past the last */
    const char *help;                     /* says the unit */
};

#define OPTION_COUNT(rows) ((int)(sizeof(rows) / sizeof((rows)[0])))
#define OPTION_JSON(type) \
    {"json", OPTION_FLAG, offsetof(type, json), NULL, NULL, 0, 0, 0, NULL, "print the results as one JSON object"}

struct option_group {
    const char *title; /* heading in --help, unless the first row is one */
    const struct option *rows;
    int n;
    void *target; /* the struct the offsets count from */
};

struct command {
    const char *name;         /* "train lm" */
    const char *usage;        /* after the name in the usage line: "--data FILE [options]" */
    const char *summary;      /* first paragraph of --help */
    const char *notes;        /* last paragraphs, printed as they are; NULL: none */
    int min_words, max_words; /* arguments that are not options */
};

#define ARGS_MAX_WORDS 16
#define ARGS_MAX_OPTIONS 128

struct args {
    const struct command *command;
    const struct option_group *groups;
    int n_groups;
    const char *word[ARGS_MAX_WORDS];
    int n_words;
    unsigned char given[ARGS_MAX_OPTIONS];
    char **owned; /* strings made while parsing */
    int n_owned;
};

#define ARGS_RUN (-1)
/* First words by which main() asks for a command's part of the manual page, and for what a word (the fourth) after
 * another (the third) may become, the second being the last option before it. */
#define ARGS_MANUAL "--man-page"
#define ARGS_CANDIDATES "--candidates"

/* Sets all defaults, then reads argv[1] .. argv[argc - 1]. ARGS_RUN, or the exit status after --help was printed (0) or
 * one line of error (2; 1 without memory); then nothing needs freeing. `groups` must outlive args. */
int args_parse(struct args *args, const struct command *command, const struct option_group *groups, int n_groups,
               int argc, char **argv);
/* Only sets the defaults: for structs that no command line fills. */
int args_defaults(struct args *args, const struct command *command, const struct option_group *groups, int n_groups);
void args_free(struct args *args);

/* Whether the command line gave this option. */
int args_given(const struct args *args, const char *name);
/* A copy of text that lives as long as args; NULL when memory is out. */
const char *args_keep(struct args *args, const char *text);
/* Reads text into one option's variable, as the command line would. 0, or the exit status and a line: 2 and the option
 * where text is wrong, 1 without memory. */
int args_set(struct args *args, const struct option_group *group, const struct option *option, const char *text,
             char *error, size_t error_bytes);
/* Appends the value as text that args_set() reads back exactly; nothing for what is not set. */
void args_text(const struct option_group *group, const struct option *option, struct text *out);

/* The candidate closest to a mistyped word, or NULL if none is close. next(context, i) gives the candidates, NULL past
 * the last. */
const char *args_suggest(const char *word, const char *(*next)(void *context, int index), void *context);

/* One line "halfstep: NAME: ..." on stderr; the first returns 2 and points to --help, the second returns 1. */
__attribute__((format(printf, 2, 3))) int usage_error(const char *command, const char *format, ...);
__attribute__((format(printf, 2, 3))) int failure(const char *command, const char *format, ...);
/* The one or the other about something that ended with a status: 2 is bad usage. */
void report_failure(const char *command, int status, const char *error);

/* A number with suffix, in full. 0, or -1. */
int parse_number(const char *text, double *value);
int parse_bytes(const char *text, double *value);

#endif
