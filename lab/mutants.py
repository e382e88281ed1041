#!/usr/bin/env python3
"""Changes one place of the sources at a time and shows which tests notice: mutation testing of src,
python/halfstep and tools.

    lab/mutants.py --seed d2f63ea1 --count 150 --csv mutants.csv    runs, or goes on where this CSV
                                                                    stopped
    lab/mutants.py --seed d2f63ea1 --count 150 --csv mutants.csv --table
    lab/mutants.py --seed d2f63ea1 --count 20 --list                prints the mutants only

A mutant replaces an operator, changes a constant, negates a condition, leaves out a call or swaps
two arguments. A line has at most one. The seed alone chooses the files (in proportion to their
lines of code), the lines and the changes. A mutant is replaced by the next one if it does not
compile, or if its object code or bytecode is that of the original.

Tests run in three tiers. The first is `make test`. The second is the tests with the label or marker
"all". The third is the tests of an older revision, --today, with its own sources; it leaves out
files that differ there. Each tier runs for the survivors of the one before. A map tells which tests
execute the changed line. No other test runs, and quick tests that execute few lines run first.
Tables and constants outside functions count as executed by each test that executes something of
their file.

All files lie in BUILD/mutants. Each worker has a copy of the tree, and a build at -O1 for the
scalar and the widest instruction set. map-*.json has the lines that each test executes, and
baseline-*.json its seconds without a mutant. A test that fails without a mutant is named and left
out. A test that takes ten times as long as without a mutant, and 20 seconds more, has failed. The
program needs gcov and the BUILD/venv of `make test`, which has Ninja. It uses ccache and process
namespaces if they are there. Builds inside ctest (tests/tools/other_build.sh) take part program by
program if --flavours names them. Mutants of kernels skip these builds, because they take a compiler
minutes there. Scripts that compile a tree of their own take no part, because no coverage is counted
in it.

The file is longer than 500 lines because nothing else uses its four parts: mutants of C and Python,
copies of the tree with builds and tests, the map, and the run.
"""

import argparse
import ast
import bisect
import collections
import csv
import fcntl
import hashlib
import io
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src/", "python/halfstep/", "tools/")
KERNELS = re.compile(
    r"/(kernels|row_kernels|test_vec_unit)\.c\.o$"
)  # compiled for minutes, per instruction set
DROPPED = {"no-compile", "equivalent", "not-executed"}
COLUMNS = ["id", "file", "line", "kind", "before", "after", "status", "test", "tests", "seconds"]
BUILDERS = re.compile(
    r"python_package|^(install|by_hand|mingw|new_rows|cuda_ptx|device_code)_test$"
)  # what they compile, nobody counts
BUILD_LIMIT = 1800  # seconds for one call of ninja

# ---- Mutants -------------------------------------------------------------------------------------

#: one change of a file: characters start to end become `new`. statement: the line that coverage
#: counts
Mutant = collections.namedtuple("Mutant", "id file line kind start end new statement")

C_TOKEN = re.compile(
    r"""(?P<hash>^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)
    | (?P<skip>[ \t\r\f]+|\n|\\\n|//[^\n]*|/\*.*?\*/)
    | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*) | (?P<name>[A-Za-z_]\w*)
    | (?P<op><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|[<>=!+*/%&|^-]=|&&|\|\||.)""",
    re.M | re.S | re.X,
)
_PAIRS = [
    pair.split()
    for pair in "+ -, < <=, > >=, == !=, && ||, & |, << >>, += -=, |= &=, <<= >>=".split(", ")
]
#: operator of C -> its replacement; those of a pair replace each other
C_OPERATORS = {
    **dict(_PAIRS),
    **{b: a for a, b in _PAIRS},
    **{"*": "+", "/": "*", "%": "*", "^": "|", "*=": "/="},
}
C_WORDS = {
    "if",
    "while",
    "for",
    "switch",
    "return",
    "sizeof",
    "else",
    "do",
    "case",
    "goto",
    "defined",
    "_Alignof",
}
C_FIXED = {"__attribute__", "__asm__", "asm", "_Alignas", "_Static_assert", "__declspec", "sizeof"}


def number_changes(text):
    """Returns other values for a number of C or Python."""
    core = (
        text.rstrip("uUlLfF")
        if not text.lower().startswith("0x") or "p" in text.lower()
        else text.rstrip("uUlL")
    )
    suffix = text[len(core) :]
    try:
        if core.lower().startswith("0x") and "p" in core.lower():
            mantissa, exponent = re.split("[pP]", core)
            return [f"{mantissa}p{int(exponent) + 1}{suffix}"]
        if core.lower().startswith("0x"):
            return [hex(int(core, 16) ^ 1) + suffix]
        if core.isdigit():
            value = int(core, 8 if core.startswith("0") and core.strip("0") else 10)
            return [f"{v}{suffix}" for v in (value + 1, value - 1) if v >= 0]
        return [repr(float(core) * 1.5 or 1.0) + suffix]
    except ValueError:
        return []


def swaps(text, arguments):
    """Yields (start, end, new) for each pair of neighbouring arguments, swapped. Arguments are
    given as (start, end)."""
    for (a, b), (c, d) in zip(arguments, arguments[1:]):
        if text[a:b] != text[c:d]:
            yield a, d, text[c:d] + text[b:c] + text[a:b]


def c_places(text, table):
    """Returns a C source's lines of code, its places as (kind, start, end, new, statement), and its
    functions as (first line, last line). In a table (.def) only numbers are places."""
    tokens = [
        (m.lastgroup, m.group(), m.start(), m.end())
        for m in C_TOKEN.finditer(text)
        if m.lastgroup not in ("skip", "hash")
    ]
    line_of = LineOf(text)
    match, stack, bodies, fixed = {}, [], [], set()
    for i, (_, word, start, end) in enumerate(tokens):
        if word in "([{":
            stack.append(i)
        elif word in ")]}" and stack:
            match[stack[-1]] = i
            match[i] = stack.pop()
            if word == "}" and not stack and tokens[match[i] - 1][1] == ")":
                bodies.append((match[i], i))
    for i, (_, word, *_) in enumerate(tokens):
        if word in C_FIXED and i + 1 in match:
            fixed.update(range(i, match[i + 1] + 1))
    inside = {i for first, last in bodies for i in range(first, last)}
    found, statement = [], 0
    for i, (kind, word, start, end) in enumerate(tokens):
        if i and tokens[i - 1][1] in ";{}":
            statement = i
        if i in fixed:
            continue
        before = tokens[i - 1] if i else ("", "", 0, 0)
        after = tokens[i + 1] if i + 1 < len(tokens) else ("", "", 0, 0)
        if kind == "number":
            head = {t[1] for t in tokens[statement:i]}
            if before[1] == "[" and after[1] == "]" and not head & {"=", "(", ".", "->", "return"}:
                continue  # how long an array is: a longer one is no defect
            found += [("constant", start, end, new) for new in number_changes(word)]
        if table or i not in inside:
            continue
        if word in C_OPERATORS and start > before[3] and text[end : end + 1] in " \n":
            found.append(("operator", start, end, C_OPERATORS[word]))
        elif word in ("++", "--"):
            found.append(("operator", start, end, "--" if word == "++" else "++"))
        elif word == "!" and before[1] != "!":
            found.append(("condition", start, end, " "))
        elif word in ("if", "while") and i + 1 in match and match[i + 1] > i + 3:
            close = tokens[match[i + 1]]
            found.append(("condition", after[2], close[3], "(!" + text[after[2] : close[3]] + ")"))
        elif (
            kind == "name"
            and word not in C_WORDS
            and after[1] == "("
            and i + 1 in match
            and (before[0] != "name" or before[1] in C_WORDS)
        ):
            close = match[i + 1]
            if (
                before[1] in (";", "{", "}", ")", "else")
                and close + 1 < len(tokens)
                and tokens[close + 1][1] == ";"
            ):
                whole = text[start : tokens[close][3]]
                found.append(
                    ("call", start, tokens[close][3], "(void)0" + "\n" * whole.count("\n"))
                )
            arguments, first, j = [], i + 2, i + 2
            while j <= close:
                if (tokens[j][1] == "," or j == close) and j > first:
                    arguments.append((tokens[first][2], tokens[j - 1][3]))
                    first = j + 1
                j = match[j] + 1 if tokens[j][1] in "([{" and j in match else j + 1
            found += [("arguments", *swap) for swap in swaps(text, arguments)]
    lines = {line_of(start) for _, _, start, _ in tokens}
    functions = [(line_of(tokens[first][2]), line_of(tokens[last][2])) for first, last in bodies]
    return lines, [(*place, line_of(place[1])) for place in found], functions


class LineOf:
    """Converts between offsets of characters and lines, which count from 1."""

    def __init__(self, text):
        self.starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def __call__(self, offset):
        return bisect.bisect_right(self.starts, offset)

    def offset(self, line, column):
        return self.starts[line - 1] + column


#: class of an operator of Python -> how it is written; its replacement if C has no such operator
PY_OPERATORS = {
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
    **{ast.And: "and", ast.Or: "or", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"},
    **{ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>"},
    **{ast.BitOr: "|", ast.BitAnd: "&", ast.BitXor: "^"},
}
PY_REPLACEMENTS = {
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
    **{"and": "or", "or": "and", "//": "*", "**": "*"},
}


def python_places(text):
    """Returns the same for a Python source, without functions."""
    line_of, found, lines = LineOf(text), [], set()

    def span(node):
        return line_of.offset(node.lineno, node.col_offset), line_of.offset(
            node.end_lineno, node.end_col_offset
        )

    def is_text(node):
        return (
            isinstance(node, ast.JoinedStr)
            or isinstance(node, ast.Constant)
            and isinstance(node.value, str)
        )

    def operator(op, left, right, statement, assigned=""):
        if type(op) in PY_OPERATORS:
            old = PY_OPERATORS[type(op)]
            new = PY_REPLACEMENTS.get(old) or C_OPERATORS[old]
            first = span(left)[1]
            written = re.escape(old + assigned).replace("\\ ", r"\s+")
            at = re.search(written, text[first : span(right)[0]])
            if at:
                found.append(
                    ("operator", first + at.start(), first + at.end(), new + assigned, statement)
                )

    def visit(node, statement):
        if isinstance(node, ast.stmt):
            statement = node.lineno
            if isinstance(node, ast.Expr) and is_text(node.value):
                return
            lines.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.BinOp) and not is_text(node.left) and not is_text(node.right):
            operator(node.op, node.left, node.right, statement)
        elif isinstance(node, ast.BoolOp):
            operator(node.op, node.values[0], node.values[1], statement)
        elif isinstance(node, ast.Compare):
            for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators):
                operator(op, left, right, statement)
        elif isinstance(node, ast.AugAssign):
            operator(node.op, node.target, node.value, statement, "=")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = span(node)[0]
            found.append(("condition", start, start + 3, "", statement))
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            for new in (
                [str(not node.value)]
                if isinstance(node.value, bool)
                else number_changes(text[slice(*span(node))])
            ):
                found.append(("constant", *span(node), new, statement))
        elif isinstance(node, ast.Call):
            if not any(isinstance(a, (ast.Starred, ast.GeneratorExp)) for a in node.args):
                found.extend(
                    ("arguments", *swap, statement)
                    for swap in swaps(text, [span(a) for a in node.args])
                )
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            start, end = span(node.test)
            found.append(("condition", start, end, f"(not ({text[start:end]}))", statement))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            start, end = span(node)
            found.append(
                ("call", start, end, "pass" + "\n" * text[start:end].count("\n"), statement)
            )
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, statement)

    visit(ast.parse(text.encode("latin-1")), 1)
    blank = {
        n
        for n, line in enumerate(text.split("\n"), 1)
        if not line.strip() or line.strip().startswith("#")
    }
    return lines - blank, found, []


class Source:
    """A source file: its text (as bytes in latin-1), its lines of code, the places that can be
    changed by line, its functions."""

    def __init__(self, name, data):
        self.name, self.text, self.python = name, data.decode("latin-1"), name.endswith(".py")
        self.lines, places, self.functions = (
            python_places(self.text) if self.python else c_places(self.text, name.endswith(".def"))
        )
        line_of, self.places = LineOf(self.text), collections.defaultdict(list)
        for place in places:
            self.places[line_of(place[1])].append(place)

    def changed(self, mutant, new=None):
        return (
            self.text[: mutant.start]
            + (mutant.new if new is None else new)
            + self.text[mutant.end :]
        )

    def around(self, line):
        """Returns the first and last line of the function that holds a line, or None."""
        return next(
            ((first, last) for first, last in self.functions if first <= line <= last), None
        )


def mutants_of(sources, seed):
    """Yields the mutants in the order in which they are tried. Chooses a file by its lines of code,
    then a line, a kind, a change."""
    choose = random.Random(seed)
    names = sorted(name for name, source in sources.items() if source.places)
    left = {name: sorted(sources[name].places) for name in names}
    number = 0
    while names:
        name = choose.choices(names, [len(sources[n].lines) for n in names])[0]
        line = left[name].pop(choose.randrange(len(left[name])))
        if not left[name]:
            names.remove(name)
        places = sources[name].places[line]
        kind = choose.choice(sorted({place[0] for place in places}))
        _, start, end, new, statement = choose.choice(
            [place for place in places if place[0] == kind]
        )
        number += 1
        yield Mutant(number, name, line, kind, start, end, new, statement)


def texts(source, mutant):
    """Returns the changed line before and after, without indentation."""
    old, new = source.text.split("\n"), source.changed(mutant).split("\n")
    return tuple(
        lines[mutant.line - 1].strip().encode("latin-1").decode("utf-8", "replace")
        for lines in (old, new)
    )


# ---- Trees and builds ----------------------------------------------------------------------------


class Processes:
    """Runs commands, each with a time limit and, where the kernel allows it, in a process
    namespace, so that nothing outlives a test."""

    running, stopped, lock, namespace = set(), threading.Event(), threading.Lock(), []

    @staticmethod
    def limits():
        """Limits the size of files, so that no mutant takes the machine's disk."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @classmethod
    def run(cls, command, folder, environment, limit, contained=False):
        """Returns the exit status (None if the time was up), the seconds, the end of the output."""
        if contained and cls.namespace:
            command = [*cls.namespace, "bash", "-c", '"$@"; exit $?', "bash", *command]
        start = time.monotonic()
        with open(
            os.path.join(environment["TMPDIR"], f"output-{threading.get_ident()}"), "w+b"
        ) as output:
            with cls.lock:
                if cls.stopped.is_set():
                    raise KeyboardInterrupt
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=cls.limits if contained else None,
                )
                cls.running.add(process)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            with cls.lock:
                cls.running.discard(process)
                cls.kill(process)
            process.wait()
            if cls.stopped.is_set():
                raise KeyboardInterrupt
            output.seek(max(0, output.seek(0, os.SEEK_END) - (1 << 16)))
            return status, time.monotonic() - start, output.read().decode("utf-8", "replace")

    @staticmethod
    def kill(process):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    @classmethod
    def stop(cls):
        with cls.lock:
            cls.stopped.set()
            for process in cls.running:
                cls.kill(process)


class Setting:
    """What all trees share."""

    def __init__(self, build, flavours, tests):
        self.build, self.folder, self.flavours = (
            build,
            build / "mutants",
            re.compile(flavours or "$^"),
        )
        self.tests = re.compile(tests)
        self.venv = build / "venv"
        self.ninja = shutil.which("ninja", path=f"{self.venv}/bin") or shutil.which("ninja")
        if not self.ninja or not (self.venv / "requirements.txt").exists():
            sys.exit(f"{self.venv} is not a Python environment with ninja; `make test` makes one")
        self.ccache = shutil.which("ccache")
        self.isas = []
        flags = set(re.findall(r"\w+", pathlib.Path("/proc/cpuinfo").read_text()))
        machine = {"aarch64": "aarch64", "arm64": "aarch64"}.get(os.uname().machine, "x86_64")
        for name, processor, options in re.findall(
            r'^ISA\((\w+), *(\w+), *"(.*)"\)', (ROOT / "src/vec/isas.def").read_text(), re.M
        ):
            if processor in ("any", machine) and all(
                f in flags for f in re.findall(r"-m(\w+)(?= |$)", options)
            ):
                self.isas.append(name)
        self.widest = tuple(dict.fromkeys((self.isas[0], self.isas[-1])))
        if not subprocess.run(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"],
            stderr=subprocess.DEVNULL,
        ).returncode:
            Processes.namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


#: build: the build folder. needs: what ninja has to make first. files: the test's own files in the
#: tree
Test = collections.namedtuple(
    "Test", "name tier command cwd environment skip fail build needs files"
)


def tracked_files():
    """Returns {name: (mode, bytes)} of the working tree's tracked files."""
    names = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        .stdout.decode()
        .split("\0")
    )
    return {
        n: (os.stat(ROOT / n).st_mode & 0o777, (ROOT / n).read_bytes())
        for n in names
        if n and (ROOT / n).is_file()
    }


def revision_files(revision):
    """Returns the same for a revision. If that could not choose its instruction sets yet, it gets
    the file that can."""
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {m.name: (m.mode & 0o777, tar.extractfile(m).read()) for m in tar if m.isfile()}
    if b"HALFSTEP_ISAS" not in files["cmake/isas.cmake"][1]:
        files["cmake/isas.cmake"] = (0o644, (ROOT / "cmake/isas.cmake").read_bytes())
    return files


class Tree:
    """A copy of some sources with its builds. Instrumented ones count what is executed."""

    def __init__(self, setting, name, files, instrumented=False):
        self.setting, self.name, self.files, self.instrumented = setting, name, files, instrumented
        self.folder = setting.folder / name
        self.source, self.build = self.folder / "tree", self.folder / "build"
        self.configured, self.prepared, self.texts, self.lock = {}, {}, {}, threading.Lock()
        self.sync()
        temporary = self.folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        self.environment = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HALFSTEP_", "PYTHON", "MAKE")) and k != "CI"
        }
        self.environment.update(TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1")
        # Workers share what ccache holds; objects that count name the folder that they write to.
        self.environment.update(
            {"HSTEP_FAULT_UNTIL_EXIT": "1"}
            if instrumented
            else {"CCACHE_BASEDIR": str(self.folder), "CCACHE_NOHASHDIR": "1"}
        )
        self.build.mkdir(exist_ok=True)
        if not (self.build / "venv").exists():
            (self.build / "venv").symlink_to(setting.venv)

    def sync(self):
        """Makes the copy equal to `files`. A file that differed gets a new time, so that ninja
        builds it again."""
        self.source.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.source.rglob("*"), reverse=True):
            name = path.relative_to(self.source).as_posix()
            if not path.is_dir() and name not in self.files and not name.endswith(".pyc"):
                path.unlink()
        for name, (mode, data) in self.files.items():
            path = self.source / name
            if not path.exists() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            path.chmod(mode)

    def write(self, name, text):
        (self.source / name).write_bytes(text.encode("latin-1"))

    def configure(self, isas, build=None, arguments=()):
        build = build or self.build
        if self.configured.get(build) == isas:
            return
        flags = (
            "-O1 --coverage -fprofile-abs-path -DHSTEP_COVERAGE=1"
            if self.instrumented
            else "-O1 -DNDEBUG -Werror=incompatible-pointer-types -Werror=int-conversion"
        )
        if not arguments:
            arguments = [
                "-DHALFSTEP_TESTS=ON",
                "-DHALFSTEP_TOOLS=ON",
                "-DCMAKE_BUILD_TYPE=None",
                f"-DCMAKE_C_FLAGS={flags}",
            ]
        launcher = (
            [f"-DCMAKE_C_COMPILER_LAUNCHER={self.setting.ccache}"] if self.setting.ccache else []
        )
        status, _, output = Processes.run(
            [
                "cmake",
                "-G",
                "Ninja",
                f"-DCMAKE_MAKE_PROGRAM={self.setting.ninja}",
                "-S",
                str(self.source),
                "-B",
                str(build),
                f"-DHALFSTEP_ISAS={';'.join(isas)}",
                *launcher,
                *arguments,
            ],
            self.source,
            self.environment,
            BUILD_LIMIT,
        )
        if status:
            sys.exit(f"{self.name}: cmake failed\n{output}")
        self.configured[build] = isas

    def make(self, targets, build=None):
        """Builds targets. Returns True if all were built, and the output."""
        command = [self.setting.ninja, "-C", str(build or self.build), "-j1", "--quiet", *targets]
        status, _, output = Processes.run(command, self.source, self.environment, BUILD_LIMIT)
        return status == 0, output

    def prepare(self, isas):
        """Builds all for some instruction sets, and finds the objects that depend on each source:
        those of the library and the program if there are some, else those of tests."""
        self.configure(isas)
        if isas not in self.prepared:
            made, output = self.make(["all"])
            if not made:
                sys.exit(f"{self.name}: the sources do not build\n{output}")
            depending, current = collections.defaultdict(list), None
            for line in self.ninja("deps").splitlines():
                if line.startswith("    "):
                    path = os.path.normpath(self.build / line.strip())
                    if path.startswith(f"{self.source}/"):
                        depending[os.path.relpath(path, self.source)].append(current)
                elif ": #deps" in line:
                    current = line.split(":")[0]
            for name, found in depending.items():
                depending[name] = [
                    o for o in found if re.match(r"CMakeFiles/(hstep_|halfstep(?!_faulty))", o)
                ] or found
            self.prepared[isas] = (
                depending,
                self.hashes({o for found in depending.values() for o in found}),
            )
        self.depending, self.pristine = self.prepared[isas]

    def hashes(self, objects):
        return {o: hashlib.sha256((self.build / o).read_bytes()).digest() for o in objects}

    def near(self, path, seen):
        """Adds a test's file to `seen`, and the files of tests/ that it includes, imports or
        names."""
        if path in seen or path not in self.files:
            return seen
        seen.append(path)
        if path not in self.texts:
            text = self.files[path][1].decode("latin-1")
            names = set(re.findall(r'#include "(.+?)"', text)) | set(
                re.findall(r"\w[\w./-]*\.(?:py|sh|c|h|def)\b", text)
            )
            modules = (
                set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
                if path.endswith(".py")
                else set()
            )
            if path.startswith("tests/python/"):
                modules.add("conftest")
            here = os.path.dirname(path)
            rooms = {here}
            if path.startswith("tests/python/"):
                rooms = {os.path.dirname(f) for f in self.files if f.startswith("tests/python/")}
            self.texts[path] = (
                text,
                sorted(
                    {
                        os.path.normpath(os.path.join(f, n))
                        for n in names
                        for f in ("tests", "tests/tools", here, "")
                    }
                    | {f"{room}/{m}.py" for room in rooms for m in modules}
                ),
            )
        for other in self.texts[path][1]:
            if other.startswith(("tests/", "fuzz/")) and not re.match(
                r"tests/(\w+/test_|\w+/\w+_test\.sh)", other
            ):
                self.near(other, seen)
        return seen

    def tests(self):
        """Returns {name: test} of the tree, and the names of ctest's tests that take no part."""
        tests, outside, builds = {}, [], [(self.build, "", 0)]
        python = False
        while builds:
            build, prefix, least = builds.pop()
            listed = subprocess.run(
                ["ctest", "-N", "--show-only=json-v1"],
                cwd=build,
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
            # ctest knows the commands of programs that exist only.
            written = dict(
                re.findall(
                    r"^add_test\((?:\[=*\[)?([^\s\]]+)(?:\]=*\])? (.*)\)$",
                    (build / "CTestTestfile.cmake").read_text(),
                    re.M,
                )
            )
            targets = self.linked(build)
            for entry in json.loads(listed)["tests"]:
                properties = {p["name"]: p["value"] for p in entry.get("properties", ())}
                name, command = (
                    prefix + entry["name"],
                    entry.get("command") or shlex.split(written[entry["name"]]),
                )
                tier = max(least, 2 if "all" in properties.get("LABELS", ()) else 1)
                line = " ".join(command)
                if "other_build.sh" in line:
                    at = next(
                        i for i, word in enumerate(command) if word.endswith("other_build.sh")
                    )
                    if self.setting.flavours.search(name) and not self.instrumented:
                        inner = self.folder / name
                        self.configure(self.setting.widest, inner, command[at + 3 :])
                        builds.append((inner, f"{name}/", tier))
                    else:
                        outside.append(name)
                    continue
                if re.search(r"run_python\.sh|pytest", line):
                    python = True
                    continue
                if BUILDERS.search(name):
                    outside.append(name)
                    continue
                program = os.path.relpath(command[0], build)
                script = next(
                    (
                        os.path.relpath(os.path.join(self.source, w), self.source)
                        for w in command
                        if w.endswith(".sh")
                    ),
                    None,
                )
                stem = os.path.basename(program)
                source = rf"tests/\w+/{stem}\.c"
                if stem.startswith("example_"):
                    source = rf"examples/{stem[8:]}\.c"
                own = next((f for f in self.files if re.fullmatch(source, f)), "")
                files = self.near(script or own, [])
                modules = [target for stem, target in targets if stem.startswith("libhalfstep")]
                needs = (
                    ["halfstep", *modules, *self.needed(files, targets)] if script else [program]
                )
                environment = dict(e.split("=", 1) for e in properties.get("ENVIRONMENT", ()))
                tests[name] = Test(
                    name,
                    tier,
                    command,
                    properties.get("WORKING_DIRECTORY", str(build)),
                    environment,
                    properties.get("SKIP_RETURN_CODE", 77),
                    properties.get("FAIL_REGULAR_EXPRESSION", []),
                    build,
                    needs,
                    files,
                )
        for path in sorted(self.files) if python else ():
            if re.fullmatch(r"tests/python/(\w+/)?test_\w+\.py", path):
                self.python_tests(path, tests)
        return {
            name: test for name, test in tests.items() if self.setting.tests.search(name)
        }, outside

    def python_tests(self, path, tests):
        """Adds one test for a Python file, or two if some of its functions are of the second
        tier."""
        files = self.near(path, [])
        text = self.texts[path][0]
        build, venv = self.build, self.build / "venv/bin"
        environment = {
            "HALFSTEP_SOURCE": str(self.source),
            "HALFSTEP_BUILD": str(build),
            "HALFSTEP_LIBRARY": f"{build}/libhalfstep.so",
            "PYTHONPATH": str(self.source / "python"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{venv}:{os.environ['PATH']}",
            "TORCHINDUCTOR_CACHE_DIR": f"{build}/inductor",
            "TORCH_EXTENSIONS_DIR": f"{self.setting.build}/torch_extensions",
        }
        needs = ["libhalfstep.so"] + self.needed(files, self.linked(build))
        if any("HALFSTEP_BUILD" in self.texts[f][0] for f in files):
            needs += ["halfstep"]
        selections = (
            [(1, ["-m", "not all"]), (2, ["-m", "all"])]
            if re.search(r"mark\.all\b", text)
            else [(1, [])]
        )
        if not re.search(r"^ *(async )?def test_", text, re.M):
            selections = [(1, None)]
        for tier, selection in selections:
            command = [
                f"{venv}/python",
                *(
                    ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *selection]
                    if selection is not None
                    else []
                ),
                path,
            ]
            name = path[len("tests/") :] + ("" if tier == 1 else " -m all")
            tests[name] = Test(
                name,
                tier,
                command,
                str(self.source),
                environment,
                5 if selection is not None else 77,
                [],
                build,
                needs,
                files,
            )

    def ninja(self, tool, build=None):
        command = [self.setting.ninja, "-C", str(build or self.build), "-t", *tool.split()]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    def linked(self, build):
        """Returns (first part of the file's name, target) for all that the linker makes in a
        build."""
        return [
            (os.path.basename(target).split(".")[0], target)
            for target in re.findall(
                r"^(\S+): C_(?:EXECUTABLE|\w+_LIBRARY)_LINKER",
                self.ninja("targets all", build),
                re.M,
            )
        ]

    def needed(self, files, targets):
        words = {w for f in files for w in re.findall(r"\w+", self.texts[f][0])}
        return sorted({target for stem, target in targets if stem in words and stem != "halfstep"})

    def run(self, test, limit):
        """Builds and runs a test. Returns "ok", "failed", "skipped", "timeout", or "build" if it
        did not build; the seconds; the output."""
        with self.lock:
            made, output = self.make(test.needs, test.build)
        if not made:
            return "build", 0, output
        environment = {**self.environment, **test.environment, "PYTHONHASHSEED": "0"}
        scratch = self.folder / f"tmp/{threading.get_ident()}"
        scratch.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(scratch)
        status, seconds, output = Processes.run(
            test.command, test.cwd, environment, limit, contained=True
        )
        shutil.rmtree(scratch, ignore_errors=True)
        if status is None:
            return "timeout", seconds, output
        if status == test.skip:
            return "skipped", seconds, output
        failed = status or any(
            re.search(p, output) for p in ([test.fail] if isinstance(test.fail, str) else test.fail)
        )
        return "failed" if failed else "ok", seconds, output


# ---- What each test executes ---------------------------------------------------------------------

#: sitecustomize.py for Python tests: each statement of the package writes its line when it is first
#: reached, so that a kill loses nothing
HOOK = """
import ast, builtins, importlib.machinery, os
folder, out, seen = os.environ["MUTANTS_PACKAGE"], os.environ["MUTANTS_HITS"], set()
def hit(name, line):
    if (name, line) not in seen:
        seen.add((name, line))
        file = os.open(out, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(file, f"{name}:{line}\\n".encode())
        os.close(file)
builtins.__mutants_hit__ = hit
class Insert(ast.NodeTransformer):
    def __init__(self, name):
        self.name = name
    def call(self, s):
        constant = isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
        text = constant and isinstance(s.value.value, str)
        future = isinstance(s, ast.ImportFrom) and s.module == "__future__"
        if not isinstance(s, ast.stmt) or text or future:
            return []
        new = ast.parse(f"__mutants_hit__({self.name!r}, {s.lineno})").body
        return [ast.increment_lineno(new[0], s.lineno - 1)]
    def generic_visit(self, node):
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [each for s in block for each in (*self.call(s), s)])
        return node
loader = importlib.machinery.SourceFileLoader
original = loader.source_to_code
def source_to_code(self, data, path, **options):
    if str(path).startswith(folder):
        data = Insert(os.path.relpath(path, folder)).visit(ast.parse(data))
    return original(self, data, path, **options)
loader.source_to_code = source_to_code
"""


def gcov(files, tree):
    """Yields (file in the tree, line, how often it ran) of .gcda or .gcno files."""
    command = ["gcov", "--json-format", "--stdout", *map(str, files)]
    text = (
        subprocess.run(
            command, cwd=tree.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        ).stdout
        if files
        else b""
    )
    for line in text.splitlines():
        for file in json.loads(line)["files"] if line.startswith(b"{") else ():
            name = os.path.relpath(os.path.normpath(tree.build / file["file"]), tree.source)
            if name.startswith(FOLDERS):
                yield from ((name, entry["line_number"], entry["count"]) for entry in file["lines"])


def lines_by_file(places):
    """Returns {file: lines in order} for places that begin with a file and a line."""
    found = collections.defaultdict(set)
    for name, line, *_ in places:
        found[name].add(line)
    return {name: sorted(lines) for name, lines in found.items()}


def digest(parts):
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


class Map:
    """What each test executes: {"lines": {file: lines with code}, "tests": {test: {"key": its
    files, "files": {file: lines}}}}, kept in a file. A test that is measured already, here or in
    `other`, with the same files of its own, is not measured again.
    """

    def __init__(self, setting, name, files, other=None):
        self.setting, self.name, self.files, self.other = setting, name, files, other
        self.path = setting.folder / f"map-{name}.json"
        sources = digest(
            data
            for n, (_, data) in sorted(files.items())
            if n.startswith(("src/", "include/", "python/", "tools/"))
        )
        self.data = json.loads(self.path.read_text()) if self.path.exists() else {}
        if self.data.get("sources") != sources:
            self.data = {"sources": sources, "lines": {}, "tests": {}}

    def measure(self, jobs):
        """Runs the tests that have not been measured yet, some at a time, in an instrumented
        tree."""
        tree = Tree(self.setting, f"{self.name}-map", self.files, instrumented=True)
        tree.configure(self.setting.widest)
        known, keys, todo = self.data["tests"], {}, []
        for name, test in sorted(
            tree.tests()[0].items(), key=lambda each: each[0].startswith("python/")
        ):
            keys[name] = digest(self.files[f][1] for f in test.files)
            if known.get(name, {}).get("key") != keys[name]:
                if self.other and self.other.data["tests"].get(name, {}).get("key") == keys[name]:
                    known[name] = self.other.data["tests"][name]
                else:
                    todo.append(test)
        if todo or not self.data["lines"]:
            say(f"{self.name}: building with coverage")
            tree.prepare(self.setting.widest)
            for path in tree.build.rglob("*.gcda"):
                path.unlink()
            self.data["lines"] = lines_by_file(gcov(sorted(tree.build.rglob("*.gcno")), tree))
            (tree.folder / "sitecustomize.py").write_text(HOOK)
        left = iter(todo)

        def work(_):
            for test in shared(left):
                files, (result, seconds, output) = self.counted(tree, test)
                with LOCK:
                    known[test.name] = {"key": keys[test.name], "files": files}
                    replace(self.path, json.dumps(self.data))
                    say(
                        f"{self.name}: {test.name} {result}, {seconds:.0f} s,"
                        f" {sum(map(len, files.values()))} lines"
                        + ("" if result in ("ok", "skipped") else ": " + last_line(output))
                    )

        in_threads(work, range(jobs))
        replace(self.path, json.dumps(self.data))

    def counted(self, tree, test):
        """Runs a test at its full length, because a short run executes fewer lines. Returns {file:
        lines} and the result of Tree.run()."""
        folder = tree.folder / "counts" / re.sub(r"\W", "_", test.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        package, hits = "python/halfstep/", folder / "hits"
        environment = {
            **test.environment,
            "GCOV_PREFIX": str(folder),
            "MUTANTS_HITS": str(hits),
            "MUTANTS_PACKAGE": str(tree.source / package),
        }
        if "PYTHONPATH" in environment:
            environment["PYTHONPATH"] = f"{tree.folder}:{environment['PYTHONPATH']}"
        result = tree.run(test._replace(environment=environment), 3600)
        counts = list(folder.rglob("*.gcda"))
        for path in counts:
            path.with_suffix(".gcno").symlink_to(
                "/" + str(path.relative_to(folder).with_suffix(".gcno"))
            )
        python = (
            [line.rsplit(":", 1) for line in hits.read_text().splitlines()] if hits.exists() else []
        )
        files = lines_by_file(
            [(name, line) for name, line, count in gcov(counts, tree) if count]
            + [(package + name, int(line)) for name, line in python]
        )
        shutil.rmtree(folder)
        return files, result

    def load(self):
        self.hits = {
            name: {f: set(lines) for f, lines in t["files"].items()}
            for name, t in self.data["tests"].items()
        }
        self.total = {name: sum(map(len, files.values())) for name, files in self.hits.items()}

    def reaching(self, source, mutant):
        """Returns the names of the tests that execute a mutant's line."""
        name, lines = source.name, self.data["lines"].get(source.name, [])
        body, line = source.around(mutant.statement), mutant.statement if source.python else 0
        if (
            body and lines
        ):  # the line itself, or the last one with code before it in the same function
            before = lines[max(0, bisect.bisect_right(lines, mutant.statement) - 1)]
            line = before if body[0] <= before <= mutant.statement else 0
        if line:
            return {t for t, files in self.hits.items() if line in files.get(name, ())}
        if (
            not lines
            and (isa := re.fullmatch(r"src/vec/(\w+)\.h", name))
            and isa[1] in self.setting.isas
        ):
            name = (  # the map knows the widest instruction set only
                f"src/vec/{self.setting.isas[-1]}.h"
            )
            lines = self.data["lines"].get(name)
        return {
            t
            for t, files in self.hits.items()
            if (files.get(name) if lines else any(not f.endswith(".py") for f in files))
        }


# ---- The run -------------------------------------------------------------------------------------

LOCK = threading.RLock()


def say(text):
    with LOCK:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def last_line(output):
    return next((line.strip()[:160] for line in reversed(output.splitlines()) if line.strip()), "")


def replace(path, text):
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def shared(iterator):
    """Yields the next items of an iterator that several threads take from."""
    while True:
        with LOCK:
            item = next(iterator, None)
        if item is None:
            return
        yield item


def in_threads(work, items):
    """Calls work(item) in a thread for each item. Ctrl-C or an error in one of them kills what runs
    and ends all."""
    errors = []

    def guarded(item):
        try:
            work(item)
        except BaseException as error:  # SystemExit too
            errors.append(error)
            Processes.stop()

    threads = [threading.Thread(target=guarded, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
    except KeyboardInterrupt:
        Processes.stop()
        for thread in threads:
            thread.join(10)
        raise
    if errors:
        raise errors[0]


class Side:
    """The trees of one revision, a worker each, with its tests, its map and how long the tests
    take."""

    def __init__(self, setting, name, files, jobs, patience):
        self.setting, self.name, self.files, self.jobs, self.patience = (
            setting,
            name,
            files,
            jobs,
            patience,
        )
        self.trees, self.tests = [], []
        self.path = setting.folder / f"baseline-{name}.json"
        self.key = digest(
            d
            for n, (_, d) in sorted(files.items())
            if not n.startswith(("docs/", "bench/", "lab/"))
        )

    def open(self, map_):
        """Makes the workers' trees and builds all of them."""
        self.map = map_
        self.map.load()
        self.trees = [Tree(self.setting, f"{self.name}-{i}", self.files) for i in range(self.jobs)]
        say(f"{self.name}: building")
        in_threads(lambda tree: tree.prepare(self.setting.widest), self.trees)
        for tree in self.trees:
            tests, outside = tree.tests()
            self.tests.append(tests)
        say(f"{self.name}: {len(tests)} tests; not used: {', '.join(outside) or 'none'}")
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.baseline = known["tests"] if known.get("key") == self.key else {}

    def check(self, names):
        """Runs tests without a mutant, if they have not run so yet."""
        todo = sorted(n for n in names if n not in self.baseline and n in self.tests[0])
        say(f"{self.name}: {len(todo)} tests run without a mutant first")
        left = iter(todo)

        def work(i):
            for name in shared(left):
                test = self.tests[i][name]
                for _ in range(2):
                    result, seconds, output = self.trees[i].run(test, 3600)
                    if result in ("ok", "skipped"):
                        break
                with LOCK:
                    self.baseline[name] = {"result": result, "seconds": round(seconds, 2)}
                    replace(
                        self.path, json.dumps({"key": self.key, "tests": self.baseline}, indent=0)
                    )
                    if result != "ok":
                        say(
                            f"{self.name}: {name} {result} without a mutant, left out:"
                            f" {last_line(output)}"
                        )

        in_threads(work, range(self.jobs))

    def outer(self, name):
        """Returns the name under which the map knows a test: programs of other builds are those of
        the main one."""
        return name.split("/", 1)[1] if name.startswith("build_") else name

    def choice(self, source, mutant, tier, kernel):
        """Returns the names of the tests of a tier (0: of all) that execute the line, the most
        promising first."""
        reaching = self.map.reaching(source, mutant)
        chosen = [
            n
            for n, t in self.tests[0].items()
            if self.outer(n) in reaching
            and (not tier or t.tier == tier)
            and not (kernel and n.startswith("build_"))
        ]

        def cost(name):
            seconds = self.baseline.get(name, {}).get("seconds", 0) + (
                3 if name.startswith("build_") else 0.3
            )
            return seconds * self.map.total.get(self.outer(name), 1) ** 0.5

        return sorted(chosen, key=lambda n: (cost(n), n))

    def hunt(self, worker, source, mutant, tier):
        """Runs tests of a tier until one fails, with the mutant already in the worker's tree.
        Returns that test with its result, or "", and how many of how many tests ran."""
        tree, start = self.trees[worker], time.monotonic()
        kernel = not source.python and any(
            KERNELS.search(o) for o in tree.depending.get(source.name, ())
        )
        names = [
            n
            for n in self.choice(source, mutant, tier, kernel)
            if self.baseline.get(n, {}).get("result") == "ok"
        ]
        for ran, name in enumerate(names):
            if self.patience and time.monotonic() - start > self.patience:
                return "", f"{ran} of {len(names)}"
            result, _, _ = tree.run(
                self.tests[worker][name], 10 * self.baseline[name]["seconds"] + 20
            )
            if result in ("failed", "timeout", "build"):
                return f"{name}: {result}", f"{ran + 1} of {len(names)}"
        return "", f"{len(names)} of {len(names)}"

    def put(self, worker, source, mutant):
        """Puts a mutant into the worker's tree, which is built for the mutant's instruction set if
        that is not the widest."""
        isa = re.fullmatch(r"src/vec/(\w+)\.h", mutant.file)
        tree = self.trees[worker]
        tree.prepare(
            (self.setting.isas[0], isa[1])
            if isa and isa[1] in self.setting.isas[1:]
            else self.setting.widest
        )
        tree.write(mutant.file, source.changed(mutant))

    def judge(self, worker, source, mutant):
        """Returns a status of DROPPED, or "" for a mutant whose code differs from the
        original's."""
        if source.python:

            def code(of):  # all of it but where it stands
                inner = tuple(
                    code(c) if hasattr(c, "co_code") else (type(c), repr(c)) for c in of.co_consts
                )
                return of.co_code, of.co_names, of.co_varnames, inner

            try:
                old, new = (
                    compile(t.encode("latin-1"), "", "exec", dont_inherit=True)
                    for t in (source.text, source.changed(mutant))
                )
                return "equivalent" if code(old) == code(new) else ""
            except SyntaxError:
                return "no-compile"
        tree = self.trees[worker]
        objects = tree.depending.get(mutant.file, [])
        if not objects:
            return "not-executed"
        made, _ = tree.make(objects)
        if not made:
            return "no-compile"
        if tree.hashes(objects) != {o: tree.pristine[o] for o in objects}:
            return ""
        tree.write(mutant.file, source.changed(mutant, "@"))
        return "not-executed" if tree.make(objects)[0] else "equivalent"


class Run:
    """The mutants of a seed and their rows in the CSV."""

    def __init__(self, sources, seed, count, path):
        self.sources, self.count, self.path, self.rows, self.busy = sources, count, path, {}, set()
        self.mutants = {
            m.id: m for m in itertools.islice(mutants_of(sources, seed), 4 * count + 100)
        }
        if path.exists():
            with open(path, newline="") as file:
                self.rows = {int(row["id"]): row for row in csv.DictReader(file)}
        for number, row in self.rows.items():
            if number not in self.mutants or [row[c] for c in COLUMNS[:6]] != self.row(
                self.mutants[number]
            ):
                sys.exit(
                    f"{path}: mutant {number} is another with this seed, count and sources; choose"
                    " another CSV"
                )

    def row(self, mutant):
        return [
            str(mutant.id),
            mutant.file,
            str(mutant.line),
            mutant.kind,
            *texts(self.sources[mutant.file], mutant),
        ]  # COLUMNS[:6]

    def keep(self, mutant, status, test="", tests="", seconds=0.0):
        """Keeps the outcome of a mutant, and writes the CSV anew."""
        with LOCK:
            before = self.rows.get(mutant.id, {"tests": "", "seconds": 0})
            if re.match(r"\d", before["tests"]) and re.match(
                r"\d", tests
            ):  # those of the tiers before, too
                ran, of = (
                    sum(int(n) for n in pair)
                    for pair in zip(before["tests"].split(" of "), tests.split(" of "))
                )
                tests = f"{ran} of {of}"
            values = [
                *self.row(mutant),
                status,
                test,
                tests or before["tests"],
                f"{float(before['seconds']) + seconds:.1f}",
            ]
            self.rows[mutant.id] = dict(zip(COLUMNS, values))
            self.busy.discard(mutant.id)
            text = io.StringIO()
            table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(self.rows[n] for n in sorted(self.rows))
            replace(self.path, text.getvalue())
            say(
                f"{mutant.id} {mutant.file}:{mutant.line} {mutant.kind}: {status} {test} ({tests},"
                f" {seconds:.0f} s)"
            )

    def new_ones(self):
        """Yields mutants without a row in their order, until enough have one that counts."""
        while not Processes.stopped.is_set():
            with LOCK:
                counted = sum(row["status"] not in DROPPED for row in self.rows.values())
                left = [n for n in self.mutants if n not in self.rows and n not in self.busy]
                if counted >= self.count or not left:
                    return
                enough = counted + len(self.busy) >= self.count
                if not enough:
                    self.busy.add(left[0])
            if enough:
                time.sleep(0.5)  # those under way may be dropped
            else:
                yield self.mutants[left[0]]

    def with_status(self, status):
        return [self.mutants[n] for n, row in sorted(self.rows.items()) if row["status"] == status]

    def phase(self, side, tier, before, killed, alive):
        """Runs a tier for new mutants (before is None) or for those of a status."""
        old = iter(self.with_status(before)) if before else None

        def work(worker):
            for mutant in self.new_ones() if old is None else shared(old):
                source, start = self.sources[mutant.file], time.monotonic()
                if source.name not in side.files or side.files[source.name][
                    1
                ] != source.text.encode("latin-1"):
                    self.keep(mutant, alive, tests="the file is another there")
                    continue
                try:
                    side.put(worker, source, mutant)
                    status = side.judge(worker, source, mutant) if old is None else ""
                    test, tests = ("", "") if status else side.hunt(worker, source, mutant, tier)
                finally:
                    side.trees[worker].write(source.name, source.text)
                self.keep(
                    mutant,
                    status or (killed if test else alive),
                    test,
                    tests,
                    time.monotonic() - start,
                )

        in_threads(work, range(side.jobs))

    def table(self):
        """Returns the Markdown table by folder, and the survivors."""
        columns = [
            "mutants",
            "killed in tier 1",
            "in tier 2",
            "by the older tests only",
            "alive",
            "not compiled",
            "equivalent",
            "not executed here",
        ]
        statuses = {
            "killed-1": 1,
            "killed-2": 2,
            "killed-today": 3,
            "no-compile": 5,
            "equivalent": 6,
            "not-executed": 7,
        }
        count = collections.defaultdict(lambda: [0] * 8)
        for row in self.rows.values():
            for folder in (os.path.dirname(row["file"]), "all"):
                count[folder][statuses.get(row["status"], 4)] += 1
                count[folder][0] += row["status"] not in DROPPED
        lines = ["| folder | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        lines += [
            f"| {folder} | " + " | ".join(map(str, count[folder])) + " |"
            for folder in sorted(count, key=lambda f: (f == "all", f))
        ]
        for row in self.rows.values():
            if row["status"] not in statuses:
                lines.append(
                    f"\n{row['id']}. `{row['file']}:{row['line']}` ({row['kind']}; {row['status']};"
                    f" tests {row['tests'] or 'none'})\n   `{row['before']}` -> `{row['after']}`"
                )
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", default="1", help="chooses the mutants: any text")
    parser.add_argument(
        "--count",
        type=int,
        default=20,
        help="how many mutants that compile, differ and are executed here (20)",
    )
    parser.add_argument(
        "--build",
        type=pathlib.Path,
        default=ROOT / "build",
        help="the build folder that holds venv (build)",
    )
    parser.add_argument(
        "--csv", type=pathlib.Path, help="one row per mutant (BUILD/mutants/SEED.csv)"
    )
    parser.add_argument(
        "--today",
        default="d2f63ea",
        metavar="REVISION",
        help='the revision whose tests survivors meet last; "" for none (d2f63ea)',
    )
    parser.add_argument("--jobs", type=int, default=2, help="workers (2)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="SECONDS",
        help="tests of a tier that a survivor meets end after this time (0: never)",
    )
    parser.add_argument(
        "--flavours",
        default="^build_asan$",
        metavar="PATTERN",
        help="builds inside ctest that take part (^build_asan$)",
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="mutants of files whose names match only"
    )
    parser.add_argument(
        "--tests", default="", metavar="PATTERN", help="tests whose names match only"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--table", action="store_true", help="print the table of the CSV and end")
    parser.add_argument(
        "--coverage", action="store_true", help="measure what each test executes and end"
    )
    a = parser.parse_args()
    a.build = a.build.resolve()
    files = tracked_files()
    sources = {
        n: Source(n, data)
        for n, (_, data) in files.items()
        if n.startswith(FOLDERS)
        and n.endswith((".c", ".h", ".cu", ".def", ".py"))
        and re.search(a.only, n)
    }
    if a.list:
        for mutant in itertools.islice(mutants_of(sources, a.seed), a.count):
            print(
                f"{mutant.id} {mutant.file}:{mutant.line} {mutant.kind}:"
                f" {' -> '.join(texts(sources[mutant.file], mutant))}"
            )
        return
    setting = Setting(a.build, a.flavours, a.tests)
    setting.folder.mkdir(parents=True, exist_ok=True)
    run = Run(sources, a.seed, a.count, a.csv or setting.folder / f"{a.seed}.csv")
    if a.table:
        print(run.table())
        return
    lock = open(setting.folder / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"another run works in {setting.folder}")
    now = Side(setting, "now", files, a.jobs, a.patience)
    map_now = Map(setting, "now", files)
    map_now.measure(a.jobs)
    today = Side(setting, "today", revision_files(a.today), a.jobs, a.patience) if a.today else None
    map_today = Map(setting, "today", today.files, map_now) if today else None
    if a.coverage:
        if map_today:
            map_today.measure(a.jobs)
        return
    now.open(map_now)

    def names(side, mutants, tier):
        return {n for m in mutants for n in side.choice(sources[m.file], m, tier, False)}

    now.check(names(now, list(run.mutants.values())[: 2 * a.count], 1))
    run.phase(now, 1, None, "killed-1", "survived-1")
    now.check(names(now, run.with_status("survived-1"), 2))
    run.phase(now, 2, "survived-1", "killed-2", "survived-2" if today else "alive")
    if today and run.with_status("survived-2"):
        map_today.measure(a.jobs)
        today.open(map_today)
        today.check(names(today, run.with_status("survived-2"), 0))
        run.phase(today, 0, "survived-2", "killed-today", "alive")
    print(run.table())


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background commands ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
