/* Lines of the program, and what they must answer: a failure is a status and one sentence, and leaves no file. */
#ifndef HALFSTEP_TESTS_ANSWERS_H
#define HALFSTEP_TESTS_ANSWERS_H

#include <math.h>

#include "program_lines.h"

#define LM                                                                                                        \
    "train lm --data text --width 8 --depth 1 --heads 2 --context 4 --batch 2 --eval-batches 1 --sample-bytes 4 " \
    "--threads 1 "
#define MNIST "train mnist --train-images 12 --test-images 4 --epochs 1 --batch 4 --threads 1 "
#define RESUME "train lm --resume --quiet --checkpoint "
#define COMPARE                                                                                                        \
    "compare lm --data text --width 8 --depth 1 --heads 2 --context 4 --batch 2 --eval-batches 1 --steps 2 --threads " \
    "1 --quiet "

/* Returns a hash of the names and sizes of all files in a folder. */
static inline uint64_t contents(const char *folder)
{
    uint64_t sum = 0;
    char path[700];
    DIR *stream = opendir(folder);
    for (struct dirent *entry; stream && (entry = readdir(stream));) {
        struct stat status;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%.400s/%.200s", folder, entry->d_name);
        uint64_t hash = 14695981039346656037u;
        for (const char *c = path; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
        if (lstat(path, &status) == 0) sum += hash * (uint64_t)(status.st_size + 1);
        if (S_ISDIR(status.st_mode)) sum += contents(path);
    }
    if (stream) closedir(stream);
    return sum;
}

struct refusal {
    int status;
    const char *pattern, *line;
};

static inline void refuse(int status, const char *pattern, const char *line)
{
    uint64_t before = contents(".");
    int got = program(line);
    CHECK(got == status, "%s: status %d, not %d: %s", line, got, status, program_errors);
    CHECK(strstr(program_errors, pattern), "%s: \"%s\" is not in: %s", line, pattern, program_errors);
    const char *end = strchr(program_errors, '\n');
    CHECK(end && !end[1] && !strncmp(program_errors, "halfstep: ", 10), "%s: not one line: %s", line, program_errors);
    CHECK(!printed[0], "%s: prints %.100s", line, printed);
    CHECK(contents(".") == before, "%s: left something behind", line);
}

static inline void accept(const char *pattern, const char *line)
{
    int got = program(line);
    CHECK(got == 0, "%s: status %d: %s", line, got, program_errors);
    CHECK(strstr(printed, pattern) || strstr(program_errors, pattern), "%s: \"%s\" is in neither\n%s\nnor\n%s", line,
          pattern, printed, program_errors);
}

#define REFUSE_ALL(table) \
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) refuse(table[i].status, table[i].pattern, table[i].line)

/* Writes two rows of 40 weights, one of them NaN, and a tensor of 68 bytes in a row. */
static inline void make_tensors(const char *path, const char *list, const char *name, const char *dtype)
{
    static float plain[2][40] = {{0.5f, -1.0f}, {0.25f}};
    static const uint8_t packed[2][68];
    static const uint64_t shape[2] = {2, 40}, packed_shape[2] = {2, 68};
    char error[600] = "";
    halfstep_safetensors_writer *writer;
    plain[1][33] = (float)NAN;
    demand(!halfstep_create_safetensors_writer(&writer), "no writer");
    demand(!halfstep_declare_safetensor(writer, "plain", "F32", 2, shape, plain, error, sizeof error), error);
    demand(!halfstep_declare_safetensor(writer, name, dtype, 2, packed_shape, packed, error, sizeof error), error);
    if (list)
        demand(!halfstep_declare_safetensors_metadata(writer, HALFSTEP_PACKED_KEY, list, error, sizeof error), error);
    demand(!halfstep_write_safetensors(writer, path, NULL, NULL, error, sizeof error), error);
    halfstep_destroy_safetensors_writer(writer);
}

/* Does the same with a packed tensor of the same shape that the metadata describe. */
static inline void make_packed(const char *path, const char *list) { make_tensors(path, list, "packed", "U8"); }

/* Enters a scratch folder with a text, and the checkpoint `base` of a small model. */
static inline void make_text_and_base(void)
{
    make_scratch();
    demand(!chdir(scratch), "no folder");
    static char text[4000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(32 + i * i % 91);
    put_file("text", text, sizeof text);
    put_file("short", text, 12);
    demand(!program(LM "--quiet --steps 2 --recipe adamw/f32 --checkpoint base"), program_errors);
}

#endif
