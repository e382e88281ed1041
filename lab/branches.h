/* Counts the instructions that a shared library executes, by breakpoints in place of its branches, for instructions.c:
 * arm(1), what is to be counted, arm(0), on one thread that nobody else shares the library with; now.count has it.
 *
 * A handler adds the instructions that lie between the last branch's target and here, and does what the branch would
 * have done; one whose target takes more to find out is stepped over by the trap flag. What is outside of the library
 * runs freely. */
#ifndef HSTEP_LAB_BRANCHES_H
#define HSTEP_LAB_BRANCHES_H

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { CANNOT = 77 };

static void stop(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("instructions: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static void *must(void *result, const char *what)
{
    if (!result) stop("%s", what);
    return result;
}

/* ---- The code ---- */

static struct {
    char *base;              /* where addresses of the file begin */
    uint64_t low, high;      /* of its code, as addresses of the file */
    uint32_t *number;        /* by address - low: how many instructions begin before it; NOWHERE inside of one */
    uint64_t *site, sites;   /* addresses of branches */
    unsigned char *original; /* the code as it was */
} code;
#define NOWHERE UINT32_MAX

/* `symbol` is any of the library's. */
static void read_code(const char *path, void *symbol)
{
    Dl_info info;
    if (!dladdr(symbol, &info)) stop("%s: no base address", path);
    code.base = info.dli_fbase;
    FILE *file = must(fopen(path, "rb"), path);
    Elf64_Ehdr header;
    if (fread(&header, sizeof header, 1, file) != 1) stop("%s is cut off", path);
    code.low = UINT64_MAX;
    for (int i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr section;
        if (fseek(file, (long)header.e_shoff + i * header.e_shentsize, SEEK_SET) ||
            fread(&section, sizeof section, 1, file) != 1)
            stop("%s is cut off", path);
        if (!(section.sh_flags & SHF_EXECINSTR)) continue;
        if (section.sh_addr < code.low) code.low = section.sh_addr;
        if (section.sh_addr + section.sh_size > code.high) code.high = section.sh_addr + section.sh_size;
    }
    fclose(file);
    if (code.low >= code.high) stop("%s has no code", path);
    size_t bytes = code.high - code.low;
    code.original = must(malloc(bytes + 16), "no memory");
    memcpy(code.original, code.base + code.low, bytes);
    memset(code.original + bytes, 0, 16);
    code.number = must(malloc(bytes * sizeof *code.number), "no memory");
    memset(code.number, 0xff, bytes * sizeof *code.number);
    code.site = must(malloc(bytes * sizeof *code.site), "no memory");
}

/* ---- Counting ---- */

static struct {
    uint64_t entered; /* the last target in the library */
    uint64_t pending; /* a branch that is being stepped over, or 0 */
    int64_t count;
    int single; /* by the trap flag */
} now;

static int inside(uint64_t address) { return address >= code.low && address < code.high; }
static uint64_t address_of(uint64_t pointer) { return pointer - (uint64_t)(uintptr_t)code.base; }

/* In a handler: no stdio. */
static void give_up(const char *what)
{
    ssize_t ignored = write(2, what, strlen(what));
    (void)ignored;
    _exit(1);
}

/* From the last target to the branch at this address, which is the first after it. */
static void add_block(uint64_t branch)
{
    uint32_t first = inside(now.entered) ? code.number[now.entered - code.low] : NOWHERE;
    uint32_t last = code.number[branch - code.low];
    if (first == NOWHERE || last == NOWHERE || last < first) give_up("instructions: code that was not disassembled\n");
    now.count += (int64_t)(last - first) + 1;
}

/* What is outside runs freely and comes back to `after`, the return address. */
static void land(uint64_t target, uint64_t after)
{
    now.entered = inside(address_of(target)) ? address_of(target) : address_of(after);
}

#if defined(__x86_64__)

enum { BREAK_BYTES = 1, TRAP_FLAG = 0x100 };

static int branch_at(const unsigned char *p)
{
    while (*p == 0x66 || *p == 0x3e || *p == 0xf2 || *p == 0xf3 || (*p & 0xf0) == 0x40) p++;
    if (*p == 0x0f) return (p[1] & 0xf0) == 0x80;
    if (*p == 0xff) return (p[1] >> 3 & 7) >= 2 && (p[1] >> 3 & 7) <= 5;
    return (*p & 0xf0) == 0x70 || (*p >= 0xe0 && *p <= 0xe3) || *p == 0xe8 || *p == 0xe9 || *p == 0xeb || *p == 0xc2 ||
           *p == 0xc3;
}

static void find_instructions(const char *path)
{
    char *command, line[512];
    unsigned long long address;
    int end;
    uint32_t n = 0;
    if (asprintf(&command, "objdump -d --no-show-raw-insn '%s'", path) < 0) stop("no memory");
    FILE *text = must(popen(command, "r"), "objdump cannot be started");
    while (fgets(line, sizeof line, text)) {
        end = 0;
        if (sscanf(line, " %llx:%n", &address, &end) != 1 || !end || line[end] != '\t' || !inside(address)) continue;
        code.number[address - code.low] = n++;
        if (branch_at(code.original + (address - code.low))) code.site[code.sites++] = address;
    }
    if (pclose(text) || !n) stop("objdump does not read %s", path);
    free(command);
}

static void put_break(uint64_t address) { code.base[address] = (char)0xcc; }

static uint64_t pointer_to(uint64_t address) { return (uint64_t)(uintptr_t)code.base + address; }

static int condition_holds(unsigned condition, uint64_t flags)
{
    int carry = flags & 1, parity = flags >> 2 & 1, zero = flags >> 6 & 1, sign = flags >> 7 & 1,
        overflow = flags >> 11 & 1;
    int is[8] = {overflow, carry, zero, carry | zero, sign, parity, sign != overflow, zero | (sign != overflow)};
    return is[condition >> 1] ^ (int)(condition & 1);
}

static int32_t distance(const unsigned char *p)
{
    int32_t d;
    memcpy(&d, p, sizeof d);
    return d;
}

/* Does what the branch does and returns 1; 0 for one whose target takes more to find out. */
static int follow(uint64_t branch, greg_t *r)
{
    const unsigned char *begin = code.original + (branch - code.low), *p = begin;
    uint64_t target, after, *top = (uint64_t *)r[REG_RSP];
    while (*p == 0x66 || *p == 0x3e || *p == 0xf2 || *p == 0xf3 || (*p & 0xf0) == 0x40) p++;
    unsigned kind = *p;
    if ((kind & 0xf0) == 0x70 || kind == 0xeb) {
        after = pointer_to(branch + (uint64_t)(p - begin) + 2);
        target = after + (uint64_t)(int64_t)(signed char)p[1];
    } else if (kind == 0x0f) {
        after = pointer_to(branch + (uint64_t)(p - begin) + 6);
        target = after + (uint64_t)(int64_t)distance(p + 2);
    } else if (kind == 0xe8 || kind == 0xe9) {
        after = pointer_to(branch + (uint64_t)(p - begin) + 5);
        target = after + (uint64_t)(int64_t)distance(p + 1);
    } else if (kind == 0xc3) {
        after = target = *top;
    } else {
        return 0;
    }
    if (kind == 0x0f && !condition_holds(p[1] & 15, (uint64_t)r[REG_EFL])) target = after;
    if ((kind & 0xf0) == 0x70 && !condition_holds(kind & 15, (uint64_t)r[REG_EFL])) target = after;
    if (kind == 0xe8) {
        r[REG_RSP] -= 8;
        *(uint64_t *)r[REG_RSP] = after;
    }
    if (kind == 0xc3) r[REG_RSP] += 8;
    r[REG_RIP] = (greg_t)target;
    land(target, *(uint64_t *)r[REG_RSP]);
    return 1;
}

static void trapped(int signal, siginfo_t *info, void *context)
{
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    uint64_t at = address_of((uint64_t)r[REG_RIP]);
    (void)signal, (void)info;
    if (now.single) {
        /* A repeat prefix traps again and again at one place. */
        if (inside(at) && at != now.entered) now.count++;
        now.entered = at;
        return;
    }
    if (now.pending) {
        uint64_t branch = now.pending;
        now.pending = 0;
        r[REG_EFL] &= ~(greg_t)TRAP_FLAG;
        put_break(branch);
        land((uint64_t)r[REG_RIP], *(uint64_t *)r[REG_RSP]);
        return;
    }
    at--;
    if (!inside(at) || code.number[at - code.low] == NOWHERE) give_up("instructions: a trap that is not ours\n");
    add_block(at);
    if (follow(at, r)) return;
    now.pending = at;
    r[REG_RIP]--;
    r[REG_EFL] |= TRAP_FLAG;
    code.base[at] = (char)code.original[at - code.low];
}

static void trap_flag(int on)
{
    if (on) __asm__ volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
    else __asm__ volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc");
}

#elif defined(__aarch64__)

enum { BREAK_BYTES = 4 };

static uint32_t word_at(uint64_t address)
{
    uint32_t w;
    memcpy(&w, code.original + (address - code.low), sizeof w);
    return w;
}

/* The sign-extended field of so many bits from bit `from` on, in bytes. */
static uint64_t displacement(uint32_t w, int from, int bits)
{
    return (uint64_t)((int64_t)((uint64_t)w << (64 - from - bits)) >> (64 - bits)) * 4;
}

enum branch { NONE, JUMP, CONDITION, COMPARE, TEST, REGISTER, UNKNOWN };
static enum branch branch_at(uint32_t w)
{
    if ((w & 0x7c000000) == 0x14000000) return JUMP;
    if ((w & 0xff000010) == 0x54000000) return CONDITION;
    if ((w & 0x7e000000) == 0x34000000) return COMPARE;
    if ((w & 0x7e000000) == 0x36000000) return TEST;
    if ((w & 0xff9ffc1f) == 0xd61f0000 && (w >> 21 & 3) != 3) return REGISTER;
    return (w & 0xfe000000) == 0xd6000000 ? UNKNOWN : NONE;
}

static void find_instructions(const char *path)
{
    for (uint64_t address = code.low; address < code.high; address += 4) {
        enum branch kind = branch_at(word_at(address));
        code.number[address - code.low] = (uint32_t)((address - code.low) / 4);
        if (kind == UNKNOWN) stop("%s: a branch of an unknown kind at %llx", path, (unsigned long long)address);
        if (kind != NONE) code.site[code.sites++] = address;
    }
}

static void put_break(uint64_t address)
{
    static const uint32_t brk = 0xd4200000;
    memcpy(code.base + address, &brk, sizeof brk);
}

static int condition_holds(unsigned condition, uint64_t state)
{
    int n = state >> 31 & 1, z = state >> 30 & 1, c = state >> 29 & 1, v = state >> 28 & 1;
    int is[8] = {z, c, n, v, c && !z, n == v, n == v && !z, 1};
    return condition >= 14 || is[condition >> 1] ^ (int)(condition & 1);
}

static void trapped(int signal, siginfo_t *info, void *context)
{
    mcontext_t *r = &((ucontext_t *)context)->uc_mcontext;
    uint64_t at = address_of(r->pc), target = r->pc + 4;
    (void)signal, (void)info;
    if (!inside(at) || branch_at(word_at(at)) == NONE) give_up("instructions: a trap that is not ours\n");
    add_block(at);
    uint32_t w = word_at(at);
    uint64_t tested = (w & 31) < 31 ? r->regs[w & 31] : 0;
    switch (branch_at(w)) {
    case JUMP:
        target = r->pc + displacement(w, 0, 26);
        if (w >> 31) r->regs[30] = r->pc + 4;
        break;
    case CONDITION:
        if (condition_holds(w & 15, r->pstate)) target = r->pc + displacement(w, 5, 19);
        break;
    case COMPARE:
        if (!(w >> 31)) tested &= UINT32_MAX;
        if ((tested != 0) == (w >> 24 & 1)) target = r->pc + displacement(w, 5, 19);
        break;
    case TEST:
        tested = tested >> ((w >> 31) << 5 | (w >> 19 & 31)) & 1;
        if (tested == (w >> 24 & 1)) target = r->pc + displacement(w, 5, 14);
        break;
    default:
        target = r->regs[w >> 5 & 31];
        if ((w >> 21 & 3) == 1) r->regs[30] = r->pc + 4;
        break;
    }
    r->pc = target;
    land(target, r->regs[30]);
}

static void trap_flag(int on)
{
    (void)on;
    stop("--single-step is for x86-64");
}

#else
#error "breakpoints are written for x86-64 and aarch64"
#endif

/* Puts breakpoints in place of branches, or takes them out. */
static void arm(int on)
{
    for (uint64_t i = 0; i < code.sites; i++)
        if (on) put_break(code.site[i]);
        else memcpy(code.base + code.site[i], code.original + (code.site[i] - code.low), BREAK_BYTES);
    __builtin___clear_cache(code.base + code.low, code.base + code.high);
}

static void prepare_counting(void)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)(code.base + code.low) / page * page;
    if (mprotect((void *)begin, (uintptr_t)(code.base + code.high) - begin, PROT_READ | PROT_WRITE | PROT_EXEC)) {
        fprintf(stderr, "instructions: code may not be changed here: %s\n", strerror(errno));
        exit(CANNOT);
    }
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &action, NULL);
}

#endif
