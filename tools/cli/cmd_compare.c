#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "common/args/args.h"
#include "trainer/compare/compare.h"

int cmd_compare(int argc, char **argv)
{
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("Usage: halfstep compare lm --data FILE... --recipes R,R,... [options]\n"
               "       halfstep compare mnist [--data DIR] --recipes R@LR,R@LR,... [options]\n\n"
               "Trains the same model under several recipes and reports how losses and memory differ.\n\n"
               "  lm      a byte-level language model; see halfstep compare lm --help\n"
               "  mnist   a network that reads digits; see halfstep compare mnist --help\n\n"
               "  halfstep compare lm --data book.txt --recipes adamw/f32,adamw/bf16-sr/int8\n");
        return 0;
    }
    if (argc < 2) return usage_error("compare", "the model is missing; known: lm, mnist");
    struct comparison lm = {"compare lm", "halfstep compare lm", argc, argv};
    struct comparison mnist = {"compare mnist", "halfstep compare mnist", argc, argv};
    if (strcmp(argv[1], "lm") == 0) return compare_lm(&lm, argc - 1, argv + 1);
    if (strcmp(argv[1], "mnist") == 0) return compare_mnist(&mnist, argc - 1, argv + 1);
    return usage_error("compare", "unknown model '%s'; known: lm, mnist", argv[1]);
}
