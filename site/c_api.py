"""Makes docs/reference/c-api.md from the comments and declarations of the public headers.

A header has titles of sections, which are comments between dashes, and groups. A group is a comment
and the declarations that follow it without a blank line or another comment between them.
"""

import re

HEAD = """# C API

For those who look up a function, a structure or a constant in C. This page is made from the
comments of [halfstep.h](../../include/halfstep.h) and [halfstep_io.h](../../include/halfstep_io.h).
[Your first C program](../start/first-c-program.md) is the place to begin.
"""
#: what a header consists of
_PIECE = re.compile(
    r"""(?P<title>/\*\ -{3,}\ .*?\*/)
      | (?P<comment>/\*.*?\*/)
      | \#define\ (?P<constant>HALFSTEP_(?!API)\w+)\ +(?P<value>\S[^\n]*?)\ *(?=/\*|\n)
      | typedef\ struct\ (?P<structure>\w+)\ \{(?P<body>.*?)\n\}\ \w+;
      | (?P<code>(?:typedef|HALFSTEP_API)\b[^;/]*;(?:\ /\*.*?\*/)?)
      | (?P<end>\#[^\n]*|extern\ "C"\ \{|\}|\n\ *\n)""",
    re.S | re.X,
)
#: what the body of a structure consists of
_MEMBER = re.compile(
    r"(?P<comment>/\*.*?\*/)|(?P<end>\n *\n)"
    r"|(?!\s)(?P<code>(?:struct \{.*?\})?[^;{}/]+);(?P<own> */\*.*?\*/)?",
    re.S,
)
#: the name that a declaration declares
_DECLARED = re.compile(r"\(\*(halfstep_\w+)\)\(|\b(halfstep_\w+)(?:\(|;)")
#: a line of a table in a comment: names, and their meaning after two blanks
_ENTRY = re.compile(r"([\w/.<>-]+(?:, [\w/.-]+)*)  +(?=\S)")
_TOKEN = re.compile(
    r"(?P<same>`[^`]*`|(?<![\w*])\*\w+\*(?!\w))|\bdocs/(?P<document>[\w/-]+\.md)"
    r"|\b(?P<name>halfstep_\w+|HALFSTEP_\w+\b\*?)(?:\.\w+)*(?:\(\))?"
    r'|(?<!["/])\b(?P<error>[A-Z]{2,})\b(?!["/])'
    r"|(?P<short>(?<![\w*])\*[a-z]\w*|(?<!\w)_[a-z]\w+)|(?P<sign>[*<|])"
)
_HANDLE = "halfstep_optimizer"
_SIGNS = {"*": "\\*", "<": "&lt;", "|": "\\|"}


def inline(text, anchors):
    """Returns a sentence of a comment as Markdown. Names of `anchors` become links."""

    def token(found):
        text, error = found[0], f"HALFSTEP_ERROR_{found['error']}"
        if found["document"]:
            return f"[{found['document'].split('/')[-1]}](../{found['document']})"
        if found["name"]:
            return f"[`{text}`](#{found['name']})" if found["name"] in anchors else f"`{text}`"
        if error in anchors:
            return f"[{text}](#{error})"
        return f"`{text}`" if found["short"] else _SIGNS.get(text, text)

    return _TOKEN.sub(token, " ".join(text.split()))


def lines_of(comment):
    """Returns the lines of a comment without its signs and the blank that follows them."""
    return re.sub(r"\n *(\* ?)?", "\n", comment.strip()[2:-2].strip(" *\n")).split("\n")


def indented(block, anchors):
    """Returns the indented lines of a comment: a list, a table or code."""
    margin = min(len(line) - len(line.lstrip()) for line in block if line)
    block = "\n".join(line[margin:] for line in block).rstrip().split("\n")
    if block[0].startswith("- "):
        return ["", *block, ""]
    rows = []
    for line in block:
        found = _ENTRY.match(line)
        if found:
            rows.append([found[1], line[found.end() :]])
        elif rows and line.startswith("    "):
            rows[-1][1] += " " + line
        else:
            return ["", "```c", *block, "```", ""]
    rows = [f"| `{x.replace(', ', '`, `')}` | {inline(text, anchors)} |" for x, text in rows]
    return ["", "| name | meaning |", "|---|---|", *rows, ""]


def text_of(comment, anchors):
    """Returns a comment as Markdown."""
    out, block = [], []

    def close():
        if block and block[0].startswith("  "):
            out.extend(indented(block, anchors))
        elif block:
            lead, text = re.match(r"([A-Z]{2,}(?:\. | (?=begin))|)(.*)", " ".join(block)).groups()
            lead = re.sub(r"\w+", lambda x: f"**{x[0].capitalize()}**", lead)
            out.extend(["", lead + inline(text, anchors), ""])
        block.clear()

    for line in lines_of(comment):
        deep = bool(block) and block[0].startswith("  ")
        if (line and line.startswith("  ") != deep) or not (line or deep):
            close()
        if line or block:
            block.append(line)
    close()
    return out


def members(body, anchors):
    """Returns the table of the members of a structure. A comment before members is about all of
    them up to the next comment or blank line, unless they have comments of their own."""
    rows, before = [], None
    for found in _MEMBER.finditer(body):
        code, text = " ".join((found["code"] or "").split()), found["comment"] or found["own"]
        text = inline(" ".join(lines_of(text)), anchors) if text else ""
        if not code:
            before = text or None
            if before and before.isupper():
                rows.append([f"**{before}**", ""])
        elif before and not text and rows and rows[-1][1] == before:
            rows[-1][0] += f"<br>`{code}`"
        else:
            before = None if text else before
            rows.append([f"`{code}`", text or before or ""])
    return ["", "| member | meaning |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]


class Group:
    """A comment and the declarations that it describes."""

    def __init__(self, comment=None):
        self.comment, self.names = comment, []
        self.code, self.constants, self.structures = [], [], []

    def add(self, found):
        """Adds a declaration, a match of _PIECE."""
        if found["constant"]:
            self.constants.append([found["constant"], found["value"], ""])
        elif found["structure"]:
            self.structures.append(found["body"])
            self.names.append(found["structure"])
        else:
            code = " ".join(found["code"].replace("HALFSTEP_API ", "").split())
            wide = len(code) > 84
            self.code.append(re.sub(r"(\((?!\*)|,) ?", "\\1\n    ", code) if wide else code)
            self.names.append(next(filter(None, _DECLARED.search(found["code"]).groups())))

    def page(self, anchors):
        """Returns the group as Markdown."""
        places = [f'<a id="{name}"></a>' for name in self.names]
        out = ["".join(places), ""] if len(places) > 1 else []
        if self.names:
            out += ["### " + ", ".join(self.names), ""]
        out += ["```c", *self.code, "```", ""] if self.code else []
        out += text_of(self.comment, anchors) if self.comment else []
        used = sorted({name for code in self.code for name in re.findall(r"halfstep_\w+", code)})
        used = [f"[`{x}`](#{x})" for x in used if x in anchors - {*self.names, _HANDLE}]
        out += ["", "Types: " + ", ".join(used), ""] if used else []
        wide = any(text for _, _, text in self.constants)
        if self.constants:
            out += ["", "| constant | value |" + " meaning |" * wide, "|---|---|" + "---|" * wide]
        for name, value, text in self.constants:
            text = f" {inline(text, anchors)} |" * wide
            out.append(f'| <a id="{name}"></a>`{name}` | `{value}` |{text}')
        for body in self.structures:
            out += members(body, anchors)
        return [*out, ""]


def parse(text):
    """Returns the parts of a header in order: titles of sections, and groups."""
    parts, group, end = [], None, 0
    for found in _PIECE.finditer(text):
        same_line, end = "\n" not in text[end : found.start()], found.end()
        if found["title"]:
            parts.append(re.sub(r"[\s*]*-{3,}[\s*]*", "", found["title"][2:-2]).strip())
        if found["title"] or found["end"]:
            group = None
        elif found["comment"] and same_line and group and group.constants:
            group.constants[-1][2] = " ".join(lines_of(found["comment"]))
        elif found["comment"] or not group:
            group = Group(found["comment"])
            parts.append(group)
        if group and not found["comment"]:
            group.add(found)
    return parts


def pages(root):
    """Returns the page by its path under docs."""
    paths = sorted((root / "include").glob("*.h"))
    headers = {path.name: parse(path.read_text(encoding="utf-8")) for path in paths}
    groups = [part for parts in headers.values() for part in parts if isinstance(part, Group)]
    anchors = {name for x in groups for name in (*x.names, *(c[0] for c in x.constants))}
    out = [HEAD]
    for name, parts in headers.items():
        out.append(f"## {name}\n")
        for part in parts:
            out += [f"## {part}", ""] if isinstance(part, str) else part.page(anchors)
    return {"reference/c-api.md": re.sub(r"\n{3,}", "\n\n", "\n".join(out))}
