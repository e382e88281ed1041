/* Reads NUMA nodes from the folder in which the kernel describes them. If anything there is missing or malformed, no
 * node is known and threads are not pinned. */
#include "device/host/nodes.h"

#include <stdio.h>

#ifndef _WIN32
#include <fcntl.h>
#include <unistd.h>
#endif

const char *hstep_node_folder = "/sys/devices/system/node";

int hstep_read_list(const char *text, int most, void (*visit)(void *arg, int number), void *arg)
{
    while (*text && *text != '\n') {
        int ends[2] = {0, 0};
        for (int k = 0; k < 2; k++) {
            if (*text < '0' || *text > '9') return 0;
            for (; *text >= '0' && *text <= '9'; text++)
                if (ends[k] < most) ends[k] = ends[k] * 10 + (*text - '0');
            if (k == 0 && *text != '-') {
                ends[1] = ends[0];
                break;
            }
            if (k == 0) text++;
        }
        for (int i = ends[0]; i <= ends[1] && i < most; i++) visit(arg, i);
        if (*text == ',') text++;
        else if (*text && *text != '\n') return 0;
    }
    return 1;
}

#ifdef _WIN32

void hstep_read_nodes(const char *folder, const unsigned char *allowed, struct hstep_nodes *nodes)
{
    (void)folder;
    (void)allowed;
    nodes->nodes = nodes->count = 0;
}

#else

/* Reads a text of one line. Returns 0 if the file cannot be read or the text does not fit. */
static int read_text(const char *path, char *text, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    ssize_t got = -1;
    if (file < 0) return 0;
    while (n < size && (got = read(file, text + n, size - n)) > 0) n += (size_t)got;
    close(file);
    if (got != 0 || n >= size) return 0;
    text[n] = '\0';
    return 1;
}

enum { TEXT = 4096, MOST_NODES = 1024 };

struct reading {
    const char *folder;
    const unsigned char *allowed;
    struct hstep_nodes *nodes;
    int before, failed; /* count of processors in the nodes before this one */
};

static void add_processor(void *arg, int number)
{
    struct reading *r = arg;
    struct hstep_nodes *n = r->nodes;
    if (!r->allowed[number] || n->count == HSTEP_MAX_PROCESSORS) return;
    n->processor[n->count] = (short)number;
    n->node[n->count++] = (short)n->nodes;
}

static void add_node(void *arg, int number)
{
    struct reading *r = arg;
    char path[512], text[TEXT];
    int length = snprintf(path, sizeof path, "%s/node%d/cpulist", r->folder, number);
    r->before = r->nodes->count;
    if (length < 0 || (size_t)length >= sizeof path || !read_text(path, text, sizeof text) ||
        !hstep_read_list(text, HSTEP_MAX_PROCESSORS, add_processor, r))
        r->failed = 1;
    r->nodes->nodes += r->nodes->count > r->before; /* nodes that only have memory do not count */
}

void hstep_read_nodes(const char *folder, const unsigned char *allowed, struct hstep_nodes *nodes)
{
    struct reading r = {folder, allowed, nodes, 0, 0};
    char path[512], text[TEXT];
    nodes->nodes = nodes->count = 0;
    int length = snprintf(path, sizeof path, "%s/online", folder);
    if (length < 0 || (size_t)length >= sizeof path || !read_text(path, text, sizeof text) ||
        !hstep_read_list(text, MOST_NODES, add_node, &r) || r.failed)
        nodes->nodes = nodes->count = 0;
}

#endif

int hstep_node_of_thread(const struct hstep_nodes *nodes, int t, int threads)
{
    return nodes->node[(long long)t * nodes->count / threads];
}

int hstep_is_pinned(const struct hstep_nodes *nodes, int setting)
{
    if (nodes->nodes < 1) return 0;
    return setting < 0 ? nodes->nodes > 1 : setting;
}
