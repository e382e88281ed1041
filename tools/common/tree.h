/* The binary tree along which the gradients of micro-steps are added, whoever computes them.
 *
 * The tree over micro-steps 0 .. n - 1 is that of a binary counter: it is cut at the largest power of two below n, and
 * so are its halves. A process that has a range of the micro-steps adds up those subtrees that lie wholly in its range
 * (its nodes, at most 2 log2 n of them); together the nodes of all processes cover the leaves once, and the rest of the
 * tree is added over them. Every sum is left + right of the same two subtrees for any number of processes, so the bits
 * are the same. */
#ifndef HALFSTEP_TREE_H
#define HALFSTEP_TREE_H

#include <stdint.h>

struct tree_merge {
    int into, from; /* into += from */
};

/* What becomes of the gradient of one micro-step: it is put into a slot, or added to it; then slots are merged. */
struct tree_leaf {
    int slot;
    int overwrites; /* whatever was in the slot */
    int first_merge, merges;
};

struct tree_node {
    int64_t begin, end; /* micro-steps */
    int slot;           /* that holds its sum after the last of them */
};

struct tree {
    int64_t leaves, first, count; /* of all; the range of this process */
    int slots;                    /* that it needs: about log2 of count */
    struct tree_leaf *leaf;       /* count of them */
    struct tree_merge *merge;
    struct tree_node *node; /* in their order */
    int merges, nodes;
};

/* 0, or -1 when memory is out. 0 <= first, 1 <= count, first + count <= leaves. */
int tree_plan(struct tree *tree, int64_t leaves, int64_t first, int64_t count);
void tree_free(struct tree *tree);

/* The range of process `rank` of `ranks` (at most `leaves`). */
int64_t tree_first_leaf(int64_t leaves, int ranks, int rank);

/* n - 1 merges of nodes (by their places in the list) that together cover all leaves once, in their order; the sum of
 * all is then in place 0. */
void tree_join(int64_t leaves, const struct tree_node *nodes, int n, struct tree_merge *merges);

#endif
