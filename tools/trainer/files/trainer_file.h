/* trainer.json describes the run that made a checkpoint. It is read with the library's own JSON reader and written as
 * text, because jansson may drop bytes and report success when memory runs out. */
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
    const char *data_hash, *val_hash;   /* val_hash "": the validation part was split off the data */
    double released_norm, seconds;
    struct trainer_option *option;
    size_t options;
    char *memory; /* holds all strings */
};

/* Reads trainer.json. Returns HALFSTEP_OK, HALFSTEP_ERROR_FORMAT if its contents are invalid, or another code if it
 * cannot be read; an error comes with a text. Call trainer_file_free() afterwards, also on failure. */
int trainer_file_read(const halfstep_checkpoint *checkpoint, struct trainer_file *file, char *error,
                      size_t error_bytes);
void trainer_file_free(struct trainer_file *file);
/* Returns the value of an option, or NULL if the file has none. */
const char *trainer_file_option(const struct trainer_file *file, const char *name);
/* Appends the file to `text`. Does not use file->memory. */
void trainer_file_write(const struct trainer_file *file, hstep_buffer *text);

/* Reads a whole file of a checkpoint and adds a zero byte. The caller frees the text. Returns NULL with an error text
 * on failure. */
char *checkpoint_read_text(const halfstep_checkpoint *checkpoint, const char *name, size_t *bytes, char *error,
                           size_t error_bytes);
/* Reads any regular file in the same way. */
char *text_file_read(const char *path, size_t *bytes, char *error, size_t error_bytes);

#endif
