#include "trainer/products/matmul.h"

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/text.h"
#include "trainer/products/rows.h"
#include "trainer/models/llama.h"

enum { SLOTS = 512, FULL = 384 };

struct entry {
    struct matmul_shape shape;
    dnnl_primitive_t primitive; /* NULL: free */
    dnnl_memory_t a, b, c, scratch;
    int widen; /* oneDNN has no product of this type here, so the operands are converted to fp32 */
};

struct matmul {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    void *scratch;
    size_t scratch_bytes;
    float *wide; /* operands in fp32 */
    size_t wide_bytes;
    int used;
    char error[160];
    struct entry entries[SLOTS];
};

/* Keeps oneDNN from starting a team of OpenMP threads inside each of our threads. The setting is per thread. The
 * function is looked up at run time, because oneDNN may have been built on another runtime. */
static void use_one_thread(void)
{
    static _Thread_local int done;
    if (done) return;
    done = 1;
    void (*set_threads)(int);
    *(void **)&set_threads = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (set_threads) set_threads(1);
}

/* Checks that there is memory for the machine code and tables of a product. oneDNN does not check some of its
 * allocations, and crashes when it runs out of address space (ulimit -v). */
static int has_memory(char *error, size_t error_bytes)
{
    enum { NEEDED = 24 << 20 };
    void *trial = mmap(NULL, NEEDED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (trial != MAP_FAILED) {
        munmap(trial, NEEDED);
        return 1;
    }
    snprintf(error, error_bytes, "out of memory: oneDNN needs %d MiB to prepare a matrix product", NEEDED >> 20);
    return 0;
}

struct matmul *matmul_create(char *error, size_t error_bytes)
{
    if (!has_memory(error, error_bytes)) return NULL;
    struct matmul *context = calloc(1, sizeof *context);
    if (!context) {
        no_memory(error, error_bytes);
        return NULL;
    }
    use_one_thread();
    dnnl_status_t status = dnnl_engine_create(&context->engine, dnnl_cpu, 0);
    if (!status) status = dnnl_stream_create(&context->stream, context->engine, dnnl_stream_default_flags);
    if (status) {
        snprintf(error, error_bytes, "oneDNN cannot be started (status %d)", (int)status);
        matmul_destroy(context);
        return NULL;
    }
    return context;
}

static void clear(struct entry *entry)
{
    if (entry->a) dnnl_memory_destroy(entry->a);
    if (entry->b) dnnl_memory_destroy(entry->b);
    if (entry->c) dnnl_memory_destroy(entry->c);
    if (entry->scratch) dnnl_memory_destroy(entry->scratch);
    if (entry->primitive) dnnl_primitive_destroy(entry->primitive);
    memset(entry, 0, sizeof *entry);
}

void matmul_destroy(struct matmul *context)
{
    if (!context) return;
    for (int i = 0; i < SLOTS; i++) clear(&context->entries[i]);
    if (context->stream) dnnl_stream_destroy(context->stream);
    if (context->engine) dnnl_engine_destroy(context->engine);
    free(context->scratch);
    free(context->wide);
    free(context);
}

const char *matmul_error(const struct matmul *context) { return context->error; }

static dnnl_data_type_t data_type(int type)
{
    return type == LM_BF16 ? dnnl_bf16 : type == LM_F16 ? dnnl_f16 : dnnl_f32;
}

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t description;
static dnnl_status_t describe(description *out, int64_t rows, int64_t columns, int type, int64_t row, int64_t column)
{
    dnnl_dims_t dims = {rows, columns}, strides = {row, column};
    return dnnl_memory_desc_create_with_strides(out, 2, dims, data_type(type), strides);
}
static void forget(description *d)
{
    if (*d) dnnl_memory_desc_destroy(*d);
}
static dnnl_status_t create_memory(dnnl_memory_t *out, const description *d, dnnl_engine_t engine)
{
    return dnnl_memory_create(out, *d, engine, DNNL_MEMORY_NONE);
}
static dnnl_status_t create_descriptor(dnnl_primitive_desc_t *out, const description *a, const description *b,
                                       const description *c, dnnl_primitive_attr_t attributes, dnnl_engine_t engine)
{
    return dnnl_matmul_primitive_desc_create(out, engine, *a, *b, NULL, *c, attributes);
}
static dnnl_status_t add_sum(dnnl_post_ops_t operations)
{
    return dnnl_post_ops_append_sum(operations, 1.0f, 0, dnnl_data_type_undef);
}
static size_t scratch_size(const_dnnl_primitive_desc_t descriptor, description *out)
{
    const_dnnl_memory_desc_t d = dnnl_primitive_desc_query_md(descriptor, dnnl_query_scratchpad_md, 0);
    if (!d || dnnl_memory_desc_clone(out, d)) return 0;
    return dnnl_memory_desc_get_size(d);
}
#else
typedef dnnl_memory_desc_t description;
static dnnl_status_t describe(description *out, int64_t rows, int64_t columns, int type, int64_t row, int64_t column)
{
    dnnl_dims_t dims = {rows, columns}, strides = {row, column};
    return dnnl_memory_desc_init_by_strides(out, 2, dims, data_type(type), strides);
}
static void forget(description *d) { (void)d; }
static dnnl_status_t create_memory(dnnl_memory_t *out, const description *d, dnnl_engine_t engine)
{
    return dnnl_memory_create(out, d, engine, DNNL_MEMORY_NONE);
}
static dnnl_status_t create_descriptor(dnnl_primitive_desc_t *out, const description *a, const description *b,
                                       const description *c, dnnl_primitive_attr_t attributes, dnnl_engine_t engine)
{
    dnnl_matmul_desc_t operation;
    dnnl_status_t status = dnnl_matmul_desc_init(&operation, a, b, NULL, c);
    if (status) return status;
    return dnnl_primitive_desc_create(out, &operation, attributes, engine, NULL);
}
static dnnl_status_t add_sum(dnnl_post_ops_t operations) { return dnnl_post_ops_append_sum(operations, 1.0f); }
static size_t scratch_size(const_dnnl_primitive_desc_t descriptor, description *out)
{
    const dnnl_memory_desc_t *d = dnnl_primitive_desc_query_md(descriptor, dnnl_query_scratchpad_md, 0);
    if (!d) return 0;
    *out = *d;
    return dnnl_memory_desc_get_size(d);
}
#endif

static void *reserve(void *held, size_t *held_bytes, size_t bytes)
{
    if (bytes <= *held_bytes) return held;
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    free(held);
    held = aligned_alloc(4096, rounded);
    *held_bytes = held ? rounded : 0;
    return held;
}

static dnnl_status_t build_exact(struct matmul *context, struct entry *entry, const struct matmul_shape *s)
{
    description a, b, c, scratch;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    memset(&c, 0, sizeof c);
    memset(&scratch, 0, sizeof scratch);
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t operations = NULL;
    dnnl_primitive_desc_t descriptor = NULL;

    dnnl_status_t status = describe(&a, s->m, s->k, s->type, s->a_row, s->a_column);
    if (!status) status = describe(&b, s->k, s->n, s->type, s->b_row, s->b_column);
    if (!status) status = describe(&c, s->m, s->n, s->c_type, s->c_row, 1);
    if (!status) status = dnnl_primitive_attr_create(&attributes);
    /* oneDNN's own scratchpad is shared by primitives that run on other threads, so ours is used. */
    if (!status) status = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    if (!status && s->accumulate) {
        status = dnnl_post_ops_create(&operations);
        if (!status) status = add_sum(operations);
        if (!status) status = dnnl_primitive_attr_set_post_ops(attributes, operations);
    }
    if (!status) status = create_descriptor(&descriptor, &a, &b, &c, attributes, context->engine);
    if (!status) status = dnnl_primitive_create(&entry->primitive, descriptor);
    if (!status) status = create_memory(&entry->a, &a, context->engine);
    if (!status) status = create_memory(&entry->b, &b, context->engine);
    if (!status) status = create_memory(&entry->c, &c, context->engine);
    size_t bytes = status ? 0 : scratch_size(descriptor, &scratch);
    if (bytes) {
        status = create_memory(&entry->scratch, &scratch, context->engine);
        context->scratch = reserve(context->scratch, &context->scratch_bytes, bytes);
        if (!context->scratch) status = dnnl_out_of_memory;
    }
    if (operations) dnnl_post_ops_destroy(operations);
    if (attributes) dnnl_primitive_attr_destroy(attributes);
    if (descriptor) dnnl_primitive_desc_destroy(descriptor);
    forget(&a);
    forget(&b);
    forget(&c);
    forget(&scratch);
    if (status) clear(entry);
    return status;
}

/* Returns the shape of the same product with compact fp32 copies. Products of BF16 values are exact in fp32, so the
 * result equals that of BF16 hardware except for the order of the sums. It is only slower. */
static struct matmul_shape widened(const struct matmul_shape *s)
{
    struct matmul_shape wide = *s;
    wide.type = wide.c_type = LM_F32;
    wide.a_row = s->a_column == 1 ? s->k : 1;
    wide.a_column = s->a_column == 1 ? 1 : s->m;
    wide.b_row = s->b_column == 1 ? s->n : 1;
    wide.b_column = s->b_column == 1 ? 1 : s->k;
    if (s->c_type != LM_F32) wide.c_row = s->n;
    return wide;
}

/* Builds one product at a time. oneDNN's cache of primitives has locks of its own, but ThreadSanitizer does not see
 * them inside a library that was not compiled for it. Each shape is built only once. */
static int build(struct matmul *context, struct entry *entry, const struct matmul_shape *s)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (!has_memory(context->error, sizeof context->error)) return -1;
    pthread_mutex_lock(&lock);
    dnnl_status_t status = build_exact(context, entry, s);
    if (status == dnnl_unimplemented && s->type != LM_F32) {
        struct matmul_shape wide = widened(s);
        status = build_exact(context, entry, &wide);
        entry->widen = !status;
    }
    pthread_mutex_unlock(&lock);
    if (status) {
        snprintf(context->error, sizeof context->error,
                 "oneDNN cannot multiply %s matrices [%lld, %lld] x [%lld, %lld] (status %d)",
                 s->type == LM_BF16  ? "bf16"
                 : s->type == LM_F16 ? "f16"
                                     : "f32",
                 (long long)s->m, (long long)s->k, (long long)s->k, (long long)s->n, (int)status);
        return -1;
    }
    entry->shape = *s;
    return 0;
}

static int same(const struct matmul_shape *x, const struct matmul_shape *y)
{
    return x->m == y->m && x->n == y->n && x->k == y->k && x->a_row == y->a_row && x->a_column == y->a_column &&
           x->b_row == y->b_row && x->b_column == y->b_column && x->c_row == y->c_row && x->type == y->type &&
           x->c_type == y->c_type && x->accumulate == y->accumulate;
}

static struct entry *find(struct matmul *context, const struct matmul_shape *s)
{
    const int64_t fields[] = {s->m,        s->n,        s->k,
                              s->a_row,    s->a_column, s->b_row,
                              s->b_column, s->c_row,    s->type + 4 * s->c_type + 16 * s->accumulate};
    uint64_t hash = 0;
    for (int i = 0; i < COUNT_OF(fields); i++) {
        hash = (hash ^ (uint64_t)fields[i]) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
    }
    if (context->used > FULL) {
        for (int i = 0; i < SLOTS; i++) clear(&context->entries[i]);
        context->used = 0;
    }
    for (uint64_t i = hash;; i++) {
        struct entry *entry = &context->entries[i % SLOTS];
        if (entry->primitive && !same(&entry->shape, s)) continue;
        if (entry->primitive) return entry;
        if (build(context, entry, s)) return NULL;
        context->used++;
        return entry;
    }
}

static int execute(struct matmul *context, const struct entry *entry, const void *a, const void *b, void *c)
{
    /* oneDNN takes inputs as void *, but does not write to them. */
    dnnl_status_t status = entry->scratch && !context->scratch ? dnnl_out_of_memory : dnnl_success;
    if (!status) status = dnnl_memory_set_data_handle(entry->a, (void *)(uintptr_t)a);
    if (!status) status = dnnl_memory_set_data_handle(entry->b, (void *)(uintptr_t)b);
    if (!status) status = dnnl_memory_set_data_handle(entry->c, c);
    if (!status && entry->scratch) status = dnnl_memory_set_data_handle(entry->scratch, context->scratch);
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, entry->a},
                                    {DNNL_ARG_WEIGHTS, entry->b},
                                    {DNNL_ARG_DST, entry->c},
                                    {DNNL_ARG_SCRATCHPAD, entry->scratch}};
    if (!status) status = dnnl_primitive_execute(entry->primitive, context->stream, entry->scratch ? 4 : 3, args);
    if (!status) return 0;
    snprintf(context->error, sizeof context->error, "oneDNN failed in a matrix product (status %d)", (int)status);
    return -1;
}

/* Copies lines of `length` elements, `stride` apart, into contiguous fp32. */
static void widen(float *out, const void *in, int type, int64_t lines, int64_t length, int64_t stride)
{
    for (int64_t i = 0; i < lines; i++)
        row_load(out + i * length, (const char *)in + (size_t)(i * stride) * lm_dtype_bytes(type), type, (int)length);
}

static int execute_widened(struct matmul *context, const struct entry *entry, const void *a, const void *b, void *c)
{
    const struct matmul_shape *s = &entry->shape;
    size_t a_n = (size_t)(s->m * s->k), b_n = (size_t)(s->k * s->n),
           c_n = s->c_type == LM_F32 ? 0 : (size_t)(s->m * s->n);
    context->wide = reserve(context->wide, &context->wide_bytes, (a_n + b_n + c_n) * sizeof(float));
    if (!context->wide) {
        snprintf(context->error, sizeof context->error, "out of memory for a matrix product");
        return -1;
    }
    float *wide_a = context->wide, *wide_b = wide_a + a_n, *wide_c = wide_b + b_n;
    if (s->a_column == 1) widen(wide_a, a, s->type, s->m, s->k, s->a_row);
    else widen(wide_a, a, s->type, s->k, s->m, s->a_column);
    if (s->b_column == 1) widen(wide_b, b, s->type, s->k, s->n, s->b_row);
    else widen(wide_b, b, s->type, s->n, s->k, s->b_column);
    if (s->c_type == LM_F32) return execute(context, entry, wide_a, wide_b, c);
    if (execute(context, entry, wide_a, wide_b, wide_c)) return -1;
    for (int64_t i = 0; i < s->m; i++)
        row_store((char *)c + (size_t)(i * s->c_row) * lm_dtype_bytes(s->c_type), s->c_type, wide_c + i * s->n,
                  (int)s->n);
    return 0;
}

int matmul_run(struct matmul *context, const struct matmul_shape *shape, const void *a, const void *b, void *c)
{
    use_one_thread();
    const struct entry *entry = find(context, shape);
    if (!entry) return -1;
    return entry->widen ? execute_widened(context, entry, a, b, c) : execute(context, entry, a, b, c);
}
