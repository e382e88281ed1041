/* Runs the program in this process and checks its answers to words, folders and checkpoints of every kind. Over 500
 * lines because its tables are most of it. */
#define HALFSTEP_ADVANCED
#include "answers.h"
#include "common/args/args.h"
#include "trainer/run/run.h"

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

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_text_and_base();
    put_file("empty.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
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
    demand(!chdir("/"), "no root");
    return test_done();
}
