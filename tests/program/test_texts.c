/* Tests several files and folders as one text: which files of a folder, in which order, and one line for all bad
 * ones. */
#include <errno.h>
#include <stdint.h>
#include <sys/stat.h>
#include <zlib.h>

#include "folders.h"
#include "test.h"
#include "trainer/data/data.h"

static char scratch[] = "/tmp/halfstep-texts-XXXXXX", error[1024];

static void need(int condition, const char *what)
{
    if (condition) return;
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static void put(const char *name, const void *bytes, size_t n)
{
    FILE *file = fopen(name, "wb");
    need(file && fwrite(bytes, 1, n, file) == n && !fclose(file), name);
}

static void put_packed(const char *name, const char *text)
{
    uint8_t out[400];
    z_stream stream = {
        .next_in = (Bytef *)(uintptr_t)text, .avail_in = (uInt)strlen(text), .next_out = out, .avail_out = sizeof out};
    need(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "deflate");
    need(deflate(&stream, Z_FINISH) == Z_STREAM_END, "deflate");
    deflateEnd(&stream);
    put(name, out, sizeof out - stream.avail_out);
}

static void joined(const char *const *names, int n, const char *content, size_t files)
{
    struct data_file file;
    size_t found = 0;
    int status = data_load_all(names, n, &file, &found, error, sizeof error);
    CHECK(!status, "%s", error);
    CHECK(!status && file.n == strlen(content) && !memcmp(file.bytes, content, file.n) && found == files,
          "%zu files: %.*s, not %s", found, (int)file.n, (const char *)file.bytes, content);
    data_free(&file);
}

/* words: texts that the line must name, between bars */
static void refused(const char *const *names, int n, const char *words)
{
    struct data_file file;
    size_t files;
    char copy[300], *rest = copy;
    error[0] = 0;
    snprintf(copy, sizeof copy, "%s", words);
    int status = data_load_all(names, n, &file, &files, error, sizeof error);
    CHECK(status == -1 && !file.bytes && !file.n, "accepted: %s", words);
    for (char *word; (word = strsep(&rest, "|"));) CHECK(strstr(error, word), "\"%s\" is not in: %s", word, error);
    CHECK(!strchr(error, '\n') && strlen(error) < 740, "not one line: %s", error);
}

static void make_folder(void)
{
    static const char *const folders[] = {"t", "t/b", "t/b/.git", "t/e", "t/e/f", "t/nothing", "t/nothing/inside"};
    for (size_t i = 0; i < COUNT(folders); i++) need(!mkdir(folders[i], 0700), folders[i]);
    put("t/a", "Aa", 2);
    put("t/b/1", "B1", 2);
    put_packed("t/b/2.gz", "B2");
    put_packed("t/b/3.gz", "");
    put("t/b/nil", "", 0);
    put("t/b/.git/x", "x", 1);
    put("t/c", "C", 1);
    put("t/.hidden", "hidden", 6);
    put("t/e/f/g", "G", 1);
    need(!symlink("../t", "t/around") && !symlink("c", "t/link") && !mkfifo("t/pipe", 0600), "links");
}

static void test_order(void)
{
    /* Sorted by name: a, around (no), b/1, b/2.gz, b/3.gz, b/nil (no), c, e/f/g, link, nothing (no), pipe (no). */
    joined((const char *[]){"t"}, 1, "AaB1B2CGC", 7);
    joined((const char *[]){"t/"}, 1, "AaB1B2CGC", 7);
    joined((const char *[]){"t/c", "t/b", "t/a"}, 3, "CB1B2Aa", 5);
    joined((const char *[]){"t/a", "t/a"}, 2, "AaAa", 2);
    joined((const char *[]){"t/around/b/", "t/.hidden"}, 2, "B1B2hidden", 4);
    /* Sorted by bytes, not by any language's order of letters. */
    need(!mkdir("order", 0700), "order");
    static const char *const names[] = {"order/Z", "order/a", "order/10", "order/9", "order/\xc3\xa9", "order/_"};
    for (size_t i = 0; i < COUNT(names); i++) put(names[i], names[i] + 6, 1);
    joined((const char *[]){"order"}, 1, "19Z_a\xc3", 6);
}

/* Longer than any buffer on the way. */
static void test_large(void)
{
    enum { FILES = 300, BYTES = 5000 };
    char name[64];
    static uint8_t bytes[BYTES];
    need(!mkdir("large", 0700), "large");
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "large/%04d", i);
        memset(bytes, i, BYTES);
        put(name, bytes, (size_t)(BYTES - i));
    }
    struct data_file file;
    size_t files, at = 0;
    int status = data_load_all((const char *[]){"large"}, 1, &file, &files, error, sizeof error), wrong = 0;
    CHECK(!status && files == FILES, "%s", error);
    for (int i = 0; i < FILES && !status; i++)
        for (int k = 0; k < BYTES - i && at < file.n; k++) wrong += file.bytes[at++] != (uint8_t)i;
    CHECK(!wrong && (status || at == file.n) && at == FILES * BYTES - FILES * (FILES - 1) / 2, "%d of %zu bytes", wrong,
          at);
    data_free(&file);
}

static void test_refusals(void)
{
    static char many[100][16];
    const char *names[100];
    static const uint8_t rubbish[] = {0x1F, 0x8B, 8, 0, 1, 2, 3};
    refused((const char *[]){"t", "missing", "t/a", "t/c/d"}, 4, "missing: No such file|; t/c/d: Not a directory");
    refused((const char *[]){"t/nothing"}, 1, "t/nothing: is a folder without a file");
    refused((const char *[]){"t/a", "t/b/nil", "t/b/3.gz"}, 3, "t/b/nil: is empty; |t/b/3.gz: is empty");
    for (int i = 0; i < 100; i++) {
        snprintf(many[i], sizeof many[i], "missing-%d", i);
        names[i] = many[i];
    }
    refused(names, 100, "missing-0: No such file|; missing-9: | and |more");
    put("t/b/4", rubbish, sizeof rubbish);
    put("t/e/5", rubbish, sizeof rubbish);
    refused((const char *[]){"t"}, 1, "t/b/4: truncated gzip|; t/e/5: truncated gzip");
    need(!unlink("t/b/4") && !unlink("t/e/5") && !symlink("nowhere", "t/dangling"), "links");
    refused((const char *[]){"t"}, 1, "t/dangling: No such file");
    need(!unlink("t/dangling"), "t/dangling");
    if (geteuid()) {
        need(!chmod("t/a", 0) && !chmod("t/b", 0), "chmod");
        refused((const char *[]){"t", "t/a"}, 2, "t/a: Permission|; t/b: Permission");
        need(!chmod("t/a", 0600) && !chmod("t/b", 0700), "chmod");
    }
    joined((const char *[]){"t"}, 1, "AaB1B2CGC", 7);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    need(mkdtemp(scratch) && !chdir(scratch), scratch);
    make_folder();
    TEST("files of folders, in order") test_order();
    TEST("many files") test_large();
    TEST("all that are bad in one line") test_refusals();
    need(!chdir("/"), "/");
    remove_tree(scratch);
    return test_done();
}
