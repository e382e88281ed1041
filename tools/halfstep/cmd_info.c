#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "halfstep.h"

#include "args.h"
#include "commands.h"
#include "recipes.h"
#include "train.h"

struct info {
    int json;
};

static const struct option rows[] = {OPTION_JSON(struct info)};
static const struct command command = {
    "info", "[--json]", "Tells what this processor offers, which kernels and how many threads are in use, and every rule and format.",
    "HALFSTEP_ISA and HALFSTEP_THREADS in the environment override the choice of kernels and threads.\n", 0, 0};

static json_t *names(const char *(*name)(int32_t index))
{
    json_t *array = json_array();
    const char *each;
    for (int32_t i = 0; (each = name(i)) != NULL; i++) json_array_append_new(array, json_string(each));
    return array;
}

static json_t *choices(const char *choice)
{
    json_t *array = json_array();
    const char *each;
    for (int32_t i = 0; (each = halfstep_choice_value(choice, i)) != NULL; i++) json_array_append_new(array, json_string(each));
    return array;
}

static void version(char text[32])
{
    int32_t v = halfstep_version();
    snprintf(text, 32, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

static int print_object(const char *features)
{
    char number[32];
    version(number);
    json_t *isas = json_array(), *object = json_object();
    for (int32_t i = 0; i < halfstep_isa_count(); i++)
        if (halfstep_isa_available(i)) json_array_append_new(isas, json_string(halfstep_isa_name(i)));
    json_object_set_new(object, "version", json_string(number));
    json_object_set_new(object, "abi", json_integer(halfstep_abi()));
    json_object_set_new(object, "isa", json_string(halfstep_isa()));
    json_object_set_new(object, "isas", isas);
    json_object_set_new(object, "cpu_features", json_string(features));
    json_object_set_new(object, "threads", json_integer(halfstep_default_threads()));
    json_object_set_new(object, "rules", names(rule_name));
    json_object_set_new(object, "weight_formats", names(weight_format_name));
    json_object_set_new(object, "state_formats", names(state_format_name));
    json_object_set_new(object, "gradient_formats", names(gradient_format_name));
    json_object_set_new(object, "schedules", choices("schedule"));
    json_object_set_new(object, "decays", choices("decay"));
    json_object_set_new(object, "generators", choices("generator"));
    return print_json(object);
}

static void print_rules(void)
{
    printf("\nRules\n");
    for (int32_t i = 0; i < halfstep_rule_count(); i++) {
        halfstep_rule_info info = {.struct_size = sizeof info};
        if (halfstep_get_rule_info(i, &info) != HALFSTEP_OK) continue;
        char full[RECIPE_BYTES];
        if (halfstep_recipe_full(info.name, full, sizeof full) != HALFSTEP_OK) full[0] = 0;
        printf("  %-13s %s\n  %-13s states:%s", info.name, info.title, "", info.states ? "" : " none");
        for (int32_t s = 0; s < info.states; s++) printf(" %s", info.state_name[s]);
        printf("; decay: %s; in full: %s\n", info.decay, full);
    }
}

static void print_formats(void)
{
    static const struct {
        int32_t roles;
        const char *name;
    } uses[] = {{HALFSTEP_ROLE_WEIGHT, "weights"}, {HALFSTEP_ROLE_GRADIENT, "gradients"},
                {HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG, "states"}};
    printf("\nFormats        bytes\n");
    for (int32_t i = 0; i < halfstep_format_count(); i++) {
        halfstep_format_info info = {.struct_size = sizeof info};
        if (halfstep_get_format_info(i, &info) != HALFSTEP_OK) continue;
        double bytes = (info.code_bits + info.extra_bits) / 8.0 + (info.block ? (double)info.scale_bytes / info.block : 0);
        printf("  %-12s %6.4g  %-46s", info.name, bytes, info.title);
        const char *separator = "";
        for (size_t u = 0; u < sizeof uses / sizeof uses[0]; u++) {
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
    printf("%-15s%s\n", "processor", features[0] ? features : "(no features that matter here)");
    printf("%-15s%s (of", "kernels", halfstep_isa());
    for (int32_t i = 0; i < halfstep_isa_count(); i++)
        if (halfstep_isa_available(i)) printf(" %s", halfstep_isa_name(i));
    printf(")\n%-15s%d\n", "threads", halfstep_default_threads());
    print_choice("schedules", "schedule");
    print_choice("decay", "decay");
    print_choice("random bits", "generator");
    print_rules();
    print_formats();
    return 0;
}

int cmd_info(int argc, char **argv)
{
    struct info info;
    struct args args;
    const struct option_group groups[] = {{"Options", rows, OPTION_COUNT(rows), &info}};
    int status = args_parse(&args, &command, groups, 1, argc, argv);
    if (status != ARGS_RUN) return status;
    char features[512];
    halfstep_cpu_features(features, sizeof features);
    status = info.json ? print_object(features) : print_text(features);
    args_free(&args);
    return status;
}
