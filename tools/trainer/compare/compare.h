/* The comparisons behind `compare lm`, `compare mnist` and `demo`. */
#ifndef HALFSTEP_COMPARE_H
#define HALFSTEP_COMPARE_H

struct comparison {
    const char *command; /* what messages call it: "compare lm" */
    const char *title;   /* of the report */
    int argc;            /* the words as they were typed, to tell how to repeat it */
    char **argv;
};

/* Parses argv[1] .. as the options of that subcommand, trains and reports. The exit status. */
int compare_lm(const struct comparison *comparison, int argc, char **argv);
int compare_mnist(const struct comparison *comparison, int argc, char **argv);

#endif
