/* halfstep_io.h - safetensors files, atomic checkpoint directories, and optimizers in both (library halfstep_io, which
 * needs libc and libhalfstep only).
 *
 * This header is the manual; docs/checkpoints.md is byte exact. It compiles alone as C11 and C++.
 *
 * Save a training run, and go on with it (examples/resume.c is a whole program):
 *
 *   halfstep_save_options options = {sizeof options, .step = step};
 *   halfstep_begin_checkpoint(&save, "run", &options, error, sizeof error);
 *   halfstep_save_optimizer(save, optimizer, weights, NULL, error, sizeof error);
 *   halfstep_commit_checkpoint(save, error, sizeof error);          // durable if it returns HALFSTEP_OK
 *
 *   code = halfstep_open_checkpoint(&checkpoint, "run", NULL, error, sizeof error);
 *   if (code != HALFSTEP_ERROR_NAME) {                              // a new run otherwise
 *       if (!code) code = halfstep_load_optimizer(checkpoint, optimizer, weights, NULL, error, sizeof error);
 *       halfstep_close_checkpoint(checkpoint);
 *       if (code) stop(error);
 *   }
 *
 * Read a tensor of a model:
 *
 *   halfstep_open_safetensors(&file, "model.safetensors", error, sizeof error);
 *   halfstep_safetensor_find(file, "lm_head.weight", &index);
 *   halfstep_get_safetensor_info(file, index, &tensor);
 *   halfstep_read_safetensor(file, index, 0, weights, tensor.bytes, error, sizeof error);
 *
 * Write other tensors and files into a checkpoint (with HALFSTEP_ADVANCED):
 *
 *   halfstep_create_safetensors_writer(&model);
 *   halfstep_declare_safetensor(model, "lm_head.weight", "BF16", 2, shape, weights, error, sizeof error);
 *   halfstep_save_safetensors(save, "model.safetensors", model, NULL, NULL, error, sizeof error);
 *
 * ERRORS. Functions return HALFSTEP_OK or a negative code of halfstep.h. If a call takes (error, error_size), a failure
 * writes one line there. It names the file, the tensor or the key, and includes the operating system's message. Success
 * writes an empty string, or a line that begins with "note: " about something the caller should know. error may be NULL
 * with size 0. After a failed call that makes a handle, the handle is NULL, which the functions that close, abandon or
 * destroy it take. The library never prints, exits or aborts.
 *
 *   HALFSTEP_ERROR_FORMAT    the contents are corrupt: bad header, wrong size, wrong checksum, impossible values
 *   HALFSTEP_ERROR_MISMATCH  the file or checkpoint is sound, but of another optimizer, or without what is asked for
 *   HALFSTEP_ERROR_IO        the operating system refused: no such file, disk full, permission, another process is
 *                            saving
 *   HALFSTEP_ERROR_NAME      the name is not known or not allowed: unknown dtype or tensor, a text that is not UTF-8.
 *                            From halfstep_open_checkpoint(): there is no checkpoint
 *
 * THREADS. Different handles may be used at the same time. The caller serialises calls on one handle, except that
 * halfstep_read_safetensor may run concurrently on one file.
 *
 * MEMORY. No function allocates in proportion to the tensors. Files are read straight into the caller's buffers and
 * written straight from them. An open file takes at most about twice its header, which may have 100 MB. A returned
 * string lives as long as the handle it came from. */
#ifndef HALFSTEP_IO_H
#define HALFSTEP_IO_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Checkpoint directories -------------------------------------------------------------------------------------- */

/* A checkpoint directory DIR holds one or more complete checkpoints and says which one is current:
 *
 *   DIR/manifest.json              names the current checkpoint; replaced last, atomically
 *   DIR/checkpoint-1200/           one complete checkpoint: its files, and a manifest.json with their sizes and
 *                                  checksums
 *   DIR/model.safetensors, ...     links to the files of the current checkpoint, at the path that other tools expect
 *
 * A kill or a crash at any instant of a save leaves a directory that opens with the old state or the new one. The next
 * save removes what a crashed save left behind. A save never touches anybody else's files in DIR. It removes an old
 * checkpoint only if the folder holds nothing else, is not write-protected and can be read. Its step must not be higher
 * than that of the new one. The process must know the checkpoints there: the current one must be one that it has saved
 * or opened, and must not have failed to load. Otherwise another run may need them, and the process removes none of
 * those that were there, then or later. The save succeeds, and its note says what stays. One process saves into a
 * directory at a time; a second is refused (HALFSTEP_ERROR_IO). A checkpoint that is open for reading is not removed
 * from under its reader. */
typedef struct halfstep_checkpoint_save halfstep_checkpoint_save;

typedef struct halfstep_save_options {
    uint32_t struct_size;    /* sizeof(halfstep_save_options) */
    uint32_t keep;           /* number of newest checkpoints to keep, this one included; 0 means 1 */
    uint64_t step;           /* names the directory: checkpoint-<step> */
    uint32_t no_sync;        /* 1: skip every fsync. The save then survives a kill of the process, but not a loss of
                                power */
    uint32_t no_links;       /* 1: no links in DIR */
    uint64_t newest;         /* with prune_if: the sequence (halfstep_checkpoint_info) that the caller saved or loaded
                                last; 0: none, or without prune_if */
    uint32_t prune_if;       /* 1: the caller says what it knows, in place of what its process has saved and opened.
                                Older checkpoints are removed, whatever their steps, if the current one has the sequence
                                `newest` at the commit. Otherwise all stay */
} halfstep_save_options;

/* Starts a save into dir and creates dir if needed; its parent must exist. options may be NULL. */
HALFSTEP_API int halfstep_begin_checkpoint(halfstep_checkpoint_save **save, const char *dir,
                                           const halfstep_save_options *options, char *error, size_t error_size);
/* Adds a file to the checkpoint. A name is 1 to 128 letters, digits, '.', '_' and '-'. It is not manifest.json, and
 * does not start with '.' or "checkpoint-". After a failed call the save can only be abandoned; a commit returns the
 * same failure. */
HALFSTEP_API int halfstep_save_file(halfstep_checkpoint_save *save, const char *name, const void *data, uint64_t bytes,
                                    char *error, size_t error_size);
/* Adds a UTF-8 string to the manifest, or replaces it. All names and values of a checkpoint together may take 4 MiB. */
HALFSTEP_API int halfstep_save_value(halfstep_checkpoint_save *save, const char *key, const char *value, char *error,
                                     size_t error_size);
/* Makes the checkpoint the current one and frees save, also after a failure. After a failure the directory opens with
 * its earlier state, unless the text says that the new one is already in place. After success the text may be a note
 * about what could not be linked, was not removed or could not be tidied. ORDER if nothing was added. */
HALFSTEP_API int halfstep_commit_checkpoint(halfstep_checkpoint_save *save, char *error, size_t error_size);
/* Removes what was written and frees save. NULL is allowed. */
HALFSTEP_API void halfstep_abandon_checkpoint(halfstep_checkpoint_save *save);

typedef struct halfstep_checkpoint halfstep_checkpoint;

typedef struct halfstep_open_options {
    uint32_t struct_size;    /* sizeof(halfstep_open_options) */
    uint32_t fallback;       /* 1: if the current checkpoint is damaged, open the newest other one that is sound, with a
                                note. 0: fail, with a text that names the bad file and another checkpoint, if any */
    uint32_t skip_contents;  /* 1: verify names and sizes, not checksums */
} halfstep_open_options;

typedef struct halfstep_checkpoint_info {
    uint32_t struct_size;    /* set by the caller: sizeof(halfstep_checkpoint_info) */
    uint32_t fell_back;      /* 1: this is not the current checkpoint: see halfstep_open_options.fallback */
    const char *directory;   /* the directory that holds the files */
    uint64_t step;
    uint64_t sequence;       /* counts the saves into this directory, from 1 */
    uint64_t files, values;
} halfstep_checkpoint_info;

/* Opens path, which is a checkpoint directory or one DIR/checkpoint-N inside it. Returns HALFSTEP_ERROR_NAME if there
 * is no checkpoint at all. Any other code is about a checkpoint that is there. FORMAT if DIR/manifest.json is lost, and
 * the text names a checkpoint. A lone first one is then opened, because a kill of the first save may leave it so. */
HALFSTEP_API int halfstep_open_checkpoint(halfstep_checkpoint **checkpoint, const char *path,
                                          const halfstep_open_options *options, char *error, size_t error_size);
HALFSTEP_API void halfstep_close_checkpoint(halfstep_checkpoint *checkpoint); /* NULL is allowed */

HALFSTEP_API int halfstep_get_checkpoint_info(const halfstep_checkpoint *checkpoint, halfstep_checkpoint_info *info);
/* Returns the path of one file of the checkpoint, or NULL if the checkpoint has no file of that name. */
HALFSTEP_API const char *halfstep_checkpoint_path(const halfstep_checkpoint *checkpoint, const char *name);
/* Returns the value of one key given to halfstep_save_value, or NULL if there is none. */
HALFSTEP_API const char *halfstep_checkpoint_value(const halfstep_checkpoint *checkpoint, const char *key);

/* ---- Optimizers -------------------------------------------------------------------------------------------------- */

/* Save and load an optimizer with everything that its later steps depend on. That is states with their scales,
 * residuals and error codes, and the records of halfstep_get_record(): counters, ids and the rule's numbers.
 * Hyper-parameters and choices are saved too. A run may save, end, build the same optimizer and load. It then goes on
 * with the bits of a run that never stopped, if it saved between whole steps (in gradient release: between rounds).
 *
 * Weights belong to the caller. `weights` is the array that halfstep_step() takes. NULL leaves the weights to the
 * caller, who must keep them to the bit, because residuals and error codes belong to exactly these weights. Tensors are
 * matched by name, in any order. Tensors of which only a part is here are refused (UNSUPPORTED). States must have
 * memory before saving or loading (halfstep_allocate_states, halfstep_bind_states or halfstep_bind_slot), else ORDER.
 *
 * Saving streams from the states where they lie. Loading first checks all that it will read, in pieces of 256 KiB, and
 * changes nothing until all checks have passed:
 *   - every tensor is there, and no others (but see subset);
 *   - recipes, dtypes and shapes match;
 *   - counters and numbers are within their bounds, and ids differ;
 *   - no scale is negative or NaN, and no second moment is negative or not finite.
 * After a failure the optimizer is therefore unchanged, and the text names what does not fit. Only if the disk fails in
 * the second reading is the optimizer partly loaded; the text then says so.
 *
 * docs/checkpoints.md describes the layout, which is also that of Python's save_safetensors() and
 * load_safetensors(). */

#define HALFSTEP_SETTINGS_TAKE    0 /* hyper-parameters, choices and seed are set to the values in the file */
#define HALFSTEP_SETTINGS_COMPARE 1 /* they must equal those here: the first that differs is a MISMATCH. One that the
                                       file lacks counts as having had its default */

/* Zero bytes are the defaults. */
typedef struct halfstep_file_options {
    uint32_t struct_size;           /* sizeof(halfstep_file_options) */
    uint32_t settings;              /* reading: HALFSTEP_SETTINGS_* */
    const char *const *leave;       /* reading: names of hyper-parameters and choices, or "seed", that keep their values
                                       here and are not compared; NULL after the last. For instance a "total_steps" that
                                       has grown. A name that this optimizer does not have is refused (ARGUMENT) */
    uint32_t subset;                /* reading: 1: the file may hold tensors that this optimizer does not have */
    uint32_t reserved;              /* 0 */
    const uint64_t *const *shapes;  /* sizes of tensor i, used if it has more than one dimension and shapes[i] is not
                                       NULL. Otherwise it is written as rows x row_length. For files that others read */
    const char *optimizer_file;     /* names in a checkpoint, NULL for a file by itself. In a checkpoint NULL stands for
                                       "optimizer.safetensors" and "model.safetensors" */
    const char *model_file;
} halfstep_file_options;

/* Adds the optimizer to a checkpoint. Adds the weights too, in a file of their own under the tensors' names, unless
 * weights is NULL. options may be NULL. After a failed call a commit returns the same failure. */
HALFSTEP_API int halfstep_save_optimizer(halfstep_checkpoint_save *save, const halfstep_optimizer *optimizer,
                                         void *const *weights, const halfstep_file_options *options, char *error,
                                         size_t error_size);
/* Loads the optimizer from a checkpoint, and the weights unless weights is NULL. options may be NULL: hyper-parameters,
 * such as rates and lengths of schedules, are then those of the file. MISMATCH if the checkpoint has no such file. */
HALFSTEP_API int halfstep_load_optimizer(const halfstep_checkpoint *checkpoint, halfstep_optimizer *optimizer,
                                         void *const *weights, const halfstep_file_options *options, char *error,
                                         size_t error_size);

/* Write and read the same as one file without a checkpoint directory. The file is replaced atomically and is durable
 * after HALFSTEP_OK. Weights are in it as "NAME/weight". It has no checksum. */
HALFSTEP_API int halfstep_write_optimizer(const char *path, const halfstep_optimizer *optimizer, void *const *weights,
                                          const halfstep_file_options *options, char *error, size_t error_size);
HALFSTEP_API int halfstep_read_optimizer(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                                         const halfstep_file_options *options, char *error, size_t error_size);

/* ---- States in a file -------------------------------------------------------------------------------------------- */

/* A file that keeps the states of an optimizer in place of memory, and is its checkpoint. Each step reads the states
 * from there, piece by piece, and writes the new ones beside them. The weights are in memory and are written too. When
 * a step returns, it is durable. A kill or a loss of power at any instant leaves the last whole step; so does a disk
 * that fails. A run that opens the file goes on with the bits of a run that never stopped.
 *
 *   halfstep_store_create("run.states", optimizer, weights, NULL, &store, error, sizeof error);  // a new run
 *   halfstep_store_open("run.states", optimizer, weights, NULL, &store, error, sizeof error);    // an old one
 *   ... halfstep_step(optimizer, weights, gradients) ...
 *   halfstep_store_close(store);
 *   halfstep_destroy(optimizer);
 *
 * Both take the place of halfstep_allocate_states(). The file takes twice the bytes of states and weights, and all of
 * them are reserved at creation. One process uses it at a time. A child after fork() cannot step the optimizer. Once
 * the file is deleted, steps are refused with nothing changed (ORDER), and its states can still be read.
 * docs/checkpoints.md has the layout. */
typedef struct halfstep_store halfstep_store;

/* Zero bytes are the defaults. */
typedef struct halfstep_store_options {
    uint32_t struct_size;     /* sizeof(halfstep_store_options) */
    int32_t without_weights;  /* of a new file. 1: it keeps no weights, only a hash of each, and can be opened only with
                                 the weights of its last step. After a micro-step, and after a ROUND whose call had no
                                 weights, it does not know them, and takes any */
    uint64_t memory;          /* bytes that pieces may take in memory; 0: the least */
    uint64_t piece_bytes;     /* of a new file: larger states are cut by rows; 0: 16 MiB */
    int32_t buffered;         /* 1: through the page cache. 0: past it, where the file system can do that */
    int32_t reserved;         /* 0 */
} halfstep_store_options;

/* Makes a file with the initial states, and the weights. Fails if the path exists (IO), or if the disk has not enough
 * room (IO; the text has the bytes). ORDER unless the optimizer has its tensors, and no states yet. options may be
 * NULL. */
HALFSTEP_API int halfstep_store_create(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                                       const halfstep_store_options *options, halfstep_store **store, char *error,
                                       size_t error_size);
/* Opens a file for an optimizer of the same tensors, in the same order, with the same recipes, seed and generator
 * (MISMATCH otherwise; the text has the first difference). Sets counters, scalars and grids; hyper-parameters stay as
 * they are here. Reads the weights into `weights` unless that is NULL. If the file keeps no weights, compares their
 * hash instead (MISMATCH). Reads all states and compares them with their sums, as steps do with what they read (FORMAT
 * if bytes have changed). A note says that one of the two last records is damaged, as after a loss of power; the other
 * one counts then. After a failure the optimizer has no states, its counters may be those of the file, and weights may
 * be partly read if the disk failed. */
HALFSTEP_API int halfstep_store_open(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                                     const halfstep_store_options *options, halfstep_store **store, char *error,
                                     size_t error_size);
/* Moves an open file to another handle of the same tensors and formats, without states. Its counters stay as they are.
 * The handle before can only be destroyed. */
HALFSTEP_API int halfstep_store_bind(halfstep_store *store, halfstep_optimizer *optimizer, char *error,
                                     size_t error_size);
/* Sets a text that the next step writes, and all later ones: a position in the data, a schedule. NULL removes it. Keys
 * and texts together may have 256 KiB. halfstep_flush() writes it without a step. */
HALFSTEP_API int halfstep_store_set_value(halfstep_store *store, const char *key, const char *value, char *error,
                                          size_t error_size);
/* Returns the text as it was set or opened, or NULL. It lives until it is set again. */
HALFSTEP_API const char *halfstep_store_value(const halfstep_store *store, const char *key);
/* Closes the file and frees the store. What no step has made whole is lost. The handle can then only be destroyed, or
 * bound to another file. NULL is allowed. */
HALFSTEP_API void halfstep_store_close(halfstep_store *store);

typedef struct halfstep_store_info {
    uint32_t struct_size;    /* set by the caller: sizeof(halfstep_store_info) */
    int32_t has_weights;
    uint64_t generation;     /* counts what was made whole, from 1 */
    uint64_t steps;          /* of the group with the most */
    uint64_t bytes;          /* of the file */
    uint64_t pieces;
    char *header, *commit;   /* JSON: what the file holds, and the last whole step. Free with
                                halfstep_store_free_info() */
} halfstep_store_info;

/* Describes a file without an optimizer, also while a process steps with it. A note is as in
 * halfstep_store_open(). Errors: FORMAT for any other file. */
HALFSTEP_API int halfstep_store_get_info(const char *path, halfstep_store_info *info, char *error, size_t error_size);
HALFSTEP_API void halfstep_store_free_info(halfstep_store_info *info);

/* ---- Reading a safetensors file ---------------------------------------------------------------------------------- */

/* An open file whose header has been checked in full. Every tensor lies inside the file, and no two overlap. Every byte
 * belongs to a tensor, and every shape agrees with its length. Limits: 2^20 tensors of at most 64 dimensions, 2^20
 * pairs of metadata, and in all shapes together 2^20 sizes plus 4 for each tensor. */
typedef struct halfstep_safetensors halfstep_safetensors;

typedef struct halfstep_safetensor_info {
    uint32_t struct_size;    /* set by the caller: sizeof(halfstep_safetensor_info) */
    uint32_t dtype_bits;     /* bits per element */
    const char *name;
    const char *dtype;       /* "BF16" */
    uint64_t ndim;           /* 0 for a scalar */
    const uint64_t *shape;   /* ndim sizes, row-major; a size may be 0; NULL for a scalar */
    uint64_t elements;
    uint64_t bytes;          /* end - begin */
    uint64_t begin, end;     /* data_offsets: relative to the first byte after the header */
} halfstep_safetensor_info;

/* Opens a file and checks its header. */
HALFSTEP_API int halfstep_open_safetensors(halfstep_safetensors **file, const char *path, char *error,
                                           size_t error_size);
HALFSTEP_API void halfstep_close_safetensors(halfstep_safetensors *file); /* NULL is allowed */

/* Returns the number of tensors. They are numbered from 0 in the order of their bytes in the file. */
HALFSTEP_API uint64_t halfstep_safetensor_count(const halfstep_safetensors *file);
HALFSTEP_API int halfstep_get_safetensor_info(const halfstep_safetensors *file, uint64_t index,
                                              halfstep_safetensor_info *info);
/* Finds a tensor by its name and writes its number to *index. Returns HALFSTEP_ERROR_NAME if the file has none. */
HALFSTEP_API int halfstep_safetensor_find(const halfstep_safetensors *file, const char *name, uint64_t *index);

/* Reads bytes [offset, offset + bytes) of one tensor, little-endian as stored. Fails if the file's size has changed
 * since it was opened. */
HALFSTEP_API int halfstep_read_safetensor(const halfstep_safetensors *file, uint64_t index, uint64_t offset, void *data,
                                          uint64_t bytes, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif

/* ---- What few programs need: any safetensors file, any file of a checkpoint ---------------------------------------
 * */

/* Define HALFSTEP_ADVANCED before this header is included to get what follows. */
#if defined(HALFSTEP_ADVANCED) && !defined(HALFSTEP_IO_H_ADVANCED)
#define HALFSTEP_IO_H_ADVANCED

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Element types of safetensors -------------------------------------------------------------------------------- */

/* Returns the bits of one element of a safetensors dtype ("F32" 32, "BF16" 16, "F4" 4 ...), or 0 if there is no such
 * dtype. */
HALFSTEP_API uint32_t halfstep_safetensors_dtype_bits(const char *dtype);
/* Returns the known dtypes by position, from 0, or NULL past the last. */
HALFSTEP_API const char *halfstep_safetensors_dtype(uint32_t position);

/* Give the pairs of strings in __metadata__, sorted by key. */
HALFSTEP_API uint64_t halfstep_safetensors_metadata_count(const halfstep_safetensors *file);
HALFSTEP_API int halfstep_get_safetensors_metadata(const halfstep_safetensors *file, uint64_t index, const char **key,
                                                   const char **value);
/* Returns the value of one metadata key, or NULL if there is none. */
HALFSTEP_API const char *halfstep_safetensors_metadata_find(const halfstep_safetensors *file, const char *key);

/* ---- Writing a safetensors file ---------------------------------------------------------------------------------- */

/* A list of tensors to be written, within the reader's limits. It may be written several times, and its data may change
 * in between. */
typedef struct halfstep_safetensors_writer halfstep_safetensors_writer;

/* Supplies bytes [offset, offset + bytes) of the tensor that was declared as number `tensor` (from 0). Tensors are
 * requested in the order of the file, each from offset 0 upwards without gaps. Pieces are at most 1 MiB. All but a
 * tensor's last piece are a multiple of 192 bytes, so that no element of any dtype is cut. Returns 0, or a negative
 * code, which stops the writing and becomes its result. */
typedef int (*halfstep_fill_function)(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes);

HALFSTEP_API int halfstep_create_safetensors_writer(halfstep_safetensors_writer **writer);
HALFSTEP_API void halfstep_destroy_safetensors_writer(halfstep_safetensors_writer *writer); /* NULL is allowed */

/* Adds a tensor, contiguous and little-endian. data is read while the file is written and never copied. NULL data comes
 * from the fill function. name, dtype and shape are copied. */
HALFSTEP_API int halfstep_declare_safetensor(halfstep_safetensors_writer *writer, const char *name, const char *dtype,
                                             uint64_t ndim, const uint64_t *shape, const void *data, char *error,
                                             size_t error_size);
/* Adds a pair to __metadata__, or replaces its value. Strings are copied and must be UTF-8. */
HALFSTEP_API int halfstep_declare_safetensors_metadata(halfstep_safetensors_writer *writer, const char *key,
                                                       const char *value, char *error, size_t error_size);

/* Writes the file atomically and durably. After HALFSTEP_OK it is complete on the disk. After a failure the path holds
 * what it held before, unless the text says that the new contents are in place because only the last sync failed. fill
 * may be NULL if every tensor was declared with its data. Tensors are ordered by alignment, largest first, then by
 * name, so that each is naturally aligned. The same declarations in any order give the same file. */
HALFSTEP_API int halfstep_write_safetensors(const halfstep_safetensors_writer *writer, const char *path,
                                            halfstep_fill_function fill, void *context, char *error, size_t error_size);

/* Key of the metadata that tells which tensors are packed weights (int8-sr, int8-ecc4), with the columns that they have
 * without padding: {"NAME": {"format": "int8-sr", "columns": 4096}, ...}. docs/checkpoints.md describes it. */
#define HALFSTEP_PACKED_KEY "halfstep.nn"

/* ---- Other files of a checkpoint --------------------------------------------------------------------------------- */

/* Adds a safetensors file to a checkpoint, under the rules of halfstep_save_file(). */
HALFSTEP_API int halfstep_save_safetensors(halfstep_checkpoint_save *save, const char *name,
                                           const halfstep_safetensors_writer *writer, halfstep_fill_function fill,
                                           void *context, char *error, size_t error_size);

typedef struct halfstep_checkpoint_file {
    uint32_t struct_size;    /* set by the caller: sizeof(halfstep_checkpoint_file) */
    const char *name;
    const char *path;
    uint64_t bytes;
    uint64_t crc64;
} halfstep_checkpoint_file;

/* Give the files of a checkpoint, and its values, by number. */
HALFSTEP_API int halfstep_get_checkpoint_file(const halfstep_checkpoint *checkpoint, uint64_t index,
                                              halfstep_checkpoint_file *file);
HALFSTEP_API int halfstep_get_checkpoint_value(const halfstep_checkpoint *checkpoint, uint64_t index, const char **key,
                                               const char **value);

/* ---- One file, atomically ---------------------------------------------------------------------------------------- */

/* Replaces a file by new contents. They are written beside it under a temporary name and synced; then the file is
 * renamed and the directory synced. After a failure the path holds what it held before, as with
 * halfstep_write_safetensors. Follows a symbolic link. A path that exists and is not a regular file (a terminal, a
 * pipe, /dev/null) is written to in place. */
HALFSTEP_API int halfstep_write_file_atomic(const char *path, const void *data, uint64_t bytes, char *error,
                                            size_t error_size);

#ifdef __cplusplus
}
#endif
#endif
