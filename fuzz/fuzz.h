/* Shared code of the fuzz targets. A target defines two functions:
 *
 *   int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);    judges one input, and calls demand()
 *
 *   static size_t make_input(uint8_t *data, size_t room);            a good or nearly good input from draw()
 *
 * With libFuzzer (HALFSTEP_LIBFUZZER) that is all. Without it, this header has the main program:
 *
 *   fuzz_NAME [ROUNDS [SEED [FIRST]]]   Rounds of make_input(). Each depends on seed and number only.
 *   fuzz_NAME [--short | --all]         The corpus, and a quarter of all rounds; fewer with --short, all with --all.
 *   fuzz_NAME --seconds N               As many rounds as fit.
 *   fuzz_NAME FILE...                   Replays files.
 *   fuzz_NAME --input SEED NUMBER FILE  Writes the input of one round to a file, for the corpus
 *                                       (fuzz/corpus/fuzz_NAME). */
#ifndef HALFSTEP_FUZZ_H
#define HALFSTEP_FUZZ_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* State of the pseudo-random numbers of make_input(). A target that stretches its input uses it too. */
static uint64_t fuzz_state;

static inline uint64_t draw_bits(void)
{
    uint64_t x = fuzz_state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

__attribute__((unused)) static uint64_t draw(uint64_t below) { return (draw_bits() >> 11) % below; }

static inline void demand(int condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "%s: %s\n", FUZZ_NAME, what);
    abort();
}

/* Inputs that the code under test has accepted and refused. Both must be frequent in the end, or the mutations test
 * nothing. */
__attribute__((unused)) static unsigned long fuzz_accepted, fuzz_rejected;

/* Applies the usual damages to files of text and bytes. */
__attribute__((unused)) static size_t mutate(uint8_t *data, size_t size, size_t room, const char *marks)
{
    for (uint64_t count = draw(4); count && size; count--) {
        size_t at = draw(size);
        switch (draw(7)) {
        case 0: data[at] ^= (uint8_t)(1u << draw(8)); break;
        case 1: data[at] = (uint8_t)draw(256); break;
        case 2: data[at] = (uint8_t)marks[draw(strlen(marks))]; break;
        case 3: size = at; break;
        case 4: /* drop a byte */
            memmove(data + at, data + at + 1, size - at - 1);
            size--;
            break;
        case 5: { /* copy a span elsewhere */
            size_t to = draw(size), span = draw(16) + 1, left = size - (at > to ? at : to);
            memmove(data + to, data + at, span < left ? span : left);
            break;
        }
        default: /* repeat a span */
            if (size + 16 < room) {
                size_t span = draw(16) + 1;
                if (span > size - at) span = size - at;
                memmove(data + at + span, data + at, size - at);
                size += span;
            }
        }
    }
    return size;
}

#ifndef HALFSTEP_LIBFUZZER

static size_t make_input(uint8_t *data, size_t room);
static unsigned long fuzz_round, fuzz_seed = 1;

/* What the child is working on. The parent prints it if the child dies. */
static struct {
    unsigned long round;
    char file[1024];
} *fuzz_shared;

/* The folder where the program was started, because a target may change it. */
static char fuzz_home[400];

static int fuzz_replay(const char *given)
{
    char path[1024];
    snprintf(path, sizeof path, "%s%s%s", given[0] == '/' ? "" : fuzz_home, given[0] == '/' ? "" : "/", given);
    size_t room = (size_t)1 << 24;
    uint8_t *data = malloc(room);
    FILE *stream = fopen(path, "rb");
    if (!data || !stream) {
        perror(path);
        free(data);
        return 1;
    }
    size_t size = fread(data, 1, room, stream);
    fclose(stream);
    snprintf(fuzz_shared->file, sizeof fuzz_shared->file, "%s", path);
    /* An allocation of exact size, so that AddressSanitizer sees reads beyond it. */
    uint8_t *exact = malloc(size ? size : 1);
    if (exact) LLVMFuzzerTestOneInput(memcpy(exact, data, size), size);
    fuzz_shared->file[0] = 0;
    free(exact);
    free(data);
    return !exact;
}

static unsigned long fuzz_corpus(const char *directory)
{
    char path[600];
    unsigned long count = 0;
    DIR *stream = opendir(directory);
    for (struct dirent *entry; stream && (entry = readdir(stream));) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        count += !fuzz_replay(path);
    }
    if (stream) closedir(stream);
    return count;
}

static double fuzz_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static size_t fuzz_draw_input(unsigned long seed, unsigned long round, uint8_t *data, size_t room)
{
    fuzz_seed = seed;
    fuzz_round = fuzz_shared->round = round;
    fuzz_state = seed * UINT64_C(0xd1342543de82ef95) + round;
    return make_input(data, room);
}

static int fuzz_write(unsigned long seed, unsigned long round, const char *path)
{
    static uint8_t data[1 << 16];
    FILE *stream = fopen(path, "wb");
    if (!stream) return 1;
    size_t size = fuzz_draw_input(seed, round, data, sizeof data);
    int bad = fwrite(data, 1, size, stream) != size;
    return fclose(stream) || bad;
}

/* Runs all rounds in a child. If it dies, the parent prints how to reproduce the round. */
static int fuzz_rounds(unsigned long first, unsigned long rounds, double limit, int with_corpus)
{
    static uint8_t data[1 << 16];
    double start = fuzz_clock();
    unsigned long corpus = with_corpus ? fuzz_corpus("fuzz/corpus/" FUZZ_NAME) : 0;
    for (fuzz_round = first; limit > 0 ? fuzz_clock() - start < limit : fuzz_round - first < rounds; fuzz_round++) {
        size_t size = fuzz_draw_input(fuzz_seed, fuzz_round, data, sizeof data);
        uint8_t *exact = malloc(size ? size : 1);
        if (exact) LLVMFuzzerTestOneInput(memcpy(exact, data, size), size);
        free(exact);
    }
    rounds = fuzz_round - first;
    printf("%s: %lu files of the corpus, %lu rounds, seed %lu, %.1f s", FUZZ_NAME, corpus, rounds, fuzz_seed,
           fuzz_clock() - start);
    if (fuzz_accepted + fuzz_rejected) printf("; %lu accepted, %lu rejected", fuzz_accepted, fuzz_rejected);
    printf("\n");
    return fuzz_accepted + fuzz_rejected && rounds >= 1000 &&
           (fuzz_accepted * 50 < rounds || fuzz_rejected * 50 < rounds);
}

static int fuzz_main(int argc, char **argv, unsigned long rounds_short, unsigned long rounds_all)
{
    char *end = NULL;
    int is_short = argc > 1 && !strcmp(argv[1], "--short"), all = argc > 1 && !strcmp(argv[1], "--all");
    int timed = argc > 2 && !strcmp(argv[1], "--seconds"), status = 1;
    unsigned long rounds = is_short ? rounds_short : all ? rounds_all : rounds_all / 4;
    if (argc > 1 && !is_short && !all && !timed) rounds = strtoul(argv[1], &end, 10);
    int replay = end && *end;
    if (argc > 2 && !timed && !replay) fuzz_seed = strtoul(argv[2], NULL, 10);
    unsigned long first = argc > 3 && !replay ? strtoul(argv[3], NULL, 10) : 0;
    fuzz_shared = mmap(NULL, sizeof *fuzz_shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fuzz_shared == MAP_FAILED || !getcwd(fuzz_home, sizeof fuzz_home)) return 1;
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        int failed = 0;
        if (argc == 5 && !strcmp(argv[1], "--input"))
            exit(fuzz_write(strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10), argv[4]));
        for (int i = 1; replay && i < argc; i++) failed |= fuzz_replay(argv[i]);
        exit(replay ? failed : fuzz_rounds(first, rounds, timed ? strtod(argv[2], NULL) : 0, !end));
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return 1;
    if (WIFEXITED(status) && !WEXITSTATUS(status)) return 0;
    if (WIFSIGNALED(status)) fprintf(stderr, "%s: %s\n", FUZZ_NAME, strsignal(WTERMSIG(status)));
    if (fuzz_shared->file[0]) fprintf(stderr, "reproduce: %s %s\n", argv[0], fuzz_shared->file);
    else fprintf(stderr, "reproduce: %s 1 %lu %lu\n", argv[0], fuzz_seed, fuzz_shared->round);
    return 1;
}

#endif
#endif
