/* Tests the tree of micro-steps: any number of processes gets the bits of one, which are those of a binary counter. */

#include "common/tree.h"
#include "test.h"

enum { MOST = 70 };

/* Values whose sum depends on the order of every addition. */
static float leaf_value(int64_t i)
{
    uint32_t h = (uint32_t)(i + 1) * 2654435761u;
    return (float)(h >> 8) * 0x1p-10f / (float)(1 + h % 977);
}

/* A counter that carries: level l holds the sum of 2^l leaves. The rest at the end is added from the small to the
 * large. */
static float counter_sum(int64_t leaves)
{
    float level[8];
    for (int64_t i = 0; i < leaves; i++) {
        float carry = leaf_value(i);
        int l = 0;
        for (; i >> l & 1; l++) carry = level[l] + carry;
        level[l] = carry;
    }
    float sum = 0;
    int have = 0;
    for (int l = 0; l < 8; l++)
        if (leaves >> l & 1) {
            sum = have ? level[l] + sum : level[l];
            have = 1;
        }
    return sum;
}

static void run_range(const struct tree *tree, float *slots)
{
    for (int64_t i = 0; i < tree->count; i++) {
        const struct tree_leaf *leaf = &tree->leaf[i];
        float value = leaf_value(tree->first + i);
        slots[leaf->slot] = leaf->overwrites ? value : slots[leaf->slot] + value;
        for (int m = 0; m < leaf->merges; m++) {
            struct tree_merge merge = tree->merge[leaf->first_merge + m];
            slots[merge.into] += slots[merge.from];
        }
    }
}

static int log2_up(int64_t n)
{
    int l = 0;
    while ((int64_t)1 << l < n) l++;
    return l;
}

static float sum_by(int64_t leaves, int ranks)
{
    struct tree_node nodes[16 * MOST] = {{0}};
    struct tree_merge merges[16 * MOST];
    float sums[16 * MOST];
    int n = 0;
    for (int rank = 0; rank < ranks; rank++) {
        struct tree tree;
        float slots[32];
        int64_t first = tree_first_leaf(leaves, ranks, rank), end = tree_first_leaf(leaves, ranks, rank + 1);
        if (tree_plan(&tree, leaves, first, end - first) != 0) return -1;
        CHECK(tree.slots <= 2 * log2_up(tree.count) + 2, "%d slots for %d of %d leaves", tree.slots, (int)tree.count,
              (int)leaves);
        if (ranks == 1)
            CHECK(tree.nodes == 1 && tree.node[0].slot == 0 && tree.slots <= log2_up(leaves) + 1,
                  "alone: %d nodes, %d slots for %d leaves", tree.nodes, tree.slots, (int)leaves);
        run_range(&tree, slots);
        for (int k = 0; k < tree.nodes; k++) {
            sums[n] = slots[tree.node[k].slot];
            nodes[n++] = tree.node[k];
        }
        tree_free(&tree);
    }
    int64_t at = 0;
    for (int k = 0; k < n; k++) {
        CHECK(nodes[k].begin == at, "node %d of %d ranks begins at %d", k, ranks, (int)nodes[k].begin);
        at = nodes[k].end;
    }
    EQUAL(at, leaves);
    tree_join(leaves, nodes, n, merges);
    for (int k = 0; k < n - 1; k++) sums[merges[k].into] += sums[merges[k].from];
    return sums[0];
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    TEST("any number of ranks has the sum of one") {
        int differs_from_plain = 0;
        for (int64_t leaves = 1; leaves <= MOST; leaves++) {
            float expected = counter_sum(leaves), plain = 0;
            for (int64_t i = 0; i < leaves; i++) plain += leaf_value(i);
            differs_from_plain += plain != expected;
            for (int ranks = 1; ranks <= leaves; ranks++) {
                float sum = sum_by(leaves, ranks);
                CHECK(memcmp(&sum, &expected, sizeof sum) == 0, "%d leaves, %d ranks: %.9g, not %.9g", (int)leaves,
                      ranks, sum, expected);
            }
        }
        CHECK(differs_from_plain > MOST / 2, "the values do not tell orders apart");
    }
    TEST("ranges cover all micro-steps, none twice, and differ by one at most") {
        for (int64_t leaves = 1; leaves <= MOST; leaves++)
            for (int ranks = 1; ranks <= leaves; ranks++)
                for (int rank = 0; rank < ranks; rank++) {
                    int64_t n = tree_first_leaf(leaves, ranks, rank + 1) - tree_first_leaf(leaves, ranks, rank);
                    CHECK(n == leaves / ranks || n == (leaves + ranks - 1) / ranks, "%d of %d leaves for rank %d of %d",
                          (int)n, (int)leaves, rank, ranks);
                }
    }
    return test_done();
}
