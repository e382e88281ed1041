/* Opening checkpoints, and what they tell. */
#include "base/structs.h"
#include "io/checkpoint/directory.h"
#include "io/files.h"

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
    hstep_free_manifest(&checkpoint->manifest);
    free(checkpoint->directory);
    free(checkpoint);
}

void hstep_know_checkpoint(const halfstep_checkpoint *checkpoint, int known)
{
    acquaintance now = hstep_recall(checkpoint->dir_id);
    const uint64_t sequence = checkpoint->manifest.sequence;
    if (known && sequence > now.newest) now.newest = sequence;
    if (!known && sequence == now.newest) now.newest = 0;
    hstep_remember(&now);
}

static int verify_file(const file_record *record, int check_contents, void *piece, size_t piece_bytes,
                       hstep_error *error)
{
    hstep_file *file;
    uint64_t bytes = 0, crc = 0;
    int code = hstep_open_file(&file, record->path, &bytes, error);
    if (code) return code;
    if (bytes != record->bytes)
        code = io_fail(error, HALFSTEP_ERROR_FORMAT, "%s is corrupt: it has %llu bytes, its manifest says %llu",
                       record->path, ull(bytes), ull(record->bytes));
    for (uint64_t offset = 0; offset < bytes && check_contents && !code;) {
        size_t part = bytes - offset < piece_bytes ? (size_t)(bytes - offset) : piece_bytes;
        code = hstep_read_at(file, offset, piece, part, error);
        if (!code) crc = hstep_crc64(crc, piece, part);
        offset += part;
    }
    if (!code && check_contents && crc != record->crc)
        code =
            io_fail(error, HALFSTEP_ERROR_FORMAT, "%s is corrupt: its checksum is %016llx, its manifest says %016llx",
                    record->path, ull(crc), ull(record->crc));
    hstep_close(file);
    return code;
}

int hstep_open_generation(halfstep_checkpoint **checkpoint, const char *directory, uint64_t expected,
                          int check_contents, hstep_error *error)
{
    enum { PIECE = 1 << 20 };
    int busy = 0;
    void *piece = malloc(PIECE);
    halfstep_checkpoint *made = calloc(1, sizeof *made);
    int code = piece && made ? HALFSTEP_OK : io_fail_memory(error);
    char *parent = code ? NULL : hstep_parent_path(directory);
    if (!code && (!parent || !(made->directory = hstep_copy(directory)))) code = io_fail_memory(error);
    if (!code) hstep_identify(parent, made->dir_id);
    free(parent);
    if (!code) {
        code = hstep_lock_directory(&made->lock, directory, HSTEP_LOCK_SHARED, &busy, error);
        if (busy) error->not_found = 1; /* only a removal takes an exclusive lock */
    }
    if (!code) code = hstep_read_manifest(directory, &made->manifest, error);
    manifest *m = made ? &made->manifest : NULL;
    if (!code && (m->current || (expected && m->sequence != expected)))
        code = io_fail(error, HALFSTEP_ERROR_FORMAT,
                       "%s is not the checkpoint that its parent's " HSTEP_MANIFEST
                       " names; copy its parent again, with all that is in it",
                       directory);
    for (size_t i = 0; !code && i < m->file_count; i++) {
        m->files[i].path = hstep_join_path(directory, m->files[i].name);
        code =
            m->files[i].path ? verify_file(&m->files[i], check_contents, piece, PIECE, error) : io_fail_memory(error);
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
    int listed = hstep_list_generations(dir, &list, &count, &unread, &trouble), stopped = 0;
    if (listed) count = 0;
    if (listed && code == HALFSTEP_ERROR_NAME && !trouble.not_found) code = io_fail(error, listed, "%s", detail);
    const int lone_first = count == 1 && code == HALFSTEP_ERROR_NAME && list[0].sequence == 1;
    if (lone_first) fallback = 1;
    if (count && code == HALFSTEP_ERROR_NAME) code = HALFSTEP_ERROR_FORMAT;
    if (fallback && (listed || unread.text[0])) {
        io_fail(error, code, "%s; %s", first ? first : "", listed ? detail : unread.text);
        stopped = 1;
    }
    for (size_t i = 0; i < count && !opened && !stopped; i++) {
        if (current && !strcmp(list[i].name, current)) continue;
        char *path = hstep_join_path(dir, list[i].name);
        trouble.not_found = trouble.incomplete = 0;
        int result = path ? hstep_open_generation(checkpoint, path, 0, check_contents && fallback, &trouble)
                          : io_fail_memory(&trouble);
        opened = !result;
        if (opened && fallback) {
            (*checkpoint)->fell_back = !lone_first;
            io_fail(error, code, "note: %s; opened %s instead", first ? first : "", path);
        } else if (opened) {
            halfstep_close_checkpoint(*checkpoint);
            *checkpoint = NULL;
            io_fail(error, code, "%s; there is another checkpoint: %s", first ? first : "", path);
        } else if (fallback && !is_damage(result, &trouble)) {
            code = io_fail(error, result, "%s; %s", first ? first : "", detail);
            stopped = 1;
        }
        free(path);
    }
    if (lone_first && !opened) io_fail(error, code, "%s; %s", first ? first : "", detail);
    hstep_free_generations(list, count);
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
        return io_fail(&result, HALFSTEP_ERROR_ARGUMENT, "halfstep_open_checkpoint: NULL argument");
    if (options && !hstep_take_struct(&ours, sizeof ours, options))
        return io_fail(&result, HALFSTEP_ERROR_ARGUMENT, "halfstep_open_checkpoint: wrong struct_size");

    int code, fallback = ours.fallback != 0, check_contents = !ours.skip_contents, is_current = 0;
    uint64_t tried = 0;
    for (;;) {
        error.not_found = error.incomplete = 0;
        code = hstep_read_manifest(path, &pointer, &error);
        if (code && error.not_found) {
            io_fail(&error, code, "no checkpoint in %s: there is no " HSTEP_MANIFEST, path);
            code = open_older(checkpoint, path, NULL, fallback, check_contents, HALFSTEP_ERROR_NAME, &error);
            break;
        }
        if (code) {
            code = open_older(checkpoint, path, NULL, fallback, check_contents, code, &error);
            break;
        }
        if (!pointer.current) {
            hstep_free_manifest(&pointer);
            code = hstep_open_generation(checkpoint, path, 0, check_contents, &error);
            break;
        }
        char *directory = hstep_join_path(path, pointer.current);
        code = directory ? hstep_open_generation(checkpoint, directory, pointer.sequence, check_contents, &error)
                         : io_fail_memory(&error);
        free(directory);
        /* Between the two reads a save may have finished and removed the generation that the pointer named. Read the
         * pointer again, as long as it keeps changing. */
        int again = code && error.not_found && pointer.sequence != tried;
        is_current = !code;
        if (code && !again)
            code = open_older(checkpoint, path, pointer.current, fallback, check_contents, code, &error);
        tried = pointer.sequence;
        hstep_free_manifest(&pointer);
        if (!again) break;
    }
    if (!code) {
        /* One that the pointer names is the newest, whatever there was before. */
        acquaintance now = hstep_recall((*checkpoint)->dir_id);
        if (is_current) now.newest = 0, hstep_remember(&now);
        hstep_know_checkpoint(*checkpoint, 1);
    }
    if (detail[0] && (code || !strncmp(detail, "note: ", 6))) io_fail(&result, code, "%s", detail);
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
