#!/usr/bin/env python3
"""Runs the tests of `make test` under one setting after the other, and prints a table of failures.

    machines.py FOLDER JOBS [SETTING...]

FOLDER holds the build. FOLDER/machines keeps a log and a result for each setting. A setting that
has a result for this commit is not run again, so an interrupted run goes on where it was. Settings
that are named are run in any case, and no others. Tests that make a build of another kind are left
out.

A probe looks for the effect of a setting first. Without an effect there is no run, and the table
says so.
"""

import datetime
import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "65534"

ISA_OF_ONEDNN = (
    "ONEDNN_VERBOSE=1 $BUILD/venv/bin/python -c"
    " 'import torch; a = torch.ones(64, 64).bfloat16(); a @ a'"
    " | sed -n 's/.*info,cpu,isa://p'"
)
ISA_OF_TORCH = (
    "$BUILD/venv/bin/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())'"
)
ISA = """$BUILD/halfstep info --json | sed -n 's/^ *"isa": "\\(.*\\)",$/\\1/p'"""
THREADS = """$BUILD/halfstep info --json | grep '"threads"'"""
USER = "id -u; umask; ls /dev/shm 2>&1 | head -n 1; echo $TMPDIR; ls -d $HOME 2>&1 || true"
COMMA_AND_DAY = """$BUILD/venv/bin/python -c 'import datetime, locale
print(locale.localeconv()["decimal_point"], datetime.datetime.now().strftime("on the %d"))'"""
LIMIT = """free -b | sed -n 's/Mem: *\\([0-9]*\\).*/\\1/p'; cat ${LIMIT:-/dev/null}"""

#: name -> what the table says, environment, the probe (a line for the shell)
SETTINGS = {
    "plain": ("nothing", {}, None),
    "onednn-avx2": ("`ONEDNN_MAX_CPU_ISA=AVX2`", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ISA_OF_ONEDNN),
    "onednn-avx512": (
        "`ONEDNN_MAX_CPU_ISA=AVX512_CORE`",
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        ISA_OF_ONEDNN,
    ),
    "aten-default": (
        "`ATEN_CPU_CAPABILITY=default`",
        {"ATEN_CPU_CAPABILITY": "default"},
        ISA_OF_TORCH,
    ),
    "isa-avx2": ("`HALFSTEP_ISA=avx2`", {"HALFSTEP_ISA": "avx2"}, ISA),
    "one-core": ("one core (`taskset`)", {}, "nproc"),
    "four-threads": (
        "`OMP_NUM_THREADS=4 HALFSTEP_THREADS=4`",
        {"OMP_NUM_THREADS": "4", "HALFSTEP_THREADS": "4"},
        THREADS,
    ),
    "user": (
        "an ordinary user: no HOME, umask 077, no /dev/shm, a TMPDIR with a blank and an umlaut",
        {"HOME": "/nonexistent"},
        USER,
    ),
    "turkish": ("tr_TR.UTF-8, in Python by `setlocale()`; another day", {}, COMMA_AND_DAY),
    "german": ("de_DE.UTF-8, in Python by `setlocale()`; another day", {}, COMMA_AND_DAY),
    "order-1": (
        "Python tests in random order, seed 1",
        {"HALFSTEP_TEST_ORDER": "1"},
        "echo $HALFSTEP_TEST_ORDER",
    ),
    "order-2": (
        "Python tests in random order, seed 2",
        {"HALFSTEP_TEST_ORDER": "2"},
        "echo $HALFSTEP_TEST_ORDER",
    ),
    "memory-8g": ("8 GiB of memory in all", {}, LIMIT),
}

# Sets the locale of Python when it starts, as a program around the package may. halfstep's own
# program asks for none.
SETLOCALE = """#define _GNU_SOURCE
#include <errno.h>
#include <locale.h>
#include <string.h>
__attribute__((constructor)) static void begin(void)
{
    if (!strncmp(program_invocation_short_name, "python", 6)) setlocale(LC_ALL, "");
}
"""
# Gives up all rights, hides /dev/shm, and runs a command in the folder $1. Python's installation $2
# may lie in a folder $3 that only root may enter, so that folder then shows the installation alone.
AS_USER = f"""mount -t tmpfs -o mode=0,ro none /dev/shm || exit 1
if [ -n "$3" ]; then
    mkdir -p "$1/python" && mount --bind "$2" "$1/python" &&
    mount -t tmpfs -o mode=755 none "$3" && mkdir -p "$2" && mount --move "$1/python" "$2" || exit 1
fi
umask 077
cd "$1" && shift 3
exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --no-new-privs -- "$@"
"""


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, cwd=ROOT, **options)


def output(*command):
    return run(*command, stdout=subprocess.PIPE).stdout.strip()


class NotHere(Exception):
    """This machine cannot be set so."""


class Setting:
    """What a setting adds to the environment and puts in front of commands."""

    def __init__(self, name, build, folder, jobs):
        self.name, self.build, self.folder, self.jobs = name, build, folder, jobs
        self.text, variables, self.probe = SETTINGS[name]
        self.environment = {**os.environ, **variables, "BUILD": str(build)}
        self.before = []
        self.group = None
        try:
            getattr(self, "_" + name.replace("-", "_"), lambda: None)()
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotHere(str(error)) from None

    def _one_core(self):
        self.before = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]

    def _turkish(self):
        self._locale("tr_TR")

    def _german(self):
        self._locale("de_DE")

    def _locale(self, name):
        place = self.folder / "locales"
        place.mkdir(exist_ok=True)
        full = f"{name}.UTF-8"
        if not (place / full).exists():
            run("localedef", "-i", name, "-f", "UTF-8", str(place / full))
        library = self.folder / "setlocale.so"
        run("cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-", input=SETLOCALE)
        # Another day than UTC's lies in the west before noon, and in the east afterwards.
        morning = datetime.datetime.now(datetime.timezone.utc).hour < 12
        self.environment.update(
            LOCPATH=str(place),
            LC_ALL=full,
            LD_PRELOAD=str(library),
            TZ="W12" if morning else "E-13",
        )

    def _user(self):
        """Builds the committed tree once more, as a user who may write nowhere else."""
        place = Path("/var/tmp/halfstep-user")
        run("rm", "-rf", str(place))
        tree, scratch = place / "tree", place / "tmp ä"
        scratch.mkdir(parents=True)
        run("git", "clone", "-q", "--no-hardlinks", ".", str(tree))
        (tree / "build").mkdir()
        run("cp", "-a", str(self.build / "venv"), str(tree / "build/venv"))
        (tree / "build/venv/halfstep.installed").unlink()
        run("chown", "-R", f"{NOBODY}:{NOBODY}", str(place))
        python = (self.build / "venv/bin/python").resolve().parents[1]
        closed = [above for above in python.parents if not above.stat().st_mode & stat.S_IXOTH]
        inside = [str(python), str(closed[-1]) if closed else ""]
        self.before = ["unshare", "-m", "bash", "-c", AS_USER, "_", str(tree), *inside]
        self.environment.update(TMPDIR=str(scratch), BUILD=str(tree / "build"))
        self.environment.pop("XDG_CACHE_HOME", None)
        self.build = tree / "build"

    def _memory_8g(self):
        """Makes a control group, of version 2 or 1."""
        groups = dict(
            line.split(":", 2)[1:] for line in open("/proc/self/cgroup", encoding="utf-8")
        )
        if "memory" in groups:
            root, own, file = "/sys/fs/cgroup/memory", groups["memory"], "memory.limit_in_bytes"
        else:
            root, own, file = "/sys/fs/cgroup", groups[""], "memory.max"
        self.group = Path(root + own.strip()) / f"halfstep.{os.getpid()}"
        self.group.mkdir()
        (self.group / file).write_text(str(8 << 30))
        self.environment["LIMIT"] = str(self.group / file)
        enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
        self.before = ["bash", "-c", enter, str(self.group)]

    def seen(self):
        """Returns what a process sees of the setting."""
        done = subprocess.run(
            [*self.before, "bash", "-c", self.probe],
            env=self.environment,
            cwd=ROOT,
            text=True,
            capture_output=True,
        )
        if done.returncode:
            raise NotHere(done.stderr.strip() or f"status {done.returncode}")
        return done.stdout

    def tests(self):
        """Runs the tests with their output in the log. Returns the names of those that failed, and
        the last line."""
        command = ["bash", "scripts/test.sh", "again", str(self.build), self.jobs]
        if self.name.startswith("order-"):
            command += ["-R", "^python$"]
        if self.name == "user":
            build = (
                f"bash scripts/build.sh build {self.jobs} -DHALFSTEP_TESTS=ON -DHALFSTEP_WERROR=ON"
            )
            command = [
                "bash",
                "-c",
                f"{build} && bash tests/packages/python_package.sh && exec {' '.join(command)}",
            ]
        log = self.folder / f"{self.name}.log"
        with open(log, "w", encoding="utf-8") as file:
            subprocess.run(
                [*self.before, *command],
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = {line.split()[1] for line in lines if re.match(r"(FAILED|ERROR) \S*::", line)}
        failed |= set(re.findall(r"^\t *\d+ - (\S+) \((?!Skipped)", "\n".join(lines), re.M)) - {
            "python"
        }
        last = lines[-1] if lines else "no output"
        return sorted(failed), last if " passed, " in last else f"stopped: {last}"

    def end(self):
        if self.group:
            self.group.rmdir()


def result_of(name, build, folder, jobs):
    """Returns the cells that the table has for a setting, and whether all is well."""
    try:
        setting = Setting(name, build, folder, jobs)
        try:
            if setting.probe:
                plain = Setting("plain", build, folder, jobs)
                plain.probe = setting.probe
                seen = setting.seen()
                if seen == plain.seen():
                    return [SETTINGS[name][0], "no effect on this machine", ""]
            failed, last = setting.tests()
        finally:
            setting.end()
    except NotHere as why:
        return [SETTINGS[name][0], "could not be set here", str(why).replace("\n", " ")]
    return [setting.text, last, ", ".join(f"`{test}`" for test in failed)]


def processor():
    """Returns the name, family and model of the processor, and the number of cores."""
    facts = dict(re.findall(r"^([^:]+?) *: *(.*)", output("lscpu"), re.M))
    name = f"{facts['Model name']}, family {facts.get('CPU family')}, model {facts.get('Model')}"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    build, jobs, *chosen = sys.argv[1:]
    build = Path(build).resolve()
    unknown = [name for name in chosen if name not in SETTINGS]
    if unknown:
        sys.exit(f"machines.py: unknown setting {unknown[0]!r}; known: {', '.join(SETTINGS)}")
    folder = build / "machines"
    folder.mkdir(exist_ok=True)
    commit = output("git", "describe", "--always", "--dirty", "--abbrev=8")
    rows = []
    for name in SETTINGS:
        file = folder / f"{name}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if name in chosen if chosen else kept.get("commit") != commit:
            print(f"==> {name}: {SETTINGS[name][0]}", flush=True)
            begin = time.monotonic()
            cells = result_of(name, build, folder, jobs)
            kept = {"commit": commit, "cells": cells, "seconds": round(time.monotonic() - begin)}
            file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            print(f"    {cells[1]} {cells[2]}", flush=True)
        if kept:
            rows.append([*kept["cells"], kept["commit"]])
    print(f"\n{processor()}; {datetime.date.today()}\n")
    for row in [["setting", "tests", "failed", "commit"], ["---"] * 4, *rows]:
        print("| " + " | ".join(row) + " |")


main()
