/* Tests halfstep_io: what the safetensors reader refuses and costs, what the writer promises, and checkpoints beside
 * foreign files. System calls and allocations fail, and losses of power are simulated. The library's sources are
 * compiled into this file, with the calls that can fail replaced, so that every one of them fails here once. That is
 * why it is over 500 lines. */
#define HALFSTEP_ADVANCED
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "halfstep_io.h"
#include "messages.h"
#include "scratch.h"

/* ---- A disk that fails ------------------------------------------------------------------------------------------- */

enum { MODE_NONE, MODE_ONCE, MODE_DEAD };

/* MODE_ONCE: call number fault_at fails. MODE_DEAD: it and all later ones fail, as if the process had been killed. */
static struct {
    int mode, number;
    long at, calls, failures;
} fault;
/* A directory on a disk that is gone. Every call on it or below it fails. Empty: none. */
static char gone[512];

/* What a loss of power may undo: contents not yet synced, and names not yet synced in their directory. */
typedef struct unsynced_name {
    ino_t directory;
    char from[512], to[512]; /* a rename, or (from empty) a creation of the name `to` */
    char backup[512];        /* a link to what the rename replaced */
} unsynced_name;
static struct {
    int on;
    ino_t dirty[256];
    size_t dirty_count;
    unsynced_name names[256];
    size_t name_count;
    char backups[256];
    unsigned backup_number;
} power;

static int refuse(void)
{
    long call = fault.calls++;
    if (fault.mode == MODE_NONE || call < fault.at || (fault.mode == MODE_ONCE && call > fault.at)) return 0;
    fault.failures++;
    errno = fault.number;
    return 1;
}

static int is_gone(const char *path)
{
    size_t length = strlen(gone);
    if (!length || strncmp(path, gone, length) || (path[length] && path[length] != '/')) return 0;
    errno = EIO;
    return 1;
}

static ino_t inode_of(const char *path)
{
    struct stat status;
    return stat(path, &status) ? 0 : status.st_ino;
}

static ino_t parent_inode(const char *path)
{
    char parent[512];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    return inode_of(slash ? parent : ".");
}

static void mark_dirty(int fd)
{
    struct stat status;
    if (!power.on || fstat(fd, &status)) return;
    for (size_t i = 0; i < power.dirty_count; i++)
        if (power.dirty[i] == status.st_ino) return;
    if (power.dirty_count < 256) power.dirty[power.dirty_count++] = status.st_ino;
}

static void mark_synced(int fd)
{
    struct stat status;
    if (!power.on || fstat(fd, &status)) return;
    size_t kept = 0;
    for (size_t i = 0; i < power.dirty_count; i++)
        if (power.dirty[i] != status.st_ino) power.dirty[kept++] = power.dirty[i];
    power.dirty_count = kept;
    kept = 0;
    for (size_t i = 0; i < power.name_count; i++)
        if (power.names[i].directory != status.st_ino) power.names[kept++] = power.names[i];
        else if (power.names[i].backup[0]) unlink(power.names[i].backup);
    power.name_count = kept;
}

static void note_name(const char *from, const char *to)
{
    if (!power.on || power.name_count == 256) return;
    unsynced_name *name = &power.names[power.name_count++];
    memset(name, 0, sizeof *name);
    name->directory = parent_inode(to);
    snprintf(name->from, sizeof name->from, "%s", from);
    snprintf(name->to, sizeof name->to, "%s", to);
    if (*from && !access(to, F_OK)) {
        snprintf(name->backup, sizeof name->backup, "%s/%u", power.backups, power.backup_number++);
        if (link(to, name->backup)) name->backup[0] = 0;
    }
}

/* The number of a write that takes nothing and says so, as no disk should; 0: none. */
static long writes, write_stops_at;

static ssize_t faulty_write(int fd, const void *data, size_t bytes)
{
    if (++writes == write_stops_at) return 0;
    if (refuse()) {
        /* A full disk takes a part first. */
        if (fault.mode == MODE_ONCE && bytes > 1 && write(fd, data, bytes / 2) < 0) return -1;
        errno = fault.number;
        return -1;
    }
    mark_dirty(fd);
    /* Writes in parts and is interrupted now and then, as the system may do. */
    static unsigned turn;
    if (++turn % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    return write(fd, data, turn % 3 == 1 && bytes > 3 ? bytes - 3 : bytes);
}

static int faulty_fsync(int fd)
{
    if (refuse()) return -1;
    static unsigned turn;
    if (++turn % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    mark_synced(fd);
    return fsync(fd);
}

/* Reading has a count of its own: 0, no read fails. */
static long reads, read_fails_at, read_ends_at;
static ssize_t faulty_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (++reads == read_ends_at) return 0;
    if (reads != read_fails_at) return pread(fd, data, bytes, offset);
    errno = EIO;
    return -1;
}

static int no_folder_opens; /* 1: folders may be written and not read */
static int faulty_open(const char *path, int flags, mode_t mode)
{
    if (is_gone(path)) return -1;
    if (no_folder_opens && flags & O_DIRECTORY) {
        errno = EACCES;
        return -1;
    }
    if (flags & O_CREAT) {
        if (refuse()) return -1;
        note_name("", path);
    }
    int fd = open(path, flags, mode);
    if (fd >= 0 && flags & O_CREAT) mark_dirty(fd);
    return fd;
}

static int faulty_rename(const char *from, const char *to)
{
    if (is_gone(from) || is_gone(to) || refuse()) return -1;
    note_name(from, to);
    return rename(from, to);
}

static int faulty_close(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    int result = close(fd);
    /* Closing a file that was only read cannot lose anything. */
    return (flags & O_ACCMODE) != O_RDONLY && refuse() ? -1 : result;
}

static int faulty_link(const char *from, const char *to) { return refuse() ? -1 : link(from, to); }
static int faulty_symlink(const char *from, const char *to) { return refuse() ? -1 : symlink(from, to); }
/* What a directory gets that is there already; 0: the system's own answer. */
static int mkdir_says;
static int faulty_mkdir(const char *path, mode_t mode)
{
    const int bad = refuse() ? -1 : mkdir(path, mode);
    if (bad && errno == EEXIST && mkdir_says) errno = mkdir_says;
    return bad;
}
static int faulty_unlink(const char *path) { return is_gone(path) || refuse() ? -1 : unlink(path); }
static int faulty_rmdir(const char *path) { return is_gone(path) || refuse() ? -1 : rmdir(path); }
static int faulty_stat(const char *path, struct stat *status) { return is_gone(path) ? -1 : stat(path, status); }
static int faulty_lstat(const char *path, struct stat *status) { return is_gone(path) ? -1 : lstat(path, status); }
static DIR *faulty_opendir(const char *path) { return is_gone(path) ? NULL : opendir(path); }
static int modes_are_fixed; /* 1: the file system refuses to change a mode */
static int faulty_fchmod(int fd, mode_t mode)
{
    if (refuse()) return -1;
    if (!modes_are_fixed) return fchmod(fd, mode);
    errno = EPERM;
    return -1;
}

#define pread(fd, data, bytes, offset) faulty_pread(fd, data, bytes, offset)
#define write(fd, data, bytes) faulty_write(fd, data, bytes)
#define fsync(fd) faulty_fsync(fd)
#define open(path, flags, mode) faulty_open(path, flags, mode)
#define rename(from, to) faulty_rename(from, to)
#define close(fd) faulty_close(fd)
#define link(from, to) faulty_link(from, to)
#define symlink(from, to) faulty_symlink(from, to)
#define mkdir(path, mode) faulty_mkdir(path, mode)
#define unlink(path) faulty_unlink(path)
#define rmdir(path) faulty_rmdir(path)
#define fchmod(fd, mode) faulty_fchmod(fd, mode)
#define stat(path, status) faulty_stat(path, status)
#define lstat(path, status) faulty_lstat(path, status)
#define opendir(path) faulty_opendir(path)
#include "faults/allocations.h"
#include "io/checkpoint/directory.c"
#include "io/checkpoint/open.c"
#include "io/checkpoint/save.c"
#include "io/files.c"
#include "io/json.c"
#include "io/numbers.c"
#include "io/safetensors.c"
#undef write
#undef fsync
#undef open
#undef rename
#undef close
#undef link
#undef symlink
#undef mkdir
#undef unlink
#undef rmdir
#undef fchmod
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef stat
#undef lstat
#undef opendir

/* ---- Scratch ----------------------------------------------------------------------------------------------------- */

/* Returns the path of a name in the scratch directory. The same name always gives the same pointer. */
static const char *at(const char *name)
{
    static struct {
        char name[64], path[512];
    } known[96];
    size_t i = 0;
    while (i < COUNT(known) && known[i].name[0] && strcmp(known[i].name, name)) i++;
    if (i == COUNT(known)) {
        printf("FAIL more than %zu names\n", COUNT(known));
        exit(1);
    }
    snprintf(known[i].name, sizeof known[i].name, "%s", name);
    snprintf(known[i].path, sizeof known[i].path, "%s/%s", scratch, name);
    return known[i].path;
}

static char *get_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    char *data = malloc(1 << 22);
    *bytes = file && data ? fread(data, 1, 1 << 22, file) : 0;
    if (file) fclose(file);
    return data;
}

/* Returns 1 if a file holds exactly this text. */
static int holds(const char *path, const char *text)
{
    size_t bytes;
    char *data = get_file(path, &bytes);
    int same = bytes == strlen(text) && !memcmp(data, text, bytes);
    free(data);
    return same;
}

static int put_text(const char *path, const char *text)
{
    return halfstep_write_file_atomic(path, text, strlen(text), TEXT);
}

static void make_link(const char *target, const char *path)
{
    if (symlink(target, path)) FAIL("symlink %s: %s", path, strerror(errno));
}

/* Chooses the call that fails, and counts calls and failures from 0. */
static void set_fault(int mode, int number, long call)
{
    fault.mode = mode;
    fault.number = number;
    fault.at = call;
    fault.calls = fault.failures = 0;
}

/* Checks how many entries of a folder begin with `prefix`. */
#define ENTRIES(dir, prefix, count) \
    CHECK(count_entries(dir, prefix) == (count), "%d entries %s*: %s", count_entries(dir, prefix), prefix, message)

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

/* ---- Checkpoints ------------------------------------------------------------------------------------------------- */

static uint64_t model_bytes(unsigned k) { return 40 + k % 7 * 100; }

/* Saves generation k, whose contents and sizes follow from k. */
static int save_with(const char *dir, unsigned k, halfstep_save_options options, int abandon)
{
    halfstep_checkpoint_save *save;
    halfstep_safetensors_writer *writer;
    char config[64], number[16];
    unsigned char bytes[1000];
    uint64_t size = model_bytes(k), two = 2;
    uint32_t pair[2] = {k, ~k};
    options.struct_size = sizeof options;
    options.step = k;
    memset(bytes, (int)(k & 255), sizeof bytes);
    snprintf(config, sizeof config, "{\"k\": %u}\n", k);
    snprintf(number, sizeof number, "%u", k);
    int code = halfstep_create_safetensors_writer(&writer);
    if (code) return code;
    code = halfstep_declare_safetensor(writer, "m", "U8", 1, &size, bytes, TEXT);
    if (!code) code = halfstep_declare_safetensor(writer, "pair", "U32", 1, &two, pair, TEXT);
    if (!code) code = halfstep_begin_checkpoint(&save, dir, &options, TEXT);
    if (code) {
        halfstep_destroy_safetensors_writer(writer);
        return code;
    }
    code = halfstep_save_safetensors(save, "model.safetensors", writer, NULL, NULL, TEXT);
    if (!code) code = halfstep_save_file(save, "config.json", config, strlen(config), TEXT);
    if (!code) code = halfstep_save_value(save, "k", number, TEXT);
    halfstep_destroy_safetensors_writer(writer);
    if (abandon) {
        halfstep_abandon_checkpoint(save);
        return code;
    }
    char first[1024];
    memcpy(first, message, sizeof first);
    int result = halfstep_commit_checkpoint(save, TEXT);
    if (code && (result != code || strcmp(first, message)))
        FAIL("commit gave %d \"%s\" after %d \"%s\"", result, message, code, first);
    return result;
}

static int save_keeping(const char *dir, unsigned k, uint32_t keep)
{
    return save_with(dir, k, (halfstep_save_options){.keep = keep}, 0);
}

static int save_abandoned(const char *dir, unsigned k) { return save_with(dir, k, (halfstep_save_options){0}, 1); }
static int save_plain(const char *dir, unsigned k) { return save_keeping(dir, k, 0); }

/* Opens dir and compares every byte of its generation. Returns its number, -1 if it does not open, -2 if it is none. */
static long opened_with(const char *dir, const halfstep_open_options *options)
{
    halfstep_checkpoint *checkpoint;
    halfstep_safetensors *file;
    unsigned char bytes[1000];
    uint32_t pair[2];
    uint64_t index;
    if (halfstep_open_checkpoint(&checkpoint, dir, options, TEXT)) return -1;
    SIZED(halfstep_checkpoint_info, info);
    halfstep_get_checkpoint_info(checkpoint, &info);
    long k = strtol(halfstep_checkpoint_value(checkpoint, "k"), NULL, 10),
         good = (uint64_t)k == info.step && info.files == 2;
    char opened[1024];
    memcpy(opened, message, sizeof opened);
    if (!halfstep_open_safetensors(&file, halfstep_checkpoint_path(checkpoint, "model.safetensors"), TEXT)) {
        good = good && !halfstep_safetensor_find(file, "m", &index) &&
               !halfstep_read_safetensor(file, index, 0, bytes, model_bytes((unsigned)k), TEXT);
        for (uint64_t i = 0; good && i < model_bytes((unsigned)k); i++) good = bytes[i] == (k & 255);
        good = good && !halfstep_safetensor_find(file, "pair", &index) &&
               !halfstep_read_safetensor(file, index, 0, pair, 8, TEXT) && pair[0] == (uint32_t)k &&
               pair[1] == ~(uint32_t)k;
        halfstep_close_safetensors(file);
    } else {
        good = 0;
    }
    halfstep_close_checkpoint(checkpoint);
    memcpy(message, opened, sizeof opened);
    return good ? k : -2;
}

static long opened(const char *dir) { return opened_with(dir, NULL); }

static long opened_or_fallback(const char *dir)
{
    return opened_with(dir, &(halfstep_open_options){.struct_size = sizeof(halfstep_open_options), .fallback = 1});
}

/* Begins a save with the usual options. */
static halfstep_checkpoint_save *begin(const char *dir)
{
    halfstep_checkpoint_save *save;
    WORKS(halfstep_begin_checkpoint(&save, dir, NULL, TEXT));
    return save;
}

/* Opens the current checkpoint. */
static halfstep_checkpoint *open_current(const char *dir)
{
    halfstep_checkpoint *checkpoint;
    WORKS(halfstep_open_checkpoint(&checkpoint, dir, NULL, TEXT));
    return checkpoint;
}

/* Returns the code of opening a checkpoint that is damaged or absent. */
static int open_code(const char *dir)
{
    halfstep_checkpoint *checkpoint;
    int code = halfstep_open_checkpoint(&checkpoint, dir, NULL, TEXT);
    CHECK((code == 0) == (checkpoint != NULL), "%s: code and handle disagree", dir);
    halfstep_close_checkpoint(checkpoint);
    return code;
}

/* Checks which generation opens. */
#define OPENS(dir, number) CHECK(opened(dir) == (number), "%s", message)

static void test_checkpoint_basics(void)
{
    const char *dir = at("basics");
    CHECK(opened(dir) == -1 && open_code(dir) == NAME, "absent: %s", message);
    WORKS(save_plain(dir, 3));
    CHECK(!message[0], "%s", message);
    OPENS(dir, 3);
    OPENS(at("basics/checkpoint-3"), 3); /* by its own path */
    WORKS(save_plain(dir, 9));
    OPENS(dir, 9);
    ENTRIES(dir, "checkpoint-", 1);
    /* The usual places. */
    CHECK(holds(at("basics/config.json"), "{\"k\": 9}\n"), "config.json");
    CHECK(hstep_same_file(at("basics/model.safetensors"), at("basics/checkpoint-9/model.safetensors")), "model link");
    /* The same step again, a smaller step, and several kept. */
    WORKS(save_keeping(dir, 9, 3));
    OPENS(dir, 9);
    CHECK(!access(at("basics/checkpoint-9-2/config.json"), F_OK), "the second checkpoint of step 9");
    WORKS(save_keeping(dir, 4, 3));
    OPENS(dir, 4);
    WORKS(save_keeping(dir, 9, 3));
    ENTRIES(dir, "checkpoint-", 3);
    CHECK(access(at("basics/checkpoint-9"), F_OK) && !access(at("basics/checkpoint-9-3/config.json"), F_OK),
          "the oldest is gone");
    /* A directory of another program stays as it is. */
    if (mkdir(at("basics/checkpoint-1"), 0777)) FAIL("mkdir");
    put_file(at("basics/checkpoint-1/pytorch_model.bin"), "x", 1);
    WORKS(save_with(dir, 1, (halfstep_save_options){.prune_if = 1, .newest = 5}, 0));
    OPENS(dir, 1);
    CHECK(!access(at("basics/checkpoint-1/pytorch_model.bin"), F_OK), "another program's checkpoint was touched");
    CHECK(count_entries(dir, "checkpoint-") == 2 && !access(at("basics/checkpoint-1-2/config.json"), F_OK), "names");
    WORKS(save_abandoned(dir, 2));
    OPENS(dir, 1);
    ENTRIES(dir, ".halfstep", 0); /* an abandoned save leaves nothing */
    FAILS(save_plain(at("basics/checkpoint-1-2"), 2), ARGUMENT, "itself a checkpoint"); /* into a checkpoint */
    FAILS(save_plain(at("no/parent"), 2), IO, "no/parent");
    FAILS(save_plain(at("basics/config.json"), 2), IO, ""); /* into a file */
    WORKS(save_abandoned(at("fresh"), 2));
    CHECK(access(at("fresh"), F_OK), "an abandoned first save left its directory");
}

/* Saves one file of this text. */
static void save_text(const char *dir, const char *text)
{
    halfstep_checkpoint_save *save = begin(dir);
    WORKS(halfstep_save_file(save, "b.txt", text, strlen(text), TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
}

static void test_checkpoint_files(void)
{
    halfstep_checkpoint_save *save;
    const char *dir = at("files");
    SIZED(halfstep_checkpoint_file, file);
    const char *key, *value;
    static const char *const bad[] = {"",        ".", "..", ".x", "a/b", "../a", "a b", "manifest.json", "checkpoint-1",
                                      "\xc3\xa9"};
    for (size_t i = 0; i < COUNT(bad); i++) {
        save = begin(dir);
        CHECK(halfstep_save_file(save, bad[i], "x", 1, TEXT) == NAME, "the name \"%s\"", bad[i]);
        halfstep_abandon_checkpoint(save);
    }
    save = begin(dir);
    WORKS(halfstep_save_file(save, "b.txt", "123456789", 9, TEXT));
    WORKS(halfstep_save_file(save, "a.txt", NULL, 0, TEXT));
    WORKS(halfstep_save_value(save, "z", "1", TEXT));
    WORKS(halfstep_save_value(save, "a\n", "\"", TEXT));
    WORKS(halfstep_save_value(save, "z", "2", TEXT));
    halfstep_checkpoint_save *second;
    CHECK(halfstep_begin_checkpoint(&second, dir, NULL, TEXT) == IO && !second && strstr(message, "another process"),
          "two saves at once: %s", message);
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    halfstep_checkpoint *checkpoint = open_current(dir);
    SIZED(halfstep_checkpoint_info, info);
    CHECK(!halfstep_get_checkpoint_info(checkpoint, &info) && info.files == 2 && info.values == 2 &&
              info.sequence == 1 && info.step == 0 && !info.fell_back,
          "info");
    CHECK(!halfstep_get_checkpoint_file(checkpoint, 0, &file) && !strcmp(file.name, "a.txt") && !file.bytes &&
              !file.crc64,
          "a.txt");
    CHECK(!halfstep_get_checkpoint_file(checkpoint, 1, &file) && file.bytes == 9 &&
              file.crc64 == UINT64_C(0x995dc9bbdf1939fa),
          "the published check value of CRC-64/XZ: %llx", (unsigned long long)file.crc64);
    CHECK(!halfstep_get_checkpoint_value(checkpoint, 0, &key, &value) && !strcmp(key, "a\n") && !strcmp(value, "\""),
          "value");
    CHECK(!strcmp(halfstep_checkpoint_value(checkpoint, "z"), "2") && !halfstep_checkpoint_value(checkpoint, "y"),
          "values");
    CHECK(!halfstep_checkpoint_path(checkpoint, "c.txt"), "path of an absent file");

    /* A checkpoint that is being read survives saves. The first save after its end removes it. */
    save_text(dir, "new");
    CHECK(!access(halfstep_checkpoint_path(checkpoint, "b.txt"), R_OK), "removed from under its reader");
    halfstep_close_checkpoint(checkpoint);
    ENTRIES(dir, "checkpoint-", 2);
    save_text(dir, "newer");
    ENTRIES(dir, "checkpoint-", 1);
    CHECK(access(at("files/a.txt"), F_OK) && !access(at("files/b.txt"), F_OK), "a link to a file that is no more");
    /* Leftovers of a killed save. */
    if (mkdir(at("files/.halfstep-tmp-1-0"), 0777)) FAIL("mkdir");
    put_file(at("files/.halfstep-tmp-1-0/.halfstep-part-model.safetensors"), "x", 1);
    put_file(at("files/.halfstep-tmp-1-0/.halfstep-part-manifest.json"), "{", 1);
    put_file(at("files/.halfstep-tmp-1-1"), "x", 1);
    halfstep_abandon_checkpoint(begin(dir));
    ENTRIES(dir, ".halfstep", 0);
}

/* Makes files that somebody keeps inside a checkpoint directory. has_foreign() tells if they are still there, whole. */
static void put_foreign(const char *path)
{
    mkdir(path, 0777);
    put_file(path_in(path, "thesis.tex"), "years of work", 13);
    mkdir(path_in(path, "figures"), 0777);
}

static int has_foreign(const char *path)
{
    return holds(path_in(path, "thesis.tex"), "years of work") && !access(path_in(path, "figures"), F_OK);
}

/* Checks that a save of generation k succeeded, that it is current, and that the note says `says` (NULL: there is
 * none). */
static void check_saved(const char *dir, unsigned k, int code, const char *says, const char *what)
{
    CHECK(!code, "%s: the save failed: %d %s", what, code, message);
    CHECK(says ? !strncmp(message, "note: the checkpoint is saved, but ", 35) && strstr(message, says) : !message[0],
          "%s: the note is \"%s\"", what, message);
    CHECK(opened(dir) == (long)k, "%s: %s", what, message);
}

static void save_beside(const char *dir, unsigned k, const char *says, const char *what)
{
    check_saved(dir, k, save_plain(dir, k), says, what);
}

/* Checks that a generation kept from pruning still opens by its own path, to the last byte. */
static void check_kept(const char *path, long k, const char *what)
{
    CHECK(opened(path) == k, "%s: %s is no longer whole: %s", what, path, message);
}

/* Saves in another process. This one learns of it only by opening the directory. */
static void save_in_another(const char *dir, unsigned k)
{
    fflush(stdout);
    const pid_t child = fork();
    if (!child) _exit(save_plain(dir, k) != 0);
    const int status = test_child_status(child);
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "the other process: status %x", status);
}

/* A save removes what its process knows, by saving or opening it, and nothing with a higher step. */
static void test_removed(void)
{
    const char *dir = at("removed");
    char stays[64], path[600];
    const struct {
        enum { HERE, ELSEWHERE, TOLD, OPEN } how;
        unsigned k;
        int left;       /* checkpoints in the directory afterwards */
        unsigned stays; /* the newest of those that a note names, or 0 */
    } saves[] = {{HERE, 10, 1, 0},  {HERE, 20, 1, 0},  {ELSEWHERE, 30, 1, 0}, {HERE, 40, 2, 30},
                 {HERE, 50, 2, 30}, {TOLD, 60, 1, 0},  {ELSEWHERE, 70, 1, 0}, {OPEN, 70, 1, 0},
                 {HERE, 80, 1, 0},  {HERE, 15, 2, 80}, {HERE, 16, 2, 80},     {HERE, 81, 1, 0},
                 {HERE, 17, 2, 81}, {TOLD, 18, 1, 0},  {ELSEWHERE, 90, 1, 0}, {HERE, 100, 2, 90}};
    uint64_t sequence = 0;
    remove_tree(dir);
    for (size_t i = 0; i < COUNT(saves); i++) {
        const unsigned k = saves[i].k;
        message[0] = 0;
        if (saves[i].how == OPEN) OPENS(dir, k);
        else sequence++;
        if (saves[i].how == HERE) WORKS(save_plain(dir, k));
        if (saves[i].how == ELSEWHERE) save_in_another(dir, k);
        if (saves[i].how == TOLD)
            WORKS(save_with(dir, k, (halfstep_save_options){.prune_if = 1, .newest = sequence - 1}, 0));
        snprintf(stays, sizeof stays, "1 older checkpoint stays there, such as checkpoint-%u,", saves[i].stays);
        CHECK(saves[i].stays ? strstr(message, stays) != NULL : !message[0], "save %zu: the note is \"%s\"", i,
              message);
        ENTRIES(dir, "checkpoint-", saves[i].left);
        snprintf(path, sizeof path, "%s/checkpoint-%u/config.json", dir, saves[i].stays);
        CHECK(!saves[i].stays || !access(path, F_OK), "save %zu: checkpoint-%u is gone", i, saves[i].stays);
    }
    OPENS(dir, 100);
    WORKS(save_with(dir, 110, (halfstep_save_options){.prune_if = 1, .newest = sequence}, 0));
    ENTRIES(dir, "checkpoint-", 1);
    /* A process remembers the 256 directories that it used last. In one that it has forgotten, it removes nothing. */
    mkdir(at("many"), 0777);
    for (int i = 0; i < 516; i++) {
        static const halfstep_save_options quick = {.struct_size = sizeof quick, .no_sync = 1};
        halfstep_checkpoint_save *save;
        snprintf(path, sizeof path, "%s/%d", at("many"), i);
        WORKS(halfstep_begin_checkpoint(&save, path, &quick, TEXT));
        WORKS(halfstep_save_value(save, "k", "v", TEXT));
        WORKS(halfstep_commit_checkpoint(save, TEXT));
        if (i != 250 && i != 259) continue;
        WORKS(save_plain(dir, i == 250 ? 112 : 115));
        CHECK(!message[0], "used last: the note is \"%s\"", message);
    }
    WORKS(save_plain(dir, 120));
    CHECK(strstr(message, "such as checkpoint-115,"), "forgotten: the note is \"%s\"", message);
    ENTRIES(dir, "checkpoint-", 2);
    remove_tree(dir);
    remove_tree(at("many"));
}

/* prune_if: what the caller knows counts, and not what the process has saved and opened. */
static void test_prune_if(void)
{
    enum { FIRST, SECOND };
    const char *dir = at("prune_if");
    static const halfstep_save_options options[] = {{.prune_if = 1}, {.prune_if = 1, .newest = 1}};
    const struct {
        int options, left;
        const char *says, *what;
    } saves[] = {{FIRST, 1, NULL, "an empty folder"},
                 {SECOND, 1, NULL, "only ours"},
                 {SECOND, 2, "such as checkpoint-2,", "another since"},
                 {FIRST, 3, "such as checkpoint-3,", "another before"},
                 {FIRST, 4, "such as checkpoint-4,", "without a pointer"}};
    for (unsigned k = 1; k <= COUNT(saves); k++) {
        if (k == 5) unlink(at("prune_if/manifest.json"));
        check_saved(dir, k, save_with(dir, k, options[saves[k - 1].options], 0), saves[k - 1].says, saves[k - 1].what);
        ENTRIES(dir, "checkpoint-", saves[k - 1].left);
        if (k == 3) check_kept(at("prune_if/checkpoint-2"), 2, "another since");
    }
}

static void test_foreign_in_generation(void)
{
    const char *dir = at("foreign"), *old = at("foreign/checkpoint-1");
    static const char *const kinds[] = {"a folder", "a file", "a file with a name of ours",
                                        "a link",   "a pipe", "write protection"};
    for (int kind = 0; kind < 6; kind++) {
        const char *what = kinds[kind];
        char inner[600];
        if (!access(dir, F_OK)) chmod(old, 0777);
        remove_tree(dir);
        WORKS(save_plain(dir, 1));
        snprintf(inner, sizeof inner, "%s/%s", old, kind == 2 ? "notes.txt" : "my notes");
        if (kind == 0) put_foreign(inner);
        else if (kind == 1 || kind == 2) put_file(inner, "mine", 4);
        else if (kind == 3 ? symlink("/", inner) : kind == 4 ? mkfifo(inner, 0600) : chmod(old, 0555))
            FAIL("%s: %s", what, strerror(errno));
        const char *says = kind == 5   ? "foreign/checkpoint-1 stays: it is write-protected"
                           : kind == 2 ? "foreign/checkpoint-1 stays: it holds \"notes.txt\""
                                       : "foreign/checkpoint-1 stays: it holds \"my notes\"";
        save_beside(dir, 2, says, what);
        save_beside(dir, 3, says, what);
        CHECK(kind ? kind == 5 || !faulty_lstat(inner, &(struct stat){0}) : has_foreign(inner), "%s was touched", what);
        check_kept(old, 1, what);
        CHECK(count_entries(dir, "checkpoint-") == 2 && access(at("foreign/checkpoint-2"), F_OK), "%s: pruning stopped",
              what);
        CHECK(count_entries(dir, ".halfstep") == 0, "%s: a temporary was left", what);
        /* Once it is gone, the next save tidies. */
        if (kind == 0) remove_tree(inner);
        else unlink(inner);
        chmod(old, 0777);
        save_beside(dir, 4, NULL, what);
        CHECK(count_entries(dir, "checkpoint-") == 1, "%s: not pruned after it had gone", what);
    }
}

static void test_foreign_in_leftovers(void)
{
    const char *dir = at("foreign"), *left = at("foreign/.halfstep-tmp-1-0");
    static const char *const kinds[] = {"a folder", "a file", "a manifest", "a link"};
    for (int kind = 0; kind < 4; kind++) {
        const char *what = kinds[kind];
        char inner[600], part[600];
        remove_tree(dir);
        WORKS(save_plain(dir, 1));
        snprintf(inner, sizeof inner, "%s/%s", left, kind == 2 ? "manifest.json" : "notes");
        snprintf(part, sizeof part, "%s/.halfstep-part-model.safetensors", left);
        mkdir(left, 0777);
        put_file(part, "xyz", 3);
        if (kind == 0) put_foreign(inner);
        else if (kind < 3) put_file(inner, "mine", 4);
        else make_link("/", inner);
        save_beside(dir, 2,
                    kind == 2 ? ".halfstep-tmp-1-0 stays: it holds \"manifest.json\""
                              : ".halfstep-tmp-1-0 stays: it holds \"notes\"",
                    what);
        CHECK(kind ? !faulty_lstat(inner, &(struct stat){0}) : has_foreign(inner), "%s was touched", what);
        CHECK(!access(part, F_OK), "%s: what lies beside it was touched", what);
        CHECK(count_entries(dir, "checkpoint-") == 1, "%s: not pruned", what);
        if (kind == 0) remove_tree(inner);
        else unlink(inner);
        save_beside(dir, 3, NULL, what);
        CHECK(count_entries(dir, ".halfstep") == 0, "%s: not removed after it had gone", what);
    }
    /* A retired generation: its manifest tells its files from others. */
    static const char *const inside[] = {"config.json", "notes.txt"};
    for (int foreign = 0; foreign < 2; foreign++) {
        char path[600];
        remove_tree(dir);
        CHECK(!save_plain(dir, 1) && !save_keeping(dir, 2, 2), "%s", message);
        if (rename(at("foreign/checkpoint-1"), left)) FAIL("rename");
        snprintf(path, sizeof path, "%s/%s", left, inside[foreign]);
        put_file(path, "?", 1);
        save_beside(dir, 3, foreign ? "\"notes.txt\"" : NULL, "a retired generation");
        CHECK(count_entries(dir, ".halfstep") == foreign && count_entries(left, "") == (foreign ? 4 : -1),
              "%s: %d entries", inside[foreign], count_entries(left, ""));
    }
    /* Names that are nearly ours, and things that no save makes. */
    remove_tree(dir);
    mkdir(dir, 0777);
    put_foreign(at("foreign/.halfstep-tmp-mine"));
    put_file(at("foreign/.halfstep-tmp-1"), "x", 1);
    put_file(at("foreign/.halfstep-tmp-1-2.bak"), "x", 1);
    save_beside(dir, 1, NULL, "names that are nearly ours");
    CHECK(has_foreign(at("foreign/.halfstep-tmp-mine")) && count_entries(dir, ".halfstep") == 3,
          "names that are nearly ours");
    if (mkfifo(at("foreign/.halfstep-tmp-1-9"), 0600)) FAIL("mkfifo");
    save_beside(dir, 2, ".halfstep-tmp-1-9 stays", "a pipe");
    mkdir(at("foreign/.halfstep-tmp-1-3"), 0555);
    save_beside(dir, 3, ".halfstep-tmp-1-3 stays: it is write-protected", "a protected leftover");
    ENTRIES(dir, ".halfstep", 5); /* leftovers that nobody may remove */
}

static void test_foreign_names(void)
{
    const char *dir = at("foreign");
    struct stat status;
    /* checkpoint-N is a file, a link to nothing, or a link to a whole checkpoint that is kept elsewhere. */
    remove_tree(dir);
    remove_tree(at("elsewhere"));
    mkdir(dir, 0777);
    put_file(at("foreign/checkpoint-1"), "mine", 4);
    make_link("nowhere", at("foreign/checkpoint-2"));
    save_beside(dir, 1, NULL, "a file");
    save_beside(dir, 2, NULL, "a dangling link");
    CHECK(!lstat(at("foreign/checkpoint-1"), &status) && S_ISREG(status.st_mode) && status.st_size == 4, "the file");
    CHECK(!lstat(at("foreign/checkpoint-2"), &status) && S_ISLNK(status.st_mode), "the dangling link");
    CHECK(!access(at("foreign/checkpoint-2-2/config.json"), F_OK) && access(at("foreign/checkpoint-1-2"), F_OK),
          "names");
    WORKS(save_plain(at("elsewhere"), 7));
    make_link("../elsewhere/checkpoint-7", at("foreign/checkpoint-7"));
    save_beside(dir, 8, NULL, "a checkpoint kept elsewhere");
    save_beside(dir, 9, NULL, "a checkpoint kept elsewhere");
    CHECK(!lstat(at("foreign/checkpoint-7"), &status) && S_ISLNK(status.st_mode), "the link was removed");
    check_kept(at("foreign/checkpoint-7"), 7, "a checkpoint kept elsewhere");
    /* A link of ours in DIR has become a folder of somebody else's. The other links are made all the same. */
    unlink(at("foreign/config.json"));
    put_foreign(at("foreign/config.json"));
    CHECK(!save_plain(dir, 10) && !strncmp(message, "note: ", 6) && strstr(message, "foreign/config.json"),
          "a folder in the place of a link: %s", message);
    CHECK(has_foreign(at("foreign/config.json")) && opened(dir) == 10, "the folder was touched");
    CHECK(hstep_same_file(at("foreign/model.safetensors"), at("foreign/checkpoint-10/model.safetensors")),
          "the other link");
    CHECK(count_entries(dir, ".halfstep") == 0 && access(at("foreign/checkpoint-9"), F_OK), "not tidied");
}

/* A generation whose disk is gone, or whose folder nobody may read. */
static void test_foreign_unreadable(void)
{
    const char *dir = at("foreign");
    remove_tree(dir);
    WORKS(save_plain(dir, 3));
    WORKS(save_keeping(dir, 3, 3));
    snprintf(gone, sizeof gone, "%s/checkpoint-3", dir);
    save_beside(dir, 3, "foreign/checkpoint-3", "a disk that is gone, the same name");
    CHECK(access(at("foreign/checkpoint-3-2"), F_OK), "not pruned");
    CHECK(!access(at("foreign/checkpoint-3-3"), F_OK), "the same name");
    gone[0] = 0;
    check_kept(at("foreign/checkpoint-3"), 3, "a disk that is gone");
    save_beside(dir, 4, NULL, "a disk that is back");
    ENTRIES(dir, "checkpoint-", 1); /* a disk that is back */
    /* A leftover on it. */
    mkdir(at("foreign/.halfstep-tmp-1-0"), 0777);
    snprintf(gone, sizeof gone, "%s/.halfstep-tmp-1-0", dir);
    save_beside(dir, 5, ".halfstep-tmp-1-0 stays", "a leftover that cannot be looked at");
    gone[0] = 0;
    save_beside(dir, 6, NULL, "the same one, back");
    /* All of DIR is gone: an error, and no endless search for a name. */
    halfstep_checkpoint_save *save;
    save = begin(dir);
    WORKS(halfstep_save_file(save, "a", "x", 1, TEXT));
    snprintf(gone, sizeof gone, "%s", dir);
    FAILS(halfstep_commit_checkpoint(save, TEXT), IO, ""); /* DIR is gone */
    gone[0] = 0;
    OPENS(dir, 6);
    save_beside(dir, 7, NULL, "after DIR was gone");
    ENTRIES(dir, ".halfstep", 0); /* the failed save leaves nothing */
}

/* Runs as somebody who is not the superuser, because nothing can be hidden from the superuser. */
static void test_foreign_hidden(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        const char *dir = at("foreign"), *hidden = at("foreign/checkpoint-1");
        test_group_failed = 0;
        remove_tree(dir);
        if (!geteuid()) {
            chmod(scratch, 0777);
            if (setgid(65534) || setuid(65534)) test_leave(77);
        }
        for (unsigned mode = 0; mode <= 0300; mode += 0300) {
            remove_tree(dir);
            WORKS(save_plain(dir, 1));
            chmod(hidden, mode);
            save_beside(dir, 1, "foreign/checkpoint-1", "a folder that cannot be listed, the same name");
            save_beside(dir, 2, "foreign/checkpoint-1", "a folder that cannot be listed");
            chmod(hidden, 0700);
            check_kept(hidden, 1, "a folder that cannot be listed");
            save_beside(dir, 3, NULL, "a folder that can be listed again");
            mkdir(at("foreign/.halfstep-tmp-1-0"), mode);
            save_beside(dir, 4, ".halfstep-tmp-1-0", "a leftover that cannot be listed");
            chmod(at("foreign/.halfstep-tmp-1-0"), 0700);
        }
        remove_tree(dir);
        fflush(stdout);
        test_leave(test_group_failed != 0);
    }
    int status = test_child_status(child);
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77), "the child got status %x",
          status);
}

/* A manifest is read whole, so it has a limit. Memory for it stays in proportion. */
static void test_manifest_size(void)
{
    halfstep_checkpoint_save *save;
    halfstep_checkpoint *checkpoint;
    const char *dir = at("large");
    size_t room = 5 << 20;
    char *value = malloc(room + 1), key[16];
    memset(value, 'v', room);
    value[room] = 0;
    save = begin(dir);
    WORKS(halfstep_save_value(save, "a", "1", TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    save = begin(dir);
    WORKS(halfstep_save_value(save, "a", value, TEXT));
    FAILS(halfstep_commit_checkpoint(save, TEXT), RANGE, dir);
    SAYS("4194304"); /* a value that no reader would take */
    free(value);
    checkpoint = open_current(dir);
    CHECK(!strcmp(halfstep_checkpoint_value(checkpoint, "a"), "1"), "the old value");
    halfstep_close_checkpoint(checkpoint);
    save = begin(dir);
    for (unsigned i = 0; i < 20000; i++) {
        snprintf(key, sizeof key, "%x", i);
        WORKS(halfstep_save_value(save, key, "", TEXT));
    }
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    held = held_most = 0;
    checkpoint = open_current(dir);
    CHECK(!strcmp(halfstep_checkpoint_value(checkpoint, "4e1f"), ""), "the last value");
    halfstep_close_checkpoint(checkpoint);
    CHECK(!held && held_most < (4u << 20), "%zu bytes for 20000 values", held_most);
}

/* Changes one file of a checkpoint. flip >= 0 changes that byte and keeps the size; else the last byte is lost. */
static void damage(const char *path, long flip)
{
    size_t bytes;
    char *data = get_file(path, &bytes);
    if (flip >= 0) data[(size_t)flip % bytes] ^= 0x10;
    put_file(path, data, flip >= 0 ? bytes : bytes - 1);
    free(data);
}

static void test_checkpoint_damage(void)
{
    halfstep_open_options quick = {sizeof quick, 0, 1};
    halfstep_checkpoint *checkpoint;
    static const char *const files[] = {"model.safetensors", "config.json", "manifest.json"};
    for (int i = 0; i < 12; i++) {
        const char *dir = at("damage"), *name = files[i % 3];
        char path[512];
        remove_tree(dir);
        WORKS(save_keeping(dir, 10, 2));
        WORKS(save_keeping(dir, 20, 2));
        snprintf(path, sizeof path, "%s/checkpoint-20/%s", dir, name);
        int kind = i / 3;
        if (kind == 0) damage(path, 5);
        else if (kind == 1) damage(path, -1);
        else if (kind == 2) unlink(path);
        else put_file(path, "", 0);
        FAILS(open_code(dir), kind == 2 ? IO : FORMAT, path);
        SAYS("another checkpoint");
        SAYS("checkpoint-10");
        if (kind == 0 && i % 3 < 2) {
            WORKS(halfstep_open_checkpoint(&checkpoint, dir, &quick, TEXT));
            halfstep_close_checkpoint(checkpoint);
        }
        CHECK(opened_or_fallback(dir) == 10 && !strncmp(message, "note: ", 6) && strstr(message, path), "fallback: %s",
              message);
        /* The next save mends it. */
        WORKS(save_keeping(dir, 30, 2));
        OPENS(dir, 30);
    }
    /* The pointer: each damage is found, and any checkpoint still opens by its own path. */
    const char *dir = at("damage");
    size_t bytes;
    remove_tree(dir);
    WORKS(save_keeping(dir, 10, 2));
    WORKS(save_keeping(dir, 20, 2));
    char *pointer = get_file(at("damage/manifest.json"), &bytes);
    for (size_t flip = 0; flip < bytes; flip++) {
        damage(at("damage/manifest.json"), (long)flip);
        CHECK(open_code(dir) == FORMAT, "byte %zu: %s", flip, message);
        put_file(at("damage/manifest.json"), pointer, bytes);
    }
    for (size_t length = 0; length < bytes; length++) {
        put_file(at("damage/manifest.json"), pointer, length);
        CHECK(open_code(dir) == FORMAT, "%zu bytes: %s", length, message);
    }
    CHECK(opened_or_fallback(dir) == 20, "fallback without a pointer: %s", message);
    unlink(at("damage/manifest.json"));
    FAILS(open_code(dir), FORMAT, "checkpoint-20"); /* no pointer */
    free(pointer);
    /* Nothing sound at all. */
    WORKS(save_plain(dir, 30));
    damage(at("damage/checkpoint-30/config.json"), 2);
    CHECK(opened_or_fallback(dir) == -1 && strstr(message, "config.json") && !strstr(message, "another"), "%s",
          message);
    /* Flips a bit of every file of the usual places. The links are the checkpoint's own files, so damage there is found
     * too. */
    WORKS(save_plain(dir, 40));
    damage(at("damage/model.safetensors"), 100);
    CHECK(opened(dir) == -1 && strstr(message, "model.safetensors"), "%s", message);
}

/* A save checks what it wrote before the pointer moves and the old checkpoint goes. */
static void test_incomplete_save(void)
{
    halfstep_checkpoint_save *save;
    const char *dir = at("incomplete");
    remove_tree(dir);
    WORKS(save_plain(dir, 10));
    save = begin(dir);
    WORKS(halfstep_save_file(save, "config.json", "{ }", 3, TEXT));
    DIR *stream = opendir(dir);
    struct dirent *entry;
    int cut = 0;
    while (stream && (entry = readdir(stream)) != NULL) {
        char path[512];
        if (strncmp(entry->d_name, ".halfstep-tmp-", 14)) continue;
        snprintf(path, sizeof path, "%s/%.200s/.halfstep-part-config.json", dir, entry->d_name);
        cut += !truncate(path, 2);
    }
    if (stream) closedir(stream);
    EQUAL(cut, 1);
    FAILS(halfstep_commit_checkpoint(save, TEXT), FORMAT, "config.json");
    OPENS(dir, 10);
}

/* A disk that cannot be read now says nothing about a checkpoint. Nobody falls back because of it, nor past another. */
static void test_fallback_is_for_damage(void)
{
    const char *dir = at("unreadable");
    for (int damaged = 0; damaged < 2; damaged++) {
        remove_tree(dir);
        for (uint64_t step = 10; step <= 30; step += 10) WORKS(save_keeping(dir, step, 3));
        if (damaged) damage(at("unreadable/checkpoint-30/config.json"), 1);
        long sound = damaged ? 20 : 30, number;
        CHECK(opened_or_fallback(dir) == sound, "%s", message);
        for (long at = 1;; at++) {
            reads = 0;
            read_fails_at = at;
            number = opened_or_fallback(dir);
            read_fails_at = 0;
            if (reads < at) break;
            CHECK(number < 0 || number == sound, "%s, read %ld fails: went back to %ld: %s",
                  damaged ? "damaged" : "sound", at, number, message);
        }
        CHECK(number == sound, "%s", message);
    }
}

/* Checks that the save after one that failed at a call works and tidies. */
static void check_next_save(const char *dir, long call)
{
    CHECK(!save_plain(dir, 9) && !message[0] && opened(dir) == 9 && count_entries(dir, ".halfstep") == 0 &&
              count_entries(dir, "checkpoint-") == 1,
          "the save after one that failed at call %ld: %s", call, message);
}

/* Makes a save in which one call fails. It gives an error and leaves the old state, or (after the pointer is in place)
 * a note. */
static void test_failing_calls(void)
{
    static const int numbers[] = {ENOSPC, EIO, EDQUOT, EIO};
    const char *dir = at("failing");
    long calls = 0, errors = 0;
    for (int variant = 0; variant < 4; variant++) {
        int with_old = variant != 2;
        for (long call = 0;; call++) {
            remove_tree(dir);
            if (with_old) WORKS(save_plain(dir, 7));
            set_fault(MODE_ONCE, numbers[variant], call);
            int code = save_plain(dir, 8);
            fault.mode = MODE_NONE;
            if (!fault.failures) {
                CHECK(code == 0 && call > 20, "%ld calls, %s", call, message);
                break;
            }
            calls++;
            errors += code != 0;
            char text[1024];
            memcpy(text, message, sizeof text);
            if (variant == 3) { /* a program that saves again without a look */
                check_next_save(dir, call);
                continue;
            }
            long opens = opened(dir);
            if (code) {
                CHECK(code == IO && strstr(text, scratch), "call %ld: %d \"%s\"", call, code, text);
                CHECK(opens == (with_old ? 7 : -1) || (opens == 8 && strstr(text, "in place")),
                      "call %ld failed (%s), then opened %ld", call, text, opens);
            } else {
                CHECK(opens == 8, "call %ld: reported success, opened %ld: %s", call, opens, message);
            }
            if (code && opens != 8) {
                int left = count_entries(dir, ".halfstep");
                CHECK(left <= 0, "call %ld (%s) left a temporary file", call, text);
                CHECK(with_old ? count_entries(dir, "checkpoint-") == 1 : count_entries(dir, "") <= 0,
                      "call %ld (%s) left something", call, text);
            }
            check_next_save(dir, call);
        }
    }
    CHECK(calls > 60 && errors > 30, "%ld failing calls, %ld errors", calls, errors);
}

static void power_reset(void)
{
    for (size_t i = 0; i < power.name_count; i++)
        if (power.names[i].backup[0]) unlink(power.names[i].backup);
    power.dirty_count = power.name_count = 0;
    power.on = 0;
}

static void forget_contents(const char *path)
{
    DIR *stream = opendir(path);
    if (!stream) return;
    struct dirent *entry;
    while ((entry = readdir(stream))) {
        char inner[1024];
        struct stat status;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        if (lstat(inner, &status)) continue;
        if (S_ISDIR(status.st_mode)) forget_contents(inner);
        for (size_t i = 0; i < power.dirty_count && S_ISREG(status.st_mode); i++)
            if (power.dirty[i] == status.st_ino && truncate(inner, 0)) FAIL("truncate");
    }
    closedir(stream);
}

/* Applies the worst loss of power: removals are on the disk; contents and names that were not synced are not. */
static void lose_power(const char *dir)
{
    for (size_t i = power.name_count; i-- > 0;) {
        unsynced_name *name = &power.names[i];
        if (!name->from[0]) {
            unlink(name->to);
        } else if (!access(name->to, F_OK)) {
            if (rename(name->to, name->from)) continue;
            if (name->backup[0] && !rename(name->backup, name->to)) name->backup[0] = 0;
        }
    }
    forget_contents(dir);
}

/* Kills the process, or cuts the power, before every single call of a save. The old state or the new one must open. */
static void test_sudden_end(void)
{
    const char *dir = at("sudden");
    for (int variant = 0; variant < 4; variant++) {
        int with_power = variant & 1, with_old = variant < 2, seen_old = 0, seen_new = 0;
        for (long call = 0;; call++) {
            remove_tree(dir);
            if (with_old) WORKS(save_plain(dir, 7));
            power.on = with_power;
            set_fault(MODE_DEAD, EIO, call);
            int code = save_plain(dir, 8), died = fault.failures > 0;
            fault.mode = MODE_NONE;
            power.on = 0;
            if (with_power) lose_power(dir);
            power_reset();
            long opens = opened(dir);
            if (died && !code)
                CHECK(opens == 8, "variant %d, call %ld: success was reported, opened %ld", variant, call, opens);
            CHECK(opens == 8 || opens == (with_old ? 7 : -1), "variant %d, killed at call %ld: opened %ld (%s)",
                  variant, call, opens, message);
            seen_old += opens != 8;
            seen_new += opens == 8;
            (void)opened(dir); /* as the next run does */
            check_next_save(dir, call);
            if (!died) break;
        }
        CHECK(seen_old > 15 && seen_new > 5, "variant %d: %d old, %d new", variant, seen_old, seen_new);
    }
}

/* Shows that the group above can fail: with no_sync, the simulated loss of power must be able to lose the
 * checkpoint. */
static void test_simulation(void)
{
    const char *dir = at("sudden");
    int lost = 0;
    remove_tree(dir);
    WORKS(save_plain(dir, 7));
    power.on = 1;
    CHECK(!save_with(dir, 8, (halfstep_save_options){.no_sync = 1}, 0), "%s", message);
    power.on = 0;
    lose_power(dir);
    power_reset();
    lost = opened(dir) < 0;
    CHECK(lost, "an unsynced save survived");
}

static void test_failing_allocations(void)
{
    const char *dir = at("memory");
    long failed = 0;
    for (long call = 0;; call++) {
        remove_tree(dir);
        WORKS(save_plain(dir, 7));
        allocations = allocations_failed = 0;
        allocation_at = call;
        int code = save_plain(dir, 8);
        allocation_at = -1;
        if (!allocations_failed) break;
        failed++;
        char text[1024];
        memcpy(text, message, sizeof text);
        long opens = opened(dir);
        CHECK(code ? code == MEMORY && opens == 7 : opens == 8,
              "allocation %ld of a save: code %d (%s), opened "
              "%ld (%s)",
              call, code, text, opens, message);
    }
    CHECK(failed > 40, "only %ld allocations in a save", failed);
    failed = 0;
    remove_tree(dir);
    WORKS(save_plain(dir, 7));
    for (long call = 0;; call++) {
        halfstep_checkpoint *checkpoint = NULL;
        halfstep_safetensors *file = NULL;
        allocations = allocations_failed = 0;
        allocation_at = call;
        int code = halfstep_open_checkpoint(&checkpoint, dir, NULL, TEXT);
        if (!code)
            code = halfstep_open_safetensors(&file, halfstep_checkpoint_path(checkpoint, "model.safetensors"), TEXT);
        allocation_at = -1;
        halfstep_close_safetensors(file);
        halfstep_close_checkpoint(checkpoint);
        if (!allocations_failed) break;
        failed++;
        CHECK(code == MEMORY, "allocation %ld of opening: code %d (%s)", call, code, message);
    }
    CHECK(failed > 20, "only %ld allocations in opening", failed);
}

/* Sets a real limit of the system, in a child, with which it ends. */
static void test_file_size_limit(void)
{
    const char *dir = at("limit");
    WORKS(save_plain(dir, 7));
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        struct rlimit before, limit;
        signal(SIGXFSZ, SIG_IGN);
        getrlimit(RLIMIT_FSIZE, &before);
        limit = (struct rlimit){300, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &limit);
        int code = save_plain(dir, 13); /* 640 bytes of model */
        /* Coverage counters are files too. One that is cut is of no use to later processes. */
        setrlimit(RLIMIT_FSIZE, &before);
        test_leave(code == IO && strstr(message, "limit/model.safetensors") && strstr(message, "too large") ? 0 : 1);
    }
    CHECK(test_child_status(child) == 0, "the child failed");
    CHECK(opened(dir) == 7 && count_entries(dir, ".halfstep") == 0, "%s", message);
}

static void *save_repeatedly(void *context)
{
    unsigned *rounds = context;
    char text[256];
    for (unsigned k = 1; k <= 60; k++) {
        halfstep_checkpoint_save *save;
        halfstep_save_options options = {.struct_size = sizeof options, .step = k, .no_sync = 1};
        if (halfstep_begin_checkpoint(&save, at("racing"), &options, text, sizeof text)) continue;
        halfstep_save_file(save, "a", &k, sizeof k, text, sizeof text);
        halfstep_save_file(save, "b", &k, sizeof k, text, sizeof text);
        if (!halfstep_commit_checkpoint(save, text, sizeof text)) ++*rounds;
    }
    return NULL;
}

/* Reads while somebody saves. Each opening succeeds and sees one checkpoint. */
static void test_racing_reader(void)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", at("racing"));
    halfstep_checkpoint_save *save;
    unsigned zero = 0, rounds = 0, opened = 0, last = 0;
    save = begin(dir);
    WORKS(halfstep_save_file(save, "a", &zero, sizeof zero, TEXT));
    WORKS(halfstep_save_file(save, "b", &zero, sizeof zero, TEXT));
    WORKS(halfstep_commit_checkpoint(save, TEXT));
    pid_t child = fork();
    if (!child) {
        save_repeatedly(&rounds);
        test_leave(rounds == 60 ? 0 : 1);
    }
    int status = -1;
    while (waitpid(child, &status, WNOHANG) == 0) {
        halfstep_checkpoint *checkpoint;
        int code = halfstep_open_checkpoint(&checkpoint, dir, NULL, TEXT);
        CHECK(!code, "%s", message);
        if (code) continue;
        unsigned values[2] = {0, 1};
        for (int i = 0; i < 2; i++) {
            size_t bytes;
            char *data = get_file(halfstep_checkpoint_path(checkpoint, i ? "b" : "a"), &bytes);
            EQUAL(bytes, sizeof values[i]);
            memcpy(&values[i], data, sizeof values[i]);
            free(data);
        }
        CHECK(values[0] == values[1] && values[0] >= last, "%u and %u after %u", values[0], values[1], last);
        last = values[0];
        opened++;
        halfstep_close_checkpoint(checkpoint);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the saver got status %x", status);
    CHECK(opened > 0, "never opened");
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
    make_scratch("io");
    snprintf(power.backups, sizeof power.backups, "%.200s/backups", scratch);
    mkdir(power.backups, 0777);

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
    TEST("checkpoint: layout and pruning") test_checkpoint_basics();
    TEST("checkpoint: files, values, readers") test_checkpoint_files();
    TEST("checkpoint: a save removes what its process knows, and nothing of a higher step") test_removed();
    TEST("checkpoint: prune_if: what another program has saved since stays") test_prune_if();
    TEST("checkpoint: a generation that holds something foreign stays, whole") test_foreign_in_generation();
    TEST("checkpoint: a leftover that holds something foreign stays, whole") test_foreign_in_leftovers();
    TEST("checkpoint: foreign files, links and folders under names of ours") test_foreign_names();
    TEST("checkpoint: generations and leftovers on a disk that is gone") test_foreign_unreadable();
    TEST("checkpoint: generations and leftovers that cannot be listed") test_foreign_hidden();
    TEST("checkpoint: size of a manifest") test_manifest_size();
    TEST("checkpoint: damage is found and named") test_checkpoint_damage();
    TEST("checkpoint: what a save has not written whole replaces nothing") test_incomplete_save();
    TEST("checkpoint: a fallback passes over damage only, not over a disk that cannot be read")
        test_fallback_is_for_damage();
    TEST("checkpoint: every call failing once") test_failing_calls();
    TEST("checkpoint: killed or out of power at every call") test_sudden_end();
    TEST("checkpoint: the power simulation bites") test_simulation();
    TEST("checkpoint: every allocation failing once") test_failing_allocations();
    TEST("checkpoint: file size limit") test_file_size_limit();
    TEST("checkpoint: a reader beside a saver") test_racing_reader();
    return test_done();
}
