"""Reads a rule's purpose, sources and equations from the first comment of its header, and turns the
equations into Markdown with LaTeX.

docs/adding.md has the convention. Equations are statements of Python, so that
tests/python/rules/test_equations.py runs the same lines that this site shows.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Dict

FIELD = re.compile(r"(Use|Source|Symbols|Equations):(?: (.*))?$")
#: what the site shows for a name
GREEK = {"eps": r"\varepsilon", "change": r"\Delta"}
GREEK.update({name: rf"\{name}" for name in ("alpha", "beta", "gamma", "rho")})
#: functions that LaTeX knows
KNOWN = ("max", "min", "ln", "exp")
#: functions with a name of their own: what LaTeX shows
OWN = {
    "sign": r"\operatorname{sign}",
    "rms": r"\operatorname{rms}",
    "mean": r"\operatorname{mean}",
    "row_mean": r"\operatorname{rowmean}",
    "column_mean": r"\operatorname{colmean}",
    "sum": r"\sum",
    "total": r"\sum",
}
COMPARISONS = {
    ast.Eq: "=",
    ast.NotEq: r"\neq",
    ast.Lt: "<",
    ast.LtE: r"\leq",
    ast.Gt: ">",
    ast.GtE: r"\geq",
}
#: strength of an operator: an operand that binds less is put in parentheses
SUM, PRODUCT, SIGN, POWER, ATOM = range(5)


#: decay mode -> what it makes of the gradient, the learning rate and the decay before the rule
MODES = {
    "l2": "g = g + weight_decay * w\ndecay = 0",
    "decoupled": "decay = lr * weight_decay",
    "fully-decoupled": "decay = lr / reference_lr * weight_decay",
    "proximal": "lr = lr / (1 + lr * weight_decay)\ndecay = lr * weight_decay",
}


@dataclass(frozen=True)
class Equations:
    """The convention's fields of one rule. `symbols`: the name in the equations -> the state or
    scalar of the table. `text`: the lines of the equations."""

    use: str
    source: str
    symbols: Dict[str, str]
    text: str


def first_comment(header):
    """Returns the first comment of a header without its stars, as lines."""
    comment = header[: header.index("*/")]
    return [re.sub(r"^(/\*| \*) ?", "", line).rstrip() for line in comment.split("\n")]


def read(root, name):
    """Returns the Equations of src/rules/NAME.h. Raises ValueError if a field is missing."""
    path = root / "src" / "rules" / f"{name}.h"
    return parse(path.read_text(encoding="utf-8"), name, lambda other: read(root, other))


def parse(header, name, other):
    """Returns the Equations of a header's text. `other` returns those of the rule that the header
    refers to."""
    fields, field = {}, None
    for line in first_comment(header):
        found = FIELD.match(line)
        if found:
            field = found[1]
            fields[field] = [found[2] or ""]
        elif not line:
            field = None
        elif field:
            fields[field].append(line)
    for field in ("Use", "Source", "Equations"):
        if field not in fields:
            raise ValueError(f"src/rules/{name}.h has no line '{field}:' in its first comment")
    use, source, symbols = (
        " ".join(line.strip() for line in fields.get(field, []))
        for field in ("Use", "Source", "Symbols")
    )
    if fields["Equations"][0]:
        theirs = other(fields["Equations"][0])
        return Equations(use, source, theirs.symbols, theirs.text)
    pairs = [pair.split() for pair in symbols.split(",") if pair.strip()]
    text = "\n".join(re.sub("^  ", "", line) for line in fields["Equations"][1:])
    return Equations(use, source, dict(pairs), text)


def rule_headers(root):
    """Returns the file in src/rules of every rule, without .h, by the rule's name."""
    found = {}
    rows = (root / "src" / "rules" / "rules.def").read_text(encoding="utf-8")
    for name in re.findall(r"^RULE\(\d+, (\w+)\)", rows, re.M):
        header = (root / "src" / "rules" / f"{name}.h").read_text(encoding="utf-8")
        found[re.search(r'\bRULE\("([^"]+)"', header)[1]] = name
    return found


# ---- LaTeX ---------------------------------------------------------------------------------------


def name_of(name):
    """Returns a name in LaTeX: beta1 is a Greek letter with an index, lr stays lr."""
    if name.endswith("_hat"):
        return rf"\hat{{{name_of(name[:-4])}}}"
    if name.endswith("_t"):
        return rf"{name_of(name[:-2])}_t"
    letter, index = re.fullmatch(r"(.*?)(\d*)", name).groups()
    if letter in GREEK or len(letter) == 1:
        return GREEK.get(letter, letter) + (f"_{{{index}}}" if index else "")
    return rf"\mathrm{{{name}}}".replace("_", r"\_")


def number(value):
    """Returns a number in LaTeX, small ones as powers of ten."""
    if isinstance(value, str):
        return rf"\text{{{value}}}"
    if value and abs(value) < 1e-2:
        mantissa, exponent = f"{value:e}".split("e")
        factor = "" if float(mantissa) == 1 else rf"{float(mantissa):g} \cdot "
        return f"{factor}10^{{{int(exponent)}}}"
    return f"{value:g}"


class _Writer(ast.NodeVisitor):
    """Writes an expression in LaTeX. Each visit returns the text and how strongly it binds. Inside
    cases and arguments, where `depth` is above 0, quotients have a slash."""

    def __init__(self, depth=0):
        self.depth = depth

    def generic_visit(self, node):
        raise ValueError(f"an equation cannot have '{ast.unparse(node)}'")

    def within(self, node, strength):
        text, own = self.visit(node)
        return text if own >= strength else rf"\left({text}\right)"

    def visit_Name(self, node):
        return name_of(node.id), ATOM

    def visit_Constant(self, node):
        return number(node.value), ATOM

    def visit_UnaryOp(self, node):
        return f"-{self.within(node.operand, SIGN)}", SIGN

    def visit_Attribute(self, node):  # X.T
        return rf"{self.within(node.value, ATOM)}^{{\top}}", POWER

    def visit_BinOp(self, node):
        left, right, kind = node.left, node.right, type(node.op)
        if kind is ast.Div and self.depth:
            return f"{self.within(left, PRODUCT)} / {self.within(right, POWER)}", PRODUCT
        if kind is ast.Div:
            return rf"\frac{{{latex(left)}}}{{{latex(right)}}}", PRODUCT
        if kind is ast.Pow:
            return f"{self.within(left, ATOM)}^{{{latex(right)}}}", POWER
        if kind is ast.Mod:
            return rf"{self.within(left, PRODUCT)} \bmod {self.within(right, PRODUCT)}", SUM
        if kind in (ast.Add, ast.Sub):
            sign = "+" if kind is ast.Add else "-"
            return f"{self.within(left, SUM)} {sign} {self.within(right, PRODUCT)}", SUM
        first, second = self.within(left, PRODUCT), self.within(right, SIGN)
        words = first.endswith("}") and second.startswith(r"\mathrm")
        point = r"\cdot" if words or second[0].isdigit() else r"\,"
        return rf"{first} {point} {second}", PRODUCT

    def visit_Call(self, node):
        name, arguments = node.func.id, node.args
        inside = ", ".join(latex(one, 1) for one in arguments)
        if name == "sqrt":
            return rf"\sqrt{{{inside}}}", ATOM
        if name == "abs":
            return rf"\left|{inside}\right|", ATOM
        if name == "norm":
            return rf"\left\|{inside}\right\|", ATOM
        if name == "outer":
            left, right = (self.within(one, ATOM) for one in arguments)
            return rf"{left} \, {right}^{{\top}}", PRODUCT
        shown = rf"\{name}" if name in KNOWN else OWN[name]
        if len(arguments) == 1 and shown == r"\sum":
            return rf"\sum {self.within(arguments[0], PRODUCT)}", SIGN
        return rf"{shown}\left({inside}\right)", ATOM

    def visit_Compare(self, node):
        parts = [latex(node.left)]
        for operator, right in zip(node.ops, node.comparators):
            parts += [COMPARISONS[type(operator)], latex(right)]
        return " ".join(parts), SUM

    def visit_IfExp(self, node):
        rows = [rf"{latex(node.body, 1)} & \text{{if }} {condition(node.test)}"]
        rows.append(rf"{latex(node.orelse, 1)} & \text{{otherwise}}")
        return r"\begin{cases}" + r" \\ ".join(rows) + r"\end{cases}", SUM


def latex(node, depth=0):
    """Returns an expression in LaTeX."""
    return _Writer(depth).visit(node)[0]


def condition(node):
    """Returns a condition in LaTeX. A name stands for a switch that is on."""
    if isinstance(node, ast.BoolOp):
        word = "and" if isinstance(node.op, ast.And) else "or"
        return rf" \text{{ {word} }} ".join(map(condition, node.values))
    if isinstance(node, ast.Name):
        return f"{name_of(node.id)} = 1"
    return latex(node)


def in_words(node):
    """Returns a condition as the middle of an English sentence in Markdown."""
    if isinstance(node, ast.Name) and node.id == "matrix":
        return "the tensor is a matrix"
    if isinstance(node, ast.Name):
        return f"`{node.id}` is 1"
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
        value = node.comparators[0].value
        if isinstance(value, str):
            no = "not " if isinstance(node.ops[0], ast.NotEq) else ""
            return f"`{ast.unparse(node.left)}` is {no}`{value}`"
    return f"${condition(node)}$"


def markdown(equations):
    """Returns Markdown that shows the equations: formulas, and items for branches and loops."""
    kept = {*equations.symbols}
    return "\n\n".join(_block(ast.parse(equations.text).body, kept))


def inline(text):
    """Returns Markdown that shows assignments in one line."""
    rows = []
    for node in ast.parse(text).body:
        name = node.targets[0].id
        arrow = r"\leftarrow" if _uses(node.value, name) else "="
        rows.append(f"${name_of(name)} {arrow} {latex(node.value, 1)}$")
    return ", ".join(rows)


def _block(body, kept):
    """Returns the paragraphs of a list of statements. Symbols in `kept` are written with an arrow,
    because their old value is replaced."""
    parts, rows = [], []

    def display():
        if rows:
            inside = " \\\\\n".join(rows)
            parts.append(f"$$\n\\begin{{align*}}\n{inside}\n\\end{{align*}}\n$$")
            rows.clear()

    def item(title, body):
        display()
        inside = "\n\n".join([title, *_block(body, kept)])
        parts.append("* " + inside.replace("\n", "\n    ").replace("\n    \n", "\n\n"))

    for node in body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            arrow = r"\leftarrow" if target.id in kept or _uses(node.value, target.id) else "="
            rows.append(rf"{name_of(target.id)} &{arrow} {latex(node.value)}")
        elif isinstance(node, ast.If) and (cases := _cases(node)):
            rows.append(rf"{name_of(cases[0])} &= \begin{{cases}}{cases[1]}\end{{cases}}")
        elif isinstance(node, ast.If):
            item(f"If {in_words(node.test)}:", node.body)
            rest = node.orelse
            while rest:
                if len(rest) == 1 and isinstance(rest[0], ast.If):
                    item(f"If {in_words(rest[0].test)}:", rest[0].body)
                    rest = rest[0].orelse
                else:
                    item("Otherwise:", rest)
                    rest = []
        elif isinstance(node, ast.For):
            names = ", ".join(f"${name_of(one.id)}$" for one in node.target.elts)
            item(f"For each triple {names} of the `ns_{ast.unparse(node.iter)}`:", node.body)
        else:
            raise ValueError(f"an equation cannot have '{ast.unparse(node)}'")
    display()
    return parts


def _cases(node):
    """Returns the name and the cases of a choice whose branches each set the same name, else
    None."""
    rows, names = [], set()
    while isinstance(node, ast.If):
        branches = [(node.body, rf"\text{{if }} {condition(node.test)}")]
        follows = node.orelse[0] if len(node.orelse) == 1 else None
        if not isinstance(follows, ast.If):
            branches.append((node.orelse, r"\text{otherwise}"))
        for body, when in branches:
            if len(body) != 1 or not isinstance(body[0], ast.Assign) or "matrix" in when:
                return None
            names.add(body[0].targets[0].id)
            rows.append(f"{latex(body[0].value, 1)} & {when}")
        node = follows
    return (names.pop(), r" \\ ".join(rows)) if len(names) == 1 else None


def _uses(node, name):
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))
