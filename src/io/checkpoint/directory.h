/* What a checkpoint directory holds: manifests, generations and their names. Also which generations may be removed, and
 * which this process knows. docs/checkpoints.md has the layout. */
#ifndef HALFSTEP_IO_DIRECTORY_H
#define HALFSTEP_IO_DIRECTORY_H

#include "io/parts.h"

#define HSTEP_MANIFEST "manifest.json"
#define HSTEP_GENERATION "checkpoint-"
#define HSTEP_TEMPORARY ".halfstep-tmp-"
/* Prefix of files in an unfinished checkpoint. It tells what a killed save left behind from files that somebody else
 * has put there. */
#define HSTEP_PART ".halfstep-part-"
/* Enough for some forty thousand files, or values as large as any configuration. */
#define HSTEP_MANIFEST_LIMIT ((uint64_t)4 << 20)

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

void hstep_free_manifest(manifest *m);
void hstep_write_manifest(hstep_buffer *text, manifest *m);
void hstep_write_pointer(hstep_buffer *text, const char *current, uint64_t sequence);
/* Tells whether a file of a checkpoint may have this name. Such a name stays inside its directory and means the same on
 * every system. */
int hstep_is_file_name(const char *name);
/* Tells whether hstep_temporary_path() can have made a name from HSTEP_TEMPORARY. */
int hstep_is_temporary_name(const char *name);
/* Reads directory/manifest.json, of either kind. Sets error->not_found if there is none. */
int hstep_read_manifest(const char *directory, manifest *m, hstep_error *error);

typedef struct generation {
    char *name;
    uint64_t sequence, step;
    int is_link; /* a symbolic link: somebody keeps this generation elsewhere */
} generation;

/* What a save could not tidy. The caller is told if the save succeeds. */
typedef struct notes {
    char text[1024];
} notes;

/* A save removes no checkpoint that its process has neither saved nor opened, because another run may need it. So the
 * process remembers, for each directory, the sequence of the newest checkpoint that it knows there. Checkpoints up to
 * `others` were there when a save of this process found a newest one that it did not know. */
typedef struct acquaintance {
    uint64_t id[2]; /* of the directory */
    uint64_t newest, others;
} acquaintance;

/* Removes a directory that holds nothing but files of a save. The manifest goes last, because a later save learns from
 * it which files these are. */
int hstep_remove_own(const char *directory, hstep_error *error);
void hstep_add_note(notes *list, const char *text);
/* Lists the checkpoints inside dir whose manifest is sound, newest first. Directories of other programs that happen to
 * be called checkpoint-N are not in the list, so they are never touched. Adds to `unread`, unless it is NULL, what the
 * system could not read. */
int hstep_list_generations(const char *dir, generation **list, size_t *count, notes *unread, hstep_error *error);
void hstep_free_generations(generation *list, size_t count);
/* Renames one old generation to a temporary name, which *temporary receives and the caller frees. The rename comes
 * first because a kill during the removal must not leave half a checkpoint under a valid name. If the generation is
 * being read, leaves it to a later save and sets *temporary to NULL. Fails if it holds anything but its own files; it
 * then stays. */
int hstep_retire_generation(const char *dir, const char *name, char **temporary, hstep_error *error);
/* Writes the highest sequence number in dir to *sequence, or 0 if there is none, and to *current that of the current
 * checkpoint. A higher one than that is of a save that was killed. Without a sound pointer both are the same. Sets
 * *has_pointer to 0 if there is none, sound or not. */
int hstep_find_newest(const char *dir, uint64_t *sequence, uint64_t *current, int *has_pointer, hstep_error *error);
/* Stores what is known of a directory. Does nothing if the system refused to say which directory that is. */
void hstep_remember(const acquaintance *a);
/* Returns what is known of a directory. */
acquaintance hstep_recall(const uint64_t id[2]);

#endif
