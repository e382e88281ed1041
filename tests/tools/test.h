/* A minimal test kit with named groups, and checks that print what differed and how to run it again. A test program is
 * one main(): TEST("name") opens a group, CHECK() judges, test_done() prints the total and returns the exit status.
 * Command line: a length (--short or --all, see below), then a part of a group's name, which selects groups (`test_vec
 * load`). */
#ifndef HALFSTEP_TEST_H
#define HALFSTEP_TEST_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

static const char *test_program = "test", *test_filter = "";
static char test_group[256]; /* a copy, because the name may be gone when the next group begins */
static int test_passed, test_failed, test_group_failed;

/* 1 under a sanitizer, which needs memory and stack of its own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

/* How much a program runs. `make test` runs programs without an argument, which finds most in little time. --short is
 * for sanitizers, emulators and `make check`. --all is for `make test-all` and leaves nothing out. A program has a
 * shorter or a longer run if its first comment names the argument; cmake/tests.cmake reads that. */
enum { TEST_SHORT, TEST_NORMAL, TEST_ALL };
static int test_length = TEST_NORMAL;
static const char *const test_length_words[] = {" --short", "", " --all"};

/* Chooses one of three numbers by this run's length. */
#define BY_LENGTH(at_short, at_normal, at_all) \
    (test_length == TEST_SHORT ? (at_short) : test_length == TEST_ALL ? (at_all) : (at_normal))
#define UNLESS_ALL(sample, all) BY_LENGTH(sample, sample, all)

/* Reads the command line. Returns the index of the word after the length, which is the filter if there is one. */
static inline int test_init(int argc, char **argv)
{
    int next = 1;
    test_program = argv[0];
    for (int length = TEST_SHORT; length <= TEST_ALL; length += TEST_ALL)
        if (argc > 1 && !strcmp(argv[1], test_length_words[length] + 1)) test_length = length, next = 2;
    test_filter = argc > next ? argv[next] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    return next;
}

static inline void test_close_group(void)
{
    if (!test_group[0]) return;
    printf("%s %s\n", test_group_failed ? "FAIL" : "ok  ", test_group);
    if (test_group_failed) {
        test_failed++;
        printf("     reproduce: %s%s '%s'\n", test_program, test_length_words[test_length], test_group);
    } else {
        test_passed++;
    }
    test_group[0] = 0;
}

static inline int test_open_group(const char *name)
{
    test_close_group();
    if (!strstr(name, test_filter)) return 0;
    size_t n = strlen(name), room = sizeof test_group - 1;
    n = n < room ? n : room;
    memcpy(test_group, name, n);
    test_group[n] = 0;
    test_group_failed = 0;
    return 1;
}

/* Reports a failure. Prints only the first eight of a group, because one wrong kernel may fail for millions of
 * values. */
__attribute__((format(printf, 3, 4))) static inline void test_fail(const char *file, int line, const char *format, ...)
{
    if (test_group_failed++ >= 8) return;
    va_list arguments;
    va_start(arguments, format);
    printf("     %s:%d: ", file, line);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

static inline int test_done(void)
{
    test_close_group();
    printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed != 0;
}

/* Ends a forked child without exit(), which would write the parent's buffers again. Writes coverage counts if they are
 * on. */
#ifndef _WIN32
#ifdef HSTEP_COVERAGE
void __gcov_dump(void);
#endif
static inline _Noreturn void test_leave(int status)
{
#ifdef HSTEP_COVERAGE
    __gcov_dump();
#endif
    _exit(status);
}

/* Waits for a child. Returns its status as waitpid() gives it: 0 if it ended well, and -1 if there is no child. */
static inline int test_child_status(pid_t child)
{
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child ? status : -1;
}
#endif

#define TEST(name) if (test_open_group(name))

/* Returns the text of a file of the source tree, of at most 1 MiB. The caller frees it. Ends the program if the file
 * cannot be read. */
static inline char *test_source_text(const char *name)
{
    const char *folder = getenv("HALFSTEP_SOURCE");
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder ? folder : ".", name);
    FILE *file = fopen(path, "rb");
    char *text = (char *)calloc(1, 1 << 20);
    if (!file || !text || !fread(text, 1, (1 << 20) - 1, file)) {
        printf("cannot read %s (set HALFSTEP_SOURCE to the source tree)\n", path);
        exit(1);
    }
    fclose(file);
    return text;
}

/* Checks that a test calls every function of a header that takes a pointer. Fails for each that the test's own source
 * does not name in a call. Returns the number of functions in the header. */
static inline int test_calls_all(const char *header, const char *source)
{
    char *declared = test_source_text(header), *own = test_source_text(source);
    int functions = 0;
    for (const char *at = declared; (at = strstr(at, "\nHALFSTEP_API ")) != NULL; functions++) {
        const char *open = strchr(++at, '('), *name = open, *close = strchr(open, ')'), *call = own;
        while (name[-1] == '_' || (name[-1] >= 'a' && name[-1] <= 'z') || (name[-1] >= '0' && name[-1] <= '9')) name--;
        size_t length = (size_t)(open - name);
        if (!memchr(open, '*', (size_t)(close - open))) continue;
        char wanted[80];
        snprintf(wanted, sizeof wanted, "%.*s", (int)length, name);
        /* Called, or passed to a macro that calls it. */
        while ((call = strstr(call, wanted)) != NULL && !strchr("(,", call[length])) call += length;
        if (!call) test_fail(source, 1, "%s is not called", wanted);
    }
    free(declared);
    free(own);
    return functions;
}

/* qemu-user 7.2 crashes if the child of a process with threads starts a thread. Groups that do so run on real
 * processors only. */
#ifdef HSTEP_TEST_EMULATED
#define TEST_UNLESS_EMULATED(name) if (0)
#else
#define TEST_UNLESS_EMULATED(name) TEST(name)
#endif
/* Returns the number of elements of an array. */
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define FAIL(...) test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition, ...)                \
    do {                                     \
        if (!(condition)) FAIL(__VA_ARGS__); \
    } while (0)

/* Checks that a number, or a text, is the expected one. Both are evaluated twice. */
#define EQUAL(value, expected) \
    CHECK((value) == (expected), "%s is %.17g, not %.17g", #value, (double)(value), (double)(expected))
#define EQUAL_TEXT(value, expected) CHECK(!strcmp(value, expected), "%s is \"%s\", not \"%s\"", #value, value, expected)

#endif
