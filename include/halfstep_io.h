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
 *   halfstep_commit_checkpoint(save, error, sizeof error);          durable when this returns HALFSTEP_OK
 *
 *   halfstep_open_checkpoint(&checkpoint, "run", NULL, error, sizeof error);
 *   halfstep_load_optimizer(checkpoint, optimizer, weights, NULL, error, sizeof error);
 *   halfstep_close_checkpoint(checkpoint);
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
 * ERRORS. Functions return HALFSTEP_OK or a negative code of halfstep.h. Where a call takes (error, error_size), a
 * failure writes one line there that names the file, the tensor or the key, and what the operating system said; success
 * writes an empty string, or a line that begins with "note: " where something is worth telling. error may be NULL with
 * size 0. The library never prints, exits or aborts.
 *
 *   HALFSTEP_ERROR_FORMAT   the contents are corrupt: bad header, wrong size, wrong checksum, values that cannot be
 *   HALFSTEP_ERROR_MISMATCH the file is sound, but of another optimizer
 *   HALFSTEP_ERROR_IO       the operating system refused: no such file, disk full, permission, another process is
 *                           saving
 *   HALFSTEP_ERROR_NAME     nothing by that name: unknown dtype, tensor, key; no checkpoint in that directory
 *
 * THREADS. Different handles may be used at the same time; calls on one handle are the caller's to serialise, except
 * that halfstep_read_safetensor may run concurrently on one file.
 *
 * MEMORY. Nothing here allocates in proportion to the tensors: files are read straight into the caller's buffers and
 * written straight from them. An open file takes at most about twice its header, which may have 100 MB. Strings that a
 * function returns live as long as the handle they came from. */
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
 *   DIR/model.safetensors, ...     the files of the current checkpoint again, as links, where other tools look for them
 *
 * A kill or a crash at any instant of a save leaves a directory that opens with the old state or the new one. What a
 * crashed save left behind is removed by the next one. What somebody else keeps in DIR is never touched: a checkpoint
 * that holds a file or a folder which is not part of it is not removed, and neither is one that is write-protected or
 * cannot be read; the save succeeds and its note says so. One process saves into a directory at a time; a second is
 * refused with HALFSTEP_ERROR_IO. A checkpoint that is open for reading is not removed from under its reader. */
typedef struct halfstep_checkpoint_save halfstep_checkpoint_save;

typedef struct halfstep_save_options {
    uint32_t struct_size;    /* sizeof(halfstep_save_options) */
    uint32_t keep;           /* newest checkpoints to keep, this one included; 0 means 1 */
    uint64_t step;           /* names the directory: checkpoint-<step> */
    uint32_t no_sync;        /* 1: skip every fsync. Survives a kill of the process, not a loss of power */
    uint32_t no_links;       /* 1: no links in DIR */
    uint64_t newest;         /* with prune_if: the sequence (halfstep_checkpoint_info) that the caller saved or loaded
                                last, 0: none */
    uint32_t prune_if;       /* 1: remove older checkpoints only if the newest one there, at the commit, is number
                                `newest`; otherwise all stay, with a note: somebody else has saved there */
} halfstep_save_options;

/* Starts a save into dir, which is created if it does not exist (its parent must). options may be NULL. */
HALFSTEP_API int halfstep_begin_checkpoint(halfstep_checkpoint_save **save, const char *dir,
                                           const halfstep_save_options *options, char *error, size_t error_size);
/* Adds a file. A name is 1 to 128 letters, digits, '.', '_' and '-'; it is not manifest.json, and does not start with
 * '.' or "checkpoint-". After a failed call only halfstep_abandon_checkpoint is useful; a commit returns the same
 * failure. */
HALFSTEP_API int halfstep_save_file(halfstep_checkpoint_save *save, const char *name, const void *data, uint64_t bytes,
                                    char *error, size_t error_size);
/* Adds a string to the manifest, or replaces it. UTF-8. All names and values of a checkpoint may take 4 MiB. */
HALFSTEP_API int halfstep_save_value(halfstep_checkpoint_save *save, const char *key, const char *value, char *error,
                                     size_t error_size);
/* Makes the checkpoint the current one. Frees save in every case. After a failure the directory opens with its earlier
 * state, unless the text says that the new one is already in place. After success the text may be a note: what could
 * not be linked, pruned or tidied. */
HALFSTEP_API int halfstep_commit_checkpoint(halfstep_checkpoint_save *save, char *error, size_t error_size);
/* Removes what was written and frees save; NULL is fine. */
HALFSTEP_API void halfstep_abandon_checkpoint(halfstep_checkpoint_save *save);

typedef struct halfstep_checkpoint halfstep_checkpoint;

typedef struct halfstep_open_options {
    uint32_t struct_size;    /* sizeof(halfstep_open_options) */
    uint32_t fallback;       /* 1: if the current checkpoint is damaged, open the newest other one that is
                                sound, with a note. 0: fail, naming the bad file and another checkpoint, if any */
    uint32_t skip_contents;  /* 1: verify names and sizes, not checksums */
} halfstep_open_options;

typedef struct halfstep_checkpoint_info {
    uint32_t struct_size;    /* set by the caller: sizeof(halfstep_checkpoint_info) */
    uint32_t fell_back;      /* 1: this is not the current one, see halfstep_open_options.fallback */
    const char *directory;   /* the directory that holds the files */
    uint64_t step;
    uint64_t sequence;       /* counts the saves into this directory, from 1 */
    uint64_t files, values;
} halfstep_checkpoint_info;

/* Opens path, which is a checkpoint directory or one DIR/checkpoint-N inside it. HALFSTEP_ERROR_NAME if there is no
 * checkpoint at all (path missing, or without a manifest.json); any other code is about a checkpoint that is there. */
HALFSTEP_API int halfstep_open_checkpoint(halfstep_checkpoint **checkpoint, const char *path,
                                          const halfstep_open_options *options, char *error, size_t error_size);
HALFSTEP_API void halfstep_close_checkpoint(halfstep_checkpoint *checkpoint); /* NULL is fine */

HALFSTEP_API int halfstep_get_checkpoint_info(const halfstep_checkpoint *checkpoint, halfstep_checkpoint_info *info);
/* Returns the path of one file of the checkpoint, or NULL if it has none by that name. */
HALFSTEP_API const char *halfstep_checkpoint_path(const halfstep_checkpoint *checkpoint, const char *name);
/* Returns the value of one key given to halfstep_save_value, or NULL. */
HALFSTEP_API const char *halfstep_checkpoint_value(const halfstep_checkpoint *checkpoint, const char *key);

/* ---- Optimizers -------------------------------------------------------------------------------------------------- */

/* An optimizer with everything that its later steps depend on: states with their scales, residuals and error codes,
 * counters, ids, what the rule keeps as numbers for each tensor, steps of groups, hyper-parameters, choices, seed,
 * skipped steps and the last gradient norm. A run that saves, ends, builds the same optimizer and loads goes on with
 * the bits of one that never stopped, if it saves between whole steps (in gradient release: rounds).
 *
 * Weights belong to the caller, and with them: `weights` is the array that halfstep_step() takes, and NULL leaves them
 * to the caller, who must keep them to the bit, for residuals and error codes belong to exactly these. Tensors go by
 * their names, which must differ, whatever their order; those held only in part are refused (UNSUPPORTED). States must
 * have memory before either direction (halfstep_allocate_states and its kin).
 *
 * Writing streams from the states where they lie. Reading first looks through all that it will take, in pieces of 256
 * KiB: every tensor there and none beyond them, recipes, dtypes, shapes, counters, numbers in their bounds, ids that
 * differ, no scale negative or NaN, no second moment negative or not finite. Only then is anything changed, so after a
 * failure the optimizer is as it was; the text names what does not fit. Only if the disk fails in the second reading,
 * the text says that the optimizer is partly loaded.
 *
 * The layout is in docs/checkpoints.md, and Python's save_safetensors() and load_safetensors() have the same. */

#define HALFSTEP_SETTINGS_TAKE    0 /* hyper-parameters, choices and seed are set to what the file says */
#define HALFSTEP_SETTINGS_COMPARE 1 /* they must be the same here: the first that differs is a MISMATCH. One that the
                                       file does not know counts as having had its default */

/* Zero bytes are the defaults. */
typedef struct halfstep_file_options {
    uint32_t struct_size;           /* sizeof(halfstep_file_options) */
    uint32_t settings;              /* reading: HALFSTEP_SETTINGS_* */
    const char *const *leave;       /* reading: names of hyper-parameters and choices, or "seed", that stay as they are
                                       here, not compared; NULL after the last. For instance a
                                       "total_steps" that has grown */
    uint32_t subset;                /* reading: 1: the file may hold tensors that this optimizer has not */
    uint32_t reserved;              /* 0 */
    const uint64_t *const *shapes;  /* sizes of tensor i where it has more than one dimension and shapes[i] is not NULL;
                                       otherwise it is written as rows x row_length. For files that others read */
    const char *optimizer_file;     /* in a checkpoint; NULL: "optimizer.safetensors" and "model.safetensors" */
    const char *model_file;
} halfstep_file_options;

/* Adds the optimizer to a checkpoint, and the weights in a file of their own, under the tensors' names, unless weights
 * is NULL. options may be NULL. After a failed call a commit returns the same failure. */
HALFSTEP_API int halfstep_save_optimizer(halfstep_checkpoint_save *save, const halfstep_optimizer *optimizer,
                                         void *const *weights, const halfstep_file_options *options, char *error,
                                         size_t error_size);
/* Takes it back, and the weights unless weights is NULL. */
HALFSTEP_API int halfstep_load_optimizer(const halfstep_checkpoint *checkpoint, halfstep_optimizer *optimizer,
                                         void *const *weights, const halfstep_file_options *options, char *error,
                                         size_t error_size);

/* Write and read the same with one file and no checkpoint directory: replaced atomically, durable after HALFSTEP_OK,
 * weights inside it as "NAME/weight". It has no checksum. */
HALFSTEP_API int halfstep_write_optimizer(const char *path, const halfstep_optimizer *optimizer, void *const *weights,
                                          const halfstep_file_options *options, char *error, size_t error_size);
HALFSTEP_API int halfstep_read_optimizer(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                                         const halfstep_file_options *options, char *error, size_t error_size);

/* ---- Reading a safetensors file ---------------------------------------------------------------------------------- */

/* An open file whose header has been checked in full: every tensor lies inside the file, no two overlap, no byte is
 * unaccounted for, every shape agrees with its length. At most 2^20 tensors of at most 64 dimensions, with 2^20 sizes
 * plus 4 for each tensor in all of their shapes, and 2^20 pairs of metadata. */
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

/* Opens and checks a file. On failure *file is NULL. */
HALFSTEP_API int halfstep_open_safetensors(halfstep_safetensors **file, const char *path, char *error,
                                           size_t error_size);
HALFSTEP_API void halfstep_close_safetensors(halfstep_safetensors *file); /* NULL is fine */

/* Returns the number of tensors; they are numbered from 0 in the order of their bytes in the file. */
HALFSTEP_API uint64_t halfstep_safetensor_count(const halfstep_safetensors *file);
HALFSTEP_API int halfstep_get_safetensor_info(const halfstep_safetensors *file, uint64_t index,
                                              halfstep_safetensor_info *info);
/* Finds a tensor by its name. HALFSTEP_ERROR_NAME if the file has none. */
HALFSTEP_API int halfstep_safetensor_find(const halfstep_safetensors *file, const char *name, uint64_t *index);

/* Reads bytes [offset, offset + bytes) of one tensor, little-endian as stored. Fails if the file has changed its size
 * since it was opened. */
HALFSTEP_API int halfstep_read_safetensor(const halfstep_safetensors *file, uint64_t index, uint64_t offset, void *data,
                                          uint64_t bytes, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif

/* ---- What few programs need: any safetensors file, any file of a checkpoint ---------------------------------------
 * */

/* Define HALFSTEP_ADVANCED before this header is included to have what follows. */
#if defined(HALFSTEP_ADVANCED) && !defined(HALFSTEP_IO_H_ADVANCED)
#define HALFSTEP_IO_H_ADVANCED

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Element types of safetensors -------------------------------------------------------------------------------- */

/* Returns the bits of one element of a safetensors dtype ("F32" 32, "BF16" 16, "F4" 4 ...); 0 for a name that does not
 * exist. */
HALFSTEP_API uint32_t halfstep_safetensors_dtype_bits(const char *dtype);
/* Returns the known dtypes, by position from 0; NULL past the last. */
HALFSTEP_API const char *halfstep_safetensors_dtype(uint32_t position);

/* Tell __metadata__: pairs of strings, sorted by key. */
HALFSTEP_API uint64_t halfstep_safetensors_metadata_count(const halfstep_safetensors *file);
HALFSTEP_API int halfstep_get_safetensors_metadata(const halfstep_safetensors *file, uint64_t index, const char **key,
                                                   const char **value);
/* Returns the value of one key, or NULL. */
HALFSTEP_API const char *halfstep_safetensors_metadata_find(const halfstep_safetensors *file, const char *key);

/* ---- Writing a safetensors file ---------------------------------------------------------------------------------- */

/* A list of tensors to be written, within the reader's limits. It may be written several times, and its data may change
 * in between. */
typedef struct halfstep_safetensors_writer halfstep_safetensors_writer;

/* Supplies bytes [offset, offset + bytes) of the tensor that was declared as number `tensor` (from 0). Tensors are
 * asked for in the order of the file, each from offset 0 upwards without gaps. Pieces are at most 1 MiB; all but the
 * last of a tensor are a multiple of 192 bytes, so that no element of any dtype is cut. Returns 0, or a negative code,
 * which stops the writing and becomes its result. */
typedef int (*halfstep_fill_function)(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes);

HALFSTEP_API int halfstep_create_safetensors_writer(halfstep_safetensors_writer **writer);
HALFSTEP_API void halfstep_destroy_safetensors_writer(halfstep_safetensors_writer *writer); /* NULL is fine */

/* Adds a tensor, contiguous and little-endian. data is read while the file is written, never copied; NULL means that
 * the fill function supplies it. name, dtype and shape are copied. */
HALFSTEP_API int halfstep_declare_safetensor(halfstep_safetensors_writer *writer, const char *name, const char *dtype,
                                             uint64_t ndim, const uint64_t *shape, const void *data, char *error,
                                             size_t error_size);
/* Adds a pair to __metadata__, or replaces its value. Strings are copied and must be UTF-8. */
HALFSTEP_API int halfstep_declare_safetensors_metadata(halfstep_safetensors_writer *writer, const char *key,
                                                       const char *value, char *error, size_t error_size);

/* Writes the file atomically and durably: after HALFSTEP_OK it is complete on the disk, after a failure the path holds
 * what it held before (unless the text says that the new contents are in place: only the last sync failed). fill may be
 * NULL if every tensor was declared with its data. Tensors are ordered by alignment, largest first, then by name, so
 * that each is naturally aligned; the same declarations in any order give the same file. */
HALFSTEP_API int halfstep_write_safetensors(const halfstep_safetensors_writer *writer, const char *path,
                                            halfstep_fill_function fill, void *context, char *error, size_t error_size);

/* ---- Other files of a checkpoint --------------------------------------------------------------------------------- */

/* Adds a safetensors file to a checkpoint, as halfstep_save_file() does a file. */
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

/* Tell the files of a checkpoint, and its values, by number. */
HALFSTEP_API int halfstep_get_checkpoint_file(const halfstep_checkpoint *checkpoint, uint64_t index,
                                              halfstep_checkpoint_file *file);
HALFSTEP_API int halfstep_get_checkpoint_value(const halfstep_checkpoint *checkpoint, uint64_t index, const char **key,
                                               const char **value);

/* ---- One file, atomically ---------------------------------------------------------------------------------------- */

/* Replaces a file by new contents: written beside it under a temporary name, synced, renamed, directory synced. After a
 * failure the path holds what it held before, as with halfstep_write_safetensors. Follows a symbolic link; a path that
 * exists and is not a regular file (a terminal, a pipe, /dev/null) is written to in place. */
HALFSTEP_API int halfstep_write_file_atomic(const char *path, const void *data, uint64_t bytes, char *error,
                                            size_t error_size);

#ifdef __cplusplus
}
#endif
#endif
