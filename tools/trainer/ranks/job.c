/* How the ranks of a job agree on a failure, and check that they run the same job. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/paths.h"
#include "trainer/ranks/ranks.h"

enum { WORD = 256 };

/* Gives the text of rank `from` to all ranks. */
static int share_line(struct dist *dist, char *line, size_t bytes, int from)
{
    return dist->share(line, bytes, from) != 0 || dist->wait() != 0;
}

static int lost(struct dist *dist, char *error, size_t error_bytes)
{
    snprintf(error, error_bytes, "%s", dist->error());
    return 1;
}

/* Sets values[rank] of every rank to that rank's `own`. */
static int share_values(struct dist *dist, int64_t *values, int own)
{
    for (int i = 0; i < dist->ranks; i++) values[i] = 0;
    values[dist->rank] = own;
    return dist->sum(values, (size_t)dist->ranks);
}

int ranks_agree(struct dist *dist, int status, char *error, size_t error_bytes)
{
    if (!dist || dist->ranks == 1) return status;
    int64_t *values = calloc((size_t)dist->ranks, sizeof *values);
    char line[1024] = "";
    int failed = 0, all = 1, bad = !values || share_values(dist, values, status) != 0;
    if (bad) {
        free(values);
        return lost(dist, error, error_bytes);
    }
    while (failed < dist->ranks && !values[failed]) failed++;
    for (int i = 0; i < dist->ranks; i++) all &= values[i] != 0;
    int result = failed < dist->ranks ? (int)values[failed] : 0;
    free(values);
    if (!result) return 0;
    snprintf(line, sizeof line, "%s", error);
    if (share_line(dist, line, sizeof line, failed)) return lost(dist, error, error_bytes);
    if (all) snprintf(error, error_bytes, "%s", line);
    else snprintf(error, error_bytes, "rank %d of %d: %s", failed, dist->ranks, line);
    return result;
}

/* ---- The same job ------------------------------------------------------------------------------------------------ */

struct identity {
    const char *what[RUN_OPTIONS_MAX + 8];
    char value[RUN_OPTIONS_MAX + 8][WORD];
    int64_t hash[RUN_OPTIONS_MAX + 8];
    int n;
};

static void identify(struct identity *identity, const char *what, const char *value)
{
    int i = identity->n++;
    identity->what[i] = what;
    identity->hash[i] = (int64_t)hash_finish(hash_bytes(HASH_START, value, strlen(value)));
    snprintf(identity->value[i], sizeof identity->value[i], "%s", value);
}

static int identify_option(void *context, const struct option *option, const char *value)
{
    /* These may differ. Each machine has its own number of processors and its own paths of the data, whose bytes are
     * compared instead. Only rank 0 writes a log. */
    static const char *const own[] = {"threads", "data", "val", "log"};
    for (int i = 0; i < COUNT_OF(own); i++)
        if (strcmp(option->name, own[i]) == 0) return 0;
    identify(context, option->name, value);
    return 0;
}

static void hash_file(uint64_t *hash, const char *path)
{
    FILE *file = fopen(path, "rb");
    char piece[1 << 14];
    size_t n;
    while (file && (n = fread(piece, 1, sizeof piece, file)) > 0) *hash = hash_bytes(*hash, piece, n);
    if (file) fclose(file);
}

/* Identifies the build by a hash of the program and of libhalfstep. */
static void identify_build(struct identity *identity)
{
    uint64_t hash = HASH_START;
    char text[64], program[4096];
    Dl_info library;
    if (paths_program(program, sizeof program) == 0) hash_file(&hash, program);
    if (dladdr((void *)(uintptr_t)halfstep_version, &library) && library.dli_fname) hash_file(&hash, library.dli_fname);
    int32_t version = halfstep_version();
    snprintf(text, sizeof text, "%d.%d.%d (%016llx)", version / 10000, version / 100 % 100, version % 100,
             (unsigned long long)hash_finish(hash));
    identify(identity, "build", text);
}

static void identify_bytes(struct identity *identity, const char *what, uint64_t hash, size_t bytes)
{
    char text[64];
    snprintf(text, sizeof text, "%016llx of %zu bytes", (unsigned long long)hash, bytes);
    identify(identity, what, text);
}

/* Finds the first rank that differs from rank 0, and its first difference. Returns 0 if there is none, otherwise 1 or 2
 * with an error text. */
static int compare(struct dist *dist, const struct identity *identity, char *error, size_t error_bytes)
{
    int64_t values[RUN_OPTIONS_MAX + 8], *places = calloc((size_t)dist->ranks, sizeof *places);
    int own = 0, other = 0;
    char there[WORD] = "";
    if (!places) return lost(dist, error, error_bytes);
    memcpy(values, identity->hash, sizeof values);
    if (dist->share(values, (size_t)identity->n * sizeof *values, 0) != 0 || dist->wait() != 0) other = -1;
    for (int i = 0; i < identity->n && !own; i++)
        if (values[i] != identity->hash[i]) own = i + 1;
    if (other == 0 && share_values(dist, places, own) != 0) other = -1;
    while (other >= 0 && other < dist->ranks && !places[other]) other++;
    int place = other >= 0 && other < dist->ranks ? (int)places[other] - 1 : -1;
    free(places);
    if (other < 0) return lost(dist, error, error_bytes);
    if (place < 0) return 0;
    snprintf(there, sizeof there, "%s", identity->value[place]);
    if (share_line(dist, there, sizeof there, other)) return lost(dist, error, error_bytes);
    char here[WORD];
    snprintf(here, sizeof here, "%s", identity->value[place]);
    if (share_line(dist, here, sizeof here, 0)) return lost(dist, error, error_bytes);
    const char *what = identity->what[place];
    int option = what[0] != '=';
    snprintf(error, error_bytes, "rank %d of %d was started with %s%s: %s, not %s as rank 0", other, dist->ranks,
             option ? "another --" : "another ", option ? what : what + 1, there[0] ? there : "none",
             here[0] ? here : "none");
    return 2;
}

int ranks_compare(struct dist *dist, const struct run_config *config, const struct run_data *data, char *error,
                  size_t error_bytes)
{
    if (!dist || dist->ranks == 1) return 0;
    struct identity *identity = calloc(1, sizeof *identity);
    int status = identity ? 0 : 1;
    if (!identity) no_memory(error, error_bytes);
    status = ranks_agree(dist, status, error, error_bytes);
    if (status) {
        free(identity);
        return status;
    }
    /* The build is compared first and by itself, because another build may have other options. */
    identify_build(identity);
    identity->what[0] = "=build";
    status = compare(dist, identity, error, error_bytes);
    if (!status) {
        run_each_option(config, identify_option, identity);
        identify(identity, "checkpoint", config->checkpoint ? config->checkpoint : "");
        identify(identity, "resume", config->resume ? "given" : "not given");
        identify_bytes(identity, "=data", data->data_hash, data->data_file.n);
        identify_bytes(identity, "=validation data", data->val_hash, data->val_file.n);
        status = compare(dist, identity, error, error_bytes);
    }
    free(identity);
    return status;
}
