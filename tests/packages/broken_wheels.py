"""Breaks wheels in every way that packaging/check.py looks for, and demands that it refuses each.

broken_wheels.py --library FOLDER...   a small wheel of the native libraries in FOLDER
broken_wheels.py WHEEL...              wheels that packaging/check.py accepts
"""

import base64
import contextlib
import csv
import hashlib
import io
import json
import pathlib
import platform
import re
import struct
import sys
import tempfile
import warnings
import zipfile

import lief

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "packaging"))
import check  # noqa: E402

INFO = f"halfstep-{check.version()}.dist-info"
DATE = (1980, 1, 1, 0, 0, 0)


def record(files):
    """Returns the text of RECORD for files by name."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(data)])
    rows.writerow([f"{INFO}/RECORD", "", ""])
    return text.getvalue().encode()


def write(path, files, dates=(), links=(), twice=()):
    """Writes a wheel of files by name. RECORD is made where it is not among them."""
    files = dict(files)
    files.setdefault(f"{INFO}/RECORD", record(files))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in [*files, *twice]:
            entry = zipfile.ZipInfo(name, (1990, 1, 1, 0, 0, 0) if name in dates else DATE)
            entry.external_attr = (0o120777 if name in links else 0o100644) << 16
            archive.writestr(entry, files[name])


def native(folder):
    """Returns the name, the row of the platform, and the files of a wheel of native libraries."""
    libc, version = platform.libc_ver()
    assert libc == "glibc", f"this needs a system with glibc, not {libc or 'another C library'}"
    tag = f"manylinux_{version.replace('.', '_')}_{platform.machine()}"
    source = ROOT / "python"
    files = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.suffix == ".py" or path.name == "py.typed"
    }
    for name in check.library_names("linux"):
        # In a wheel a library is called as its file is. An ABI number has one digit.
        data = (folder / name).read_bytes()
        files[f"halfstep/{name}"] = re.sub(rb"(libhalfstep(_io)?\.so)\.\d\0", rb"\1\0\0\0", data)
    files[f"{INFO}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: halfstep\nVersion: {check.version()}\nSummary: steps\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\nRequires-Python: >=3.9\n"
        "Requires-Dist: torch>=2.1\n\nSteps.\n"
    ).encode()
    files[f"{INFO}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
    ).encode()
    files[f"{INFO}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{INFO}/licenses/another/LICENSE"] = b"Do as you like.\n"
    files[f"{INFO}/sboms/halfstep.cdx.json"] = json.dumps(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "metadata": {"component": component("halfstep", check.version())},
            "components": [component("another", "1")],
        }
    ).encode()
    without = check.NO_DEVICE_CODE in files["halfstep/libhalfstep.so"]
    target = f"{platform.machine()}-linux-gnu"
    row = {"tag": tag, "target": target, "device_code": "no" if without else "yes"}
    return f"halfstep-{check.version()}-py3-none-{tag}.whl", row, files


def component(name, version):
    return {
        "type": "library",
        "name": name,
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }


# ---- Ways to break a file: each takes its bytes and returns others ------------------------------


def instead(old, new):
    """Returns a change of some bytes for others, as many."""

    def change(data):
        assert old in data and len(old) == len(new), f"{old} is not there"
        return data.replace(old, new)

    return change


def elf_segment(kind, **values):
    """Returns a change of a program header: its type or its flags."""

    def change(data):
        found = lief.ELF.parse(data)
        at = found.header.program_header_offset
        (index,) = (i for i, segment in enumerate(found.segments) if segment.type == kind)
        out = bytearray(data)
        for place, value in ((0, values.get("type")), (4, values.get("flags"))):
            if value is not None:
                struct.pack_into(
                    "<I", out, at + index * found.header.program_header_size + place, value
                )
        return bytes(out)

    return change


def pe_field(offset, form, value):
    """Returns a change of a field at an offset from the PE signature. form: of struct."""

    def change(data):
        out = bytearray(data)
        struct.pack_into(form, out, struct.unpack_from("<I", data, 60)[0] + offset, value)
        return bytes(out)

    return change


def first(form, offset, value):
    """Returns a change of a number at an offset of the file."""

    def change(data):
        out = bytearray(data)
        struct.pack_into(form, out, offset, value)
        return bytes(out)

    return change


def macho_command(wanted, place, value):
    """Returns a change of a 32-bit number in the load command of a type, `place` bytes in."""

    def change(data):
        count, at = struct.unpack_from("<I", data, 16)[0], 32
        out = bytearray(data)
        for _ in range(count):
            kind, size = struct.unpack_from("<II", data, at)
            if kind == wanted:
                struct.pack_into("<I", out, at + place, value)
                return bytes(out)
            at += size
        raise AssertionError(f"no load command {wanted:#x}")

    return change


def unexported(name):
    """Returns a change of a library for macOS, which keeps its names in a tree: one name less."""

    def change(data):
        found = lief.MachO.parse(data).at(0)
        assert found.unexport(name), f"{name} is not there"
        with tempfile.NamedTemporaryFile() as file:
            found.write(file.name)
            return pathlib.Path(file.name).read_bytes()

    return change


LOST = ("halfstep_isa_count", "halfstep_isa_coumt")


def library_breaks(system, machine):
    """Yields the ways to break the libraries of a system: library, change, what is said."""
    core = {"linux": "libhalfstep.so", "macos": "libhalfstep.dylib", "windows": "halfstep.dll"}[
        system
    ]
    lost = instead(*(f"\0{name}\0".encode() for name in LOST))
    yield core, lambda data: b"text", "is no library for"
    if system == "macos":
        yield (
            core,
            unexported(f"_{LOST[0]}"),
            f"does not export {LOST[0]}, which _library/abi.py binds",
        )
    else:
        yield core, lost, f"does not export {LOST[0]}, which _library/abi.py binds"
        yield core, lost, f"exports {LOST[1]}, which abi.txt does not list"
    if system == "linux":
        stack, relro = lief.ELF.Segment.TYPE.GNU_STACK, lief.ELF.Segment.TYPE.GNU_RELRO
        yield core, instead(b"\0libc.so", b"\0libz.so"), "links libz.so"
        yield (
            core,
            instead(b"\0libhalfstep.so\0", b"\0libhalfstep.co\0"),
            "calls itself libhalfstep.co",
        )
        yield (
            core.replace("step", "step_io"),
            instead(b"$ORIGIN\0", b"/opt/ab\0"),
            "has the run path '/opt/ab'",
        )
        yield core, elf_segment(stack, flags=7), "makes the stack executable"
        yield core, elf_segment(relro, type=0), "no RELRO"
        yield core, elf_segment(relro, flags=7), "both writable and executable"
        yield core, first("<H", 18, 62 if machine == "aarch64" else 183), "is for the processor"
    elif system == "windows":
        yield core, instead(b"KERNEL32.dll", b"KERNEL33.dll"), "links KERNEL33.dll"
        yield (
            core,
            pe_field(4, "<H", 0x8664 if machine == "aarch64" else 0xAA64),
            "is for the processor",
        )
        for flag, name in ((0x40, "DYNAMIC_BASE"), (0x20, "HIGH_ENTROPY_VA"), (0x100, "NX_COMPAT")):
            yield core, pe_field(24 + 70, "<H", 0x160 & ~flag), f"lacks the flag {name}"
    else:
        yield core, instead(b"libSystem.B", b"libSystem.C"), "links /usr/lib/libSystem.C.dylib"
        yield (
            core,
            instead(b"@rpath/libhalfstep.d", b"@rpath/libhalfstep.c"),
            "calls itself @rpath/libhalfstep.c",
        )
        yield core, macho_command(0x32, 12, 14 << 16), r"is for macOS \[14, 0, 0\]"
        yield (
            core,
            first("<I", 4, 0x01000007 if machine == "aarch64" else 0x0100000C),
            "is for the processor",
        )
        if machine == "aarch64":
            yield (
                core,
                instead(b"docs/gpu.md", b"docs/gpu.nd"),
                "was changed after it was signed, at byte",
            )
            yield core, macho_command(0x1D, 0, 0x1E), "is not signed"


def breaks(name, row, files):
    """Yields the ways to break a wheel: the arguments of write(), its name, and what is said."""
    sbom = next(file for file in files if file.startswith(f"{INFO}/sboms/"))
    system = re.search(r"linux|macos|windows", row["target"])[0]
    core = f"halfstep/{check.library_names(row['target'])[0]}"

    def changed(file, change):
        return {**files, file: change(files[file])}

    def without(file):
        return {other: data for other, data in files.items() if other != file}

    def line(old, new):
        return lambda data: re.sub(old, new, data)

    def with_component(data):
        found = json.loads(data)
        found["components"].append(component("more", "1"))
        return json.dumps(found).encode()

    everywhere = {**files, f"{INFO}/RECORD": record(files)}
    yield {}, name.replace("py3", "cp311"), "the file name is not"
    yield {}, name.replace(check.version(), "9.9"), "the file name is of halfstep 9.9"
    yield {}, re.sub("none-.*", "none-beos_x86_64.whl", name), "beos_x86_64 is no platform"
    yield {"dates": [core]}, name, "files have different dates"
    yield {"links": [core]}, name, "is a link"
    yield {"twice": [core]}, name, "is no name of one file"
    other = {**everywhere, core: files[core] + b"\0"}
    yield {"files": other}, name, "is not the file that RECORD describes"
    yield {"files": {**everywhere, "halfstep/more.py": b""}}, name, "more.py is not in RECORD"
    less = {file: data for file, data in everywhere.items() if file != "halfstep/nn.py"}
    less.pop("halfstep/py.typed")
    yield {"files": less}, name, "py.typed is in RECORD alone"
    yield {"files": {**files, "halfstep/more.py": b""}}, name, "more.py is not expected"
    yield {"files": without("halfstep/classes.py")}, name, "classes.py is not in the wheel"
    yield (
        {"files": changed("halfstep/_library/abi.py", lambda data: data + b"#")},
        name,
        "_library/abi.py is not the file of this tree",
    )
    yield {"files": without(core)}, name, f"{core} is not in the wheel"
    yield (
        {"files": without(f"{INFO}/licenses/LICENSE")},
        name,
        "the licence LICENSE is not in the wheel",
    )
    for old, new, said in (
        (rb"Version: \d\.\d\.\d", b"Version: 9.9.9", "METADATA is of halfstep 9.9.9"),
        (rb"Version: \d\.\d\.\d", b"Version: new", "METADATA is not valid"),
        (rb"\nRequires-Python: .*", b"", "METADATA has no requires_python"),
        (rb"\nRequires-Dist: torch.*", b"", "METADATA does not require torch"),
        (rb"\nLicense-File: LICENSE(?=\n)", b"", "METADATA names no licence file LICENSE"),
        (
            rb"\nSummary: .*",
            b"\nSummary: made in /root/secret",
            "names a folder of the build machine, /root/secret",
        ),
    ):
        yield {"files": changed(f"{INFO}/METADATA", line(old, new))}, name, said
    yield (
        {"files": changed(f"{INFO}/WHEEL", line(rb"Tag: (.*)", rb"Tag: \1_64"))},
        name,
        "WHEEL has the tags",
    )
    yield {"files": changed(f"{INFO}/WHEEL", line(b"false", b"true"))}, name, "for one platform"
    yield {"files": without(sbom)}, name, "no list of components"
    yield {"files": changed(sbom, with_component)}, name, "the licence of more, which"
    yield (
        {"files": changed(sbom, lambda data: data[:-2])},
        name,
        "is not a CycloneDX list of components",
    )
    yield {"files": changed(sbom, line(b'"licenses"', b'"license"'))}, name, "has no licenses"
    yield (
        {"files": changed(sbom, line(b'"CycloneDX"', b'"Another"'))},
        name,
        "is not a CycloneDX list of halfstep",
    )
    machine = "aarch64" if row["target"].startswith("aarch64") else "x86_64"
    for library, change, said in library_breaks(system, machine):
        yield {"files": changed(f"halfstep/{library}", change)}, name, said


def refused(scratch, platforms, name, arguments, said):
    """Demands that a wheel is refused by a sentence that has the pattern `said`."""
    path = scratch / name
    write(path, **arguments)
    sentences = list(check.check(path, platforms))
    path.unlink()
    if not any(re.search(said, sentence) for sentence in sentences):
        sys.exit(f"FAIL {name}: nothing says '{said}', but: {sentences or 'it is accepted'}")


def main():
    audited, accepted = check.audited, []
    warnings.simplefilter("ignore", UserWarning)  # of zipfile, on a name that is there twice
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        platforms = scratch / "platforms.csv"
        if sys.argv[1] == "--library":
            accepted = [native(pathlib.Path(folder)) for folder in sys.argv[2:]]
        for wheel in map(pathlib.Path, sys.argv[1:] if not accepted else ()):
            row = check.platforms()[wheel.stem.split("-none-")[1]]
            with zipfile.ZipFile(wheel) as opened:
                files = {entry: opened.read(entry) for entry in opened.namelist()}
            files.pop(f"{INFO}/RECORD")
            accepted.append((wheel.name, row, files))
        for name, row, files in accepted:
            line = ",".join(row.values())
            platforms.write_text(f"{','.join(row)}\n{line}\n")
            check.audited = audited
            write(scratch / name, files)
            sentences = list(check.check(scratch / name, platforms))
            if sentences:
                sys.exit("\n".join(f"FAIL {name}: {sentence}" for sentence in sentences))
            count = 0
            if "linux" in name:
                # The same wheel under the name of an older system.
                old = re.sub(
                    r"(manylinux|musllinux)[^.]*", r"\1_1_0_" + platform.machine(), row["tag"]
                )
                platforms.write_text(f"{','.join(row)}\n{line.replace(row['tag'], old)}\n")
                arguments = {"files": {**files, f"{INFO}/WHEEL": files[f"{INFO}/WHEEL"]}}
                refused(scratch, platforms, name.replace(row["tag"], old), arguments, "auditwheel")
                platforms.write_text(f"{','.join(row)}\n{line}\n")
                count += 1
            check.audited = lambda wheel, tag: ()  # takes a second, and was shown
            for arguments, broken, said in breaks(name, row, files):
                refused(scratch, platforms, broken, {"files": files, **arguments}, said)
                count += 1
            other = {"yes": "no", "no": "yes"}[row["device_code"]]
            platforms.write_text(f"{','.join(row)}\n{line[: line.rindex(',')]},{other}\n")
            refused(scratch, platforms, name, {"files": files}, "device code")
            platforms.write_text(f"{','.join(row)}\n{line}\n")
            most, check.MOST_BYTES = check.MOST_BYTES, 1000
            refused(scratch, platforms, name, {"files": files}, "MB are more than")
            check.MOST_BYTES = most
            print(f"ok   {name} is accepted, and refused when it is broken, in {count + 2} ways")


if __name__ == "__main__":
    main()
