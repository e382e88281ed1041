/* For tests/house/new_rows_test.sh: checks the promised cases with a library that has more rows. Usage: golden LIST
 * NAME... Every line of LIST must still be a case, and one in 61 of them must still have its hash. Each NAME, a new
 * rule or format, must have cases of its own. Returns 0 if all hold. */
#include <tools/cli/verify/golden.c>

/* Returns the case of a line, or NULL. */
static const struct golden_case *case_of(const struct golden_case *cases, int n, const char *line)
{
    for (int i = 0; i < n; i++) {
        char key[GOLDEN_RECIPE + 64];
        int length = snprintf(key, sizeof key, "%s %s %s ", cases[i].recipe, cases[i].gradients, cases[i].generator);
        if (!strncmp(line, key, (size_t)length)) return &cases[i];
    }
    return NULL;
}

int main(int argc, char **argv)
{
    static char line[512];
    int n = 0, lines = 0, failed = argc < 3;
    struct golden_case *cases = golden_cases(&n);
    FILE *list = failed ? NULL : fopen(argv[1], "r");
    const struct golden_layout layout = {.threads = 1};
    if (!cases || !list) return 1;
    while (fgets(line, sizeof line, list)) {
        const struct golden_case *c = case_of(cases, n, line);
        uint64_t hash = 0, expected = 0;
        char error[300] = "is no case any more";
        int right = c && golden_expected(line, c, &expected);
        if (right && lines % 61 == 0) right = !golden_run(c, &layout, &hash, error, sizeof error) && hash == expected;
        if (!right) printf("FAIL %.*s: %s\n", (int)strcspn(line, "\n"), line, c ? "another hash" : error);
        failed |= !right;
        lines++;
    }
    fclose(list);
    printf("%s %d promised cases, of %d with the new rows\n", failed || !lines ? "FAIL" : "ok  ", lines, n);
    for (int name = 2; name < argc; name++) {
        int own = 0;
        for (int i = 0; i < n; i++) {
            size_t length = strlen(argv[name]);
            own += recipe_has(cases[i].recipe, argv[name]) ||
                   (!strncmp(cases[i].recipe, argv[name], length) && cases[i].recipe[length] == '/');
        }
        printf("%s %s has %d cases\n", own ? "ok  " : "FAIL", argv[name], own);
        failed |= !own;
    }
    free(cases);
    return failed || !lines;
}
