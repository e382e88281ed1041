/* Tests NUMA nodes: the folder that describes them, threads pinned to them, and which threads first touch states. */
#ifdef _WIN32
int main(void) { return 0; }
#else
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/process/environment.h"
#include "base/process/limits.h"
#include "device/host/host.h"
#include "device/host/nodes.h"
#include "device/host/threads.h"
#include "folders.h"
#include "handle/optimizer.h"
#include "ref/fixture.h"

/* ---- The folder ---- */

static char folder[256];

static void put(const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (char *slash = strchr(path + strlen(folder) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f)) exit(1);
}

/* Returns what was read as "node:processor processor ... node:...". */
static const char *nodes_text(const struct hstep_nodes *n)
{
    static char text[4096];
    int at = snprintf(text, sizeof text, "%d", n->nodes);
    for (int i = 0; i < n->count && at < (int)sizeof text - 32; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, !i || n->node[i] != n->node[i - 1] ? " | %d:%d" : " %d",
                       i && n->node[i] == n->node[i - 1] ? n->processor[i] : n->node[i], n->processor[i]);
    return text;
}

static void count_number(void *arg, int number)
{
    int *sums = arg;
    sums[0]++;
    sums[1] += number;
}

static void test_lists(void)
{
    TEST("lists of numbers as the kernel writes them") {
        static const struct {
            const char *text;
            int good, count, sum;
        } cases[] = {{"", 1, 0, 0},           {"\n", 1, 0, 0},           {"0\n", 1, 1, 0},
                     {"0-3\n", 1, 4, 6},      {"0-1,8,10-11", 1, 5, 30}, {"63", 1, 1, 63},
                     {"62-200\n", 1, 2, 125}, {"64\n", 1, 0, 0},         {"99999999999\n", 1, 0, 0},
                     {"3-1\n", 1, 0, 0},      {"x\n", 0, 0, 0},          {"1-\n", 0, 0, 0},
                     {"1,,2\n", 0, 1, 1},     {"-1\n", 0, 0, 0},         {"1 2\n", 0, 1, 1}};
        for (size_t k = 0; k < COUNT(cases); k++) {
            int sums[2] = {0, 0}, good = hstep_read_list(cases[k].text, 64, count_number, sums);
            CHECK(good == cases[k].good && sums[0] == cases[k].count && sums[1] == cases[k].sum,
                  "'%s': %d, %d numbers, sum %d", cases[k].text, good, sums[0], sums[1]);
        }
    }
}

static void reads(const unsigned char *allowed, const char *expected)
{
    struct hstep_nodes n;
    memset(&n, 0x55, sizeof n);
    hstep_read_nodes(folder, allowed, &n);
    EQUAL_TEXT(nodes_text(&n), expected);
}

static void test_folder(void)
{
    unsigned char all[HSTEP_MAX_PROCESSORS], some[HSTEP_MAX_PROCESSORS] = {0};
    memset(all, 1, sizeof all);
    some[5] = some[6] = some[9] = 1;
    TEST("nodes of processors, of which the process may use some") {
        reads(all, "0"); /* nothing is there yet */
        put("online", "0\n");
        reads(all, "0");
        put("node0/cpulist", "0-1\n");
        reads(all, "1 | 0:0 1");
        put("online", "0,2-3\n");
        put("node0/cpulist", "0-3,8-9\n");
        put("node2/cpulist", "4-7\n");
        put("node3/cpulist", "\n"); /* memory alone */
        reads(all, "2 | 0:0 1 2 3 8 9 | 1:4 5 6 7");
        reads(some, "2 | 0:9 | 1:5 6");
        some[9] = 0;
        reads(some, "1 | 0:5 6");
        put("node2/cpulist", "4-\n");
        reads(all, "0");
        put("node2/cpulist", "4-7\n");
        put("online", "nonsense\n");
        reads(all, "0");
    }
    TEST("threads are spread over nodes as processors are, neighbours together") {
        struct hstep_nodes n = {.nodes = 2, .count = 6, .node = {0, 0, 0, 0, 1, 1}};
        static const struct {
            int threads, on_first;
        } cases[] = {{1, 1}, {2, 2}, {3, 2}, {6, 4}, {12, 8}};
        for (size_t k = 0; k < COUNT(cases); k++) {
            int on_first = 0, last = 0;
            for (int t = 0; t < cases[k].threads; t++) {
                int node = hstep_node_of_thread(&n, t, cases[k].threads);
                CHECK(node >= last && node < 2, "thread %d of %d on node %d after %d", t, cases[k].threads, node, last);
                last = node;
                on_first += !node;
            }
            CHECK(on_first == cases[k].on_first, "%d of %d threads on node 0", on_first, cases[k].threads);
        }
    }
    TEST("who is pinned") {
        struct hstep_nodes none = {.nodes = 0}, one = {.nodes = 1}, two = {.nodes = 2};
        const int unset = HSTEP_NOT_SET;
        CHECK(!hstep_is_pinned(&none, unset) && !hstep_is_pinned(&one, unset) && hstep_is_pinned(&two, unset),
              "by nodes");
        CHECK(!hstep_is_pinned(&none, 1) && hstep_is_pinned(&one, 1) && hstep_is_pinned(&two, 1), "told to");
        CHECK(!hstep_is_pinned(&one, 0) && !hstep_is_pinned(&two, 0), "told not to");
    }
}

/* ---- The pool ---- */

static _Thread_local int is_caller;

struct seen {
    atomic_int worker, processors, on[2], met[2], alone;
};

/* Each of two tasks waits for the other, so that both threads come. */
static void look(void *arg, int64_t i)
{
    struct seen *s = arg;
    cpu_set_t set;
    atomic_store(&s->met[i], 1);
    time_t start = time(NULL);
    while (!atomic_load(&s->met[!i]) && !atomic_load(&s->alone))
        if (time(NULL) - start > 2) atomic_store(&s->alone, 1);
        else sched_yield();
    if (is_caller || sched_getaffinity(0, sizeof set, &set)) return;
    atomic_store(&s->worker, 1);
    atomic_store(&s->processors, CPU_COUNT(&set));
    for (int k = 0; k < 2; k++) atomic_store(&s->on[k], CPU_ISSET(k, &set) != 0);
}

static struct seen run_two(void)
{
    struct seen s = {.worker = 0};
    char text[128];
    hstep_read_environment(text, sizeof text);
    hstep_pool_shutdown();
    hstep_run_tasks(2, look, &s, 2);
    return s;
}

static void test_pool(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) || !CPU_ISSET(0, &set) || !CPU_ISSET(1, &set)) return;
    int processors = CPU_COUNT(&set);
    TEST("the pool's threads are kept on their nodes, the caller's is not") {
        put("online", "0-1\n");
        put("node0/cpulist", "0\n");
        put("node1/cpulist", "1\n");
        hstep_node_folder = folder;
        unsetenv("HALFSTEP_PIN");
        struct seen s = run_two();
        CHECK(!s.worker || (s.processors == 1 && s.on[1]), "the worker may run on %d processors", (int)s.processors);
        sched_getaffinity(0, sizeof set, &set);
        EQUAL(CPU_COUNT(&set), processors);
        setenv("HALFSTEP_PIN", "0", 1);
        s = run_two();
        CHECK(!s.worker || s.processors == processors, "HALFSTEP_PIN=0: on %d processors", (int)s.processors);
        put("node0/cpulist", "1\n");
        put("online", "0\n");
        unsetenv("HALFSTEP_PIN");
        s = run_two();
        CHECK(!s.worker || s.processors == processors, "one node: on %d processors", (int)s.processors);
        setenv("HALFSTEP_PIN", "1", 1);
        s = run_two();
        CHECK(!s.worker || (s.processors == 1 && s.on[1]), "HALFSTEP_PIN=1: on %d processors", (int)s.processors);
        unsetenv("HALFSTEP_PIN");
        hstep_pool_shutdown();
    }
}

/* ---- Limits of a container ---- */

static void test_limits(void)
{
    TEST("the least limit of a group and of those above it counts") {
        CHECK(isinf(hstep_processor_quota(folder)) && isinf(hstep_memory_limit(folder)), "limits without groups");
        put("proc/self/cgroup", "3:memory:/not/here\n2:cpuacct,cpu:/a/b\n1:name=systemd:/\n0::/c/d\n");
        put("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
        put("sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
        put("sys/fs/cgroup/c/d/cpu.max", "max 100000\n");
        put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        CHECK(isinf(hstep_processor_quota(folder)), "a quota where there is none");
        put("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "250000\n");
        put("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
        EQUAL(hstep_processor_quota(folder), 2.5);
        put("sys/fs/cgroup/c/cpu.max", "50000 100000\n");
        EQUAL(hstep_processor_quota(folder), 0.5);
        EQUAL(hstep_memory_limit(folder), 9223372036854771712.0);
        put("sys/fs/cgroup/c/memory.max", "4096\n");
        EQUAL(hstep_memory_limit(folder), 4096.0);
    }
}

/* ---- First touch ---- */

/* Checks a stream that was all ones: a byte in every page is zero now, and nothing before or behind it has changed. */
static void is_touched(const char *what, const unsigned char *stream, uint64_t bytes)
{
    uint64_t first = UINT64_MAX, gap = 0, last = 0;
    for (uint64_t i = 0; i < bytes; i++) {
        if (stream[i]) continue;
        if (first == UINT64_MAX) first = i;
        if (i - last > gap) gap = i - last;
        last = i;
    }
    if (bytes - last > gap) gap = bytes - last;
    CHECK(first == 0 && gap <= 4096, "%s of %llu bytes: %llu between two that are touched", what,
          (unsigned long long)bytes, (unsigned long long)gap);
}

static void touches(const char *recipe, int64_t rows, int64_t row_length)
{
    enum { TENSORS = 3 };
    halfstep_optimizer *o;
    uint64_t bytes;
    o = new_optimizer(recipe, 3, 0);
    for (int i = 0; i < TENSORS; i++) {
        char name[8];
        snprintf(name, sizeof name, "t%d", i);
        ADD_TENSOR(o, .name = name, .ndim = 2, .rows = i == 1 ? 3 : rows, .row_length = row_length, .gradient = "f32");
    }
    MUST(halfstep_state_bytes(o, &bytes));
    unsigned char *memory = aligned_alloc(64, bytes);
    MUST(halfstep_bind_states(o, memory, bytes));
    for (uint64_t i = 0; i < bytes; i++)
        if (memory[i]) {
            CHECK(0, "%s: byte %llu is not zero", recipe, (unsigned long long)i);
            break;
        }
    memset(memory, 0xff, bytes);
    hstep_host_touch(&o->context, &o->plan);
    uint64_t zeros = 0, inside = 0;
    for (uint64_t i = 0; i < bytes; i++) zeros += !memory[i];
    for (int i = 0; i < TENSORS; i++)
        for (int slot = 0; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
            SIZED(halfstep_slot_info, info);
            if (halfstep_get_slot_info(o, i, slot, &info) || info.format < 0) continue;
            if (info.code) is_touched(recipe, info.code, info.code_bytes);
            if (info.extra) is_touched(recipe, info.extra, info.extra_bytes);
            for (uint64_t k = 0; info.code && k < info.code_bytes; k++) inside += !((unsigned char *)info.code)[k];
            for (uint64_t k = 0; info.extra && k < info.extra_bytes; k++) inside += !((unsigned char *)info.extra)[k];
        }
    CHECK(zeros == inside, "%s: %llu bytes between the streams were touched", recipe,
          (unsigned long long)(zeros - inside));
    halfstep_destroy(o);
    free(memory);
}

static void test_touch(void)
{
    TEST("states are touched page by page, by chunks, and zero when they are there") {
        touches("adamw/f32/f32", 300, 1000);
        touches("adamw/bf16-kahan/bf16-sr", 7, 40001);
        touches("adamw/bf16-sr/int8", 100, 4096);
        touches("adamw/bf16-sr/int4", 50, 4099);
        touches("adamw/bf16-ecc8/fp8", 1, 100000);
        touches("lamb/bf16-sr/fp8-lamb16", 130, 511);
        touches("muon/bf16-sr", 513, 257);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    is_caller = 1;
    snprintf(folder, sizeof folder, "%s/halfstep-nodes-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(folder)) return 1;
    test_lists();
    test_folder();
    test_pool();
    test_limits();
    test_touch();
    hstep_pool_shutdown();
    remove_tree(folder);
    return test_done();
}
#endif
