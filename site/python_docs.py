"""Prepares the Python package for docs/reference/python-api.md: an extension of griffe, which reads
the package's sources for mkdocstrings.

It makes Markdown of the tables of options and of the examples in docstrings, which are laid out for
help(). Signatures of the rules' classes have `**options` in place of the keywords of Optimizer.
"""

import re

import griffe

#: the first line of an entry of a table: a name, then its meaning after two blanks or a colon
_ENTRY = re.compile(r"^( *)([a-z]\w*(?:, [a-z]\w*)*)(?:  +|: )(?=\S)")


def _cell(text):
    """Returns a text for a cell of a Markdown table."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("*", "\\*")
    return re.sub(r'(?<!\w)"[\w.+-]+"(?!\w)', r"`\g<0>`", text)


def _table(lines):
    """Returns the Markdown table of lines of a docstring whose first one is an entry."""
    rows, indent = [], len(_ENTRY.match(lines[0])[1])
    for line in lines:
        found = _ENTRY.match(line)
        if found and len(found[1]) == indent:
            rows.append([found[2], line[found.end() :]])
        else:
            rows[-1][1] += " " + line.strip()
    return ["", "| name | meaning |", "|---|---|"] + [
        f"| {', '.join(f'`{n}`' for n in names.split(', '))} | {_cell(text)} |"
        for names, text in rows
    ]


def _row(item):
    """Returns a row that names a class or function of a module and has its first paragraph."""
    text = item.docstring.value if item.docstring else ""
    return f"| `{item.name}` | {_cell(text.split(chr(10) * 2)[0])} |"


def _block(lines):
    """Returns a paragraph of a docstring as Markdown."""
    if lines[0].startswith(">>> "):
        return ["```python", *(line[4:] for line in lines), "```"]
    if re.match(r"from halfstep\.|config\.|plugins:|echo ", lines[0]):
        return ["    " + line for line in lines]
    first = _ENTRY.match(lines[0])
    rest = [line for line in lines if not _ENTRY.match(line)]
    if first and all(line.startswith(first[1] + "    ") for line in rest):
        return _table(lines)
    return lines


def markdown(docstring):
    """Returns a docstring as Markdown, without the sentences about the length of a file."""
    docstring = re.sub(r"(?m)^This file is longer than \d+ lines[^.]*\.\n?", "", docstring)
    docstring = re.sub(r"`?\bdocs/((?:\w+/)?([\w-]+\.md))`?", r"[\2](../\1)", docstring)
    out, block = [], []
    for line in [*docstring.splitlines(), ""]:
        if line.strip():
            block.append(line)
        elif block:
            out += [*_block(block), ""]
            block = []
    return "\n".join(out)


class Extension(griffe.Extension):
    """Shortens signatures and rewrites docstrings."""

    def on_package(self, *, pkg, loader, **kwargs):
        if pkg.path == "halfstep":
            self._shorten(pkg)
            self._rewrite(pkg)

    def _shorten(self, pkg):
        """Replaces the keywords that Optimizer takes itself in the signatures of its classes."""
        keyword = griffe.ParameterKind.keyword_only
        common = {p.name for p in pkg["optimizer.Optimizer.__init__"].parameters}
        for name in pkg["classes"].exports:
            init = pkg["classes"][name]["__init__"]
            own = [p for p in init.parameters if p.kind != keyword or p.name not in common]
            rest = griffe.Parameter("options", kind=griffe.ParameterKind.var_keyword)
            init.parameters = griffe.Parameters(*own, rest)

    def _rewrite(self, item):
        """Rewrites the docstrings of an object and of what is defined in it."""
        if item.docstring:
            item.docstring.value = markdown(item.docstring.value)
        for member in item.members.values():
            if not member.is_alias:
                self._rewrite(member)
        if item.is_module and item.parent and item.parent.name in ("compat", "integrations"):
            rows = [_row(item.members[name]) for name in item.exports or ()]
            item.docstring.value += "\n".join(["", "| name | meaning |", "|---|---|", *rows])
