#!/usr/bin/env python3
"""same_code.py OLD.o NEW.o: prints which functions of two objects differ in their instructions.
Places of data and padding do not count."""

import re
import subprocess
import sys


def functions(path):
    """Returns {name of a function: its instructions}."""
    found, code = {}, []
    objdump = ["objdump", "-d", "--no-show-raw-insn", path]
    for line in subprocess.run(objdump, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    ):
        title = re.match(r"^[0-9a-f]+ <(.*)>:", line)
        instruction = re.match(r"^\s*[0-9a-f]+:\s*([^#]*)", line)
        if title:
            code = found[title[1]] = []
        elif instruction and not re.match(r"(cs )?nop|data16|xchg +%ax", instruction[1]):
            place = r"[0-9a-f]+ <[^>]*>|0x[0-9a-f]+\(%rip\)"
            code.append(re.sub(place, "place", instruction[1]).strip())
    return found


old, new = functions(sys.argv[1]), functions(sys.argv[2])
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
