#!/usr/bin/env python3
"""Lists constants, layouts of structures and types of functions, on which programs rely that use
the libraries. clang reads them from the headers. tests/golden/abi.txt is the list of this tree.

    abi.py                    prints the list of the headers (needs clang)
    abi.py --program          prints a C program that compiles where headers have the list's layout
    abi.py --since OLD [NEW]  prints what of a list, this tree's if not given, breaks programs that
                              were built with an older one, and exits with 1 if anything does

A line of the list is one of these. Offsets and sizes are in bytes.

    abi NUMBER
    constant NAME VALUE
    structure NAME SIZE
    member STRUCTURE.NAME OFFSET SIZE TYPE
    callback NAME TYPE
    function NAME LIBRARY TYPE
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "golden" / "abi.txt"
INCLUDE = "#define HALFSTEP_ADVANCED\n#include <stddef.h>\n#include <stdio.h>\n#include <{}>\n"


def clang(text, *options):
    """Runs clang on a C program and returns what it prints."""
    command = ["clang", "-std=c11", f"-I{ROOT / 'include'}", *options, "-x", "c", "-"]
    out = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return out.stdout


def declarations(header, kind):
    """Returns the public declarations of one kind in a header and in the header that it includes,
    as nodes of clang's tree."""
    tree = clang(INCLUDE.format(header), "-fsyntax-only", "-Xclang", "-ast-dump=json")
    nodes = json.loads(tree)["inner"]
    return [n for n in nodes if n["kind"] == kind and n.get("name", "").startswith("halfstep_")]


def members(nodes, prefix=""):
    """Yields names and types of members. Members of an inner structure come before its own."""
    for before, node in zip([None, *nodes], nodes):
        if node["kind"] == "FieldDecl":
            name, kind = prefix + node["name"], node["type"]["qualType"]
            if before and before["kind"] == "RecordDecl":
                yield from members(before["inner"], name + ("[0]." if "[" in kind else "."))
                kind = re.sub(r" \(.*\)", "", kind)
            yield name, kind


def layout(structure, member):
    """Returns C expressions of a member's offset and size."""
    return f"offsetof({structure}, {member})", f"sizeof((({structure} *)0)->{member})"


def lines():
    """Yields the lines of the headers' list, each as the arguments of a printf() in C."""
    yield "abi %lld", "HALFSTEP_ABI"
    macros = clang(INCLUDE.format("halfstep_io.h"), "-E", "-dM")
    for name, value in sorted(re.findall(r"^#define (HALFSTEP_\w+) (.+)$", macros, flags=re.M)):
        if value.startswith('"'):
            yield f"constant {name} {value}", *()
        elif not re.fullmatch(r"HALFSTEP_(ABI|API|VERSION_\w+)", name):
            yield f"constant {name} %lld", name
    for node in declarations("halfstep_io.h", "RecordDecl"):
        name = node["name"]
        if "inner" in node:
            yield f"structure {name} %lld", f"sizeof({name})"
        for member, kind in members(node.get("inner", [])):
            yield f"member {name}.{member} %lld %lld {kind}", *layout(name, member)
    for node in declarations("halfstep_io.h", "TypedefDecl"):
        if "(" in node["type"]["qualType"]:
            yield f"callback {node['name']} {node['type']['qualType']}", *()
    core = {node["name"] for node in declarations("halfstep.h", "FunctionDecl")}
    for node in declarations("halfstep_io.h", "FunctionDecl"):
        library = "libhalfstep" if node["name"] in core else "libhalfstep_io"
        yield f"function {node['name']} {library} {node['type']['qualType']}", *()


def text():
    """Returns the list of the headers, with the sizes and values of this machine."""
    main = INCLUDE.format("halfstep_io.h") + "int main(void)\n{\n"
    for line, *values in lines():
        numbers = "".join(f", (long long)({value})" for value in values)
        main += f"    printf({json.dumps(line + chr(10))}{numbers});\n"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "list"
        clang(main + "}\n", "-o", str(file))
        out = subprocess.run([str(file)], check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return out.stdout


def program():
    """Returns a C program that compiles only if the headers have the constants, sizes and offsets
    of tests/golden/abi.txt."""
    equal = []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        kind, name, *rest = line.split(" ")
        if kind == "abi":
            equal.append(("HALFSTEP_ABI", name))
        elif kind == "constant" and not rest[0].startswith('"'):
            equal.append((name, rest[0]))
        elif kind == "structure":
            equal.append((f"sizeof({name})", rest[0]))
        elif kind == "member":
            equal += zip(layout(*name.split(".", 1)), rest)
    checks = "".join(f'_Static_assert({a} == {b}, "{a} is not {b}");\n' for a, b in equal)
    main = f'int main(void)\n{{\n    puts("{len(equal)} constants, offsets and sizes");\n}}\n'
    return INCLUDE.format("halfstep_io.h") + checks + main


def breaks(old, new):
    """Returns what of a list breaks programs that were built with an older one. Nothing does if the
    number of the ABI has risen, because such programs do not load this library.

    New lines break nothing, and a structure that begins with struct_size may grow. Its new members
    lie behind its old size, because padding may hold anything in older programs. A member called
    reserved is 0 in them, so that a new member may take its place."""
    old, new = ([line.split(" ") for line in text.splitlines()] for text in (old, new))
    before, number = int(old[0][1]), int(new[0][1])
    if number != before:
        return [] if number > before else [f"abi was {before} and is {number}"]
    known = {tuple(words[:2]): words for words in old}
    now = {tuple(words[:2]): words for words in new}
    reserved = {
        (words[1].split(".")[0], *words[2:4])
        for words in old
        if words[0] == "member" and ".reserved" in words[1]
    }
    found = []
    for kind, name, *rest in old:
        words = now.get((kind, name), [kind, name])[2:]
        grown = (
            kind == "structure"
            and ("member", f"{name}.struct_size") in known
            and int((words or [0])[0]) > int(rest[0])
        )
        if words != rest and not grown and (kind != "member" or ".reserved" not in name):
            found.append(f"{kind} {name} was {' '.join(rest)} and is {' '.join(words) or 'gone'}")
    for kind, name, *rest in new:
        structure = name.split(".")[0]
        if kind == "member" and (kind, name) not in known and ("structure", structure) in known:
            size = known["structure", structure][2]
            if int(rest[0]) < int(size) and (structure, *rest[:2]) not in reserved:
                found.append(f"member {name} lies in the first {size} bytes of its structure")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--program"]:
        print(program(), end="")
    elif sys.argv[1:2] == ["--since"] and len(sys.argv) in (3, 4):
        lists = [*sys.argv[2:], LIST][:2]
        broken = breaks(*(pathlib.Path(file).read_text(encoding="utf-8") for file in lists))
        print("\n".join(broken), end="\n" if broken else "")
        sys.exit(1 if broken else 0)
    elif len(sys.argv) == 1:
        print(text(), end="")
    else:
        sys.exit("abi.py: unknown arguments; write --program, --since OLD [NEW], or nothing")
