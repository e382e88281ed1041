/* Makes every call of the program into the C library fail, in this process. Each command must end with status 0 and the
 * output of a run without a fault, or with status 1 and one sentence. Neither memory nor a descriptor may be lost.
 * tests/faults/sweep.py does so from the outside, with few faults. It also has the libraries' own calls, and looks at
 * the files that are left.
 *
 *   test_program_faults [--short]         One error at the first call from every sixth place (twelfth), once or from
 *                                         there on, in turn.
 *
 *   test_program_faults --all             The same at the first call from each place.
 *
 *   test_program_faults COMMAND FAULT     One fault (faults/inject.h) of the command of that number.
 *
 * A child process works through the faults of a command. If it dies, its fault is reported. */

#include "common/args/args.h"
#include "faults/inject.h"

/* Only the program's calls fail. */
static int faulty_main(int argc, char **argv);
#define PROGRAM_MAIN faulty_main
#include "program_lines.h"

static int faulty_main(int argc, char **argv)
{
    inject_hold(0);
    int status = program_main(argc, argv);
    inject_hold(1);
    return status;
}

#define SMALL "--width 8 --depth 1 --heads 2 --context 4 --batch 2 --eval-batches 1 --threads 1 --quiet "
#define LM "train lm --data text --sample-bytes 4 " SMALL
#define IMAGES "--train-images 8 --test-images 4 --epochs 1 --batch 4 --threads 1 --quiet "

/* The part of the output that must be the same: all of it, the line of a hash, or only the status. */
enum same { ALL, HASH, NOTHING };

static const struct {
    enum same same;
    const char *line;
} commands_here[] = {
    {HASH, LM "--steps 2 --val-every 1 --recipe adamw/bf16-kahan/int8 --clip 1 --checkpoint new --checkpoint-every 1 "
              "--log new.csv --val text --json"},
    {HASH, "train lm --resume --checkpoint run --data text --steps 3 --log new.csv --quiet --json"},
    {HASH, LM "--steps 1 --init kahan --recipe adamw/bf16-kahan --json"},
    {HASH, LM "--steps 1 --init free --recipe schedulefree/f32 --json"},
    {HASH, LM "--steps 2 --micro-steps 2 --release --clip 1 --accumulator bf16"},
    {HASH, LM "--steps 2 --micro-steps 2 --accumulator states"},
    {HASH, "train mnist --recipe lamb/bf16-ecc8/int8 --log new.csv --json " IMAGES},
    {HASH, "train mnist --data digits --recipe schedulefree/f32 --epochs 1 --threads 1 --quiet"},
    {NOTHING, "compare lm --data text --steps 1 --recipes adamw/f32,adamw/bf16:release --out new --checkpoint newer "
              "--log new.csv " SMALL},
    {NOTHING, "compare mnist --recipes adamw/f32,sgd/bf16 --out new --expect sgd/bf16~100 --json " IMAGES},
    {ALL, "generate --checkpoint run --bytes 6 --threads 1"},
    {ALL, "generate --checkpoint free --bytes 6 --threads 1 --json"},
    {ALL, "inspect free --json"},
    {ALL, "inspect kahan"},
    {ALL, "inspect kahan/model.safetensors --json"},
    {ALL, "convert kahan new.csv --to int8-sr --json"},
    {ALL, "inspect packed"},
    {HASH, LM "--steps 1 --init packed --recipe adamw/int8-ecc4 --json"},
    {ALL, "inspect kept"},
    {ALL, "inspect kept --json"},
    {ALL, "plan --checkpoint kahan --all --json"},
    {ALL, "plan --params 1e6 --memory 1M --recipes adamw/f32,lion/bf16-sr"},
    {ALL, "info"},
    {ALL, "info --json"},
    {ALL, "random --generator mixer --count 9"},
    {ALL, "train lm --help"},
    {NOTHING, "bench --recipes adamw/bf16-sr/int8,muon/bf16-sr --params 4096 --tensors 2 --rounds 1 --threads 1 --csv "
              "new.csv --json"},
};
enum { COMMANDS_HERE = sizeof commands_here / sizeof *commands_here };

/* Memory that a child shares with its parent. */
static struct shared {
    char fault[128], violation[4096];
    unsigned long faults, struck, refused;
} *shared;

static char expected[1 << 17];

/* Cuts the output to the part that must be the same. */
static void cut(enum same same, char *text)
{
    char *at = strstr(text, same == HASH ? "hash" : "");
    if (same == ALL) return;
    if (at) memmove(text, at, strlen(at) + 1);
    text[same == NOTHING ? 0 : strcspn(text, "\n,")] = 0;
}

static int descriptors(void)
{
    int n = 0;
    DIR *stream = opendir("/proc/self/fd");
    while (stream && readdir(stream)) n++;
    if (stream) closedir(stream);
    return n;
}

/* Brings the folder to the state in which each run finds it. */
static void prepare(int command)
{
    static const char *const made[] = {"new", "newer", "run"};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) remove_tree(made[i]);
    unlink("new.csv");
    for (int i = 0; i < 2; i++) {
        char name[64];
        snprintf(name, sizeof name, "new-%s-seed1.csv", i ? "adamw-bf16-bf16-sr-release" : "adamw-f32-f32");
        unlink(name);
    }
    if (strstr(commands_here[command].line, " run ")) forge("kahan", "run", "trainer.json", "", "");
}

static void violated(const char *what, int status)
{
    if (!shared->violation[0])
        snprintf(shared->violation, sizeof shared->violation, "%s: status %d: %.1500s", what, status, program_errors);
}

static void judge(int command, const char *fault)
{
    enum same same = commands_here[command].same;
    snprintf(shared->fault, sizeof shared->fault, "%s", fault);
    prepare(command);
    int open_before = descriptors();
    uint64_t blocks = inject_live_blocks();
    demand(inject_arm(fault), "no such fault");
    int status = program(commands_here[command].line);
    shared->struck += inject_struck() != 0;
    inject_arm(NULL);
    size_t lines = 0;
    for (const char *line = program_errors; *line; line = strchr(line, '\n') + 1) {
        lines += strncmp(line, "note: ", 6) && strncmp(line, "warning: ", 9) && strncmp(line, "halfstep: note: ", 16);
        if (!strchr(line, '\n')) break;
    }
    if (status != 0 && status != 1) violated("neither status 0 nor 1", status);
    if (status == 1 && (lines < 1 || lines > 2 || !strstr(program_errors, "halfstep: ")))
        violated("not one sentence", status);
    if (status == 1 && (strstr(program_errors, ": \n") || strstr(program_errors, ": :")))
        violated("a sentence without its end", status);
    if (status == 0) {
        cut(same, printed);
        if (strcmp(printed, expected)) violated("status 0, and something else printed", status);
    }
    if (inject_live_blocks() != blocks) violated("memory is lost", status);
    if (descriptors() != open_before) violated("a descriptor is lost", status);
    shared->refused += status == 1;
    shared->faults++;
}

static void judge_all(int command, size_t every)
{
    static uint64_t numbers[4096];
    char fault[128], text[64], *list[8];
    prepare(command);
    /* One run first, because some memory is allocated once. */
    demand(!program(commands_here[command].line), program_errors);
    prepare(command);
    inject_record("ours");
    demand(!program(commands_here[command].line), program_errors);
    inject_record(NULL);
    strcpy(expected, printed);
    cut(commands_here[command].same, expected);
    static struct {
        int call;
        uint64_t number;
    } place[1 << 14];
    size_t places = 0;
    for (int call = 0; call < INJECT_CALLS; call++) {
        size_t n = inject_places(call, numbers, sizeof numbers / sizeof *numbers);
        for (size_t i = 0; i < n && places < sizeof place / sizeof *place; i++, places++) {
            place[places].call = call;
            place[places].number = numbers[i];
        }
    }
    /* Commands begin at different places, so that one with few places still gets a fault. */
    size_t start = (size_t)command % (places && places < every ? places : every);
    for (size_t i = start; i < places && !shared->violation[0]; i += every) {
        size_t errors = 0;
        snprintf(text, sizeof text, "%s", inject_errors[place[i].call]);
        for (char *word = strtok(text, " "); word; word = strtok(NULL, " "))
            if (strcmp(word, "KILL")) list[errors++] = word;
        if (!errors) continue;
        snprintf(fault, sizeof fault, "%s:%s:%llu%s", inject_names[place[i].call], list[i / every % errors],
                 (unsigned long long)place[i].number, i / every / errors % 2 ? "+" : "");
        judge(command, fault);
    }
}

static void make_digits(void)
{
    demand(!mkdir("digits", 0777), "no folder");
    static unsigned char images[16 + 8 * 784] = {0, 0, 8, 3, 0, 0, 0, 8, 0, 0, 0, 28, 0, 0, 0, 28};
    static unsigned char labels[8 + 8] = {0, 0, 8, 1, 0, 0, 0, 8, 0, 1, 2, 3, 4, 5, 6, 7};
    for (size_t i = 16; i < sizeof images; i++) images[i] = (unsigned char)(i * 7);
    for (int i = 0; i < 2; i++) {
        put_file(i ? "digits/train-images-idx3-ubyte" : "digits/t10k-images-idx3-ubyte", images, sizeof images);
        put_file(i ? "digits/train-labels-idx1-ubyte" : "digits/t10k-labels-idx1-ubyte", labels, sizeof labels);
    }
}

int main(int argc, char **argv)
{
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("HALFSTEP_THREADS", "1", 1);
    int next = test_init(argc, argv);
    test_filter = "";
    inject_hold(1);
    make_scratch();
    demand(!chdir(scratch), "no folder");
    static char text[2000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(32 + i * i % 91);
    put_file("text", text, sizeof text);
    make_digits();
    demand(!program(LM "--steps 2 --recipe adamw/bf16-kahan --checkpoint kahan --log new.csv"), program_errors);
    put_store("kept", "adamw/bf16-kahan", "adamw/bf16-kahan");
    demand(!program(LM "--steps 2 --recipe sgd/int8-ecc4 --checkpoint packed"), program_errors);
    demand(!program(LM "--steps 2 --recipe schedulefree/f32 --checkpoint free"), program_errors);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    demand(shared != MAP_FAILED, "no memory");
    int only = argc > next + 1 ? atoi(argv[next]) : -1;
    size_t every = BY_LENGTH(12, 6, 1);
    for (int command = 0; command < COMMANDS_HERE; command++) {
        if (only >= 0 && command != only) continue;
        test_open_group(commands_here[command].line);
        memset(shared, 0, sizeof *shared);
        fflush(NULL);
        pid_t child = fork();
        if (!child) {
            if (only >= 0) {
                prepare(command);
                demand(!program(commands_here[command].line), program_errors);
                strcpy(expected, printed);
                cut(commands_here[command].same, expected);
                judge(command, argv[next + 1]);
            } else {
                judge_all(command, every);
            }
            test_leave(0);
        }
        int status = test_child_status(child);
        CHECK(status == 0, "%s: the process ends with %d, signal %d", shared->fault, WEXITSTATUS(status),
              WTERMSIG(status));
        CHECK(!shared->violation[0], "%s: %s", shared->fault, shared->violation);
        if (status || shared->violation[0]) printf("     reproduce: %s %d %s\n", test_program, command, shared->fault);
        CHECK(only >= 0 || (shared->struck * 2 > shared->faults && (shared->refused || every > 1)),
              "%lu faults, %lu struck, %lu told", shared->faults, shared->struck, shared->refused);
        printf("     %lu faults, %lu ended in a sentence\n", shared->faults, shared->refused);
        test_close_group();
    }
    demand(!chdir("/"), "no root");
    return test_done();
}
