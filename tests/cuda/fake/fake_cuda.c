/* Over 500 lines because one driver is one library, and its calls share memory, streams and mutations. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/emulate.h"
#include "device/cuda/code/kernels.h"
#include "device/cuda/driver/driver.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_RESOURCES = 701,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_ISOLATION = 905
};

static struct fake_cuda_control control = {.devices = -1};
static int lost; /* a kernel has faulted */

static int number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

EXPORT struct fake_cuda_control *fake_cuda_control(void)
{
    if (control.devices < 0) {
        control.devices = number("FAKE_CUDA_DEVICES", 1);
        control.driver = number("FAKE_CUDA_DRIVER", 12080);
        control.compute = number("FAKE_CUDA_COMPUTE", 90);
        control.fail_allocation = number("FAKE_CUDA_FAIL_ALLOCATION", 0);
        control.fault = number("FAKE_CUDA_FAULT", 0);
        control.open = number("FAKE_CUDA_OPEN", 0);
        control.lose = number("FAKE_CUDA_LOSE", 0);
    }
    return &control;
}

static int misuse(const char *what)
{
    if (!control.offence) control.offence = what;
    return INVALID_VALUE;
}

/* ---- Memory ---- */

/* One range of addresses per GPU, so that one call opens or closes it. Blocks are not reused until all are free. */
#define ARENA ((size_t)1 << 30)
#define MOST 4096

static struct {
    char *base;
    size_t used;
    int live;
} arena[2];

static struct block {
    char *base;
    size_t bytes;
    int device;
} blocks[MOST], pins[MOST];

/* 1 while kernels may touch all blocks. */
static int all_open;

static void open_all(int yes)
{
    for (int d = 0; d < 2 && !control.open && yes != all_open; d++)
        if (arena[d].used) mprotect(arena[d].base, arena[d].used, yes ? PROT_READ | PROT_WRITE : PROT_NONE);
    all_open = yes;
}

/* Fills a page behind each block, so that kernels that write beyond the end are found out. */
#define BEHIND 0x3c
static size_t room_of(size_t bytes) { return (bytes + 4095) / 4096 * 4096 + 4096; }

/* Opens or closes one block, which takes less time than all of them. */
static void open_block(const struct block *b, int yes)
{
    if (b && !control.open && !all_open) mprotect(b->base, room_of(b->bytes), yes ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static struct block *find(struct block *in, const void *at)
{
    for (int i = 0; i < MOST; i++)
        if (in[i].base && (size_t)((const char *)at - in[i].base) < in[i].bytes) return &in[i];
    return NULL;
}

static struct block *vacant(struct block *in)
{
    for (int i = 0; i < MOST; i++)
        if (!in[i].base) return &in[i];
    abort();
}

/* ---- Streams, events, graphs ---- */

enum kind { COPY, SET, LAUNCH, RECORD, WAIT, WORK };

struct op {
    struct op *next;
    enum kind kind;
    char *to;
    const char *from;
    char *owned; /* copy of source memory that is not pinned */
    size_t bytes;
    int byte, kernel, blocks, threads;
    char about[sizeof(struct hstep_call)]; /* the largest argument of a kernel */
    struct hstep_cuda_what what;
    struct event *event;
    long number;
    void (*work)(void *); /* another library's work; its argument is `about` */
};

struct graph {
    struct op *first, **last;
};

struct stream {
    struct op *first, **last;
    struct graph *capture;
    int invalid;
};

struct event {
    struct stream *stream;
    long recorded, done;
};

static struct stream legacy;
static int captures;

static struct stream *stream_of(void *handle)
{
    struct stream *s = handle ? handle : &legacy;
    if (!s->last) s->last = &s->first;
    return s;
}

static int run_until(struct stream *s, const struct event *event, long number);

static void run(struct op *o)
{
    void *parameters[] = {o->about, &o->what};
    const struct block *to = find(blocks, o->to), *from = find(blocks, o->from);
    if (o->kind == LAUNCH || o->kind == WORK) open_all(1);
    switch (o->kind) {
    case COPY:
        open_block(to, 1);
        open_block(from, 1);
        memmove(o->to, o->owned ? o->owned : o->from, o->bytes);
        open_block(to, 0);
        open_block(from, 0);
        break;
    case SET:
        open_block(to, 1);
        memset(o->to, o->byte, o->bytes);
        open_block(to, 0);
        break;
    case LAUNCH:
        control.kernels++;
        if (control.fault && !--control.fault) lost = 1;
        else if (control.lose == o->kernel + 1) break;
        else if (hstep_emulate(&hstep_emulated_kernels[o->kernel], o->blocks, o->threads, 0, parameters))
            misuse("a launch of a shape that the kernel is not written for");
        break;
    case WORK: o->work(o->about); break;
    case RECORD: o->event->done = o->number; break;
    case WAIT:
        if (o->event->done < o->number) run_until(o->event->stream, o->event, o->number);
        break;
    }
}

/* Runs all work of a stream, or until an event was recorded for the number-th time. */
static int run_until(struct stream *s, const struct event *event, long number)
{
    static int inner; /* 1 while a stream runs another one that it waits for */
    if (!s->first) return lost ? ILLEGAL_ADDRESS : OK;
    inner++;
    while (s->first && !lost && !(event && event->done >= number)) {
        struct op *o = s->first;
        s->first = o->next;
        if (!s->first) s->last = &s->first;
        run(o);
        free(o->owned);
        free(o);
    }
    if (!--inner) open_all(0);
    return lost ? ILLEGAL_ADDRESS : OK;
}

static struct stream *all[64];

EXPORT int fake_cuda_is_idle(void)
{
    for (int i = 0; i < 64; i++)
        if (all[i] && all[i]->first) return 0;
    return !legacy.first;
}

/* Returns 1 if this call must be left out. Return addresses tell calls in the library apart. */
static int is_left_out(enum fake_cuda_mutation mutation, const void *caller)
{
    static const void *places[FAKE_CUDA_CALLS][32];
    int n = 0;
    while (n < control.calls[mutation] && places[mutation][n] != caller) n++;
    if (n == 32) abort();
    if (n == control.calls[mutation]) places[mutation][control.calls[mutation]++] = caller;
    return control.mutation == (int)mutation && (!control.call || control.call == n + 1);
}
#define LEFT_OUT(mutation) is_left_out(mutation, __builtin_return_address(0))

static void run_all(void)
{
    run_until(stream_of(NULL), NULL, 0);
    for (int i = 0; i < 64; i++)
        if (all[i] && !all[i]->capture) run_until(all[i], NULL, 0);
}

static struct op *append(struct stream *s, enum kind kind)
{
    struct op *o = calloc(1, sizeof *o), ***last = s->capture ? &s->capture->last : &s->last;
    if (!o) abort();
    o->kind = kind;
    **last = o;
    *last = &o->next;
    return o;
}

EXPORT void fake_cuda_submit(void *handle, void (*work)(void *), const void *argument, size_t bytes)
{
    struct op *o = append(stream_of(handle), WORK);
    if (!control.depth) misuse("work of another library without a context");
    if (bytes > sizeof o->about) abort();
    o->work = work;
    memcpy(o->about, argument, bytes);
}

/* Begins every call that needs a context. */
#define BEGIN()                                     \
    do {                                            \
        if (!control.depth) return INVALID_CONTEXT; \
        if (lost) return ILLEGAL_ADDRESS;           \
    } while (0)

/* Makes all captures in progress invalid. */
static int breaks_captures(void)
{
    if (!captures) return 0;
    misuse("a call that no capture survives");
    for (int i = 0; i < 64; i++)
        if (all[i] && all[i]->capture) all[i]->invalid = 1;
    return 1;
}

/* ---- The driver's functions ---- */

EXPORT int cuInit(unsigned flags)
{
    (void)flags;
    return fake_cuda_control()->devices ? OK : NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version)
{
    *version = fake_cuda_control()->driver;
    return OK;
}

EXPORT int cuGetErrorName(int result, const char **text)
{
    static const struct {
        int result;
        const char *name;
    } names[] = {{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                 {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
                 {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
                 {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
                 {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                 {OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
                 {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
    *text = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].result == result) *text = names[i].name;
    return *text ? OK : INVALID_VALUE;
}

EXPORT int cuGetErrorString(int result, const char **text)
{
    *text = result == OUT_OF_MEMORY ? "out of memory" : "an error of the fake driver";
    return OK;
}

EXPORT int cuDeviceGetCount(int *count)
{
    *count = control.devices;
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal < control.devices ? OK : INVALID_DEVICE;
}

EXPORT int cuDeviceGetName(char *name, int length, int device)
{
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return OK;
}

EXPORT int cuDeviceGetUuid(unsigned char uuid[16], int device)
{
    memset(uuid, device + 1, 16);
    return OK;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == HSTEP_CU_ATTRIBUTE_MULTIPROCESSORS ? 3
             : attribute == HSTEP_CU_ATTRIBUTE_COMPUTE_MAJOR ? control.compute / 10
                                                             : control.compute % 10;
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    *bytes = ARENA;
    return OK;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (!arena[device].base) {
        int open = control.open ? PROT_READ | PROT_WRITE : PROT_NONE;
        arena[device].base = mmap(NULL, ARENA, open, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena[device].base == MAP_FAILED) abort();
    }
    *context = &arena[device];
    return OK;
}

static _Thread_local void *contexts[8];
static _Thread_local int depth;

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    if (depth == 8) return misuse("contexts are pushed and not popped");
    contexts[depth++] = context;
    control.depth = depth;
    return OK;
}

EXPORT int cuCtxPopCurrent_v2(void **context)
{
    if (!depth) return misuse("a context is popped that was not pushed");
    *context = contexts[--depth];
    control.depth = depth;
    return OK;
}

EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned n, int *options, void **values)
{
    BEGIN();
    (void)n, (void)options, (void)values;
    static char taken[16];
    *module = &control;
    if (strncmp(image, "fake", 4) != 0) return INVALID_IMAGE;
    snprintf(taken, sizeof taken, "%s", (const char *)image);
    control.image = taken;
    return OK;
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name)
{
    BEGIN();
    (void)module;
    for (int k = 0; k < hstep_emulated_kernel_count; k++)
        if (!strcmp(hstep_emulated_kernels[k].name, name)) {
            *function = (void *)(uintptr_t)&hstep_emulated_kernels[k];
            return OK;
        }
    return NOT_FOUND;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *function, int threads, size_t shared)
{
    (void)function, (void)threads, (void)shared;
    *n = 2;
    return OK;
}

static void check_behind(const struct block *b)
{
    open_block(b, 1);
    for (size_t i = b->bytes; i < room_of(b->bytes); i++)
        if (b->base[i] != BEHIND) misuse("work has written beyond the end of an allocation");
    open_block(b, 0);
}

EXPORT int cuMemAlloc_v2(uint64_t *memory, size_t bytes)
{
    BEGIN();
    if (breaks_captures()) return CAPTURE_UNSUPPORTED;
    control.allocations++;
    int d = contexts[depth - 1] == (void *)&arena[1];
    size_t room = room_of(bytes);
    if (control.fail_allocation && !--control.fail_allocation) return OUT_OF_MEMORY;
    if (!bytes) return INVALID_VALUE;
    if (arena[d].used + room > ARENA) return OUT_OF_MEMORY;
    struct block *b = vacant(blocks);
    *b = (struct block){arena[d].base + arena[d].used, bytes, d};
    arena[d].used += room;
    arena[d].live++;
    control.live++;
    control.bytes += (long)bytes;
    if (control.bytes > control.most_bytes) control.most_bytes = control.bytes;
    *memory = (uint64_t)(uintptr_t)b->base;
    /* New memory has undefined contents. The page behind it must stay as it is. */
    open_block(b, 1);
    memset(b->base, 0xa5, bytes < 4096 ? bytes : 4096);
    memset(b->base + bytes, BEHIND, room - bytes);
    open_block(b, 0);
    return OK;
}

EXPORT int cuMemFree_v2(uint64_t memory)
{
    BEGIN();
    if (breaks_captures()) return CAPTURE_UNSUPPORTED;
    struct block *b = find(blocks, (void *)(uintptr_t)memory);
    if (!b || b->base != (char *)(uintptr_t)memory) return misuse("memory is freed that was not allocated");
    if (control.strict && !fake_cuda_is_idle()) misuse("memory is freed while work is on its way");
    run_all();
    check_behind(b);
    int d = b->device;
    control.bytes -= (long)b->bytes;
    /* Pages without memory cost nothing when all are opened. */
    madvise(b->base, room_of(b->bytes), MADV_DONTNEED);
    *b = (struct block){0};
    control.live--;
    if (--arena[d].live) return OK;
    if (!control.open) mprotect(arena[d].base, arena[d].used, PROT_NONE);
    arena[d].used = 0;
    return OK;
}

EXPORT int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    BEGIN();
    (void)flags;
    if (breaks_captures()) return CAPTURE_UNSUPPORTED;
    control.allocations++;
    if (control.fail_allocation && !--control.fail_allocation) return OUT_OF_MEMORY;
    struct block *b = vacant(pins);
    *b = (struct block){malloc(bytes), bytes, 0};
    control.pinned++;
    *memory = b->base;
    return OK;
}

EXPORT int cuMemFreeHost(void *memory)
{
    BEGIN();
    struct block *b = find(pins, memory);
    if (!b || b->base != memory) return misuse("pinned memory is freed that was not allocated");
    memset(b->base, 0x5a, b->bytes); /* makes a copy that is still to be made visible */
    free(b->base);
    *b = (struct block){0};
    control.pinned--;
    return OK;
}

EXPORT int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *handle)
{
    BEGIN();
    struct stream *s = stream_of(handle);
    char *target = (char *)(uintptr_t)to;
    const char *source = (const char *)(uintptr_t)from;
    struct block *of_target = find(blocks, target), *of_source = find(blocks, source);
    if ((of_target && target + bytes > of_target->base + of_target->bytes) ||
        (of_source && source + bytes > of_source->base + of_source->bytes))
        return misuse("a copy beyond the end of an allocation");
    int near_target = !of_target && !find(pins, target), near_source = !of_source && !find(pins, source);
    control.copies++;
    if (s->capture && (near_target || near_source)) {
        misuse("memory that is not pinned in a capture");
        return CAPTURE_UNSUPPORTED;
    }
    struct op *o = append(s, COPY);
    o->to = target;
    o->from = source;
    o->bytes = bytes;
    control.pageable += near_source;
    if (near_source && (o->owned = malloc(bytes))) memcpy(o->owned, source, bytes);
    return OK;
}

EXPORT int cuMemsetD8Async(uint64_t memory, unsigned char byte, size_t bytes, void *handle)
{
    BEGIN();
    struct block *b = find(blocks, (void *)(uintptr_t)memory);
    if (!b || (char *)(uintptr_t)memory + bytes > b->base + b->bytes) return misuse("memory set beyond its end");
    struct op *o = append(stream_of(handle), SET);
    o->to = (char *)(uintptr_t)memory;
    o->byte = byte;
    o->bytes = bytes;
    return OK;
}

EXPORT int cuPointerGetAttributes(unsigned n, const int *attributes, void **values, uint64_t pointer)
{
    BEGIN();
    const struct block *b = find(blocks, (void *)(uintptr_t)pointer);
    const int pinned = !b && find(pins, (void *)(uintptr_t)pointer) != NULL;
    for (unsigned i = 0; i < n; i++)
        if (attributes[i] == HSTEP_CU_POINTER_MEMORY_TYPE) *(unsigned *)values[i] = b ? HSTEP_CU_MEMORY_DEVICE : pinned;
        else *(int *)values[i] = b ? b->device : pinned ? 0 : -2;
    return OK;
}

EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t pointer)
{
    const struct block *b = find(blocks, (void *)(uintptr_t)pointer);
    if (!b) return INVALID_VALUE;
    *base = (uint64_t)(uintptr_t)b->base;
    *bytes = b->bytes;
    return OK;
}

EXPORT int cuStreamCreate(void **handle, unsigned flags)
{
    (void)flags;
    for (int i = 0; i < 64; i++)
        if (!all[i]) {
            *handle = all[i] = calloc(1, sizeof **all);
            return OK;
        }
    return OUT_OF_MEMORY;
}

EXPORT int cuStreamDestroy_v2(void *handle)
{
    run_until(handle, NULL, 0);
    for (int i = 0; i < 64; i++)
        if (all[i] == handle) all[i] = NULL;
    free(handle);
    return OK;
}

EXPORT int cuStreamSynchronize(void *handle)
{
    BEGIN();
    if (breaks_captures()) return CAPTURE_UNSUPPORTED;
    control.synchronizations++;
    if (LEFT_OUT(FAKE_CUDA_NO_STREAM_SYNCHRONIZE)) return OK;
    return run_until(stream_of(handle), NULL, 0);
}

EXPORT int cuStreamWaitEvent(void *handle, void *event, unsigned flags)
{
    BEGIN();
    (void)flags;
    if (LEFT_OUT(FAKE_CUDA_NO_STREAM_WAIT)) return OK;
    struct stream *s = stream_of(handle);
    struct event *e = event;
    if (s->capture) return CAPTURE_ISOLATION;
    if (!e->recorded) return OK;
    struct op *o = append(s, WAIT);
    o->event = e;
    o->number = e->recorded;
    return OK;
}

EXPORT int cuStreamIsCapturing(void *handle, int *status)
{
    struct stream *s = stream_of(handle);
    *status = !s->capture ? 0 : s->invalid ? 2 : HSTEP_CU_CAPTURE_ACTIVE;
    return OK;
}

EXPORT int cuStreamBeginCapture_v2(void *handle, int mode)
{
    struct stream *s = handle;
    (void)mode;
    if (!s || s->capture) return INVALID_VALUE;
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->last = &s->capture->first;
    s->invalid = 0;
    captures++;
    return OK;
}

EXPORT int cuStreamEndCapture(void *handle, void **graph)
{
    struct stream *s = handle;
    *graph = s->capture;
    s->capture = NULL;
    captures--;
    return s->invalid ? CAPTURE_INVALIDATED : OK;
}

EXPORT int cuGraphLaunch(void *graph, void *handle)
{
    struct stream *s = stream_of(handle);
    BEGIN();
    for (const struct op *from = ((struct graph *)graph)->first; from; from = from->next) {
        struct op *o = append(s, from->kind), *next = o->next;
        *o = *from;
        o->next = next;
    }
    return OK;
}

EXPORT int cuGraphDestroy(void *graph)
{
    for (struct op *o = ((struct graph *)graph)->first, *next; o; o = next) {
        next = o->next;
        free(o);
    }
    free(graph);
    return OK;
}

EXPORT int cuEventCreate(void **event, unsigned flags)
{
    BEGIN();
    (void)flags;
    *event = calloc(1, sizeof(struct event));
    return OK;
}

EXPORT int cuEventDestroy_v2(void *event)
{
    if (control.strict && !fake_cuda_is_idle()) misuse("an event is destroyed while work is on its way");
    run_all(); /* queued work may name the event */
    free(event);
    return OK;
}

EXPORT int cuEventRecord(void *event, void *handle)
{
    BEGIN();
    if (LEFT_OUT(FAKE_CUDA_NO_EVENT_RECORD)) return OK;
    struct event *e = event;
    e->stream = stream_of(handle);
    struct op *o = append(e->stream, RECORD);
    o->event = e;
    o->number = ++e->recorded;
    return OK;
}

EXPORT int cuEventSynchronize(void *event)
{
    BEGIN();
    if (breaks_captures()) return CAPTURE_UNSUPPORTED;
    struct event *e = event;
    if (LEFT_OUT(FAKE_CUDA_NO_EVENT_SYNCHRONIZE) || !e->recorded) return OK;
    return run_until(e->stream, e, e->recorded);
}

/* Returns the size of a kernel's argument beside `what`. */
static size_t size_of_about(int kernel)
{
    const char *name = hstep_emulated_kernels[kernel].name + strlen("halfstep_cuda_");
    if (!strcmp(name, "accumulate")) return sizeof(struct hstep_accumulation);
    return !strcmp(name, "read") || !strcmp(name, "write") || !strcmp(name, "saturated") ? sizeof(struct hstep_access)
                                                                                         : sizeof(struct hstep_call);
}

/* ---- Fields in each other's place ---- */

enum holder { WHAT, CALL, ACCUMULATION, ACCESS };

/* The fields that the library passes to kernels, by type. A call's scale and norm of a round are left out, because
 * kernels have the ledger for them. So are origins, which only the host has. */
static const struct field {
    enum holder holder;
    const char *type, *name;
    size_t offset, size;
} fields[] = {
#define FIELD(holder, of, type, name) {holder, #type, #name, offsetof(struct of, name), sizeof(type)}
#define WHAT_FIELD(type, name) FIELD(WHAT, hstep_cuda_what, type, name)
#define CALL_FIELD(type, name) FIELD(CALL, hstep_call, type, name)
#define SUM_FIELD(type, name) FIELD(ACCUMULATION, hstep_accumulation, type, name)
#define ACCESS_FIELD(type, name) FIELD(ACCESS, hstep_access, type, name)
    WHAT_FIELD(int, first),
    WHAT_FIELD(int, n),
    WHAT_FIELD(int, pass),
    WHAT_FIELD(int, tensor),
    WHAT_FIELD(int, pair),
    WHAT_FIELD(int, place),
    WHAT_FIELD(void *, to),
    WHAT_FIELD(void *, from),
    CALL_FIELD(void *, plan.tensors),
    CALL_FIELD(void *, plan.groups),
    CALL_FIELD(void *, plan.chunks),
    CALL_FIELD(void *, plan.tasks),
    CALL_FIELD(void *, plan.updates),
    CALL_FIELD(void *, plan.workspace),
    CALL_FIELD(void *, plan.round_squares),
    CALL_FIELD(void *, plan.ledger),
    CALL_FIELD(void *, weights),
    CALL_FIELD(void *, gradients),
    CALL_FIELD(void *, statistics),
    CALL_FIELD(void *, verdict),
    CALL_FIELD(int, plan.n_tensors),
    CALL_FIELD(int, plan.n_groups),
    CALL_FIELD(int, generator),
    CALL_FIELD(int, scan),
    CALL_FIELD(int, clip),
    CALL_FIELD(int, first),
    CALL_FIELD(int, n),
    CALL_FIELD(int, single),
    CALL_FIELD(int, micro),
    CALL_FIELD(int64_t, matrix),
    SUM_FIELD(void *, tensor),
    SUM_FIELD(void *, chunks),
    SUM_FIELD(void *, accumulator),
    SUM_FIELD(void *, gradient),
    SUM_FIELD(int, generator),
    SUM_FIELD(int, format),
    SUM_FIELD(int, gradient_format),
    ACCESS_FIELD(void *, tensor),
    ACCESS_FIELD(void *, data),
    ACCESS_FIELD(int64_t, first),
    ACCESS_FIELD(int64_t, end),
};
_Static_assert(sizeof(struct hstep_cuda_what) == 48 && sizeof(struct hstep_call) == 208 &&
                   sizeof(struct hstep_accumulation) == 88 && sizeof(struct hstep_access) == 48,
               "a field that is new has to stand in fields[]");

static int find_pair(int wanted, const struct field **a, const struct field **b)
{
    const struct field *end = fields + sizeof fields / sizeof *fields;
    int n = 0;
    for (*a = fields; *a < end; ++*a)
        for (*b = *a + 1; *b < end; ++*b)
            if ((*a)->holder == (*b)->holder && !strcmp((*a)->type, (*b)->type) && ++n == wanted) return 1;
    return 0;
}

EXPORT const char *fake_cuda_pair(int n)
{
    static char text[80];
    static const char *const holders[] = {"what", "call", "accumulation", "access"};
    const struct field *a, *b;
    if (!find_pair(n, &a, &b)) return NULL;
    snprintf(text, sizeof text, "%s: %s and %s", holders[a->holder], a->name, b->name);
    return text;
}

static enum holder holder_of_about(int kernel)
{
    const size_t size = size_of_about(kernel);
    return size == sizeof(struct hstep_call) ? CALL : size == sizeof(struct hstep_access) ? ACCESS : ACCUMULATION;
}

static void mix_up(struct op *o)
{
    const struct field *a, *b;
    char kept[8];
    if (control.mutation != FAKE_CUDA_SWAP_FIELDS || !find_pair(control.call, &a, &b)) return;
    if (a->holder != WHAT && a->holder != holder_of_about(o->kernel)) return;
    char *in = a->holder == WHAT ? (char *)&o->what : o->about;
    memcpy(kept, in + a->offset, a->size);
    memcpy(in + a->offset, in + b->offset, a->size);
    memcpy(in + b->offset, kept, a->size);
}

EXPORT int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                          unsigned threads_z, unsigned shared, void *handle, void **parameters, void **extra)
{
    BEGIN();
    const int swap = control.mutation == FAKE_CUDA_SWAP_PARAMETERS;
    (void)shared, (void)extra;
    if (control.mutation == FAKE_CUDA_SWAP_SHAPE) {
        unsigned blocks = x;
        x = threads_x;
        threads_x = blocks;
    }
    if (!x || y != 1 || z != 1 || threads_x != HSTEP_CUDA_THREADS || threads_y != 1 || threads_z != 1)
        return misuse("a launch of another shape");
    if (control.fail_launch && !--control.fail_launch) return OUT_OF_RESOURCES;
    control.launches++;
    struct op *o = append(stream_of(handle), LAUNCH);
    o->kernel = (int)((const struct hstep_emulated_kernel *)function - hstep_emulated_kernels);
    o->blocks = (int)x;
    o->threads = (int)threads_x;
    memcpy(o->about, parameters[swap], swap ? sizeof o->what : size_of_about(o->kernel));
    memcpy(&o->what, parameters[!swap], sizeof o->what);
    const struct hstep_call *call = (struct hstep_call *)(void *)o->about;
    if (!swap && size_of_about(o->kernel) == sizeof *call && (call->context || call->tensors))
        return misuse("a pointer into the process in a launch");
    mix_up(o);
    return OK;
}
