/* Which memory is near which processor, on machines of several NUMA nodes, and where the threads of the pool belong. */
#ifndef HSTEP_NODES_H
#define HSTEP_NODES_H

/* What the pool reads; tests put another in its place. */
extern const char *hstep_node_folder;

/* Processors with higher numbers are not looked at. */
#define HSTEP_MAX_PROCESSORS 1024

struct hstep_nodes {
    int nodes; /* that have processors which the process may use; 0 where nothing is known */
    int count; /* of these processors, ordered by node, then by number */
    short processor[HSTEP_MAX_PROCESSORS], node[HSTEP_MAX_PROCESSORS]; /* node: from 0 in order, whatever their names */
};

/* Numbers of a list as the kernel writes them, "0-3,8,10-11": calls visit for each below `most`; 0 where the text is
 * none. */
int hstep_read_list(const char *text, int most, void (*visit)(void *arg, int number), void *arg);

/* Reads a folder laid out as /sys/devices/system/node. allowed: for each processor, whether the process may use it. */
void hstep_read_nodes(const char *folder, const unsigned char *allowed, struct hstep_nodes *nodes);

/* The node of thread t of `threads`, which are spread over the nodes as processors are: neighbours stay together. */
int hstep_node_of_thread(const struct hstep_nodes *nodes, int t, int threads);

/* Whether threads are kept on their nodes: what HALFSTEP_PIN says (0 or 1), else where there is more than one. */
int hstep_is_pinned(const struct hstep_nodes *nodes, const char *variable);

#endif
