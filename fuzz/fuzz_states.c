/* Fuzzes the bytes of weights, residuals, states and scales, which checkpoints and state_dicts bring in. Decoding them
 * and stepping on them must stay inside its memory. All instruction sets must give the same bits.
 *
 * The first bytes of an input choose rule, formats, shape and hyper-parameters. The rest fills the planes. When it is
 * used up, pseudo-random numbers go on, which depend on the whole input. Without libFuzzer the rounds go through all
 * rules and formats in turn. */
#define FUZZ_NAME "fuzz_states"
#define HALFSTEP_ADVANCED
#include "fuzz.h"

#include <math.h>

#include "halfstep.h"

enum { MAX_STATES = HALFSTEP_MAX_STATES, MAX_ISAS = 8, MAX_PLANES = 4 + 2 * MAX_STATES, HEAD = 12 };

struct input {
    const uint8_t *data;
    size_t size, at;
};

static uint8_t next_byte(struct input *in) { return in->at < in->size ? in->data[in->at++] : (uint8_t)draw_bits(); }

/* Fills bytes with patterns that are typical of numbers. Plain noise would have nearly only extreme exponents. */
static void fill(struct input *in, uint8_t *bytes, size_t count)
{
    static const uint32_t words[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x00000001,
                                     0x80000001, 0x80000000, 0xbf800000, 0x7f7fffff, 0xff7fffff,
                                     0x3f800000, 0x00800000, 0xb089705f, 0x5e800000};
    uint8_t style = next_byte(in);
    uint32_t word = words[next_byte(in) % (sizeof words / sizeof *words)];
    for (size_t i = 0; i < count; i++) {
        uint8_t byte = next_byte(in);
        switch (style % 8) {
        case 0: break;
        case 1: byte = 0; break;
        case 2: byte = 0xff; break;
        case 3: byte = (uint8_t)(word >> 8 * (i % 4)); break;
        case 4: byte = (uint8_t)(word >> (16 + 8 * (i % 2))); break;
        case 5:
            byte = byte % 16 ? (uint8_t)(i % 4 == 3 ? 0x3c : byte) : (uint8_t)(word >> 8 * (i % 4));
            break; /* fp32 near 0.01 */
        case 6:
            byte = byte % 16 ? (uint8_t)(i % 2 ? 0x3c : byte) : (uint8_t)(word >> (16 + 8 * (i % 2)));
            break; /* 16-bit numbers near that */
        default: byte = (uint8_t)(byte % 16 ? 0x80 : word >> 24);
        }
        bytes[i] = byte;
    }
}

/* An optimizer and all its memory, for one instruction set. */
struct subject {
    halfstep_optimizer *optimizer;
    uint8_t *plane[MAX_PLANES];
    uint64_t bytes[MAX_PLANES];
    int planes;
    uint8_t *weight, *gradient;
    int64_t elements;
};

static uint8_t *add_plane(struct subject *s, uint64_t bytes)
{
    /* One allocation of exact size for each plane, so that AddressSanitizer sees the bytes before and after it. */
    uint8_t *memory = malloc(bytes ? bytes : 1);
    demand(memory && s->planes < MAX_PLANES, "no memory");
    s->bytes[s->planes] = bytes;
    return s->plane[s->planes++] = memory;
}

static int format_with(int32_t role, unsigned choice, char *name, size_t room)
{
    halfstep_format_info info = {.struct_size = sizeof info};
    int32_t formats = halfstep_format_count(), found = 0;
    for (int32_t i = 0; i < formats; i++) found += !halfstep_get_format_info(i, &info) && (info.roles & role);
    if (!found) return 0;
    found = (int32_t)(choice % (unsigned)found);
    for (int32_t i = 0; i < formats; i++)
        if (!halfstep_get_format_info(i, &info) && (info.roles & role) && found-- == 0)
            snprintf(name, room, "%s", info.name);
    return 1;
}

/* Chooses a format for the weight and each state. Falls back to the rule's default if the combination is invalid. */
static void choose_recipe(struct input *in, char *recipe, size_t room)
{
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    char weight[32], state[32], text[256], full[256];
    halfstep_get_rule_info(next_byte(in) % halfstep_rule_count(), &rule);
    format_with(HALFSTEP_ROLE_WEIGHT, next_byte(in), weight, sizeof weight);
    size_t used = (size_t)snprintf(text, sizeof text, "%s/%s", rule.name, weight);
    char separator = '/';
    int uniform = next_byte(in) % 2;
    uint8_t choice = next_byte(in);
    for (int i = 0; i < rule.states; i++) {
        int32_t role = rule.state_role[i];
        if (!uniform) choice = next_byte(in);
        if (role & HALFSTEP_ROLE_WEIGHT || !format_with(role & ~HALFSTEP_ROLE_WEIGHT, choice, state, sizeof state))
            continue;
        used += (size_t)snprintf(text + used, sizeof text - used, "%c%s", separator, state);
        separator = '+';
    }
    if (!halfstep_recipe_full(text, full, sizeof full)) {
        snprintf(recipe, room, "%s", text);
        return;
    }
    snprintf(text, sizeof text, "%s/%s", rule.name, weight);
    snprintf(recipe, room, "%s", halfstep_recipe_full(text, full, sizeof full) ? rule.name : text);
}

static void must(const struct subject *s, int code, const char *what)
{
    if (code == HALFSTEP_OK) return;
    fprintf(stderr, "%s: %s\n", what, s->optimizer ? halfstep_error_detail(s->optimizer) : halfstep_strerror(code));
    demand(0, "a call fails that may not");
}

/* Zeros the planes of every slot that holds an infinity or a NaN. */
static void tame(struct subject *s)
{
    halfstep_slot_info slot = {.struct_size = sizeof slot};
    for (int i = 0; i < HALFSTEP_SLOT_STATE + MAX_STATES; i++) {
        if (halfstep_get_slot_info(s->optimizer, 0, i, &slot) || slot.format < 0) continue;
        void *data = i == HALFSTEP_SLOT_WEIGHT     ? (void *)s->weight
                     : i == HALFSTEP_SLOT_GRADIENT ? (void *)s->gradient
                                                   : NULL;
        float *plain = malloc((size_t)s->elements * sizeof *plain);
        demand(plain != NULL, "no memory");
        must(s, halfstep_read_slot(s->optimizer, 0, i, data, 0, slot.rows, plain), "read");
        for (int64_t e = 0; e < slot.rows * slot.columns; e++)
            if (!isfinite(plain[e])) {
                memset(data ? data : slot.code, 0, slot.code_bytes);
                if (slot.extra) memset(slot.extra, 0, slot.extra_bytes);
                break;
            }
        free(plain);
    }
}

/* Makes the optimizer and fills its planes. Returns 0 if the shape does not go with the recipe. */
static int make_subject(struct subject *s, struct input in, const char *isa, const char *recipe)
{
    static const char *const gradient_formats[] = {"f32", "bf16", "f16"};
    static const int columns[] = {1, 7, 16, 31, 33, 64, 127, 256, 300, 513};
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 5};
    halfstep_hyper_info hyper = {.struct_size = sizeof hyper};
    halfstep_slot_info slot = {.struct_size = sizeof slot};
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    int32_t group, index;
    char name[32];
    must(s, halfstep_set_isa(isa), "isa");
    must(s, halfstep_create(&options, &s->optimizer), "create");
    must(s, halfstep_add_group(s->optimizer, recipe, &group), recipe);
    snprintf(name, sizeof name, "%.*s", (int)strcspn(recipe, "/"), recipe);
    int32_t row = halfstep_rule_find(name);
    must(s, halfstep_get_rule_info(row, &rule), "rule");
    for (int32_t i = 0; i < rule.hypers; i++) {
        halfstep_get_hyper_info(row, i, &hyper);
        double value = hyper.initial, top = hyper.exclusive_maximum ? nextafter(hyper.maximum, 0) : hyper.maximum;
        switch (next_byte(&in)) {
        case 0: value = hyper.minimum; break;
        case 1: value = top; break;
        case 2: value = hyper.minimum + (hyper.maximum - hyper.minimum) / 2; break;
        case 3: value = value * 0.5; break;
        case 4: value = 1; break;
        default: break;
        }
        /* A hundred matrix products find no more than five. */
        if (!strcmp(hyper.name, "ns_steps") && value > 5) value = 5;
        /* May fail: out of bounds, or in conflict with another one. */
        halfstep_set_hyper(s->optimizer, hyper.per_optimizer ? HALFSTEP_ALL_GROUPS : group, hyper.name, value);
    }
    static const char *const choices[] = {"decay", "schedule", "scan", "generator"};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        const char *value = halfstep_choice_value(choices[i], next_byte(&in) % 4);
        if (value) halfstep_set_choice(s->optimizer, i < 2 ? group : HALFSTEP_ALL_GROUPS, choices[i], value);
    }
    halfstep_tensor tensor = {.struct_size = sizeof tensor, .group = group, .name = "t", .ndim = 2};
    tensor.rows = 1 + next_byte(&in) % 9;
    tensor.row_length = columns[next_byte(&in) % (sizeof columns / sizeof *columns)];
    /* The block formats of a flattened tensor need 4096 elements and whole blocks. */
    static const int large[][2] = {{16, 256}, {32, 128}, {8, 640}, {1, 4352}, {256, 17}};
    uint8_t size = next_byte(&in);
    if (size % 3 == 0) {
        tensor.rows = large[size / 3 % 5][0];
        tensor.row_length = large[size / 3 % 5][1];
        if (tensor.rows == 1) tensor.ndim = 1;
    } else if (next_byte(&in) % 4 == 0) tensor.ndim = 1, tensor.rows *= tensor.row_length, tensor.row_length = 1;
    else if (next_byte(&in) % 4 == 0) tensor.row_length *= tensor.rows, tensor.rows = 1; /* one long row */
    tensor.gradient = gradient_formats[next_byte(&in) % 3];
    if (rule.raw_gradient) {
        static char live[32];
        format_with(HALFSTEP_ROLE_WEIGHT, next_byte(&in), live, sizeof live);
        tensor.gradient = live;
    }
    int code = halfstep_add_tensor(s->optimizer, &tensor, &index);
    if (code == HALFSTEP_ERROR_SHAPE || code == HALFSTEP_ERROR_UNSUPPORTED) return 0;
    must(s, code, "tensor");
    s->elements = tensor.rows * tensor.row_length;
    for (int i = 0; i < HALFSTEP_SLOT_STATE + MAX_STATES; i++) {
        if (halfstep_get_slot_info(s->optimizer, 0, i, &slot) || slot.format < 0) continue;
        uint8_t *code = add_plane(s, slot.code_bytes),
                *extra = slot.extra_bytes ? add_plane(s, slot.extra_bytes) : NULL;
        fill(&in, code, slot.code_bytes);
        if (extra) fill(&in, extra, slot.extra_bytes);
        if (i == HALFSTEP_SLOT_WEIGHT) s->weight = code;
        if (i == HALFSTEP_SLOT_GRADIENT) s->gradient = code;
        /* The weight's is called in any case, because at least one call must end the adding of tensors. */
        if (i != HALFSTEP_SLOT_GRADIENT || extra)
            must(s, halfstep_bind_slot(s->optimizer, 0, i, i >= HALFSTEP_SLOT_STATE ? code : NULL, extra), "bind");
    }
    /* In every other input, slots with infinities or NaN are zeroed. */
    if (next_byte(&in) % 2) tame(s);
    /* Most inputs should make a step, so most gradients are small numbers. */
    if (next_byte(&in) % 4 && !rule.raw_gradient) {
        uint64_t bytes = s->gradient ? s->bytes[1 + (s->plane[1] != s->gradient)] : 0;
        for (uint64_t i = 0; i < bytes; i++)
            if (i % 2) s->gradient[i] = (uint8_t)((s->gradient[i] & 0x80) | 0x3a);
    }
    halfstep_record counters = {.struct_size = sizeof counters, .kind = HALFSTEP_RECORD_TENSOR};
    halfstep_get_record(s->optimizer, &counters);
    uint8_t age = next_byte(&in);
    counters.state_steps = age < 128 ? age : age < 192 ? (uint64_t)1 << (age % 64) : UINT64_MAX - age;
    counters.full_steps = next_byte(&in);
    counters.writes = counters.state_steps;
    halfstep_set_record(s->optimizer, &counters); /* this and the following calls may fail */
    halfstep_get_record(s->optimizer, &counters);
    for (int32_t i = 0; i < rule.scalars; i++) {
        halfstep_record scalar = counters;
        scalar.scalar[i] = ldexp((double)(int8_t)next_byte(&in), (int8_t)next_byte(&in));
        if (!halfstep_set_record(s->optimizer, &scalar)) counters = scalar;
    }
    for (int32_t i = 0; i < rule.states; i++) {
        halfstep_record grid = counters;
        grid.grid[i] = ldexp((double)next_byte(&in), -8);
        if (!halfstep_set_record(s->optimizer, &grid)) counters = grid;
    }
    return 1;
}

/* One result. All results in order are compared between instruction sets. */
struct outcome {
    const char *what;
    int64_t index;
    uint32_t bits;
    int is_code; /* an error code or a count, not a number of a slot */
};
static struct outcome *outcomes[2];
static size_t outcome_count[2], outcome_room[2];

static void note(int which, const char *what, int64_t index, uint32_t bits, int is_code)
{
    if (outcome_count[which] == outcome_room[which]) {
        outcome_room[which] = outcome_room[which] ? 2 * outcome_room[which] : 4096;
        outcomes[which] = realloc(outcomes[which], outcome_room[which] * sizeof **outcomes);
        demand(outcomes[which] != NULL, "no memory");
    }
    outcomes[which][outcome_count[which]++] = (struct outcome){what, index, bits, is_code};
}

static void read_all(struct subject *s, int which, int write)
{
    halfstep_slot_info slot = {.struct_size = sizeof slot};
    float *plain = malloc((size_t)s->elements * sizeof *plain);
    demand(plain != NULL, "no memory");
    for (int i = 0; i < HALFSTEP_SLOT_STATE + MAX_STATES; i++) {
        if (halfstep_get_slot_info(s->optimizer, 0, i, &slot) || slot.format < 0) continue;
        void *data = i == HALFSTEP_SLOT_WEIGHT     ? (void *)s->weight
                     : i == HALFSTEP_SLOT_GRADIENT ? (void *)s->gradient
                                                   : NULL;
        must(s, halfstep_read_slot(s->optimizer, 0, i, data, 0, slot.rows, plain), "read");
        for (int64_t e = 0; e < slot.rows * slot.columns; e++) {
            /* All NaNs count as equal. */
            uint32_t bits = 0x7fc00000;
            if (plain[e] == plain[e]) memcpy(&bits, plain + e, 4);
            note(which, slot.name, e, bits, 0);
        }
        if (write && i != HALFSTEP_SLOT_GRADIENT)
            note(which, "write", i, (uint32_t)halfstep_write_slot(s->optimizer, 0, i, data, 0, slot.rows, plain), 1);
    }
    free(plain);
}

/* Makes every call that reads or writes the planes. */
static void use_subject(struct subject *s, int which, int steps)
{
    void *weights[1] = {s->weight};
    const void *gradients[1] = {s->gradient};
    uint64_t saturated = 0;
    outcome_count[which] = 0;
    read_all(s, which, 0);
    halfstep_saturated(s->optimizer, 0, s->weight, &saturated);
    note(which, "saturated", 0, (uint32_t)saturated, 1);
    const halfstep_call micro = {.struct_size = sizeof micro, .micro = 1, .gradients = gradients};
    const halfstep_call one = {
        .struct_size = sizeof one, .kind = HALFSTEP_CALL_TENSOR, .weights = weights, .gradients = gradients};
    const halfstep_call round = {.struct_size = sizeof round, .kind = HALFSTEP_CALL_ROUND};
    for (int step = 0; step < steps; step++) {
        int code = halfstep_step(s->optimizer, weights, gradients);
        /* Some hyper-parameters exclude each other, or a format. */
        if (code != HALFSTEP_NONFINITE && code != HALFSTEP_ERROR_UNSUPPORTED && code != HALFSTEP_ERROR_RANGE)
            must(s, code, "step");
        note(which, "step", step, (uint32_t)code, 1);
        read_all(s, which, 0);
    }
    note(which, "micro-step", 0, (uint32_t)halfstep_run(s->optimizer, &micro), 1);
    note(which, "release", 0, (uint32_t)halfstep_run(s->optimizer, &one), 1);
    halfstep_run(s->optimizer, &round);
    read_all(s, which, 1);
    read_all(s, which, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size, 0};
    uint64_t seed = 1;
    char recipe[256];
    for (size_t i = 0; i < size; i++) seed = (seed ^ data[i]) * UINT64_C(0x100000001b3);
    fuzz_state = seed;
    choose_recipe(&in, recipe, sizeof recipe);
    int steps = 1 + next_byte(&in) % 3, which = 0;
    uint64_t kept = fuzz_state;
    for (int32_t isa = 0; isa < halfstep_isa_count(); isa++) {
        if (!halfstep_isa_available(isa)) continue;
        struct subject s = {0};
        fuzz_state = kept;
        int made = make_subject(&s, in, halfstep_isa_name(isa), recipe);
        if (made) use_subject(&s, which, steps);
        halfstep_destroy(s.optimizer);
        for (int i = 0; i < s.planes; i++) free(s.plane[i]);
        if (!made) return 0;
        if (which)
            for (size_t i = 0; i < outcome_count[0]; i++) {
                const struct outcome *a = &outcomes[0][i], *b = &outcomes[1][i];
                /* Results after an infinity or a NaN may differ; they must only stay inside the memory. */
                if (!a->is_code && (a->bits & 0x7f800000) == 0x7f800000) break;
                if (a->bits == b->bits) continue;
                fprintf(stderr, "%s: %s[%lld] is %08x, with %s %08x (%zu of %zu)\n", recipe, a->what,
                        (long long)a->index, a->bits, halfstep_isa_name(isa), b->bits, i, outcome_count[0]);
                demand(0, "the instruction sets differ");
            }
        which = 1;
    }
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER
static size_t make_input(uint8_t *data, size_t room)
{
    (void)room;
    for (int i = 0; i < 64; i++) data[i] = (uint8_t)draw(256);
    /* Goes through all rules with each format for all states. The weights' formats go along. */
    unsigned long k = fuzz_round, rules = (unsigned long)halfstep_rule_count();
    data[0] = (uint8_t)(k % rules);
    data[1] = (uint8_t)(k / rules);
    data[2] = (uint8_t)(k / rules / 64 % 2 == 0);
    data[3] = (uint8_t)(k / rules);
    return 24 + draw(40);
}
#endif
