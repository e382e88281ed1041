#!/usr/bin/env python3
"""What follows from the library's table of rules and is kept in files: the stub of the package,
whose classes are made when it is imported (python/halfstep/__init__.pyi); the hash that `python -m
halfstep verify` expects; the lists of rules in README.md and of classes in docs/python.md.

    generate.py            names the files that are not as they would be written, and exits with 1
                           if there are any
    generate.py --write    writes them

Both take the package in this tree and the library that HALFSTEP_LIBRARY names. `make generate`
builds that library first.
"""

import inspect
import os
import re
import sys
import textwrap

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
HEAD = '''"""Made by scripts/generate.py from the library's table of rules."""
import os
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import torch

from . import compat as compat
from ._abi import HalfstepError as HalfstepError
from .accumulate import GradientAccumulator as GradientAccumulator
from .ema import EMA as EMA
from .full_precision import full_precision_state_dict as full_precision_state_dict
from .offload import CPUOffload as CPUOffload
from .optimizer import Optimizer as Optimizer, Params as Params, name_parameters as name_parameters
from .plan import plan as plan
from .rules import optimizer as optimizer
from .streaming import StateStreaming as StateStreaming

__version__: str
'''


def type_of(name, default, common):
    """Of an option: as Optimizer says, or as its default has it."""
    if name in common and common[name].annotation is not inspect.Parameter.empty:
        given = common[name].annotation
        return inspect.formatannotation(given) if not isinstance(given, str) else given
    if name == "lr":
        return "Union[float, torch.Tensor]"
    if isinstance(default, bool):
        return "bool"
    if isinstance(default, int):
        return "int"
    if isinstance(default, float):
        return "float"
    if isinstance(default, tuple):
        return f"Tuple[{', '.join('Optional[float]' if x is None else 'float' for x in default)}]"
    return "Optional[str]"


def stub():
    import halfstep
    from halfstep import rules
    from halfstep.optimizer import Optimizer

    aliases = {
        name: cls.__name__
        for name, cls in vars(halfstep).items()
        if cls in rules.classes.values() and name not in rules.classes
    }
    known = {*aliases, *rules.classes, *re.findall(r" as (\w+)", HEAD)}
    missing = set(halfstep.__all__) - known
    if missing:
        sys.exit(
            f"generate.py: HEAD lacks {', '.join(sorted(missing))}, which halfstep.__all__ has"
        )
    common = inspect.signature(Optimizer.__init__).parameters
    out = [HEAD]
    for name, cls in rules.classes.items():
        lines = [f"class {name}(Optimizer):"]
        text = cls.__doc__.splitlines()
        lines += [
            '    """' + text[0],
            *(("    " + line).rstrip() for line in text[1:]),
            '    """',
            "",
        ]
        call = (
            "def __init__(self, params: Params, " + "".join(parts(cls, common)) + ") -> None: ..."
        )
        lines += textwrap.wrap(
            call, 116, initial_indent="    ", subsequent_indent=" " * 17, break_on_hyphens=False
        )
        for method, function in (
            vars(cls.__mro__[1]).items() if cls.__mro__[1] is not Optimizer else ()
        ):
            if (
                inspect.isfunction(function)
                and not method.startswith("_")
                and not hasattr(Optimizer, method)
            ):
                lines.append(
                    f"    def {method}{inspect.signature(function)}: ...".replace(
                        " -> 'None'", " -> None"
                    )
                )
        out.append("\n".join(lines) + "\n")
    out += [f"{name} = {cls}\n" for name, cls in aliases.items()]
    out.append("__all__ = [\n" + "".join(f'    "{name}",\n' for name in halfstep.__all__) + "]\n")
    return "\n".join(out).replace("typing.", "")


def parts(cls, common):
    found, keywords = [], False
    for p in list(inspect.signature(cls.__init__).parameters.values())[2:]:
        if p.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            found.append("*, ")
        found.append(f"{p.name}: {type_of(p.name, p.default, common)} = {p.default!r}, ")
    found[-1] = found[-1].rstrip(", ")
    return found


def between(path, mark, text):
    """The file with the text between its marks."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        before, rest = file.read().split(f"<!-- {mark} -->")
    return before + f"<!-- {mark} -->" + text + "<!-- end -->" + rest.split("<!-- end -->", 1)[1]


def files():
    """The text of each file, by path."""
    from halfstep import __main__, _abi, rules

    main = os.path.join("python", "halfstep", "__main__.py")
    with open(os.path.join(ROOT, main), encoding="utf-8") as file:
        verify = re.sub(
            r'^EXPECTED = ".*"$', f'EXPECTED = "{__main__.run()}"', file.read(), flags=re.M
        )
    return {
        os.path.join("python", "halfstep", "__init__.pyi"): stub(),
        main: verify,
        "README.md": between("README.md", "rules", " ".join(f"`{name}`" for name in _abi.rules)),
        os.path.join("docs", "python.md"): between(
            os.path.join("docs", "python.md"),
            "classes",
            " ".join(f"`{name}`" for name in rules.classes),
        ),
    }


def main():
    sys.path.insert(0, os.path.join(ROOT, "python"))
    changed = []
    for path, text in files().items():
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            if file.read() != text:
                changed.append(path)
        if path in changed and "--write" in sys.argv[1:]:
            with open(os.path.join(ROOT, path), "w", encoding="utf-8") as file:
                file.write(text)
    print("\n".join(changed))
    return 1 if changed and "--write" not in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
