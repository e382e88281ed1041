/* Tests states in storage with the latest table possible. It reads and writes only while it is waited for, and fills
 * memory with rubbish as soon as a read begins. So a step that works on a piece before it is there, or changes one
 * before it is written, gives other bits. The cases of tests/golden/hashes.txt must have their hashes. A run without
 * arguments takes a sixteenth of them; --short: a 61st; --all: all.
 * Runs under sanitizers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include "golden_case.h"
#include "ref/fixture.h"

/* ---- A storage in memory ----------------------------------------------------------------------------------------- */

enum { MOST_PIECES = 512, MOST_PENDING = 1024 };

struct store {
    halfstep_optimizer *o;
    int64_t n;
    uint64_t bytes[MOST_PIECES];
    char *now[MOST_PIECES], *current[MOST_PIECES]; /* as last written, and as last flushed */
    struct pending {
        int64_t piece;
        char *to;
        const char *from;
        uint64_t bytes;
        uint64_t hash; /* of what is written */
    } pending[MOST_PENDING];
    int n_pending;
    long calls, fails_at; /* the call, counted from 1, that fails; 0: none */
    long reads, writes, flushes;
    int with_weights; /* the last flush had weights */
    uint64_t steps;   /* of group 0, as the last flush saw them */
    const char *failed;
};

static int begin_call(struct store *st, const char *name)
{
    if (++st->calls != st->fails_at) return OK;
    st->failed = name;
    return IO;
}

static struct pending *put_off(struct store *st, int64_t piece, uint64_t bytes)
{
    if (st->n_pending == MOST_PENDING || piece < 0 || piece >= st->n || !bytes || bytes > st->bytes[piece]) abort();
    st->pending[st->n_pending] = (struct pending){.piece = piece, .bytes = bytes};
    return &st->pending[st->n_pending++];
}

static int late_read(void *host, int64_t piece, void *memory, uint64_t bytes)
{
    struct store *st = host;
    const int error = begin_call(st, "read");
    if (error) return error;
    CHECK((uintptr_t)memory % 4096 == 0, "a read to memory that is not aligned");
    st->reads++;
    put_off(st, piece, bytes)->to = memory;
    memset(memory, 0xa5, (size_t)(bytes + 4095) / 4096 * 4096);
    return OK;
}

static int late_write(void *host, int64_t piece, const void *memory, uint64_t bytes)
{
    struct store *st = host;
    const int error = begin_call(st, "write");
    if (error) return error;
    CHECK((uintptr_t)memory % 4096 == 0, "a write from memory that is not aligned");
    CHECK(bytes == st->bytes[piece], "a write of %llu bytes of %llu", (unsigned long long)bytes,
          (unsigned long long)st->bytes[piece]);
    st->writes++;
    struct pending *p = put_off(st, piece, bytes);
    p->from = memory;
    p->hash = hash_bytes(HASH_START, memory, (size_t)bytes);
    return OK;
}

static int late_wait(void *host)
{
    struct store *st = host;
    const int error = begin_call(st, "wait");
    for (int i = 0; i < st->n_pending; i++) {
        const struct pending *p = &st->pending[i];
        if (p->to) {
            if (!error) memcpy(p->to, st->now[p->piece], (size_t)p->bytes);
            continue;
        }
        CHECK(hash_bytes(HASH_START, p->from, (size_t)p->bytes) == p->hash, "a piece is changed while it is written");
        memcpy(st->now[p->piece], p->from, (size_t)p->bytes);
    }
    st->n_pending = 0;
    return error;
}

static uint64_t steps_of(const halfstep_optimizer *o)
{
    halfstep_record r = {.struct_size = sizeof r, .kind = HALFSTEP_RECORD_GROUP};
    MUST(halfstep_get_record(o, &r));
    return r.steps;
}

static int late_flush(void *host, void *const *weights)
{
    struct store *st = host;
    const int error = begin_call(st, "flush");
    if (error) return error;
    CHECK(!st->n_pending, "a flush before the wait");
    for (int64_t i = 0; i < st->n; i++) memcpy(st->current[i], st->now[i], (size_t)st->bytes[i]);
    st->flushes++;
    st->with_weights = weights != NULL;
    st->steps = steps_of(st->o);
    return OK;
}

static const char *late_why(void *host) { return text_of("cannot %s", ((struct store *)host)->failed); }

static halfstep_storage table_of(struct store *st, int weights, uint64_t piece_bytes, uint64_t memory)
{
    return (halfstep_storage){.struct_size = sizeof(halfstep_storage),
                              .weights = weights,
                              .host = st,
                              .piece_bytes = piece_bytes,
                              .memory = memory,
                              .read = late_read,
                              .write = late_write,
                              .wait = late_wait,
                              .flush = late_flush,
                              .why = late_why};
}

static halfstep_piece piece_of(const halfstep_optimizer *o, int64_t number)
{
    SIZED(halfstep_piece, piece);
    MUST(halfstep_get_piece(o, number, &piece));
    return piece;
}

/* Returns the bytes of three of the largest pieces of a bound handle. */
static uint64_t three_largest(const halfstep_optimizer *o)
{
    uint64_t largest = 0;
    for (int64_t i = 0; i < halfstep_piece_count(o); i++) {
        const halfstep_piece piece = piece_of(o, i);
        const uint64_t bytes = (piece.state_bytes + piece.weight_bytes + 4095) / 4096 * 4096;
        if (bytes > largest) largest = bytes;
    }
    return 3 * largest;
}

/* Binds a handle to a new store, whose pieces hold rubbish until they are written. stay: bytes of memory beside the
 * least. */
static void bind_store(struct store *st, halfstep_optimizer *o, int weights, uint64_t piece_bytes, uint64_t stay)
{
    memset(st, 0, sizeof *st);
    st->o = o;
    halfstep_storage table = table_of(st, weights, piece_bytes, 0);
    MUST(halfstep_bind_storage(o, &table));
    table.memory = three_largest(o) + stay;
    if (table.memory) MUST(halfstep_bind_storage(o, &table));
    st->n = halfstep_piece_count(o);
    if (st->n > MOST_PIECES) abort();
    for (int64_t i = 0; i < st->n; i++) {
        const halfstep_piece piece = piece_of(o, i);
        st->bytes[i] = piece.state_bytes + piece.weight_bytes;
        st->now[i] = zeroed((size_t)st->bytes[i]);
        st->current[i] = zeroed((size_t)st->bytes[i]);
        memset(st->now[i], 0xa5, (size_t)st->bytes[i]);
    }
}

static void free_store(struct store *st)
{
    for (int64_t i = 0; i < st->n; i++) {
        free(st->now[i]);
        free(st->current[i]);
    }
}

/* ---- Golden cases ------------------------------------------------------------------------------------------------ */

/* The stores of a case's handles, and the sizes of their pieces. */
static struct {
    struct store store[GOLDEN_MAX_PARTS];
    int n;
    uint64_t piece_bytes, stay;
} golden;

static int place_golden(halfstep_optimizer *o)
{
    struct store *st = &golden.store[golden.n++];
    bind_store(st, o, 0, golden.piece_bytes, golden.stay);
    return halfstep_write_initial(o, NULL);
}

/* Calls visit for every stream of states and of weights' residuals and codes. */
static void each_stream(halfstep_optimizer *o, void (*visit)(void *, int32_t, int, int, uint64_t), void *argument)
{
    SIZED(halfstep_slot_info, info);
    for (int32_t i = 0; i < halfstep_tensor_count(o); i++)
        for (int s = 0; !halfstep_get_slot_info(o, i, s, &info); s++) {
            if (s >= STATE && info.code_bytes) visit(argument, i, s, 0, info.code_bytes);
            if (s != GRADIENT && info.extra_bytes) visit(argument, i, s, 1, info.extra_bytes);
        }
}

struct moving {
    halfstep_optimizer *o;
    char *memory;
    uint64_t used;
    int writes;
};

static void move_stream(void *argument, int32_t tensor, int slot, int extra, uint64_t bytes)
{
    struct moving *m = argument;
    if (m->memory) {
        if (m->writes) MUST(halfstep_write_bytes(m->o, tensor, slot, extra, 0, bytes, m->memory + m->used));
        else MUST(halfstep_read_bytes(m->o, tensor, slot, extra, 0, bytes, m->memory + m->used));
    }
    m->used += bytes;
}

/* Copies all streams of a handle to new memory, or back from it. */
static struct moving read_all(halfstep_optimizer *o)
{
    struct moving size = {.o = o}, m = {.o = o};
    each_stream(o, move_stream, &size);
    m.memory = zeroed((size_t)size.used);
    each_stream(o, move_stream, &m);
    return m;
}

/* Brings states from the storage into memory. Their grids go with them. */
static int end_golden(halfstep_optimizer *o)
{
    halfstep_record record[64];
    const int32_t n = halfstep_tensor_count(o);
    struct moving m = read_all(o);
    if (n > 64) abort();
    for (int32_t i = 0; i < n; i++) record[i] = counters_of(o, i);
    MUST(halfstep_bind_storage(o, NULL));
    MUST(halfstep_allocate_states(o));
    m.used = 0;
    m.writes = 1;
    each_stream(o, move_stream, &m);
    free(m.memory);
    for (int32_t i = 0; i < n; i++) {
        record[i].kind = HALFSTEP_RECORD_TENSOR;
        record[i].index = i;
        MUST(halfstep_set_record(o, &record[i]));
    }
    return OK;
}

static void test_golden(void)
{
    static const struct {
        const char *name;
        struct golden_layout layout;
        uint64_t piece_bytes, stay;
    } ways[] = {
        {"golden cases, small pieces", {.threads = 3}, 600, 0},
        {"golden cases, one thread, some pieces in memory", {.threads = 1}, 4096, 100000},
        {"golden cases, 2 shards of rows", {.threads = 2, .parts = 2}, 1000, 0},
        {"golden cases, 3 shards of columns", {.threads = 1, .parts = 3, .by_columns = 1}, 300, 0},
    };
    int n = 0;
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    if (!cases) exit(1);
    for (size_t w = 0; w < COUNT(ways); w++)
        TEST(ways[w].name) {
            const int stride = BY_LENGTH(61, w ? 61 : 16, w ? 16 : 1);
            struct golden_layout layout = ways[w].layout;
            layout.place = place_golden;
            layout.end = end_golden;
            golden.piece_bytes = ways[w].piece_bytes;
            golden.stay = ways[w].stay;
            for (int i = (int)w * 7 % stride; i < n; i += stride) {
                golden.n = 0;
                check_golden(list, &cases[i], &layout);
                for (int p = 0; p < golden.n; p++) free_store(&golden.store[p]);
            }
        }
    free(cases);
    free(list);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_golden();
    return test_done();
}
