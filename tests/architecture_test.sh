#!/bin/bash
# Holds the sources to the rooms of docs/architecture.md: who takes symbols from whom (the objects of the library, by nm), and who
# includes whose headers.
. "$(dirname "$0")/lib.sh"
need nm python3
cd "$source_dir"
objects=$build_dir/CMakeFiles
[ -d "$objects/hstep_core.dir" ] || fail "$build_dir holds no objects"
make_scratch
for object in "$objects"/hstep_core.dir/src/*.o "$objects"/hstep_core.dir/src/*/*.o "$objects"/hstep_kernels_*.dir/src/host/*.o; do
    nm -g "$object" | sed "s|^|${object#*.dir/src/} |"
done >"$scratch/symbols"
python3 - "$scratch/symbols" <<'PYTHON' || fail "the sources break docs/architecture.md"
import glob, os, re, sys

rooms, order, uses, crossings = {}, [], {}, {("core/devices", "hstep_default_device"), ("core/devices", "hstep_cuda_device")}
for line in open("docs/architecture.md", encoding="utf-8"):
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if len(cells) == 4 and re.fullmatch(r"(`[\w/]+` ?)+", cells[1]):
        uses[cells[0]] = {room.strip() for room in cells[2].split(",") if room.strip()}
        for name in re.findall(r"`([\w/]+)`", cells[1]):
            rooms[name] = cells[0]
            order.append(name)
broken = []
sources = [f for pattern in ("src/*.c", "src/core/*.c", "src/host/*.c", "src/cuda/*.c", "src/cuda/*.cu") for f in glob.glob(pattern)]
files = sorted(os.path.splitext(f)[0][4:] for f in sources)
broken += [f"{f} stands in no room" for f in files if f not in rooms]
broken += [f"room {rooms[f]}: there is no {f}" for f in order if f not in files]
broken += [f"room {room} may use {other}, which is none" for room in uses for other in uses[room] if other not in uses]


def may(user, owner):
    if user == owner:
        return True
    if rooms[user] == rooms[owner]:
        return order.index(owner) < order.index(user)
    return rooms[owner] in uses[rooms[user]]


defined, wanted = {}, []
for line in open(sys.argv[1], encoding="utf-8"):
    name, *_, kind, symbol = line.split()
    name = re.sub(r"\.c\.(o|obj)$", "", name)
    if kind == "U":
        wanted.append((name, symbol))
    else:
        defined[symbol] = name
for user, symbol in wanted:
    owner = defined.get(symbol)
    if owner and user in rooms and owner in rooms and not may(user, owner) and (user, symbol) not in crossings:
        broken.append(f"{user}.c uses {symbol} of {owner}.c: room {rooms[user]} may not")
if len(defined) < 100 or len(wanted) < 100:
    broken.append("nm shows too little to judge by")

header_rooms = {f + kind: room for f, room in rooms.items() for kind in (".h", ".c")}
header_rooms.update({"core/optimizer.h": "handle", "host/host.h": "host", "host/transform.h": "host", "host/pair.h": "kernels",
                     "host/tiles.h": "kernels", "host/fused.h": "kernels", "host/fused_steps.h": "kernels",
                     "cuda/images.h": "cuda", "cuda/kernels.h": "cuda", "cuda/lane.h": "device code", "cuda/rules.h": "device code",
                     "cuda/matrix.h": "device code", "cuda/fused.h": "device code", "cuda/fused_kernels.h": "device code"})
for path in sorted(sources + [f for folder in ("src", "src/core", "src/host", "src/cuda") for f in glob.glob(folder + "/*.h")]):
    name = path[4:]
    room = header_rooms.get(name) if name.endswith(".h") else rooms.get(os.path.splitext(name)[0])
    for header in re.findall(r'^#\s*include\s+"([^"]+)"', open(path, encoding="utf-8").read(), re.M):
        if not header.startswith(("core/", "host/", "cuda/")) or header.endswith(".def"):
            continue
        if not os.path.exists("src/" + header):
            broken.append(f"{name} includes {header}, which is not there")
            continue
        owner = header_rooms.get(header)
        if owner is None:
            broken.append(f"{header} belongs to no room")
        elif room is None:
            # Everybody's headers may know plain rows only.
            if owner != "values":
                broken.append(f"{name} is everybody's, and includes {header} of room {owner}")
        elif owner != room and owner not in uses[room]:
            broken.append(f"{name} includes {header}: room {room} may not use {owner}")
print("\n".join("     " + line for line in broken) if broken else
      f"ok   {len(files)} files in {len(uses)} rooms, {len(defined)} symbols, no arrow upward")
sys.exit(1 if broken else 0)
PYTHON
