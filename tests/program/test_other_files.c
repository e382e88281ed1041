/* Gives the program files of other programs: models that it refuses, that it takes, and what it prints of them. */
#define HALFSTEP_ADVANCED
#include "answers.h"
#include "common/args/args.h"

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
    make_text_and_base();
    TEST("files of other programs: what is refused") test_others_refused();
    TEST("files of other programs: what is taken") test_others_taken();
    TEST("files of other programs: tensors") test_others_tensors();
    TEST("files of other programs: what is printed of them") test_others_printed();
    demand(!chdir("/"), "no root");
    return test_done();
}
