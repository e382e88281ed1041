"""Runs what can be run of wheels (packaging/run.sh calls this). It takes the very libraries in each
wheel. Programs that use them are compiled by zig for the wheel's platform.

* packaging/load.c finds every function that the package binds, and hears what is said of GPUs.
* Sizes and offsets of structures are those of tests/golden/abi.txt.
* tests/core/test_golden.c takes every case once on every instruction set that runs here.
* The other tests of tests/ that use the public interface only run in full, or --short where
  another system is stood in for.
* Python installs the wheel of this machine by pip, steps, verifies, and keeps states in a file.

Programs for systems that nothing here can stand in for are compiled and linked only, which the
note says.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import libraries
import lief
import ziglang
from results import note, platforms

SOURCE = pathlib.Path(__file__).parent.parent
ZIG = pathlib.Path(ziglang.__file__).parent / "zig"
FLAGS = [
    *("-O1", "-g0", "-std=c11", "-D_GNU_SOURCE=", "-DHSTEP_TEST_SHARED=1"),
    *("-ffp-contract=off", "-fno-sanitize=undefined", "-w"),
    *(f"-I{SOURCE / folder}" for folder in ("include", "src", "tools", "tests", "tests/tools", "")),
]
#: instruction sets of a processor, by which golden hashes are shared between processes
ISAS = re.findall(r"^ISA\((\w+), *(\w+)", (SOURCE / "src/vec/isas.def").read_text(), re.M)
MACHINE = platform.machine()
WINE, WINESERVER = "/usr/lib/wine/wine64", "/usr/lib/wine/wineserver"


class Failed(Exception):
    """A program failed; its output."""


def run(command, **environment):
    """Returns the output of a command. Raises Failed with it where the status is not 0."""
    # Nothing of the caller's may choose other libraries.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("HALFSTEP_", "LD_"))}
    # A file and no pipe: the services that wine starts would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        done = subprocess.run(
            [str(word) for word in command],
            env={**own, **{k: str(v) for k, v in environment.items()}},
            cwd=SOURCE,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.seek(0)
        said = output.read()
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: status {done.returncode}\n{said}")
    return said


def public_tests():
    """Returns the sources of tests/ that need the public interface only, each with the files that
    it includes. Such a program includes no header of src/, compiles in every source whose header
    it includes, and stands before no function of the C library."""
    found = {}
    for source in sorted(SOURCE.glob("tests/*/test_*.c")):
        try:
            words = run(["cc", "-MM", *FLAGS, source]).replace("\\\n", " ").split()[1:]
        except Failed:  # it wants definitions that builds make
            continue
        files = {(SOURCE / word).resolve().relative_to(SOURCE) for word in words}
        compiled = {SOURCE / f.with_suffix(".c") for f in files if f.suffix == ".h"}
        internal = any(f.parts[0] == "src" and f.suffix != ".def" for f in files)
        internal = internal or "__wrap_" in source.read_text()
        if not internal and all(f.relative_to(SOURCE) in files for f in compiled if f.exists()):
            found[source] = files
    return found


class Wheel:
    """A wheel, unpacked into a folder of its own, and how its programs are made and run."""

    def __init__(self, file, row, build):
        self.tag, self.target = row["tag"], row["target"]
        self.processor, self.system = self.target.split("-")[:2]
        self.system = self.system.split(".")[0]
        self.device_code = row["device_code"] == "yes"
        self.file, self.build = file, build
        self.folder = build / "packaging" / "run" / self.tag
        shutil.rmtree(self.folder, ignore_errors=True)
        with zipfile.ZipFile(file) as archive:
            archive.extractall(self.folder)
        self.package = self.folder / "halfstep"
        name = {"windows": "{}.dll", "macos": "lib{}.dylib"}.get(self.system, "lib{}.so")
        self.library, self.io = (self.package / name.format(n) for n in ("halfstep", "halfstep_io"))
        self.has_io = self.io.exists()
        self.short, self.defines, self.links = ["--short"], [], []
        # zig links musl's programs statically if not asked, and those cannot load a library.
        self.dynamic = ["-ldl", "-dynamic"] if self.system == "linux" else []
        self.prefix, self.how = self.runner()
        self.prepare()

    def runner(self):
        """Returns the words before a program that run it here, and their name. None where nothing
        here does."""
        musl = "musl" in self.target
        if self.system == "linux" and self.processor == MACHINE and not musl:
            self.short = []
            return [], "natively"
        if musl and self.processor == MACHINE:
            loader = f"/lib/ld-musl-{MACHINE}.so.1"
            return [loader], "by musl's loader"
        if self.system == "linux" and self.processor == "aarch64" and not musl:
            self.defines = ["-DHSTEP_TEST_EMULATED=1"]
            words = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
            return words, "under qemu " + run([*words, "--version"]).split()[2]
        if self.system == "windows" and self.processor == MACHINE:
            return [WINE], "under " + run([WINE, "--version"]).split()[0]
        return None, "not run"

    def prepare(self):
        """Puts the libraries where programs find them. Linux: by their sonames beside the programs.
        Windows: the DLL itself, with an import library of its exports."""
        files = [self.library, *([self.io] if self.has_io else [])]
        if self.system == "windows":
            shutil.copy(self.library, self.folder)
            exports = sorted(libraries.exports(lief.parse(self.library)))
            definition = self.folder / "halfstep.def"
            definition.write_text("\n".join([f"LIBRARY {self.library.name}", "EXPORTS", *exports]))
            machine = {"x86_64": "i386:x86-64", "aarch64": "arm64"}[self.processor]
            self.links = [self.folder / "halfstep.lib"]
            run([ZIG, "dlltool", "-m", machine, "-d", definition, "-l", self.links[0]])
            return
        self.links = [*files, "-lm", "-lpthread", *self.dynamic]
        if self.system == "linux":
            for library in files:
                parsed = lief.parse(library)
                soname = str(parsed[lief.ELF.DynamicEntry.TAG.SONAME].name)
                (self.folder / soname).symlink_to(library)

    def compile(self, source, name, links=()):
        """Returns a program of this platform from a source."""
        program = self.folder / (name + (".exe" if self.system == "windows" else ""))
        # Tests may ask more of the C library than the wheel does.
        target = self.target.split(".")[0] if self.system == "linux" else self.target
        words = [ZIG, "cc", "-target", target, *FLAGS, *self.defines, source, *links]
        run([*words, "-o", program])
        return program

    def start(self, program, *arguments, beside=True):
        """Returns the output of a program of this platform, which finds the libraries by a variable
        if they lie beside it. Nothing where it cannot be run here."""
        if self.prefix is None:
            return ""
        return run(
            [*self.prefix, program, *arguments],
            HALFSTEP_SOURCE=SOURCE,
            **({"LD_LIBRARY_PATH": self.folder} if beside else {}),
            WINEPREFIX=self.build / "packaging" / "wine",
            WINEDEBUG="-all",
        )

    def load(self):
        """Loads the libraries as Python does, without the folder of `start`. Returns what they say
        of themselves."""
        # check.py holds the wheel's modules to those of this tree.
        bound = sorted(libraries.bound("_library/abi.py", "signatures"))
        of_io = sorted(libraries.declared("libhalfstep_io"))
        program = self.compile(SOURCE / "packaging/load.c", "load", self.dynamic)
        if self.prefix is None:
            return ""
        words = [program]
        pairs = [(self.library, bound), *([(self.io, of_io)] if self.has_io else [])]
        for library, names in pairs:
            listed = self.folder / f"{library.stem}.txt"
            listed.write_text("\n".join(names))
            words += [library, listed]
        said = self.start(*words, beside=False).strip()
        driver = "nvcuda.dll" if self.system == "windows" else "libcuda.so.1"
        if self.device_code and driver not in said and "NVIDIA" not in said:
            raise Failed(f"the library does not say that {driver} is missing: {said}")
        return said

    def structures(self):
        """Holds sizes and offsets of structures to tests/golden/abi.txt, as the compiler of this
        platform lays them out."""
        source = self.folder / "structures.c"
        source.write_text(run([sys.executable, SOURCE / "tests/house/abi.py", "--program"]))
        return self.start(self.compile(source, "structures", self.dynamic))

    def jobs(self, tests):
        """Yields a name and a function for each thing to run, the longest first."""
        golden = self.compile(SOURCE / "tests/core/test_golden.c", "test_golden", self.links)
        for isa, processor in ISAS:
            if processor in ("any", self.processor) and self.prefix is not None:
                yield (
                    f"golden {isa}",
                    lambda isa=isa: self.start(golden, "--all", f"{isa}: 1 thread"),
                )
        for source, files in tests.items():
            folders, names = {f.parts[0] for f in files}, {f.name for f in files}
            if "halfstep_io.h" in names and not self.has_io:
                continue
            if "fuzz" in folders and self.system != "linux":  # which the targets need
                continue
            if self.defines and "Not for an emulator." in source.read_text():
                continue
            yield source.stem, lambda source=source: self.test(source)
        yield "structures", self.structures
        if self.how == "natively":
            yield "Python", self.python

    def test(self, source):
        short = self.short if "--short" in source.read_text().split("*/", 1)[0] else []
        # Cases of all instruction sets are run by other jobs.
        short = ["--short"] if source.stem == "test_golden" else short
        return self.start(self.compile(source, source.stem, self.links), *short)

    def python(self):
        """Installs the wheel by pip into an environment that borrows torch from that of the tests,
        and steps."""
        fresh = self.folder / "venv"
        run([self.build / "venv/bin/python", "-m", "venv", fresh])
        python = fresh / "bin/python"
        pip = [python, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
        run([*pip, "--disable-pip-version-check", self.file])
        find = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = pathlib.Path(run(find).strip())
        (own / "torch.pth").write_text(f"{self.build}/venv/{own.relative_to(fresh)}\n")
        verified = run([python, "-m", "halfstep", "verify"])
        stored = run([python, SOURCE / "packaging/first_steps.py", self.folder / "states"])
        return verified + stored


def show(wheel, tests):
    """Runs what can be run of a wheel and notes it. Returns how many things failed."""
    results = wheel.build / "packaging" / "results"
    note(results, wheel.tag, result="")
    print(f"==> {wheel.file.name}, {wheel.how}: {wheel.load()}", flush=True)

    def one(job):
        name, function = job
        try:
            return name, function(), None
        except Failed as error:
            return name, "", error

    failed, isas, programs = 0, [], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, said, error in pool.map(one, wheel.jobs(tests)):
            if error:
                failed += 1
                print(f"FAIL {wheel.tag} {name}: {error}", flush=True)
                continue
            last = said.strip().splitlines()[-1:] or ["compiled and linked"]
            if last == ["0 passed, 0 failed"]:
                print(f"     {name}: this machine has no such instructions", flush=True)
                continue
            print(f"ok   {wheel.tag} {name}: {last[0]}", flush=True)
            if name.startswith("golden "):
                isas.append(name.split()[1])
            elif name.startswith("test_"):
                programs.append(name)
    if failed:
        return failed
    if wheel.prefix is None:
        note(results, wheel.tag, ran=f"{len(programs)} test programs compiled and linked")
        note(results, wheel.tag, result="not run: nothing here stands in for such a machine")
        return 0
    cases = len((SOURCE / "tests/golden/hashes.txt").read_text().splitlines())
    ran = f"{cases} golden hashes on {', '.join(isas)}, and {len(programs)} test programs"
    note(results, wheel.tag, ran=f"{ran}, {wheel.how}", result="✓")
    if wheel.how == "natively":
        note(results, wheel.tag, ran="installed by pip, verified, stepped, states in a file")
    return 0


def main(build, *tags):
    build = pathlib.Path(build)
    rows = platforms()
    for tag in tags:
        if tag not in rows:
            sys.exit(f"unknown tag '{tag}'; known: {', '.join(rows)}")
    # One process makes wine's folder of settings, before many use it.
    wine = build / "packaging" / "wine"
    run([WINE, "wineboot", "--init"], WINEPREFIX=wine, WINEDEBUG="-all")
    tests, failed = public_tests(), 0
    print(f"{len(tests)} test programs use the public interface only", flush=True)
    for tag in tags or rows:
        files = list((build / "dist").glob(f"halfstep-*-py3-none-{tag}.whl"))
        if len(files) != 1:
            sys.exit(f"{len(files)} wheels for {tag} in {build}/dist; make wheels makes one")
        try:
            failed += show(Wheel(files[0], rows[tag], build), tests)
        except Failed as error:
            failed += 1
            print(f"FAIL {tag}: {error}")
    # It has a link to the root of the file system, which a tool that walks the tree would follow.
    # Wine's server writes settings into it some seconds after the last program has ended.
    run([WINESERVER, "--wait"], WINEPREFIX=wine)
    shutil.rmtree(wine)
    print(f"{failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
