#define HALFSTEP_ADVANCED
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "common/args/args.h"

struct random {
    const char *generator;
    uint64_t seed, id;
    double write, slot, first, count;
};

static const char *generator_name(int32_t index) { return halfstep_choice_value("generator", index); }

#define AT(member) offsetof(struct random, member)

static const struct option rows[] = {
    {"generator", OPTION_CHOICE, AT(generator), "NAME", NULL, 0, 0, OPTION_REQUIRED, generator_name,
     "generator of the random words"},
    {"seed", OPTION_SEED, AT(seed), "N", "0", 0, 0, 0, NULL, "seed of the optimizer"},
    {"id", OPTION_SEED, AT(id), "N", "1", 0, 0, 0, NULL, "id of the tensor"},
    {"write", OPTION_NUMBER, AT(write), "N", "0", 0, 0x1p53, 0, NULL,
     "write counter of the tensor (lattice: of the slot)"},
    {"slot", OPTION_NUMBER, AT(slot), "N", "0", 0, 255, 0, NULL,
     "slot of the tensor: 0 weight, 1 gradient, 2 and up states"},
    {"first", OPTION_NUMBER, AT(first), "N", "0", 0, 0x1p53, 0, NULL,
     "number of the first word; each word serves a pair of elements"},
    {"count", OPTION_NUMBER, AT(count), "N", "0", 0, 0x1p53, 0, NULL,
     "number of words; 0: until the reader closes the pipe"},
};

/* Writes all bytes to stdout. Returns 0, 1 if the reader has closed the pipe, or -1 with errno set. */
static int write_all(const unsigned char *bytes, size_t n)
{
    while (n) {
        ssize_t wrote = write(STDOUT_FILENO, bytes, n);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote < 0) return errno == EPIPE ? 1 : -1;
        bytes += wrote;
        n -= (size_t)wrote;
    }
    return 0;
}

static int strand(const struct random *r)
{
    enum { WORDS = 1 << 15 };
    static uint32_t words[WORDS];
    static unsigned char bytes[4 * WORDS];
    uint64_t first = (uint64_t)r->first, left = r->count > 0 ? (uint64_t)r->count : UINT64_MAX;
    while (left) {
        size_t n = left < WORDS ? (size_t)left : WORDS;
        int error =
            halfstep_random_words(r->generator, r->seed, r->id, (uint64_t)r->write, (int32_t)r->slot, first, words, n);
        if (error != HALFSTEP_OK) return failure("random", "%s", halfstep_strerror(error));
        for (size_t i = 0; i < 4 * n; i++) bytes[i] = (unsigned char)(words[i / 4] >> 8 * (i % 4));
        int status = write_all(bytes, 4 * n);
        if (status > 0) return 0;
        if (status < 0) return failure("random", "cannot write to stdout: %s", strerror(errno));
        first += n;
        left -= n;
    }
    return 0;
}

/* Returns 0, or 2 after one line of error if the value of an option is not a whole number. */
static int check_whole(const char *name, double value)
{
    return value == (double)(uint64_t)value
               ? 0
               : usage_error("random", "--%s is %.15g; it must be a whole number", name, value);
}

static int write_words(struct args *args, void *options)
{
    const struct random *r = options;
    (void)args;
    if (check_whole("write", r->write) || check_whole("slot", r->slot) || check_whole("first", r->first) ||
        check_whole("count", r->count))
        return 2;
    if (isatty(STDOUT_FILENO)) return failure("random", "stdout is a terminal; pipe it into a tester or a file");
    /* A tester that has read enough closes the pipe. That counts as success. */
    signal(SIGPIPE, SIG_IGN);
    return strand(r);
}

const struct command random_command = {
    .name = "random",
    .usage = "--generator NAME [options]",
    .summary =
        "Writes the random words of one strand to stdout as raw little-endian 32-bit integers, for statistical tests.",
    .notes = "  halfstep random --generator mixer --seed 1 | dieharder -a -g 200\n",
    COMMAND_OPTIONS(rows, struct random),
    .run = write_words,
};
