/* A file of states: the table of functions that an optimizer's storage has, over a file with two halves.
 *
 * A piece has a place in each half. The last record says for each piece which half is current. A step writes to the
 * other halves, which the last record does not need. Then they are made durable, then a new record is written over the
 * older one of the two, and made durable. So at any instant one record is whole, and so is all that it refers to. Over
 * 500 lines because making, opening and writing must agree on what is current. */
#include "base/structs.h"
#include "io/numbers.h"
#include "io/store/engine.h"

typedef struct piece {
    uint64_t offset, bytes; /* within a half; bytes that are used */
    uint64_t state_bytes;   /* where the weight begins */
    hstep_sums sums[2];     /* of each half; the head is what a step reads */
    int32_t tensor;
    unsigned char current; /* half of the last record */
    unsigned char written; /* 1: the other half is newer */
    uint32_t turn;         /* the last one that wrote it */
} piece;

struct halfstep_store {
    char *path;
    hstep_engine *engine;
    halfstep_optimizer *optimizer;
    hstep_layout layout;
    char *header; /* its JSON */
    piece *pieces;
    int64_t piece_count;
    uint64_t memory; /* for the storage, as the options gave it */
    uint64_t generation;
    uint32_t turn; /* counts waits, from 1 */
    hstep_pairs values;
    uint64_t *hashes; /* of weights, for each tensor; 0: not known */
    uint64_t *weight_bytes;
    int32_t tensor_count;
    hstep_buffer record;
    char *slot;    /* aligned memory of slot_bytes */
    int fell_back; /* 1: opened with one damaged record */
    int lost;      /* 1: something could not be written */
    char text[600];
};

/* Points to the place of the store's own error text, without touching the text. */
static hstep_error own_error(halfstep_store *s) { return (hstep_error){s->text, sizeof s->text, 0, 0}; }

/* ---- Hashes ------------------------------------------------------------------------------------------------------ */

/* Hashes the weights. A weight that the call does not give, and that may have been stepped, is not known any more. */
static void hash_weights(halfstep_store *s, void *const *weights)
{
    for (int64_t i = 0; i < s->piece_count; i++)
        if (s->pieces[i].written) s->hashes[s->pieces[i].tensor] = 0;
    for (int32_t i = 0; weights && !s->layout.has_weights && i < s->tensor_count; i++)
        if (weights[i]) s->hashes[i] = hstep_hash(weights[i], s->weight_bytes[i], 0);
}

/* ---- Records ----------------------------------------------------------------------------------------------------- */

static int put_member(void *context, const char *key, const char *value, hstep_error *error)
{
    hstep_buffer *record = context;
    (void)error;
    /* The first member follows the brace. */
    if (record->bytes && record->data[record->bytes - 1] != '{') hstep_append_text(record, ", ");
    hstep_append_json(record, key);
    hstep_append_text(record, ": ");
    hstep_append_json(record, value);
    return HALFSTEP_OK;
}

static void put_number(hstep_buffer *record, uint64_t number) { hstep_append_format(record, "%016llx", ull(number)); }

/* Writes the JSON of the record that makes everything current that was written. */
static int write_record(halfstep_store *s, hstep_error *error)
{
    static const char digits[] = "0123456789abcdef";
    hstep_buffer *record = &s->record;
    record->bytes = 0;
    record->failed = 0;
    hstep_append_text(record, "{\"metadata\": {");
    int code = hstep_put_numbers(s->optimizer, put_member, record, error);
    if (code) return code;
    hstep_append_text(record, "}, \"values\": {");
    for (size_t i = 0; i < s->values.count; i++)
        put_member(record, s->values.list[i].key, s->values.list[i].value, error);
    hstep_append_text(record, "}, \"halves\": \"");
    for (int64_t i = 0; i < s->piece_count; i += 4) {
        int digit = 0;
        for (int k = 0; k < 4 && i + k < s->piece_count; k++)
            digit |= (s->pieces[i + k].current ^ s->pieces[i + k].written) << k;
        hstep_append(record, &digits[digit], 1);
    }
    hstep_append_text(record, "\", \"sums\": \"");
    for (int64_t i = 0; i < s->piece_count; i++)
        put_number(record, s->pieces[i].sums[s->pieces[i].current ^ s->pieces[i].written].all);
    if (!s->layout.has_weights) hstep_append_text(record, "\", \"hashes\": \"");
    for (int32_t i = 0; i < s->tensor_count && !s->layout.has_weights; i++) put_number(record, s->hashes[i]);
    hstep_append_text(record, "\"}");
    return record->failed ? io_fail_memory(error) : HALFSTEP_OK;
}

/* Remembers that something written is lost, and says it. The system may report a failed sync once only, so no later
 * record can be trusted. */
static int fail_lost(halfstep_store *s, int code, hstep_error *error)
{
    char why[sizeof s->text];
    snprintf(why, sizeof why, "%.450s", error->size ? error->text : "");
    s->lost = 1;
    return io_fail(error, code, "%s%s", why,
                   code == HALFSTEP_ERROR_IO ? "; the file holds the step before: open it again to go on from there"
                   : code == HALFSTEP_ERROR_ORDER
                       ? "; the weights are those after the step, and no file holds its states"
                       : "");
}

/* Fails with ORDER if the file is not there any more as it was made. */
static int check_file(const halfstep_store *s, hstep_error *error)
{
    return hstep_engine_check(s->engine, hstep_layout_bytes(&s->layout), error);
}

/* Returns 1 if a piece was written and is not current yet. A step that fails then must not go on with another handle,
 * which would take these pieces for those of a whole step. */
static int has_begun(const halfstep_store *s)
{
    for (int64_t i = 0; i < s->piece_count; i++)
        if (s->pieces[i].written) return 1;
    return 0;
}

static int wait_all(halfstep_store *s, hstep_error *error)
{
    int lost = 0;
    int code = hstep_engine_wait(s->engine, &lost, error);
    s->turn++;
    return lost || (code && has_begun(s)) ? fail_lost(s, code, error) : code;
}

/* Makes everything current that was written, with the optimizer's numbers. */
static int commit(halfstep_store *s, void *const *weights, hstep_error *error)
{
    if (s->lost)
        return io_fail(error, HALFSTEP_ERROR_IO, "%s: an earlier step could not be written; open it again", s->path);
    hash_weights(s, weights);
    int code = wait_all(s, error);
    if (!code && (code = check_file(s, error))) fail_lost(s, code, error);
    if (!code) code = write_record(s, error);
    const uint64_t generation = s->generation + 1;
    const uint64_t bytes = code ? 0 : hstep_write_commit(&s->layout, generation, &s->record, s->slot);
    if (!code && !bytes)
        code = io_fail(error, HALFSTEP_ERROR_RANGE, "%s has no room for a record of %llu bytes; make another file",
                       s->path, ull(s->record.bytes));
    if (code) return code;
    code = hstep_engine_sync(s->engine, error);
    if (!code)
        code = hstep_engine_begin(s->engine, 1, hstep_slot_begin(&s->layout, generation), s->slot, bytes, NULL, error);
    int lost = 0;
    if (!code) code = hstep_engine_wait(s->engine, &lost, error);
    if (!code) code = hstep_engine_sync(s->engine, error);
    if (code) return fail_lost(s, code, error);
    s->generation = generation;
    for (int64_t i = 0; i < s->piece_count; i++) {
        piece *p = &s->pieces[i];
        if (!p->written) continue;
        p->current = !p->current;
        p->written = 0;
    }
    return HALFSTEP_OK;
}

/* Returns the sums of a piece of which nothing was added yet. */
static hstep_sums empty_sums(const piece *p) { return (hstep_sums){.head_bytes = hstep_whole_pages(p->state_bytes)}; }

/* ---- The table --------------------------------------------------------------------------------------------------- */

static int move(halfstep_store *s, int writes, int64_t index, void *memory, uint64_t bytes)
{
    hstep_error error = own_error(s);
    piece *p = &s->pieces[index];
    if (s->lost) return HALFSTEP_ERROR_IO;
    /* A transfer that may still write the piece comes first. */
    int code = p->turn == s->turn ? wait_all(s, &error) : HALFSTEP_OK;
    if (code) return code;
    if (writes && bytes != p->bytes)
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "%s: piece %lld is written in part", s->path, (long long)index);
    if (writes) {
        p->written = 1;
        p->sums[!p->current] = empty_sums(p);
        p->turn = s->turn;
    }
    const int half = p->current ^ p->written;
    return hstep_engine_begin(s->engine, writes, hstep_half_begin(&s->layout, half) + p->offset, memory,
                              hstep_whole_pages(bytes), &p->sums[half], &error);
}

/* Fails with ORDER before a step if the file was deleted or cut since the last one. */
static int begin_step(void *host)
{
    halfstep_store *s = host;
    char why[sizeof s->text];
    hstep_error error = own_error(s);
    const int code = s->lost ? HALFSTEP_OK : check_file(s, &error);
    if (!code) return code;
    snprintf(why, sizeof why, "%.450s", s->text);
    return io_fail(&error, code, "%s; this call has changed nothing: save weights and states elsewhere", why);
}

static int read_piece(void *host, int64_t index, void *memory, uint64_t bytes)
{
    return move(host, 0, index, memory, bytes);
}

static int write_piece(void *host, int64_t index, const void *memory, uint64_t bytes)
{
    return move(host, 1, index, (void *)memory, bytes);
}

static int wait_pieces(void *host)
{
    hstep_error error = own_error(host);
    return wait_all(host, &error);
}

static int flush_pieces(void *host, void *const *weights)
{
    hstep_error error = own_error(host);
    return commit(host, weights, &error);
}

static const char *why(void *host) { return ((halfstep_store *)host)->text; }

/* ---- What the optimizer has -------------------------------------------------------------------------------------- */

static int fail_optimizer(const halfstep_store *s, const halfstep_optimizer *optimizer, int code, hstep_error *error)
{
    const char *detail = halfstep_error_detail(optimizer);
    /* A text of this store names the file. */
    const int is_ours = *detail && !strcmp(detail, s->text);
    return io_fail(error, code, "%s%s%s", is_ours ? "" : s->path, is_ours ? "" : ": ",
                   *detail ? detail : halfstep_strerror(code));
}

/* Binds the store to a handle. Pieces are known only then. */
static int bind(halfstep_store *s, halfstep_optimizer *optimizer, hstep_error *error)
{
    const halfstep_storage storage = {.struct_size = sizeof storage,
                                      .weights = s->layout.has_weights,
                                      .host = s,
                                      .piece_bytes = s->layout.piece_bytes,
                                      .memory = s->memory,
                                      .read = read_piece,
                                      .write = write_piece,
                                      .wait = wait_pieces,
                                      .flush = flush_pieces,
                                      .why = why,
                                      .begin = begin_step};
    const int code = halfstep_bind_storage(optimizer, &storage);
    if (code) return fail_optimizer(s, optimizer, code, error);
    s->optimizer = optimizer;
    return HALFSTEP_OK;
}

static void append_numbers(hstep_buffer *json, const char *key, const int64_t *numbers, int count)
{
    hstep_append_format(json, ", \"%s\": [", key);
    for (int i = 0; i < count; i++) hstep_append_format(json, "%s%lld", i ? ", " : "", (long long)numbers[i]);
    hstep_append_text(json, "]");
}

/* Fails with ORDER if a state has memory, which the file could not take the place of. */
static int append_slots(hstep_buffer *json, const halfstep_optimizer *optimizer, int32_t tensor, int32_t states)
{
    int code = HALFSTEP_OK;
    hstep_append_text(json, ", \"slots\": [");
    for (int32_t k = HALFSTEP_SLOT_WEIGHT; k < HALFSTEP_SLOT_STATE + states && !code; k++) {
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        halfstep_format_info format = {.struct_size = sizeof format};
        if (k == HALFSTEP_SLOT_GRADIENT) continue;
        code = halfstep_get_slot_info(optimizer, tensor, k, &slot);
        if (code || slot.format < 0) continue;
        if (slot.code || slot.extra) return HALFSTEP_ERROR_ORDER;
        code = halfstep_get_format_info(slot.format, &format);
        if (k != HALFSTEP_SLOT_WEIGHT) hstep_append_text(json, ", ");
        hstep_append_format(json, "{\"slot\": \"%s\", \"format\": \"%s\", \"bytes\": [%llu, %llu]}", slot.name,
                            format.name, ull(slot.code_bytes), ull(slot.extra_bytes));
    }
    hstep_append_text(json, "]}");
    return code;
}

static int append_tensor(hstep_buffer *json, const halfstep_optimizer *optimizer, int32_t index)
{
    halfstep_tensor t = {.struct_size = sizeof t};
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    char recipe[64], name[64];
    int code = halfstep_get_tensor(optimizer, index, &t);
    if (!code) code = halfstep_get_group_recipe(optimizer, t.group, recipe, sizeof recipe);
    if (code) return code;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(recipe, "/"), recipe);
    code = halfstep_get_rule_info(halfstep_rule_find(name), &rule);
    int blocks = 0;
    while (blocks < HALFSTEP_MAX_SPLIT && t.split[blocks]) blocks++;
    hstep_append_text(json, index ? ",\n  {\"name\": " : "\n  {\"name\": ");
    hstep_append_json(json, t.name);
    hstep_append_format(json, ", \"recipe\": \"%s\", \"ndim\": %d", recipe, t.ndim);
    append_numbers(json, "shape", (int64_t[]){t.rows, t.row_length}, 2);
    append_numbers(json, "part", (int64_t[]){t.first_row, t.n_rows, t.first_column, t.n_columns}, 4);
    append_numbers(json, "matrix_rows", &t.matrix_rows, 1);
    append_numbers(json, "split", t.split, blocks);
    return code ? code : append_slots(json, optimizer, index, rule.states);
}

/* Returns the header's JSON up to the list of pieces, for the caller to free. */
static int describe_tensors(const halfstep_store *s, const halfstep_optimizer *optimizer, char **text,
                            hstep_error *error)
{
    hstep_buffer json = {0};
    int code = HALFSTEP_OK;
    const int32_t count = halfstep_tensor_count(optimizer);
    hstep_append_text(&json, "{\"tensors\": [");
    for (int32_t i = 0; i < count && !code; i++) {
        code = append_tensor(&json, optimizer, i);
        if (code == HALFSTEP_ERROR_ORDER)
            io_fail(error, code,
                    "%s: the states have memory already, which a file cannot take the place of; make the optimizer "
                    "without halfstep_allocate_states()",
                    s->path);
        else if (code) code = fail_optimizer(s, optimizer, code, error);
    }
    hstep_append(&json, "]", 2);
    if (!code && json.failed) code = io_fail_memory(error);
    *text = json.data;
    if (!code) return HALFSTEP_OK;
    free(json.data);
    *text = NULL;
    return code;
}

/* Reads the pieces of the handle that is bound, and appends them to the header. */
static int describe_pieces(halfstep_store *s, char **text, hstep_error *error)
{
    hstep_buffer json = {0};
    hstep_append_text(&json, *text);
    free(*text);
    *text = NULL;
    free(s->pieces);
    s->piece_count = halfstep_piece_count(s->optimizer);
    s->pieces = calloc((size_t)s->piece_count + 1, sizeof *s->pieces);
    int code = s->pieces ? HALFSTEP_OK : io_fail_memory(error);
    uint64_t offset = 0;
    hstep_append_text(&json, ",\n \"pieces\": [");
    for (int64_t i = 0; i < s->piece_count && !code; i++) {
        halfstep_piece info = {.struct_size = sizeof info};
        code = halfstep_get_piece(s->optimizer, i, &info);
        if (code) code = fail_optimizer(s, s->optimizer, code, error);
        const uint64_t weight_bytes = s->layout.has_weights ? info.weight_bytes : 0;
        s->pieces[i] = (piece){.offset = offset,
                               .bytes = info.state_bytes + weight_bytes,
                               .state_bytes = info.state_bytes,
                               .tensor = info.tensor};
        offset += hstep_whole_pages(s->pieces[i].bytes);
        hstep_append_format(&json, "%s[%d, %lld, %lld, %llu, %llu]", i ? ", " : "", info.tensor,
                            (long long)info.first_row, (long long)info.n_rows, ull(info.state_bytes),
                            ull(weight_bytes));
    }
    hstep_append(&json, "]}\n", 4);
    if (!code && json.failed) code = io_fail_memory(error);
    s->layout.pieces = (uint64_t)s->piece_count;
    s->layout.half_bytes = offset;
    s->layout.json_bytes = json.bytes - 1;
    *text = json.data;
    return code;
}

/* ---- Making and freeing a store ---------------------------------------------------------------------------------- */

static void free_store(halfstep_store *s)
{
    if (!s) return;
    hstep_engine_close(s->engine);
    free(s->path);
    free(s->header);
    free(s->pieces);
    hstep_free_pairs(&s->values);
    free(s->hashes);
    free(s->weight_bytes);
    free(s->record.data);
    free(s->slot);
    free(s);
}

/* Takes the handle's states away again after a failure. Returns code. */
static int give_up(halfstep_store *s, int code)
{
    if (s && s->optimizer) halfstep_bind_storage(s->optimizer, NULL);
    free_store(s);
    return code;
}

/* Makes a store with what the arguments say, and nothing else. */
static int begin(halfstep_store **store, const char *function, const char *path, const halfstep_optimizer *optimizer,
                 const halfstep_store_options *theirs, halfstep_store_options *options, hstep_error *error)
{
    memset(options, 0, sizeof *options);
    if (store) *store = NULL;
    if (!store || !path || !optimizer) return io_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: NULL argument", function);
    if (theirs && !hstep_take_struct(options, sizeof *options, theirs))
        return io_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: wrong struct_size", function);
    if (options->reserved || options->buffered < 0 || options->buffered > 1 || options->without_weights < 0 ||
        options->without_weights > 1)
        return io_fail(error, HALFSTEP_ERROR_ARGUMENT,
                       "%s: invalid options; without_weights and buffered must be 0 or 1, and reserved 0", function);
    if (!halfstep_tensor_count(optimizer))
        return io_fail(error, HALFSTEP_ERROR_ORDER, "%s: the optimizer has no tensor; add all of them first", function);
    halfstep_store *s = calloc(1, sizeof *s);
    if (!s) return io_fail_memory(error);
    s->memory = options->memory;
    s->turn = 1;
    s->path = hstep_copy(path);
    s->tensor_count = halfstep_tensor_count(optimizer);
    s->hashes = calloc((size_t)s->tensor_count + 1, sizeof *s->hashes);
    s->weight_bytes = calloc((size_t)s->tensor_count + 1, sizeof *s->weight_bytes);
    int code = s->path && s->hashes && s->weight_bytes ? HALFSTEP_OK : io_fail_memory(error);
    for (int32_t i = 0; i < s->tensor_count && !code; i++) {
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        code = halfstep_get_slot_info(optimizer, i, HALFSTEP_SLOT_WEIGHT, &slot);
        if (code) code = fail_optimizer(s, optimizer, code, error);
        s->weight_bytes[i] = slot.code_bytes;
    }
    if (code) free_store(s);
    else *store = s;
    return code;
}

static int make_slot(halfstep_store *s, hstep_error *error)
{
    s->slot = aligned_alloc(HSTEP_PAGE, (size_t)s->layout.slot_bytes);
    return s->slot ? HALFSTEP_OK : io_fail_memory(error);
}

/* ---- Creating ---------------------------------------------------------------------------------------------------- */

/* Sets slot_bytes to what no record can exceed. Numbers grow from one digit to at most 20, or 26 in hexadecimal. */
static int choose_slot_bytes(halfstep_store *s, hstep_error *error)
{
    int code = write_record(s, error);
    uint64_t numbers = 64;
    for (size_t i = 0; i < s->record.bytes; i++) numbers += s->record.data[i] == ' ';
    s->layout.slot_bytes = hstep_whole_pages(HSTEP_PAGE + s->record.bytes + 26 * numbers + HSTEP_VALUES * 6);
    return code;
}

static int write_header(halfstep_store *s, hstep_error *error)
{
    const uint64_t bytes = hstep_header_bytes(&s->layout);
    char *memory = aligned_alloc(HSTEP_PAGE, (size_t)bytes);
    int lost = 0;
    if (!memory) return io_fail_memory(error);
    hstep_write_header(&s->layout, s->header, memory);
    int code = hstep_engine_begin(s->engine, 1, 0, memory, bytes, NULL, error);
    if (!code) code = hstep_engine_wait(s->engine, &lost, error);
    free(memory);
    return code;
}

int halfstep_store_create(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                          const halfstep_store_options *theirs, halfstep_store **store, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_store_options options;
    halfstep_store *s = NULL;
    int code = begin(store, "halfstep_store_create", path, optimizer, theirs, &options, &error);
    if (code) return code;
    s = *store;
    *store = NULL;
    s->layout.has_weights = !options.without_weights;
    s->layout.piece_bytes = options.piece_bytes;
    if (s->layout.has_weights && !weights)
        code = io_fail(&error, HALFSTEP_ERROR_ARGUMENT,
                       "halfstep_store_create: NULL weights; give them, or set without_weights");
    if (!code) code = describe_tensors(s, optimizer, &s->header, &error);
    if (!code) code = bind(s, optimizer, &error);
    if (!code) code = describe_pieces(s, &s->header, &error);
    if (!code) code = choose_slot_bytes(s, &error);
    if (!code) code = make_slot(s, &error);
    if (!code) code = hstep_engine_create(&s->engine, path, hstep_layout_bytes(&s->layout), options.buffered, &error);
    if (!code) code = write_header(s, &error);
    if (!code && (code = halfstep_write_initial(optimizer, weights))) fail_optimizer(s, optimizer, code, &error);
    if (!code) code = hstep_engine_publish(s->engine, &error);
    if (code) return give_up(s, code);
    *store = s;
    return HALFSTEP_OK;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

/* Compares the header of the file with that of the handle, whose list of pieces may be missing. */
static int compare_header(const halfstep_store *s, const char *here, const char *in_file, hstep_error *error)
{
    const size_t bytes = strlen(here);
    char difference[400];
    if (!strncmp(here, in_file, bytes)) return HALFSTEP_OK;
    char *first = hstep_copy(here), *second = hstep_copy(in_file);
    int code = HALFSTEP_ERROR_MISMATCH;
    if (!first || !second) code = io_fail_memory(error);
    else if (hstep_name_difference(first, bytes, second, strlen(second), difference, sizeof difference))
        io_fail(error, code,
                "%s is of another optimizer: %s; make the same tensors in the same order with the same "
                "recipes, or another file",
                s->path, difference);
    else io_fail(error, code, "%s is of another optimizer or was made by another version; make another file", s->path);
    free(first);
    free(second);
    return code;
}

/* Takes the record of the file: which halves are current, values, hashes and the handle's numbers. */
static int take_record(halfstep_store *s, const hstep_commit *record, hstep_error *error)
{
    const uint64_t expected = s->layout.has_weights ? 0 : (uint64_t)s->tensor_count;
    int code = HALFSTEP_OK;
    if (record->hash_count != expected)
        return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s: its record has %llu hashes of weights instead of %llu",
                       s->path, ull(record->hash_count), ull(expected));
    s->generation = record->generation;
    s->fell_back = record->fell_back;
    for (int64_t i = 0; i < s->piece_count; i++) {
        s->pieces[i].current = record->halves[i];
        s->pieces[i].sums[record->halves[i]].all = record->sums[i];
    }
    for (uint64_t i = 0; i < expected; i++) s->hashes[i] = record->hashes[i];
    for (size_t i = 0; i < record->values.count && !code; i++)
        if (!hstep_set_pair(&s->values, record->values.list[i].key, record->values.list[i].value))
            code = io_fail_memory(error);
    return code ? code : hstep_take_numbers(s->optimizer, s->path, &record->metadata, error);
}

static int check_hashes(const halfstep_store *s, void *const *weights, hstep_error *error)
{
    for (int32_t i = 0; i < s->tensor_count; i++) {
        halfstep_tensor t = {.struct_size = sizeof t};
        if (!weights[i] || !s->hashes[i] || hstep_hash(weights[i], s->weight_bytes[i], 0) == s->hashes[i]) continue;
        halfstep_get_tensor(s->optimizer, i, &t);
        return io_fail(error, HALFSTEP_ERROR_MISMATCH,
                       "%s keeps no weights, and the weight of tensor \"%s\" is not that of its last step, number "
                       "%llu of the file; load the weights that were saved after that step",
                       s->path, t.name, ull(s->generation));
    }
    return HALFSTEP_OK;
}

/* Reads bytes of the file into a window of HSTEP_STRETCH, and waits. */
static int read_window(halfstep_store *s, uint64_t offset, char *window, uint64_t bytes, hstep_error *error)
{
    int lost = 0, code = hstep_engine_begin(s->engine, 0, offset, window, bytes, NULL, error);
    return code ? code : hstep_engine_wait(s->engine, &lost, error);
}

/* Copies the part of a window that is the weight. The window begins at byte `at` of the piece, and its tensor has
 * `done` bytes of weights before the piece. */
static void copy_weight(const piece *p, const char *window, uint64_t at, uint64_t bytes, char *weight, uint64_t done)
{
    const uint64_t first = at < p->state_bytes ? p->state_bytes : at,
                   end = at + bytes < p->bytes ? at + bytes : p->bytes;
    if (first < end) memcpy(weight + done + (first - p->state_bytes), window + (first - at), (size_t)(end - first));
}

/* Reads a piece and compares it with its sum, and copies the part that is the weight unless `weight` is NULL. */
static int read_whole_piece(halfstep_store *s, piece *p, char *window, char *weight, uint64_t done, hstep_error *error)
{
    const uint64_t begin = hstep_half_begin(&s->layout, p->current) + p->offset, end = hstep_whole_pages(p->bytes);
    hstep_sums sums = empty_sums(p);
    for (uint64_t at = 0, bytes; at < end; at += bytes) {
        bytes = end - at < HSTEP_STRETCH ? end - at : HSTEP_STRETCH;
        const int code = read_window(s, begin + at, window, bytes, error);
        if (code) return code;
        hstep_add_stretch(&sums, window, at, bytes);
        if (weight) copy_weight(p, window, at, bytes, weight, done);
    }
    if (sums.all != p->sums[p->current].all)
        return io_fail(error, HALFSTEP_ERROR_FORMAT,
                       s->fell_back
                           ? "%s: one of its records is damaged, and the states of the other are not whole any more"
                           : "%s does not give back what was written: its bytes %llu to %llu have another sum; use "
                             "a copy of the file or another checkpoint",
                       s->path, ull(begin), ull(begin + end));
    p->sums[p->current] = sums;
    return HALFSTEP_OK;
}

/* Reads all pieces, and their weights unless `weights` is NULL. The pieces of a tensor follow each other as its rows
 * do. If the newest record is damaged, a step that was under way may have written over what the one before refers
 * to. */
static int read_pieces(halfstep_store *s, void *const *weights, hstep_error *error)
{
    char *window = aligned_alloc(HSTEP_PAGE, HSTEP_STRETCH);
    int code = window ? HALFSTEP_OK : io_fail_memory(error);
    uint64_t done = 0;
    for (int64_t i = 0; i < s->piece_count && !code; i++) {
        piece *p = &s->pieces[i];
        char *weight = weights ? weights[p->tensor] : NULL;
        if (!i || p->tensor != p[-1].tensor) done = 0;
        if (weights && !weight && p->bytes > p->state_bytes)
            code = io_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: the weight of tensor %d is NULL", s->path, p->tensor);
        else code = read_whole_piece(s, p, window, weight, done, error);
        done += p->bytes - p->state_bytes;
    }
    free(window);
    return code;
}

/* Reads header and record, and makes the handle what they say. */
static int open_parts(halfstep_store *s, halfstep_optimizer *optimizer, const hstep_file *file, uint64_t bytes,
                      hstep_error *error)
{
    hstep_commit record = {0};
    char *here = NULL;
    hstep_layout layout;
    int code = hstep_read_header(file, bytes, &s->layout, &s->header, error);
    layout = s->layout;
    if (!code) code = describe_tensors(s, optimizer, &here, error);
    if (!code) code = compare_header(s, here, s->header, error);
    if (!code) code = hstep_read_commit(file, &layout, &record, NULL, error);
    if (!code) code = bind(s, optimizer, error);
    if (!code) code = describe_pieces(s, &here, error);
    if (!code) code = compare_header(s, here, s->header, error);
    if (!code && (layout.pieces != s->layout.pieces || layout.half_bytes != s->layout.half_bytes ||
                  layout.json_bytes != s->layout.json_bytes))
        code = io_fail(error, HALFSTEP_ERROR_FORMAT, "%s: its header is damaged", s->path);
    if (!code) code = take_record(s, &record, error);
    if (!code) code = make_slot(s, error);
    hstep_free_commit(&record);
    free(here);
    return code;
}

/* Says that the record that counts is the only sound one. */
static void note_damage(const char *path, uint64_t generation, hstep_error *error)
{
    io_fail(error, HALFSTEP_OK,
            "note: one of the two records of %s is damaged, so the other one counts, number %llu. A step that was cut "
            "short by a kill or a loss of power leaves that",
            path, ull(generation));
}

int halfstep_store_open(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                        const halfstep_store_options *theirs, halfstep_store **store, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_store_options options;
    hstep_file *file = NULL;
    uint64_t bytes = 0;
    int code = begin(store, "halfstep_store_open", path, optimizer, theirs, &options, &error);
    if (code) return code;
    halfstep_store *s = *store;
    *store = NULL;
    code = hstep_engine_open(&s->engine, path, options.buffered, &error);
    if (!code) code = hstep_open_file(&file, path, &bytes, &error);
    if (!code) code = open_parts(s, optimizer, file, bytes, &error);
    hstep_close(file);
    if (!code && weights && !s->layout.has_weights) code = check_hashes(s, weights, &error);
    if (!code) code = read_pieces(s, s->layout.has_weights ? weights : NULL, &error);
    if (code) return give_up(s, code);
    if (s->fell_back) note_damage(path, s->generation, &error);
    *store = s;
    return HALFSTEP_OK;
}

int halfstep_store_bind(halfstep_store *store, halfstep_optimizer *optimizer, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    char *here = NULL;
    if (!store || !optimizer) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_store_bind: NULL argument");
    int code = describe_tensors(store, optimizer, &here, &error);
    if (!code) code = compare_header(store, here, store->header, &error);
    free(here);
    return code ? code : bind(store, optimizer, &error);
}

void halfstep_store_close(halfstep_store *store) { free_store(store); }

/* ---- Values and descriptions ------------------------------------------------------------------------------------- */

int halfstep_store_set_value(halfstep_store *store, const char *key, const char *value, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!store || !key) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_store_set_value: NULL argument");
    if (!hstep_is_utf8(key) || (value && !hstep_is_utf8(value)))
        return io_fail(&error, HALFSTEP_ERROR_NAME, "%s: the value \"%s\" is not UTF-8", store->path, key);
    int found;
    const size_t at = hstep_find_pair(&store->values, key, &found);
    uint64_t bytes = value ? strlen(key) + strlen(value) : 0;
    for (size_t i = 0; i < store->values.count; i++)
        if (!found || i != at) bytes += strlen(store->values.list[i].key) + strlen(store->values.list[i].value);
    if (bytes > HSTEP_VALUES)
        return io_fail(&error, HALFSTEP_ERROR_RANGE, "%s: values may have %d bytes in all, not %llu", store->path,
                       HSTEP_VALUES, ull(bytes));
    if (value) return hstep_set_pair(&store->values, key, value) ? HALFSTEP_OK : io_fail_memory(&error);
    if (!found) return HALFSTEP_OK;
    hstep_pair *pair = &store->values.list[at];
    free(pair->key);
    free(pair->value);
    memmove(pair, pair + 1, (--store->values.count - at) * sizeof *pair);
    return HALFSTEP_OK;
}

const char *halfstep_store_value(const halfstep_store *store, const char *key)
{
    int found = 0;
    const size_t at = store && key ? hstep_find_pair(&store->values, key, &found) : 0;
    return found ? store->values.list[at].value : NULL;
}

/* Returns the most steps that a group has made. */
static uint64_t most_steps(const hstep_pairs *metadata)
{
    uint64_t most = 0, steps;
    for (size_t i = 0; i < metadata->count; i++) {
        const char *key = metadata->list[i].key, *end = strrchr(key, '.');
        if (strncmp(key, "group.", 6) || strcmp(end, ".steps")) continue;
        if (hstep_is_uint64(metadata->list[i].value, &steps) && steps > most) most = steps;
    }
    return most;
}

int halfstep_store_get_info(const char *path, halfstep_store_info *info, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_store_info ours = {.struct_size = sizeof ours};
    hstep_layout layout;
    hstep_commit record = {0};
    hstep_file *file = NULL;
    if (!path || !info || !hstep_struct_size(info))
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_store_get_info: NULL argument or wrong struct_size");
    int code = hstep_open_file(&file, path, &ours.bytes, &error);
    if (!code) code = hstep_read_header(file, ours.bytes, &layout, &ours.header, &error);
    if (!code) code = hstep_read_commit(file, &layout, &record, &ours.commit, &error);
    if (!code) {
        ours.has_weights = layout.has_weights;
        ours.pieces = layout.pieces;
        ours.generation = record.generation;
        ours.steps = most_steps(&record.metadata);
        if (record.fell_back) note_damage(path, record.generation, &error);
    }
    hstep_free_commit(&record);
    hstep_close(file);
    if (code) halfstep_store_free_info(&ours);
    else hstep_give_struct(info, &ours, sizeof ours);
    return code;
}

void halfstep_store_free_info(halfstep_store_info *info)
{
    if (!info) return;
    free(info->header);
    free(info->commit);
    info->header = info->commit = NULL;
}
