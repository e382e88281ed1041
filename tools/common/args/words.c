/* Words of a command line: numbers with suffixes, suggestions for mistyped words, one-line errors. */
#include "common/args/args.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void vreport(const char *command, const char *format, va_list arguments, const char *tail)
{
    char line[1200], shown[4 * sizeof line];
    vsnprintf(line, sizeof line, format, arguments);
    plain_text(shown, sizeof shown, line);
    fprintf(stderr, "halfstep: %s: %s%s\n", command, shown, tail);
}

int usage_error(const char *command, const char *format, ...)
{
    char tail[128];
    snprintf(tail, sizeof tail, " (see halfstep %s --help)", command);
    va_list arguments;
    va_start(arguments, format);
    vreport(command, format, arguments, tail);
    va_end(arguments);
    return 2;
}

int failure(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vreport(command, format, arguments, "");
    va_end(arguments);
    return 1;
}

void report_failure(const char *command, int status, const char *error)
{
    if (status == 2) usage_error(command, "%s", error);
    else failure(command, "%s", error);
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

struct suffix {
    const char *text;
    double factor;
};

static const struct suffix count_suffixes[] = {{"k", 1e3}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9},
                                               {"B", 1e9}, {"b", 1e9}, {"T", 1e12}};
static const struct suffix byte_suffixes[] = {
    {"B", 1},      {"K", 0x1p10},   {"k", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30},
    {"T", 0x1p40}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
    {"KB", 1e3},   {"kB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},
};

static int parse_with(const char *text, const struct suffix *suffixes, size_t n, double *value)
{
    if (!(text[0] == '-' || text[0] == '+' || text[0] == '.' || (text[0] >= '0' && text[0] <= '9'))) return -1;
    char *end;
    double v = strtod(text, &end);
    if (end == text || !isfinite(v)) return -1;
    if (*end) {
        size_t i = 0;
        while (i < n && strcmp(end, suffixes[i].text) != 0) i++;
        if (i == n) return -1;
        v *= suffixes[i].factor;
        if (!isfinite(v)) return -1;
    }
    *value = v;
    return 0;
}

int parse_number(const char *text, double *value)
{
    return parse_with(text, count_suffixes, sizeof count_suffixes / sizeof count_suffixes[0], value);
}

int parse_bytes(const char *text, double *value)
{
    return parse_with(text, byte_suffixes, sizeof byte_suffixes / sizeof byte_suffixes[0], value);
}

/* ---- Suggestions ------------------------------------------------------------------------------------------------- */

/* Returns the number of edits (insert, delete, replace, swap of neighbours) that lead from one word to the other.
 * Returns 99 if a word has more than 40 characters. */
static int distance(const char *a, const char *b)
{
    enum { LONGEST = 40 };
    size_t m = strlen(a), n = strlen(b);
    if (m > LONGEST || n > LONGEST) return 99;
    int d[LONGEST + 1][LONGEST + 1];
    for (size_t i = 0; i <= m; i++) d[i][0] = (int)i;
    for (size_t j = 0; j <= n; j++) d[0][j] = (int)j;
    for (size_t i = 1; i <= m; i++)
        for (size_t j = 1; j <= n; j++) {
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best) best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best) best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && d[i - 2][j - 2] + 1 < best)
                best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    return d[m][n];
}

const char *args_suggest(const char *word, const char *(*next)(void *context, int index), void *context)
{
    const char *best = NULL, *candidate;
    /* Allows one mistake for every three letters, but at least one and at most three. */
    int most = (int)strlen(word) / 3, least;
    least = 1 + (most < 1 ? 1 : most > 3 ? 3 : most);
    for (int i = 0; (candidate = next(context, i)) != NULL; i++) {
        int d = distance(word, candidate);
        /* A prefix of at least three letters counts as one mistake. */
        if (strlen(word) >= 3 && strncmp(candidate, word, strlen(word)) == 0) d = 1;
        if (d < least) least = d, best = candidate;
    }
    return best;
}
