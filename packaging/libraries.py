"""Checks of a shared library in a wheel: what it links, what it exports, how it is protected.
Each is a generator of sentences, one for each thing that is wrong. LIEF reads the files."""

import ast
import hashlib
import pathlib
import re
import struct

import lief

lief.logging.disable()

ROOT = pathlib.Path(__file__).parent.parent
ABI = ROOT / "tests" / "golden" / "abi.txt"
LEAST_MACOS = [11, 0, 0]

#: what a library of each system may link, as patterns
LINKED = {
    # Before glibc 2.34, threads and dlopen() were libraries of their own.
    "gnu": r"lib(c|m)\.so\.6|libpthread\.so\.0|libdl\.so\.2|ld-linux-(x86-64|aarch64)\.so\.[12]",
    # musl's loader takes both names for itself.
    "musl": r"libc\.(so|musl-(x86_64|aarch64)\.so\.1)",
    # Windows 10 and later have the C library; KERNEL32 has threads and files.
    "windows": r"(?i)(kernel32|api-ms-win-crt-[a-z]+-l1-1-0|api-ms-win-core-synch-l1-2-0)\.dll",
    "macos": r"/usr/lib/libSystem\.B\.dylib",
}
MACHINES = {
    "x86_64": {
        lief.ELF.ARCH.X86_64,
        lief.PE.Header.MACHINE_TYPES.AMD64,
        lief.MachO.Header.CPU_TYPE.X86_64,
    },
    "aarch64": {
        lief.ELF.ARCH.AARCH64,
        lief.PE.Header.MACHINE_TYPES.ARM64,
        lief.MachO.Header.CPU_TYPE.ARM64,
    },
}


def declared(library):
    """Returns the functions that libhalfstep or libhalfstep_io exports."""
    rows = (line.split() for line in ABI.read_text().splitlines())
    return {row[1] for row in rows if row[0] == "function" and row[2] == library}


def bound(module, variable):
    """Returns the functions that a module of the Python package binds, from its table of them."""
    tree = ast.parse((ROOT / "python" / "halfstep" / module).read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == variable
    )
    # In the tables every text is the name of a function.
    texts = (node.value for node in ast.walk(table) if isinstance(node, ast.Constant))
    return {"halfstep_" + text for text in texts if isinstance(text, str)}


def exports(binary):
    """Returns the functions that a library exports."""
    if isinstance(binary, lief.ELF.Binary):
        return {str(symbol.name) for symbol in binary.dynamic_symbols if symbol.exported}
    if isinstance(binary, lief.PE.Binary):
        return (
            {str(entry.name) for entry in binary.get_export().entries}
            if binary.has_exports
            else set()
        )
    # zig's linker exports two addresses of the library's own beginning.
    own = {"__dso_handle", "_mh_dylib_header"}
    return {str(symbol.name)[1:] for symbol in binary.exported_symbols} - own


def names(name, binary):
    """Checks that what Python binds is exported, and no more than the headers declare."""
    found = exports(binary)
    io = "halfstep_io" in name
    module, variable = (
        ("_states/store.py", "_SIGNATURES") if io else ("_library/abi.py", "signatures")
    )
    lacking = bound(module, variable) - found
    if lacking:
        yield f"{name} does not export {', '.join(sorted(lacking))}, which {module} binds"
    expected = declared("libhalfstep_io" if io else "libhalfstep")
    foreign, missing = found - expected, expected - found - lacking
    if foreign:
        yield f"{name} exports {', '.join(sorted(foreign))}, which {ABI.name} does not list"
    if missing:
        yield f"{name} does not export {', '.join(sorted(missing))} of {ABI.name}"


def links(name, own, found, system, folder=""):
    """Checks that a library calls itself by its file name, because musl's loader compares nothing
    else. It may link the system's libraries only, and halfstep_io the one beside it."""
    if own != folder + name:
        yield f"{name} calls itself {own or 'nothing'}, not {folder}{name}"
    pattern = LINKED[system]
    if "halfstep_io" in name:
        pattern += "|" + re.escape(folder + name.replace("halfstep_io", "halfstep"))
    for library in found:
        if not re.fullmatch(pattern, library):
            yield f"{name} links {library}; allowed is {pattern}"


def elf(name, binary, data, system):
    """Checks a library for Linux."""
    tags = lief.ELF.DynamicEntry.TAG
    entries = {entry.tag: entry for entry in binary.dynamic_entries}
    soname = entries.get(tags.SONAME)
    yield from links(name, soname and soname.name, binary.libraries, system)
    for tag in (tags.RPATH, tags.RUNPATH):
        path = getattr(entries.get(tag), "rpath" if tag == tags.RPATH else "runpath", None)
        if path is not None and not ("halfstep_io" in name and path == "$ORIGIN"):
            yield f"{name} has the run path {path!r}; only halfstep_io may have one, $ORIGIN"
    if tags.TEXTREL in entries:
        yield f"{name} has relocations in its code (TEXTREL)"
    segments = {segment.type: segment for segment in binary.segments}
    types, flags = lief.ELF.Segment.TYPE, lief.ELF.Segment.FLAGS
    stack = segments.get(types.GNU_STACK)
    if stack is None or stack.has(flags.X):
        yield f"{name} makes the stack executable"
    if types.GNU_RELRO not in segments:
        yield f"{name} leaves its tables of addresses writable (no RELRO)"
    if any(segment.has(flags.W) and segment.has(flags.X) for segment in binary.segments):
        yield f"{name} has memory that is both writable and executable"


def pe(name, binary, data, system):
    """Checks a library for Windows."""
    own = binary.get_export().name if binary.has_exports else None
    yield from links(name, own, [entry.name for entry in binary.imports], system)
    wanted = ("DYNAMIC_BASE", "HIGH_ENTROPY_VA", "NX_COMPAT")
    for flag in wanted:
        if not binary.optional_header.has(
            getattr(lief.PE.OptionalHeader.DLL_CHARACTERISTICS, flag)
        ):
            yield f"{name} lacks the flag {flag}; a DLL needs {', '.join(wanted)}"
    for entry in binary.debug:
        path = getattr(entry, "filename", "")
        if "/" in path or "\\" in path:
            yield f"{name} names the file of the build machine {path}"


def code_directory(data):
    """Returns the code directory of a signature: its bytes up to the signature's end."""
    magic, _, count = struct.unpack_from(">III", data)
    for slot in range(count if magic == 0xFADE0CC0 else 0):
        kind, offset = struct.unpack_from(">II", data, 12 + 8 * slot)
        if kind == 0:
            return data[offset:]
    return None


def signed(name, binary, data):
    """Checks that a signature covers the file's pages. macOS on arm64 kills a process that loads a
    library with no signature, or with one of other bytes."""
    signature = binary.code_signature
    if signature is None:
        yield f"{name} is not signed, so macOS on arm64 does not load it"
        return
    directory = code_directory(bytes(signature.content))
    if directory is None:
        yield f"{name} has a signature without a code directory"
        return
    hashes, _, _, slots, limit = struct.unpack_from(">IIIII", directory, 16)
    size, kind, _, page = struct.unpack_from("BBBB", directory, 36)
    if (size, kind, limit) != (32, 2, signature.data_offset):
        yield f"{name} is signed by other hashes than SHA-256 of all bytes before the signature"
        return
    for slot in range(slots):
        pages = data[slot << page : min((slot + 1) << page, limit)]
        if (
            hashlib.sha256(pages).digest()
            != directory[hashes + 32 * slot : hashes + 32 * slot + 32]
        ):
            yield f"{name} was changed after it was signed, at byte {slot << page}"
            return


def macho(name, binary, data, system):
    """Checks a library for macOS."""
    # LIEF lists a library's own name among those that it links.
    own = [
        str(c.name) for c in binary.commands if c.command == lief.MachO.LoadCommand.TYPE.ID_DYLIB
    ]
    linked = [str(library.name) for library in binary.libraries if library.name not in own]
    yield from links(name, ", ".join(own), linked, system, "@rpath/")
    paths = {str(path.path) for path in binary.rpaths}
    if paths - ({"@loader_path"} if "halfstep_io" in name else set()):
        found = ", ".join(sorted(paths))
        yield f"{name} has the run path {found}; only halfstep_io may have one, @loader_path"
    least = binary.build_version and list(binary.build_version.minos)
    if least != LEAST_MACOS:
        yield f"{name} is for macOS {least}, not {LEAST_MACOS} and later"
    if binary.header.cpu_type == lief.MachO.Header.CPU_TYPE.ARM64:
        yield from signed(name, binary, data)


FORMATS = {"linux": lief.ELF, "windows": lief.PE, "macos": lief.MachO}
CHECKS = {"linux": elf, "windows": pe, "macos": macho}


def check(name, data, target):
    """Checks the library `name` with the bytes `data` for a target of zig."""
    processor, system, library = re.fullmatch(r"(\w+)-(\w+)[.\d]*-?(\w*).*", target).groups()
    binary = FORMATS[system].parse(data)
    if system == "macos" and binary is not None:
        if len(binary) != 1:
            yield f"{name} is for {len(binary)} processors; a wheel for one is wanted"
        binary = binary.at(0)
    if binary is None:
        yield f"{name} is no library for {system}"
        return
    machine = getattr(
        binary.header, {"linux": "machine_type", "windows": "machine"}.get(system, "cpu_type")
    )
    if machine not in MACHINES[processor]:
        yield f"{name} is for the processor {machine.name}, not {processor}"
    yield from CHECKS[system](name, binary, data, library if system == "linux" else system)
    yield from names(name, binary)
