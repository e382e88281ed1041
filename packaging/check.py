"""Checks wheels, and says in one sentence each what is wrong with them.

    check.py [--platforms FILE] [--results FOLDER] WHEEL...

A wheel must be one for a row of packaging/platforms.csv, or of FILE. It must hold the modules of
this tree, the libraries of its platform (packaging/libraries.py checks them), licences
and a list of components. What was checked is noted in FOLDER (packaging/results.py).
"""

import argparse
import base64
import collections
import csv
import hashlib
import io
import json
import pathlib
import re
import subprocess
import sys
import zipfile

import libraries
from packaging.metadata import ExceptionGroup, Metadata
from packaging.utils import parse_wheel_filename
from results import PLATFORMS, note, platforms

ROOT = pathlib.Path(__file__).parent.parent
MOST_BYTES = 20_000_000
#: folders of a machine that builds; modules in Python are compared with this tree instead
MACHINE = re.compile(
    rb"/(?:home|root|tmp|Users|work|build)/[\w.-]+|" + re.escape(str(ROOT).encode())
)
NO_DEVICE_CODE = b"none in this build"


def version():
    """Returns the version of the header, its only home."""
    header = (ROOT / "include" / "halfstep.h").read_text()
    return ".".join(re.findall(r"#define HALFSTEP_VERSION_\w+ +(\d+)", header))


def library_names(target):
    """Returns the names of the libraries of a platform. halfstep_io needs a POSIX system."""
    if "windows" in target:
        return ["halfstep.dll"]
    ending = "dylib" if "macos" in target else "so"
    return [f"libhalfstep.{ending}", f"libhalfstep_io.{ending}"]


def record(files, info):
    """Checks that RECORD lists every file of the wheel with its hash and size, and no other."""
    text = files.get(f"{info}/RECORD", b"").decode()
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(text)) if row}
    for name in sorted(files.keys() ^ rows.keys()):
        yield f"{name} is {'not in RECORD' if name in files else 'in RECORD alone'}"
    for name in sorted(files.keys() & rows.keys() - {f"{info}/RECORD"}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        if rows[name] != [f"sha256={digest.decode()}", str(len(files[name]))]:
            yield f"{name} is not the file that RECORD describes"


def metadata(files, info, tags):
    """Checks METADATA and WHEEL."""
    try:
        found = Metadata.from_email(files.get(f"{info}/METADATA", b""), validate=True)
    except ExceptionGroup as errors:
        yield f"METADATA is not valid: {'; '.join(map(str, errors.exceptions))}"
        return
    if (found.name, str(found.version)) != ("halfstep", version()):
        yield f"METADATA is of {found.name} {found.version}, not of halfstep {version()}"
    for need in ("requires_python", "license_expression", "summary", "description"):
        if not getattr(found, need):
            yield f"METADATA has no {need}"
    if "torch" not in {need.name for need in found.requires_dist or ()}:
        yield "METADATA does not require torch"
    licences = found.license_files or []
    if "LICENSE" not in licences:
        yield "METADATA names no licence file LICENSE"
    for name in licences:
        if not files.get(f"{info}/licenses/{name}"):
            yield f"the licence {name} is not in the wheel"
    lines = files.get(f"{info}/WHEEL", b"").decode().splitlines()
    written = sorted(line[5:] for line in lines if line.startswith("Tag: "))
    if written != sorted(map(str, tags)):
        yield f"WHEEL has the tags {', '.join(written)}, the file name {', '.join(map(str, tags))}"
    if "Root-Is-Purelib: false" not in lines:
        yield "WHEEL does not say that the wheel is for one platform"


def components(files, info):
    """Checks the list of components (CycloneDX)."""
    lists = [name for name in files if re.fullmatch(rf"{info}/sboms/[^/]+\.json", name)]
    if not lists:
        yield f"no list of components ({info}/sboms/*.json)"
    for name in lists:
        try:
            found = json.loads(files[name])
            parts = [found["metadata"]["component"], *found["components"]]
            if (found["bomFormat"], parts[0]["name"]) != ("CycloneDX", "halfstep"):
                yield f"{name} is not a CycloneDX list of halfstep"
            for part in parts:
                lacking = [key for key in ("name", "version", "licenses") if not part.get(key)]
                if lacking:
                    yield f"{name}: the component {part.get('name')} has no {', '.join(lacking)}"
            for part in parts[1:]:
                if not any(file.startswith(f"{info}/licenses/{part['name']}/") for file in files):
                    yield f"the licence of {part['name']}, which {name} lists, is not in the wheel"
            if parts[0].get("version") != version():
                yield f"{name} is of halfstep {parts[0].get('version')}, not {version()}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{name} is not a CycloneDX list of components: {error!r}"


def contents(files, info, names):
    """Checks that the package is that of this tree and its libraries, nothing else."""
    source = ROOT / "python"
    wanted = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    made = {f"halfstep/{name}" for name in names}
    found = {name for name in files if not name.startswith(info + "/")}
    for name in sorted((wanted.keys() | made) ^ found):
        yield f"{name} {'is not expected' if name in found else 'is not in the wheel'}"
    for name in sorted(wanted.keys() & found):
        if files[name] != wanted[name]:
            yield f"{name} is not the file of this tree"
    for name in sorted(files.keys() - wanted.keys()):
        place = MACHINE.search(files[name])
        if place:
            yield f"{name} names a folder of the build machine, {place[0].decode()}"


def archive(entries):
    """Checks the zip archive's own entries."""
    for name, times in collections.Counter(entry.filename for entry in entries).items():
        if times > 1 or name.startswith("/") or ".." in name.split("/") or "\\" in name:
            yield f"{name} is no name of one file in a wheel"
    dates = sorted({entry.date_time for entry in entries})
    if len(dates) > 1:
        yield f"files have different dates, from {dates[0]} to {dates[-1]}"
    for entry in entries:
        if entry.external_attr >> 28 not in (0, 8):
            yield f"{entry.filename} is a link or a folder"


def audited(wheel, tag):
    """Checks by auditwheel that a wheel for Linux runs wherever its tag promises."""
    # Libraries of this machine say nothing about others, so it finds none of them.
    command = [
        sys.executable,
        "-m",
        "auditwheel",
        "show",
        "--json",
        "--ldpaths",
        "/none",
        str(wheel),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(run.stdout)
        others, consistent = found["external_libs"], found["overall_tag"]
    except (ValueError, KeyError):
        lines = [*run.stdout.splitlines(), *run.stderr.splitlines(), "no answer"]
        yield f"auditwheel cannot read it: {lines[-2 if len(lines) > 1 else 0]}"
        return
    # zig links musl by the name that it has everywhere, auditwheel knows that of one distribution.
    if "musllinux" in tag and set(others) == {"libc.so"}:
        others, consistent = {}, found["sym_tag"]
    if others:
        yield f"auditwheel finds other libraries linked: {', '.join(others)}"
    pattern = r"(manylinux|musllinux)_(\d+)_(\d+)_"
    least = [
        (kind, int(major), int(minor)) for kind, major, minor in re.findall(pattern, consistent)
    ]
    promised = [(kind, int(major), int(minor)) for kind, major, minor in re.findall(pattern, tag)]
    if not any(has[0] == may[0] and has <= may for has in least for may in promised):
        yield f"auditwheel calls it consistent with {consistent}, the file name promises {tag}"


def check(wheel, listed):
    """Yields a sentence for each thing that is wrong with a wheel."""
    try:
        name, of, build, tags = parse_wheel_filename(wheel.name)
        tag = re.fullmatch(r".*-py3-none-(.*)\.whl", wheel.name)[1]
    except (ValueError, TypeError):
        yield "the file name is not halfstep-VERSION-py3-none-PLATFORM.whl"
        return
    row = platforms(listed).get(tag)
    if (name, str(of), build) != ("halfstep", version(), ()):
        yield f"the file name is of {name} {of}, not of halfstep {version()}"
    if row is None:
        yield f"{tag} is no platform of {listed}"
        return
    if wheel.stat().st_size > MOST_BYTES:
        yield f"{wheel.stat().st_size / 1e6:.1f} MB are more than {MOST_BYTES / 1e6:.0f} MB"
    with zipfile.ZipFile(wheel) as opened:
        entries = opened.infolist()
        files = {entry.filename: opened.read(entry) for entry in entries}
    info = f"halfstep-{of}.dist-info"
    names = library_names(row["target"])
    yield from archive(entries)
    yield from record(files, info)
    yield from metadata(files, info, tags)
    yield from components(files, info)
    yield from contents(files, info, names)
    for each in names:
        data = files.get(f"halfstep/{each}")
        if data is not None:
            yield from libraries.check(each, data, row["target"])
    without = NO_DEVICE_CODE in files.get(f"halfstep/{names[0]}", b"")
    if without == (row["device_code"] == "yes"):
        asked = f"{pathlib.Path(listed).name} says device_code={row['device_code']}"
        yield f"it has {'no ' * without}device code; {asked}"
    if "linux" in tag:
        yield from audited(wheel, tag)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--platforms", default=PLATFORMS)
    parser.add_argument("--results")
    parser.add_argument("wheels", nargs="+", type=pathlib.Path, metavar="WHEEL")
    options = parser.parse_args()
    status = 0
    for wheel in options.wheels:
        wrong = list(check(wheel, options.platforms))
        for sentence in wrong:
            print(f"FAIL {wheel.name}: {sentence}")
        if wrong:
            status = 1
            continue
        print(f"ok   {wheel.name}")
        if options.results:
            by = {"win": "imports", "mac": "load commands"}
            tag = re.fullmatch(r".*-py3-none-(.*)\.whl", wheel.name)[1]
            shown = by.get(tag[:3], "auditwheel")
            note(
                options.results,
                tag,
                ran=f"{shown}, symbols and contents checked",
                bytes=str(wheel.stat().st_size),
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
