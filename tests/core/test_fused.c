/* Compares fused steps with the tile path, byte for byte. Every rule runs with every row of fused.def, with and without
 * each of its conditional states. All formats of weights, generators and instruction sets of this machine occur, and l2
 * decay and row means where a row takes them. A run without arguments takes a third of the weights' formats, --short a
 * fifth, --all all. Values are of every kind: numbers far apart, zeros of both signs and whole blocks of them,
 * subnormals, infinities, NaN. The largest numbers must not become infinite. NaN are equal whatever their payloads. */
#define HALFSTEP_ADVANCED
#include "decide/prepare.h"
#include "handle/optimizer.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "ref/fixture.h"

enum { MOST_VALUES = 5 * 1184 };

static const struct {
    const char *name;
    int64_t rows, columns;
} shapes[] = {
    {"whole tiles and a part of one", 1, 1152},
    {"rows with tails", 5, 1183}, /* most of it goes through tiles either way */
};

static const char *const gradients[] = {"f16", "bf16", "f32"};

static const struct {
    int gradient, first, second;
} fused_rows[] = {
#define FUSED_ROW(gradient, first, second, ...) {HSTEP_FORMAT_##gradient, HSTEP_FORMAT_##first, HSTEP_FORMAT_##second},
    HSTEP_FUSED_RECIPES(FUSED_ROW, )
#undef FUSED_ROW
};
enum { ROWS = COUNT(fused_rows) };

/* Returns an fp32 pattern of any kind, or an ordinary one as gradients have. */
static uint32_t pattern(struct source *s, int ordinary)
{
    uint64_t r = next64(s);
    uint32_t sign = (uint32_t)(r >> 63) << 31, mantissa = (uint32_t)(r >> 32) & 0x7fffff, any = (uint32_t)(r >> 8);
    switch (r & 63) {
    case 0: return 0;
    case 1: return 0x80000000u;
    case 2: return sign | mantissa >> (any & 15);
    case 3: return ordinary ? 0 : sign | 0x7f800000u;
    case 4: return ordinary ? 0 : sign | 0x7fc00000u | mantissa;
    case 5: return ordinary ? sign : sign | 0x7f7fffffu;
    case 6: return ordinary ? sign : sign | 0x7f000000u | mantissa;
    case 7: return sign | (67 + (any & 31)) << 23 | mantissa;
    case 8: return sign | (127 + (any & 7)) << 23 | mantissa;
    default: return sign | (123 - (any & 15)) << 23 | mantissa;
    }
}

/* Fills n values; some groups of 32 are zero. */
static void fill(struct source *s, float *x, int64_t n, int ordinary, int nonneg)
{
    int zero = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i % 32 == 0) zero = next64(s) % 9 == 0;
        uint32_t bits = zero ? 0 : pattern(s, ordinary);
        x[i] = from_bits(nonneg ? bits & 0x7fffffff : bits);
    }
}

/* Writes an infinity or a NaN into some elements of a state, which only its bytes can hold. */
static void spoil(struct source *s, const struct hstep_slot *p, int64_t n)
{
    const struct hstep_format *f = &hstep_formats[p->format];
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = next64(s);
        uint32_t bits = r >> 32 & 1 ? 0x7f800000u : 0x7fc00000u;
        uint16_t high = (uint16_t)(bits >> 16), half = r >> 32 & 1 ? 0x7c00 : 0x7e00;
        if (r % 67) continue;
        if (f->code_bits == 32) memcpy(p->code + 4 * i, &bits, 4);
        else memcpy(p->code + 2 * i, strcmp(f->code_dtype, "F16") ? &high : &half, 2);
    }
}

/* decayed: weights reach the states. */
static void prepare(struct one *t, uint64_t seed, int decayed)
{
    static float values[MOST_VALUES];
    struct source s = {seed};
    int blocks = 0;
    for (int slot = STATE; slot < HSTEP_SLOTS; slot++) {
        const struct hstep_slot *p = &t->o->tensors[0].slot[slot];
        blocks |= p->format >= 0 && hstep_formats[p->format].block;
    }
    /* Blocks that hold infinities and NaN may differ (docs/numerics.md). */
    fill(&s, values, t->n, decayed && blocks, 0);
    one_write(t, WEIGHT, values);
    for (int slot = STATE; slot < HSTEP_SLOTS; slot++) {
        const struct hstep_slot *p = &t->o->tensors[0].slot[slot];
        if (p->format < 0) continue;
        fill(&s, values, t->n, 1, p->nonneg);
        one_write(t, slot, values);
        if (!blocks) spoil(&s, p, t->n); /* a rule may take one state into another */
    }
}

/* Makes steps with ordinary gradients; the last one has special ones. */
static void run(struct one *t, uint64_t seed, int fused, int special)
{
    static float values[MOST_VALUES];
    hstep_use_fused = fused;
    for (int k = 0; k < 3; k++) {
        struct source s = {seed * 1000 + (uint64_t)k};
        fill(&s, values, t->n, !(special && k == 2), 0);
        one_write(t, GRADIENT, values);
        MUST(one_step(t));
    }
    hstep_use_fused = 1;
}

static void compare(const char *name, struct one *a, struct one *b)
{
    static float x[MOST_VALUES], y[MOST_VALUES];
    for (int slot = 0; slot < HSTEP_SLOTS; slot++) {
        const struct hstep_slot *p = &a->o->tensors[0].slot[slot], *q = &b->o->tensors[0].slot[slot];
        if (p->format < 0 || slot == GRADIENT) continue;
        one_read(a, slot, x);
        one_read(b, slot, y);
        int nan = 0, wrong = 0;
        for (int64_t i = 0; i < a->n && wrong < 3; i++) {
            nan |= isnan(x[i]);
            if (to_bits(x[i]) == to_bits(y[i]) || (isnan(x[i]) && isnan(y[i]))) continue;
            CHECK(wrong++ < 0, "%s: slot %d, element %lld: fused %a, tiles %a", name, slot, (long long)i, x[i], y[i]);
        }
        if (nan || wrong) continue;
        const void *code[2] = {slot ? p->code : a->weight, slot ? q->code : b->weight};
        CHECK(!memcmp(code[0], code[1], (size_t)p->code_bytes), "%s: codes of slot %d differ", name, slot);
        CHECK(!p->extra_bytes || !memcmp(p->extra, q->extra, (size_t)p->extra_bytes),
              "%s: second plane of slot %d differs", name, slot);
    }
}

/* Writes a recipe. Returns 0 if there is no such recipe. */
static int recipe_of(const halfstep_rule_info *rule, const char *weight, int row, char *text, size_t size)
{
    char full[64];
    int n = snprintf(text, size, "%s/%s", rule->name, weight);
    for (int j = 0, named = 0; j < rule->states; j++) {
        if (rule->state_role[j] == HALFSTEP_ROLE_WEIGHT || rule->state_extent[j] != HALFSTEP_EXTENT_ELEMENTS) continue;
        int format = hstep_fused_format(rule->state_role[j], fused_rows[row].gradient, fused_rows[row].first,
                                        fused_rows[row].second, hstep_formats[fused_rows[row].first].block);
        n += snprintf(text + n, size - (size_t)n, "%c%s", named++ ? '+' : '/', hstep_formats[format].name);
    }
    return halfstep_recipe_full(text, full, sizeof full) == OK;
}

/* Returns 1 if a variant switches an option on that keeps a state out of blocks, in a row whose states are in blocks.
 * Such a kernel exists because rows and variants are compiled as a product. No recipe takes it. */
static int is_precise(int rule, int row, int variant)
{
    if (!hstep_formats[fused_rows[row].second].block) return 0;
    for (int j = 0, bit = 0; j < hstep_rule_states(rule); j++) {
        const struct hstep_state *state = &hstep_rules[rule].state[j];
        if (state->unless && variant >> bit++ & 1 && state->precise_while) return 1;
    }
    return 0;
}

/* Changes of the gradient before the rule sees it, and of decay where it is not l2. */
enum { AS_IT_IS, L2, CENTRALIZED, L2_AND_CENTRALIZED, ADJUSTMENTS, CAUTIOUS_DECAY = ADJUSTMENTS };

/* Compares one tensor. Returns 1 if it was fused */
static int judge(const char *recipe, int rule, int variant, const char *gradient, int adjustment, const char *generator,
                 int shape, int special)
{
    const int cautious = adjustment & CAUTIOUS_DECAY && !hstep_rules[rule].no_cautious_decay;
    const enum hstep_way way = cautious                          ? HSTEP_WAY_COMPARED
                               : adjustment & L2_AND_CENTRALIZED ? HSTEP_WAY_ADJUSTED
                                                                 : HSTEP_WAY_PLAIN;
    char name[200];
    snprintf(name, sizeof name, "%s, %s gradients, adjustment %d", recipe, gradient, adjustment);
    struct one t[2];
    int fused = 0;
    for (int i = 0; i < 2; i++) {
        one_open(&t[i], recipe, 2, shapes[shape].rows, shapes[shape].columns, gradient);
        MUST(halfstep_set_choice(t[i].o, ALL_GROUPS, "scan", "known-finite"));
        MUST(halfstep_set_choice(t[i].o, ALL_GROUPS, "generator", generator));
        one_hyper(&t[i], "weight_decay", 0.01);
        MUST(halfstep_set_choice(t[i].o, 0, "decay", cautious ? "cautious" : adjustment & L2 ? "l2" : "decoupled"));
        if (adjustment & CENTRALIZED) one_hyper(&t[i], "centralize", 0.75);
        for (int j = 0, bit = 0; j < hstep_rule_states(rule); j++) {
            const char *unless = hstep_rules[rule].state[j].unless;
            if (unless)
                one_hyper(&t[i], unless, variant >> bit++ & 1 ? (!strcmp(unless, "momentum") ? 0.9 : 1.0) : 0.0);
        }
        one_start(&t[i]);
        prepare(&t[i], 7, adjustment & L2);
        run(&t[i], 11, !i, special);
        fused = t[0].o->tensors[0].fused[way] >= 0;
    }
    compare(name, &t[0], &t[1]);
    for (int i = 0; i < 2; i++) one_close(&t[i]);
    return fused;
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    for (int32_t isa = 0; isa < halfstep_isa_count(); isa++) {
        if (!halfstep_isa_available(isa)) continue;
        MUST(halfstep_set_isa(halfstep_isa_name(isa)));
        const struct hstep_kernels *kernels = hstep_isa_kernels(isa);
        if (!kernels->find_fused) continue;
        for (int rule = 0; rule < HSTEP_RULES; rule++) {
            char name[128];
            halfstep_rule_info info = rule_info(rule);
            snprintf(name, sizeof name, "%s: %s, fused and by tiles", halfstep_isa_name(isa), info.name);
            TEST(name) {
                int cases = 0;
                for (int row = 0; row < ROWS; row++)
                    for (int variant = 0; variant < HSTEP_FUSED_VARIANTS; variant++) {
                        int found = 0;
                        if (kernels->find_fused(rule, row, variant) < 0 || is_precise(rule, row, variant)) continue;
                        for (int w = 0; w < HSTEP_FORMATS; w++) {
                            char recipe[160];
                            const char *generator = halfstep_choice_value("generator", cases % 2);
                            if (!(hstep_formats[w].roles & HALFSTEP_ROLE_WEIGHT) ||
                                !recipe_of(&info, hstep_formats[w].name, row, recipe, sizeof recipe))
                                continue;
                            if ((w + row + rule + isa) % BY_LENGTH(5, 3, 1)) {
                                found = 1;
                                continue;
                            }
                            const int any = fused_rows[row].gradient == HSTEP_FORMAT_any;
                            const int f32 = fused_rows[row].gradient == HSTEP_FORMAT_f32 && w == HSTEP_FORMAT_f32;
                            const char *gradient =
                                any ? gradients[(w + row) % 3] : hstep_formats[fused_rows[row].gradient].name;
                            for (int shape = 0; shape < 2; shape++)
                                for (int k = 0; k < (any || f32 ? ADJUSTMENTS : 1); k += any ? 2 : 1) {
                                    int adjustment = k + (any ? (w + shape + rule) % 2 : 0);
                                    if (any && !(adjustment & L2) && w % 2) adjustment |= CAUTIOUS_DECAY;
                                    found |= judge(recipe, rule, variant, gradient, adjustment, generator, shape,
                                                   cases++ % 3 == 0);
                                }
                        }
                        /* One row serves more than one recipe where a rule lacks states of some role. */
                        CHECK(found || !hstep_rule_states(rule), "%s: no recipe is stepped by row %d, variant %d",
                              info.name, row, variant);
                    }
                CHECK(cases > 0 || info.matrix, "%s has no fused row", info.name);
            }
            test_close_group();
        }
    }
    return test_done();
}
