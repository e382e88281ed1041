/* A library to preload into the program, for the shell tests. It makes one call of an allocator fail, one line
 * unreadable, or all calls that only polish.
 *
 *   FAULT_IN=jansson FAULT_AT=7   fails the 7th allocation of the library with this word in its name. An empty word
 *                                 means the program itself; 0 fails none. The number of calls goes to the file
 *                                 FAULT_COUNT.
 *   FAULT_LINE=3                  fails the 3rd fgets as a bad disk would.
 *   FAULT_POLISH=1                refuses modes, links, syncs of folders, and says of folders that they cannot be made
 *                                 but not that they are there, as some network file systems do.
 *   HSTEP_FAULT_UNTIL_EXIT=1      ignores allocations after exit(), because gcov's counters are written then.
 *
 * Built by tests/program/nothing_lost_test.sh: cc -shared -fPIC -o faults.so preload.c */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uintptr_t low, high;
static long at, calls, line, lines;
static int until_exit, no_polish;

static int find(struct dl_phdr_info *info, size_t size, void *word)
{
    (void)size;
    if (*(char *)word ? !strstr(info->dlpi_name, word) : info->dlpi_name[0] != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || !(info->dlpi_phdr[i].p_flags & PF_X)) continue;
        low = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        high = low + info->dlpi_phdr[i].p_memsz;
    }
    return 1;
}

__attribute__((constructor)) static void begin(void)
{
    char *word = getenv("FAULT_IN"), *number = getenv("FAULT_AT"), *which = getenv("FAULT_LINE");
    if (which) line = atol(which);
    if (number) at = atol(number);
    if (word) dl_iterate_phdr(find, word);
    no_polish = getenv("FAULT_POLISH") != NULL;
    until_exit = getenv("HSTEP_FAULT_UNTIL_EXIT") != NULL;
}

static void rest(void) { low = high = 0; }

__attribute__((destructor)) static void end(void)
{
    FILE *file = getenv("FAULT_COUNT") ? fopen(getenv("FAULT_COUNT"), "w") : NULL;
    if (file) fprintf(file, "%ld\n", calls);
    if (file) fclose(file);
}

/* Counts an allocation and returns 1 if it must fail. Other threads allocate too, but not in the parts that are tested
 * this way. */
static int fails(void *caller)
{
    if ((uintptr_t)caller < low || (uintptr_t)caller >= high) return 0;
    if (until_exit) {
        until_exit = 0;
        atexit(rest);
    }
    if (++calls != at) return 0;
    errno = ENOMEM;
    return 1;
}

#define REAL(name, ...) ((void *(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n)
{
    return fails(__builtin_return_address(0)) ? NULL : REAL(aligned_alloc, size_t, size_t)(a, n);
}
char *strdup(const char *s)
{
    if (fails(__builtin_return_address(0))) return NULL;
    return memcpy(__libc_malloc(strlen(s) + 1), s, strlen(s) + 1);
}

char *fgets(char *text, int n, FILE *file)
{
    if (++lines == line) {
        file->_flags |= 0x20; /* the flag that ferror() reads in glibc */
        errno = EIO;
        return NULL;
    }
    return ((char *(*)(char *, int, FILE *))dlsym(RTLD_NEXT, "fgets"))(text, n, file);
}

/* ---- Calls that only polish ---- */

#define CALL(name, ...) ((int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static int refuse(int number)
{
    errno = number;
    return -1;
}

int chmod(const char *path, mode_t mode)
{
    return no_polish ? refuse(EPERM) : CALL(chmod, const char *, mode_t)(path, mode);
}
int fchmod(int fd, mode_t mode) { return no_polish ? refuse(EPERM) : CALL(fchmod, int, mode_t)(fd, mode); }
int link(const char *from, const char *to)
{
    return no_polish ? refuse(EPERM) : CALL(link, const char *, const char *)(from, to);
}
int symlink(const char *from, const char *to)
{
    return no_polish ? refuse(EPERM) : CALL(symlink, const char *, const char *)(from, to);
}

int mkdir(const char *path, mode_t mode)
{
    const int made = CALL(mkdir, const char *, mode_t)(path, mode);
    return made && errno == EEXIST && no_polish ? refuse(EACCES) : made;
}

int fsync(int fd)
{
    struct stat status;
    if (no_polish && !fstat(fd, &status) && S_ISDIR(status.st_mode)) return refuse(EINVAL);
    return CALL(fsync, int)(fd);
}
