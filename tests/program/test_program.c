/* Runs the program in this process and checks its answers to words, folders and checkpoints of every kind. A failure is
 * a status and one sentence that names what is wrong, and leaves no file behind. Over 500 lines because its tables are
 * most of it. */
#define HALFSTEP_ADVANCED
#include <math.h>
#include <poll.h>
#include <sys/ioctl.h>

#include "common/args/args.h"
#include "common/progress.h"
#include "program_lines.h"
#include "trainer/run/run.h"

#define LM                                                                                                        \
    "train lm --data text --width 8 --depth 1 --heads 2 --context 4 --batch 2 --eval-batches 1 --sample-bytes 4 " \
    "--threads 1 "
#define MNIST "train mnist --train-images 12 --test-images 4 --epochs 1 --batch 4 --threads 1 "
#define RESUME "train lm --resume --quiet --checkpoint "
#define COMPARE                                                                                                        \
    "compare lm --data text --width 8 --depth 1 --heads 2 --context 4 --batch 2 --eval-batches 1 --steps 2 --threads " \
    "1 --quiet "

/* Returns a hash of the names and sizes of all files in a folder. */
static uint64_t contents(const char *folder)
{
    uint64_t sum = 0;
    char path[700];
    DIR *stream = opendir(folder);
    for (struct dirent *entry; stream && (entry = readdir(stream));) {
        struct stat status;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%.400s/%.200s", folder, entry->d_name);
        uint64_t hash = 14695981039346656037u;
        for (const char *c = path; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
        if (lstat(path, &status) == 0) sum += hash * (uint64_t)(status.st_size + 1);
        if (S_ISDIR(status.st_mode)) sum += contents(path);
    }
    if (stream) closedir(stream);
    return sum;
}

struct refusal {
    int status;
    const char *pattern, *line;
};

static void refuse(int status, const char *pattern, const char *line)
{
    uint64_t before = contents(".");
    int got = program(line);
    CHECK(got == status, "%s: status %d, not %d: %s", line, got, status, program_errors);
    CHECK(strstr(program_errors, pattern), "%s: \"%s\" is not in: %s", line, pattern, program_errors);
    const char *end = strchr(program_errors, '\n');
    CHECK(end && !end[1] && !strncmp(program_errors, "halfstep: ", 10), "%s: not one line: %s", line, program_errors);
    CHECK(!printed[0], "%s: prints %.100s", line, printed);
    CHECK(contents(".") == before, "%s: left something behind", line);
}

static void accept(const char *pattern, const char *line)
{
    int got = program(line);
    CHECK(got == 0, "%s: status %d: %s", line, got, program_errors);
    CHECK(strstr(printed, pattern) || strstr(program_errors, pattern), "%s: \"%s\" is in neither\n%s\nnor\n%s", line,
          pattern, printed, program_errors);
}

#define REFUSE_ALL(table) \
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) refuse(table[i].status, table[i].pattern, table[i].line)

/* ---- Words ------------------------------------------------------------------------------------------------------- */

static void test_words(void)
{
    static const struct refusal table[] = {
        {2, "--width is 70000; it must be at most 65536", LM "--width 70000"},
        {2, "--final-lr is 1.5; it must be at most 1", LM "--final-lr 1.5"},
        {2, "--steps is 1e300; it must be a whole number", LM "--steps 1e300"},
        {2, "--lr: \"1e999\" is not a number (such as 7e9, 7B or 0.001)", LM "--lr 1e999"},
        {2, "--params: \"7bn\" is not a number (such as 7e9, 7B or 0.001)", "plan --params 7bn"},
        {2, "--steps: \"many\" is not a whole number (such as 2000 or 2k)", LM "--steps many"},
        {2, "--lr: \"1e306k\" is not a number", LM "--lr 1e306k"},
        {2, "--lr: \"+x\" is not a number", LM "--lr +x"},
        {2, "--memory: \"much\" is not a number of bytes (such as 24G)", "plan --params 1e6 --memory much"},
        {2, "--memory is -5; it must be at least 0", "plan --params 1e6 --memory -5"},
        {2, "--seed is -1; it must be a whole number from 0 to 2^64 - 1", LM "--seed -1"},
        {2, "--seed is 18446744073709551616", LM "--seed 18446744073709551616"},
        {2, "--seed is 0x1g", LM "--seed 0x1g"},
        {2, "--seed is :", LM "--seed :"},
        {2, "--compute is bf61; did you mean bf16? (one of bf16, f32)", LM "--compute bf61"},
        {2, "--hyper is beta1; it must be NAME=VALUE", LM "--hyper beta1"},
        {2, "--hyper is =1; it must be NAME=VALUE", LM "--hyper =1"},
        {2, "--hyper is beta1=; it must be NAME=VALUE", LM "--hyper beta1="},
        {2, "--hyper: \"x\" is not a number (such as 0.9 or 1e-3)", LM "--hyper beta1=x"},
        {2, "--beta1: \"x\" is not a number", LM "--beta1 x"},
        {2, "--hyper momentum: adamw has no such hyper-parameter", LM "--hyper momentum=0.5"},
        {2, "unknown option --val_evry, did you mean --val-every?", LM "--val_evry 2"},
        {2, "unknown option -seed, did you mean --seed?", LM "-seed 2"},
        {2, "unknown option --qqqqqqqqqq", LM "--qqqqqqqqqq=3"},
        {2, "unknown option --a-word-that-is-longer-than-any-of-the-options-there-are",
         LM "--a-word-that-is-longer-than-any-of-the-options-there-are"},
        {2, "--steps has an empty value; write --steps N", LM "--steps="},
        {2, "--steps has an empty value; write --steps N", LM "--steps _"},
        {2, "--steps needs a value: --steps N", LM "--steps --quiet"},
        {2, "--help takes no value", LM "--help=1"},
        {2, "--checkpoint PATH is missing", "generate --bytes 3"},
        {2, "missing argument; usage: halfstep inspect FILE|DIR [options]", "inspect --json"},
        {2, "one argument too many: b", "inspect a b"},
        {2, "unexpected argument lm", "plan --params 1e6 lm"},
        {1, "--json: ", "inspect -- --json"},
        {1, "-: ", "inspect -"},
        {2, "--recipes names sgd/f32/f32 twice", "bench --recipes sgd/f32,sgd/f32"},
        {2, "is too long for a recipe; it may have at most 63 characters",
         LM "--recipe adamw/bf16/int8+int8+int8+int8+int8+int8+int8+int8+int8+int8+int8+int8+int8+int8+int8"},
        {2, "is not a recipe: ", LM "--recipe adamw/bf16//int8"},
        {2, "unknown state format \"\"", LM "--recipe adamw/bf16/+int8"},
        {2, "unknown rule \"qqqqqqqqqqqq\" (one of", LM "--recipe qqqqqqqqqqqq"},
        {2, "names 2 state formats; sgd has 1 state that can be given one",
         LM "--recipe sgd/f32/int8+int8 --momentum 0.5"},
        {2, "--keep needs --checkpoint DIR", LM "--keep 2"},
        {2, "--checkpoint-every needs --checkpoint DIR", LM "--checkpoint-every 2"},
        {2, "give the size of the model by one of", "plan --params 1e6 --width 8"},
        {2, "multiple of 3 heads", "plan --width 8 --heads 3"},
        {2, "--recipes: ema follows weights that another optimizer trains", "plan --params 1e6 --recipes sgd/f32,ema"},
        {2, "--rule: ema follows weights that another optimizer trains", "plan --params 1e6 --rule ema"},
        {1, "nowhere", "plan --checkpoint nowhere"},
        {2, "train: the model is missing; known: lm, mnist", "train"},
        {2, "unknown model 'rnn'; known: lm, mnist", "train rnn"},
        {2, "compare: the model is missing; known: lm, mnist", "compare"},
        {2, "unknown command nothing", "help nothing"},
        {1, "demo.txt is neither in ../data nor in ../share/halfstep", "demo --quiet"},
        {1, "training part of short", "demo --data short --json --quiet --threads 1 --out new"},
    };
    REFUSE_ALL(table);
    static char line[1 << 14];
    strcpy(line, LM);
    for (int i = 0; i < 70; i++) snprintf(line + strlen(line), 64, " --hyper name%d=1", i);
    refuse(2, "--hyper: more than 64 values", line);
    program("random --generator mixer --seed 0X1f --count 2");
    char first[9];
    memcpy(first, printed, 8);
    program("random --generator mixer --seed 31 --count 2");
    CHECK(!memcmp(first, printed, 8), "0X1f is not 31");
    accept("Usage: halfstep COMMAND", "--help");
    accept("Usage: halfstep COMMAND", "-h");
    accept("Usage: halfstep train lm", "help train lm");
    accept("Usage: halfstep train lm", "train lm -h");
    accept("halfstep train mnist", "train -h");
    accept("halfstep compare mnist", "compare -h");
    accept("halfstep compare mnist", "compare --help");
    accept("halfstep ", "version");
    CHECK(program("") == 2 && strstr(program_errors, "Usage: halfstep COMMAND") && !printed[0], "without a word: %s",
          program_errors);
}

/* Tests kinds of options that the program's own tables do not use, or no longer use. */
static void test_tables(void)
{
    struct {
        double below;
        struct string_list recipes;
        int64_t whole;
        const char *needed;
    } target;
    static const struct option rows[] = {
        {"below", OPTION_NUMBER, 0, NULL, NULL, 0, 1, OPTION_EXCLUSIVE_MAXIMUM, NULL, "a number"},
        {"recipes", OPTION_RECIPES,
         offsetof(
             struct {
                 double a;
                 struct string_list b;
             },
             b),
         "R", NULL, 0, 0, 0, NULL, "a list"},
        {"needed", OPTION_STRING, 0, NULL, NULL, 0, 0, OPTION_REQUIRED, NULL, "without a word for its value"},
        {"", OPTION_HEADING, 0, NULL, NULL, 0, 0, 0, NULL, "a heading"},
    };
    static const struct command command = {.name = "try", .usage = "", .summary = ""};
    const struct option_group group = {"Options", rows, COUNT_OF(rows), &target};
    struct args args;
    char why[200];
    demand(args_defaults(&args, &command, &group, 1) == ARGS_RUN, "no defaults");
    CHECK(args_set(&args, &group, &rows[0], "1", why, sizeof why) == 2 &&
              strstr(why, "--below is 1; it must be below 1"),
          "%s", why);
    CHECK(args_set(&args, &group, &rows[0], "0.999", why, sizeof why) == 0 && target.below == 0.999, "%g",
          target.below);
    CHECK(args_set(&args, &group, &rows[1], "", why, sizeof why) == 2 && strstr(why, "--recipes is empty"), "%s", why);
    CHECK(args_set(&args, &group, &rows[3], "1", why, sizeof why) == 2, "a heading has a value");
    hstep_buffer text = {0};
    CHECK(args_set(&args, &group, &rows[1], "sgd/f32,lion/bf16", why, sizeof why) == 0 && target.recipes.n == 2, "%s",
          why);
    args_text(&group, &rows[1], &text);
    EQUAL_TEXT(text_string(&text), "sgd/f32/f32,lion/bf16/bf16-sr");
    text_free(&text);
    args_free(&args);
}

/* Lists of paths take words up to the next option. They come back from the text that a checkpoint keeps. */
static void test_path_lists(void)
{
    struct {
        struct path_list paths, others;
        int64_t number;
    } target, again;
#define IN(member) ((size_t)((char *)&target.member - (char *)&target))
    const struct option rows[] = {
        {"paths", OPTION_PATHS, IN(paths), "FILE...", NULL, 0, 0, 0, NULL, "a list"},
        {"others", OPTION_PATHS, IN(others), "FILE...", NULL, 0, 0, 0, NULL, "another"},
        {"number", OPTION_INTEGER, IN(number), "N", "3", 0, 9, 0, NULL, "a number"},
    };
#undef IN
    static const struct command command = {.name = "try", .usage = "", .summary = ""};
    static char names[1000][16];
    static char *words[1100] = {"try", "--paths",   "a,b", "-c",       "d e", "--number",
                                "4",   "--paths=f", "g",   "--others", "h",   "--paths"};
    int n = 12;
    for (int i = 0; i < 1000; i++) {
        snprintf(names[i], sizeof names[i], "n%d", i);
        words[n++] = names[i];
    }
    const struct option_group group = {"Options", rows, COUNT_OF(rows), &target};
    struct args args;
    /* The first word after an option may begin with a dash, and no other. */
    CHECK(args_parse(&args, &command, &group, 1, n, words) == 2, "-c is a path");
    words[3] = "./c";
    demand(args_parse(&args, &command, &group, 1, n, words) == ARGS_RUN, "not taken");
    CHECK(target.paths.n == 1005 && target.others.n == 1 && target.number == 4 && args_given(&args, "paths"),
          "%d and %d paths", target.paths.n, target.others.n);
    static const char *const first[] = {"a,b", "./c", "d e", "f", "g", "n0", "n1"};
    for (int i = 0; i < 7 && i < target.paths.n; i++) EQUAL_TEXT(target.paths.item[i], first[i]);
    hstep_buffer text = {0};
    char why[200];
    const struct option_group other = {"Options", rows, COUNT_OF(rows), &again};
    memset(&again, 0, sizeof again);
    args_text(&group, &rows[0], &text);
    CHECK(args_set(&args, &other, &rows[0], text_string(&text), why, sizeof why) == 0 && again.paths.n == 1005, "%s",
          why);
    for (int i = 0; i < 1005 && i < again.paths.n; i++)
        CHECK(!strcmp(target.paths.item[i], again.paths.item[i]), "%d: %s", i, again.paths.item[i]);
    text_free(&text);
    args_free(&args);
    static char *none[] = {"try", "--paths", "--number", "1"}, *empty[] = {"try", "--paths", "a", ""},
                *broken[] = {"try", "--paths", "a", "b\nc"};
    CHECK(args_parse(&args, &command, &group, 1, 4, none) == 2, "no path");
    CHECK(args_parse(&args, &command, &group, 1, 4, empty) == 2, "an empty path");
    CHECK(args_parse(&args, &command, &group, 1, 4, broken) == 2, "a line break");
}

/* ---- plan -------------------------------------------------------------------------------------------------------- */

static void test_plan(void)
{
    accept("7000000000 parameters", "plan --params 7b");
    accept("7000000000 parameters", "plan --params 7B");
    accept("0 of ", "plan --params 1e6 --memory 1K");
    CHECK(strstr(printed, "; --release may help") && strstr(printed, "  no\n"), "%s", printed);
    accept("The smallest lacks ", "plan --params 1e6 --memory 1K --release");
    CHECK(!strstr(printed, "may help") && strstr(printed, "gradients released"), "%s", printed);
    accept("adamw/f32/f32       █████▒▒▒▒▒░░░░░░░░░░░                           |\n",
           "plan --params 7e9 --memory 240G --recipes adamw/f32,adamw/bf16-sr/int8");
    CHECK(strstr(printed, "adamw/bf16-sr/int8  ███▒▒░░░                                        |\n") &&
              strstr(printed, "  █ weights  ▒ gradients  ░ states  | 240.00 GiB\n"),
          "%s", printed);
    accept("adamw/bf16-ecc8/int8  ██████▓▓▓▒▒|▒▒▒▒░░░░░░\n",
           "plan --params 7e9 --memory 24G --recipes adamw/f32,adamw/bf16-ecc8/int8");
    accept("int8-ecc4: the weights of vectors, and of rows with fewer than 32 elements, are in bf16-ecc8.\n",
           "plan --params 14e9 --release --recipes adamw/int8-ecc4/int4");
    CHECK(strstr(printed, "1.062   0.500") && !strstr(printed, "int8-sr"), "%s", printed);
    accept("adamw/f32/f32", "plan --params 1e15 --memory 8000T --all");
    CHECK(strstr(printed, "fit into 7.81 PiB") && strstr(printed, " PiB  yes") && strstr(printed, " PiB  no"), "%s",
          printed);
    /* Counts of a shape, tensor by tensor. Released, the largest part of the gradients at once is the embedding here
     * and a layer there. */
    accept("\"params\": 5144",
           "plan --width 8 --depth 1 --heads 2 --context 4 --json --recipes adamw/f32,adamw/bf16-sr/int8");
    accept("\"gradients\": 1.59",
           "plan --width 8 --depth 1 --heads 2 --context 4 --release --json --recipes adamw/f32");
    accept("\"release\": true", "plan --width 64 --depth 1 --heads 2 --context 4 --release --json");
    accept("\"memory\": null", "plan --checkpoint base --json");
    CHECK(strstr(printed, "\"params\": 5144"), "%s", printed);
    accept("Other rules", "plan --checkpoint base --rule lion");
    /* States in a file: two halves of states and weights, states read once or twice and written with the weights. */
    accept("adamw/bf16-sr/int8   53.79 GiB  93.15 MiB   13.85 GiB  26.89 GiB      14.6      38.7",
           "plan --params 7e9 --store --bandwidth 3 --step-time 64.5 --recipes adamw/bf16-sr/int8");
    CHECK(strstr(printed, "    4.014 ") && strstr(printed, "a few MiB more. States in memory are"), "%s", printed);
    /* Small tensors are read once for sums over a tensor, and twice for sums over all. */
    accept("\"read_bytes\": 98688,",
           "plan --width 16 --depth 1 --heads 2 --context 4 --store --json --recipes lamb/f32");
    accept("\"read_bytes\": 394752,",
           "plan --width 16 --depth 1 --heads 2 --context 4 --store --json --recipes prodigy/f32");
    /* A matrix of 4096 x 4096 is one piece. */
    accept("384.00 MiB", "plan --params 7e9 --store --recipes muon/f32/f32");
    accept("\"read_bytes\": 28875000000", "plan --params 7e9 --store --json --recipes lamb/f32/fp8");
    CHECK(strstr(printed, "\"step_seconds\": null") && strstr(printed, "\"terabytes_a_day\": null"), "%s", printed);
    refuse(2, "--step-time needs --store", "plan --params 7e9 --step-time 3");
}

/* ---- Checkpoints ------------------------------------------------------------------------------------------------- */

struct forgery {
    const char *file, *old, *new;
    const char *pattern, *line;
};

static void test_forged(void)
{
    static const char go_on[] = RESUME "forged --data text --steps 3",
                      speak[] = "generate --checkpoint forged --bytes 2 --threads 1",
                      take[] = LM "--quiet --steps 0 --init forged", shape[] = "plan --checkpoint forged";
    static const struct forgery table[] = {
        {"trainer.json", NULL, NULL, "the checkpoint has no trainer.json", go_on},
        {"trainer.json", "{", "[", "trainer.json: byte 0", go_on},
        {"trainer.json", "\"format\": 1", "\"format\": 2",
         "forged/checkpoint-2/trainer.json lacks members or has an unknown format", go_on},
        {"trainer.json", "\"format\": 1,", "", "trainer.json lacks members or has an unknown format", go_on},
        {"trainer.json", "\"format\": 1,", "\"format\": 1, \"format\": 1,", "a name twice", go_on},
        {"trainer.json", "\"format\": 1", "\"format\" 1", "trainer.json: byte", go_on},
        {"trainer.json", "\"format\": 1", "1: 1", "trainer.json: byte", go_on},
        {"trainer.json", "\"format\": 1", "\"format\": one", "trainer.json: byte", go_on},
        {"trainer.json", "\"options\": {", "\"options\": [", "trainer.json: byte", go_on},
        {"trainer.json", "\"options\": {", "\"options\": { 1", "trainer.json: byte", go_on},
        {"trainer.json", "\"options\": {", "\"options\": { \"lr\"", "trainer.json: byte", go_on},
        {"trainer.json", "\"options\": {", "\"options\": { \"lr\": \"", "trainer.json: byte", go_on},
        {"trainer.json", "\"options\": {", "\"options\": { \"lr\": \"1\",", "an option twice", go_on},
        {"trainer.json", "\"options\": {", "\"options\": {}, \"other\": {", " in forged", go_on},
        {"trainer.json", "\"gradients\": ", "\"gradient\": ", "trainer.json has no value for --gradients", go_on},
        {"trainer.json", "\"steps\": \"2\"", "\"steps\": \"x\"", "trainer.json: --steps: \"x\" is not a whole number",
         RESUME "forged"},
        {"trainer.json", "\"steps\": \"2\"", "\"steps\": \"x\"", "trainer.json has no value for --steps", go_on},
        {"trainer.json", "\"steps\": \"2\"", "\"other\": \"2\"", "trainer.json has no value for --steps", go_on},
        {"trainer.json", "\"hyper\": \"\"", "\"hyper\": \"beta1\"", "trainer.json: --hyper is beta1", go_on},
        {"trainer.json", "\"step\": 2", "\"step\": 9", "--steps is 3, but forged is already at step 9", go_on},
        {"trainer.json", "\"val_hash\": \"\"", "\"val_hash\": \"12\"", "--val is missing here but not in forged",
         go_on},
        {"trainer.json", "\"data_hash\": \"", "\"data_hash\": \"0", "--data holds other bytes than the run in forged",
         go_on},
        {"trainer.json", "\"seconds\": ", "\"seconds\": 0} ", "trainer.json: byte", go_on},
        {"config.json", NULL, NULL, "the checkpoint has no config.json", shape},
        {"config.json", "{", "[", "config.json: byte 0", shape},
        {"config.json", "{", "{} ", "config.json: byte 6: more than one value", shape},
        {"config.json", "\"hidden_size\": ", "\"hidden_size\" ", "config.json: byte", shape},
        {"config.json", "\"hidden_size\"", "1", "config.json: byte", shape},
        {"config.json", "\"hidden_size\": 8", "\"hidden_size\": 0", "\"hidden_size\" is 0; it must be a whole number",
         shape},
        {"config.json", "\"hidden_size\": 8", "\"hidden_size\": 8.5",
         "\"hidden_size\" is 8.5; it must be a whole number", shape},
        {"config.json", "\"hidden_size\": 8", "\"hidden_size\": 99999999",
         "\"hidden_size\" is 99999999; it must be a whole number", shape},
        {"config.json", "\"hidden_size\": 8", "\"hidden_size\": \"8\"", "\"hidden_size\" is \"8\"; it must", speak},
        {"config.json", "\"hidden_size\": 8", "\"hidden_size\": -", "config.json: byte", shape},
        {"config.json", "\"hidden_size\": 8", "\"hidden_size\": 9", "multiple of 2 heads", take},
        {"config.json", "\"intermediate_size\": ", "\"intermediate_size\": 2000000, \"other\": ", "intermediate",
         shape},
        {"config.json",
         "\"rms_norm_eps\": ", "\"rms_norm_eps\": 2, \"other\": ", "rms_norm_eps 2 is not between 0 and 1", shape},
        {"config.json", "\"rms_norm_eps\": ", "\"rms_norm_eps\": -1, \"other\": ",
         "\"rms_norm_eps\" is -1; it must be a number above 0", shape},
        {"config.json", "\"rope_theta\": ", "\"rope_theta\": 0.5, \"other\": ", "is not in 1..1e12", shape},
        {"config.json", "\"rope_theta\": ", "\"rope_theta\": 1e13, \"other\": ", "is not in 1..1e12", shape},
        {"config.json", "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", "there is no tensor model.layers.1.",
         speak},
        {"model.safetensors", NULL, NULL, "forged: the checkpoint has no model.safetensors", take},
        {"model.safetensors", NULL, NULL, "model.safetensors", speak},
        {"model.safetensors", "model.norm", "model.worm", "there is no tensor model.norm.weight", speak},
        {"model.safetensors", "model.norm", "model.worm", "there is no tensor model.norm.weight", take},
        {"model.safetensors", "\"F32\"", "\"I32\"", "has dtype I32; weights have F32, BF16 or F16", speak},
        {"model.safetensors", "\"F32\"", "\"I32\"", "has dtype I32; weights have F32, BF16 or F16", take},
        {"model.safetensors", "[256,8]", "[8,256]", "has shape [8, 256], this model needs [256, 8]", take},
        {"model.safetensors", "[256,8]", "[2048 ]", "has shape [2048], this model needs [256, 8]", take},
        {"history.safetensors", NULL, NULL, "the checkpoint has no history.safetensors", go_on},
        {"history.safetensors", "\"F64\"", "\"I64\"", "is not a table of ", go_on},
        {"history.safetensors", "{", "[", "history.safetensors", go_on},
        {"history.safetensors", "[2,5]", "[5,2]", "train is not a table of 5 columns", go_on},
        {"history.safetensors", "[2,5]", "[10 ]", "train is not a table of 5 columns", go_on},
        {"optimizer.safetensors", NULL, NULL, "optimizer.safetensors", go_on},
        {"optimizer.safetensors", "{", "[", "optimizer.safetensors", take},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        forge("base", "forged", table[i].file, table[i].old, table[i].new);
        refuse(1, table[i].pattern, table[i].line);
    }
    /* Members that another program has added are ignored. */
    forge("base", "forged", "trainer.json", "\"options\": {", "\"by\": [1, {\"a\": null}], \"options\": {\"lr\": 1,");
    accept("", go_on);
    forge("base", "forged", "config.json", "{", "{\"by\": [1, {\"a\": null}],");
    accept("5144 parameters", shape);
    /* Without its optimizer a model still generates, and can be started from. */
    forge("base", "forged", "optimizer.safetensors", NULL, NULL);
    accept("", take);
    /* A residual in another dtype than its format has. */
    forge("kahan", "forged", "optimizer.safetensors", "weight.extra\":{\"dtype\":\"BF16\"",
          "weight.extra\":{\"dtype\":\"I16\" ");
    CHECK(program(take) == 1 && strstr(program_errors, "has dtype I16, which is not that of bf16-kahan weights"), "%s",
          program_errors);
    /* Weights that are averages of states that are missing. */
    forge("free", "forged", "optimizer.safetensors", "schedulefree/f32", "schedulefree/f16");
    refuse(1, "forged", take);
    refuse(1, "forged", speak);
    remove_tree("forged");
}

static void test_resume(void)
{
    static const struct refusal table[] = {
        {1, "--release is given here but not in base", RESUME "base --release --steps 3"},
        {1, "--val is given here but not in base", RESUME "base --val text --steps 3"},
        {1, "--val holds other bytes than the run in val", RESUME "val --val short --steps 3"},
        {1, "--schedule is cosine here but constant in base", RESUME "base --schedule cosine --steps 3"},
        {1, "--steps is 1, but base is already at step 2", RESUME "base --steps 1"},
        {1, "base/config.json", LM "--steps 2 --quiet --init base/config.json"},
        {1, "empty.safetensors", LM "--steps 2 --quiet --init empty.safetensors"},
        {2, "--depth is 2, but the config.json of --init base says 1; leave --depth out",
         LM "--depth 2 --steps 0 --quiet --init base"},
        {1, "the file is not a log that can be continued", RESUME "base --steps 3 --log short"},
        {1, "cannot write the log base: ", RESUME "base --steps 3 --log base"},
    };
    REFUSE_ALL(table);
    forge("base", "again", "trainer.json", "", "");
    /* A directory may be written in any form, and each of its checkpoints can be resumed. */
    accept("\"steps\": 3", RESUME "again/// --steps 3 --json --keep 5");
    accept("\"steps\": 4", RESUME "again/checkpoint-2/ --steps 4 --json");
    demand(!chdir("again"), "no folder");
    accept("\"steps\": 5", RESUME "checkpoint-2 --data ../text --steps 5 --json");
    demand(!chdir(".."), "no way back");
    accept("\"steps\": 3", RESUME "hyper --beta1 0.8 --steps 3 --json");
    accept("\"steps\": 3", RESUME "val --steps 3 --json");
    /* If a hyper-parameter is given twice, the last value counts. */
    char hash[64] = "";
    accept("state_hash", LM "--quiet --steps 3 --json --hyper beta1=0.5 --hyper beta1=0.8 --beta2 0.9");
    const char *at = strstr(printed, "\"state_hash\"");
    if (at) snprintf(hash, sizeof hash, "%.36s", at);
    accept(hash, LM "--quiet --steps 3 --json --beta1 0.8 --beta2 0.9");
    /* Hyphens and underscores mean the same. */
    accept("state_hash", LM "--quiet --steps 3 --json --recipe lamb/f32 --trust_scale 0.5");
    at = strstr(printed, "\"state_hash\"");
    if (at) snprintf(hash, sizeof hash, "%.36s", at);
    accept(hash, LM "--quiet --steps 3 --json --recipe lamb/f32 --hyper trust-scale=0.5");
}

/* ---- Packed weights ---------------------------------------------------------------------------------------------- */

/* Writes two rows of 40 weights, one of them NaN, and a tensor of 68 bytes in a row. */
static void make_tensors(const char *path, const char *list, const char *name, const char *dtype)
{
    static float plain[2][40] = {{0.5f, -1.0f}, {0.25f}};
    static const uint8_t packed[2][68];
    static const uint64_t shape[2] = {2, 40}, packed_shape[2] = {2, 68};
    char error[600] = "";
    halfstep_safetensors_writer *writer;
    plain[1][33] = (float)NAN;
    demand(!halfstep_create_safetensors_writer(&writer), "no writer");
    demand(!halfstep_declare_safetensor(writer, "plain", "F32", 2, shape, plain, error, sizeof error), error);
    demand(!halfstep_declare_safetensor(writer, name, dtype, 2, packed_shape, packed, error, sizeof error), error);
    if (list)
        demand(!halfstep_declare_safetensors_metadata(writer, HALFSTEP_PACKED_KEY, list, error, sizeof error), error);
    demand(!halfstep_write_safetensors(writer, path, NULL, NULL, error, sizeof error), error);
    halfstep_destroy_safetensors_writer(writer);
}

/* Does the same with a packed tensor of the same shape that the metadata describe. */
static void make_packed(const char *path, const char *list) { make_tensors(path, list, "packed", "U8"); }

static void test_convert(void)
{
    static const char wide[] = LM "--quiet --steps 2 --width 40 --recipe ";
    static const struct refusal table[] = {
        {2, "one argument too many: three", "convert one two three --to bf16"},
        {2, "--to is f16; did you mean bf16?", "convert base new --to f16"},
        {1, "nowhere", "convert nowhere new --to bf16"},
        {1, "convert: text exists already; remove it, or choose another name", "convert base text --to bf16"},
        {1, "empty.safetensors has nothing to convert to f32; only packed weights",
         "convert empty.safetensors new --to f32"},
        {1, "--tensors '*_norm*' matches no matrix", "convert 40 new --to int8-sr --tensors *proj* *_norm*"},
        {1, "convert: cannot create nowhere/new: No such file", "convert 40 nowhere/new --to int8-sr"},
        {1, "plain is not finite in row 1, column 33; int8-sr cannot hold", "convert listed new --to int8-sr"},
    };
    static const struct {
        const char *list, *says;
    } lists[] = {
        {"[]", "halfstep.nn: byte 0"},
        {"{\"packed\": {\"format\": \"int8-sr\"", "halfstep.nn: byte 3"},
        {"{\"packed\": {\"format\": \"int9\", \"columns\": 40}}", "packed: unknown format 'int9'"},
        {"{\"other\": {\"format\": \"int8-sr\", \"columns\": 40}}", "names other, which the file does not hold"},
        {"{\"packed\": {\"format\": \"int8-sr\", \"columns\": 65}}", "packed has 65 columns in int8-sr, but its"},
        {"{\"packed\": {\"format\": \"int8-sr\", \"columns\": 9}}", "packed has 9 columns in int8-sr, but its"},
        {"{\"plain\": {\"format\": \"int8-sr\", \"columns\": 40}}", "plain has 40 columns in int8-sr, but its"},
        {"{\"a\": {}, \"b\": {}, \"c\": {}}", "more names than the file has tensors"},
    };
    char line[400], hash[28] = "no hash";
    snprintf(line, sizeof line, "%sadamw/bf16-sr --checkpoint 40", wide);
    accept("", line);
    make_packed("listed", "{\"packed\": {\"columns\": 40, \"by\": 1, \"format\": \"int8-ecc4\"}}");
    REFUSE_ALL(table);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        make_packed("wrong", lists[i].list);
        refuse(1, lists[i].says, "convert wrong new --to bf16");
    }
    /* Weights of other quantizers, by their tensors or by the config.json. */
    static const struct {
        const char *name, *dtype, *says;
    } others[] = {
        {"weight", "F8_E4M3", "weight is of a model in FP8, whose scales are no weights"},
        {"a.weight_scale_inv", "U8", "a.weight_scale_inv is of a model in FP8"},
        {"a.qweight", "U8", "a.qweight is of a model in AWQ or GPTQ"},
        {"a.weight.absmax", "U8", "a.weight.absmax is of a model in bitsandbytes"},
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        make_tensors("others", NULL, others[i].name, others[i].dtype);
        refuse(1, others[i].says, "convert others new --to bf16");
    }
    forge("base", "forged", "config.json", "{",
          "{\"quantization_config\": {\"bits\": [4], \"quant_method\": \"gptq\", \"a\": {}},");
    refuse(1, "config.json: the weights are quantized by gptq", "convert forged new --to int8-sr");
    remove_tree("forged");
    accept("halfstep.nn = {", "inspect wrong");
    accept("  2 x 68, int8-ecc4 of 40 columns\n", "inspect listed");
    accept("\"columns\": 40", "inspect listed --json");
    accept(": 1 tensors converted to bf16, 1 copied as they are", "convert listed zero --to bf16 --tensors packed");
    accept("  packed  BF16             160 bytes  2 x 40\n", "inspect zero");

    /* What was converted names its format, and is taken like what was trained. */
    accept(": 9 tensors converted to int8-ecc4, 3 copied as they are", "convert 40 small --to int8-ecc4");
    accept("256 x 68, int8-ecc4 of 40 columns", "inspect small");
    accept(": 9 tensors converted to int8-sr, 3 copied as they are", "convert small other-name --to int8-sr");
    accept("\"format\": \"f32\"", "convert other-name large --to f32 --json");
    snprintf(line, sizeof line, "%sadamw/int8-ecc4/int8 --heads 2 --init small --json", wide);
    accept("state_hash", line);
    snprintf(line, sizeof line, "%ssgd/int8-ecc4 --checkpoint trained", wide);
    accept("state hash ", line);
    const char *at = strstr(printed, "state hash ");
    if (at) snprintf(hash, sizeof hash, "%.27s", at);
    accept("", "generate --checkpoint trained --bytes 4 --threads 1");
    accept("256 x 68, int8-ecc4 of 40 columns", "inspect trained");
    /* Packed weights that a run begins with stay what they are, with their error codes. */
    snprintf(line, sizeof line, "%ssgd/int8-ecc4 --steps 0 --init trained", wide);
    accept(hash, line);
    CHECK(strstr(printed, "weights changed 0.00 %"), "%s", printed);
    snprintf(line, sizeof line, "%ssgd/int8-sr --steps 0 --init small --json", wide);
    accept("\"weights_changed_percent\": 0.0", line);
    accept(": 9 tensors converted to bf16, 3 copied as they are", "convert trained restored --to bf16");
    snprintf(line, sizeof line, "%sadamw/f32 --init trained --json", wide);
    accept("state_hash", line);
    /* Codes and error codes of other formats than the recipe says. */
    forge("trained", "forged", "optimizer.safetensors", "weight.extra\":{\"dtype\":\"U8\"",
          "weight.extra\":{\"dtype\":\"I8\"");
    CHECK(program(line) == 0, "%s", program_errors);
    snprintf(line, sizeof line, "%sadamw/f32 --init forged", wide);
    refuse(1, "which is not that of int8-ecc4 weights", line);
    forge("trained", "forged", "model.safetensors", "\"U8\",\"shape\":[256,68]", "\"U8\",\"shape\":[272,64]");
    refuse(1, "has shape [272, 64], this model needs [256, 68]", line);
    remove_tree("forged");
}

/* ---- Other commands ---------------------------------------------------------------------------------------------- */

/* Files of states: only inspect takes them. */
static void test_store(void)
{
    static const struct refusal table[] = {
        {2, "unknown option --store; save with --checkpoint DIR", LM "--store new"},
        {2, "unknown option --store; save with --checkpoint DIR", "train lm --store=new --resume"},
        {1, "cut", "inspect cut"},
        {1, "kept is a file of states", LM "--init kept"},
        {1, "kept is a file of states", "generate --checkpoint kept"},
        {1, "kept is a file of states", "plan --checkpoint kept"},
        {1, "kept is a file of states", "convert kept new --to bf16"},
        {2, "--to is store; it must be one of int8-sr, int8-ecc4, bf16, f32", "convert base new --to store"},
    };
    put_store("kept", "adamw/bf16-sr/int8", "adamw/bf16-sr/int8");
    put_store("groups", "adamw/bf16-sr/int8", "lion/bf16-ecc8/int8");
    put_file("cut", "halfstep states\n and no more", 28);
    uint64_t before = contents(".");
    accept("step 2, recipe adamw/bf16-sr/int8, seed 1", "inspect kept");
    CHECK(strstr(printed, "lm_head.weight  64 x 128, weight bf16-sr, exp_avg int8, exp_avg_sq int8\n"), "%s", printed);
    CHECK(strstr(printed, "  generator = lattice\n") && strstr(printed, " with weights\n"), "%s", printed);
    accept("\"saves\": 3,", "inspect kept --json");
    CHECK(strstr(printed, "\"exp_avg_sq\": {") && strstr(printed, "\"format\": \"bf16-sr\""), "%s", printed);
    accept("recipe of several groups, seed 1", "inspect groups");
    accept("\"recipe\": \"lion/bf16-ecc8/int8\"", "inspect groups --json");
    CHECK(contents(".") == before, "inspect has changed a file");
    REFUSE_ALL(table);
}

static void test_commands(void)
{
    accept("skipped", LM "--quiet --steps 3 --scan known-finite --json");
    accept("gradients added up in bf16", LM "--quiet --steps 3 --micro-steps 2 --accumulator bf16");
    accept("states", LM "--quiet --steps 3 --micro-steps 2 --accumulator states --release");
    accept("val", LM "--quiet --steps 3 --val text --sample-bytes 0");
    accept("step", LM "--steps 3 --val-every 1 --eval-batches 700");
    accept("accuracy", MNIST "--recipe lamb/f32 --log mnist.csv");
    FILE *log = fopen("mnist.csv", "r");
    demand(log && fgets(printed, sizeof printed, log), "no log");
    CHECK(strstr(printed, ",conv1.weight/"), "the log's columns: %s", printed);
    CHECK(fgets(printed, sizeof printed, log) && strstr(printed, "0,0,"), "%s", printed);
    fclose(log);
    accept("test_accuracy", MNIST "--recipe schedulefree/bf16-kahan --json --quiet");
    accept("test_accuracy", MNIST "--recipe adamw/bf16-ecc8/int8 --json --quiet");
    accept("that tensor is left unchanged", MNIST "--scan per-tensor --lr 1e6 --recipe sgd/f32 --epochs 3");
    accept("\"mean\"",
           COMPARE "--recipes adamw/f32,adamw/bf16:release:lr=1e-3 --seeds 2 --out a/b/c --json --val text");
    accept("report: a/b/c/report.html", COMPARE "--recipes adamw/f32 --out a/b/c");
    accept("", "inspect base");
    accept("", "inspect base --quick --json");
    accept("", "inspect empty.safetensors");
    accept("{", "inspect empty.safetensors --json");
    accept("", "generate --checkpoint free --bytes 9 --prompt abcdefgh --temperature 0 --threads 1");
    accept("\"text\"", "generate --checkpoint base --bytes 0 --json --threads 1");
    static const char pair[] =
        "bench --recipes adamw/bf16/bf16,adamw/bf16-sr/bf16-sr,lion/f16,muon/f32 --params 4096 --rounds 2 --threads 1 ";
    static char line[1 << 14];
    snprintf(line, sizeof line, "%s--tensors 1 --csv bench.csv", pair);
    accept("Stochastic rounding takes ", line);
    CHECK(strstr(printed, "GFLOP/s"), "%s", printed);
    snprintf(line, sizeof line, "%s--tensors 2 --gradients bf16 --generator mixer --json", pair);
    accept("\"sr_over_nearest\": ", line);
    strcpy(line, COMPARE "--recipes ");
    for (int i = 0; i < 66; i++) snprintf(line + strlen(line), 64, "%ssgd/f32@1e-%d", i ? "," : "", i);
    refuse(2, "more than 64 recipes", line);
    snprintf(line, sizeof line, COMPARE "--recipes adamw/f32@%0400d", 1);
    refuse(2, "is too long for a learning rate", line);
    snprintf(line, sizeof line, COMPARE "--recipes adamw/f32:lr=%0600d", 1);
    refuse(2, "is too long", line);
    snprintf(line, sizeof line, COMPARE "--out %0300d", 1);
    CHECK(program(line) == 1 && strstr(program_errors, "File name too long"), "%s", program_errors);
    CHECK(program(COMPARE "--out new --checkpoint text/there") == 1 &&
              strstr(program_errors, "cannot create directory text: Not a directory"),
          "%s", program_errors);
    /* Both come before the work begins, which takes minutes. */
    static const struct refusal table[] = {
        {1, "bench: cannot write nowhere/bench.csv: No such file", "bench --csv nowhere/bench.csv"},
        {1, "verify: cannot write nowhere/hashes.txt: No such file", "verify --write nowhere/hashes.txt"},
        {1, "verify: --write and --every exclude each other, because --write needs every case",
         "verify --every 2 --write hashes.txt"},
        {2, "--isa is sse9; it must be one of", "verify --isa sse9"},
        {2, "--count is 1.5; it must be a whole number", "random --generator mixer --count 1.5"},
        {2, "--slot is 0.5; it must be a whole number", "random --generator mixer --slot 0.5"},
        {2, "\"release\" takes no value", COMPARE "--recipes adamw/f32:release=1"},
        {2, "\"weight-decay\" needs a value", COMPARE "--recipes adamw/f32:weight_decay"},
        {1, "No such file", COMPARE "--out _"},
        {1, "Not a directory", COMPARE "--out text/there"},
        {1, "cannot write the log /dev/full: No space left on device", MNIST "--log /dev/full"},
        {2, "--hyper lr: use --lr", COMPARE "--hyper lr=3"},
        {2, "is not a number of images", "compare mnist --batch 1.5"},
        {2, "is not a number of images", "compare mnist --batch 0"},
        {2, "is not a number of images", "compare mnist --batch 2e6"},
        {2, "is not a number of images", "compare mnist --batch 00000000000000000000000000000000000001"},
        {2, "--batch: it is empty", "compare mnist --batch _"},
        {2, "more than", "compare mnist --batch 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20"},
    };
    REFUSE_ALL(table);
}

/* ---- Logs -------------------------------------------------------------------------------------------------------- */

static void test_logs(void)
{
    static const char header[] = "step,train_loss,val_loss,lr,gradient_norm,tokens_per_s,seconds,skipped_steps\n";
    static const struct {
        const char *before, *kept; /* kept: NULL if it is refused */
    } table[] = {
        {"", ""},
        {"step,train_loss\n", NULL},
        {"other\n", NULL},
        {"step,train_loss,val_loss,lr,gradient_norm,tokens_per_s,seconds,skipped_steps", NULL},
        {"*1,1,1,1,1,1,1,0\n2,1,1,1,1,1,1,0\n3,1,1,1,1,1,1,0\n", "1,1,1,1,1,1,1,0\n2,1,1,1,1,1,1,0\n"},
        {"*1,1,1,1,1,1,1,0\n2,1,1", "1,1,1,1,1,1,1,0\n"},
        {"*1,1,1,1,1,1,1,0\nabc\n", "1,1,1,1,1,1,1,0\n"},
        {"*1,1,1,1,1,1,1,0\n2\n", "1,1,1,1,1,1,1,0\n"},
    };
    char text[600], after[600];
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const char *rows = table[i].before + (table[i].before[0] == '*');
        snprintf(text, sizeof text, "%s%s", table[i].before[0] == '*' ? header : "", rows);
        put_file("log.csv", text, strlen(text));
        forge("base", "run", "trainer.json", "", "");
        int status = program(RESUME "run --data text --steps 3 --log log.csv");
        size_t n = get_file("log.csv", (uint8_t *)after, sizeof after - 1);
        after[n] = 0;
        if (!table[i].kept) {
            CHECK(status == 1 && strstr(program_errors, "the file is not a log that can be continued"), "%zu: %s", i,
                  program_errors);
            CHECK(!strcmp(after, text), "%zu: the file has changed", i);
            continue;
        }
        snprintf(text, sizeof text, "%s%s3,", header, table[i].kept);
        CHECK(status == 0 && !strncmp(after, text, strlen(text)), "%zu: status %d, %s%s", i, status, program_errors,
              after);
        CHECK(strchr(after + strlen(text), '\n') == after + n - 1, "%zu: rows after the last: %s", i, after);
    }
    accept("\"steps\": 3", LM "--quiet --steps 3 --json --log /dev/null");
    refuse(1, "cannot write the log /dev/full: No space left on device", LM "--steps 3 --log /dev/full");
    refuse(1, "cannot write the log base: ", LM "--steps 3 --log base");
    CHECK(program(RESUME "run --data text --steps 4 --log /dev/full") == 1 && strstr(program_errors, "No space left"),
          "%s", program_errors);
}

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

/* ---- Files of other programs ------------------------------------------------------------------------------------- */

/* Makes the folder `other`, with the weights of base in one file, and a config.json with base's usual members and those
 * given. A member that begins with "-" is left out. */
static void make_other(const char *const *member, size_t members)
{
    static const char *const usual[] = {"\"model_type\": \"llama\"",  "\"architectures\": [\"LlamaForCausalLM\"]",
                                        "\"vocab_size\": 256",        "\"hidden_size\": 8",
                                        "\"intermediate_size\": 32",  "\"num_hidden_layers\": 1",
                                        "\"num_attention_heads\": 2", "\"max_position_embeddings\": 4",
                                        "\"rms_norm_eps\": 1e-05"};
    static uint8_t data[1 << 17];
    char text[4000] = "{\"use_cache\": true, \"torch_dtype\": \"float32\"";
    remove_tree("other");
    demand(!mkdir("other", 0777), "no folder");
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        int instead = 0;
        for (size_t m = 0; m < members; m++) {
            const char *name = member[m] + (member[m][0] == '-');
            instead |= !strncmp(usual[i], name, strcspn(name + 1, "\"") + 2);
        }
        if (!instead) snprintf(text + strlen(text), sizeof text - strlen(text), ", %s", usual[i]);
    }
    for (size_t m = 0; m < members; m++)
        if (member[m][0] != '-') snprintf(text + strlen(text), sizeof text - strlen(text), ", %s", member[m]);
    strcat(text, "}\n");
    put_file("other/config.json", text, strlen(text));
    size_t bytes = get_file("base/model.safetensors", data, sizeof data);
    put_file("other/model.safetensors", data, bytes);
}

static const char from_file[] =
    "train lm --data text --batch 2 --eval-batches 1 --sample-bytes 4 --threads 1 --steps 0 "
    "--quiet --init other/model.safetensors",
                  from_folder[] = "train lm --data text --batch 2 --eval-batches 1 --sample-bytes 4 --threads 1 "
                                  "--steps 0 --quiet --init other";

/* A model with features that this one lacks is refused by the member that asks for them. */
static void test_others_refused(void)
{
    static const struct {
        const char *member, *says;
    } table[] = {
        {"-\"model_type\"", "\"model_type\" is missing; it must be \"llama\" or \"mistral\""},
        {"\"model_type\": \"qwen2\"", "\"model_type\" is \"qwen2\"; it must be \"llama\" or \"mistral\""},
        {"\"architectures\": [\"GemmaForCausalLM\"]", "\"architectures\" is \"GemmaForCausalLM\""},
        {"\"architectures\": [\"LlamaForCausalLM\", \"LlamaModel\"]", "\"architectures\" is \"LlamaModel\""},
        {"-\"hidden_size\"", "\"hidden_size\" is missing"},
        {"\"hidden_size\": null", "\"hidden_size\" is missing"},
        {"\"vocab_size\": 32000", "vocabulary size 32000 is not 256, that of a byte-level model"},
        {"\"num_key_value_heads\": 1", "\"num_key_value_heads\" is 1; it must be \"num_attention_heads\", which is 2"},
        {"\"head_dim\": 8", "\"head_dim\" is 8; it must be \"hidden_size\" / \"num_attention_heads\" = 8 / 2"},
        {"\"hidden_act\": \"gelu\"", "\"hidden_act\" is \"gelu\"; it must be \"silu\" or \"swish\", because"},
        {"\"hidden_activation\": \"gelu_pytorch_tanh\"", "\"hidden_activation\" is \"gelu_pytorch_tanh\""},
        {"\"attention_bias\": true", "\"attention_bias\" is true; it must be false or null"},
        {"\"mlp_bias\": true", "\"mlp_bias\" is true"},
        {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\" is true"},
        {"\"rms_norm_eps\": 0", "\"rms_norm_eps\" is 0; it must be a number above 0"},
        {"\"rms_norm_eps\": \"1e-5\"", "\"rms_norm_eps\" is \"1e-5\"; it must be a number above 0"},
        {"\"rope_theta\": 0", "\"rope_theta\" is 0"},
        {"\"rope_theta\": 500, \"rope_parameters\": {\"rope_theta\": 600}",
         "\"rope_parameters.rope_theta\" is 600, but another member says 500; they must agree"},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", "\"rope_scaling.rope_type\" is \"linear\""},
        {"\"rope_scaling\": {\"factor\": 2, \"rope_type\": \"llama3\"}", "\"rope_scaling.rope_type\" is \"llama3\""},
        {"\"rope_scaling\": 2", "\"rope_scaling\" is 2; it must be an object or null"},
        {"\"rope_parameters\": {\"rope_type\": \"yarn\", \"type\": \"default\"}", "rope_type\" is \"yarn\""},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e4}}",
         "\"rope_parameters.full_attention\" is given"},
        {"\"rope_parameters\": {\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5}",
         "\"rope_parameters.partial_rotary_factor\" is given"},
        {"\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\" is 0.25; it must be 1 or null"},
        {"\"sliding_window\": 3", "\"sliding_window\" is 3; it must be null or at least the context, which is 4"},
        {"\"layer_types\": [\"full_attention\", \"sliding_attention\"]", "\"layer_types\" is \"sliding_attention\""},
        {"\"quantization_config\": {\"bits\": 4}", "\"quantization_config\" is an object; it must be null"},
        {"\"auto_map\": {\"AutoModel\": \"m.M\"}", "\"auto_map\" is an object"},
        {"\"final_logit_softcapping\": 30.0", "\"final_logit_softcapping\" is 30; it must be null"},
        {"\"embedding_multiplier\": 12", "\"embedding_multiplier\" is 12; it must be 1 or null"},
        {"\"num_local_experts\": 8", "\"num_local_experts\" is 8"},
        {"\"hidden_size\": 8, \"hidden_size\": 8", "a name twice"},
        {"\"hidden_size\": 8, \"x\": NaN", "config.json: byte "},
        {"\"hidden_act\": \"gelu\", \"x\": ", "config.json: byte "},
        {"\"hidden_act\": \"\\u001b]0;x\\u0007\"", "\"hidden_act\" is \"\\x1b]0;x\\x07\""},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        make_other(&table[i].member, 1);
        refuse(1, table[i].says, from_file);
        CHECK(strstr(program_errors, "train lm: other/config.json: "), "no path: %s", program_errors);
        if (i % 8) continue;
        refuse(1, table[i].says, from_folder);
        refuse(1, table[i].says, "plan --checkpoint other");
        refuse(1, table[i].says, "generate --checkpoint other");
    }
    static const char *const window[] = {"\"model_type\": \"mistral\"", "\"sliding_window\": 3",
                                         "\"num_key_value_heads\": 2"},
                             *const grouped[] = {"\"model_type\": \"mistral\""};
    char line[500];
    make_other(window, 3);
    snprintf(line, sizeof line, "%s --context 3", from_file);
    accept("5144 parameters", line);
    /* Mistral's default, where the file says nothing. */
    make_other(grouped, 1);
    refuse(1, "\"num_key_value_heads\" is 8; it must be \"num_attention_heads\", which is 2", from_file);
    static const char *const options[] = {"--heads 4", "--depth 3", "--width 16"};
    make_other(NULL, 0);
    for (int i = 0; i < 3; i++) {
        char pattern[300];
        snprintf(line, sizeof line, "%s %s", from_file, options[i]);
        snprintf(pattern, sizeof pattern,
                 "%.7s is %s, but the config.json of --init other/model.safetensors says %c; "
                 "leave %.7s out",
                 options[i], options[i] + 8, "218"[i], options[i]);
        refuse(2, pattern, line);
    }
    refuse(2, "--log would overwrite other/config.json, which is config.json of --init",
           "train lm --data text --steps 1 --init other/model.safetensors --log other/config.json");
    unlink("other/config.json");
    refuse(2, "--heads is missing: --init other/model.safetensors has no config.json beside it", from_file);
    refuse(1, "plan: other: there is neither a checkpoint nor a config.json", "plan --checkpoint other");
    refuse(1, "generate: other has no config.json beside it, which says how many heads the model has; put it there, or",
           "generate --checkpoint other");
    refuse(1, "other is a model in 1 file, not a checkpoint; inspect a file, such as other/model.safetensors",
           "inspect other");
    refuse(1, "plan: short: there is neither a checkpoint nor", "plan --checkpoint short");
    demand(!mkdir("other/config.json", 0777), "no folder");
    refuse(1, "other/config.json: is not a regular file", from_file);
    unlink("other/model.safetensors");
    refuse(1, "no checkpoint in other: there is no manifest.json, nor a model.safetensors or its index", from_folder);
}

/* Numbers that a model may have are taken from the file, and pass through checkpoints. */
static void test_others_taken(void)
{
    static const char *const scaled[] = {"\"rms_norm_eps\": 0.25",
                                         "\"rope_parameters\": {\"rope_theta\": 300.5, \"rope_type\": \"default\"}",
                                         "\"pretraining_tp\": 2",
                                         "\"head_dim\": 4",
                                         "\"hidden_act\": \"swish\"",
                                         "\"layer_types\": [\"full_attention\"]",
                                         "\"sliding_window\": null",
                                         "\"partial_rotary_factor\": 1.0"},
                             *const old[] = {"\"rms_norm_eps\": 0.25", "\"rope_theta\": 300.5",
                                             "\"rope_scaling\": {\"type\": \"default\"}"},
                             *const silent[] = {"-\"rms_norm_eps\"", "-\"architectures\""},
                             *const odd[] = {"\"sinks\": 3", "\"also\\u001b[31m\": [1]", "\"nothing\": null",
                                             "\"off\": false"};
    static char text[4000];
    /* The same weights give the same text, from wherever they are read. */
    static const char *const places[] = {"base", "other", "other/model.safetensors"};
    make_other(NULL, 0);
    for (int i = 0; i < 3; i++) {
        char speak[200];
        snprintf(speak, sizeof speak, "generate --checkpoint %s --bytes 40 --threads 1", places[i]);
        accept("", speak);
        if (i) EQUAL_TEXT(printed, text);
        else snprintf(text, sizeof text, "%.3000s", printed);
    }
    make_other(scaled, 8);
    remove_tree("taken");
    char line[600], hash[64] = "";
    snprintf(line, sizeof line, "%s --steps 2 --json", from_file);
    accept("\"notes\": []", line);
    const char *at = strstr(printed, "\"state_hash\"");
    if (at) snprintf(hash, sizeof hash, "%.36s", at);
    make_other(old, 3);
    accept(hash, line);
    snprintf(line, sizeof line, "%s --steps 1 --checkpoint taken", from_folder);
    accept("", line);
    text[get_file("taken/config.json", (uint8_t *)text, sizeof text - 1)] = 0;
    CHECK(strstr(text, "\"rms_norm_eps\": 0.25,") && strstr(text, "\"rope_theta\": 300.5,"), "%s", text);
    accept(hash, RESUME "taken --steps 2 --json");
    remove_tree("taken");
    /* transformers' number where a config.json has none. */
    make_other(silent, 2);
    snprintf(line, sizeof line, "%s --checkpoint taken", from_file);
    accept("", line);
    text[get_file("taken/config.json", (uint8_t *)text, sizeof text - 1)] = 0;
    CHECK(strstr(text, "\"rms_norm_eps\": 9.9999999999999995e-07,"), "%s", text);
    remove_tree("taken");
    make_other(odd, 4);
    accept("note: other/config.json: unknown members are ignored: sinks, also\\x1b[31m\n", from_file);
    accept("note: other/config.json: unknown members are ignored: sinks, also\\x1b[31m\n",
           "generate --checkpoint other --bytes 1 --threads 1");
    unlink("other/config.json");
    snprintf(line, sizeof line, "%s --width 8 --depth 1 --heads 2 --context 4", from_file);
    accept("has no config.json beside it: assuming 2 heads, rms_norm_eps 1e-05 and rope_theta 10000", line);
}

/* Copies the header and data of base's weights with some bytes of the header changed. Its length stays. */
static void put_weights(const char *path, const char *old, const char *new)
{
    static uint8_t data[1 << 17];
    size_t bytes = get_file("base/model.safetensors", data, sizeof data), length = strlen(old), at = 0;
    while (at + length <= bytes && memcmp(data + at, old, length)) at++;
    demand(at + length <= bytes && strlen(new) == length, old);
    memcpy(data + at, new, length);
    put_file(path, data, bytes);
}

/* Saves the checkpoint `from` again as `to`, with one file replaced. */
static void forge_with(const char *from, const char *to, const char *changed, const char *instead)
{
    static uint8_t data[1 << 17];
    char error[600], path[300];
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .step = 2, .no_sync = 1};
    demand(!halfstep_begin_checkpoint(&save, to, &options, error, sizeof error), error);
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        snprintf(path, sizeof path, "%s/%s", from, names[f]);
        size_t bytes = get_file(strcmp(names[f], changed) ? path : instead, data, sizeof data);
        demand(!halfstep_save_file(save, names[f], data, bytes, error, sizeof error), error);
    }
    demand(!halfstep_commit_checkpoint(save, error, sizeof error), error);
}

/* Every tensor of the files is one of the model, wherever it lies. */
static void test_others_tensors(void)
{
    static const char two[] = "{\"metadata\": {\"total_size\": 8}, \"weight_map\": {\"lm_head.weight\": \"a\", "
                              "\"model.norm.weight\": \"b\"}}";
    static const struct {
        const char *map, *says;
    } table[] = {
        {"[]", "model.safetensors.index.json: byte 0: expected '{'"},
        {"{}", "model.safetensors.index.json: \"weight_map\" names no file"},
        {"{\"weight_map\": {}}", "\"weight_map\" names no file"},
        {"{\"weight_map\": {\"lm_head.weight\": 1}}", "expected a string"},
        {"{\"weight_map\": {\"lm_head.weight\": \"../base/model.safetensors\"}}",
         "names \"../base/model.safetensors\"; it must be a file in the folder of the index"},
        {"{\"weight_map\": {\"lm_head.weight\": \"..\"}}", "names \"..\"; it must be"},
        {"{\"weight_map\": {\"lm_head.weight\": \"c\"}}", "other/c: "},
        {"{\"weight_map\": {\"lm_head.bias\": \"a\"}}", "has the tensor \"lm_head.bias\" in a, which does not hold it"},
        {"{\"weight_map\": {\"lm_head.weight\": \"a\"}, \"weight_map\": {}}", "a name twice"},
        {"{\"weight_map\": {\"lm_head.weight\": \"a\", \"lm_head.weight\": \"b\"}}",
         "other/b: model.embed_tokens.weight is in other/a as well; remove one of them"},
        {"{\"weight_map\": {\"lm_head.weight\": \"a\"}} ]", "more than one value"},
    };
    make_other(NULL, 0);
    put_weights("other/model.safetensors", "self_attn.q_proj.weight", "self_attn.q_proj.weighs");
    refuse(1, "other/model.safetensors: there is no tensor model.layers.0.self_attn.q_proj.weight", from_file);
    make_other(NULL, 0);
    halfstep_safetensors *file;
    halfstep_safetensors_writer *whole, *part[2];
    char error[600];
    demand(!halfstep_open_safetensors(&file, "base/model.safetensors", error, sizeof error), error);
    demand(!halfstep_create_safetensors_writer(&whole) && !halfstep_create_safetensors_writer(&part[0]) &&
               !halfstep_create_safetensors_writer(&part[1]),
           "no writer");
    static const uint64_t two_elements[] = {2};
    static float zeros[1 << 12];
    for (uint64_t i = 0; i < halfstep_safetensor_count(file); i++) {
        halfstep_safetensor_info info = {.struct_size = sizeof info};
        demand(!halfstep_get_safetensor_info(file, i, &info) && info.bytes <= sizeof zeros, "a tensor of base");
        demand(!halfstep_declare_safetensor(whole, info.name, info.dtype, info.ndim, info.shape, zeros, error,
                                            sizeof error) &&
                   !halfstep_declare_safetensor(part[strstr(info.name, "norm") != NULL], info.name, info.dtype,
                                                info.ndim, info.shape, zeros, error, sizeof error),
               error);
    }
    demand(!halfstep_declare_safetensor(whole, "model.layers.0.self_attn.q_proj.bias", "F32", 1, two_elements, zeros,
                                        error, sizeof error) &&
               !halfstep_declare_safetensor(whole, "model.layers.1.mlp.up_proj.weight", "F32", 1, two_elements, zeros,
                                            error, sizeof error),
           error);
    demand(!halfstep_write_safetensors(whole, "other/model.safetensors", NULL, NULL, error, sizeof error), error);
    /* In a checkpoint, too. */
    demand(!rename("other/model.safetensors", "more.safetensors"), "no rename");
    forge_with("base", "forged", "model.safetensors", "more.safetensors");
    refuse(1, "2 tensors are no part of a Llama", "generate --checkpoint forged --bytes 2 --threads 1");
    remove_tree("forged");
    demand(!rename("more.safetensors", "other/model.safetensors"), "no rename");
    refuse(1,
           "other/model.safetensors: 2 tensors are no part of a Llama without biases of 1 layer, the first is "
           "model.layers.",
           from_file);
    unlink("other/model.safetensors");
    demand(!halfstep_write_safetensors(part[0], "other/a", NULL, NULL, error, sizeof error) &&
               !halfstep_write_safetensors(part[1], "other/b", NULL, NULL, error, sizeof error),
           error);
    put_file("other/model.safetensors.index.json", two, sizeof two - 1);
    accept("5144 parameters", from_folder);
    accept("5144 parameters", "train lm --data text --batch 2 --eval-batches 1 --threads 1 --steps 0 --quiet --init "
                              "other/model.safetensors.index.json");
    accept("", "generate --checkpoint other --bytes 2 --threads 1");
    accept("", "generate --checkpoint other/model.safetensors.index.json --bytes 2 --threads 1");
    refuse(1, "; the whole model is other/model.safetensors.index.json", "generate --checkpoint other/a");
    refuse(1, "other is a model in 2 files, not a checkpoint; inspect a file, such as other/a", "inspect other");
    refuse(1, "is a model in 2 files, not a checkpoint; inspect a file, such as other/a",
           "inspect other/model.safetensors.index.json");
    put_weights("other/a", "F32", "F32");
    put_weights("other/b", "F32", "F32");
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        put_file("other/model.safetensors.index.json", table[i].map, strlen(table[i].map));
        refuse(1, table[i].says, from_folder);
    }
    halfstep_destroy_safetensors_writer(whole);
    halfstep_destroy_safetensors_writer(part[0]);
    halfstep_destroy_safetensors_writer(part[1]);
    halfstep_close_safetensors(file);
    /* compare goes on with the model that its runs began with. */
    static const char *const scaled[] = {"\"rms_norm_eps\": 0.25"};
    make_other(NULL, 0);
    accept("", COMPARE "--recipes adamw/f32 --init other --out report --checkpoint runs");
    make_other(scaled, 1);
    CHECK(program(COMPARE "--steps 3 --recipes adamw/f32 --init other --out report --checkpoint runs --resume") == 1 &&
              strstr(program_errors, "\"rms_norm_eps\" of the model is 0.25 here but 1e-05 in runs/"),
          "%s", program_errors);
    remove_tree("runs");
    remove_tree("report");
    remove_tree("other");
}

/* Checks that every byte of a file that a command prints is one that a terminal shows, on stdout and in errors. The
 * files' texts are names and metadata of tensors, names of files, and options of a run. JSON keeps the very text. */
static void test_others_printed(void)
{
    static const char header[] = "{\"__metadata__\":{\"no\\u001bte\":\"x\\u001b]52;c;aGk=\\u0007\\n\\u009b2J\"},"
                                 "\"a\\u001b[31m\\r\\u202eb\\u007f\": "
                                 "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    static const struct refusal table[] = {
        {1, "inspect: cannot open e?[31m???: ", "inspect e\033[31m\xc2\x9b\xff"},
        {1, "inspect: odd: tensor \"a?[31m????b?\": ", "inspect odd"},
        {2, "unexpected argument \\x1b[2J", "plan --params 1e6 \033[2J"},
        {2, "unknown option --\\x1b[2J", "plan --\033[2J"},
        {2, "unknown command \\x1b[2J", "\033[2J"},
        {2, "--lr: \"\\x1b[2J\" is not a number", LM "--lr \033[2J"},
        {1, "train lm: cannot open e\\x1b[31m", LM "--init e\033[31m"},
    };
    uint8_t file[600] = {0};
    size_t n = sizeof header - 1;
    file[0] = (uint8_t)n;
    file[1] = (uint8_t)(n >> 8);
    memcpy(file + 8, header, n);
    put_file("esc\033[31m", file, 8 + n + 8);
    put_file("odd", file, 8 + n + 7);
    accept("  no\\x1bte = x\\x1b]52;c;aGk=\\x07\\x0a\\xc2\\x9b2J\n  a\\x1b[31m\\x0d\\xe2\\x80\\xaeb\\x7f  F32 ",
           "inspect esc\033[31m");
    CHECK(!strncmp(printed, "esc\\x1b[31m\n", 12), "the file's name: %s", printed);
    accept("\"no\\u001Bte\": \"x\\u001B]52;c;aGk=\\u0007\\n\\u009B2J\"", "inspect esc\033[31m --json");
    CHECK(strstr(printed, "\"name\": \"a\\u001B[31m\\r\\u202Eb\\u007F\"") &&
              strstr(printed, "\"file\": \"esc\\u001B[31m\""),
          "JSON: %s", printed);
    REFUSE_ALL(table);
    /* A checkpoint whose run has such texts. */
    forge("base", "forged", "trainer.json", "\"generator\": \"",
          "\"by\\u001b[31m\": \"\\u009b2J\", \"generator\": \"\\u001b[0m");
    accept("--by\\x1b[31m \\xc2\\x9b2J", "inspect forged");
    CHECK(!strchr(printed, '\033') && strstr(printed, "--generator \\x1b[0m"), "%s", printed);
    refuse(1, "generator is \\x1b[0m", RESUME "forged --data text --steps 3");
    forge("base", "forged", "optimizer.safetensors", "adamw/f32/f32", "adx\\u001b/f32");
    accept(", recipe adx\\x1b/f32, seed ", "inspect forged");
    remove_tree("forged");
    accept("saved in c\\x1b[31m\n", LM "--quiet --steps 0 --checkpoint c\033[31m");
    make_other(NULL, 0);
    unlink("other/config.json");
    demand(!rename("other", "f\033[31m"), "no rename");
    accept("note: --init f\\x1b[31m/model.safetensors", LM "--quiet --steps 0 --init f\033[31m/model.safetensors");
    for (int e = 0; e < 2; e++) CHECK(!strchr(e ? program_errors : printed, '\033'), "an escape: %s", program_errors);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch();
    demand(!chdir(scratch), "no folder");
    static char text[4000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(32 + i * i % 91);
    put_file("text", text, sizeof text);
    put_file("short", text, 12);
    put_file("empty.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
    demand(!program(LM "--quiet --steps 2 --recipe adamw/f32 --checkpoint base"), program_errors);
    demand(!program(LM "--quiet --steps 2 --recipe adamw/bf16-kahan --checkpoint kahan"), program_errors);
    demand(!program(LM "--quiet --steps 2 --recipe schedulefree/f32 --checkpoint free"), program_errors);
    demand(!program(LM "--quiet --steps 2 --val text --checkpoint val"), program_errors);
    demand(!program(LM "--quiet --steps 2 --hyper beta1=0.8 --beta2 0.9 --checkpoint hyper"), program_errors);
    TEST("words") test_words();
    TEST("options of any table") test_tables();
    TEST("lists of paths") test_path_lists();
    TEST("plan") test_plan();
    TEST("forged checkpoints") test_forged();
    TEST("resuming") test_resume();
    TEST("packed weights") test_convert();
    TEST("files of states") test_store();
    TEST("other commands") test_commands();
    TEST("logs") test_logs();
    TEST("terminals") test_terminal();
    TEST("bytes on a terminal") test_bytes();
    TEST("files of other programs: what is refused") test_others_refused();
    TEST("files of other programs: what is taken") test_others_taken();
    TEST("files of other programs: tensors") test_others_tensors();
    TEST("files of other programs: what is printed of them") test_others_printed();
    demand(!chdir("/"), "no root");
    return test_done();
}
