#!/usr/bin/env python3
"""Writes the stub of the Python package, `halfstep/__init__.pyi` of the wheel. It tells type
checkers and editors what the classes are, which are made when the package is imported.

    stub.py LIBRARY FILE

LIBRARY is a libhalfstep that was just built. Its table of rules says what classes there are and
what options they have. The package's sources say the rest: __init__.py the public names,
optimizer.py the common options and their types. Neither torch nor an installed package is needed.
"""

import ast
import importlib
import os
import sys
import textwrap
import types

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python", "halfstep")
HEAD = '''"""The classes of halfstep and their options. Made by cmake/stub.py."""

import os
from typing import Any, Mapping, Optional, Sequence, Tuple, Union

import torch
from typing_extensions import TypedDict, Unpack

from . import compat as compat
from . import nn as nn
from . import rules
from .optimizer import Params as Params
'''


def parse(name):
    """Returns the statements of a module of the package."""
    with open(os.path.join(PACKAGE, name), encoding="utf-8") as file:
        return ast.parse(file.read()).body


def class_of(module, name):
    """Returns the statements of a class of a module, or None if there is no such class."""
    return next((x.body for x in module if isinstance(x, ast.ClassDef) and x.name == name), None)


def common_options():
    """Returns the keywords that Optimizer takes itself: their types, and their defaults."""
    body = class_of(parse("optimizer.py"), "Optimizer")
    (init,) = (x.args for x in body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    kinds = {x.arg: ast.unparse(x.annotation) for x in init.kwonlyargs}
    return kinds, dict(zip(kinds, map(ast.literal_eval, init.kw_defaults)))


def public_names():
    """Returns the imports of __init__.py, its other names of classes, and __all__ but for them."""
    imports, aliases, public = [], [], []
    for x in parse("__init__.py"):
        if isinstance(x, ast.ImportFrom) and x.module and not x.names[0].asname:
            imports.append(ast.unparse(x))
        elif isinstance(x, ast.Assign) and ast.unparse(x.value).startswith("_classes["):
            aliases.append(f"{x.targets[0].id} = {x.value.slice.value}")
        elif isinstance(x, ast.Assign) and x.targets[0].id == "__all__":
            public = [e.value for e in x.value.elts if isinstance(e, ast.Constant)]
    return imports, aliases, public


def wrapped(items, indent):
    """Returns a list with commas as lines of at most 100 columns, none of its items broken."""
    text = ", ".join(item.replace(" ", "\0") for item in items)
    lines = textwrap.wrap(text, 100 - indent, break_on_hyphens=False)
    return [" " * indent + line.replace("\0", " ") for line in lines]


def stub():
    """Returns the text of the stub."""
    package = sys.modules["halfstep"] = types.ModuleType("halfstep")
    package.__path__ = [PACKAGE]  # modules of the package are found, and __init__.py is not run
    abi, signatures = map(
        importlib.import_module, ("halfstep._library.abi", "halfstep._library.signatures")
    )
    kinds, defaults = common_options()
    classes = {
        rule.label: (rule, *signatures.options_of(rule, defaults))
        for rule in abi.rules.values()
        if not rule.raw_gradient
    }
    described = {*defaults, *signatures.COMMON}

    def typed(name, default):
        return f"{name}: {kinds.get(name) or signatures.type_of(name, default)}"

    # Options of all classes are written once, as keywords.
    first, *rest = ({**positional, **keywords} for _, positional, keywords in classes.values())
    shared = {
        name: default
        for name, default in first.items()
        if name in described and all(name in options for options in rest)
    }
    imports, aliases, public = public_names()
    out = [HEAD + "\n".join(imports), "", "__version__: str", ""]
    out += [
        "class _Options(TypedDict, total=False):",
        '    """See `help(halfstep.Optimizer)`."""',
        "",
    ]
    out += [f"    {typed(name, default)}" for name, default in shared.items()]
    module = parse("rules.py")
    for label, (rule, positional, keywords) in classes.items():
        parameters = ["self", f"params: {signatures.params_of(rule)}"]
        parameters += [f"{typed(*item)} = {item[1]!r}" for item in positional.items()]
        # A keyword of _Options may not be a parameter too. RMSprop of torch has some in its order.
        apart = not positional.keys() & shared.keys()
        own = {name: v for name, v in keywords.items() if not (apart and name in shared)}
        if own:
            parameters += ["*", *(f"{typed(*item)} = {item[1]!r}" for item in own.items())]
        if apart:
            parameters.append("**options: Unpack[_Options]")
        base = f"rules._{label}" if class_of(module, f"_{label}") else "Optimizer"
        about = signatures.about(rule, [n for n in (*positional, *own) if n not in described])
        out += ["", f"class {label}({base}):", '    """' + about[0]]
        out += [f"    {line}".rstrip() for line in about[1:]]
        out += ['    """', "", "    def __init__("]
        out += wrapped(parameters, 8)
        out.append("    ) -> None: ...")
    out += ["", *aliases, "", "__all__ = ["]
    out += wrapped([f'"{name}"' for name in (*public, *classes)], 4)
    return "\n".join([*out, "]", ""])


def main():
    library, path = sys.argv[1:]
    os.environ["HALFSTEP_LIBRARY"] = library
    sys.dont_write_bytecode = True
    text = stub()
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
