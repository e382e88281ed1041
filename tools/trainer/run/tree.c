/* Adds up the gradients of micro-steps along a tree (tree.h) in fp32. The sums do not depend on which rank has which
 * micro-step. */
#include <stdlib.h>
#include <string.h>

#include "trainer/run/internal.h"

static int build_adder(struct run *run)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = run->threads};
    int32_t number;
    int code = halfstep_create(&options, &run->adder);
    if (code == HALFSTEP_OK) code = halfstep_add_group(run->adder, "sgd/f32", &number);
    for (int i = 0; i < run->tensors && code == HALFSTEP_OK; i++) {
        const struct lm_tensor tensor = run_tensor(run, i);
        const halfstep_tensor t = checkpoint_tensor(&tensor, "f32");
        code = halfstep_add_tensor(run->adder, &t, &number);
        run->tree_offset[i + 1] = run->tree_offset[i] + (tensor.rows * tensor.row_length + 15) / 16 * 16;
    }
    if (code == HALFSTEP_OK) code = halfstep_allocate_states(run->adder);
    return code == HALFSTEP_OK ? 0 : run_fail(run, "cannot add up gradients: %s", halfstep_strerror(code));
}

float *run_tree_slot(const struct run *run, int slot, int tensor)
{
    return run->tree_memory + slot * run->tree_offset[run->tensors] + run->tree_offset[tensor];
}

int run_tree_open(struct run *run)
{
    run->tree_offset = calloc((size_t)run->tensors + 1, sizeof *run->tree_offset);
    int64_t leaves = run->config->micro_steps, first = tree_first_leaf(leaves, run->ranks, run->rank);
    int64_t end = tree_first_leaf(leaves, run->ranks, run->rank + 1);
    if (!run->tree_offset || tree_plan(&run->tree, leaves, first, end - first) != 0)
        return run_fail(run, "out of memory");
    if (build_adder(run) != 0) return 1;
    uint64_t bytes = (uint64_t)run->tree.slots * (uint64_t)run->tree_offset[run->tensors] * sizeof *run->tree_memory;
    run->tree_memory = aligned_alloc(64, bytes);
    if (!run->tree_memory) return run_fail(run, "out of memory: %llu bytes", (unsigned long long)bytes);
    memset(run->tree_memory, 0, bytes);
    /* With several ranks, ranks_finish_exchange() replaces these. */
    for (int i = 0; i < run->tensors; i++) run->gradients[i] = run_tree_slot(run, run->tree.node[0].slot, i);
    run->result->gradient_bytes = bytes;
    return 0;
}

void run_tree_close(struct run *run)
{
    halfstep_destroy(run->adder);
    tree_free(&run->tree);
    free(run->tree_memory);
    free(run->tree_offset);
}

static int add(struct run *run, int tensor, void *sum, const void *gradient, const char *format)
{
    if (halfstep_accumulate(run->adder, tensor, sum, "f32", gradient, format, 1) == HALFSTEP_OK) return 0;
    return run_fail_in(run, run->adder);
}

int run_tree_take(struct run *run, int tensor, const void *gradient)
{
    const struct tree_leaf *leaf = &run->tree.leaf[run->micro_step - run->tree.first];
    float *sum = run_tree_slot(run, leaf->slot, tensor);
    size_t elements = (size_t)(run->tree_offset[tensor + 1] - run->tree_offset[tensor]);
    if (leaf->overwrites) memset(sum, 0, elements * sizeof *sum);
    int status = add(run, tensor, sum, gradient, run->config->gradients);
    for (int i = 0; i < leaf->merges && !status; i++) {
        struct tree_merge merge = run->tree.merge[leaf->first_merge + i];
        status =
            add(run, tensor, run_tree_slot(run, merge.into, tensor), run_tree_slot(run, merge.from, tensor), "f32");
    }
    return status;
}
