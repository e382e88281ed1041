/* Runs the program on a terminal: progress, colours, narrow ones, and bytes that a text holds. */
#define HALFSTEP_ADVANCED
#include <poll.h>
#include <sys/ioctl.h>

#include "answers.h"
#include "common/progress.h"
#include "trainer/run/run.h"

/* ---- Terminals --------------------------------------------------------------------------------------------------- */

/* Reads what comes out of a terminal up to a mark. The kernel may deliver it a while after it was written. */
static void read_terminal(int master, char *seen, size_t room)
{
    static const char mark[] = "~end~";
    size_t n = 0;
    struct pollfd ready = {master, POLLIN, 0};
    seen[0] = 0;
    while (n + 1 < room && !strstr(seen, mark) && poll(&ready, 1, 10000) > 0) {
        ssize_t got = read(master, seen + n, room - 1 - n);
        if (got <= 0) break;
        n += (size_t)got;
        seen[n] = 0;
    }
    char *end = strstr(seen, mark);
    if (end) *end = 0;
}

/* Returns what progress writes to a terminal of so many columns. */
static const char *on_terminal(int columns, const char *term, const char *no_colour, int quiet)
{
    static char seen[1 << 14];
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    demand(master >= 0 && !grantpt(master) && !unlockpt(master), "no terminal");
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    FILE *out = slave < 0 ? NULL : fdopen(slave, "w");
    demand(out != NULL, "no terminal");
    struct winsize size = {.ws_col = (unsigned short)columns, .ws_row = 24};
    demand(!ioctl(master, TIOCSWINSZ, &size), "no size");
    if (term) setenv("TERM", term, 1);
    else unsetenv("TERM");
    if (no_colour) setenv("NO_COLOR", no_colour, 1);
    else unsetenv("NO_COLOR");
    struct progress progress;
    struct progress_values values = {.loss = 1.25,
                                     .val_loss = 2.5,
                                     .gradient_norm = 3,
                                     .lr = 4,
                                     .tokens_per_s = 5000,
                                     .skipped = 6,
                                     .extra = "extra words"};
    progress_open(&progress, out, quiet);
    progress_label(&progress, "label");
    progress_begin(&progress, 0, 100);
    progress_note(&progress, "a note before");
    for (int step = 1; step <= 100; step++) progress_update(&progress, step, &values, step == 3);
    progress_note(&progress, "a note");
    progress_update(&progress, 200, &(struct progress_values){NAN, NAN, NAN, NAN, NAN, 0, NULL}, 1);
    progress_end(&progress);
    progress_end(&progress);
    progress_label(&progress, "");
    progress_begin(&progress, 0, 0);
    progress_update(&progress, 0, &(struct progress_values){NAN, NAN, NAN, NAN, NAN, 0, ""}, 1);
    fputs("~end~", out);
    fflush(out);
    read_terminal(master, seen, sizeof seen);
    fclose(out);
    close(master);
    return seen;
}

static void test_terminal(void)
{
    char *term = getenv("TERM"), *no_colour = getenv("NO_COLOR");
    term = term ? strdup(term) : NULL;
    no_colour = no_colour ? strdup(no_colour) : NULL;
    const char *seen = on_terminal(120, "xterm", NULL, 0);
    CHECK(strstr(seen, "\r\033[K\033[36mlabel  step 3/100  loss 1.2500  val 2.5000  extra words  ETA 0:0") &&
              strstr(seen, "  5.0 ktok/s  norm 3  lr 4  skipped 6\033[0m"),
          "a live line: %s", seen);
    /* A note replaces the progress line, which comes again below it. */
    CHECK(strstr(seen, "\r\033[Ka note\r\n\r\033[K\033[36mlabel  step 100/100"), "a note: %s", seen);
    CHECK(strstr(seen, "label  step 200/100\033[0m\r\n\r\033[K"), "a line that stays: %s", seen);
    seen = on_terminal(40, "xterm", "", 0);
    CHECK(strstr(seen, "\r\033[K\033[36mlabel  step 3/100  loss 1.2500  val 2.5\033[0m"), "cut to 39 columns: %s",
          seen);
    /* No line is wider than the terminal, less the column in which a cursor may wrap. */
    for (int columns = 1; columns < 30; columns++) {
        int wide = 0, lines = 0;
        seen = on_terminal(columns, "xterm", "1", 0);
        for (const char *at = seen; (at = strstr(at, "\r\033[K")); lines++) {
            at += 4;
            const int width = (int)strcspn(at, "\r\033");
            if (strncmp(at, "a note", 6) && width > wide) wide = width;
        }
        CHECK(lines > 3 && wide == columns - 1, "%d columns: %d lines, the widest has %d", columns, lines, wide);
    }
    seen = on_terminal(0, "xterm", "1", 0);
    CHECK(strstr(seen, "\r\033[Klabel  step 3/100  loss 1.2500  val 2.5000  extra words  ETA 0:0") &&
              !strstr(seen, "\033[36m"),
          "no colour, no size: %s", seen);
    for (int i = 0; i < 3; i++) {
        seen = on_terminal(120, i == 2 ? "" : i ? "dumb" : NULL, NULL, 0);
        CHECK(!strchr(seen, '\033') &&
                  strstr(seen, "label  step 98/100  loss 1.2500  val 2.5000  extra words  ETA 0:0"),
              "TERM=dumb: %s", seen);
    }
    seen = on_terminal(120, "xterm", NULL, 1);
    EQUAL_TEXT(seen, "a note before\r\na note\r\n");
    if (term) setenv("TERM", term, 1);
    else unsetenv("TERM");
    if (no_colour) setenv("NO_COLOR", no_colour, 1);
    else unsetenv("NO_COLOR");
    free(term);
    free(no_colour);
}

/* A model may write any bytes. None of them may reach a terminal that would obey it. */
static void test_bytes(void)
{
    static const char bytes[] = "a\n\t\033["
                                "31m\x7f\xc2\x9b\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xe0\x80\x80\xed\xa0\x80\xf0\x80"
                                "\x80\x80\xf4\x90\x80\x80\xf5\xe2\x82";
    static const char shown[] =
        "a\r\n\t\\x1b["
        "31m\\x7f\\xc2\\x9b\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\\xe0\\x80\\x80\\xed\\xa0\\x80\\xf0\\x80\\x80\\x80"
        "\\xf4\\x90\\x80\\x80\\xf5\\xe2\\x82";
    char seen[400] = "";
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    demand(master >= 0 && !grantpt(master) && !unlockpt(master), "no terminal");
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY), own = dup(1);
    fflush(stdout);
    dup2(slave, 1);
    print_bytes((const uint8_t *)bytes, sizeof bytes - 1);
    fputs("~end~", stdout);
    fflush(stdout);
    dup2(own, 1);
    read_terminal(master, seen, sizeof seen);
    EQUAL_TEXT(seen, shown);
    close(own);
    close(slave);
    close(master);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_text_and_base();
    TEST("terminals") test_terminal();
    TEST("bytes on a terminal") test_bytes();
    demand(!chdir("/"), "no root");
    return test_done();
}
