#include "io/optimizer/read.h"

#include "io/numbers.h"

static const char *find_value(const loading *l, const char *prefix, const char *name)
{
    snprintf(l->key, l->key_bytes, "%s%s", prefix, name);
    if (!l->pairs) return halfstep_safetensors_metadata_find(l->states.file, l->key);
    int found;
    size_t at = hstep_find_pair(l->pairs, l->key, &found);
    return found ? l->pairs->list[at].value : NULL;
}

int hstep_make_key(loading *l)
{
    l->key_bytes = 128;
    for (int32_t i = 0; i < l->record->tensor_count; i++) {
        size_t bytes = strlen(l->record->tensors[i].info.name) + 32;
        if (bytes > l->key_bytes) l->key_bytes = bytes;
    }
    l->key = malloc(l->key_bytes);
    return l->key ? HALFSTEP_OK : io_fail_memory(l->error);
}

int hstep_fail_value(const loading *l, const char *prefix, const char *name)
{
    return io_fail(l->error, HALFSTEP_ERROR_FORMAT, "%s: the metadata \"%s%s\" is missing or malformed", l->states.path,
                   prefix, name);
}

/* Reads a whole number of at most INT64_MAX. */
static int read_count(const loading *l, const char *prefix, const char *name, uint64_t *value)
{
    const char *text = find_value(l, prefix, name);
    return text && hstep_is_uint64(text, value) && *value <= INT64_MAX ? HALFSTEP_OK
                                                                       : hstep_fail_value(l, prefix, name);
}

/* Moves *text behind "WORD " and returns 1, or returns 0 if *text does not begin with that. */
static int take_word(const char **text, const char *word)
{
    size_t length = strlen(word);
    if (strncmp(*text, word, length) || (*text)[length] != ' ') return 0;
    *text += length + 1;
    return 1;
}

static int take_counter(const char **text, const char *name, uint64_t *value)
{
    if (!take_word(text, name) || !hstep_read_uint64(text, value)) return 0;
    if (**text == ' ' && (*text)[1]) ++*text;
    return 1;
}

static int read_counters(const loading *l, tensor_record *t)
{
    halfstep_record *c = &t->numbers[IN_FILE];
    const char *text = find_value(l, "counters.", t->info.name);
    const char *group = find_value(l, "group_of.", t->info.name);
    if (!text && group) {
        t->has_no_steps = 1;
        c->id = t->numbers[HERE].id;
        return HALFSTEP_OK;
    }
    if (!text)
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s does not have tensor \"%s\"", l->states.path,
                       t->info.name);
    if (!take_counter(&text, "state_steps", &c->state_steps) || !take_counter(&text, "full_steps", &c->full_steps) ||
        !take_counter(&text, "writes", &c->writes) || !take_counter(&text, "id", &c->id) || *text || !c->id ||
        c->state_steps > INT64_MAX || c->full_steps > INT64_MAX || c->writes > INT64_MAX)
        return hstep_fail_value(l, "counters.", t->info.name);
    return HALFSTEP_OK;
}

/* Takes the name of a grid that this optimizer does not have, because a hyper-parameter leaves its state out. Returns
 * the number of the state, or -1. If the file has the state itself, that is refused later, by the name of the state. */
static int32_t take_other_grid(const char **text, const halfstep_rule_info *rule)
{
    for (int32_t i = 0; i < rule->states; i++) {
        char name[sizeof((scalar_record *)0)->name];
        if (rule->state_role[i] != HALFSTEP_ROLE_NONNEG) continue;
        snprintf(name, sizeof name, "%s.grid", rule->state_name[i]);
        if (take_word(text, name)) return i;
    }
    return -1;
}

/* Parses "NAME VALUE NAME VALUE ..." and returns 1 if it took all of the text. A name may come once at most. Sets bit i
 * of *found for scalar i, and one behind them for a grid that is not here. */
static int parse_scalars(const char *text, const halfstep_rule_info *rule, tensor_record *t, unsigned *found)
{
    *found = 0;
    while (*text) {
        int32_t i = 0, other = 0;
        double value;
        while (i < t->scalars && !take_word(&text, t->scalar[i].name)) i++;
        if (i == t->scalars) other = take_other_grid(&text, rule);
        if (other < 0 || (*found >> (i + other) & 1) || !hstep_read_double(&text, &value)) return 0;
        if (i < t->scalars) *hstep_scalar_of(t, i, IN_FILE) = value;
        *found |= 1u << (i + other);
        if (*text == ' ' && text[1]) text++;
        else if (*text) return 0;
    }
    return 1;
}

static int read_scalars(const loading *l, tensor_record *t)
{
    const char *text = find_value(l, "scalars.", t->info.name);
    unsigned found = 0, needed = 0, all = (1u << t->scalars) - 1;
    for (int32_t i = 0; i < t->scalars; i++) {
        *hstep_scalar_of(t, i, IN_FILE) = t->scalar[i].is_grid;
        needed |= (unsigned)!t->scalar[i].is_grid << i;
    }
    if (t->has_no_steps) return HALFSTEP_OK;
    /* Python writes none for a parameter without elements or without a step. */
    if (!text && (!t->scalars || !t->numbers[IN_FILE].state_steps || !t->info.rows || !t->info.row_length))
        return HALFSTEP_OK;
    if ((!text && needed) || (text && !parse_scalars(text, &l->record->groups[t->info.group].rule, t, &found)) ||
        (found & needed) != needed)
        return hstep_fail_value(l, "scalars.", t->info.name);
    t->lacks_grid = (found & all) != all;
    return HALFSTEP_OK;
}

/* Reads the recipe of a tensor and its group in the file. Fails unless the recipe is the same here, and unless tensors
 * of one group here are in one group there. */
static int read_group_of(const loading *l, tensor_record *t)
{
    group_record *g = &l->record->groups[t->info.group];
    uint64_t number;
    char there[64];
    const char *recipe = find_value(l, "recipe.", t->info.name);
    if (!recipe && !t->has_no_steps) return hstep_fail_value(l, "recipe.", t->info.name);
    if (recipe && halfstep_recipe_full(recipe, there, sizeof there))
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH,
                       "%s: tensor \"%s\" has the recipe %s, which this library does "
                       "not know",
                       l->states.path, t->info.name, recipe);
    if (recipe && strcmp(there, g->recipe))
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "the recipe of tensor \"%s\" is %s here but %s in %s",
                       t->info.name, g->recipe, there, l->states.path);
    const char *text = find_value(l, "group_of.", t->info.name);
    if (!text || !hstep_is_uint64(text, &number) || number > INT32_MAX)
        return hstep_fail_value(l, "group_of.", t->info.name);
    if (g->source >= 0 && (uint64_t)g->source != number)
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH,
                       "%s: tensor \"%s\" is in group %llu of the file, others of its group "
                       "here are in group %lld",
                       l->states.path, t->info.name, ull(number), (long long)g->source);
    g->source = (int64_t)number;
    return HALFSTEP_OK;
}

static int is_left(const loading *l, const char *name)
{
    if (l->pairs) return strcmp(name, "generator") && strcmp(name, "seed");
    const char *const *left = l->options ? l->options->leave : NULL;
    while (left && *left && strcmp(*left, name)) left++;
    return left && *left;
}

static int is_compared(const loading *l)
{
    return l->pairs || (l->options && l->options->settings == HALFSTEP_SETTINGS_COMPARE);
}

/* Returns the default of a choice. A file lacks choices that came later, and was written with their defaults. */
static const char *usual_choice(const loading *l, const setting *s)
{
    if (!strcmp(s->name, "decay")) return l->record->groups[s->group].rule.decay;
    return halfstep_choice_value(s->name, 0);
}

static int fail_setting(const loading *l, const setting *s)
{
    char group[32] = "";
    if (s->group != HALFSTEP_ALL_GROUPS && l->record->group_count > 1)
        snprintf(group, sizeof group, ", group %d", s->group);
    if (s->choice[HERE])
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s is %s here but %s in %s%s", s->name, s->choice[HERE],
                       s->choice[IN_FILE], l->states.path, group);
    char here[32] = "", in_file[32] = "";
    for (int digits = 10; digits <= 17 && !strcmp(here, in_file); digits += 7) {
        snprintf(here, sizeof here, "%.*g", digits, s->number[HERE]);
        snprintf(in_file, sizeof in_file, "%.*g", digits, s->number[IN_FILE]);
    }
    return io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s is %s here but %s in %s%s", s->name, here, in_file,
                   l->states.path, group);
}

/* Returns the library's own copy of a choice's value, which outlives the file, or NULL for an unknown value. */
static const char *known_choice(const char *choice, const char *value)
{
    const char *known;
    for (int32_t i = 0; (known = halfstep_choice_value(choice, i)) != NULL; i++)
        if (!strcmp(known, value)) break;
    return known;
}

static int read_setting(const loading *l, setting *s)
{
    const int compare = is_compared(l);
    const int64_t source = s->group == HALFSTEP_ALL_GROUPS ? 0 : l->record->groups[s->group].source;
    s->choice[IN_FILE] = s->choice[HERE];
    s->number[IN_FILE] = s->number[HERE];
    /* A group without tensors continues no group of the file. */
    if (is_left(l, s->name) || source < 0) return HALFSTEP_OK;
    char prefix[32] = "";
    if (s->group != HALFSTEP_ALL_GROUPS) snprintf(prefix, sizeof prefix, "group.%lld.", (long long)source);
    const char *value = find_value(l, prefix, s->name);
    int code = HALFSTEP_OK;
    /* As with the seed, other random bits would follow from another one. */
    if (!value && !strcmp(s->name, "generator")) return hstep_fail_value(l, prefix, s->name);
    if (s->choice[HERE]) {
        if (value || compare) s->choice[IN_FILE] = known_choice(s->name, value ? value : usual_choice(l, s));
        if (!s->choice[IN_FILE])
            code = io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s: %s%s is %s, which this library does not have",
                           l->states.path, prefix, s->name, value);
        else if (compare && strcmp(s->choice[HERE], s->choice[IN_FILE])) code = fail_setting(l, s);
    } else {
        if (!value && compare) s->number[IN_FILE] = s->limits.initial;
        double number = s->number[IN_FILE];
        if (value && !hstep_is_double(value, &number)) code = hstep_fail_value(l, prefix, s->name);
        s->number[IN_FILE] = number;
        if (!code && compare && s->number[HERE] != number) code = fail_setting(l, s);
        if (!code && value &&
            !(number >= s->limits.minimum &&
              (number < s->limits.maximum || (number == s->limits.maximum && !s->limits.exclusive_maximum))))
            code =
                io_fail(l->error, HALFSTEP_ERROR_RANGE, "%s: %s%s is %s, not in [%g, %g%c", l->states.path, prefix,
                        s->name, value, s->limits.minimum, s->limits.maximum, s->limits.exclusive_maximum ? ')' : ']');
    }
    return code;
}

static int read_seed(const loading *l)
{
    record *r = l->record;
    const int compare = is_compared(l);
    const char *text = find_value(l, "seed", "");
    r->numbers[IN_FILE].seed = r->numbers[HERE].seed;
    if (is_left(l, "seed")) return HALFSTEP_OK;
    if (!text || !hstep_is_uint64(text, &r->numbers[IN_FILE].seed)) return hstep_fail_value(l, "seed", "");
    if (compare && r->numbers[HERE].seed != r->numbers[IN_FILE].seed)
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "seed is %llu here but %llu in %s",
                       ull(r->numbers[HERE].seed), ull(r->numbers[IN_FILE].seed), l->states.path);
    return HALFSTEP_OK;
}

static int read_steps(const loading *l)
{
    record *r = l->record;
    for (int32_t g = 0; g < r->group_count; g++) {
        group_record *group = &r->groups[g];
        group->numbers[IN_FILE].steps = group->numbers[HERE].steps;
        if (group->source < 0) continue;
        char name[32];
        snprintf(name, sizeof name, "group.%lld.steps", (long long)group->source);
        int code = read_count(l, name, "", &group->numbers[IN_FILE].steps);
        if (code) return code;
    }
    int code = read_count(l, "skipped_steps", "", &r->numbers[IN_FILE].skipped_steps);
    const char *text = find_value(l, "gradient_norm", "");
    double *norm = &r->numbers[IN_FILE].gradient_norm;
    if (!code && (!text || !hstep_is_double(text, norm) || !(*norm >= 0.0)))
        return hstep_fail_value(l, "gradient_norm", "");
    return code;
}

/* Fails if the file has a tensor that this optimizer does not have, unless options.subset allows it. */
static int check_unknown_tensors(const loading *l)
{
    static const char *const prefixes[] = {"counters.", "group_of."};
    uint64_t count = l->pairs ? l->pairs->count : halfstep_safetensors_metadata_count(l->states.file);
    if (l->options && l->options->subset) return HALFSTEP_OK;
    for (uint64_t i = 0; i < count; i++) {
        const char *key = "", *value;
        if (l->pairs) key = l->pairs->list[i].key;
        else halfstep_get_safetensors_metadata(l->states.file, i, &key, &value);
        for (size_t k = 0; k < sizeof prefixes / sizeof *prefixes; k++) {
            size_t length = strlen(prefixes[k]);
            if (!strncmp(key, prefixes[k], length) && !hstep_find_tensor(l->record, key + length))
                return io_fail(l->error, HALFSTEP_ERROR_MISMATCH,
                               "%s has a tensor \"%s\" that this optimizer does not have", l->states.path,
                               key + length);
        }
    }
    return HALFSTEP_OK;
}

typedef struct numbered_id {
    uint64_t id;
    int32_t index;
} numbered_id;

static int compare_ids(const void *a, const void *b)
{
    const uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
    return first < second ? -1 : first > second;
}

static int compare_numbered(const void *a, const void *b)
{
    return compare_ids(&((const numbered_id *)a)->id, &((const numbered_id *)b)->id);
}

/* Lists all ids of tensors, here and in the file. */
static int list_ids(const loading *l)
{
    record *r = l->record;
    size_t n = 0;
    r->ids = malloc((2 * (size_t)r->tensor_count + 1) * sizeof *r->ids);
    if (!r->ids) return io_fail_memory(l->error);
    for (int32_t i = 0; i < r->tensor_count; i++)
        for (int side = 0; side < SIDES; side++) r->ids[n++] = r->tensors[i].numbers[side].id;
    qsort(r->ids, n, sizeof *r->ids, compare_ids);
    return HALFSTEP_OK;
}

/* Fails if the file gives two tensors one id, because they would share their random bits. */
static int check_ids(const loading *l)
{
    const record *r = l->record;
    numbered_id *ids = malloc(((size_t)r->tensor_count + 1) * sizeof *ids);
    int code = ids ? HALFSTEP_OK : io_fail_memory(l->error);
    for (int32_t i = 0; i < r->tensor_count && ids; i++) ids[i] = (numbered_id){r->tensors[i].numbers[IN_FILE].id, i};
    if (ids && r->tensor_count) qsort(ids, (size_t)r->tensor_count, sizeof *ids, compare_numbered);
    for (int32_t i = 1; i < r->tensor_count && !code; i++)
        if (ids[i - 1].id == ids[i].id)
            code = io_fail(l->error, HALFSTEP_ERROR_DUPLICATE, "%s: tensors \"%s\" and \"%s\" have the same id %llu",
                           l->states.path, r->tensors[ids[i - 1].index].info.name, r->tensors[ids[i].index].info.name,
                           ull(ids[i].id));
    free(ids);
    return code;
}

/* Fails if a name in `leave` is not one of a setting here, because it would leave nothing. */
static int check_left(const loading *l)
{
    const record *r = l->record;
    for (const char *const *name = l->options ? l->options->leave : NULL; name && *name; name++) {
        int known = !strcmp(*name, "seed");
        for (size_t i = 0; i < r->setting_count && !known; i++) known = !strcmp(r->settings[i].name, *name);
        if (!known)
            return io_fail(l->error, HALFSTEP_ERROR_ARGUMENT,
                           "options: leave names \"%s\", which is no hyper-parameter or choice of this optimizer, nor "
                           "\"seed\"",
                           *name);
    }
    return HALFSTEP_OK;
}

int hstep_read_numbers(const loading *l)
{
    record *r = l->record;
    const char *format = find_value(l, "format", "");
    if (!format || strcmp(format, HSTEP_OPTIMIZER_FORMAT))
        return io_fail(l->error, HALFSTEP_ERROR_FORMAT,
                       "%s is not an optimizer file of halfstep: its format is not \"" HSTEP_OPTIMIZER_FORMAT "\"",
                       l->states.path);
    int code = check_left(l);
    if (!code) code = check_unknown_tensors(l);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = read_counters(l, &r->tensors[i]);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = read_group_of(l, &r->tensors[i]);
    if (!code) code = read_seed(l);
    for (size_t i = 0; i < r->setting_count && !code; i++) code = read_setting(l, &r->settings[i]);
    if (!code) code = read_steps(l);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = read_scalars(l, &r->tensors[i]);
    if (!code) code = check_ids(l);
    return code ? code : list_ids(l);
}
