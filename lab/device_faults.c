/* What lab/device_faults.py runs with a changed instruction behind the library:
 *
 *   device_faults check RECIPE        the check on first use; RECIPE: of the fused kernel too, - for none
 *   device_faults golden PART STRIDE  golden cases on the GPU whose recipe has the part in its name
 *
 * Exits with 0 if all bits are right, with 3 if some are wrong, with 1 after another error. */
#include <stdlib.h>
#include <string.h>

#include <tests/golden_case.h>

static int failed(int error, const halfstep_optimizer *o)
{
    if (!error) return 0;
    printf("%s\n", halfstep_error_detail(o));
    return error == HALFSTEP_ERROR_DEVICE ? 3 : 1;
}

static int check_device(const char *recipe)
{
    const halfstep_options options = {.struct_size = sizeof options, .device = "cuda"};
    const halfstep_tensor t = {
        .struct_size = sizeof t, .name = "w", .ndim = 2, .rows = 16, .row_length = 256, .gradient = "f32"};
    halfstep_optimizer *o;
    int32_t group, index;
    int error = halfstep_create(&options, &o);
    if (error || !strcmp(recipe, "-")) return failed(error, NULL);
    error = halfstep_add_group(o, recipe, &group);
    if (!error) error = halfstep_add_tensor(o, &t, &index);
    if (!error) error = halfstep_allocate_states(o);
    return failed(error, o);
}

static int run_golden(const char *part, int stride)
{
    const struct golden_layout layout = {.threads = 1, .device = "cuda"};
    char *list = test_source_text("tests/golden/hashes.txt");
    int n = 0, found = 0;
    struct golden_case *cases = golden_cases(&n);
    for (int i = 0; cases && i < n; i++) {
        if (!strstr(cases[i].recipe, part) || found++ % stride) continue;
        check_golden(list, &cases[i], &layout);
        if (test_group_failed) return 3;
    }
    printf("%d cases\n", found);
    return found ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "check")) return check_device(argv[2]);
    if (argc == 4 && !strcmp(argv[1], "golden")) return run_golden(argv[2], atoi(argv[3]));
    return 1;
}
