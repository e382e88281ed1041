/* Measures the rate of large matrix products in oneDNN on all its threads (OMP_NUM_THREADS). bench/trainer.py compares
 * the trainer with it. The second factor is packed into oneDNN's preferred layout before the clock starts.
 *
 *   cc -O2 lab/onednn_peak.c -o onednn_peak -ldnnl && ./onednn_peak [SIZE] [SECONDS]
 *
 * Prints {"f32": GFLOP/s, "bf16": GFLOP/s} of the fastest product of SIZE^3. bf16 (into fp32) is null if oneDNN has no
 * such product on this processor. */
#define _POSIX_C_SOURCE 199309L
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* oneDNN 2 passes descriptions by value, oneDNN 3 by handle. */
#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t description;
static int describe(dnnl_memory_desc_t *out, dnnl_dim_t n, dnnl_data_type_t type, dnnl_format_tag_t tag)
{
    dnnl_dims_t dims = {n, n};
    return dnnl_memory_desc_create_with_tag(out, 2, dims, type, tag);
}
static int describe_product(dnnl_primitive_desc_t *out, dnnl_engine_t engine, dnnl_memory_desc_t *d)
{
    return dnnl_matmul_primitive_desc_create(out, engine, d[0], d[1], NULL, d[2], NULL);
}
static int describe_reorder(dnnl_primitive_desc_t *out, description from, description to, dnnl_engine_t engine)
{
    return dnnl_reorder_primitive_desc_create(out, from, engine, to, engine, NULL);
}
#define HANDLE(description) (description)
#else
typedef const dnnl_memory_desc_t *description;
static int describe(dnnl_memory_desc_t *out, dnnl_dim_t n, dnnl_data_type_t type, dnnl_format_tag_t tag)
{
    dnnl_dims_t dims = {n, n};
    return dnnl_memory_desc_init_by_tag(out, 2, dims, type, tag);
}
static int describe_product(dnnl_primitive_desc_t *out, dnnl_engine_t engine, dnnl_memory_desc_t *d)
{
    dnnl_matmul_desc_t operation;
    int status = dnnl_matmul_desc_init(&operation, &d[0], &d[1], NULL, &d[2]);
    return status ? status : (int)dnnl_primitive_desc_create(out, &operation, NULL, engine, NULL);
}
static int describe_reorder(dnnl_primitive_desc_t *out, description from, description to, dnnl_engine_t engine)
{
    return dnnl_reorder_primitive_desc_create(out, from, engine, to, engine, NULL);
}
#define HANDLE(description) (&(description))
#endif

/* Returns GFLOP/s, or 0 if oneDNN has no such product. */
static double rate(dnnl_dim_t n, dnnl_data_type_t type, double seconds)
{
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_memory_desc_t d[3], plain;
    dnnl_primitive_desc_t product_description, reorder_description;
    dnnl_primitive_t product, reorder;
    dnnl_memory_t memory[3], loose;
    if (dnnl_engine_create(&engine, dnnl_cpu, 0) || dnnl_stream_create(&stream, engine, dnnl_stream_default_flags))
        return 0;
    if (describe(&d[0], n, type, dnnl_ab) || describe(&d[1], n, type, dnnl_format_tag_any) ||
        describe(&d[2], n, dnnl_f32, dnnl_ab) || describe(&plain, n, type, dnnl_ab) ||
        describe_product(&product_description, engine, d) || dnnl_primitive_create(&product, product_description))
        return 0;
    description packed = dnnl_primitive_desc_query_md(product_description, dnnl_query_weights_md, 0);
    if (dnnl_memory_create(&memory[0], HANDLE(d[0]), engine, DNNL_MEMORY_ALLOCATE) ||
        dnnl_memory_create(&memory[1], packed, engine, DNNL_MEMORY_ALLOCATE) ||
        dnnl_memory_create(&memory[2], HANDLE(d[2]), engine, DNNL_MEMORY_ALLOCATE) ||
        dnnl_memory_create(&loose, HANDLE(plain), engine, DNNL_MEMORY_ALLOCATE))
        return 0;
    /* Any numbers that are not denormal: 0x3c3c is 0.0115 in BF16, and 0x3c3c3c3c is 0.0115 in fp32. */
    void *bytes;
    size_t size = (size_t)(n * n) * (type == dnnl_f32 ? 4 : 2);
    dnnl_memory_get_data_handle(memory[0], &bytes);
    memset(bytes, 0x3c, size);
    dnnl_memory_get_data_handle(loose, &bytes);
    memset(bytes, 0x3c, size);
    dnnl_exec_arg_t move[] = {{DNNL_ARG_FROM, loose}, {DNNL_ARG_TO, memory[1]}};
    if (describe_reorder(&reorder_description, HANDLE(plain), packed, engine) ||
        dnnl_primitive_create(&reorder, reorder_description) || dnnl_primitive_execute(reorder, stream, 2, move))
        return 0;
    dnnl_exec_arg_t factors[] = {{DNNL_ARG_SRC, memory[0]}, {DNNL_ARG_WEIGHTS, memory[1]}, {DNNL_ARG_DST, memory[2]}};
    double begun = now(), best = 1e9;
    for (int turn = 0; turn < 3 || now() - begun < seconds; turn++) {
        double start = now();
        if (dnnl_primitive_execute(product, stream, 3, factors) || dnnl_stream_wait(stream)) return 0;
        double took = now() - start;
        if (turn && took < best) best = took;
    }
    return 2e-9 * (double)n * (double)n * (double)n / best;
}

int main(int argc, char **argv)
{
    dnnl_dim_t n = argc > 1 ? atoi(argv[1]) : 2048;
    double seconds = argc > 2 ? atof(argv[2]) : 1;
    if (n < 1 || n > 16384) {
        fprintf(stderr, "onednn_peak: SIZE must be from 1 to 16384\n");
        return 2;
    }
    double f32 = rate(n, dnnl_f32, seconds), bf16 = rate(n, dnnl_bf16, seconds);
    printf("{\"f32\": %.2f, \"bf16\": ", f32);
    printf(bf16 > 0 ? "%.2f}\n" : "null}\n", bf16);
    return f32 > 0 ? 0 : 1;
}
