#!/usr/bin/env python3
"""What editors and type checkers see of the package, whose classes are made from the library's table of rules when it is imported:
python/halfstep/__init__.pyi.

    stubs.py            prints it
    stubs.py --write    writes it, with the package in this tree and the library that HALFSTEP_LIBRARY names
"""
import inspect
import os
import re
import sys
import textwrap

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
FILE = os.path.join(ROOT, "python", "halfstep", "__init__.pyi")
HEAD = '''"""Made by scripts/stubs.py from the library's table of rules."""
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
    aliases = {name: cls.__name__ for name, cls in vars(halfstep).items() if cls in rules.classes.values() and name not in rules.classes}
    known = {*aliases, *rules.classes, *re.findall(r" as (\w+)", HEAD)}
    missing = set(halfstep.__all__) - known
    if missing:
        sys.exit(f"stubs.py: HEAD lacks {', '.join(sorted(missing))}, which halfstep.__all__ has")
    common = inspect.signature(Optimizer.__init__).parameters
    out = [HEAD]
    for name, cls in rules.classes.items():
        lines = [f"class {name}(Optimizer):"]
        text = cls.__doc__.splitlines()
        lines += ['    """' + text[0], *(("    " + line).rstrip() for line in text[1:]), '    """', ""]
        call = "def __init__(self, params: Params, " + "".join(parts(cls, common)) + ") -> None: ..."
        lines += textwrap.wrap(call, 116, initial_indent="    ", subsequent_indent=" " * 17, break_on_hyphens=False)
        for method, function in vars(cls.__mro__[1]).items() if cls.__mro__[1] is not Optimizer else ():
            if inspect.isfunction(function) and not method.startswith("_") and not hasattr(Optimizer, method):
                lines.append(f"    def {method}{inspect.signature(function)}: ...".replace(" -> 'None'", " -> None"))
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


def main():
    sys.path.insert(0, os.path.join(ROOT, "python"))
    text = stub()
    if "--write" in sys.argv[1:]:
        with open(FILE, "w") as file:
            file.write(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
