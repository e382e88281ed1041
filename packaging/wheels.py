"""Makes the wheel of a platform from the libraries that were compiled for it.

    wheels.py WORK TAG DIST

WORK is the folder packaging of a build. Modules and metadata are those of the wheel in WORK/base,
which `pip wheel` made. Libraries are those of WORK/wheels/TAG/install. Licences of what
zig has linked in are added, and a bill of materials (SBOM, CycloneDX 1.6).
"""

import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import lief
import ziglang
from results import note, platforms

HERE = pathlib.Path(__file__).parent
ZIG = pathlib.Path(ziglang.__file__).parent

lief.logging.disable()

#: symbols that linkers make
MADE = {"_GLOBAL_OFFSET_TABLE_", "_DYNAMIC", "___dso_handle", "__dso_handle"}


SYSTEMS = {"linux": "Linux", "macos": "macOS", "windows": "Windows"}


def run(*command):
    """Runs a program and returns what it writes."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def zig_version():
    return run(ZIG / "zig", "version").strip()


def linked(target, names):
    """Returns what zig links in for a target: name, version, SPDX licence and the file of its text.
    `names` are the functions that the libraries get from it. A DLL gets a part of its C library.
    Some functions of glibc, such as stat() before 2.33, are in its static part only."""
    if "-windows-" in target:
        mingw = (ZIG / "lib/libc/include/any-windows-any/_mingw_mac.h").read_text()
        mingw = ".".join(re.findall(r"MINGW64_VERSION_(?:MAJOR|MINOR|BUGFIX) (\d+)", mingw))
        musl = (ZIG / "lib/libc/musl/src/internal/version.h").read_text().split('"')[1]
        return (
            ("mingw-w64", mingw, "ZPL-2.1", ZIG / "lib/libc/mingw/COPYING"),
            ("gdtoa", mingw, "SMLNJ", HERE / "licences/gdtoa.txt"),
            ("zig", zig_version(), "MIT", ZIG / "LICENSE"),
            ("musl", musl, "MIT", ZIG / "lib/libc/musl/COPYRIGHT"),
        )
    glibc = {re.split("[-.]", file.name)[0] for file in (ZIG / "lib/libc/glibc").rglob("*.c")}
    unknown = [name for name in names if "-gnu." not in target or name not in glibc]
    if unknown:
        sys.exit(
            f"FAIL {target}: {', '.join(unknown[:9])} come from libraries of zig; name these and"
            " their licences in linked() of packaging/wheels.py"
        )
    version = target.split("-gnu.")[-1]
    licence = "LGPL-2.1-or-later WITH GCC-exception-2.0"
    return (("glibc", version, licence, HERE / "licences/glibc.txt"),) if names else ()


def symbols(file):
    """Returns the names that an object file or a library defines, and those that it lacks."""
    binary = lief.parse(str(file))
    if isinstance(binary, lief.MachO.Binary):
        lacking = [s for s in binary.symbols if s.raw_type & 0x0E == 0 and s.raw_type & 0x01]
    else:
        lacking = [s for s in binary.symbols if s.shndx == 0]
    lacking = {s.name for s in lacking if s.name}
    return {s.name for s in binary.symbols if s.name} - lacking, lacking


def linked_in(folder):
    """Returns the names that the linker has resolved by code which is not the project's. The
    libraries neither define them in an object file of their own nor ask the system for them."""
    defined, wanted, asked = set(), set(), set()
    for file in folder.rglob("*.o"):
        own, lacking = symbols(file)
        defined |= own
        wanted |= lacking
    for file in folder.glob("libhalfstep*.*"):
        if file.suffix in (".so", ".dylib"):
            asked |= symbols(file)[1]
    return sorted(wanted - defined - asked - MADE)


def bill(version, target, parts, images):
    """Returns the bill of materials: what the libraries consist of and what made them."""
    made = datetime.datetime.fromtimestamp(
        int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc
    )
    tools = [("zig", zig_version())]
    if images:
        made_by = re.search("^made by (.*)$", images.read_text(), re.M)[1]
        tools += [
            tuple(tool.rsplit(" ", 1)) for tool in made_by.replace(" version", "").split(", ")
        ]
    own = {
        "bom-ref": "halfstep",
        "type": "library",
        "name": "halfstep",
        "version": version,
        "licenses": [{"expression": "Apache-2.0"}],
        "purl": f"pkg:pypi/halfstep@{version}",
        "properties": [{"name": "target", "value": target}],
    }
    components = [
        {
            "bom-ref": name,
            "type": "library",
            "name": name,
            "version": version,
            "description": "part of the C library or the compiler's runtime, as zig brings them",
            "licenses": [{"expression": licence}],
        }
        for name, version, licence, _ in parts
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": version}
                    for name, version in tools
                ]
            },
            "component": own,
        },
        "components": components,
        "dependencies": [
            {"ref": "halfstep", "dependsOn": [x["bom-ref"] for x in components]},
            *({"ref": x["bom-ref"]} for x in components),
        ],
    }


def main(work, tag, dist):
    row = platforms()[tag]
    target, folder = row["target"], work / "wheels" / tag
    parts = linked(target, linked_in(folder / "build"))

    (base,) = (work / "base").glob("*.whl")
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    shutil.unpack_archive(base, folder / "wheel", "zip")
    package = folder / "wheel/halfstep"
    for file in package.glob("*halfstep*.so"):
        file.unlink()
    shutil.copytree(folder / "install/halfstep", package, dirs_exist_ok=True)

    (info,) = (folder / "wheel").glob("*.dist-info")
    version = info.name.split("-")[1][: -len(".dist")]
    text = (info / "WHEEL").read_text()
    tags = "".join(f"Tag: py3-none-{platform}\n" for platform in tag.split("."))
    (info / "WHEEL").write_text(re.sub(r"(^Tag: .*\n)+", tags, text, flags=re.M))
    for name, _, _, licence in parts:
        to = info / "licenses" / name / licence.name
        to.parent.mkdir()
        shutil.copyfile(licence, to)
    (info / "sboms").mkdir()
    images = work / "images/images.txt" if row["device_code"] == "yes" else None
    materials = bill(version, target, parts, images)
    (info / "sboms/halfstep.cdx.json").write_text(json.dumps(materials, indent=1) + "\n")
    for file in (folder / "wheel").rglob("*"):
        file.chmod(0o755 if file.is_dir() or file.suffix in (".so", ".dylib", ".dll") else 0o644)

    run(sys.executable, "-m", "wheel", "pack", str(folder / "wheel"), "--dest-dir", str(dist))
    wheel = dist / f"halfstep-{version}-py3-none-{tag}.whl"
    size = wheel.stat().st_size
    processor, system, *rest = re.split("[-.]", target, maxsplit=2)
    least = "10" if system == "windows" else rest[0].replace("gnu.", "glibc ")
    name = f"{SYSTEMS[system]} {processor.replace('_', '-')} ({least})"
    note(
        work / "results",
        tag,
        package=f"wheel, {name}",
        built=f"zig {zig_version()}",
        bytes=str(size),
        ran="",
        result="",
    )
    print(f"ok   {wheel.name}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
