/* The binary tree along which the gradients of micro-steps are added, for any number of processes.
 *
 * The tree over micro-steps 0 .. n - 1 is that of a binary counter. It is cut at the largest power of two below n, and
 * so are its halves. A process with a range of micro-steps adds up the subtrees that lie wholly in its range. They are
 * called its nodes, and there are at most 2 log2 n of them. The nodes of all processes cover each leaf once, and the
 * rest of the tree is added over the nodes. For any number of processes every sum is left + right of the same two
 * subtrees, so the bits are the same. */
#ifndef HALFSTEP_TREE_H
#define HALFSTEP_TREE_H

#include <stdint.h>

struct tree_merge {
    int into, from; /* into += from */
};

/* Says how the gradient of one micro-step is used. It is stored in a slot or added to it, and then slots are merged. */
struct tree_leaf {
    int slot;
    int overwrites; /* stored, not added: what was in the slot is lost */
    int first_merge, merges;
};

struct tree_node {
    int64_t begin, end; /* micro-steps */
    int slot;           /* holds its sum after the last of them */
};

struct tree {
    int64_t leaves, first, count; /* of the whole tree; the range of this process */
    int slots;                    /* number needed: about log2 of count */
    struct tree_leaf *leaf;       /* `count` of them */
    struct tree_merge *merge;
    struct tree_node *node; /* in the order of their micro-steps */
    int merges, nodes;
};

/* Plans the additions of the process with the range first .. first + count - 1. Requires 0 <= first, 1 <= count and
 * first + count <= leaves. Returns 0, or -1 without memory. */
int tree_plan(struct tree *tree, int64_t leaves, int64_t first, int64_t count);
void tree_free(struct tree *tree);

/* Returns the first leaf of process `rank`. Its range ends before the first leaf of rank + 1. Requires ranks <=
 * leaves. */
int64_t tree_first_leaf(int64_t leaves, int ranks, int rank);

/* Writes the n - 1 merges that add up the nodes of all processes. The nodes must cover all leaves once, in order. A
 * merge names nodes by their places in the list. The total is in place 0 at the end. */
void tree_join(int64_t leaves, const struct tree_node *nodes, int n, struct tree_merge *merges);

#endif
