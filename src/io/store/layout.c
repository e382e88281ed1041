#include "io/store/layout.h"

#include "io/numbers.h"

/* Numbers are little-endian, as all machines are that halfstep runs on. */
typedef struct header_bytes {
    char magic[16];
    uint32_t version, flags;
    uint64_t piece_bytes, pieces, slot_bytes, half_bytes, json_bytes, crc64;
} header_bytes;

typedef struct slot_bytes {
    char magic[8];
    uint64_t generation, json_bytes, crc64;
} slot_bytes;

/* These texts are compared with as many bytes as a file has for them. */
static const char header_magic[] = "halfstep states\n", slot_magic[8] = "commit\n";
enum { VERSION = 1, FLAG_WEIGHTS = 1 };

#define HASH_FACTOR UINT64_C(0x9e3779b97f4a7c15)

/* The most bytes of a header or a record. */
#define MOST_JSON ((uint64_t)256 << 20)

uint64_t hstep_header_bytes(const hstep_layout *layout)
{
    return hstep_whole_pages(sizeof(header_bytes) + layout->json_bytes);
}

uint64_t hstep_slot_begin(const hstep_layout *layout, uint64_t generation)
{
    return hstep_header_bytes(layout) + generation % 2 * layout->slot_bytes;
}

uint64_t hstep_half_begin(const hstep_layout *layout, int half)
{
    return hstep_header_bytes(layout) + 2 * layout->slot_bytes + (uint64_t)half * layout->half_bytes;
}

uint64_t hstep_layout_bytes(const hstep_layout *layout) { return hstep_half_begin(layout, 2); }

enum { LANES = 8 };

/* Puts one word into each lane. */
static inline void mix(uint64_t lane[LANES], const char *words)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t word;
        memcpy(&word, words + i * (int)sizeof word, sizeof word);
        word = (lane[i] ^ word) * HASH_FACTOR;
        lane[i] = word ^ word >> 29;
    }
}

uint64_t hstep_hash(const void *data, uint64_t bytes, uint64_t seed)
{
    uint64_t lane[LANES] = {bytes, seed, 2, 3, 4, 5, 6, 7}, hash = 0;
    const char *next = data;
    uint64_t left = bytes;
    for (; left >= sizeof lane; left -= sizeof lane, next += sizeof lane) mix(lane, next);
    if (left) {
        char rest[sizeof lane] = {0};
        memcpy(rest, next, (size_t)left);
        mix(lane, rest);
    }
    for (int i = 0; i < LANES; i++) {
        hash = (hash ^ lane[i]) * HASH_FACTOR;
        hash ^= hash >> 32;
    }
    return hash ? hash : 1;
}

void hstep_add_stretch(hstep_sums *sums, const void *stretch, uint64_t at, uint64_t bytes)
{
    const uint64_t hash = hstep_hash(stretch, bytes, at);
    sums->all += hash;
    if (at + bytes <= sums->head_bytes) sums->head += hash;
    else if (at < sums->head_bytes) sums->head += hstep_hash(stretch, sums->head_bytes - at, at);
}

/* ---- The header -------------------------------------------------------------------------------------------------- */

static uint64_t header_crc(header_bytes header, const char *json)
{
    header.crc64 = 0;
    return hstep_crc64(hstep_crc64(0, &header, sizeof header), json, header.json_bytes);
}

void hstep_write_header(const hstep_layout *layout, const char *json, void *memory)
{
    header_bytes header = {.version = VERSION,
                           .flags = layout->has_weights ? FLAG_WEIGHTS : 0,
                           .piece_bytes = layout->piece_bytes,
                           .pieces = layout->pieces,
                           .slot_bytes = layout->slot_bytes,
                           .half_bytes = layout->half_bytes,
                           .json_bytes = layout->json_bytes};
    memcpy(header.magic, header_magic, sizeof header.magic);
    header.crc64 = header_crc(header, json);
    memset(memory, 0, (size_t)hstep_header_bytes(layout));
    memcpy(memory, &header, sizeof header);
    memcpy((char *)memory + sizeof header, json, (size_t)layout->json_bytes);
}

int hstep_read_header(const hstep_file *file, uint64_t file_bytes, hstep_layout *layout, char **json,
                      hstep_error *error)
{
    const char *path = hstep_file_path(file);
    header_bytes header;
    *json = NULL;
    memset(layout, 0, sizeof *layout);
    int code = file_bytes < sizeof header ? HALFSTEP_OK : hstep_read_at(file, 0, &header, sizeof header, error);
    if (code) return code;
    if (file_bytes < sizeof header || memcmp(header.magic, header_magic, sizeof header.magic))
        return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s is not a file of states of halfstep", path);
    if (header.version != VERSION || header.flags & ~(uint32_t)FLAG_WEIGHTS)
        return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s has version %u of the layout; this library reads version %d",
                       path, header.version, VERSION);
    if (header.json_bytes > MOST_JSON || header.slot_bytes > MOST_JSON || header.slot_bytes % HSTEP_PAGE ||
        header.half_bytes % HSTEP_PAGE || header.half_bytes > (uint64_t)INT64_MAX / 4 ||
        header.pieces > header.json_bytes || sizeof header + header.json_bytes > file_bytes)
        return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s: its header is damaged", path);
    *json = malloc((size_t)header.json_bytes + 1);
    if (!*json) return io_fail_memory(error);
    code = hstep_read_at(file, sizeof header, *json, (size_t)header.json_bytes, error);
    (*json)[header.json_bytes] = 0;
    if (!code && header_crc(header, *json) != header.crc64)
        code = io_fail(error, HALFSTEP_ERROR_FORMAT, "%s: its header is damaged", path);
    *layout = (hstep_layout){.has_weights = header.flags & FLAG_WEIGHTS,
                             .piece_bytes = header.piece_bytes,
                             .pieces = header.pieces,
                             .json_bytes = header.json_bytes,
                             .slot_bytes = header.slot_bytes,
                             .half_bytes = header.half_bytes};
    if (!code && hstep_layout_bytes(layout) != file_bytes)
        code = io_fail(error, HALFSTEP_ERROR_FORMAT, "%s has %llu bytes instead of %llu: it was cut short or changed",
                       path, ull(file_bytes), ull(hstep_layout_bytes(layout)));
    if (code) {
        free(*json);
        *json = NULL;
    }
    return code;
}

/* ---- Records ----------------------------------------------------------------------------------------------------- */

static uint64_t slot_crc(slot_bytes slot, const char *json)
{
    slot.crc64 = 0;
    return hstep_crc64(hstep_crc64(0, &slot, sizeof slot), json, slot.json_bytes);
}

uint64_t hstep_write_commit(const hstep_layout *layout, uint64_t generation, const hstep_buffer *json, void *memory)
{
    slot_bytes slot = {.generation = generation, .json_bytes = json->bytes};
    const uint64_t bytes = hstep_whole_pages(sizeof slot + json->bytes);
    if (bytes > layout->slot_bytes) return 0;
    memcpy(slot.magic, slot_magic, sizeof slot.magic);
    slot.crc64 = slot_crc(slot, json->data);
    memcpy(memory, &slot, sizeof slot);
    memcpy((char *)memory + sizeof slot, json->data, json->bytes);
    memset((char *)memory + sizeof slot + json->bytes, 0, (size_t)bytes - sizeof slot - json->bytes);
    return bytes;
}

void hstep_free_commit(hstep_commit *commit)
{
    free(commit->text);
    free(commit->metadata.list);
    free(commit->values.list);
    free(commit->halves);
    free(commit->sums);
    free(commit->hashes);
    memset(commit, 0, sizeof *commit);
}

static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const hstep_pair *)a)->key, ((const hstep_pair *)b)->key);
}

/* Reads an object of strings. Returns 0 when memory is short, with json->problem unset, and after an error. */
static int read_pairs(hstep_json *json, hstep_pairs *pairs)
{
    const char *key, *value;
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (!hstep_json_string(json, &value) ||
            !io_grow((void **)&pairs->list, pairs->count, &pairs->capacity, sizeof *pairs->list))
            return 0;
        pairs->list[pairs->count++] = (hstep_pair){(char *)key, (char *)value};
    }
    if (json->problem) return 0;
    if (pairs->count) qsort(pairs->list, pairs->count, sizeof *pairs->list, compare_pairs);
    for (size_t i = 1; i < pairs->count; i++)
        if (!strcmp(pairs->list[i - 1].key, pairs->list[i].key)) return hstep_json_fail(json, "a member comes twice");
    return 1;
}

/* Reads a string with a bit for each piece, four in a digit, the first one lowest. */
static int read_halves(hstep_json *json, uint64_t pieces, unsigned char **halves)
{
    const char *digits;
    if (*halves) return hstep_json_fail(json, "a member comes twice");
    if (!hstep_json_string(json, &digits)) return 0;
    if (strlen(digits) != (pieces + 3) / 4) return hstep_json_fail(json, "\"halves\" has a wrong length");
    if (!(*halves = malloc((size_t)pieces + 1))) return 0;
    for (uint64_t i = 0; i < pieces; i++) {
        const int digit = hstep_hex_digit(digits[i / 4]);
        if (digit < 0) return hstep_json_fail(json, "\"halves\" has a wrong digit");
        (*halves)[i] = (unsigned char)(digit >> i % 4 & 1);
    }
    return 1;
}

/* Reads a string of 16 digits for each number. */
static int read_numbers(hstep_json *json, uint64_t **numbers, uint64_t *count)
{
    const char *digits;
    if (*numbers) return hstep_json_fail(json, "a member comes twice");
    if (!hstep_json_string(json, &digits)) return 0;
    const size_t length = strlen(digits);
    *count = length / 16;
    if (length % 16) return hstep_json_fail(json, "a list of numbers ends within one");
    if (!(*numbers = calloc((size_t)*count + 1, sizeof **numbers))) return 0;
    for (uint64_t i = 0; i < *count; i++)
        if (!hstep_read_sum(&digits, &(*numbers)[i])) return hstep_json_fail(json, "a number has a wrong digit");
    return 1;
}

static int parse_commit(hstep_json *json, const hstep_layout *layout, hstep_commit *commit)
{
    const char *key;
    uint64_t sum_count = 0;
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        const int good = !strcmp(key, "metadata") ? !commit->metadata.list && read_pairs(json, &commit->metadata)
                         : !strcmp(key, "values") ? !commit->values.list && read_pairs(json, &commit->values)
                         : !strcmp(key, "halves") ? read_halves(json, layout->pieces, &commit->halves)
                         : !strcmp(key, "hashes") ? read_numbers(json, &commit->hashes, &commit->hash_count)
                         : !strcmp(key, "sums")   ? read_numbers(json, &commit->sums, &sum_count)
                                                  : hstep_json_skip(json);
        if (!good) return 0;
    }
    if (!json->problem && (!commit->halves || sum_count != layout->pieces))
        return hstep_json_fail(json, "\"halves\" or \"sums\" is missing or too short");
    return hstep_json_end(json);
}

/* Reads the record in the place of a generation. *damaged is set to 1 if there is one, but not a sound one. */
static int read_slot(const hstep_file *file, const hstep_layout *layout, uint64_t place, slot_bytes *slot, char **text,
                     int *damaged, hstep_error *error)
{
    const uint64_t begin = hstep_slot_begin(layout, place);
    static const slot_bytes none;
    *text = NULL;
    *damaged = 0;
    if (layout->slot_bytes < sizeof *slot) {
        *damaged = 1;
        return HALFSTEP_OK;
    }
    int code = hstep_read_at(file, begin, slot, sizeof *slot, error);
    *damaged = code || memcmp(slot, &none, sizeof none) != 0;
    if (code || !*damaged) return code;
    if (memcmp(slot->magic, slot_magic, sizeof slot->magic) || slot->generation % 2 != place || !slot->generation ||
        slot->json_bytes > layout->slot_bytes - sizeof *slot)
        return HALFSTEP_OK;
    char *read = malloc((size_t)slot->json_bytes + 1);
    if (!read) return io_fail_memory(error);
    code = hstep_read_at(file, begin + sizeof *slot, read, (size_t)slot->json_bytes, error);
    read[slot->json_bytes] = 0;
    *damaged = code || slot_crc(*slot, read) != slot->crc64;
    if (*damaged) free(read);
    else *text = read;
    return code;
}

int hstep_read_commit(const hstep_file *file, const hstep_layout *layout, hstep_commit *commit, char **copy,
                      hstep_error *error)
{
    slot_bytes slot[2] = {{.generation = 0}};
    char *text[2] = {NULL, NULL};
    int damaged[2] = {0, 0};
    const char *path = hstep_file_path(file);
    memset(commit, 0, sizeof *commit);
    /* A record that the disk does not give may be sound, so it does not count as damaged. */
    int code = read_slot(file, layout, 0, &slot[0], &text[0], &damaged[0], error);
    if (!code) code = read_slot(file, layout, 1, &slot[1], &text[1], &damaged[1], error);
    const int newest = text[1] && (!text[0] || slot[1].generation > slot[0].generation);
    commit->text = text[newest];
    free(text[!newest]);
    if (code) return code;
    if (!commit->text)
        return io_fail(error, HALFSTEP_ERROR_FORMAT,
                       "%s: both of its records are damaged, so nothing says which step its states are of", path);
    commit->generation = slot[newest].generation;
    commit->fell_back = damaged[!newest];
    if (copy && !(*copy = hstep_copy(commit->text))) return io_fail_memory(error);
    hstep_json json = {.text = commit->text, .bytes = (size_t)slot[newest].json_bytes};
    if (parse_commit(&json, layout, commit)) return HALFSTEP_OK;
    if (!json.problem) return io_fail_memory(error);
    return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s: its record is damaged: %s at byte %llu", path, json.problem,
                   ull(json.at));
}

/* ---- Differences ------------------------------------------------------------------------------------------------- */

typedef struct comparison {
    hstep_json here, there;
    char *text;
    size_t size;
    char name[128], key[64]; /* of the tensor and the member being compared */
    int differs;
} comparison;

static int tell(comparison *c, const char *here, const char *there)
{
    c->differs = 1;
    snprintf(c->text, c->size, "%s%s%s%s is %s here but %s in the file", *c->name ? "tensor \"" : "", c->name,
             *c->name ? "\": " : "", c->key, here, there);
    return 0;
}

static int compare_values(comparison *c, int depth);

static int compare_members(comparison *c, int depth)
{
    const char *here, *there;
    for (size_t n = 0, m = 0;;) {
        const int first = hstep_json_member(&c->here, &n, &here), second = hstep_json_member(&c->there, &m, &there);
        if (!first && !second) return !c->there.problem;
        if (!first || !second) return 0;
        if (strcmp(here, there)) return 0;
        snprintf(c->key, sizeof c->key, "%s", here);
        if (!compare_values(c, depth)) return 0;
    }
}

static int compare_lists(comparison *c, int depth)
{
    hstep_json_expect(&c->here, '[');
    hstep_json_expect(&c->there, '[');
    char key[sizeof c->key];
    snprintf(key, sizeof key, "%s", c->key);
    for (int i = 0;; i++) {
        const int first = i ? hstep_json_take(&c->here, ',') : hstep_json_peek(&c->here) != ']',
                  second = i ? hstep_json_take(&c->there, ',') : hstep_json_peek(&c->there) != ']';
        if (!strcmp(key, "tensors")) c->name[0] = 0;
        snprintf(c->key, sizeof c->key, "%s", key);
        if (first != second) return tell(c, first ? "longer" : "shorter", first ? "shorter" : "longer");
        if (!first) return hstep_json_expect(&c->here, ']') && hstep_json_expect(&c->there, ']');
        if (!compare_values(c, depth)) return 0;
    }
}

static int compare_values(comparison *c, int depth)
{
    const char mark = hstep_json_peek(&c->here), other = hstep_json_peek(&c->there);
    if (depth == 0) return 0;
    if (mark == '{' && other == '{') return compare_members(c, depth - 1);
    if (mark == '[' && other == '[') return compare_lists(c, depth - 1);
    if (mark == '"' && other == '"') {
        const char *here, *there;
        if (!hstep_json_string(&c->here, &here) || !hstep_json_string(&c->there, &there)) return 0;
        if (strcmp(here, there)) return tell(c, here, there);
        if (!strcmp(c->key, "name") && !*c->name) snprintf(c->name, sizeof c->name, "%s", here);
        return 1;
    }
    uint64_t here, there;
    char first[32], second[32];
    if (!hstep_json_number(&c->here, &here) || !hstep_json_number(&c->there, &there)) return 0;
    if (here == there) return 1;
    snprintf(first, sizeof first, "%llu", ull(here));
    snprintf(second, sizeof second, "%llu", ull(there));
    return tell(c, first, second);
}

int hstep_name_difference(char *here, size_t here_bytes, char *in_file, size_t in_file_bytes, char *text, size_t size)
{
    comparison c = {.here = {.text = here, .bytes = here_bytes},
                    .there = {.text = in_file, .bytes = in_file_bytes},
                    .text = text,
                    .size = size};
    compare_values(&c, 8);
    return c.differs;
}
