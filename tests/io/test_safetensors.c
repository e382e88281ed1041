/* Tests files of halfstep_io: what the safetensors reader refuses and costs, what the writer promises, files that are
 * replaced at once. Over 500 lines because reader and writer are judged by each other. */
#define HALFSTEP_ADVANCED
#include "disk.h"
#include "halfstep_io.h"

static int put_text(const char *path, const char *text)
{
    return halfstep_write_file_atomic(path, text, strlen(text), TEXT);
}

static uint64_t random_state = 1;

static uint64_t next_random(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return random_state >> 33;
}

/* ---- The reader -------------------------------------------------------------------------------------------------- */

/* Opens a file of length field, header (with ' for each ") and `data` zero bytes. */
static int open_made(const char *header, size_t header_bytes, size_t data)
{
    size_t total = 8 + header_bytes + data;
    unsigned char *bytes = calloc(1, total + 1);
    halfstep_safetensors *file;
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(header_bytes >> 8 * i);
    for (size_t i = 0; i < header_bytes; i++) bytes[8 + i] = (unsigned char)(header[i] == '\'' ? '"' : header[i]);
    put_file(at("case"), bytes, total);
    free(bytes);
    int code = halfstep_open_safetensors(&file, at("case"), TEXT);
    if ((code == 0) != (file != NULL)) FAIL("handle and code disagree for %s", header);
    halfstep_close_safetensors(file);
    return code;
}

#define T(dtype, shape, offsets) "{'dtype':'" dtype "','shape':" shape ",'data_offsets':" offsets "}"

#define A(dtype, shape, offsets) "{'a':" T(dtype, shape, offsets) "}"

typedef struct reader_case {
    const char *header; /* with ' for each " */
    size_t data;
    const char *says; /* part of the error text; NULL: the file is good */
} reader_case;

static const reader_case reader_cases[] = {
    {"{}", 0, NULL},
    {"{}      ", 0, NULL},
    {A("F32", "[2,3]", "[0,24]"), 24, NULL},
    {"{'a':" T("F32", "[]", "[0,4]") "}  ", 4, NULL},
    {"{'a':" T("F32", "[0]", "[0,0]") ",'b':" T("U8", "[1]", "[0,1]") ",'c':" T("F64", "[4,0,2]", "[1,1]") "}", 1,
     NULL},
    {"{'b':" T("U8", "[3]", "[1,4]") ",'a':" T("U8", "[1]", "[0,1]") "}", 4, NULL},
    {"{'__metadata__':{'k':'v','':''},'':" T("F4", "[2]", "[0,1]") "}", 1, NULL},
    {"{'__metadata__':{}}", 0, NULL},
    {A("F6_E2M3", "[4]", "[0,3]"), 3, NULL},
    {"{ 'a' :\t{\n'shape':[1 ,1],'data_offsets':[ 0,1],'dtype':'BOOL'}\r}", 1, NULL},
    {"{'a\\u00e9\\ud83d\\ude00':" T("U8", "[1]", "[0,1]") "}", 1, NULL},
    /* bad offset */
    {A("F32", "[1]", "[1,5]"), 5, "begins at"},
    {A("F32", "[1]", "[4,0]"), 4, "data_offsets"},
    {A("F32", "[1]", "[0]"), 4, "expected ','"},
    {A("F32", "[1]", "[0,4,4]"), 4, "or ']'"},
    {A("F32", "[1]", "[0,'4']"), 4, "plain decimal"},
    {A("F32", "[1]", "[0,9223372036854775807]"), 4, "do not lie within"},
    {A("F32", "[1]", "[0,18446744073709551616]"), 4, "integer"},
    /* incomplete buffer, hole, overlap, trailing bytes */
    {A("F32", "[2]", "[0,8]"), 7, "do not lie within"},
    {"{'a':" T("U8", "[1]", "[0,1]") ",'b':" T("U8", "[1]", "[2,3]") "}", 3, "unused"},
    {"{'a':" T("U8", "[2]", "[0,2]") ",'b':" T("U8", "[2]", "[1,3]") "}", 3, "the one before it ends"},
    {"{'a':" T("U8", "[2]", "[0,2]") ",'b':" T("U8", "[2]", "[0,2]") "}", 2, "the one before it ends"},
    {"{'a':" T("U8", "[2]", "[0,2]") ",'b':" T("U8", "[0]", "[1,1]") "}", 2, "the one before it ends"},
    {A("U8", "[2]", "[0,2]"), 3, "follow the last tensor"},
    {"{}", 1, "follow the last tensor"},
    {A("U8", "[0]", "[0,0]"), 8, "follow the last tensor"},
    /* shapes */
    {A("F32", "[3]", "[0,8]"), 8, "shape and dtype give 12 bytes"},
    {A("F32", "[0]", "[0,8]"), 8, "shape and dtype give 0 bytes"},
    {A("F32", "[4294967296,4294967296]", "[0,4]"), 4, "number of elements overflows"},
    {A("F32", "[9223372036854775807,2]", "[0,4]"), 4, "size overflows"},
    {A("F64", "[1152921504606846976]", "[0,0]"), 0, "size overflows"},
    {A("F4", "[3]", "[0,2]"), 2, "whole number of bytes"},
    {A("F6_E3M2", "[2]", "[0,2]"), 2, "whole number of bytes"},
    {A("F32", "[99999999999999999999]", "[0,4]"), 4, "integer"},
    {A("F32", "1", "[0,4]"), 4, "expected '['"},
    {A("F32", "['1']", "[0,4]"), 4, "plain decimal"},
    {A("F32", "[[1]]", "[0,4]"), 4, "plain decimal"},
    /* numbers: floats, signs, exponents, leading zeros */
    {A("F32", "[1.0]", "[0,4]"), 4, "plain decimal"},
    {A("F32", "[1]", "[0,4.0]"), 4, "plain decimal"},
    {A("F32", "[1]", "[-0,4]"), 4, "plain decimal"},
    {A("F32", "[-1]", "[0,4]"), 4, "plain decimal"},
    {A("F32", "[1]", "[0,4e0]"), 4, "plain decimal"},
    {A("F32", "[+1]", "[0,4]"), 4, "plain decimal"},
    {A("F32", "[01]", "[0,4]"), 4, "header"},
    {A("F32", "[1]", "[0,0x4]"), 4, "or ']'"},
    {A("F32", "[null]", "[0,4]"), 4, "plain decimal"},
    /* members */
    {"{'a':{'dtype':'F32','shape':[1]}}", 4, "lacks dtype"},
    {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[0,4],'x':1}}", 4, NULL},
    {"{'a':{'x':{'shape':[9]},'dtype':'F32','y':null,'shape':[1],'y':'','data_offsets':[0,4]}}", 4, NULL},
    {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[0,4],'x':}}", 4, "header"},
    {"{'a':{'dtype':'F32','shape':[1],'data_offsets':[0,4],'x':NaN}}", 4, "header"},
    {"{'a':{'x':1", 0, "expected ',' or '}'"}, /* the header ends within a number */
    {"{'a':{'shape':[1", 0, "expected ',' or ']'"},
    {"{'a':['F32',[1],[0,4]]}", 4, "expected '{'"},
    {"{'x':null}", 0, "expected '{'"},
    {"{'a':{'dtype':7,'shape':[1],'data_offsets':[0,4]}}", 4, "expected a string"},
    {"{'a':[]}", 0, "expected '{'"},
    {"{'a':{}}", 0, "lacks dtype"},
    {"{'a':1}", 0, "expected '{'"},
    {A("f32", "[1]", "[0,4]"), 4, "unknown dtype"},
    {A("F128", "[1]", "[0,16]"), 16, "unknown dtype"},
    {A("", "[1]", "[0,4]"), 4, "unknown dtype"},
    {"{'__metadata__':{'k':1}}", 0, "expected a string"},
    {"{'__metadata__':{'k':{}}}", 0, "expected a string"},
    {"{'__metadata__':[]}", 0, "expected '{'"},
    {"{'__metadata__':'x'}", 0, "expected '{'"},
    {"{'__metadata__':null}", 0, NULL},
    {"{'a':" T("U8", "[1]", "[0,1]") ",'__metadata__': null }", 1, NULL},
    {"{'__metadata__':nil}", 0, "null"},
    {"{'__metadata__':{'k':null}}", 0, "expected a string"},
    {"{'__metadata__':null,'__metadata__':null}", 0, "uplicate"},
    /* duplicates, also when spelled differently */
    {"{'a':" T("U8", "[1]", "[0,1]") ",'a':" T("U8", "[1]", "[1,2]") "}", 2, "uplicate"},
    {"{'a':" T("U8", "[1]", "[0,1]") ",'\\u0061':" T("U8", "[1]", "[1,2]") "}", 2, "uplicate"},
    {"{'a':{'dtype':'U8','dtype':'U8','shape':[1],'data_offsets':[0,1]}}", 1, "uplicate"},
    {"{'__metadata__':{'k':'1','k':'2'}}", 0, "uplicate"},
    {"{'__metadata__':{},'__metadata__':{}}", 0, "uplicate"},
    /* JSON and UTF-8 */
    {"{", 0, "header"},
    {"[]", 0, "expected '{'"},
    {"  ", 0, "expected '{'"},
    {"   {'a':" T("U8", "[1]", "[0,1]") "}", 1, NULL},
    {" \t\r\n{\n}\t\r\n ", 0, NULL},
    {"\xef\xbb\xbf{}", 0, "expected '{'"},
    {"{}x ", 0, "only blanks"},
    {"{}{}", 0, "header"},
    {"{},{}", 0, "header"},
    {"{]}", 0, "header"},
    {"{'a'}", 0, "header"},
    {"{'a':}", 0, "header"},
    {"{'a}", 0, "header"},
    {"{'\\}", 0, "header"},
    {A("U8", "[1,]", "[0,1]"), 1, "header"},
    {"{'a':" T("U8", "[1]", "[0,1]") ",}", 1, "header"},
    {"{'a\\u0000b':" T("U8", "[1]", "[0,1]") "}", 1, "header"},
    {"{'a\x01':" T("U8", "[1]", "[0,1]") "}", 1, "header"},
    {"{'\xff':" T("U8", "[1]", "[0,1]") "}", 1, "header"},
    {"{'\xc0\xaf':" T("U8", "[1]", "[0,1]") "}", 1, "header"},
    {"{'\xed\xa0\x80':" T("U8", "[1]", "[0,1]") "}", 1, "header"},
    {"{'\\ud800':" T("U8", "[1]", "[0,1]") "}", 1, "header"},
    {A("\xe9", "[1]", "[0,1]"), 1, "header"},
};

static void test_reader_cases(void)
{
    for (size_t i = 0; i < COUNT(reader_cases); i++) {
        const reader_case *c = &reader_cases[i];
        int code = open_made(c->header, strlen(c->header), c->data);
        if (!c->says) {
            CHECK(code == 0, "refused %s: %s", c->header, message);
            continue;
        }
        CHECK(code == FORMAT, "code %d for %s (%s)", code, c->header, message);
        CHECK(strstr(message, c->says), "%s: the text \"%s\" does not say \"%s\"", c->header, message, c->says);
        CHECK(strstr(message, at("case")) == message, "the text does not begin with the path: %s", message);
    }
}

static void test_reader_lengths(void)
{
    static const struct {
        const char *bytes;
        size_t count;
        const char *says;
    } raw[] = {
        {"", 0, "too few"},
        {"\x02\0\0\0\0\0\0", 7, "too few"},
        {"\0\0\0\0\0\0\0\0", 8, "too small"},
        {"\x01\0\0\0\0\0\0\0{", 9, "too small"},
        {"\x02\0\0\0\0\0\0\0{", 9, "reach beyond"},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "above the limit"},
        {"\xf8\xff\xff\xff\xff\xff\xff\x7f{}", 10, "above the limit"},
        {"\x01\xe1\xf5\x05\0\0\0\0{}", 10, "above the limit"}, /* 100,000,001 */
        {"\0\xe1\xf5\x05\0\0\0\0{}", 10, "reach beyond"},      /* 100,000,000 */
        {"\x03\0\0\0\0\0\0\0{}", 10, "reach beyond"},
        {"\0\0\0\0\0\0\0\x02{}", 10, "above the limit"}, /* the same length, big-endian */
    };
    halfstep_safetensors *file;
    for (size_t i = 0; i < COUNT(raw); i++) {
        put_file(at("case"), raw[i].bytes, raw[i].count);
        int code = halfstep_open_safetensors(&file, at("case"), TEXT);
        CHECK(code == FORMAT && !file && strstr(message, raw[i].says), "case %zu: %d '%s'", i, code, message);
    }
    FAILS(open_made("{}\0", 3, 0), FORMAT, "");       /* a zero byte behind the header */
    FAILS(open_made("{'a\0b':1}", 9, 0), FORMAT, ""); /* a zero byte in a name */

    FAILS(halfstep_open_safetensors(&file, at("absent"), TEXT), IO, "absent");
    SAYS("No such file");
    FAILS(halfstep_open_safetensors(&file, scratch, TEXT), IO, "directory");
    mkfifo(at("pipe"), 0600);
    FAILS(halfstep_open_safetensors(&file, at("pipe"), TEXT), IO, "");
}

/* Opens a header of `count` repeated texts between a beginning and an end. */
static int open_repeated(const char *begin, const char *item, size_t count, const char *end)
{
    size_t room = strlen(begin) + strlen(end) + count * (strlen(item) + 12) + 1, used;
    char *text = malloc(room);
    used = (size_t)sprintf(text, "%s", begin);
    for (size_t i = 0; i < count; i++) used += (size_t)sprintf(text + used, item, (unsigned)i);
    used += (size_t)sprintf(text + used, "%s", end);
    int code = open_made(text, used, 0);
    free(text);
    return code;
}

static void test_reader_limits(void)
{
    CHECK(open_repeated("{'a':{'dtype':'U8','data_offsets':[0,0],'shape':[0", ",1", 63, "]}}") == 0,
          "64 dimensions: %s", message);
    FAILS(open_repeated("{'a':{'dtype':'U8','data_offsets':[0,0],'shape':[0", ",1", 64, "]}}"), FORMAT,
          "dimensions"); /* 65 dimensions */
    FAILS(open_repeated("{'a':{'dtype':'U8','data_offsets':[0,0],'shape':[0", ",1", (1 << 22), "]}}"), FORMAT,
          "dimensions"); /* millions of dimensions */
    CHECK(open_repeated("{", "'%x':" T("U8", "[0]", "[0,0]") ",", 20000, "'z':" T("U8", "[0]", "[0,0]") "}") == 0,
          "20001 tensors: %s", message);
    FAILS(open_repeated("{", "'%x':" T("U8", "[0]", "[0,0]") ",", 1 << 20, "'z':" T("U8", "[0]", "[0,0]") "}"), FORMAT,
          "tensors");                                            /* too many tensors */
    FAILS(open_repeated("{'a':", "[", 100000, "}"), FORMAT, ""); /* nesting */
}

/* Opens a header of about `bytes`, in which item is repeated between begin and end (%x in it is its number). Returns
 * the most memory that this took, in units of the header. */
static double measure_peak(size_t bytes, const char *begin, const char *item, const char *end, int expected,
                           const char *says)
{
    size_t room = bytes + strlen(begin) + strlen(item) + strlen(end) + 64, used;
    char *text = malloc(room);
    used = (size_t)sprintf(text, "%s", begin);
    for (unsigned i = 0; used < bytes; i++) used += (size_t)sprintf(text + used, item, i);
    used += (size_t)sprintf(text + used, "%s", end);
    held = held_most = 0;
    int code = open_made(text, used, 0);
    CHECK(code == expected && strstr(message, says), "%.40s...: %d %s", begin, code, message);
    CHECK(!held, "%zu bytes are still held", held);
    free(text);
    return (double)held_most / (double)used;
}

/* A header is read into memory once. Other memory must stay in proportion, whatever the header says. */
static void test_reader_memory(void)
{
    enum { BYTES = 8 << 20 };
#define EMPTY T("U8", "[0]", "[0,0]")
    static const char eight[] = "0,0,0,0,0,0,0,0,";
    char deep[1024] = "'%x':{'dtype':'U8','data_offsets':[0,0],'shape':[", four[256], *name = malloc(70000);
    memcpy(four, deep, strlen(deep) + 1);
    strcat(four, "0,0,0,0]},");
    for (int i = 0; i < 8; i++) strcat(deep, eight);
    strcpy(deep + strlen(deep) - 1, "]},");
    strcpy(name, "'%x");
    memset(name + 3, 'n', 65536);
    strcpy(name + 3 + 65536, "':" EMPTY ",");
    struct {
        const char *what, *begin, *item, *end;
        int code;
        const char *says;
    } bombs[] = {
        {"metadata", "{'__metadata__':{", "'%x':'',", "'z':''}}", 0, ""},
        {"one key of metadata again and again", "{'__metadata__':{", "'':'',", "'z':''}}", FORMAT, "pairs"},
        {"tensors", "{", "'%x':" EMPTY ",", "'z':" EMPTY "}", 0, ""},
        {"scalars", "{", "'%x':" T("U8", "[]", "[0,1]") ",", "'z':" EMPTY "}", FORMAT, "do not lie"},
        {"tensors of four dimensions", "{", four, "'z':" EMPTY "}", 0, ""},
        {"tensors of 64 dimensions", "{", deep, "'z':" EMPTY "}", FORMAT, "dimensions"},
        {"long names", "{", name, "'z':" EMPTY "}", 0, ""},
        {"a malformed end", "{", "'%x':" EMPTY ",", "'z':" EMPTY "]", FORMAT, "byte"},
    };
    for (size_t i = 0; i < COUNT(bombs); i++) {
        double peak = measure_peak(BYTES, bombs[i].begin, bombs[i].item, bombs[i].end, bombs[i].code, bombs[i].says);
        CHECK(peak < 2.2, "%s: %.2f times the header", bombs[i].what, peak);
    }
    free(name);
#undef EMPTY
}

/* The writer refuses what the reader would refuse. */
static void test_writer_limits(void)
{
    halfstep_safetensors_writer *writer;
    char name[32];
    uint64_t shape[64] = {0};
    int code = halfstep_create_safetensors_writer(&writer);
    unsigned count = 0;
    for (; !code && count < 20000; count++) {
        snprintf(name, sizeof name, "%u", count);
        code = halfstep_declare_safetensor(writer, name, "U8", 64, shape, NULL, TEXT);
    }
    CHECK(code == RANGE && count == 17477 && strstr(message, "dimensions"), "%u: %d %s", count, code, message);
    WORKS(halfstep_write_safetensors(writer, at("deep"), NULL, NULL, TEXT));
    halfstep_destroy_safetensors_writer(writer);
    halfstep_safetensors *file;
    CHECK(!halfstep_open_safetensors(&file, at("deep"), TEXT) && halfstep_safetensor_count(file) == 17476, "%s",
          message);
    halfstep_close_safetensors(file);
}

static void test_changed_file(void)
{
    halfstep_safetensors *file;
    char data[64] = {0}, read[64];
    size_t bytes;
    const char *header = "{'a':" T("U8", "[32]", "[0,32]") "}";
    open_made(header, strlen(header), 32);
    WORKS(halfstep_open_safetensors(&file, at("case"), TEXT));
    CHECK(!halfstep_read_safetensor(file, 0, 0, read, 32, TEXT) && !memcmp(read, data, 32), "%s", message);
    WORKS(halfstep_read_safetensor(file, 0, 32, NULL, 0, TEXT));                     /* nothing from the end */
    FAILS(halfstep_read_safetensor(file, 0, 0, read, 33, TEXT), RANGE, "");          /* one byte too many */
    FAILS(halfstep_read_safetensor(file, 0, 33, read, 0, TEXT), RANGE, "");          /* beyond the end */
    FAILS(halfstep_read_safetensor(file, 0, 16, read, UINT64_MAX, TEXT), RANGE, ""); /* overflow */
    FAILS(halfstep_read_safetensor(file, 1, 0, read, 1, TEXT), ARGUMENT, "");        /* no such tensor */
    /* A file that shrinks after its size was read. */
    reads = 0, read_ends_at = 1;
    FAILS(halfstep_read_safetensor(file, 0, 3, read, 1, TEXT), FORMAT, "case ends at byte");
    SAYS("while it is being read"); /* a file that ends */
    read_ends_at = 0;
    char *whole = get_file(at("case"), &bytes);
    put_file(at("case"), whole, bytes - 1);
    FAILS(halfstep_read_safetensor(file, 0, 0, read, 1, TEXT), FORMAT, "changed"); /* a file that shrank */
    free(whole);
    halfstep_close_safetensors(file);
}

/* ---- The writer -------------------------------------------------------------------------------------------------- */

static int fill_pattern(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    uint64_t *expected = context; /* the tensor and offset that must come next, or tensor + 1 and 0 */
    unsigned char *out = data;
    if (offset && (expected[0] != tensor || expected[1] != offset)) return ORDER;
    for (uint64_t i = 0; i < bytes; i++) out[i] = (unsigned char)((offset + i) * 31 + tensor * 7 + (offset + i) / 251);
    expected[0] = tensor;
    expected[1] = offset + bytes;
    return 0;
}

static void test_round_trip(void)
{
    halfstep_safetensors_writer *writer;
    halfstep_safetensors *file;
    uint64_t progress[2] = {0, 0}, index, big[2] = {3, 1048577}, three = 3;
    CHECK(!halfstep_create_safetensors_writer(&writer), "create");
    size_t declared = 0, dtype_count = 0;
    /* Declares every dtype as a vector of 24, a matrix with an empty side, and (of whole bytes) a scalar. */
    for (uint32_t i = 0; halfstep_safetensors_dtype(i); i++) {
        const char *dtype = halfstep_safetensors_dtype(i);
        uint64_t vector = 24, matrix[2] = {5, 0};
        char name[64];
        dtype_count++;
        snprintf(name, sizeof name, "%s \"vector\" \\ \xc3\xa9\x7f\n", dtype);
        WORKS(halfstep_declare_safetensor(writer, name, dtype, 1, &vector, NULL, TEXT));
        snprintf(name, sizeof name, "%s.empty", dtype);
        WORKS(halfstep_declare_safetensor(writer, name, dtype, 2, matrix, NULL, TEXT));
        declared += 2;
        if (halfstep_safetensors_dtype_bits(dtype) < 8) continue;
        snprintf(name, sizeof name, "%s.scalar", dtype);
        WORKS(halfstep_declare_safetensor(writer, name, dtype, 0, NULL, NULL, TEXT));
        declared++;
    }
    EQUAL(dtype_count, 22);
    static float direct[3] = {1.5f, -2.0f, 0.25f};
    WORKS(halfstep_declare_safetensor(writer, "", "F32", 1, &three, direct, TEXT));
    WORKS(halfstep_declare_safetensor(writer, "big", "U8", 2, big, NULL, TEXT));
    declared += 2;
    WORKS(halfstep_declare_safetensors_metadata(writer, "z", "1", TEXT));
    WORKS(halfstep_declare_safetensors_metadata(writer, "a", "\"quoted\"\n", TEXT));
    WORKS(halfstep_declare_safetensors_metadata(writer, "z", "2", TEXT));
    WORKS(halfstep_write_safetensors(writer, at("round"), fill_pattern, progress, TEXT));
    ENTRIES(scratch, ".halfstep", 0); /* no temporary file is left */
    /* Written again, over itself: the same bytes. */
    size_t first_bytes, second_bytes;
    char *first = get_file(at("round"), &first_bytes);
    WORKS(halfstep_write_safetensors(writer, at("round"), fill_pattern, progress, TEXT));
    char *second = get_file(at("round"), &second_bytes);
    CHECK(first_bytes == second_bytes && !memcmp(first, second, first_bytes), "the second writing differs");
    CHECK(first[0] % 8 == 0 &&
              !memcmp(first + 8, "{\"__metadata__\":{\"a\":\"\\\"quoted\\\"\\u000a\",\"z\":\"2\"},", 45),
          "metadata is not first and sorted: %.60s", first + 8);
    free(first);
    free(second);
    halfstep_destroy_safetensors_writer(writer);

    WORKS(halfstep_open_safetensors(&file, at("round"), TEXT));
    if (!file) return;
    EQUAL(halfstep_safetensor_count(file), declared);
    halfstep_safetensor_info info = {.struct_size = sizeof info}, last = info;
    for (uint64_t i = 0; i < declared; i++) {
        CHECK(!halfstep_get_safetensor_info(file, i, &info), "info %llu", (unsigned long long)i);
        uint32_t align = info.dtype_bits < 8 ? 1 : info.dtype_bits / 8;
        CHECK(info.begin % align == 0, "%s begins at %llu", info.name, (unsigned long long)info.begin);
        if (i) {
            uint32_t before = last.dtype_bits < 8 ? 1 : last.dtype_bits / 8;
            CHECK(before > align || (before == align && strcmp(last.name, info.name) < 0), "%s before %s", last.name,
                  info.name);
        }
        CHECK(!halfstep_safetensor_find(file, info.name, &index) && index == i, "find %s", info.name);
        last = info;
        unsigned char *data = malloc(info.bytes + 1), *part = malloc(info.bytes + 1);
        WORKS(halfstep_read_safetensor(file, i, 0, data, info.bytes, TEXT));
        if (info.bytes > 2) {
            WORKS(halfstep_read_safetensor(file, i, 1, part, info.bytes - 2, TEXT));
            CHECK(!memcmp(data + 1, part, info.bytes - 2), "%s: a part differs", info.name);
        }
        if (!*info.name) {
            CHECK(info.bytes == sizeof direct && !memcmp(data, direct, sizeof direct), "direct data");
        } else if (info.bytes) {
            /* The first byte gives the declaration number. The rest must continue its pattern. */
            int wrong = 0;
            for (uint64_t b = 0; b < info.bytes; b++) wrong += data[b] != (unsigned char)(data[0] + b * 31 + b / 251);
            CHECK(!wrong, "%s: %d bytes differ", info.name, wrong);
        }
        free(data);
        free(part);
    }
    CHECK(halfstep_safetensor_find(file, "absent", &index) == NAME, "find absent");
    CHECK(halfstep_safetensors_metadata_count(file) == 2, "metadata");
    CHECK(!strcmp(halfstep_safetensors_metadata_find(file, "a"), "\"quoted\"\n"), "metadata a");
    CHECK(!halfstep_safetensors_metadata_find(file, "b"), "metadata b");
    CHECK(halfstep_get_safetensor_info(file, declared, &info) == ARGUMENT, "info past the end");
    info.struct_size = 3;
    CHECK(halfstep_get_safetensor_info(file, 0, &info) == ARGUMENT, "struct size");
    halfstep_close_safetensors(file);
}

static int fill_failure(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    (void)context, (void)tensor, (void)data, (void)bytes;
    return offset ? MISMATCH : (memset(data, 0, bytes), 0);
}

static void test_writer_refusals(void)
{
    halfstep_safetensors_writer *writer;
    uint64_t shape[65] = {2, 2}, huge[2] = {UINT64_MAX / 2, 3}, three = 3, million = 3000000;
    uint64_t progress[2] = {0, 0};
    CHECK(!halfstep_create_safetensors_writer(&writer), "create");
#define DECLARE(name, dtype, ndim, sizes) halfstep_declare_safetensor(writer, name, dtype, ndim, sizes, NULL, TEXT)
    CHECK(DECLARE("__metadata__", "F32", 2, shape) == NAME, "__metadata__");
    CHECK(DECLARE("a\xff", "F32", 2, shape) == NAME, "not UTF-8");
    CHECK(DECLARE("a\xed\xa0\x80", "F32", 2, shape) == NAME, "a surrogate");
    CHECK(DECLARE("a", "f32", 2, shape) == NAME, "dtype");
    CHECK(DECLARE("a", "F32", 65, shape) == SHAPE, "65 dimensions");
    CHECK(DECLARE("a", "F32", 2, huge) == SHAPE, "overflow");
    CHECK(DECLARE("a", "F4", 1, &three) == SHAPE, "12 bits");
    CHECK(DECLARE(NULL, "F32", 2, shape) == ARGUMENT, "NULL name");
    CHECK(DECLARE("a", "F32", 2, NULL) == ARGUMENT, "NULL shape");
    FAILS(halfstep_declare_safetensors_metadata(writer, "k", "\xfe", TEXT), NAME, ""); /* metadata UTF-8 */
    put_file(at("kept"), "old", 3);
    CHECK(!DECLARE("a", "U8", 1, &million), "%s", message);
    FAILS(halfstep_write_safetensors(writer, at("kept"), NULL, NULL, TEXT), ARGUMENT, "\"a\"");         /* no data */
    FAILS(halfstep_write_safetensors(writer, at("kept"), fill_failure, NULL, TEXT), MISMATCH, "\"a\""); /* fill */
    CHECK(!DECLARE("a", "U8", 1, &three), "%s", message);
    FAILS(halfstep_write_safetensors(writer, at("kept"), fill_pattern, progress, TEXT), DUPLICATE, "\"a\"");
    CHECK(holds(at("kept"), "old"), "the old file was touched");
    ENTRIES(scratch, ".halfstep", 0); /* no temporary file is left */
    halfstep_destroy_safetensors_writer(writer);
}

static void test_write_file(void)
{
    struct stat status;
    const char *text = at("text"), *link = at("link"), *nothing = at("nothing");
    WORKS(put_text(text, "one"));
    chmod(text, 0640);
    make_link("text", link);
    WORKS(put_text(link, "two two"));
    CHECK(holds(text, "two two"), "the link's target was not written");
    CHECK(!stat(text, &status) && (status.st_mode & 0777) == 0640, "mode %o", status.st_mode & 0777);
    CHECK(!lstat(link, &status) && S_ISLNK(status.st_mode), "the link was replaced");
    WORKS(halfstep_write_file_atomic(nothing, NULL, 0, TEXT));
    CHECK(!stat(nothing, &status) && !status.st_size, "an empty file");
    WORKS(put_text("/dev/null", "x"));
    CHECK(!stat("/dev/null", &status) && S_ISCHR(status.st_mode), "/dev/null was replaced");
    FAILS(put_text("/dev/full", "x"), IO, "/dev/full");
    SAYS("No space");
    FAILS(put_text(at("no/such/dir"), "x"), IO, "no/such/dir");
    FAILS(put_text(scratch, "x"), IO, "");
    /* At every failing call the old contents stay, and no temporary file is left. A mode is not worth a failure. */
    long call = 0, polish = 0;
    for (;; call++) {
        set_fault(MODE_ONCE, ENOSPC, call);
        int code = put_text(text, "three");
        fault.mode = MODE_NONE;
        if (!fault.failures) break;
        int is_new = holds(text, "three");
        polish += !code && is_new;
        CHECK(!code || (code == IO && strstr(message, "text")), "call %ld: %d %s", call, code, message);
        CHECK(code && is_new ? strstr(message, "in place") != NULL : (code == 0) == is_new, "call %ld: %s", call,
              message);
        CHECK(is_new || holds(text, "two two"), "call %ld: neither old nor new", call);
        CHECK(count_entries(scratch, ".halfstep") == 0, "call %ld left a temporary file", call);
        if (is_new) put_text(text, "two two");
    }
    CHECK(call >= 5 && polish == 1, "%ld calls, of which %ld may fail", call, polish);
    /* The last call syncs the directory. Some network file systems cannot do that and say so, which is no failure. */
    static const int cannot[] = {EINVAL, ENOTSUP};
    for (int i = 0; i < 2; i++) {
        int tolerated = 0; /* the mode, and twice where the sync was interrupted before */
        for (call = 0;; call++) {
            WORKS(put_text(text, "four"));
            set_fault(MODE_ONCE, cannot[i], call);
            int code = put_text(text, "three"), is_new = holds(text, "three");
            fault.mode = MODE_NONE;
            if (!fault.failures) break;
            tolerated += !code && is_new;
            CHECK((code == 0) == is_new, "call %ld: %d: %s", call, code, message);
        }
        CHECK(tolerated == 2 || tolerated == 3, "%d calls may fail with %s", tolerated, strerror(cannot[i]));
    }
    WORKS(put_text(text, "four"));
    /* A disk that takes no more bytes and does not report a failure. */
    writes = 0, write_stops_at = 1;
    FAILS(put_text(text, "fifth"), IO, "cannot write ");
    SAYS("/text: ");
    write_stops_at = 0;
    CHECK(holds(text, "four") && count_entries(scratch, ".halfstep") == 0, "the old file was touched");
}

/* Links are followed to a file that is there, and to one that is not there yet. */
static void test_links(void)
{
    struct stat status;
    if (mkdir(at("far"), 0777)) FAIL("far: %s", strerror(errno));
    make_link("far/there", at("near"));
    make_link("near", at("nearer"));
    make_link(at("far/absolute"), at("to absolute"));
    make_link("no such/there", at("astray"));
    make_link("loop", at("loop"));
    for (int i = 0; i < 2; i++) {
        WORKS(put_text(at("nearer"), i ? "two" : "one"));
        CHECK(holds(at("far/there"), i ? "two" : "one"), "time %d: not at the end of the links", i);
    }
    WORKS(put_text(at("to absolute"), "three"));
    CHECK(holds(at("far/absolute"), "three"), "an absolute link");
    static const char *const links[] = {"near", "nearer", "to absolute"};
    for (size_t i = 0; i < COUNT(links); i++)
        CHECK(!lstat(at(links[i]), &status) && S_ISLNK(status.st_mode), "%s was replaced", links[i]);
    FAILS(put_text(at("astray"), "x"), IO, "astray: it is a link to no such/there, which does not exist");
    FAILS(put_text(at("loop"), "x"), IO, "loop");
    halfstep_safetensors *file;
    FAILS(halfstep_open_safetensors(&file, at("astray"), TEXT), IO, "it is a link to no such/there");
    CHECK(count_entries(scratch, ".halfstep") == 0 && count_entries(at("far"), ".halfstep") == 0, "a temporary file");
}

/* File systems refuse what only polishes: a mode, a sync of a folder, a folder that is there. Work goes on, and no file
 * gets a right that the one before did not give. */
static void test_polish(void)
{
    static const unsigned modes[] = {0600, 0640, 0444, 0000, 0666};
    const mode_t mask = umask(022);
    struct stat status;
    const char *path = at("modes");
    WORKS(put_text(path, "old"));
    modes_are_fixed = 1;
    for (size_t i = 0; i < COUNT(modes); i++) {
        chmod(path, modes[i]);
        WORKS(put_text(path, "new"));
        CHECK(!stat(path, &status) && !(status.st_mode & 0777 & ~(modes[i] | S_IWUSR)), "mode %o became %o", modes[i],
              status.st_mode & 0777);
    }
    modes_are_fixed = 0;
    for (size_t i = 0; i < COUNT(modes); i++) {
        chmod(path, modes[i]);
        WORKS(put_text(path, "newer"));
        CHECK(!stat(path, &status) && (status.st_mode & 0777) == modes[i], "mode %o became %o", modes[i],
              status.st_mode & 0777);
    }
    no_folder_opens = 1;
    WORKS(put_text(path, "three"));
    no_folder_opens = 0;
    umask(mask);
    static const int answers[] = {EACCES, EROFS, EPERM};
    for (size_t i = 0; i < COUNT(answers); i++) {
        int created = 1;
        char text[512];
        hstep_error error = hstep_make_error(text, sizeof text);
        mkdir_says = answers[i];
        CHECK(!hstep_make_directory(scratch, &created, &error) && !created, "%s: %s", strerror(answers[i]), text);
        CHECK(hstep_make_directory(path, &created, &error) && strstr(text, strerror(answers[i])), "a file: %s", text);
    }
    mkdir_says = 0;
    char text[512];
    hstep_error error = hstep_make_error(text, sizeof text);
    int created = 1;
    CHECK(hstep_make_directory(path, &created, &error) && !created && strstr(text, "Not a directory"), "%s", text);
}

static void test_checksum(void)
{
    unsigned char data[300];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)next_random();
    for (size_t n = 0; n <= sizeof data; n++) {
        uint64_t slow = ~UINT64_C(0);
        for (size_t i = 0; i < n; i++) {
            slow ^= data[i];
            for (int bit = 0; bit < 8; bit++) slow = slow >> 1 ^ (slow & 1 ? UINT64_C(0xC96C5795D7870F42) : 0);
        }
        CHECK(hstep_crc64(0, data, n) == ~slow, "%zu bytes", n);
        size_t cut = n ? next_random() % (n + 1) : 0;
        CHECK(hstep_crc64(hstep_crc64(0, data, cut), data + cut, n - cut) == ~slow, "%zu bytes, cut at %zu", n, cut);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_disk();

    TEST("reader: conformance list") test_reader_cases();
    TEST("reader: lengths and kinds of file") test_reader_lengths();
    TEST("reader: limits") test_reader_limits();
    TEST("reader: memory in proportion to the header") test_reader_memory();
    TEST("writer: limits of the reader") test_writer_limits();
    TEST("reader: a file that changes") test_changed_file();
    TEST("writer: every dtype, round trip, order, alignment") test_round_trip();
    TEST("writer: refusals") test_writer_refusals();
    TEST("atomic file: contents, links, devices, every call failing") test_write_file();
    TEST("atomic file: links to what is there and to what is not there yet") test_links();
    TEST("atomic file: modes, syncs and folders that a file system refuses") test_polish();
    TEST("checksum") test_checksum();
    return test_done();
}
