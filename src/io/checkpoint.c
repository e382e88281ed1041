/* Checkpoint directories: generations of files, each sealed by a manifest, and one pointer that is replaced last. The
 * layout and what each step of a save guarantees are in docs/checkpoints.md. Over 500 lines because saving, pruning and
 * opening must agree on that layout, and nobody else may know it. */
#include <stdatomic.h>

#include "base/structs.h"
#include "io/files.h"
#include "io/json.h"
#include "io/numbers.h"
#include "io/parts.h"

#define HSTEP_MANIFEST "manifest.json"
#define HSTEP_GENERATION "checkpoint-"
#define HSTEP_TEMPORARY ".halfstep-tmp-"
/* Prefix of files in an unfinished checkpoint. It tells what a killed save left behind from files that somebody else
 * has put there. */
#define HSTEP_PART ".halfstep-part-"
#define HSTEP_POINTER_FORMAT "halfstep-checkpoint-directory"
#define HSTEP_MANIFEST_FORMAT "halfstep-checkpoint"
#define HSTEP_MANIFEST_VERSION 1
/* Enough for some forty thousand files, or values as large as any configuration. */
#define HSTEP_MANIFEST_LIMIT ((uint64_t)4 << 20)
#define HSTEP_MAX_NAME 128

/* ---- Checksum: CRC-64/XZ ----------------------------------------------------------------------------------------- */

/* The table of a CRC that takes sixteen bytes by sixteen look-ups. A CRC is enough because it guards against accidents,
 * not attackers. In plain C it is nine times faster than SHA-256 (2.7 against 0.31 GB/s), so the disk stays the limit.
 * 64 bits cost no more than 32 and leave no practical chance of a miss. */
static uint64_t crc_table[16][256];

static void build_crc_table(void)
{
    for (unsigned i = 0; i < 256; i++) {
        uint64_t value = i;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? UINT64_C(0xC96C5795D7870F42) : 0);
        crc_table[0][i] = value;
    }
    for (unsigned t = 1; t < 16; t++)
        for (unsigned i = 0; i < 256; i++)
            crc_table[t][i] = crc_table[t - 1][i] >> 8 ^ crc_table[0][crc_table[t - 1][i] & 255];
}

static uint64_t load64(const unsigned char *bytes)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | bytes[i];
    return value;
}

static uint64_t fold(uint64_t word, const uint64_t (*table)[256])
{
    return table[7][word & 255] ^ table[6][word >> 8 & 255] ^ table[5][word >> 16 & 255] ^ table[4][word >> 24 & 255] ^
           table[3][word >> 32 & 255] ^ table[2][word >> 40 & 255] ^ table[1][word >> 48 & 255] ^ table[0][word >> 56];
}

uint64_t hstep_crc64(uint64_t crc, const void *data, uint64_t bytes)
{
    const unsigned char *next = data;
    hstep_call_once(build_crc_table);
    crc = ~crc;
    for (; bytes >= 16; bytes -= 16, next += 16)
        crc = fold(crc ^ load64(next), crc_table + 8) ^ fold(load64(next + 8), crc_table);
    for (; bytes; bytes--) crc = crc_table[0][(crc ^ *next++) & 255] ^ crc >> 8;
    return ~crc;
}

/* ---- Manifests --------------------------------------------------------------------------------------------------- */

typedef struct file_record {
    const char *name;
    char *path;
    uint64_t bytes, crc;
} file_record;

/* A manifest of either kind: a generation's has files and values, the pointer has `current`. If the manifest was read,
 * names, keys, values and `current` lie in `text`. If it is to be written, `text` is NULL and they are copies. */
typedef struct manifest {
    char *text;
    const char *current;
    uint64_t step, sequence;
    file_record *files;
    size_t file_count, file_capacity;
    hstep_pairs values; /* sorted by key if the manifest is to be written */
} manifest;

static void free_manifest(manifest *m)
{
    for (size_t i = 0; i < m->file_count; i++) {
        if (!m->text) free((char *)m->files[i].name);
        free(m->files[i].path);
    }
    if (m->text) free(m->values.list);
    else hstep_free_pairs(&m->values);
    free(m->files);
    free(m->text);
    memset(m, 0, sizeof *m);
}

/* The last member of a manifest is the checksum of everything before it. A damaged manifest therefore cannot pass for
 * another one. */
#define HSTEP_SEAL ",\n  \"crc64\": \"%016llx\"\n}\n"

static void append_seal(hstep_buffer *text)
{
    if (!text->failed) hstep_append_format(text, HSTEP_SEAL, ull(hstep_crc64(0, text->data, text->bytes)));
}

static int is_sealed(const char *text, size_t bytes)
{
    char seal[64];
    size_t length = (size_t)snprintf(seal, sizeof seal, HSTEP_SEAL, 0ull);
    if (bytes < length) return 0;
    snprintf(seal, sizeof seal, HSTEP_SEAL, ull(hstep_crc64(0, text, bytes - length)));
    return !memcmp(text + bytes - length, seal, length);
}

static void begin_manifest(hstep_buffer *text, const char *format, uint64_t sequence)
{
    hstep_append_format(text, "{\n  \"format\": \"%s\",\n  \"version\": %d,\n  \"sequence\": %llu", format,
                        HSTEP_MANIFEST_VERSION, ull(sequence));
}

static int compare_files(const void *a, const void *b)
{
    return strcmp(((const file_record *)a)->name, ((const file_record *)b)->name);
}

static void write_generation_manifest(hstep_buffer *text, manifest *m)
{
    if (m->file_count) qsort(m->files, m->file_count, sizeof *m->files, compare_files);
    begin_manifest(text, HSTEP_MANIFEST_FORMAT, m->sequence);
    hstep_append_format(text, ",\n  \"step\": %llu,\n  \"files\": [", ull(m->step));
    for (size_t i = 0; i < m->file_count; i++) /* the characters of file names need no escapes */
        hstep_append_format(text, "%s\n    {\"name\": \"%s\", \"bytes\": %llu, \"crc64\": \"%016llx\"}", i ? "," : "",
                            m->files[i].name, ull(m->files[i].bytes), ull(m->files[i].crc));
    hstep_append_text(text, m->file_count ? "\n  ]" : "]");
    hstep_append_text(text, ",\n  \"values\": {");
    for (size_t i = 0; i < m->values.count; i++) {
        hstep_append_text(text, i ? ",\n    " : "\n    ");
        hstep_append_json(text, m->values.list[i].key);
        hstep_append_text(text, ": ");
        hstep_append_json(text, m->values.list[i].value);
    }
    hstep_append_text(text, m->values.count ? "\n  }" : "}");
    append_seal(text);
}

static void write_pointer(hstep_buffer *text, const char *current, uint64_t sequence)
{
    begin_manifest(text, HSTEP_POINTER_FORMAT, sequence);
    hstep_append_format(text, ",\n  \"current\": \"%s\"", current);
    append_seal(text);
}

/* Tells whether a file of a checkpoint may have this name. Such a name stays inside its directory and means the same on
 * every system. */
static int is_file_name(const char *name)
{
    size_t length = strlen(name);
    return length && length <= HSTEP_MAX_NAME && name[0] != '.' && strcmp(name, HSTEP_MANIFEST) &&
           strncmp(name, HSTEP_GENERATION, strlen(HSTEP_GENERATION)) &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

/* Returns what follows a prefix and a decimal number, or NULL if the name does not begin with them. */
static const char *skip_numbered(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    size_t digits = strncmp(name, prefix, length) ? 0 : strspn(name + length, "0123456789");
    return digits ? name + length + digits : NULL;
}

/* Tells whether a name is checkpoint-<step> or checkpoint-<step>-<n>, which is used if checkpoint-<step> exists
 * already. */
static int is_generation_name(const char *name)
{
    const char *rest = skip_numbered(name, HSTEP_GENERATION);
    if (rest && *rest) rest = skip_numbered(rest, "-");
    return rest && !*rest && strlen(name) <= HSTEP_MAX_NAME;
}

/* Tells whether hstep_temporary_path() can have made a name from HSTEP_TEMPORARY. */
static int is_temporary_name(const char *name)
{
    const char *rest = skip_numbered(name, HSTEP_TEMPORARY);
    if (rest) rest = skip_numbered(rest, "-");
    return rest && !*rest;
}

/* Parsers return 1, or 0 for malformed text, or -1 when memory is short. */
static int parse_file(hstep_json *json, manifest *m)
{
    const char *key, *name = NULL, *crc = NULL;
    file_record record = {0};
    int sized = 0;
    if (!hstep_json_expect(json, '{')) return 0;
    do {
        if (!hstep_json_key(json, &key)) return 0;
        int good = !strcmp(key, "name") && !name       ? hstep_json_string(json, &name)
                   : !strcmp(key, "crc64") && !crc     ? hstep_json_string(json, &crc)
                   : !strcmp(key, "bytes") && !sized++ ? hstep_json_number(json, &record.bytes)
                                                       : 0;
        if (!good) return 0;
    } while (hstep_json_take(json, ','));
    if (!hstep_json_expect(json, '}') || !name || !is_file_name(name) || !sized || !crc ||
        !hstep_read_sum(&crc, &record.crc) || *crc)
        return 0;
    if (!hstep_grow((void **)&m->files, m->file_count, &m->file_capacity, sizeof record)) return -1;
    record.name = name;
    m->files[m->file_count++] = record;
    return 1;
}

static int parse_files(hstep_json *json, manifest *m)
{
    if (!hstep_json_expect(json, '[')) return 0;
    if (hstep_json_take(json, ']')) return 1;
    do {
        int result = parse_file(json, m);
        if (result <= 0) return result;
    } while (hstep_json_take(json, ','));
    return hstep_json_expect(json, ']');
}

static int parse_values(hstep_json *json, manifest *m)
{
    const char *key, *value;
    if (!hstep_json_expect(json, '{')) return 0;
    if (hstep_json_take(json, '}')) return 1;
    do {
        if (!hstep_json_key(json, &key) || !hstep_json_string(json, &value)) return 0;
        if (!hstep_grow((void **)&m->values.list, m->values.count, &m->values.capacity, sizeof *m->values.list))
            return -1;
        m->values.list[m->values.count++] = (hstep_pair){(char *)key, (char *)value};
    } while (hstep_json_take(json, ','));
    return hstep_json_expect(json, '}');
}

/* Parses a manifest of either kind. "format" and "version" come first in every version, so that a later one can be told
 * from a damaged one. */
static int parse_manifest(hstep_json *json, manifest *m, uint64_t *version)
{
    enum { SEQUENCE = 1, STEP = 2, FILES = 4, VALUES = 8, CURRENT = 16, CRC = 32 };
    const char *key, *format, *text;
    unsigned seen = 0, member;
    *version = 0;
    if (!hstep_json_expect(json, '{') || !hstep_json_key(json, &key) || strcmp(key, "format") ||
        !hstep_json_string(json, &format) || !hstep_json_expect(json, ',') || !hstep_json_key(json, &key) ||
        strcmp(key, "version"))
        return 0;
    int is_pointer = !strcmp(format, HSTEP_POINTER_FORMAT);
    if ((!is_pointer && strcmp(format, HSTEP_MANIFEST_FORMAT)) || !hstep_json_number(json, version)) return 0;
    if (*version != HSTEP_MANIFEST_VERSION) return 1;
    while (hstep_json_take(json, ',')) {
        int result;
        if (!hstep_json_key(json, &key)) return 0;
        if (!strcmp(key, "sequence")) member = SEQUENCE, result = hstep_json_number(json, &m->sequence);
        else if (!strcmp(key, "step")) member = STEP, result = hstep_json_number(json, &m->step);
        else if (!strcmp(key, "files")) member = FILES, result = parse_files(json, m);
        else if (!strcmp(key, "values")) member = VALUES, result = parse_values(json, m);
        else if (!strcmp(key, "crc64")) member = CRC, result = hstep_json_string(json, &text);
        else if (!strcmp(key, "current")) {
            member = CURRENT;
            result = hstep_json_string(json, &m->current) && is_generation_name(m->current);
        } else {
            return 0;
        }
        if (result <= 0 || seen & member) return result < 0 ? -1 : 0;
        seen |= member;
    }
    if (!hstep_json_expect(json, '}')) return 0;
    return seen == (is_pointer ? SEQUENCE | CURRENT | CRC : SEQUENCE | STEP | FILES | VALUES | CRC);
}

/* Reads directory/manifest.json, of either kind. Sets error->not_found if there is none. */
static int read_manifest(const char *directory, manifest *m, hstep_error *error)
{
    char *path = hstep_join_path(directory, HSTEP_MANIFEST);
    size_t bytes = 0;
    memset(m, 0, sizeof *m);
    if (!path) return hstep_fail_memory(error);
    int code = hstep_read_whole(path, HSTEP_MANIFEST_LIMIT, &m->text, &bytes, error);
    if (!code && !is_sealed(m->text, bytes)) {
        code = hstep_fail(error, HALFSTEP_ERROR_FORMAT, "%s is corrupt: its own checksum does not match", path);
    } else if (!code) {
        hstep_json json = {m->text, bytes, 0, NULL};
        uint64_t version;
        int result = parse_manifest(&json, m, &version);
        if (result < 0) code = hstep_fail_memory(error);
        else if (!result)
            code = hstep_fail(error, HALFSTEP_ERROR_FORMAT, "%s is corrupt: byte %zu: %s", path, json.at,
                              json.problem ? json.problem : "unexpected content of a manifest");
        else if (version != HSTEP_MANIFEST_VERSION)
            code = hstep_fail(error, HALFSTEP_ERROR_UNSUPPORTED, "%s has version %llu; this program reads version %d",
                              path, ull(version), HSTEP_MANIFEST_VERSION);
    }
    free(path);
    if (code) free_manifest(m);
    return code;
}

/* ---- What a directory of ours may hold --------------------------------------------------------------------------- */

/* Fails unless a save has made the entry `name` of `directory`. The manifest m of the directory, with its files sorted,
 * counts if has_manifest is set. */
static int is_made_by_save(const char *directory, const char *name, int has_manifest, const manifest *m,
                           hstep_error *error)
{
    size_t mark = strlen(HSTEP_PART);
    file_record wanted = {.name = name};
    int known = !strncmp(name, HSTEP_PART, mark) ? is_file_name(name + mark) || !strcmp(name + mark, HSTEP_MANIFEST)
                : !strcmp(name, HSTEP_MANIFEST)
                    ? has_manifest
                    : m->file_count && bsearch(&wanted, m->files, m->file_count, sizeof *m->files, compare_files);
    char *path = known ? hstep_join_path(directory, name) : NULL;
    if (known && !path) return hstep_fail_memory(error);
    known = known && hstep_kind_of(path) == HSTEP_KIND_FILE;
    free(path);
    return known ? HALFSTEP_OK
                 : hstep_fail(error, HALFSTEP_ERROR_NAME, "%s stays: it holds \"%s\", which is not part of it",
                              directory, name);
}

/* Lists a directory that may be removed because all of its entries come from a save. The caller frees the names. Fails
 * for any other directory, and for a protected one, with a text that says why. Such a directory stays as it is,
 * whole. */
static int list_own_files(const char *directory, char ***names, size_t *count, hstep_error *error)
{
    manifest m;
    hstep_error ignored = {0};
    int code = hstep_list_directory(directory, names, count, error);
    if (code) return code;
    if (hstep_is_protected(directory))
        code = hstep_fail(error, HALFSTEP_ERROR_IO, "%s stays: it is write-protected", directory);
    int result = read_manifest(directory, &m, &ignored), has_manifest = !result && !m.current;
    if (result == HALFSTEP_ERROR_MEMORY) code = hstep_fail_memory(error);
    if (has_manifest && m.file_count) qsort(m.files, m.file_count, sizeof *m.files, compare_files);
    for (size_t i = 0; i < *count && !code; i++)
        code = is_made_by_save(directory, (*names)[i], has_manifest, &m, error);
    if (!result) free_manifest(&m);
    if (code) {
        hstep_free_names(*names, *count);
        *names = NULL;
        *count = 0;
    }
    return code;
}

/* Removes a directory that holds nothing but files of a save. The manifest goes last, because a later save learns from
 * it which files these are. */
static int remove_own_directory(const char *directory, hstep_error *error)
{
    char **names;
    size_t count;
    int code = list_own_files(directory, &names, &count, error);
    for (int last = 0; last < 2; last++)
        for (size_t i = 0; i < count && !code; i++) {
            if ((strcmp(names[i], HSTEP_MANIFEST) == 0) != last) continue;
            char *path = hstep_join_path(directory, names[i]);
            code = path ? hstep_remove_file(path, error) : hstep_fail_memory(error);
            free(path);
        }
    hstep_free_names(names, count);
    return code ? code : hstep_remove_directory(directory, error);
}

/* ---- Generations of a directory ---------------------------------------------------------------------------------- */

typedef struct generation {
    char *name;
    uint64_t sequence, step;
    int is_link; /* a symbolic link: somebody keeps this generation elsewhere */
} generation;

static int compare_generations(const void *a, const void *b)
{
    const generation *first = a, *second = b;
    if (first->sequence != second->sequence) return first->sequence > second->sequence ? -1 : 1;
    return strcmp(first->name, second->name);
}

static void free_generations(generation *list, size_t count)
{
    for (size_t i = 0; i < count; i++) free(list[i].name);
    free(list);
}

/* What a save could not tidy. The caller is told if the save succeeds. */
typedef struct notes {
    char text[1024];
} notes;

static void add_note(notes *list, const char *text)
{
    size_t used = strlen(list->text);
    snprintf(list->text + used, sizeof list->text - used, "%s%s", used ? "; " : "", text);
}

/* Lists the checkpoints inside dir whose manifest is sound, newest first. Directories of other programs that happen to
 * be called checkpoint-N are not in the list, so they are never touched. Adds to `unread`, unless it is NULL, what the
 * system could not read. */
static int list_generations(const char *dir, generation **list, size_t *count, notes *unread, hstep_error *error)
{
    char **names;
    size_t name_count;
    *list = NULL;
    *count = 0;
    int code = hstep_list_directory(dir, &names, &name_count, error);
    if (code) return code;
    generation *found = malloc((name_count + 1) * sizeof *found);
    size_t n = 0;
    if (!found) code = hstep_fail_memory(error);
    for (size_t i = 0; i < name_count && !code; i++) {
        manifest m;
        char detail[512];
        hstep_error trouble = hstep_make_error(detail, sizeof detail);
        if (!is_generation_name(names[i])) continue;
        char *path = hstep_join_path(dir, names[i]);
        int result = path ? read_manifest(path, &m, &trouble) : HALFSTEP_ERROR_MEMORY;
        if (result == HALFSTEP_ERROR_MEMORY) code = hstep_fail_memory(error);
        if (result == HALFSTEP_ERROR_IO && !trouble.not_found && unread) add_note(unread, detail);
        int is_link = path && hstep_kind_of(path) == HSTEP_KIND_LINK;
        free(path);
        if (result) continue;
        if (!m.current) {
            found[n].is_link = is_link;
            found[n].sequence = m.sequence;
            found[n].step = m.step;
            found[n].name = names[i];
            names[i] = NULL;
            n++;
        }
        free_manifest(&m);
    }
    hstep_free_names(names, name_count);
    if (code) {
        free_generations(found, n);
        return code;
    }
    qsort(found, n, sizeof *found, compare_generations);
    *list = found;
    *count = n;
    return HALFSTEP_OK;
}

/* ---- What this process knows of directories ---------------------------------------------------------------------- */

/* A save removes no checkpoint that its process has neither saved nor opened, because another run may need it. So the
 * process remembers, for each directory, the sequence of the newest checkpoint that it knows there. Checkpoints up to
 * `others` were there when a save of this process found a newest one that it did not know. */
typedef struct acquaintance {
    uint64_t id[2]; /* of the directory */
    uint64_t newest, others;
} acquaintance;

/* The directories that were saved into or opened last. A save into one that has fallen out removes nothing there. */
enum { ACQUAINTANCES = 256 };
static struct {
    atomic_flag lock;
    size_t count; /* that were ever entered */
    acquaintance list[ACQUAINTANCES];
} acquaintances = {.lock = ATOMIC_FLAG_INIT};

/* Reads into *a what is known of the directory a->id, or stores *a there. Does nothing if the system refused to say
 * which directory that is. */
static void look_up(acquaintance *a, int store)
{
    size_t i = 0;
    if (!a->id[0] && !a->id[1]) return;
    while (atomic_flag_test_and_set(&acquaintances.lock)) {
    }
    const size_t n = acquaintances.count < ACQUAINTANCES ? acquaintances.count : ACQUAINTANCES;
    while (i < n && memcmp(acquaintances.list[i].id, a->id, sizeof a->id)) i++;
    if (store) acquaintances.list[i < n ? i : acquaintances.count++ % ACQUAINTANCES] = *a;
    else if (i < n) *a = acquaintances.list[i];
    atomic_flag_clear(&acquaintances.lock);
}

/* Returns what is known of a directory. */
static acquaintance recall(const uint64_t id[2])
{
    acquaintance a = {{id[0], id[1]}, 0, 0};
    look_up(&a, 0);
    return a;
}

/* ---- Saving ------------------------------------------------------------------------------------------------------ */

struct halfstep_checkpoint_save {
    char *dir, *temporary; /* the temporary directory inside dir, or NULL before it exists */
    int created_dir;
    uint64_t dir_id[2];
    hstep_file *lock;
    halfstep_save_options options;
    manifest manifest;
    notes notes;
    int status; /* the first failure, which commit repeats */
    char status_text[1024];
};

/* Frees save. Removes what was written under the temporary name, unless that has been renamed, and dir if this save
 * made it. */
static void end_save(halfstep_checkpoint_save *save)
{
    hstep_error ignored = {0};
    if (save->temporary) remove_own_directory(save->temporary, &ignored);
    if (save->created_dir) hstep_remove_directory(save->dir, &ignored);
    hstep_unlock_directory(save->lock);
    free_manifest(&save->manifest);
    free(save->temporary);
    free(save->dir);
    free(save);
}

/* Removes what killed saves have left in the directory. Nobody else is writing temporaries here, because this save
 * holds the lock. A temporary to which somebody else has added something stays. What cannot be removed becomes a note
 * and does not stop the save. */
static int remove_leftovers(halfstep_checkpoint_save *save, hstep_error *error)
{
    char **names;
    size_t count;
    int code = hstep_list_directory(save->dir, &names, &count, error);
    for (size_t i = 0; i < count && !code; i++) {
        char detail[512];
        hstep_error trouble = hstep_make_error(detail, sizeof detail);
        if (!is_temporary_name(names[i])) continue;
        char *path = hstep_join_path(save->dir, names[i]);
        hstep_kind kind = path ? hstep_kind_of(path) : HSTEP_KIND_UNKNOWN;
        int result = !path                          ? hstep_fail_memory(&trouble)
                     : kind == HSTEP_KIND_DIRECTORY ? remove_own_directory(path, &trouble)
                     : kind == HSTEP_KIND_FILE || kind == HSTEP_KIND_LINK
                         ? hstep_remove_file(path, &trouble)
                         : hstep_fail(&trouble, HALFSTEP_ERROR_IO, "%s stays: it is not a file", path);
        if (result == HALFSTEP_ERROR_MEMORY) code = hstep_fail_memory(error);
        else if (result) add_note(&save->notes, detail);
        free(path);
    }
    hstep_free_names(names, count);
    return code;
}

/* Syncs the parent of a new directory, because without that a loss of power can lose the directory. */
static int sync_parent(const char *path, hstep_error *error)
{
    char *parent = hstep_parent_path(path);
    int code = parent ? hstep_sync_directory(parent, error) : hstep_fail_memory(error);
    free(parent);
    return code;
}

/* Fails if dir is itself a checkpoint. Saving into DIR/checkpoint-N instead of DIR would replace the manifest that
 * makes checkpoint-N loadable. */
static int check_not_generation(const char *dir, hstep_error *error)
{
    manifest m;
    hstep_error ignored = {0};
    int code = read_manifest(dir, &m, &ignored);
    if (code == HALFSTEP_ERROR_MEMORY) return hstep_fail_memory(error);
    if (code) return HALFSTEP_OK;
    if (!m.current)
        code = hstep_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s is itself a checkpoint; save into the directory above it",
                          dir);
    free_manifest(&m);
    return code;
}

int halfstep_begin_checkpoint(halfstep_checkpoint_save **save, const char *dir, const halfstep_save_options *options,
                              char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    int busy = 0;
    if (save) *save = NULL;
    if (!save || !dir || !*dir)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_begin_checkpoint: NULL or empty argument");
    halfstep_save_options ours = {0};
    if (options && !hstep_take_struct(&ours, sizeof ours, options))
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_begin_checkpoint: wrong struct_size");
    if (ours.step > INT64_MAX)
        return hstep_fail(&error, HALFSTEP_ERROR_RANGE, "step %llu is too large; at most 2^63 - 1", ull(ours.step));
    if (ours.newest && !ours.prune_if)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT,
                          "halfstep_begin_checkpoint: newest counts only with prune_if; set prune_if = 1 too");
    halfstep_checkpoint_save *made = calloc(1, sizeof *made);
    if (!made) return hstep_fail_memory(&error);
    made->options = ours;
    if (!made->options.keep) made->options.keep = 1;
    made->manifest.step = made->options.step;

    int code = (made->dir = hstep_copy(dir)) ? HALFSTEP_OK : hstep_fail_memory(&error);
    if (!code) code = hstep_make_directory(dir, &made->created_dir, &error);
    if (!code && made->created_dir && !made->options.no_sync) code = sync_parent(dir, &error);
    if (!code) {
        code = hstep_lock_directory(&made->lock, dir, HSTEP_LOCK_EXCLUSIVE, &busy, &error);
        if (busy)
            hstep_fail(&error, code,
                       "%s: another save there is under way, of another process or of this one; commit or abandon it "
                       "first",
                       dir);
    }
    if (!code) {
        hstep_identify(dir, made->dir_id);
        /* The system may give a new directory the numbers of one that is gone. */
        if (made->created_dir) look_up(&(acquaintance){{made->dir_id[0], made->dir_id[1]}, 0, 0}, 1);
        code = check_not_generation(dir, &error);
    }
    if (!code) code = remove_leftovers(made, &error);
    if (!code) {
        int created;
        char *temporary = hstep_temporary_path(dir, HSTEP_TEMPORARY);
        code = temporary ? hstep_make_directory(temporary, &created, &error) : hstep_fail_memory(&error);
        if (code) free(temporary);
        else made->temporary = temporary;
    }
    if (code) {
        if (made->dir) end_save(made);
        else free(made);
        return code;
    }
    *save = made;
    return HALFSTEP_OK;
}

int hstep_note_failure(halfstep_checkpoint_save *save, int code, const hstep_error *error)
{
    if (code && !save->status) {
        save->status = code;
        snprintf(save->status_text, sizeof save->status_text, "%s",
                 error->size ? error->text : "an earlier call failed");
    }
    return code;
}

typedef struct checked_sink {
    hstep_file *file;
    uint64_t bytes, crc;
} checked_sink;

static int write_checked(void *context, const void *data, uint64_t bytes, hstep_error *error)
{
    checked_sink *sink = context;
    while (bytes) {
        /* Pieces are small, so that the write finds in cache what the checksum has just read. */
        uint64_t piece = bytes < 1 << 20 ? bytes : 1 << 20;
        sink->crc = hstep_crc64(sink->crc, data, piece);
        int code = hstep_write(sink->file, data, piece, error);
        if (code) return code;
        sink->bytes += piece;
        data = (const char *)data + piece;
        bytes -= piece;
    }
    return HALFSTEP_OK;
}

/* Returns the path of a file of the generation while it is being written. The caller frees it. */
static char *part_path(const halfstep_checkpoint_save *save, const char *name)
{
    char *part = hstep_format(HSTEP_PART "%s", name), *path = part ? hstep_join_path(save->temporary, part) : NULL;
    free(part);
    return path;
}

/* Writes one file of the generation into the temporary directory, and sets its size and checksum in *sink. `writer`
 * supplies the contents, or data if writer is NULL. */
static int write_part(halfstep_checkpoint_save *save, const char *name, const halfstep_safetensors_writer *writer,
                      halfstep_fill_function fill, void *context, const void *data, uint64_t bytes, checked_sink *sink,
                      hstep_error *error)
{
    char *path = part_path(save, name), *shown = hstep_join_path(save->dir, name);
    int code = path && shown ? hstep_create_file(&sink->file, path, shown, 0666, error) : hstep_fail_memory(error);
    if (!code) {
        code = writer ? hstep_stream_safetensors(writer, shown, write_checked, sink, fill, context, error)
                      : write_checked(sink, data, bytes, error);
        if (!code && !save->options.no_sync) code = hstep_sync(sink->file, error);
        code = hstep_close_written(sink->file, code, error);
    }
    free(path);
    free(shown);
    return code;
}

/* Adds a file to the generation. The contents are as in write_part(). */
static int add_file(halfstep_checkpoint_save *save, const char *name, const halfstep_safetensors_writer *writer,
                    halfstep_fill_function fill, void *context, const void *data, uint64_t bytes, hstep_error *error)
{
    manifest *m = &save->manifest;
    checked_sink sink = {0};
    if (save->status) return hstep_fail(error, save->status, "%s", save->status_text);
    if (!is_file_name(name))
        return hstep_fail(error, HALFSTEP_ERROR_NAME,
                          "a file of a checkpoint cannot be named \"%s\"; allowed: 1 to 128 letters, digits, . _ and "
                          "-, not " HSTEP_MANIFEST ", no . or " HSTEP_GENERATION " first",
                          name);
    for (size_t i = 0; i < m->file_count; i++)
        if (!strcmp(m->files[i].name, name))
            return hstep_fail(error, HALFSTEP_ERROR_DUPLICATE,
                              "%s: two files are named \"%s\"; give one another name (those of an optimizer by "
                              "optimizer_file and model_file of its options)",
                              save->dir, name);

    char *copy = hstep_copy(name);
    int code = copy && hstep_grow((void **)&m->files, m->file_count, &m->file_capacity, sizeof *m->files)
                   ? write_part(save, name, writer, fill, context, data, bytes, &sink, error)
                   : hstep_fail_memory(error);
    if (code) free(copy);
    else m->files[m->file_count++] = (file_record){copy, NULL, sink.bytes, sink.crc};
    return code;
}

int halfstep_save_file(halfstep_checkpoint_save *save, const char *name, const void *data, uint64_t bytes, char *text,
                       size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save || !name || (!data && bytes))
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_file: NULL argument");
    return hstep_note_failure(save, add_file(save, name, NULL, NULL, NULL, data, bytes, &error), &error);
}

int halfstep_save_safetensors(halfstep_checkpoint_save *save, const char *name,
                              const halfstep_safetensors_writer *writer, halfstep_fill_function fill, void *context,
                              char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save || !name || !writer)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_safetensors: NULL argument");
    return hstep_note_failure(save, add_file(save, name, writer, fill, context, NULL, 0, &error), &error);
}

static int add_value(halfstep_checkpoint_save *save, const char *key, const char *value, hstep_error *error)
{
    if (!hstep_is_utf8(key) || !hstep_is_utf8(value))
        return hstep_fail(error, HALFSTEP_ERROR_NAME, "checkpoint value \"%s\" is not UTF-8", key);
    return hstep_set_pair(&save->manifest.values, key, value) ? HALFSTEP_OK : hstep_fail_memory(error);
}

int halfstep_save_value(halfstep_checkpoint_save *save, const char *key, const char *value, char *text,
                        size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save || !key || !value)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_value: NULL argument");
    return hstep_note_failure(save, add_value(save, key, value, &error), &error);
}

/* Gives one file of the temporary directory its final name. */
static int name_file(halfstep_checkpoint_save *save, const char *name, hstep_error *error)
{
    char *from = part_path(save, name), *to = hstep_join_path(save->temporary, name),
         *shown = hstep_join_path(save->dir, name);
    int code = from && to && shown ? hstep_rename(from, to, shown, error) : hstep_fail_memory(error);
    free(from);
    free(to);
    free(shown);
    return code;
}

/* Writes the manifest, then gives the files their final names. This order lets a later save recognise the files at any
 * time. */
static int seal_generation(halfstep_checkpoint_save *save, hstep_error *error)
{
    hstep_buffer text = {0};
    checked_sink sink = {0};
    write_generation_manifest(&text, &save->manifest);
    int code = text.failed ? hstep_fail_memory(error) : HALFSTEP_OK;
    if (!code && text.bytes > HSTEP_MANIFEST_LIMIT)
        code = hstep_fail(error, HALFSTEP_ERROR_RANGE,
                          "%s: names and values of a checkpoint take %zu bytes, more than the "
                          "%llu allowed",
                          save->dir, text.bytes, ull(HSTEP_MANIFEST_LIMIT));
    if (!code) code = write_part(save, HSTEP_MANIFEST, NULL, NULL, NULL, text.data, text.bytes, &sink, error);
    if (!code) code = name_file(save, HSTEP_MANIFEST, error);
    for (size_t i = 0; i < save->manifest.file_count && !code; i++)
        code = name_file(save, save->manifest.files[i].name, error);
    if (!code && !save->options.no_sync) code = hstep_sync_directory(save->temporary, error);
    free(text.data);
    return code;
}

/* Gives the finished temporary directory its name. The caller frees *name and *path. */
static int name_generation(halfstep_checkpoint_save *save, char **name, char **path, hstep_error *error)
{
    enum { MAX_UNKNOWN = 16 };
    int unknown = 0;
    for (unsigned attempt = 1;; attempt++) {
        *name = attempt == 1 ? hstep_format(HSTEP_GENERATION "%llu", ull(save->options.step))
                             : hstep_format(HSTEP_GENERATION "%llu-%u", ull(save->options.step), attempt);
        *path = *name ? hstep_join_path(save->dir, *name) : NULL;
        if (!*path) return hstep_fail_memory(error);
        /* A name that the system cannot inspect, such as one on a disk that is gone, counts as taken. If all of them
         * are, DIR itself is gone. */
        hstep_kind kind = hstep_kind_of(*path);
        unknown += kind == HSTEP_KIND_UNKNOWN;
        if (kind == HSTEP_KIND_NOTHING || unknown == MAX_UNKNOWN) break;
        free(*name);
        free(*path);
    }
    int code = hstep_rename(save->temporary, *path, *path, error);
    if (code) return code;
    free(save->temporary);
    save->temporary = NULL;
    return HALFSTEP_OK;
}

/* Points dir/manifest.json at a generation. *renamed becomes 1 if the pointer was replaced, also if the call fails. */
static int replace_pointer(halfstep_checkpoint_save *save, const char *name, int *renamed, hstep_error *error)
{
    hstep_buffer text = {0};
    *renamed = 0;
    write_pointer(&text, name, save->manifest.sequence);
    char *path = hstep_join_path(save->dir, HSTEP_MANIFEST);
    int code = path && !text.failed ? hstep_replace_file(path, HSTEP_TEMPORARY, text.data, text.bytes,
                                                         !save->options.no_sync, renamed, error)
                                    : hstep_fail_memory(error);
    free(path);
    free(text.data);
    return code;
}

/* Renames one old generation to a temporary name, which *temporary receives and the caller frees. The rename comes
 * first because a kill during the removal must not leave half a checkpoint under a valid name. If the generation is
 * being read, leaves it to a later save and sets *temporary to NULL. Fails if it holds anything but its own files; it
 * then stays. */
static int retire_generation(const char *dir, const char *name, char **temporary, hstep_error *error)
{
    int busy = 0;
    hstep_file *lock = NULL;
    char **files = NULL;
    size_t count = 0;
    char *path = hstep_join_path(dir, name);
    *temporary = hstep_temporary_path(dir, HSTEP_TEMPORARY);
    int code = path && *temporary ? HALFSTEP_OK : hstep_fail_memory(error);
    if (!code) code = hstep_lock_directory(&lock, path, HSTEP_LOCK_EXCLUSIVE, &busy, error);
    if (!code) code = list_own_files(path, &files, &count, error);
    /* Links that still lead to this generation belong to files that its successors no longer have. */
    for (size_t i = 0; i < count && !code; i++) {
        char *link = hstep_join_path(dir, files[i]), *file = hstep_join_path(path, files[i]);
        if (!link || !file) code = hstep_fail_memory(error);
        else if (is_file_name(files[i]) && hstep_same_file(link, file)) code = hstep_remove_file(link, error);
        free(link);
        free(file);
    }
    hstep_free_names(files, count);
    if (!code) code = hstep_rename(path, *temporary, path, error);
    hstep_unlock_directory(lock);
    free(path);
    if (code) {
        free(*temporary);
        *temporary = NULL;
    }
    return busy ? HALFSTEP_OK : code;
}

/* Tells whether a generation may be removed: it is of no other run, and its step is not higher than the new one's. */
static int may_be_removed(const halfstep_checkpoint_save *save, const generation *g, uint64_t others)
{
    return g->sequence > others && (save->options.prune_if || g->step <= save->manifest.step);
}

/* Makes links and removes old generations, but none of other runs, with sequences up to `others`. The pointer is
 * durable and the checkpoint safe by then. Trouble here is therefore a note, not a failure, and does not keep the rest
 * from being tidied. */
static void tidy(halfstep_checkpoint_save *save, const char *name, uint64_t others)
{
    generation *list;
    const char *left = NULL;
    size_t count, own = 0, left_count = 0;
    char detail[512];
    hstep_error trouble = hstep_make_error(detail, sizeof detail);
    for (size_t i = 0; i < save->manifest.file_count && !save->options.no_links; i++)
        if (hstep_link(save->dir, name, save->manifest.files[i].name, HSTEP_TEMPORARY, &trouble))
            add_note(&save->notes, detail);
    int code = list_generations(save->dir, &list, &count, &save->notes, &trouble);
    char **retired = code ? NULL : calloc(count + 1, sizeof *retired);
    if (!code && !retired) code = hstep_fail_memory(&trouble);
    for (size_t i = 0; i < count && !code; i++) {
        if (list[i].is_link || own++ < save->options.keep) continue;
        if (!may_be_removed(save, &list[i], others)) left_count++, left = left ? left : list[i].name;
        else if (retire_generation(save->dir, list[i].name, &retired[i], &trouble)) add_note(&save->notes, detail);
    }
    if (left_count) {
        snprintf(detail, sizeof detail,
                 "%zu older checkpoint%s there, such as %s, because another run has saved there, or its step is "
                 "higher; remove what nobody needs",
                 left_count, left_count == 1 ? " stays" : "s stay", left);
        add_note(&save->notes, detail);
    }
    /* The new names reach the disk before any removal, so that a loss of power cannot bring back half of a
     * generation. */
    if (!code && !save->options.no_sync) code = hstep_sync_directory(save->dir, &trouble);
    if (code) add_note(&save->notes, detail);
    for (size_t i = 0; i < count && retired; i++) {
        if (retired[i] && !code && remove_own_directory(retired[i], &trouble)) add_note(&save->notes, detail);
        free(retired[i]);
    }
    free(retired);
    free_generations(list, count);
}

/* Writes the highest sequence number in dir to *sequence, or 0 if there is none, and to *current that of the current
 * checkpoint. A higher one than that is of a save that was killed. Without a sound pointer both are the same. Sets
 * *has_pointer to 0 if there is none, sound or not. */
static int find_newest(const char *dir, uint64_t *sequence, uint64_t *current, int *has_pointer, hstep_error *error)
{
    manifest pointer;
    hstep_error ignored = {0};
    generation *list;
    size_t count;
    *sequence = 0;
    /* A damaged pointer must not stop a save, because the save replaces it. */
    if (!read_manifest(dir, &pointer, &ignored)) {
        *sequence = pointer.sequence;
        free_manifest(&pointer);
    }
    int code = list_generations(dir, &list, &count, NULL, error);
    *has_pointer = !ignored.not_found;
    *current = *sequence;
    if (count && list[0].sequence > *sequence) *sequence = list[0].sequence;
    if (!*current) *current = *sequence;
    free_generations(list, count);
    if (*sequence >= INT64_MAX)
        return hstep_fail(error, HALFSTEP_ERROR_RANGE,
                          "%s: its sequence numbers are used up; save into another directory", dir);
    return code;
}

static int open_generation(halfstep_checkpoint **checkpoint, const char *directory, uint64_t expected,
                           int check_contents, hstep_error *error);

/* Checks that all files of the new generation are there in their sizes, by opening it. The pointer has not moved by
 * then, and nothing older is removed. */
static int check_generation(const halfstep_checkpoint_save *save, const char *path, hstep_error *error)
{
    halfstep_checkpoint *made;
    int code = open_generation(&made, path, save->manifest.sequence, 0, error);
    if (!code) halfstep_close_checkpoint(made);
    return code;
}

static int commit(halfstep_checkpoint_save *save, hstep_error *error)
{
    char *name = NULL, *path = NULL;
    int renamed = 0, has_pointer;
    uint64_t newest, current;
    if (!save->manifest.file_count && !save->manifest.values.count)
        return hstep_fail(error, HALFSTEP_ERROR_ORDER,
                          "%s: the checkpoint has no file and no value; save an optimizer into it first", save->dir);
    int code = find_newest(save->dir, &newest, &current, &has_pointer, error);
    acquaintance known = recall(save->dir_id);
    save->manifest.sequence = newest + 1;
    if (save->options.prune_if) known.others = current != save->options.newest ? newest : 0;
    else if (current != known.newest) known.others = newest;
    known.newest = save->manifest.sequence;
    if (!code) code = seal_generation(save, error);
    if (!code) code = name_generation(save, &name, &path, error);
    if (!code && !save->options.no_sync) code = hstep_sync_directory(save->dir, error);
    if (!code) code = check_generation(save, path, error);
    if (!code) code = replace_pointer(save, name, &renamed, error);
    if (renamed) look_up(&known, 1);
    if (!code) {
        tidy(save, name, known.others);
        if (save->notes.text[0])
            hstep_fail(error, HALFSTEP_OK, "note: the checkpoint is saved, but %s", save->notes.text);
        save->created_dir = 0;
    } else if (!renamed && !save->temporary) {
        /* The generation has its name but no pointer. A temporary name lets end_save() remove it. */
        hstep_error ignored = {0};
        char first[512];
        snprintf(first, sizeof first, "%s", error->size ? error->text : "");
        retire_generation(save->dir, name, &save->temporary, &ignored);
        /* Without a pointer the first generation of all opens. */
        if (!save->temporary && !has_pointer && !newest)
            hstep_fail(error, code, "%s; %s is in place all the same, and could not be removed", first, path);
    }
    if (renamed) save->created_dir = 0;
    free(name);
    free(path);
    return code;
}

int halfstep_commit_checkpoint(halfstep_checkpoint_save *save, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save) return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_commit_checkpoint: NULL argument");
    int code = save->status ? hstep_fail(&error, save->status, "%s", save->status_text) : commit(save, &error);
    end_save(save);
    return code;
}

void halfstep_abandon_checkpoint(halfstep_checkpoint_save *save)
{
    if (save) end_save(save);
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

struct halfstep_checkpoint {
    char *directory;
    uint64_t dir_id[2]; /* of the directory above */
    hstep_file *lock;   /* shared, so that no save removes what is being read */
    manifest manifest;
    int fell_back;
};

void halfstep_close_checkpoint(halfstep_checkpoint *checkpoint)
{
    if (!checkpoint) return;
    hstep_unlock_directory(checkpoint->lock);
    free_manifest(&checkpoint->manifest);
    free(checkpoint->directory);
    free(checkpoint);
}

void hstep_know_checkpoint(const halfstep_checkpoint *checkpoint, int known)
{
    acquaintance now = recall(checkpoint->dir_id);
    const uint64_t sequence = checkpoint->manifest.sequence;
    if (known && sequence > now.newest) now.newest = sequence;
    if (!known && sequence == now.newest) now.newest = 0;
    look_up(&now, 1);
}

static int verify_file(const file_record *record, int check_contents, void *piece, size_t piece_bytes,
                       hstep_error *error)
{
    hstep_file *file;
    uint64_t bytes = 0, crc = 0;
    int code = hstep_open_file(&file, record->path, &bytes, error);
    if (code) return code;
    if (bytes != record->bytes)
        code = hstep_fail(error, HALFSTEP_ERROR_FORMAT, "%s is corrupt: it has %llu bytes, its manifest says %llu",
                          record->path, ull(bytes), ull(record->bytes));
    for (uint64_t offset = 0; offset < bytes && check_contents && !code;) {
        size_t part = bytes - offset < piece_bytes ? (size_t)(bytes - offset) : piece_bytes;
        code = hstep_read_at(file, offset, piece, part, error);
        if (!code) crc = hstep_crc64(crc, piece, part);
        offset += part;
    }
    if (!code && check_contents && crc != record->crc)
        code = hstep_fail(error, HALFSTEP_ERROR_FORMAT,
                          "%s is corrupt: its checksum is %016llx, its manifest says %016llx", record->path, ull(crc),
                          ull(record->crc));
    hstep_close(file);
    return code;
}

/* Opens one generation. Its sequence number must be `expected`, unless that is 0. Sets error->not_found if the
 * generation is not there. */
static int open_generation(halfstep_checkpoint **checkpoint, const char *directory, uint64_t expected,
                           int check_contents, hstep_error *error)
{
    enum { PIECE = 1 << 20 };
    int busy = 0;
    void *piece = malloc(PIECE);
    halfstep_checkpoint *made = calloc(1, sizeof *made);
    int code = piece && made ? HALFSTEP_OK : hstep_fail_memory(error);
    char *parent = code ? NULL : hstep_parent_path(directory);
    if (!code && (!parent || !(made->directory = hstep_copy(directory)))) code = hstep_fail_memory(error);
    if (!code) hstep_identify(parent, made->dir_id);
    free(parent);
    if (!code) {
        code = hstep_lock_directory(&made->lock, directory, HSTEP_LOCK_SHARED, &busy, error);
        if (busy) error->not_found = 1; /* only a removal takes an exclusive lock */
    }
    if (!code) code = read_manifest(directory, &made->manifest, error);
    manifest *m = made ? &made->manifest : NULL;
    if (!code && (m->current || (expected && m->sequence != expected)))
        code = hstep_fail(error, HALFSTEP_ERROR_FORMAT,
                          "%s is not the checkpoint that its parent's " HSTEP_MANIFEST
                          " names; copy its parent again, with all that is in it",
                          directory);
    for (size_t i = 0; !code && i < m->file_count; i++) {
        m->files[i].path = hstep_join_path(directory, m->files[i].name);
        code = m->files[i].path ? verify_file(&m->files[i], check_contents, piece, PIECE, error)
                                : hstep_fail_memory(error);
        /* A missing file of the list is damage; the checkpoint itself is there. */
        error->incomplete = error->not_found;
        error->not_found = 0;
    }
    free(piece);
    if (code) {
        halfstep_close_checkpoint(made);
        return code;
    }
    *checkpoint = made;
    return HALFSTEP_OK;
}

/* Tells whether a failure to open means that the checkpoint is damaged or missing. Lack of memory, a newer version or a
 * system error prove no damage; going back to an older checkpoint would then lose work for no reason. */
static int is_damage(int code, const hstep_error *error)
{
    return code == HALFSTEP_ERROR_FORMAT || code == HALFSTEP_ERROR_NAME ||
           (code == HALFSTEP_ERROR_IO && (error->not_found || error->incomplete));
}

/* Looks for another generation after the current one failed to open with `code` and the text in *error. If fallback is
 * set and all newer ones are damaged, opens the newest sound generation. Otherwise adds to the text that there is
 * another checkpoint, if there is one, and returns a failure. That is NAME only if there is no checkpoint at all. A
 * lone first generation without a pointer is opened, because a kill of the first save leaves it so, whole. */
static int open_older(halfstep_checkpoint **checkpoint, const char *dir, const char *current, int fallback,
                      int check_contents, int code, hstep_error *error)
{
    generation *list;
    size_t count;
    notes unread = {{0}};
    char detail[512];
    hstep_error trouble = hstep_make_error(detail, sizeof detail);
    char *first = hstep_copy(error->text);
    int opened = 0;
    if (!is_damage(code, error)) fallback = 0;
    int listed = list_generations(dir, &list, &count, &unread, &trouble), stopped = 0;
    if (listed) count = 0;
    if (listed && code == HALFSTEP_ERROR_NAME && !trouble.not_found) code = hstep_fail(error, listed, "%s", detail);
    const int lone_first = count == 1 && code == HALFSTEP_ERROR_NAME && list[0].sequence == 1;
    if (lone_first) fallback = 1;
    if (count && code == HALFSTEP_ERROR_NAME) code = HALFSTEP_ERROR_FORMAT;
    if (fallback && (listed || unread.text[0])) {
        hstep_fail(error, code, "%s; %s", first ? first : "", listed ? detail : unread.text);
        stopped = 1;
    }
    for (size_t i = 0; i < count && !opened && !stopped; i++) {
        if (current && !strcmp(list[i].name, current)) continue;
        char *path = hstep_join_path(dir, list[i].name);
        trouble.not_found = trouble.incomplete = 0;
        int result = path ? open_generation(checkpoint, path, 0, check_contents && fallback, &trouble)
                          : hstep_fail_memory(&trouble);
        opened = !result;
        if (opened && fallback) {
            (*checkpoint)->fell_back = !lone_first;
            hstep_fail(error, code, "note: %s; opened %s instead", first ? first : "", path);
        } else if (opened) {
            halfstep_close_checkpoint(*checkpoint);
            *checkpoint = NULL;
            hstep_fail(error, code, "%s; there is another checkpoint: %s", first ? first : "", path);
        } else if (fallback && !is_damage(result, &trouble)) {
            code = hstep_fail(error, result, "%s; %s", first ? first : "", detail);
            stopped = 1;
        }
        free(path);
    }
    if (lone_first && !opened) hstep_fail(error, code, "%s; %s", first ? first : "", detail);
    free_generations(list, count);
    free(first);
    return opened && fallback ? HALFSTEP_OK : code;
}

int halfstep_open_checkpoint(halfstep_checkpoint **checkpoint, const char *path, const halfstep_open_options *options,
                             char *text, size_t text_size)
{
    char detail[1024]; /* open_older() needs the text even if the caller does not */
    hstep_error error = hstep_make_error(detail, sizeof detail);
    hstep_error result = hstep_make_error(text, text_size);
    manifest pointer;
    halfstep_open_options ours = {0};

    if (checkpoint) *checkpoint = NULL;
    if (!checkpoint || !path)
        return hstep_fail(&result, HALFSTEP_ERROR_ARGUMENT, "halfstep_open_checkpoint: NULL argument");
    if (options && !hstep_take_struct(&ours, sizeof ours, options))
        return hstep_fail(&result, HALFSTEP_ERROR_ARGUMENT, "halfstep_open_checkpoint: wrong struct_size");

    int code, fallback = ours.fallback != 0, check_contents = !ours.skip_contents, is_current = 0;
    uint64_t tried = 0;
    for (;;) {
        error.not_found = error.incomplete = 0;
        code = read_manifest(path, &pointer, &error);
        if (code && error.not_found) {
            hstep_fail(&error, code, "no checkpoint in %s: there is no " HSTEP_MANIFEST, path);
            code = open_older(checkpoint, path, NULL, fallback, check_contents, HALFSTEP_ERROR_NAME, &error);
            break;
        }
        if (code) {
            code = open_older(checkpoint, path, NULL, fallback, check_contents, code, &error);
            break;
        }
        if (!pointer.current) {
            free_manifest(&pointer);
            code = open_generation(checkpoint, path, 0, check_contents, &error);
            break;
        }
        char *directory = hstep_join_path(path, pointer.current);
        code = directory ? open_generation(checkpoint, directory, pointer.sequence, check_contents, &error)
                         : hstep_fail_memory(&error);
        free(directory);
        /* Between the two reads a save may have finished and removed the generation that the pointer named. Read the
         * pointer again, as long as it keeps changing. */
        int again = code && error.not_found && pointer.sequence != tried;
        is_current = !code;
        if (code && !again)
            code = open_older(checkpoint, path, pointer.current, fallback, check_contents, code, &error);
        tried = pointer.sequence;
        free_manifest(&pointer);
        if (!again) break;
    }
    if (!code) {
        /* One that the pointer names is the newest, whatever there was before. */
        acquaintance now = recall((*checkpoint)->dir_id);
        if (is_current) now.newest = 0, look_up(&now, 1);
        hstep_know_checkpoint(*checkpoint, 1);
    }
    if (detail[0] && (code || !strncmp(detail, "note: ", 6))) hstep_fail(&result, code, "%s", detail);
    return code;
}

int halfstep_get_checkpoint_info(const halfstep_checkpoint *checkpoint, halfstep_checkpoint_info *info)
{
    if (!checkpoint || !info) return HALFSTEP_ERROR_ARGUMENT;
    const manifest *m = &checkpoint->manifest;
    halfstep_checkpoint_info ours = {.fell_back = (uint32_t)checkpoint->fell_back,
                                     .directory = checkpoint->directory,
                                     .step = m->step,
                                     .sequence = m->sequence,
                                     .files = m->file_count,
                                     .values = m->values.count};
    return hstep_give_struct(info, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

int halfstep_get_checkpoint_file(const halfstep_checkpoint *checkpoint, uint64_t index, halfstep_checkpoint_file *file)
{
    if (!checkpoint || !file || index >= checkpoint->manifest.file_count) return HALFSTEP_ERROR_ARGUMENT;
    const file_record *record = &checkpoint->manifest.files[index];
    halfstep_checkpoint_file ours = {
        .name = record->name, .path = record->path, .bytes = record->bytes, .crc64 = record->crc};
    return hstep_give_struct(file, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

const char *halfstep_checkpoint_path(const halfstep_checkpoint *checkpoint, const char *name)
{
    for (size_t i = 0; checkpoint && name && i < checkpoint->manifest.file_count; i++)
        if (!strcmp(checkpoint->manifest.files[i].name, name)) return checkpoint->manifest.files[i].path;
    return NULL;
}

const char *halfstep_checkpoint_value(const halfstep_checkpoint *checkpoint, const char *key)
{
    for (size_t i = 0; checkpoint && key && i < checkpoint->manifest.values.count; i++)
        if (!strcmp(checkpoint->manifest.values.list[i].key, key)) return checkpoint->manifest.values.list[i].value;
    return NULL;
}

int halfstep_get_checkpoint_value(const halfstep_checkpoint *checkpoint, uint64_t index, const char **key,
                                  const char **value)
{
    if (!checkpoint || !key || !value || index >= checkpoint->manifest.values.count) return HALFSTEP_ERROR_ARGUMENT;
    const hstep_pair *pair = &checkpoint->manifest.values.list[index];
    *key = pair->key;
    *value = pair->value;
    return HALFSTEP_OK;
}
