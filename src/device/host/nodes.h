/* NUMA nodes: which processors are near which memory, and on which node each thread of the pool belongs. */
#ifndef HSTEP_NODES_H
#define HSTEP_NODES_H

/* The folder that the pool reads. Tests set another one. */
extern const char *hstep_node_folder;

/* Processors with this number or a higher one are ignored. */
#define HSTEP_MAX_PROCESSORS 1024

struct hstep_nodes {
    int nodes; /* nodes with processors that the process may use; 0 if unknown */
    int count; /* entries below: these processors, by node, then by number */
    short processor[HSTEP_MAX_PROCESSORS], node[HSTEP_MAX_PROCESSORS]; /* node: numbered from 0 in order */
};

/* Calls visit for each number below `most` in a list as the kernel writes it, "0-3,8,10-11". Returns 0 if the text is
 * malformed. */
int hstep_read_list(const char *text, int most, void (*visit)(void *arg, int number), void *arg);

/* Reads a folder laid out as /sys/devices/system/node. allowed[i] says whether the process may use processor i. */
void hstep_read_nodes(const char *folder, const unsigned char *allowed, struct hstep_nodes *nodes);

/* Returns the node of thread t out of `threads`. Threads are spread over the nodes as the processors are, and
 * neighbours stay together. */
int hstep_node_of_thread(const struct hstep_nodes *nodes, int t, int threads);

/* Returns 1 if threads are pinned to NUMA nodes. `setting`, which HALFSTEP_PIN sets, decides if it is 0 or 1.
 * Otherwise threads are pinned on machines with more than one node. Without known nodes they never are. */
int hstep_is_pinned(const struct hstep_nodes *nodes, int setting);

#endif
