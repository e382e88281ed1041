#!/usr/bin/env python3
"""same_code.py OLD.o NEW.o [RENAMED]: which functions of two objects differ in their instructions,
places of data and padding apart.

RENAMED is a file of lines "PATTERN REPLACEMENT", regular expressions that make new names of the old
ones, such as "_4(?=_|$) _lion".
"""

import re
import subprocess
import sys


def functions(path, renamed=()):
    found, name = {}, None
    for line in subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        title = re.match(r"^[0-9a-f]+ <(.*)>:", line)
        code = re.match(r"^\s*[0-9a-f]+:\s*(.*)", line)
        if title:
            name = title[1]
            for pattern, replacement in renamed:
                name = re.sub(pattern, replacement, name)
            found[name] = []
        elif code and name and not re.match(r"(cs )?nop|data16|xchg +%ax", code[1]):
            text = re.sub(r"# .*", "", code[1])
            found[name].append(
                re.sub(r"[0-9a-f]+ <[^>]*>|0x[0-9a-f]+\(%rip\)", "place", text).strip()
            )
    return found


table = [line.split() for line in open(sys.argv[3])] if len(sys.argv) > 3 else []
old, new = functions(sys.argv[1], table), functions(sys.argv[2])
both = [name for name in old if name in new]
other = [name for name in both if old[name] != new[name]]
print(
    f"{sys.argv[2]}: {len(both)} functions in both, {sum(map(len, old.values()))} and"
    f" {sum(map(len, new.values()))} instructions; {len(both) - len(other)} the same"
)
for name in other:
    print(f"  {name}: {len(old[name])}, now {len(new[name])}")
for name in sorted(set(old) ^ set(new)):
    print(f"  {name} only in the {'old' if name in old else 'new'} one")
