"""Tests what a save promises beyond calls that fail. The cases are the order of syncs (a loss of
power), a full disk, two trainers in one folder, and pipes that nobody reads.

    durability.py [--all] [--csv]      prints one row per kind of fault: kind | faults | what
                                       happened | wrong

A loss of power is judged in two ways. The first is the order of calls in the injector's log:

* A file is synced before it is renamed into place.
* The folder of a checkpoint is synced before the manifest names it.
* A parent is synced before anything relies on its entries.
* The old checkpoint is removed after the new one is safe.

The second is the state on the disk. The program is killed before each file call of a save. What was
not synced by then is taken back, in the two extreme ways: files become empty, or names vanish. The
folder must still open.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sweep
from sweep import PROGRAM, TRAIN, Wrong, run, sound, steady_json

RUN = f"{TRAIN} --checkpoint run --json"
GO_ON = "train lm --checkpoint run --resume --steps 6 --json --quiet"


def state_hash(folder):
    return steady_json(sound(folder, GO_ON, "going on"), "going on")["state_hash"]


# ---- Loss of power -------------------------------------------------------------------------------


class Disk:
    """Replays a log of calls and knows what is safely on the disk: contents of files, names in
    folders."""

    def __init__(self, root):
        self.root, self.open = root, {}
        self.dirty = set()  # present paths of files whose contents are not synced
        # path -> "made" | "gone": changes of names whose folder has not been synced since
        self.names = {}
        self.replaced = {}

    def path(self, name):
        return os.path.normpath(os.path.join(self.root, name))

    def apply(self, name, fd, outcome, first, second):
        if outcome in ("struck", "-1"):
            return
        if name == "open" and int(outcome) >= 0:
            self.open[int(outcome)] = self.path(first)
            if second == "create" and self.path(first) not in self.known:
                self.made(self.path(first))
                self.dirty.add(self.path(first))
        elif name == "write" and int(fd) in self.open:
            self.dirty.add(self.open[int(fd)])
        elif name == "fsync" and int(fd) in self.open:
            at = self.open[int(fd)]
            self.dirty.discard(at)
            if os.path.isdir(at) or at in self.folders:
                for path in [p for p in self.names if os.path.dirname(p) == at]:
                    del self.names[path]
        elif name == "close":
            self.open.pop(int(fd), None)
        elif name == "rename":
            self.rename(self.path(first), self.path(second))
        elif name in ("link", "symlink"):
            self.made(self.path(second))
        elif name == "mkdir":
            self.folders.add(self.path(first))
            self.made(self.path(first))
        elif name in ("unlink", "rmdir"):
            self.known.discard(self.path(first))
            self.dirty.discard(self.path(first))
            self.names[self.path(first)] = "gone"

    def made(self, path):
        self.known.add(path)
        self.names[path] = "made"

    def rename(self, source, target):
        moved = {
            p: target + p[len(source) :]
            for p in [*self.known, *self.dirty, *self.names, *self.folders]
            if p == source or p.startswith(source + "/")
        }
        for group in self.known, self.dirty, self.folders:
            for p in [p for p in group if p in moved]:
                group.discard(p)
                group.add(moved[p])
        self.names = {moved.get(p, p): how for p, how in self.names.items()}
        self.open = {fd: moved.get(p, p) for fd, p in self.open.items()}
        self.names[source] = "gone"
        self.made(target)

    known = folders = None


DISK_CALLS = "open write fsync close rename link symlink mkdir unlink rmdir".split()


def calls(log):
    for line in open(log):
        _, name, who, _, fd, outcome, first, second = line.rstrip("\n").split("\t")
        if who == "ours" and name in DISK_CALLS:
            yield name, fd, outcome, first, second


def order(base):
    """Judges the order of the calls of three saves, the third of which removes the first
    checkpoint."""
    folder = os.path.join(base, "order")
    os.mkdir(folder)
    log = os.path.join(base, "order.log")
    status, _, err = run(folder, f"{RUN} --steps 3 --checkpoint-every 1 --keep 2", log=log)
    if status:
        raise Wrong(err)
    disk = Disk(folder)
    disk.known, disk.folders = set(), {folder}
    manifest = os.path.join(folder, "run", "manifest.json")
    saves = judged = 0
    for name, fd, outcome, first, second in calls(log):
        if name == "rename" and outcome == "0":
            source, target = disk.path(first), disk.path(second)
            unsynced = [p for p in disk.dirty if p == source or p.startswith(source + "/")]
            # Links beside the manifest only help other tools.
            if unsynced:
                raise Wrong(f"{target} comes into place before {unsynced} is synced")
            judged += 1
            if target == manifest:
                saves += 1
                inside = [
                    p for p in disk.names if "/run/checkpoint-" in p and disk.names[p] == "made"
                ]
                if inside:
                    raise Wrong(
                        f"the manifest names a checkpoint whose {inside} may be gone after a loss"
                        " of power"
                    )
        if (
            name in ("unlink", "rmdir")
            and "/run/checkpoint-" in disk.path(first)
            and disk.names.get(manifest)
        ):
            raise Wrong("an old checkpoint is removed before the new manifest is durable")
        disk.apply(name, fd, outcome, first, second)
    if saves != 3 or judged < 9:
        raise Wrong(f"the log shows {saves} saves and {judged} renames")
    if manifest in disk.names or manifest in disk.dirty:
        raise Wrong("the program ends before the manifest is durable")
    return judged


def power_loss(base, every):
    """Kills before each file call of the second save, loses what was not synced, and goes on."""
    fixture = os.path.join(base, "power.fixture")
    os.mkdir(fixture)
    sound(fixture, f"{RUN} --steps 2", "the first save")
    good = os.path.join(base, "power.good")
    subprocess.run(["cp", "-a", fixture, good], check=True)
    expected = state_hash(good)
    again = "train lm --checkpoint run --resume --steps 3 --json --quiet"
    log = os.path.join(base, "power.log")
    probe = os.path.join(base, "power.probe")
    subprocess.run(["cp", "-a", fixture, probe], check=True)
    run(probe, again, log=log)
    total = sum(
        1
        for line in open(log)
        if line.split("\t")[2] == "ours" and line.split("\t")[1] in FILE_CALLS
    )
    count = 0
    for number in range(1, total + 1, every):
        for extreme in "lost", "names kept":
            folder = os.path.join(base, f"power-{number}-{extreme[:4]}")
            subprocess.run(["cp", "-a", fixture, folder], check=True)
            log = folder + ".log"
            run(folder, again, f"FILES:KILL:{number}:ours", log)
            disk = Disk(folder)
            disk.known = {os.path.join(at, n) for at, _, names in os.walk(fixture) for n in names}
            disk.known = {folder + p[len(fixture) :] for p in disk.known}
            disk.folders = {folder + at[len(fixture) :] for at, _, _ in os.walk(fixture)}
            for call in calls(log):
                disk.apply(*call)
            for path in disk.dirty:
                if os.path.isfile(path):
                    # A new inode: other links to the old one keep their contents.
                    open(path, "wb").close()
            if extreme == "lost":
                for path in [p for p, how in disk.names.items() if how == "made"]:
                    # A rename over a name brings the old one back.
                    old = fixture + path[len(folder) :]
                    if os.path.lexists(path):
                        (
                            shutil.rmtree(path)
                            if os.path.isdir(path) and not os.path.islink(path)
                            else os.unlink(path)
                        )
                    if os.path.isfile(old):
                        shutil.copy2(old, path)
            count += 1
            try:
                if state_hash(folder) != expected:
                    raise Wrong("other bits")
            except Wrong as wrong:
                raise Wrong(f"power lost before file call {number} ({extreme}): {wrong}")
            shutil.rmtree(folder)
    return count


FILE_CALLS = [name for name, (kind, _) in sweep.known_calls().items() if kind == "FILES"]


# ---- A full disk ---------------------------------------------------------------------------------


def full_disk(base):
    """Runs on disks of rising size. A run either saves or says why not, and an earlier save still
    goes on."""
    ample = os.path.join(base, "ample")
    os.mkdir(ample)
    expected = steady_json(
        sound(ample, f"{RUN} --steps 6 --checkpoint-every 2 --keep 3", "room for all"),
        "",
    )["state_hash"]
    mountable = os.geteuid() == 0
    refused = 0
    kilobytes = (16, 80, 144, 208, 272, 336, 400, 480, 600, 900)
    for size in kilobytes:
        folder = os.path.join(base, f"full-{size}")
        os.mkdir(folder)
        command = f"{RUN} --steps 6 --checkpoint-every 2 --keep 3"
        if (
            mountable
            and subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder],
                stderr=subprocess.DEVNULL,
            ).returncode
            == 0
        ):
            try:
                status, out, err = run(folder, command)
                if status == 0 and steady_json(out, "")["state_hash"] != expected:
                    raise Wrong(f"{size} KiB: status 0 with other bits")
                if status not in (0, 1) or (
                    status == 1 and not re.search(r"^halfstep: .*No space left", err, re.M)
                ):
                    raise Wrong(f"{size} KiB: status {status}: {err}")
                refused += status
                roomy = os.path.join(base, f"roomy-{size}")
                shutil.copytree(folder, roomy, symlinks=True)
            finally:
                subprocess.run(["umount", folder], check=True)
        else:
            mountable = False
            done = subprocess.run(
                [PROGRAM, *command.split()],
                cwd=folder,
                capture_output=True,
                timeout=60,
                preexec_fn=lambda: (
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 256, size * 256)),
                ),
            )
            refused += done.returncode
            if done.returncode not in (0, 1) or (
                done.returncode and b"halfstep: " not in done.stderr
            ):
                raise Wrong(f"{size} KiB a file: status {done.returncode}: {done.stderr}")
            roomy = folder
        if (
            os.path.exists(os.path.join(roomy, "run", "manifest.json"))
            and state_hash(roomy) != expected
        ):
            raise Wrong(f"{size} KiB: the run goes on with other bits")
    if not 0 < refused < len(kilobytes):
        raise Wrong(f"{refused} of {len(kilobytes)} runs were refused")
    return (
        len(kilobytes),
        (
            f"{'tmpfs' if mountable else 'limits of file sizes'}; {refused} refused in a sentence,"
            " the others saved"
        ),
    )


# ---- Two trainers, closed pipes ------------------------------------------------------------------


def two_trainers(base, pairs):
    alone = os.path.join(base, "alone")
    os.mkdir(alone)
    command = f"{RUN} --steps 40 --checkpoint-every 1"
    expected = steady_json(sound(alone, command, "alone"), "")["state_hash"]
    for pair in range(pairs):
        folder = os.path.join(base, f"two-{pair}")
        os.mkdir(folder)
        both = [
            subprocess.Popen(
                [PROGRAM, *command.split()],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for _ in range(2)
        ]
        done = []
        for process in both:
            try:
                out, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Wrong("two trainers: a hang")
            done.append((process.returncode, out, err.decode()))
        finished = [out for status, out, err in done if status == 0]
        for status, _, err in done:
            if status not in (0, 1) or (
                status == 1 and not err.strip().splitlines()[-1].startswith("halfstep: ")
            ):
                raise Wrong(f"two trainers: status {status}: {err}")
        if len(finished) != 1:
            raise Wrong(
                f"two trainers: {len(finished)} of them end well: {[err for _, _, err in done]}"
            )
        if any(steady_json(out, "")["state_hash"] != expected for out in finished):
            raise Wrong("two trainers: other bits")
        found = steady_json(
            sound(
                folder,
                "train lm --checkpoint run --resume --steps 41 --json --quiet",
                "after two trainers",
            ),
            "",
        )
        if found["first_step"] != 40:
            raise Wrong(f"after two trainers the run is at step {found['first_step']}")
    return pairs, "one finished, the other was refused in a sentence"


def closed_pipes(base):
    kinds = (
        "info",
        "plan --params 7e9 --all",
        "inspect ../init",
        "generate --checkpoint ../init --bytes 5000",
        f"{TRAIN} --steps 1",
        "--help",
    )
    for command in kinds:
        for which in "stdout", "stderr":
            ends = os.pipe()
            os.close(ends[0])
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            streams[which] = ends[1]
            folder = os.path.join(base, "pipe")
            os.makedirs(folder, exist_ok=True)
            process = subprocess.Popen([PROGRAM, *command.split()], cwd=folder, **streams)
            os.close(ends[1])
            err = process.communicate(timeout=60)[1]
            # Python ignores SIGPIPE, and its children inherit that unless told otherwise. Both ways
            # occur.
            if which == "stdout" and process.returncode not in (1, -signal.SIGPIPE):
                raise Wrong(f"{command} with nobody at stdout: status {process.returncode}: {err}")
            if which == "stderr" and process.returncode not in (0, -signal.SIGPIPE):
                raise Wrong(f"{command} with nobody at stderr: status {process.returncode}")
    return 2 * len(kinds), "the signal, or status 1"


def decimal_commas(base):
    """Runs under a locale with decimal commas: the program, and a host (Python) that sets the
    locale itself and uses the libraries."""
    place = os.path.join(base, "locale")
    os.mkdir(place)
    subprocess.run(
        ["localedef", "-c", "-i", "de_DE", "-f", "UTF-8", os.path.join(place, "de_DE.UTF-8")],
        capture_output=True,
    )
    environment = {**os.environ, "LOCPATH": place, "LC_ALL": "de_DE.UTF-8", "OMP_NUM_THREADS": "1"}
    probe = (
        "import locale; locale.setlocale(locale.LC_ALL, '');"
        " print(locale.localeconv()['decimal_point'])"
    )
    if (
        subprocess.run(
            [sys.executable, "-c", probe], env=environment, capture_output=True, text=True
        ).stdout.strip()
        != ","
    ):
        return 0, "no locale with decimal commas here, and localedef makes none"
    commands = (
        "plan --params 1.5e9 --memory 2.5G --json",
        f"{RUN} --steps 3 --lr 2.5e-3 --log log.csv",
        GO_ON,
    )
    found = {}
    for name, env in (
        ("point", {**os.environ, "LC_ALL": "C", "OMP_NUM_THREADS": "1"}),
        (
            "comma",
            environment,
        ),
    ):
        folder = os.path.join(base, name)
        os.mkdir(folder)
        found[name] = []
        for command in commands:
            done = subprocess.run(
                [PROGRAM, *command.split()], cwd=folder, env=env, capture_output=True, timeout=60
            )
            if done.returncode:
                raise Wrong(f"{command} with LC_ALL={env['LC_ALL']}: {done.stderr}")
            found[name].append(steady_json(done.stdout, command))
        found[name].append(sweep.steady_csv(os.path.join(folder, "log.csv")))
    if found["point"] != found["comma"]:
        raise Wrong(sweep.difference(found["point"], found["comma"]))
    script = """
import ctypes, locale, os, sys
locale.setlocale(locale.LC_ALL, "")
assert locale.localeconv()["decimal_point"] == ","
core = ctypes.CDLL(sys.argv[1] + "/libhalfstep.so", ctypes.RTLD_GLOBAL)
io = ctypes.CDLL(sys.argv[1] + "/libhalfstep_io.so")
opt, group, value = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_double()
assert core.halfstep_create(None, ctypes.byref(opt)) == 0
assert core.halfstep_add_group(opt, b"adamw/bf16-sr/int8", ctypes.byref(group)) == 0
assert core.halfstep_set_hyper(opt, group, b"lr", ctypes.c_double(0.25)) == 0
core.halfstep_get_hyper(opt, group, b"lr", ctypes.byref(value))
assert value.value == 0.25
checkpoint, text = ctypes.c_void_p(), ctypes.create_string_buffer(512)
code = io.halfstep_open_checkpoint(ctypes.byref(checkpoint), b"run", None, text, 512)
assert code == 0, text.value
assert core.halfstep_set_hyper(opt, group, b"beta1", ctypes.c_double(1.5)) < 0
core.halfstep_error_detail.restype = ctypes.c_char_p
assert b"1.5" in core.halfstep_error_detail(opt) or b"1,5" in core.halfstep_error_detail(opt)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, sweep.BUILD],
        cwd=os.path.join(base, "comma"),
        env=environment,
        capture_output=True,
    )
    if done.returncode:
        raise Wrong(f"the libraries in a host with decimal commas: {done.stderr.decode()[-400:]}")
    return len(commands) + 1, "the numbers of the C locale"


def main():
    everything = "--all" in sys.argv
    wrongs = 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="halfstep-durability-", dir=memory) as base:
        sweep.make_data(base)
        rows = [
            (
                "order of syncs in three saves",
                lambda: (order(base), "every rename after the syncs that it relies on"),
            ),
            (
                "power lost before a file call",
                lambda: (power_loss(base, 1 if everything else 35), "goes on with the right bits"),
            ),
            ("full disk", lambda: full_disk(base)),
            ("two trainers in one folder", lambda: two_trainers(base, 10 if everything else 2)),
            ("closed pipes", lambda: closed_pipes(base)),
            ("a locale with decimal commas", lambda: decimal_commas(base)),
        ]
        for name, action in rows:
            start = time.time()
            try:
                count, what = action()
                print(
                    f"| {name} | {count} | {what} | 0 |   ({time.time() - start:.0f} s)", flush=True
                )
            except Wrong as wrong:
                wrongs += 1
                print(f"| {name} | | {wrong} | 1 |", flush=True)
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
