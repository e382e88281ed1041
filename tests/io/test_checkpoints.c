/* Tests checkpoints: what a folder holds after each save, beside foreign files, after kills, losses of power and calls
 * that fail, and which damage is found. Over 500 lines because all cases share one small checkpoint. */
#define HALFSTEP_ADVANCED
#include "disk.h"
#include "halfstep_io.h"

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

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_disk();

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
