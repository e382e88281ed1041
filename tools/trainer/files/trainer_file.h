/* trainer.json: what a checkpoint says of the run that made it. Read with the library's own JSON reader and written as
 * text: jansson, out of memory, may leave bytes out and report success. */
#ifndef HALFSTEP_TRAINER_FILE_H
#define HALFSTEP_TRAINER_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep_io.h"

#include "common/text.h"

struct trainer_option {
    const char *name, *value;
};

struct trainer_file {
    uint64_t step, threads, data_bytes; /* at most 2^63 - 1 */
    const char *data_hash, *val_hash;   /* val_hash "": the validation part was cut from the data */
    double released_norm, seconds;
    struct trainer_option *option;
    size_t options;
    char *memory; /* of all strings */
};

/* HALFSTEP_OK; HALFSTEP_ERROR_FORMAT and one line where it is not what this program writes, or another code and one
 * line where it cannot be read. After each trainer_file_free(). */
int trainer_file_read(const halfstep_checkpoint *checkpoint, struct trainer_file *file, char *error,
                      size_t error_bytes);
void trainer_file_free(struct trainer_file *file);
/* NULL: it does not say. */
const char *trainer_file_option(const struct trainer_file *file, const char *name);
/* Appends the file; file->memory is not looked at. */
void trainer_file_write(const struct trainer_file *file, struct text *text);

/* One file of a checkpoint, whole, with a zero byte behind its end. The caller frees it. NULL and one line on
 * failure. */
char *checkpoint_read_text(const halfstep_checkpoint *checkpoint, const char *name, size_t *bytes, char *error,
                           size_t error_bytes);
/* The same of any regular file. */
char *text_file_read(const char *path, size_t *bytes, char *error, size_t error_bytes);

#endif
