/* Fuzzes texts as recipe, as name, as hyper-parameter and as choice. The result is an error code and a sentence, or a
 * full form that means the same when it is parsed again. */
#define FUZZ_NAME "fuzz_recipes"
#define HALFSTEP_ADVANCED
#include "fuzz.h"

#include "halfstep.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[512], full[64], again[64];
    if (size >= sizeof text) return 0;
    memcpy(text, data, size);
    text[size] = 0;
    int code = halfstep_recipe_full(text, full, sizeof full);
    halfstep_optimizer *optimizer;
    int32_t group = -7, index;
    demand(!halfstep_create(NULL, &optimizer), "no optimizer");
    int added = halfstep_add_group(optimizer, text, &group);
    demand((code == HALFSTEP_OK) == (added == HALFSTEP_OK), "a group and its recipe disagree");
    halfstep_recipe_full(text, again, size % sizeof again); /* buffers of all sizes */
    if (code == HALFSTEP_OK) {
        fuzz_accepted++;
        uint64_t weight, extra, states;
        demand(strlen(full) < sizeof full && !halfstep_recipe_full(full, again, sizeof again) && !strcmp(full, again),
               "the full form is no fixed point");
        halfstep_recipe_bytes(text, 2, (int64_t)size * 3, 1 + size % 77, &weight, &extra, &states);
        halfstep_tensor tensor = {.struct_size = sizeof tensor,
                                  .group = group,
                                  .name = text,
                                  .ndim = 2,
                                  .rows = 3,
                                  .row_length = 40,
                                  .gradient = "bf16"};
        if (!halfstep_add_tensor(optimizer, &tensor, &index))
            demand(halfstep_tensor_find(optimizer, text) == index, "a tensor is not found by its name");
    } else {
        fuzz_rejected++;
        demand(code == HALFSTEP_ERROR_NAME || code == HALFSTEP_ERROR_UNSUPPORTED, "an odd failure");
        const char *detail = halfstep_error_detail(optimizer);
        demand(strlen(detail) > 5, "no sentence");
    }
    /* The same bytes as names of other things. */
    double value;
    group = 0;
    if (halfstep_add_group(optimizer, "adamw/bf16-sr/int8", &group)) demand(0, "no group");
    halfstep_set_hyper(optimizer, group, text, (double)size);
    halfstep_get_hyper(optimizer, group, text, &value);
    halfstep_set_choice(optimizer, group, text, text);
    halfstep_set_choice(optimizer, group, "decay", text);
    halfstep_get_choice(optimizer, group, text);
    halfstep_choice_value(text, (int32_t)size);
    halfstep_schedule_factor(text, size, 1, 2, 0.5, 0.5, 1, &value);
    halfstep_name_id(text);
    halfstep_rule_find(text);
    halfstep_format_find(text);
    halfstep_destroy(optimizer);
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER
static size_t make_input(uint8_t *data, size_t room)
{
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    halfstep_format_info format = {.struct_size = sizeof format};
    char text[512];
    halfstep_get_rule_info((int32_t)draw((uint64_t)halfstep_rule_count()), &rule);
    size_t used = (size_t)snprintf(text, sizeof text, "%s", rule.name), parts = draw(7);
    for (size_t i = 0; i < parts; i++) {
        halfstep_get_format_info((int32_t)draw((uint64_t)halfstep_format_count()), &format);
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "%c%s", i < 2 ? '/' : "+/"[draw(8) == 0], format.name);
    }
    memcpy(data, text, used);
    return draw(2) ? mutate(data, used, room, "/+-0123456789 abcdefs") : used;
}
#endif
