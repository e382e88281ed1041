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
    "info",
    "[--json]",
    "Tells what this processor offers, which kernels and how many threads are in use, and every rule and format.",
    "HALFSTEP_ISA and HALFSTEP_THREADS in the environment override the choice of kernels and threads.\n",
    0,
    0};

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

static void version(char text[32])
{
    int32_t v = halfstep_version();
    snprintf(text, 32, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
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
    } uses[] = {{HALFSTEP_ROLE_WEIGHT, "weights"},
                {HALFSTEP_ROLE_GRADIENT, "gradients"},
                {HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG, "states"}};
    printf("\nFormats        bytes\n");
    for (int32_t i = 0; i < halfstep_format_count(); i++) {
        halfstep_format_info info = {.struct_size = sizeof info};
        if (halfstep_get_format_info(i, &info) != HALFSTEP_OK) continue;
        double bytes =
            (info.code_bits + info.extra_bits) / 8.0 + (info.block ? (double)info.scale_bytes / info.block : 0);
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
