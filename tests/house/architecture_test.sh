#!/bin/bash
# Holds the sources to the order of rooms in docs/architecture.md. A room is a folder of src or tools. No file may
# include a header of a room further right, or take a symbol from an object there.
. "$(dirname "$0")/../tools/lib.sh"
need nm python3
cd "$source_dir"
objects=$build_dir/CMakeFiles
[ -d "$objects/hstep_core.dir" ] || fail "$build_dir holds no objects"
make_scratch
(cd "$objects" && find . -path './hstep_*.dir/*' \( -name '*.c.o' -o -name '*.c.obj' \)) | sort | while read -r object; do
    source=${object#*.dir/} source=${source%.o*}
    [ ! -e "$source" ] || nm -g "$objects/$object" | sed "s|^|$source |"
done >"$scratch/symbols"
python3 - "$scratch/symbols" <<'PYTHON' || fail "the sources break docs/architecture.md"
import collections, glob, os, re, sys

line = next(l for l in open("docs/architecture.md", encoding="utf-8") if l.startswith("`base`"))
groups = [re.findall(r"`(\w+)`", part) for part in line.split("|")]
order = [room for group in groups for room in group]
group_of = {room: i for i, group in enumerate(groups) for room in group}
# Lists what one group uses from another besides the public headers.
taken = {("io", "base/structs.h"), ("io", "base/dtypes.def")}
taken |= {(room, header) for room in groups[2] for header in
          ("io/files.h", "io/json.h", "io/text.h", "base/patterns.h", "base/rng.h", "base/process/environment.h", "base/process/limits.h")}
# A table has one file for each of its rows.
of_rows = {"src/formats", "src/rules"}
broken = []


def room_of(path):
    return path.split("/")[1] if path.startswith(("src/", "tools/")) else None


files = sorted(f for f in glob.glob("src/**", recursive=True) + glob.glob("tools/**", recursive=True)
               if os.path.isfile(f) and not f.startswith("src/device/cuda/images/"))  # what packaging makes
rooms = {room_of(f) for f in files}
broken += [f"{room} is a folder that the order does not name" for room in rooms - set(order)]
broken += [f"the order names {room}, which is no folder" for room in set(order) - rooms]
for folder, n in sorted(collections.Counter(os.path.dirname(f) for f in files).items()):
    if n > 16 and folder not in of_rows:
        broken.append(f"{folder} has {n} files: give some of them an inner folder")

# Code is what is neither blank nor a comment.
comment = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)
ceilings = re.findall(r"`(src|tools)` at most ([\d,]+)\s+lines", open("docs/architecture.md", encoding="utf-8").read())
for top, most in ceilings:
    texts = [open(f, encoding="utf-8").read() for f in files if f.startswith(top) and re.search(r"\.(c|h|cu|def|[ch]pp)$", f)]
    code = [comment.sub(lambda m: m[0] if m[0][0] == '"' else " ", text) for text in texts]
    lines = sum(bool(line.strip()) for text in code for line in text.split("\n"))
    if lines > int(most.replace(",", "")):
        broken.append(f"{top} has {lines} lines of code: take some away, or raise the figure in docs/architecture.md and say for which feature")
if len(ceilings) != 2:
    broken.append("docs/architecture.md says for src and tools how many lines they have at most")

arrows = 0
for path in files:
    user = room_of(path)
    for header in re.findall(r'^\s*#\s*include\s+"([^"]+)"', open(path, encoding="utf-8").read(), re.M):
        owner = header.split("/")[0]
        if header in ("halfstep.h", "halfstep_io.h"):
            continue
        if not any(os.path.exists(f"{top}/{header}") for top in ("src", "tools")) or owner not in order:
            broken.append(f"{path} includes {header}: name it by its room, such as base/exact.h")
            continue
        arrows += 1
        if order.index(owner) > order.index(user):
            broken.append(f"{path} includes {header}: {owner} stands right of {user}")
        elif group_of[owner] != group_of[user] and (user, header) not in taken:
            broken.append(f"{path} includes {header}: {user} uses the public headers only")
        elif path.startswith("src/device/") and header.startswith("device/") and "/" in header[7:]:
            if path.split("/")[2] != header.split("/")[1]:
                broken.append(f"{path} includes {header}: devices know nothing of each other")

defined, wanted = {}, []
for line in open(sys.argv[1], encoding="utf-8"):
    name, *_, kind, symbol = line.split()
    if kind == "U":
        wanted.append((name, symbol))
    elif room_of(name):
        defined[symbol] = name
for user, symbol in wanted:
    owner = defined.get(symbol)
    if owner and room_of(user) and order.index(room_of(owner)) > order.index(room_of(user)):
        broken.append(f"{user} uses {symbol} of {owner}: {room_of(owner)} stands right of {room_of(user)}")
if len(defined) < 100 or len(wanted) < 100 or arrows < 100:
    broken.append("too little was found to judge by")
print("\n".join("     " + line for line in broken) if broken else
      f"ok   {len(files)} files in {len(rooms)} rooms, {arrows} includes, {len(defined)} symbols: none from the right")
sys.exit(1 if broken else 0)
PYTHON
