/* Makes every call of the library into the C library fail once, and once from some call on. The API must answer with an
 * error code and a sentence. Nothing may be lost, and the same call made again must give the same bits.
 *
 *   test_faults                  One error at the first call from each place, once or from there on.
 *   test_faults --all            Every error at each call, both once and from there on.
 *   test_faults NAME:ERROR:K[+]  One fault (faults/inject.h), in this process.
 *
 * The scenario creates optimizers, steps them, saves, loads, goes on. The linker's --wrap puts faults/inject.c in, and
 * src/io is compiled in for that. A child process works through a list of faults. If it dies, its fault is reported and
 * another child goes on behind it. Leaks of blocks and descriptors are counted after each fault. Under AddressSanitizer
 * its leak checker also runs at the end of each child. Over 500 lines because the scenario is a life of its own. */
#define HALFSTEP_ADVANCED
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"
#include "faults/inject.h"
#include "folders.h"
#include "halfstep_io.h"
#include "test.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_LSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_LSAN 1
#endif
#endif
#ifdef HAVE_LSAN
int __lsan_do_recoverable_leak_check(void);
#endif

/* Memory that a child shares with its parent. */
static struct shared {
    char violation[1024];
    char where[128];
    _Atomic size_t next;      /* fault */
    _Atomic uint64_t struck;  /* faults that hit a call */
    _Atomic uint64_t refused; /* faults that an API call reported */
} *shared;

static char directory[512];

/* ---- Judging one API call ---------------------------------------------------------------------------------------- */

static const char *present_fault;

__attribute__((format(printf, 1, 2))) static int violated(const char *format, ...)
{
    if (shared->violation[0]) return 0;
    va_list arguments;
    va_start(arguments, format);
    size_t used = (size_t)snprintf(shared->violation, sizeof shared->violation, "%s: ", shared->where);
    vsnprintf(shared->violation + used, sizeof shared->violation - used, format, arguments);
    va_end(arguments);
    return 0;
}

/* Judges a failure: it needs a fault as its reason, and an error text. Afterwards nothing fails any more. */
static int judge_failure(int code, const char *text)
{
    if (!present_fault || !inject_struck())
        return violated("fails without a fault: %s (%s)", halfstep_strerror(code), text);
    inject_arm(NULL);
    shared->refused++;
    if (code != MEMORY && code != IO)
        return violated("code %d (%s) is neither MEMORY nor IO: %s", code, halfstep_strerror(code), text);
    if (strlen(text) < 10 || strchr(text, '\n')) return violated("no sentence with code %d: \"%s\"", code, text);
    return 1;
}

/* Makes a call, and once more if it fails. Ends the scenario if that fails too. */
#define TRY(text, call)                                                                    \
    do {                                                                                   \
        snprintf(shared->where, sizeof shared->where, "%.100s", #call);                    \
        int code_ = (call);                                                                \
        if (code_ && judge_failure(code_, (text))) {                                       \
            code_ = (call);                                                                \
            if (code_) violated("fails again: %s (%s)", halfstep_strerror(code_), (text)); \
        }                                                                                  \
        if (shared->violation[0]) goto done;                                               \
    } while (0)

/* Makes a call about a model's optimizer. */
#define TRY_ON(model, call) TRY(halfstep_error_detail((model)->optimizer), call)

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* ---- The scenario ------------------------------------------------------------------------------------------------ */

enum { TENSORS = 6, STORED = 2, ROWS = 4, COLUMNS = 640, ELEMENTS = ROWS * COLUMNS, MAX_STREAMS = 64 };
static const char *const recipes[TENSORS] = {"adamw/bf16-kahan/int8",  "muon/bf16-sr",    "lamb/f32/dyn8",
                                             "schedulefree/bf16-ecc8", "lamb16/bf16/fp8", "adan/f16-ecc16/bf16-sr"};
static float gradients[TENSORS][ELEMENTS];

struct model {
    halfstep_optimizer *optimizer;
    _Alignas(64) char weights[TENSORS][4 * ELEMENTS];
    void *weight[TENSORS];
    struct stream {
        char name[64];
        void *data;
        uint64_t bytes;
    } streams[MAX_STREAMS];
    size_t count;
};
static struct model first, second, third;

/* stored: 1: the states will be in a file. */
static int build(struct model *model, int stored)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 2, .seed = 7};
    int32_t group, index;
    memset(model->weights, 0, sizeof model->weights);
    snprintf(shared->where, sizeof shared->where, "halfstep_create");
    int code = halfstep_create(&options, &model->optimizer);
    if (code) {
        if (model->optimizer) violated("a handle in spite of the error");
        /* Without a handle there is only the code's sentence. */
        if (judge_failure(code, halfstep_strerror(code))) code = halfstep_create(&options, &model->optimizer);
        if (code) violated("fails again");
    }
    if (shared->violation[0]) goto done;
    for (int i = 0; i < (stored ? STORED : TENSORS); i++) {
        char name[16];
        snprintf(name, sizeof name, "tensor%d", i);
        TRY_ON(model, halfstep_add_group(model->optimizer, recipes[i], &group));
        TRY_ON(model, halfstep_set_hyper(model->optimizer, group, "lr", 0.01));
        halfstep_tensor tensor = {.struct_size = sizeof tensor,
                                  .group = group,
                                  .name = name,
                                  .ndim = 2,
                                  .rows = ROWS,
                                  .row_length = COLUMNS,
                                  .gradient = "f32"};
        TRY_ON(model, halfstep_add_tensor(model->optimizer, &tensor, &index));
        model->weight[i] = model->weights[i];
    }
    TRY_ON(model, halfstep_set_hyper(model->optimizer, ALL_GROUPS, "clip_norm", 1.0));
    if (!stored) TRY_ON(model, halfstep_allocate_states(model->optimizer));
    for (int i = 0; i < TENSORS; i++) {
        snprintf(model->streams[i].name, sizeof model->streams[i].name, "tensor%d", i);
        model->streams[i].data = model->weights[i];
        model->streams[i].bytes = sizeof model->weights[i];
    }
    model->count = TENSORS;
    for (int i = 0; i < TENSORS && !stored; i++)
        for (int slot = 0; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
            SIZED(halfstep_slot_info, info);
            if (halfstep_get_slot_info(model->optimizer, i, slot, &info) || info.format < 0) continue;
            for (int extra = 0; extra < 2; extra++) {
                void *data = extra ? info.extra : info.code;
                uint64_t bytes = extra ? info.extra_bytes : info.code_bytes;
                if (slot == GRADIENT || !data || !bytes || model->count == MAX_STREAMS) continue;
                struct stream *stream = &model->streams[model->count++];
                snprintf(stream->name, sizeof stream->name, "tensor%d.%.30s%s", i, info.name, extra ? ".extra" : "");
                stream->data = data;
                stream->bytes = bytes;
            }
        }
    return 1;
done:
    return 0;
}

static int train(struct model *model, int steps)
{
    const void *gradient[TENSORS];
    for (int i = 0; i < TENSORS; i++) gradient[i] = gradients[i];
    for (int step = 0; step < steps; step++) {
        TRY_ON(model, halfstep_step(model->optimizer, model->weight, gradient));
        TRY_ON(model, step_tensor(model->optimizer, 0, model->weight[0], gradient[0]));
        TRY_ON(model, end_round(model->optimizer));
    }
    TRY_ON(model, accumulate_states_tensor(model->optimizer, 0, gradient[0]));
    float row[COLUMNS];
    TRY_ON(model, halfstep_read_slot(model->optimizer, 0, STATE, NULL, 1, 1, row));
    TRY_ON(model, halfstep_write_slot(model->optimizer, 0, STATE, NULL, 1, 1, row));
    return 1;
done:
    return 0;
}

/* Compares all that a checkpoint must keep beside weights and states. */
struct position {
    halfstep_record counters[TENSORS];
    double scalars[TENSORS][4], grids[TENSORS], norm;
    uint64_t group_steps[TENSORS];
};

/* Returns a name of a scalar of tensor i's rule; NULL past the last. */
static const char *scalar_name(int i, int scalar)
{
    char rule[32];
    SIZED(halfstep_rule_info, info);
    snprintf(rule, sizeof rule, "%.*s", (int)strcspn(recipes[i], "/"), recipes[i]);
    halfstep_get_rule_info(halfstep_rule_find(rule), &info);
    return scalar < info.scalars ? info.scalar_name[scalar] : NULL;
}

static void get_position(const struct model *model, struct position *position)
{
    const char *name;
    memset(position, 0, sizeof *position);
    for (int i = 0; i < TENSORS; i++) {
        position->counters[i].struct_size = sizeof position->counters[i];
        get_counters(model->optimizer, i, &position->counters[i]);
        get_group_steps(model->optimizer, i, &position->group_steps[i]);
        for (int k = 0; k < 4 && (name = scalar_name(i, k)); k++)
            get_scalar(model->optimizer, i, name, &position->scalars[i][k]);
        get_scalar(model->optimizer, i, "exp_avg_sq.grid", &position->grids[i]);
    }
    position->norm = halfstep_gradient_norm(model->optimizer);
}

static int set_position(struct model *model, const struct position *position)
{
    const char *name;
    for (int i = 0; i < TENSORS; i++) {
        TRY_ON(model, set_counters(model->optimizer, i, &position->counters[i]));
        TRY_ON(model, set_group_steps(model->optimizer, i, position->group_steps[i]));
        for (int k = 0; k < 4 && (name = scalar_name(i, k)); k++)
            TRY_ON(model, set_scalar(model->optimizer, i, name, position->scalars[i][k]));
        if (position->grids[i] != 0.0)
            TRY_ON(model, set_scalar(model->optimizer, i, "exp_avg_sq.grid", position->grids[i]));
    }
    TRY_ON(model, set_gradient_norm(model->optimizer, position->norm));
    return 1;
done:
    return 0;
}

static uint64_t hash_model(const struct model *model)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < model->count; i++) hash = hash_bytes(hash, model->streams[i].data, model->streams[i].bytes);
    struct position position;
    get_position(model, &position);
    return hash_bytes(hash, &position, sizeof position);
}

static int fill(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    const struct model *model = context;
    memcpy(data, (const char *)model->streams[tensor].data + offset, bytes);
    return 0;
}

static int declare(const struct model *model, halfstep_safetensors_writer *writer, char *text, size_t size)
{
    for (size_t i = 0; i < model->count; i++)
        TRY(text, halfstep_declare_safetensor(writer, model->streams[i].name, "U8", 1, &model->streams[i].bytes,
                                              i % 2 ? model->streams[i].data : NULL, text, size));
    TRY(text, halfstep_declare_safetensors_metadata(writer, "format", "pt", text, size));
    return 1;
done:
    return 0;
}

/* Makes a whole save. Returns the code of the first call that fails. */
static int save(const struct model *model, halfstep_safetensors_writer *writer, uint64_t step, int how, char *text,
                size_t size)
{
    halfstep_save_options options = {.struct_size = sizeof options, .keep = 2, .step = step};
    halfstep_checkpoint_save *save;
    struct position position;
    get_position(model, &position);
    int code = halfstep_begin_checkpoint(&save, directory, &options, text, size);
    if (code) {
        if (save) violated("a handle in spite of the error");
        return code;
    }
    code = halfstep_save_safetensors(save, "model.safetensors", writer, fill, (void *)model, text, size);
    if (!code) code = halfstep_save_file(save, "position", &position, sizeof position, text, size);
    if (!code) code = halfstep_save_value(save, "recipe", "many", text, size);
    if (!code) return halfstep_commit_checkpoint(save, text, size);
    if (how) {
        halfstep_abandon_checkpoint(save);
        return code;
    }
    char again[512];
    int same = halfstep_commit_checkpoint(save, again, sizeof again);
    if (same != code || strcmp(again, text)) violated("the commit says %d (%s) after %d (%s)", same, again, code, text);
    return code;
}

/* Returns the step of the checkpoint in the directory, or 0 if there is none. */
static uint64_t current_step(void)
{
    halfstep_checkpoint *checkpoint;
    SIZED(halfstep_checkpoint_info, info);
    char text[512];
    inject_hold(1);
    int code = halfstep_open_checkpoint(&checkpoint, directory, NULL, text, sizeof text);
    if (!code) halfstep_get_checkpoint_info(checkpoint, &info);
    else if (code != NAME) violated("the directory does not open after a failure: %s", text);
    halfstep_close_checkpoint(checkpoint);
    inject_hold(0);
    return info.step;
}

static int save_judged(const struct model *model, uint64_t before, uint64_t step)
{
    halfstep_safetensors_writer *writer = NULL;
    char text[512] = "";
    snprintf(shared->where, sizeof shared->where, "halfstep_create_safetensors_writer");
    int code = halfstep_create_safetensors_writer(&writer);
    if (code && judge_failure(code, halfstep_strerror(code))) code = halfstep_create_safetensors_writer(&writer);
    if (code) violated("fails again");
    if (shared->violation[0] || !declare(model, writer, text, sizeof text)) goto done;
    snprintf(shared->where, sizeof shared->where, "save of step %d", (int)step);
    code = save(model, writer, step, (int)(step & 1), text, sizeof text);
    if (code && !shared->violation[0] && judge_failure(code, text)) {
        uint64_t found = current_step();
        int in_place = strstr(text, "in place") != NULL;
        if (found != (in_place ? step : before)) violated("step %d is in the directory after \"%s\"", (int)found, text);
        if (!shared->violation[0] && (code = save(model, writer, step, 1, text, sizeof text)))
            violated("fails again: %s", text);
    }
    if (!shared->violation[0] && current_step() != step) violated("step %d is not the current one", (int)step);
done:
    halfstep_destroy_safetensors_writer(writer);
    return !shared->violation[0];
}

static int load(struct model *model)
{
    halfstep_open_options options = {.struct_size = sizeof options, .fallback = 1};
    halfstep_checkpoint *checkpoint = NULL;
    halfstep_safetensors *file = NULL;
    struct position position;
    char text[512] = "";
    /* A caller that allows a fallback is told of it. A fallback is no success here, so only the memory matters. */
    TRY(text, halfstep_open_checkpoint(&checkpoint, directory, &options, text, sizeof text));
    SIZED(halfstep_checkpoint_info, info);
    halfstep_get_checkpoint_info(checkpoint, &info);
    if (info.fell_back) {
        if (!present_fault || !inject_struck() || !strstr(text, "note")) violated("fell back: %s", text);
        inject_arm(NULL);
        halfstep_close_checkpoint(checkpoint);
        checkpoint = NULL;
        TRY(text, halfstep_open_checkpoint(&checkpoint, directory, NULL, text, sizeof text));
    }
    TRY(text,
        halfstep_open_safetensors(&file, halfstep_checkpoint_path(checkpoint, "model.safetensors"), text, sizeof text));
    for (size_t i = 0; i < model->count; i++) {
        uint64_t index;
        TRY(model->streams[i].name, halfstep_safetensor_find(file, model->streams[i].name, &index));
        TRY(text, halfstep_read_safetensor(file, index, 0, model->streams[i].data, model->streams[i].bytes, text,
                                           sizeof text));
    }
    inject_hold(1);
    FILE *stream = fopen(halfstep_checkpoint_path(checkpoint, "position"), "rb");
    if (!stream || fread(&position, sizeof position, 1, stream) != 1) violated("the position cannot be read");
    if (stream) fclose(stream);
    inject_hold(0);
    if (!shared->violation[0]) set_position(model, &position);
done:
    halfstep_close_safetensors(file);
    halfstep_close_checkpoint(checkpoint);
    return !shared->violation[0];
}

static int write_files(void)
{
    halfstep_safetensors_writer *writer = NULL;
    char text[512] = "", path[600];
    snprintf(path, sizeof path, "%s-file", directory);
    if (halfstep_create_safetensors_writer(&writer))
        return inject_struck() ? (inject_arm(NULL), 1) : violated("no writer");
    if (!declare(&first, writer, text, sizeof text)) goto done;
    TRY(text, halfstep_write_safetensors(writer, path, fill, &first, text, sizeof text));
    TRY(text, halfstep_write_file_atomic(path, "new", 3, text, sizeof text));
    TRY(text, halfstep_write_file_atomic("/dev/null", "new", 3, text, sizeof text));
done:
    halfstep_destroy_safetensors_writer(writer);
    inject_hold(1);
    unlink(path);
    inject_hold(0);
    return !shared->violation[0];
}

/* Steps with the states in a file, which is opened again after each failure of a step, and once without one. */
static int keep_in_file(uint64_t *hash)
{
    const void *gradient[TENSORS];
    char text[1024] = "", path[600], saved[620];
    halfstep_store *store = NULL;
    uint64_t steps = 0;
    int opened = 0;
    snprintf(path, sizeof path, "%s-states", directory);
    snprintf(saved, sizeof saved, "%s-saved", directory);
    for (int i = 0; i < TENSORS; i++) gradient[i] = gradients[i];
    if (!build(&third, 1)) goto done;
    TRY(text, halfstep_store_create(path, third.optimizer, third.weight, NULL, &store, text, sizeof text));
    TRY(text, halfstep_store_set_value(store, "key", "value", text, sizeof text));
    while (steps < 2) {
        snprintf(shared->where, sizeof shared->where, "a step in a file");
        int code = halfstep_step(third.optimizer, third.weight, gradient);
        if (code && !judge_failure(code, halfstep_error_detail(third.optimizer))) goto done;
        get_group_steps(third.optimizer, 0, &steps);
        if (!code && opened) continue;
        opened |= !code;
        halfstep_store_close(store);
        store = NULL;
        halfstep_destroy(third.optimizer);
        third.optimizer = NULL;
        if (!build(&third, 1)) goto done;
        TRY(text, halfstep_store_open(path, third.optimizer, third.weight, NULL, &store, text, sizeof text));
        get_group_steps(third.optimizer, 0, &steps);
        if (!opened && !code) violated("the file is at step %d", (int)steps);
    }
    TRY(text, halfstep_write_optimizer(saved, third.optimizer, third.weight, NULL, text, sizeof text));
    SIZED(halfstep_store_info, info);
    TRY(text, halfstep_store_get_info(path, &info, text, sizeof text));
    if (info.steps != 2) violated("the file says that it is at step %d", (int)info.steps);
    halfstep_store_free_info(&info);
    *hash = hash_bytes(0, third.weights, sizeof third.weights);
done:
    halfstep_store_close(store);
    inject_hold(1);
    unlink(path);
    unlink(saved);
    inject_hold(0);
    return !shared->violation[0];
}

static unsigned entries(const char *path, int *odd)
{
    unsigned count = 0;
    inject_hold(1);
    DIR *stream = opendir(path);
    for (struct dirent *entry; stream && (entry = readdir(stream)); count++)
        if (odd && entry->d_name[0] == '.' && strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") &&
            !strstr(entry->d_name, "lock"))
            *odd = 1;
    if (stream) closedir(stream);
    inject_hold(0);
    return count;
}

static void remove_all(const char *path)
{
    inject_hold(1);
    remove_tree(path);
    inject_hold(0);
}

static uint64_t reference;

/* Runs the scenario. Returns the hash of all results; shared->violation says what went wrong. */
static uint64_t scenario(const char *fault)
{
    uint64_t hash = 0, result = 0;
    int odd = 0;
    present_fault = fault;
    shared->violation[0] = shared->where[0] = 0;
    remove_all(directory);
    uint64_t blocks = inject_live_blocks();
    unsigned descriptors = entries("/proc/self/fd", NULL);
    inject_arm(fault);
    if (!build(&first, 0) || !train(&first, 2) || !save_judged(&first, 0, 1) || !train(&first, 1) ||
        !save_judged(&first, 1, 2))
        goto done;
    hash = hash_model(&first);
    if (!build(&second, 0) || !load(&second)) goto done;
    snprintf(shared->where, sizeof shared->where, "load");
    if (hash_model(&second) != hash) violated("what was loaded differs from what was saved");
    if (shared->violation[0] || !train(&first, 1) || !train(&second, 1) || !write_files()) goto done;
    snprintf(shared->where, sizeof shared->where, "the end");
    hash = hash_model(&first);
    if (hash_model(&second) != hash) violated("the loaded one goes on in another way");
    uint64_t in_file = 0;
    if (!shared->violation[0] && !keep_in_file(&in_file)) goto done;
    hash = hash_bytes(hash, &in_file, sizeof in_file);
    if (reference && hash != reference) violated("other bits than without a fault");
    if (!shared->violation[0]) result = hash;
done:
    inject_arm(NULL);
    /* On failure, create must set NULL. A handle left behind would be destroyed twice. */
    halfstep_destroy(first.optimizer);
    halfstep_destroy(second.optimizer);
    halfstep_destroy(third.optimizer);
    first.optimizer = second.optimizer = third.optimizer = NULL;
    if (!shared->violation[0]) {
        if (inject_live_blocks() != blocks)
            violated("%lld blocks are lost", (long long)(inject_live_blocks() - blocks));
        if (entries("/proc/self/fd", NULL) != descriptors) violated("a descriptor is lost");
        entries(directory, &odd);
        if (odd) violated("a temporary file is left after the save that followed");
    }
    return result;
}

/* ---- Lists of faults --------------------------------------------------------------------------------------------- */

static char (*faults)[64];
static size_t fault_count, fault_capacity;

extern void *__real_realloc(void *memory, size_t bytes);

static void add_fault(const char *name, const char *error, uint64_t number, int from_on)
{
    if (fault_count == fault_capacity) {
        fault_capacity = fault_capacity ? 2 * fault_capacity : 1024;
        faults = __real_realloc(faults, fault_capacity * sizeof *faults);
    }
    snprintf(faults[fault_count++], sizeof *faults, "%s:%s:%llu%s", name, error, (unsigned long long)number,
             from_on ? "+" : "");
}

/* Takes the errors in turn, so that a short list has all of them. */
static void list_faults(void)
{
    static uint64_t numbers[1 << 16];
    unsigned turn = 0;
    for (int call = 0; call < INJECT_CALLS; call++) {
        char text[128], *save = NULL, *list[8];
        size_t errors = 0, count = inject_count(call);
        snprintf(text, sizeof text, "%s", inject_errors[call]);
        for (char *error = strtok_r(text, " ", &save); error && errors < 8; error = strtok_r(NULL, " ", &save))
            list[errors++] = error;
        if (test_length == TEST_ALL) {
            for (uint64_t k = 1; k <= count; k++)
                for (size_t e = 0; e < 2 * errors; e++) add_fault(inject_names[call], list[e / 2], k, e % 2);
        } else {
            size_t places = inject_places(call, numbers, COUNT(numbers));
            for (size_t i = 0; i < places; i++, turn++)
                add_fault(inject_names[call], list[turn % errors], numbers[i], turn / errors % 2);
        }
    }
}

static void work_through(const char *program)
{
    alarm(60);
    for (size_t i; (i = shared->next) < fault_count; shared->next = i + 1) {
        /* The library does not ask again for a thread that could not be started, so these faults need their own
         * process. */
        int alone = strstr(faults[i], "pthread_create") != NULL;
        alarm(60);
        scenario(faults[i]);
        shared->struck += inject_struck() != 0;
        if (shared->violation[0]) printf("     %s\n     reproduce: %s %s\n", shared->violation, program, faults[i]);
        if (shared->violation[0] || alone) {
            shared->next = i + 1;
            test_leave(shared->violation[0] ? 3 : 0);
        }
    }
#ifdef HAVE_LSAN
    /* Blocks are counted after each fault. This also sees those of the C library, and reports who allocated them. */
    if (__lsan_do_recoverable_leak_check()) {
        printf("     a leak in this process\n");
        test_leave(3);
    }
#endif
    test_leave(0);
}

int main(int argc, char **argv)
{
    int next = test_init(argc, argv);
    test_filter = "";
    const char *base = getenv("TMPDIR");
    char own[400];
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    /* In memory if possible, because every save syncs. */
    snprintf(own, sizeof own, "%s/halfstep-faults-XXXXXX",
             base && *base              ? base
             : access("/dev/shm", W_OK) ? P_tmpdir
                                        : "/dev/shm");
    if (shared == MAP_FAILED || !mkdtemp(own)) {
        fprintf(stderr, "%s: cannot start in %s: %s\n", argv[0], own, strerror(errno));
        return 1;
    }
    snprintf(directory, sizeof directory, "%s/run", own);
    for (int i = 0; i < TENSORS; i++)
        for (int j = 0; j < ELEMENTS; j++) gradients[i][j] = (float)((i * 31 + j * 17) % 101 - 50) / 500.0f;

    if (argc > next) {
        setvbuf(stdout, NULL, _IONBF, 0);
        reference = scenario(NULL);
        int ok = reference != 0;
        for (int i = next; i < argc && ok; i++) {
            scenario(argv[i]);
            printf("%s: %s\n", argv[i],
                   shared->violation[0] ? shared->violation
                   : inject_struck()    ? "as it should be"
                                        : "never");
            ok &= !shared->violation[0];
        }
        remove_all(own);
        return !ok;
    }

    TEST("the scenario holds without faults") {
        /* Runs in a child, so that the parent keeps no threads. */
        uint64_t *result = mmap(NULL, sizeof *result, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        pid_t child = fork();
        if (!child) {
            *result = scenario(NULL);
            test_leave(0);
        }
        waitpid(child, NULL, 0);
        reference = *result;
        CHECK(reference != 0, "%s", shared->violation);
    }
    TEST("a call that fails: an error, nothing lost, and the same bits the second time") {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        /* A child also makes the list, which comes through a pipe. */
        int ends[2];
        if (pipe(ends)) return 1;
        pid_t child = fork();
        if (!child) {
            inject_record("any");
            scenario(NULL);
            inject_record(NULL);
            list_faults();
            close(ends[0]);
            for (size_t done = 0; done < fault_count * sizeof *faults;) {
                ssize_t put = write(ends[1], (char *)faults + done, fault_count * sizeof *faults - done);
                if (put <= 0) test_leave(1);
                done += (size_t)put;
            }
            test_leave(0);
        }
        close(ends[1]);
        char line[64];
        size_t have = 0;
        for (ssize_t got; (got = read(ends[0], line + have, sizeof line - have)) > 0;) {
            have += (size_t)got;
            if (have < sizeof line) continue;
            add_fault("", "", 0, 0);
            memcpy(faults[fault_count - 1], line, sizeof line);
            have = 0;
        }
        close(ends[0]);
        waitpid(child, NULL, 0);
        CHECK(fault_count > 100, "only %zu faults", fault_count);

        unsigned violations = 0;
        while (shared->next < fault_count && violations < 100) {
            size_t at = shared->next;
            fflush(stdout);
            shared->violation[0] = 0;
            child = fork();
            if (!child) work_through(argv[0]);
            int status = test_child_status(child);
            if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
            violations++;
            if (WIFEXITED(status) && WEXITSTATUS(status) == 3) continue;
            at = shared->next;
            printf("     %s in %s\n     reproduce: %s %s\n",
                   WIFSIGNALED(status) ? WTERMSIG(status) == SIGALRM ? "a hang" : strsignal(WTERMSIG(status)) : "died",
                   shared->where, argv[0], at < fault_count ? faults[at] : "(after the last)");
            shared->next = at + 1;
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        CHECK(!violations, "%u faults were not met as they should be", violations);
        CHECK(shared->struck * 10 >= fault_count * 9, "only %llu of %zu faults hit a call",
              (unsigned long long)shared->struck, fault_count);
        printf("     %zu faults, %llu hit a call, of which %llu were told of; %u violations; %.1f s\n", fault_count,
               (unsigned long long)shared->struck, (unsigned long long)shared->refused, violations,
               (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec));
    }
    remove_all(own);
    return test_done();
}
