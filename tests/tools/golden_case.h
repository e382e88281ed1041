/* Checks one case of tests/golden/hashes.txt, for every test that must give the promised bits in its own way. */
#ifndef HSTEP_TESTS_GOLDEN_CASE_H
#define HSTEP_TESTS_GOLDEN_CASE_H

#include <inttypes.h>

#include "test.h"
#include <tools/cli/verify/golden.c>

/* Runs a case and compares its hash. Returns 0 if the list lacks the case; test_golden.c reports that. */
static int check_golden(const char *list, const struct golden_case *c, const struct golden_layout *layout)
{
    uint64_t hash = 0, expected = 0;
    char error[300] = "";
    if (!golden_expected(list, c, &expected)) return 0;
    int failed = golden_run(c, layout, &hash, error, sizeof error);
    CHECK(!failed, "%s %s %s: %s", c->recipe, c->gradients, c->generator, error);
    CHECK(failed || hash == expected, "%s %s %s: %016" PRIx64 ", expected %016" PRIx64, c->recipe, c->gradients,
          c->generator, hash, expected);
    return 1;
}

#endif
