/* The comparisons behind `compare lm`, `compare mnist` and `demo`. */
#ifndef HALFSTEP_COMPARE_H
#define HALFSTEP_COMPARE_H

struct comparison {
    const char *command; /* as in messages: "compare lm" */
    const char *title;   /* of the report */
    int argc;            /* the command line as typed; the report shows it */
    char **argv;
};

/* Parse argv[1] .. as the options of the subcommand, train and report. Return the exit status. */
int compare_lm(const struct comparison *comparison, int argc, char **argv);
int compare_mnist(const struct comparison *comparison, int argc, char **argv);

#endif
