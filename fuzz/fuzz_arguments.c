/* Fuzzes the program's command line. It must end with status 0, or with 1 or 2 and one sentence on stderr. An input is
 * the words, one a line. Commands that run long or need a file get a file that does not exist. */
#define FUZZ_NAME "fuzz_arguments"
#include "fuzz.h"

#include "files.h"
#include "program.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char text[4096];
    char *words[MAX_WORDS + 3];
    int count = 0;
    if (!scratch[0]) {
        make_scratch();
        demand(!chdir(scratch), "no folder");
    }
    if (size >= sizeof text || memchr(data, 0, size)) return 0;
    memcpy(text, data, size);
    text[size] = 0;
    words[count++] = "halfstep";
    for (char *rest = text, *word; count < MAX_WORDS && (word = strsep(&rest, "\n"));) words[count++] = word;
    for (int i = 1; i < count; i++)
        if (words[i][0] == '/' || strstr(words[i], "=/") || strstr(words[i], "..")) return 0;
    if (count > 1 && (!strcmp(words[1], "train") || !strcmp(words[1], "compare"))) {
        words[count++] = "--data";
        words[count++] = "no-such-file";
    }
    static const char *const endless[] = {"random", "bench", "demo", "verify"};
    for (size_t i = 0; count > 1 && i < sizeof endless / sizeof *endless; i++)
        if (!strcmp(words[1], endless[i])) words[count++] = "--help";
    words[count] = NULL;
    if (judge_program(count, words)) fuzz_rejected++;
    else fuzz_accepted++;
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER
static size_t make_input(uint8_t *data, size_t room)
{
    static const char *const starts[] = {"train\nlm",
                                         "train\nmnist",
                                         "compare\nlm",
                                         "compare\nmnist",
                                         "plan",
                                         "plan\n--params\n7e9",
                                         "generate\n--checkpoint\nx",
                                         "inspect\nx",
                                         "info",
                                         "help\ntrain\nlm",
                                         "train",
                                         "random",
                                         "verify",
                                         "bench",
                                         "demo",
                                         "--version",
                                         ""};
    static const char *const options[] = {
        "--recipe",     "--recipes",   "--steps",       "--lr",          "--width",
        "--heads",      "--batch",     "--seed",        "--seeds",       "--hyper",
        "--clip",       "--gradients", "--schedule",    "--decay",       "--compute",
        "--checkpoint", "--resume",    "--release",     "--accumulator", "--micro-steps",
        "--scan",       "--json",      "--quiet",       "--memory",      "--params",
        "--expect",     "--bytes",     "--temperature", "--prompt",      "--beta1",
        "--momentum",   "--k",         "--log",         "--init",        "--keep",
        "--epochs",     "--help",      "--all",         "--quick",       "--",
        "-h",           "--loss-scale"};
    static const char *const values[] = {"1",
                                         "0",
                                         "-1",
                                         "1e-3",
                                         "1e999",
                                         "nan",
                                         "inf",
                                         "0x10",
                                         "9223372036854775808",
                                         "18446744073709551616",
                                         "adamw",
                                         "adamw/bf16-sr/int8",
                                         "adamw/f32,lion/bf16:lr=2:clip=1",
                                         "a@b",
                                         "beta1=0.5",
                                         "lr=",
                                         "=",
                                         "24G",
                                         "1e30T",
                                         "cosine",
                                         "f32",
                                         "\xff\xfe",
                                         "%s%n",
                                         "",
                                         "bf16<x",
                                         "adamw/f32<0.5"};
    size_t used = (size_t)snprintf((char *)data, room, "%s", starts[draw(sizeof starts / sizeof *starts)]);
    for (uint64_t i = draw(6); i; i--) {
        const char *option = options[draw(sizeof options / sizeof *options)];
        used += (size_t)snprintf((char *)data + used, room - used, "\n%s", option);
        if (draw(4))
            used += (size_t)snprintf((char *)data + used, room - used, "%c%s", "\n="[draw(3) == 0],
                                     values[draw(sizeof values / sizeof *values)]);
    }
    return draw(3) ? used : mutate(data, used, room, "\n-=:,/@.+<>~0123456789e%");
}
#endif
