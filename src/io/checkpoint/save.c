/* Saving checkpoints. A generation is made under a temporary name, and the pointer is replaced last. What each step of
 * a save guarantees is in docs/checkpoints.md. */
#include "base/structs.h"
#include "io/checkpoint/directory.h"
#include "io/files.h"

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
    if (save->temporary) hstep_remove_own(save->temporary, &ignored);
    if (save->created_dir) hstep_remove_directory(save->dir, &ignored);
    hstep_unlock_directory(save->lock);
    hstep_free_manifest(&save->manifest);
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
        if (!hstep_is_temporary_name(names[i])) continue;
        char *path = hstep_join_path(save->dir, names[i]);
        hstep_kind kind = path ? hstep_kind_of(path) : HSTEP_KIND_UNKNOWN;
        int result = !path                          ? io_fail_memory(&trouble)
                     : kind == HSTEP_KIND_DIRECTORY ? hstep_remove_own(path, &trouble)
                     : kind == HSTEP_KIND_FILE || kind == HSTEP_KIND_LINK
                         ? hstep_remove_file(path, &trouble)
                         : io_fail(&trouble, HALFSTEP_ERROR_IO, "%s stays: it is not a file", path);
        if (result == HALFSTEP_ERROR_MEMORY) code = io_fail_memory(error);
        else if (result) hstep_add_note(&save->notes, detail);
        free(path);
    }
    hstep_free_names(names, count);
    return code;
}

/* Fails if dir is itself a checkpoint. Saving into DIR/checkpoint-N instead of DIR would replace the manifest that
 * makes checkpoint-N loadable. */
static int check_not_generation(const char *dir, hstep_error *error)
{
    manifest m;
    hstep_error ignored = {0};
    int code = hstep_read_manifest(dir, &m, &ignored);
    if (code == HALFSTEP_ERROR_MEMORY) return io_fail_memory(error);
    if (code) return HALFSTEP_OK;
    if (!m.current)
        code =
            io_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s is itself a checkpoint; save into the directory above it", dir);
    hstep_free_manifest(&m);
    return code;
}

int halfstep_begin_checkpoint(halfstep_checkpoint_save **save, const char *dir, const halfstep_save_options *options,
                              char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    int busy = 0;
    if (save) *save = NULL;
    if (!save || !dir || !*dir)
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_begin_checkpoint: NULL or empty argument");
    halfstep_save_options ours = {0};
    if (options && !hstep_take_struct(&ours, sizeof ours, options))
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_begin_checkpoint: wrong struct_size");
    if (ours.step > INT64_MAX)
        return io_fail(&error, HALFSTEP_ERROR_RANGE, "step %llu is too large; at most 2^63 - 1", ull(ours.step));
    if (ours.newest && !ours.prune_if)
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT,
                       "halfstep_begin_checkpoint: newest counts only with prune_if; set prune_if = 1 too");
    halfstep_checkpoint_save *made = calloc(1, sizeof *made);
    if (!made) return io_fail_memory(&error);
    made->options = ours;
    if (!made->options.keep) made->options.keep = 1;
    made->manifest.step = made->options.step;

    int code = (made->dir = hstep_copy(dir)) ? HALFSTEP_OK : io_fail_memory(&error);
    if (!code) code = hstep_make_directory(dir, &made->created_dir, &error);
    if (!code && made->created_dir && !made->options.no_sync) code = hstep_sync_parent(dir, &error);
    if (!code) {
        code = hstep_lock_directory(&made->lock, dir, HSTEP_LOCK_EXCLUSIVE, &busy, &error);
        if (busy)
            io_fail(&error, code,
                    "%s: another save there is under way, of another process or of this one; commit or abandon it "
                    "first",
                    dir);
    }
    if (!code) {
        hstep_identify(dir, made->dir_id);
        /* The system may give a new directory the numbers of one that is gone. */
        if (made->created_dir) hstep_remember(&(acquaintance){{made->dir_id[0], made->dir_id[1]}, 0, 0});
        code = check_not_generation(dir, &error);
    }
    if (!code) code = remove_leftovers(made, &error);
    if (!code) {
        int created;
        char *temporary = hstep_temporary_path(dir, HSTEP_TEMPORARY);
        code = temporary ? hstep_make_directory(temporary, &created, &error) : io_fail_memory(&error);
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
    int code = path && shown ? hstep_create_file(&sink->file, path, shown, 0666, error) : io_fail_memory(error);
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
    if (save->status) return io_fail(error, save->status, "%s", save->status_text);
    if (!hstep_is_file_name(name))
        return io_fail(error, HALFSTEP_ERROR_NAME,
                       "a file of a checkpoint cannot be named \"%s\"; allowed: 1 to 128 letters, digits, . _ and "
                       "-, not " HSTEP_MANIFEST ", no . or " HSTEP_GENERATION " first",
                       name);
    for (size_t i = 0; i < m->file_count; i++)
        if (!strcmp(m->files[i].name, name))
            return io_fail(error, HALFSTEP_ERROR_DUPLICATE,
                           "%s: two files are named \"%s\"; give one another name (those of an optimizer by "
                           "optimizer_file and model_file of its options)",
                           save->dir, name);

    char *copy = hstep_copy(name);
    int code = copy && io_grow((void **)&m->files, m->file_count, &m->file_capacity, sizeof *m->files)
                   ? write_part(save, name, writer, fill, context, data, bytes, &sink, error)
                   : io_fail_memory(error);
    if (code) free(copy);
    else m->files[m->file_count++] = (file_record){copy, NULL, sink.bytes, sink.crc};
    return code;
}

int halfstep_save_file(halfstep_checkpoint_save *save, const char *name, const void *data, uint64_t bytes, char *text,
                       size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save || !name || (!data && bytes))
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_file: NULL argument");
    return hstep_note_failure(save, add_file(save, name, NULL, NULL, NULL, data, bytes, &error), &error);
}

int halfstep_save_safetensors(halfstep_checkpoint_save *save, const char *name,
                              const halfstep_safetensors_writer *writer, halfstep_fill_function fill, void *context,
                              char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save || !name || !writer)
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_safetensors: NULL argument");
    return hstep_note_failure(save, add_file(save, name, writer, fill, context, NULL, 0, &error), &error);
}

static int add_value(halfstep_checkpoint_save *save, const char *key, const char *value, hstep_error *error)
{
    if (!hstep_is_utf8(key) || !hstep_is_utf8(value))
        return io_fail(error, HALFSTEP_ERROR_NAME, "checkpoint value \"%s\" is not UTF-8", key);
    return hstep_set_pair(&save->manifest.values, key, value) ? HALFSTEP_OK : io_fail_memory(error);
}

int halfstep_save_value(halfstep_checkpoint_save *save, const char *key, const char *value, char *text,
                        size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save || !key || !value) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_value: NULL argument");
    return hstep_note_failure(save, add_value(save, key, value, &error), &error);
}

/* Gives one file of the temporary directory its final name. */
static int name_file(halfstep_checkpoint_save *save, const char *name, hstep_error *error)
{
    char *from = part_path(save, name), *to = hstep_join_path(save->temporary, name),
         *shown = hstep_join_path(save->dir, name);
    int code = from && to && shown ? hstep_rename(from, to, shown, error) : io_fail_memory(error);
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
    hstep_write_manifest(&text, &save->manifest);
    int code = text.failed ? io_fail_memory(error) : HALFSTEP_OK;
    if (!code && text.bytes > HSTEP_MANIFEST_LIMIT)
        code = io_fail(error, HALFSTEP_ERROR_RANGE,
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
        if (!*path) return io_fail_memory(error);
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
    hstep_write_pointer(&text, name, save->manifest.sequence);
    char *path = hstep_join_path(save->dir, HSTEP_MANIFEST);
    int code = path && !text.failed ? hstep_replace_file(path, HSTEP_TEMPORARY, text.data, text.bytes,
                                                         !save->options.no_sync, renamed, error)
                                    : io_fail_memory(error);
    free(path);
    free(text.data);
    return code;
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
            hstep_add_note(&save->notes, detail);
    int code = hstep_list_generations(save->dir, &list, &count, &save->notes, &trouble);
    char **retired = code ? NULL : calloc(count + 1, sizeof *retired);
    if (!code && !retired) code = io_fail_memory(&trouble);
    for (size_t i = 0; i < count && !code; i++) {
        if (list[i].is_link || own++ < save->options.keep) continue;
        if (!may_be_removed(save, &list[i], others)) left_count++, left = left ? left : list[i].name;
        else if (hstep_retire_generation(save->dir, list[i].name, &retired[i], &trouble))
            hstep_add_note(&save->notes, detail);
    }
    if (left_count) {
        snprintf(detail, sizeof detail,
                 "%zu older checkpoint%s there, such as %s, because another run has saved there, or its step is "
                 "higher; remove what nobody needs",
                 left_count, left_count == 1 ? " stays" : "s stay", left);
        hstep_add_note(&save->notes, detail);
    }
    /* The new names reach the disk before any removal, so that a loss of power cannot bring back half of a
     * generation. */
    if (!code && !save->options.no_sync) code = hstep_sync_directory(save->dir, &trouble);
    if (code) hstep_add_note(&save->notes, detail);
    for (size_t i = 0; i < count && retired; i++) {
        if (retired[i] && !code && hstep_remove_own(retired[i], &trouble)) hstep_add_note(&save->notes, detail);
        free(retired[i]);
    }
    free(retired);
    hstep_free_generations(list, count);
}

/* Checks that all files of the new generation are there in their sizes, by opening it. The pointer has not moved by
 * then, and nothing older is removed. */
static int check_generation(const halfstep_checkpoint_save *save, const char *path, hstep_error *error)
{
    halfstep_checkpoint *made;
    int code = hstep_open_generation(&made, path, save->manifest.sequence, 0, error);
    if (!code) halfstep_close_checkpoint(made);
    return code;
}

static int commit(halfstep_checkpoint_save *save, hstep_error *error)
{
    char *name = NULL, *path = NULL;
    int renamed = 0, has_pointer;
    uint64_t newest, current;
    if (!save->manifest.file_count && !save->manifest.values.count)
        return io_fail(error, HALFSTEP_ERROR_ORDER,
                       "%s: the checkpoint has no file and no value; save an optimizer into it first", save->dir);
    int code = hstep_find_newest(save->dir, &newest, &current, &has_pointer, error);
    acquaintance known = hstep_recall(save->dir_id);
    save->manifest.sequence = newest + 1;
    if (save->options.prune_if) known.others = current != save->options.newest ? newest : 0;
    else if (current != known.newest) known.others = newest;
    known.newest = save->manifest.sequence;
    if (!code) code = seal_generation(save, error);
    if (!code) code = name_generation(save, &name, &path, error);
    if (!code && !save->options.no_sync) code = hstep_sync_directory(save->dir, error);
    if (!code) code = check_generation(save, path, error);
    if (!code) code = replace_pointer(save, name, &renamed, error);
    if (renamed) hstep_remember(&known);
    if (!code) {
        tidy(save, name, known.others);
        if (save->notes.text[0]) io_fail(error, HALFSTEP_OK, "note: the checkpoint is saved, but %s", save->notes.text);
        save->created_dir = 0;
    } else if (!renamed && !save->temporary) {
        /* The generation has its name but no pointer. A temporary name lets end_save() remove it. */
        hstep_error ignored = {0};
        char first[512];
        snprintf(first, sizeof first, "%s", error->size ? error->text : "");
        hstep_retire_generation(save->dir, name, &save->temporary, &ignored);
        /* Without a pointer the first generation of all opens. */
        if (!save->temporary && !has_pointer && !newest)
            io_fail(error, code, "%s; %s is in place all the same, and could not be removed", first, path);
    }
    if (renamed) save->created_dir = 0;
    free(name);
    free(path);
    return code;
}

int halfstep_commit_checkpoint(halfstep_checkpoint_save *save, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!save) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_commit_checkpoint: NULL argument");
    int code = save->status ? io_fail(&error, save->status, "%s", save->status_text) : commit(save, &error);
    end_save(save);
    return code;
}

void halfstep_abandon_checkpoint(halfstep_checkpoint_save *save)
{
    if (save) end_save(save);
}
