#include "common/tree.h"

#include <stdlib.h>
#include <string.h>

/* Returns the first leaf of the right half of a subtree, which has at least two leaves. */
static int64_t cut(int64_t begin, int64_t end)
{
    int64_t half = 1;
    while (half * 2 < end - begin) half *= 2;
    return begin + half;
}

struct planning {
    struct tree *tree;
    int in_use; /* slots in use; the one to be freed is always the last */
};

static void add_merge(struct tree *tree, int64_t after, int into, int from)
{
    struct tree_leaf *leaf = &tree->leaf[after - tree->first];
    if (!leaf->merges) leaf->first_merge = tree->merges;
    leaf->merges++;
    tree->merge[tree->merges++] = (struct tree_merge){into, from};
}

/* Plans the sum of a subtree, leaf by leaf in their order. Returns the slot that holds the sum. */
static int add_up(struct planning *p, int64_t begin, int64_t end)
{
    struct tree *tree = p->tree;
    if (end - begin == 1) {
        int slot = p->in_use++;
        if (p->in_use > tree->slots) tree->slots = p->in_use;
        tree->leaf[begin - tree->first] = (struct tree_leaf){.slot = slot, .overwrites = 1};
        return slot;
    }
    int64_t middle = cut(begin, end);
    int left = add_up(p, begin, middle);
    if (end - middle == 1) {
        tree->leaf[middle - tree->first] = (struct tree_leaf){.slot = left};
        return left;
    }
    int right = add_up(p, middle, end);
    add_merge(tree, end - 1, left, right);
    p->in_use--;
    return left;
}

static void walk(struct planning *p, int64_t begin, int64_t end)
{
    struct tree *tree = p->tree;
    int64_t last = tree->first + tree->count;
    if (end <= tree->first || begin >= last) return;
    if (begin >= tree->first && end <= last) {
        int slot = add_up(p, begin, end);
        tree->node[tree->nodes++] = (struct tree_node){begin, end, slot};
        return;
    }
    int64_t middle = cut(begin, end);
    walk(p, begin, middle);
    walk(p, middle, end);
}

int tree_plan(struct tree *tree, int64_t leaves, int64_t first, int64_t count)
{
    enum { MOST_NODES = 2 * 64 };
    *tree = (struct tree){.leaves = leaves, .first = first, .count = count};
    tree->leaf = calloc((size_t)count, sizeof *tree->leaf);
    tree->merge = calloc((size_t)count, sizeof *tree->merge);
    tree->node = calloc(MOST_NODES, sizeof *tree->node);
    if (!tree->leaf || !tree->merge || !tree->node) {
        tree_free(tree);
        return -1;
    }
    struct planning planning = {tree, 0};
    walk(&planning, 0, leaves);
    return 0;
}

void tree_free(struct tree *tree)
{
    free(tree->leaf);
    free(tree->merge);
    free(tree->node);
    memset(tree, 0, sizeof *tree);
}

int64_t tree_first_leaf(int64_t leaves, int ranks, int rank) { return leaves * rank / ranks; }

struct joining {
    const struct tree_node *nodes;
    struct tree_merge *merges;
    int next, n;
};

static int join(struct joining *j, int64_t begin, int64_t end)
{
    if (j->nodes[j->next].begin == begin && j->nodes[j->next].end == end) return j->next++;
    int64_t middle = cut(begin, end);
    int left = join(j, begin, middle), right = join(j, middle, end);
    j->merges[j->n++] = (struct tree_merge){left, right};
    return left;
}

void tree_join(int64_t leaves, const struct tree_node *nodes, int n, struct tree_merge *merges)
{
    struct joining joining = {nodes, merges, 0, 0};
    if (n > 0) join(&joining, 0, leaves);
}
