#include "common/progress.h"
#include "common/text.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define LIVE_SECONDS 0.1
#define PLAIN_LINES 20

double progress_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_open(struct progress *progress, FILE *out, int quiet)
{
    memset(progress, 0, sizeof *progress);
    progress->out = out;
    progress->quiet = quiet;
    const char *term = getenv("TERM"), *no_colour = getenv("NO_COLOR");
    progress->live = !quiet && isatty(fileno(out)) && term && term[0] && strcmp(term, "dumb") != 0;
    progress->colour = progress->live && !(no_colour && no_colour[0]);
}

void progress_label(struct progress *progress, const char *label)
{
    plain_text(progress->label, sizeof progress->label - 2, label);
    if (label[0]) strcat(progress->label, "  ");
}

void progress_begin(struct progress *progress, int64_t first, int64_t total)
{
    progress->first = first;
    progress->total = total;
    progress->started = progress_clock();
    progress->shown = 0;
    progress->next_plain = first + 1;
    progress->drawn = 0;
    progress->line[0] = 0;
}

static int columns(const struct progress *progress)
{
    struct winsize size;
    /* A terminal that does not know its width says 0. */
    if (ioctl(fileno(progress->out), TIOCGWINSZ, &size) != 0 || !size.ws_col) return 80;
    return size.ws_col;
}

static void add_time(char *text, size_t text_bytes, double seconds)
{
    long s = (long)(seconds + 0.5);
    if (s >= 3600) append(text, text_bytes, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else append(text, text_bytes, "%ld:%02ld", s / 60, s % 60);
}

/* Writes the line of a step. The most useful values come first, because a narrow terminal cuts the end off. */
static void compose(struct progress *progress, int64_t step, const struct progress_values *v, char *text,
                    size_t text_bytes)
{
    text[0] = 0;
    append(text, text_bytes, "%sstep %lld/%lld", progress->label, (long long)step, (long long)progress->total);
    if (!isnan(v->loss)) append(text, text_bytes, "  loss %.4f", v->loss);
    if (!isnan(v->val_loss)) append(text, text_bytes, "  val %.4f", v->val_loss);
    if (v->extra && v->extra[0]) append(text, text_bytes, "  %s", v->extra);
    double spent = progress_clock() - progress->started;
    int64_t made = step - progress->first, left = progress->total - step;
    if (made > 0 && left > 0) {
        append(text, text_bytes, "  ETA ");
        add_time(text, text_bytes, spent / (double)made * (double)left);
    } else if (left == 0) {
        append(text, text_bytes, "  took ");
        add_time(text, text_bytes, spent);
    }
    if (!isnan(v->tokens_per_s)) append(text, text_bytes, "  %.1f ktok/s", v->tokens_per_s / 1e3);
    if (!isnan(v->gradient_norm)) append(text, text_bytes, "  norm %.3g", v->gradient_norm);
    if (!isnan(v->lr)) append(text, text_bytes, "  lr %.3g", v->lr);
    if (v->skipped) append(text, text_bytes, "  skipped %llu", (unsigned long long)v->skipped);
}

static void erase(struct progress *progress)
{
    if (progress->drawn) fputs("\r\033[K", progress->out);
    progress->drawn = 0;
}

static void draw(struct progress *progress)
{
    int width = columns(progress) - 1;
    fprintf(progress->out, "\r\033[K%s%.*s%s", progress->colour ? "\033[36m" : "", width, progress->line,
            progress->colour ? "\033[0m" : "");
    fflush(progress->out);
    progress->drawn = 1;
}

void progress_update(struct progress *progress, int64_t step, const struct progress_values *values, int important)
{
    if (progress->quiet) return;
    if (progress->live) {
        double now = progress_clock();
        compose(progress, step, values, progress->line, sizeof progress->line);
        if (!important && now - progress->shown < LIVE_SECONDS) return;
        progress->shown = now;
        draw(progress);
        return;
    }
    if (!important && step < progress->next_plain) return;
    int64_t every = (progress->total - progress->first) / PLAIN_LINES;
    progress->next_plain = step + (every > 0 ? every : 1);
    compose(progress, step, values, progress->line, sizeof progress->line);
    fprintf(progress->out, "%s\n", progress->line);
    fflush(progress->out);
}

void progress_note(struct progress *progress, const char *format, ...)
{
    char line[2048], shown[4 * sizeof line];
    int again = progress->drawn;
    erase(progress);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    plain_text(shown, sizeof shown, line);
    fprintf(progress->out, "%s\n", shown);
    fflush(progress->out);
    if (again) draw(progress);
}

void progress_end(struct progress *progress)
{
    if (!progress->live || !progress->line[0]) return;
    draw(progress);
    fputc('\n', progress->out);
    fflush(progress->out);
    progress->drawn = 0;
    progress->line[0] = 0;
}
