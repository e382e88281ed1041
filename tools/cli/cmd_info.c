#define HALFSTEP_ADVANCED
#include <stdio.h>
#include <string.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/args/recipes.h"
#include "trainer/run/run.h"

struct info {
    int json;
};

static const struct option rows[] = {OPTION_JSON(struct info)};

static void put_names(struct document *d, json_t *in, const char *key, const char *(*name)(int32_t index))
{
    json_t *array = put_array(d, in, key);
    const char *each;
    for (int32_t i = 0; (each = name(i)) != NULL; i++) put_text(d, array, NULL, each);
}

static void put_choices(struct document *d, json_t *in, const char *key, const char *choice)
{
    json_t *array = put_array(d, in, key);
    const char *each;
    for (int32_t i = 0; (each = halfstep_choice_value(choice, i)) != NULL; i++) put_text(d, array, NULL, each);
}

/* ---- GPUs ---- */

static halfstep_device_info gpu_info(int32_t number)
{
    char name[24];
    halfstep_device_info info = {.struct_size = sizeof info};
    snprintf(name, sizeof name, "cuda:%d", (int)number);
    halfstep_get_device_info(name, &info);
    return info;
}

static void put_gpus(struct document *d, json_t *in)
{
    halfstep_device_info info = gpu_info(0);
    json_t *cuda = put_object(d, in, "cuda");
    put_integer(d, cuda, "driver", info.driver);
    put_integer(d, cuda, "minimum_driver", info.minimum_driver);
    put_text(d, cuda, "code", info.code);
    if (!info.usable) put_text(d, cuda, "unusable", halfstep_error_detail(NULL));
    json_t *gpus = put_array(d, cuda, "gpus");
    for (int32_t i = 0, n = info.devices; i < n; i++) {
        info = gpu_info(i);
        json_t *gpu = put_object(d, gpus, NULL);
        put_text(d, gpu, "name", info.name);
        put_integer(d, gpu, "compute", info.compute);
        put_integer(d, gpu, "multiprocessors", info.multiprocessors);
        put_integer(d, gpu, "bytes", (int64_t)info.memory);
        put_integer(d, gpu, "usable", info.usable);
    }
}

#define DOT(number) (int)(number) / 1000, (int)(number) % 1000 / 10

static void print_gpus(void)
{
    halfstep_device_info info = gpu_info(0);
    if (!info.usable) printf("%-15snone: %s\n", "GPUs", halfstep_error_detail(NULL));
    for (int32_t i = 0; i < info.devices; i++) {
        halfstep_device_info gpu = gpu_info(i);
        printf("%-15scuda:%d, %s, compute capability %d.%d, %d multiprocessors, %.1f GB%s\n", i ? "" : "GPUs", (int)i,
               gpu.name, (int)gpu.compute / 10, (int)gpu.compute % 10, (int)gpu.multiprocessors,
               (double)gpu.memory * 1e-9, gpu.usable ? "" : " (not usable)");
    }
    printf("%-15s%s\n%-15sCUDA %d.%d or newer is needed, ", "device code", halfstep_device_code(), "driver",
           DOT(info.minimum_driver));
    if (info.driver) printf("%d.%d found\n", DOT(info.driver));
    else printf("none found\n");
}

static void version(char text[32])
{
    int32_t v = halfstep_version();
    snprintf(text, 32, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

int check_device(const char *command, const char *device)
{
    halfstep_device_info info = {.struct_size = sizeof info};
    if (!device || !strcmp(device, "cpu")) return 0;
    if (halfstep_get_device_info(device, &info))
        return failure(command, "unknown device '%s'; known: cpu, cuda, cuda:N", device);
    return info.usable ? 0 : failure(command, "%s: %s", device, halfstep_error_detail(NULL));
}

static int print_object(const char *features)
{
    char number[32];
    version(number);
    struct document d;
    json_t *object = document_begin(&d);
    put_text(&d, object, "version", number);
    put_integer(&d, object, "abi", halfstep_abi());
    put_text(&d, object, "isa", halfstep_isa());
    json_t *isas = put_array(&d, object, "isas");
    for (int32_t i = 0; i < halfstep_isa_count(); i++)
        if (halfstep_isa_available(i)) put_text(&d, isas, NULL, halfstep_isa_name(i));
    put_text(&d, object, "cpu_features", features);
    put_integer(&d, object, "threads", halfstep_default_threads());
    put_gpus(&d, object);
    put_names(&d, object, "rules", rule_name);
    put_names(&d, object, "weight_formats", weight_format_name);
    put_names(&d, object, "state_formats", state_format_name);
    put_names(&d, object, "gradient_formats", gradient_format_name);
    put_choices(&d, object, "schedules", "schedule");
    put_choices(&d, object, "decays", "decay");
    put_choices(&d, object, "generators", "generator");
    return document_print(&d);
}

static void print_rules(void)
{
    printf("\nRules\n");
    for (int32_t i = 0; i < halfstep_rule_count(); i++) {
        const halfstep_rule_info info = rule_info(i);
        char full[RECIPE_BYTES];
        if (halfstep_recipe_full(info.name, full, sizeof full) != HALFSTEP_OK) full[0] = 0;
        printf("  %-13s %s\n  %-13s states:%s", info.name, info.title, "", info.states ? "" : " none");
        for (int32_t s = 0; s < info.states; s++) printf(" %s", info.state_name[s]);
        printf("; decay: %s; in full: %s\n", info.decay, full);
        char precise[200];
        precise_states_text(&info, precise, sizeof precise);
        if (*precise) printf("  %-13s %s\n", "", precise);
    }
}

/* ---- One rule ---- */

static halfstep_hyper_info hyper_info(int32_t rule, int32_t index)
{
    halfstep_hyper_info info = {.struct_size = sizeof info};
    halfstep_get_hyper_info(rule, index, &info);
    return info;
}

static int print_rule_object(int32_t rule)
{
    const halfstep_rule_info info = rule_info(rule);
    struct document d;
    json_t *object = document_begin(&d);
    put_text(&d, object, "rule", info.name);
    put_text(&d, object, "title", info.title);
    put_text(&d, object, "decay", info.decay);
    json_t *states = put_array(&d, object, "states"), *hypers = put_array(&d, object, "hyper_parameters");
    for (int32_t i = 0; i < info.states; i++) put_text(&d, states, NULL, info.state_name[i]);
    for (int32_t i = 0; i < info.hypers; i++) {
        const halfstep_hyper_info hyper = hyper_info(rule, i);
        json_t *each = put_object(&d, hypers, NULL);
        put_text(&d, each, "name", hyper.name);
        put_number(&d, each, "default", hyper.initial);
        put_text(&d, each, "title", hyper.title);
    }
    return document_print(&d);
}

static int print_rule(int32_t rule)
{
    const halfstep_rule_info info = rule_info(rule);
    printf("%-22s%s\n%-22s", info.name, info.title, "states");
    for (int32_t i = 0; i < info.states; i++) printf("%s%s", i ? " " : "", info.state_name[i]);
    printf("%s\n%-22s%s\n\n%-22s%s\n", info.states ? "" : "none", "decay", info.decay, "Hyper-parameter", "default");
    for (int32_t i = 0; i < info.hypers; i++) {
        const halfstep_hyper_info hyper = hyper_info(rule, i);
        printf("%-22s%-11g%s%s", hyper.name, hyper.initial, hyper.title, hyper.per_optimizer ? " (optimizer)" : "");
        const char *value;
        for (int32_t v = 0; (value = halfstep_choice_value(hyper.name, v)) != NULL; v++)
            printf("%s%s", v ? ", " : "; choices: ", value);
        printf("\n");
    }
    return 0;
}

static void print_formats(void)
{
    static const struct {
        int32_t roles;
        const char *name;
    } uses[] = {{HALFSTEP_ROLE_WEIGHT, "weights"},
                {HALFSTEP_ROLE_GRADIENT, "gradients"},
                {HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG, "states"}};
    printf("\nFormats        bytes\n");
    for (int32_t i = 0; i < halfstep_format_count(); i++) {
        const halfstep_format_info info = format_info(i);
        double bytes =
            (info.code_bits + info.extra_bits) / 8.0 + (info.block ? (double)info.scale_bytes / info.block : 0);
        printf("  %-12s %6.4g  %-46s", info.name, bytes, info.title);
        const char *separator = "";
        for (int u = 0; u < COUNT_OF(uses); u++) {
            if (!(info.roles & uses[u].roles)) continue;
            printf("%s%s", separator, uses[u].name);
            separator = ", ";
        }
        printf("\n");
    }
}

static void print_choice(const char *title, const char *choice)
{
    const char *each;
    printf("%-15s", title);
    for (int32_t i = 0; (each = halfstep_choice_value(choice, i)) != NULL; i++) printf("%s%s", i ? ", " : "", each);
    printf("\n");
}

static int print_text(const char *features)
{
    char number[32];
    version(number);
    printf("halfstep %s, ABI %d\n\n", number, halfstep_abi());
    printf("%-15s%s\n", "processor", features[0] ? features : "(none of the features that halfstep uses)");
    printf("%-15s%s (available:", "kernels", halfstep_isa());
    for (int32_t i = 0; i < halfstep_isa_count(); i++)
        if (halfstep_isa_available(i)) printf(" %s", halfstep_isa_name(i));
    printf(")\n%-15s%d\n", "threads", halfstep_default_threads());
    print_gpus();
    print_choice("schedules", "schedule");
    print_choice("decay", "decay");
    print_choice("random bits", "generator");
    print_rules();
    print_formats();
    return 0;
}

static int print_info(struct args *args, void *options)
{
    const struct info *info = options;
    char features[512], full[RECIPE_BYTES], error[512];
    if (args->n_words) {
        if (recipe_check(args->word[0], full, error, sizeof error)) return usage_error("info", "%s", error);
        return info->json ? print_rule_object(recipe_rule(full)) : print_rule(recipe_rule(full));
    }
    halfstep_cpu_features(features, sizeof features);
    return info->json ? print_object(features) : print_text(features);
}

const struct command info_command = {
    .name = "info",
    .usage = "[RULE] [--json]",
    .summary = "Lists the features of the processor, the kernels and threads in use, the GPUs, and all rules and "
               "formats. With "
               "a RULE, such as adamw, lists its hyper-parameters with their defaults.",
    .notes = "The environment variables HALFSTEP_ISA and HALFSTEP_THREADS set the kernels and the number of threads.\n"
             "\n"
             "  HALFSTEP_ISA=scalar halfstep info\n",
    COMMAND_OPTIONS(rows, struct info),
    .max_words = 1,
    .run = print_info,
};
