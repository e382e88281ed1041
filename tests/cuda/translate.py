#!/usr/bin/env python3
"""Translates PTX, as LLVM writes it, to C tables for machine.c: a row for each instruction.

    translate.py OUTPUT.c FILE.ptx...

Refuses what it does not know, by its name and line. Prints how much it has translated. Over 500
lines because declarations, operands, rows and their registers' lives share what a function is."""

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
#: bytes of PTX types, and of a lane of a register of that type
BYTES = {"pred": 4, **{kind + str(8 * n): n for kind in "bus" for n in (1, 2, 4, 8)}}
BYTES.update(f16=2, f32=4, f64=8)
SPACES = ["generic", "global", "shared", "local", "const", "param", "frame"]
LANES = 32
#: the top bit of an operand that lies in the pool, not in the frame
POOLED = 1 << 31
#: room for a function's result, at the begin of its frame
RESULT_BYTES = 32
NUMBER, VARIABLE, FUNCTION, PARAMETER = range(4)
SIGNED, WIDE, CONSTANT, VOLATILE = 1 << 8, 1 << 9, 1 << 10, 1 << 11
SPECIAL = ["%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x"]
NAME = r"[A-Za-z_$%][\w$]*"


def instructions():
    """Returns (number, types of operands, the result's first) of each row of instructions.def."""
    text = open(os.path.join(HERE, "instructions.def"), encoding="ascii").read()
    found = re.findall(r"^(HAND|ONE|TWO|THREE)\((\w+)((?:, [A-Z]\d*\b(?=,))*)", text, re.M)
    wanted = {"HAND": 0, "ONE": 2, "TWO": 3, "THREE": 4}
    types = [(name, kinds.split(", ")[1:][: wanted[macro]]) for macro, name, kinds in found]
    return {name: (number, kinds) for number, (name, kinds) in enumerate(types)}


TABLE = instructions()


def lane_bytes(kind):
    return 8 if BYTES[kind] == 8 else 4


def round_up(n, to):
    return -(-n // to) * to


def closing_brace(text, at):
    depth = 1
    for brace in re.compile("[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise Refused("a brace is not closed")


class Refused(Exception):
    pass


class Pool:
    """Values that operands name: numbers and addresses. The same in all modules of a program."""

    def __init__(self):
        self.places, self.rows, self.bytes = {}, [], 0

    def place(self, size, number, of=NUMBER, index=0):
        key = (size, number, of, index)
        if key not in self.places:
            self.places[key] = self.bytes | POOLED
            self.rows.append((self.bytes, size, number, of, index))
            self.bytes += 8 * LANES if size == 8 else 4 * LANES
        return self.places[key]


class Program:
    """All that is written: of one or several modules."""

    def __init__(self):
        self.pool, self.rows, self.functions, self.variables = Pool(), [], [], []
        self.undefined = 0


class Module:
    """A file of PTX. Its functions and variables are its own; entries are seen from outside."""

    def __init__(self, program, path):
        self.program, self.path = program, path
        self.variables, self.functions, self.shared = {}, {}, SharedMemory()
        text = re.sub(r"//[^\n]*", "", open(path, encoding="utf-8").read())
        try:
            bodies = self.declare(text)
            for function, body, line in bodies:
                function.translate(body, line)
        except Refused as reason:
            sys.exit(f"{path}: {reason}")

    def declare(self, text):
        """Reads all but the bodies of functions, which it returns with the lines they begin at."""
        bodies, at, line = [], 0, 1
        statement = re.compile(
            r"\s*(?:\.(version|target|address_size)[^\n]*|([^{;]*=[^;]*|[^{;]*);"
            r"|([^{;=]*)\{)"
        )
        initialized = []
        while match := statement.match(text, at):
            line += text.count("\n", at, match.end())
            at = match.end()
            if match[2]:
                words = match[2]
                if self.shared.declare(words):
                    continue
                if ".func" not in words and not re.search(r"\.entry\b", words):
                    initialized.append(self.declare_variable(words))
            elif match[3]:
                function = Function(self, match[3])
                self.functions[function.name] = function
                end = closing_brace(text, at)
                bodies.append((function, text[at:end], line))
                line += text.count("\n", at, end)
                at = end + 1
        if text[at:].strip():
            raise Refused(f"line {line}: {text[at:].strip()[:60]}")
        for variable, values in initialized:
            variable["values"] = self.initial(variable, values)
        return bodies

    def declare_variable(self, words):
        match = re.fullmatch(
            r"(?:\.visible\s+|\.weak\s+)?\.(global|const)\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+"
            rf"({NAME})(?:\[(\d+)\])?\s*(?:=\s*(.*))?",
            words.strip(),
            re.S,
        )
        if not match:
            raise Refused("variable: " + words.strip()[:80])
        size = BYTES[match[2]]
        variable = dict(
            name=match[3],
            size=size,
            bytes=size * int(match[4] or 1),
            constant=match[1] == "const",
            index=len(self.program.variables),
        )
        self.program.variables.append(variable)
        self.variables[match[3]] = variable
        values = (match[5] or "").strip().strip("{}")
        return variable, [value.strip() for value in values.split(",") if value.strip()]

    def initial(self, variable, values):
        """Returns the bytes and the addresses that a variable begins with."""
        data, addresses = bytearray(), []
        for value in values:
            if re.fullmatch(r"-?\d+", value):
                data += (int(value) % (1 << 8 * variable["size"])).to_bytes(
                    variable["size"], "little"
                )
                continue
            match = re.fullmatch(rf"(?:generic\()?({NAME})\)?(?:\+(\d+))?", value)
            if not match or variable["size"] != 8:
                raise Refused(f"{variable['name']}: initial value {value}")
            addresses.append((len(data), 8, int(match[2] or 0), *self.symbol(match[1])))
            data += bytes(8)
        return data, addresses

    def symbol(self, name):
        """Returns (kind, index) of what has an address."""
        if name in self.variables:
            return VARIABLE, self.variables[name]["index"]
        if name in self.functions:
            return FUNCTION, self.functions[name].index
        raise Refused("unknown: " + name)


class SharedMemory:
    """Variables of shared memory. Those of a module lie before an entry's own, at the same places
    for all entries, because functions use them too."""

    def __init__(self, others=None):
        self.places = dict(others.places) if others else {}
        self.spans = list(others.spans) if others else []

    def declare(self, words):
        """Returns False if the words do not declare shared memory."""
        match = re.fullmatch(
            rf"(?:\.visible\s+|\.weak\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+({NAME})\[(\d+)\]",
            words.strip(),
        )
        if match:
            # Nothing lies in the 64 bytes between two variables.
            place = round_up(self.bytes() + (64 if self.spans else 0), int(match[1]))
            self.places[match[2]] = place
            self.spans.append((place, place + int(match[3])))
        return bool(match)

    def bytes(self):
        return self.spans[-1][1] if self.spans else 0


class Scope:
    def __init__(self, labels):
        self.registers, self.ranges, self.labels = {}, {}, labels


class Function:
    """A function or entry, which becomes rows."""

    def __init__(self, module, header):
        match = re.fullmatch(
            rf"\s*(?:\.visible\s+|\.weak\s+)?\.(entry|func)\s*(?:\(([^)]*)\)\s*)?({NAME})\s*"
            r"(?:\(([^)]*)\))?(.*)",
            header,
            re.S,
        )
        if not match:
            raise Refused("function: " + header.strip()[:80])
        self.module, self.program = module, module.program
        self.name, self.is_entry = match[3], match[1] == "entry"
        self.index = len(self.program.functions)
        self.program.functions.append(self)
        #: name: place in the frame, or in the parameters of an entry
        self.parameters, self.sizes, end = {}, [], RESULT_BYTES
        if match[2]:
            self.parameters[self.parameter(match[2])[0]] = 0
        for text in filter(str.strip, (match[4] or "").split(",")):
            name, size = self.parameter(text)
            self.parameters[name] = end
            self.sizes.append((end, size))
            end = round_up(end + size, 16)
        self.local, self.local_bytes = round_up(end, 16), 0
        self.shared = SharedMemory(module.shared)
        self.register_bytes, self.places = 0, {}
        self.rows, self.uses, self.targets = [], [], {}

    @staticmethod
    def parameter(text):
        match = re.fullmatch(
            rf"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+({NAME})(?:\[(\d+)\])?", text.strip()
        )
        if not match:
            raise Refused("parameter: " + text)
        return match[2], BYTES[match[1]] * int(match[3] or 1)

    def refuse(self, reason):
        raise Refused(f"line {self.line}: {self.name}: {reason}")

    # ---- Statements ----

    STATEMENT = re.compile(r"\s*(?:(\{)|(\})|([A-Za-z_$][\w$]*):(?!:)|([^;]+);)")

    def translate(self, body, line):
        self.scopes, self.outgoing = [Scope({})], {}
        self.line, at, tokens = line, 0, []
        while match := self.STATEMENT.match(body, at):
            line += body.count("\n", at, match.start(match.lastindex))
            tokens.append((line, match.lastindex, match[match.lastindex]))
            line += body.count("\n", match.start(match.lastindex), match.end())
            at = match.end()
        if body[at:].strip():
            self.refuse(body[at:].strip()[:60])
        labels = self.labels_of(tokens)
        self.scopes = [Scope(labels[None])]
        for number, (self.line, kind, text) in enumerate(tokens):
            if kind == 1:
                self.scopes.append(Scope(labels[number]))
                self.outgoing = {}
            elif kind == 2:
                self.scopes.pop()
            elif kind == 3:
                self.targets[self.scopes[-1].labels[text]] = len(self.rows)
            elif text[0] == ".":
                self.directive(text)
            elif ".callprototype" not in text:
                self.instruction(text)
        self.finish()

    @staticmethod
    def labels_of(tokens):
        """Returns the labels of each scope, by the number of the token that opens it."""
        found, open_scopes = {None: {}}, [None]
        for number, (_, kind, text) in enumerate(tokens):
            if kind == 1:
                open_scopes.append(number)
                found[number] = {}
            elif kind == 2:
                open_scopes.pop()
            elif kind == 3:
                found[open_scopes[-1]][text] = number
        return found

    def directive(self, text):
        if match := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
            for name in match[2].split(","):
                many = re.fullmatch(r"\s*(%\w+)<\d+>\s*", name)
                if many:
                    self.scopes[-1].ranges[many[1]] = match[1]
                else:
                    self.scopes[-1].registers[name.strip()] = self.new_register(match[1])
        elif match := re.fullmatch(rf"\.local\s+\.align\s+\d+\s+\.b8\s+({NAME})\[(\d+)\]", text):
            self.local_name, self.local_bytes = match[1], int(match[2])
        elif self.shared.declare(text):
            pass
        elif text.startswith(".param"):
            name, size = self.parameter(text)
            if name.startswith("retval") and size > RESULT_BYTES:
                self.refuse("a result of that size")
            self.outgoing[name] = size
        elif not text.startswith(".pragma"):
            self.refuse("directive " + text)

    def instruction(self, text):
        guard = None
        if match := re.match(r"@(!?)(%?\w+)\s+", text):
            guard, text = (match[1], match[2]), text[match.end() :]
        word, _, rest = text.partition(" ") if " " in text.split("\t")[0] else text.partition("\t")
        parts, operands = word.strip().split("."), self.split(rest)
        if parts[0] == "bra":
            return self.jump(guard, self.label(operands[0]))
        skip = None
        if guard:
            skip = object()
            self.jump(("" if guard[0] else "!", guard[1]), skip)
        if parts[0] in ("ld", "st"):
            self.memory(parts, operands)
        elif parts[0] == "call":
            self.call(rest)
        elif word == "ret":
            self.emit("ret", ends=True)
        elif word in ("prefetch.global.L2", "prefetch.global.L1"):
            self.read(operands[0].strip("[]"), "u64")
        else:
            self.plain(word, parts, operands)
        if skip:
            self.targets[skip] = len(self.rows)
        return None

    @staticmethod
    def split(text):
        """Splits operands at commas outside of brackets."""
        return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", text)]

    # ---- Operands ----

    def new_register(self, kind):
        place = self.register_bytes
        self.register_bytes += lane_bytes(kind) * LANES
        return place, kind

    def register(self, name):
        """Returns (place, kind) of a register, or None."""
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
        match = re.fullmatch(r"(%[a-z]+)\d+", name)
        if match and match[1] in self.scopes[0].ranges:
            found = self.new_register(self.scopes[0].ranges[match[1]])
            self.scopes[0].registers[name] = found
            return found
        return None

    def read(self, text, kind):
        """Returns the operand for a value of a type: PTX's, or one of instructions.def."""
        kind = "pred" if kind == "P" else kind.lower()
        found = self.register(text)
        if found:
            if lane_bytes(kind) != lane_bytes(found[1]) or (kind == "pred") != (found[1] == "pred"):
                self.refuse(f"{text} as {kind}")
            self.reads.append(found[0])
            return found[0]
        size = BYTES[kind]
        if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            if len(match[1]) != 2 * size:
                self.refuse(f"{text} as {kind}")
            return self.program.pool.place(size, int(match[1], 16))
        if match := re.fullmatch(r"(-?(?:0[xX][0-9A-Fa-f]+|\d+))U?", text):
            number = int(match[1], 0)
            if kind == "pred":
                return self.program.pool.place(4, int(number != 0))
            return self.program.pool.place(4 if size < 4 else size, number % (1 << 8 * size))
        if size != 8:
            self.refuse(f"operand {text} as {kind}")
        if text in self.shared.places:
            return self.program.pool.place(8, self.shared.places[text])
        if self.is_entry and text in self.parameters:
            return self.program.pool.place(8, self.parameters[text], PARAMETER)
        try:
            return self.program.pool.place(8, 0, *self.module.symbol(text))
        except Refused:
            return self.refuse("operand " + text)

    def write(self, text, kind):
        kind = "pred" if kind == "P" else kind.lower()
        found = self.register(text)
        if not found or lane_bytes(kind) != lane_bytes(found[1]):
            self.refuse(f"{text} as {kind}")
        if (kind == "pred") != (found[1] == "pred"):
            self.refuse(f"{text} as {kind}")
        self.writes.append(found[0])
        return found[0]

    # ---- Rows ----

    reads, writes = [], []

    def emit(self, name, operands=(), how=0, offset=0, ends=False, target=None):
        x = list(operands) + [0] * (5 - len(operands))
        self.rows.append([TABLE[name][0], how, *x, offset, self.line])
        self.uses.append((self.reads, self.writes, target, ends))
        self.reads, self.writes = [], []

    def label(self, text):
        for scope in reversed(self.scopes):
            if text in scope.labels:
                return scope.labels[text]
        return self.refuse("label " + text)

    def jump(self, guard, target):
        """how: 0 always, 1 if the predicate is 1, 2 if it is 0."""
        if not guard:
            self.emit("bra", ends=True, target=target)
            return
        self.emit("bra", [0, self.read(guard[1], "pred")], 2 if guard[0] else 1, target=target)

    def plain(self, word, parts, operands):
        if word == "shfl.sync.bfly.b32":
            if operands[3] != "31" or operands[4] not in ("-1", "0xffffffff") or "|" in operands[0]:
                self.refuse(word)
            x = [self.read(operands[1], "b32"), self.read(operands[2], "b32")]
            return self.emit("shfl", [self.write(operands[0], "b32"), *x])
        if word == "vote.sync.any.pred" and operands[2] in ("-1", "0xffffffff"):
            x = self.read(operands[1], "pred")
            return self.emit("vote_any", [self.write(operands[0], "pred"), x])
        if word == "bar.warp.sync" and operands in (["-1"], ["0xffffffff"]):
            return self.emit("bar_warp_sync")
        if word == "bar.sync" and operands == ["0"]:
            return self.emit("bar_sync")
        if word in ("atom.global.add.u64", "atom.add.u64"):
            address, offset = self.address(operands[1])
            x = [self.read(operands[2], "u64"), self.read(address, "u64")]
            space = SPACES.index("global" if parts[1] == "global" else "generic")
            return self.emit("atom_add", [self.write(operands[0], "u64"), *x], space, offset)
        if parts[0] == "mov" and operands[1] in SPECIAL:
            return self.emit(
                "special", [self.write(operands[0], "u32"), SPECIAL.index(operands[1])]
            )
        if word in ("mov.u64", "mov.b64") and (place := self.in_frame(operands[1])) is not None:
            return self.emit("frame", [self.write(operands[0], "u64")], 0, place)
        name = word.replace(".", "_")
        source = self.register(operands[1]) if parts[0] == "cvt" else None
        if source and lane_bytes(source[1]) > lane_bytes(parts[-1]):
            name += "_of_wide"  # the low bits of a wider register
        if name not in TABLE:
            name = re.sub(r"_[us](\d+)$", r"_b\1", name)
        if name not in TABLE or len(operands) != len(TABLE[name][1]):
            self.refuse("instruction " + word)
        kinds = TABLE[name][1]
        x = [self.read(text, kind) for text, kind in zip(operands[1:], kinds[1:])]
        return self.emit(name, [self.write(operands[0], kinds[0]), *x])

    def in_frame(self, name):
        """Returns the place of the local memory or of a function's parameter; None for others."""
        if name == getattr(self, "local_name", None):
            return self.local
        return None if self.is_entry else self.parameters.get(name)

    def address(self, text):
        match = re.fullmatch(rf"\[\s*({NAME})\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if not match:
            self.refuse("address " + text)
        return match[1], int(match[2] or 0)

    def memory(self, parts, operands):
        is_store, words, kind = parts[0] == "st", parts[1:-1], parts[-1]
        count = int(words.pop()[1:]) if words and re.fullmatch(r"v[24]", words[-1]) else 1
        how = SIGNED if kind[0] == "s" and not is_store else 0
        if words[-1:] == ["nc"]:
            words.pop()
            how |= CONSTANT
        if words[:1] == ["volatile"] and not is_store:
            words.pop(0)
            how |= VOLATILE
        space = words.pop() if words else "generic"
        size = BYTES[kind]
        if words or space not in SPACES[:-1] or size * count > 16:
            self.refuse(".".join(parts))
        value, place = (operands[1], operands[0]) if is_store else operands
        name, offset = self.address(place)
        x = [0] * 5
        if space == "param" and self.local_parameter(name) is not None:
            space, offset = "frame", offset + self.local_parameter(name)
        elif space == "param" and not self.is_entry:
            space = "local"  # an address of a function's own parameter, in a register
            x[4] = self.read(name, "u64")
        else:
            x[4] = self.read(name, "u64")
        names = self.split(value.strip("{}")) if count > 1 else [value]
        if len(names) != count:
            self.refuse(value)
        widths = set()
        for i, register in enumerate(names):
            found = self.register(register)
            wide = lane_bytes(found[1]) if found else lane_bytes(kind)
            widths.add(wide)
            if wide < size:
                self.refuse(f"{register} as {kind}")
            access = "b64" if wide == 8 else "b32"
            x[i] = self.read(register, access) if is_store else self.write(register, access)
        if len(widths) > 1:
            self.refuse(value)
        how |= WIDE if widths == {8} else 0
        how |= SPACES.index(space) | (size.bit_length() - 1) << 3 | (count.bit_length() - 1) << 5
        self.emit("st" if is_store else "ld", x, how, offset)

    # ---- Calls ----

    def local_parameter(self, name):
        """Returns the place in the frame of a parameter of this function or of the call that is
        being made."""
        if name in self.outgoing:
            if name.startswith("retval"):
                return self.callee_place()
            place = self.callee_place() + RESULT_BYTES
            for other, size in self.outgoing.items():  # the result is declared last
                if other == name:
                    return place
                place = round_up(place + size, 16)
        return None if self.is_entry else self.parameters.get(name)

    def callee_place(self):
        return round_up(self.local + self.local_bytes, 16)

    def call(self, text):
        match = re.fullmatch(
            rf"\s*(?:\(([^)]*)\)\s*,)?\s*({NAME})\s*,\s*\(([^)]*)\)\s*(?:,\s*prototype_\d+\s*)?",
            text,
        )
        if not match:
            self.refuse("call " + text)
        given = [name.strip() for name in match[3].split(",") if name.strip()]
        if given != [name for name in self.outgoing if not name.startswith("retval")]:
            self.refuse("parameters of " + match[2])
        if match[2] in self.module.functions:
            callee = self.module.functions[match[2]]
            if [self.outgoing[name] for name in given] != [size for _, size in callee.sizes]:
                self.refuse("other parameters than those of " + match[2])
            self.emit("call", [callee.index])
        else:
            self.emit("call_indirect", [self.read(match[2], "u64")])

    # ---- The end ----

    def finish(self):
        """Resolves jumps, and lets registers that may be read unwritten begin as garbage."""
        garbage = self.undefined()
        self.line = 0
        head = [[TABLE["garbage"][0], 0, place, size, 0, 0, 0, 0, 0] for place, size in garbage]
        self.first = len(self.program.rows)
        for row, (_, _, target, _) in zip(self.rows, self.uses):
            if target is not None:
                row[2] = self.first + len(head) + self.targets[target]
        self.program.rows += head + self.rows
        self.program.undefined += len(garbage)
        self.instructions = len(self.rows)
        del self.rows, self.uses, self.targets, self.scopes

    def undefined(self):
        """Returns the place and lane bytes of registers that some way reads before it writes."""
        starts = sorted(
            {
                0,
                *(t for t in self.targets.values()),
                *(i + 1 for i, use in enumerate(self.uses) if use[2] is not None or use[3]),
            }
        )
        starts = [start for start in starts if start < len(self.uses)]
        block_of = {start: number for number, start in enumerate(starts)}
        used, killed, after = [], [], []
        for start, end in zip(starts, starts[1:] + [len(self.uses)]):
            use = kill = 0
            for reads, writes, _, _ in self.uses[start:end]:
                for place in reads:
                    use |= 1 << (place >> 7) & ~kill
                for place in writes:
                    kill |= 1 << (place >> 7)
            _, _, target, ends = self.uses[end - 1]
            next_blocks = [] if ends or end == len(self.uses) else [block_of[end]]
            if target is not None and self.targets[target] in block_of:
                next_blocks.append(block_of[self.targets[target]])
            used.append(use)
            killed.append(kill)
            after.append(next_blocks)
        live, changed = used[:], True
        while changed:
            changed = False
            for block in reversed(range(len(starts))):
                new = live[block]
                for following in after[block]:
                    new |= live[following] & ~killed[block]
                changed |= new != live[block]
                live[block] = new
        kinds = dict(value for scope in self.scopes for value in scope.registers.values())
        return [(place, lane_bytes(kinds[place])) for place in kinds if live[0] >> (place >> 7) & 1]


# ---- C ----


def braces(numbers):
    return "{" + ",".join(map(str, numbers)) + "}"


def pooled(row):
    return "{%d, %d, %dULL, %d, %d}" % row


def write(program, path):
    out = ["/* By translate.py. */", '#include "cuda/machine.h"']
    add = out.append
    for v in program.variables:
        if v["values"][0]:
            add(f"static const unsigned char initial{v['index']}[] = {braces(v['values'][0])};")
        if v["values"][1]:
            rows = ", ".join(pooled(row) for row in v["values"][1])
            add(f"static const struct pooled addresses{v['index']}[] = {{{rows}, {{0}}}};")
    add("const struct variable ptx_variables[] = {")
    for v in program.variables:
        n, i = len(v["values"][0]), v["index"]
        initial, addresses = f"initial{i}" if n else 0, f"addresses{i}" if v["values"][1] else 0
        add(f'{{"{v["name"]}", {v["bytes"]}, {int(v["constant"])}, {n}, {initial}, {addresses}}},')
    add('{"", 0, 0, 0, 0, 0}};\nconst struct pooled ptx_pool[] = {')
    out += [pooled(row) + "," for row in program.pool.rows]
    add("};\nconst struct function ptx_functions[] = {")
    for f in program.functions:
        sizes = f.sizes if f.is_entry else []
        places = braces(place for place, _ in sizes) if sizes else "{0}"
        lengths = braces(size for _, size in sizes) if sizes else "{0}"
        callees = f.callee_place()
        variables = ", ".join(map(braces, f.shared.spans)) or "{0}"
        add(
            f'{{"{f.name}", {int(f.is_entry)}, {f.first}, {f.register_bytes}, {callees}, {callees},'
            f" {f.local}, {f.local_bytes}, {len(sizes)}, {places}, {lengths},"
            f" {f.shared.bytes()}, {len(f.shared.spans)}, {{{variables}}}}},"
        )
    add("};\nconst struct row ptx_rows[] = {")
    for op, how, a, b, c, d, e, offset, line in program.rows:
        add(f"{{{op},{how},{{{a},{b},{c},{d},{e}}},{offset},{line}}},")
    add("};")
    for name, count in (
        ("row", len(program.rows)),
        ("function", len(program.functions)),
        ("variable", len(program.variables)),
        ("pool", len(program.pool.rows)),
    ):
        add(f"const int ptx_{name}_count = {count};")
    add(f"const int ptx_pool_bytes = {program.pool.bytes};")
    with open(path, "w", encoding="ascii") as file:
        file.write("\n".join(out) + "\n")


def main():
    program = Program()
    for path in sys.argv[2:]:
        Module(program, path)
    write(program, sys.argv[1])
    entries = sum(f.is_entry for f in program.functions)
    print(
        f"{entries} entries, {len(program.functions) - entries} functions,"
        f" {sum(f.instructions for f in program.functions)} instructions,"
        f" {program.undefined} registers that may be read unwritten"
    )


if __name__ == "__main__":
    main()
