"""Writes python/halfstep/classes.py, the optimizer class of each rule, for generate.py.

Names, order, defaults, types and meanings of the options come from the library's table of rules.
Keywords of all classes, and their types, are those of Optimizer in optimizer.py. No list of rules
is here, so a new rule of src/rules/rules.def becomes a new class.
"""

import ast
import json
import os
import textwrap

from halfstep import rules
from halfstep._library import abi
from halfstep._settings.assignment import ADAMW_NAMES
from halfstep._settings.groups import COMMON

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PATH = os.path.join("python", "halfstep", "classes.py")
#: hyper-parameters that belong to built-in schedules, which torch's schedulers take the place of
_SCHEDULE = (
    *("warmup_steps", "total_steps", "final_fraction", "final_decay_fraction"),
    *("decay_start", "power"),
)
_INTEGERS = ("ns_steps", "k", "d_group")
#: rules that torch has too: the positional options of its class after `lr`, in order. It is fixed,
#: so that a class is the same beside every torch.
_ORDER = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adam": ("betas", "eps", "weight_decay", "amsgrad"),
    "adamw": ("betas", "eps", "weight_decay", "amsgrad"),
    "radam": ("betas", "eps", "weight_decay", "decoupled_weight_decay"),
    "rmsprop": (
        *("alpha", "eps", "weight_decay", "momentum", "centered"),
        *("capturable", "foreach", "maximize", "differentiable"),
    ),
    "muon": (
        *("weight_decay", "momentum", "nesterov"),
        *("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    ),
    "adafactor": ("beta2_decay", "eps", "d", "weight_decay"),
}


def _value(hyper):
    """Returns a default as a user would write it."""
    if hyper.switch:
        return bool(hyper.initial)
    if hyper.words:
        return hyper.words[int(hyper.initial)]
    return int(hyper.initial) if hyper.name in _INTEGERS else hyper.initial


def _rename_muon(own):
    """Gives options of the table the names that torch's Muon has for them."""
    own["ns_coefficients"] = tuple(own.pop(f"ns_{key}") for key in "abc")  # or a name
    own["betas"], own["adam_eps"], own["eps"] = own.pop("betas"), own.pop("eps"), own.pop("ns_eps")
    own["adjust_lr_fn"] = own["adamw"] = own["adamw_names"] = None
    del own["match_rms"]


def _rename_adafactor(own):
    """Makes torch's pair of eps, the first of which may be None."""
    own["eps"] = None, own.pop("scale_eps")


_RENAME = {"muon": _rename_muon, "adafactor": _rename_adafactor}


def options_of(rule, common):
    """Returns the options of a rule's class after `params`, each with its default: the positional
    ones in order, then those that are keywords only. `common` has the defaults of Optimizer's own
    keywords. Some of them are positional in torch (RMSprop's foreach)."""
    own, shared, betas = {}, {}, []
    for name, hyper in rule.hypers.items():
        if hyper.per_optimizer or name in common or name in _SCHEDULE:
            continue
        if name in COMMON:
            if name != "cautious" or rule.cautious:
                shared[name] = _value(hyper)
        elif name in abi.BETAS:
            betas.append(hyper.initial)
        else:
            own[name] = _value(hyper)
    if len(betas) == 1:  # one rate is a number by itself
        own["beta1" if "beta1" in rule.hypers else "beta"] = betas[0]
    elif betas:
        own["betas"] = tuple(betas)
    if rule.name in _RENAME:
        _RENAME[rule.name](own)
    if rule.name in ("adam", "radam"):
        shared["decoupled_weight_decay"] = False
    first = ("lr", *_ORDER.get(rule.name, ("betas", "eps", "weight_decay", *own)))
    if rule.matrix:
        shared["matrix"], shared["heads"], shared["split"] = "auto", 1, None
    known = {**own, **shared, **common}
    positional = {name: known[name] for name in first if name in known}
    return positional, {name: v for name, v in known.items() if name not in positional}


#: types that do not follow from the default
_TYPES = {
    "lr": "Union[float, torch.Tensor]",
    "adamw": "Optional[Mapping[str, Any]]",
    "adamw_names": "Optional[Sequence[str]]",
    "split": "Optional[Sequence[int]]",
    "ns_coefficients": "Union[Tuple[float, float, float], str]",
}


def params_of(rule):
    """Returns the type of what a rule's class takes first."""
    return "Union[Params, torch.nn.Module]" if rule.name == "muon" else "Params"


def type_of(name, default):
    """Returns the type of an option of a rule."""
    if name in _TYPES:
        return _TYPES[name]
    if isinstance(default, tuple):
        return f"Tuple[{', '.join('Optional[float]' if x is None else 'float' for x in default)}]"
    return "Optional[str]" if default is None else type(default).__name__


#: What is in no table: torch's names for what the table calls otherwise, and plainer words.
_TITLES = {
    "lr": "learning rate, a number or a tensor of one element",
    "weight_decay": "coefficient of the weight decay; `decay` says how it acts",
    "decoupled_weight_decay": "True: weight decay does not go through the gradient, as in AdamW",
    "ns_coefficients": (
        "coefficients of the Newton-Schulz iteration, or the name of a published list, which has a"
        f" least number of iterations: {', '.join(abi.choices('ns_coefficients')[1:])}"
    ),
    "matrix": (
        'what a parameter of three or more dimensions is: "last-two", a stack of matrices of the'
        ' last two; "flatten", one matrix of dimension 0 by the rest; "auto", what the rule\'s'
        " authors take it for (docs/guides/muon.md)"
    ),
    "heads": "number of equal blocks of rows that are matrices of their own (heads)",
    "split": "rows of the blocks that are matrices of their own, such as q, k and v in one weight",
    "adam_eps": "eps of the parameters that are no matrices, which AdamW steps",
    "adamw": (
        "options of AdamW, which then steps embeddings, heads and whatever is no matrix, in groups"
        ' of its own: {"lr": 3e-4}. `params` may be the model, whose modules then say which of its'
        " weights are embeddings and heads"
    ),
    "adamw_names": (
        "with adamw: the matrices that AdamW steps, by patterns that fit a name or a part of it"
        " between dots. None: usual names of embeddings, heads, biases and norms, such as"
        f" {', '.join(ADAMW_NAMES[:6])}; repr() of the optimizer shows whom AdamW steps"
    ),
    "adjust_lr_fn": (
        'what an update is scaled by: None or "original", sqrt(max(1, rows / columns)), as in'
        ' torch.optim.Muon; "match_rms_adamw", to the size of AdamW\'s; "spectral_norm",'
        ' sqrt(rows / columns); "none"'
    ),
    ("adafactor", "eps"): (
        "smallest root of a second moment (None: 2^-23; with published=True: what is added to"
        " squared gradients); smallest root mean square of a weight in its step's size"
    ),
}


def title_of(rule, name):
    """Returns what a rule's option means, in one sentence."""
    if name == "betas":
        return "; ".join(rule.hypers[n].title for n in abi.BETAS if n in rule.hypers)
    for key in ((rule.name, name), name):
        if key in _TITLES:
            return _TITLES[key]
    hyper = rule.hypers["ns_eps" if (rule.name, name) == ("muon", "eps") else name]
    if hyper.switch:
        return hyper.title.replace("1:", "True:").replace("0:", "False:")
    return hyper.title + (f" ({', '.join(hyper.words)})" if hyper.words else "")


def _interval(hyper):
    """Returns the bounds of a number as words."""
    if hyper.maximum > 1e6:
        return f"at least {hyper.minimum:g}"
    below = "below " if hyper.exclusive_maximum else ""
    return f"{hyper.minimum:g} to {below}{hyper.maximum:.10g}"


def bounds_of(rule, name):
    """Returns the bounds of a rule's option in brackets, or "" if its values are no numbers."""
    name = {("muon", "eps"): "ns_eps", ("muon", "adam_eps"): "eps"}.get((rule.name, name), name)
    names = abi.BETAS if name == "betas" else (name,) if (rule.name, name) not in _TITLES else ()
    hypers = [rule.hypers[n] for n in names if n in rule.hypers]
    found = [_interval(hyper) for hyper in hypers if not hyper.switch and not hyper.words]
    return f" ({'; '.join(dict.fromkeys(found))})" if found else ""


def about(rule, names):
    """Returns a rule's title, and the meanings and bounds of the options `names`, as lines of a
    docstring that help() shows in 100 columns."""
    lines, width = [rule.title + ".", ""], max(map(len, names)) + 6
    for name in names:
        text = f"    {name}".ljust(width) + title_of(rule, name) + bounds_of(rule, name)
        indent = " " * width
        lines += textwrap.wrap(text, 96, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def documentation(rule, options, common):
    """Returns the docstring of a rule's class, whose options are `options`. It names those that
    Optimizer describes, `common` and COMMON, and describes the others."""
    named = [name for name in options if name in common or name in COMMON]
    text = f"Common options, which help(halfstep.Optimizer) describes: {', '.join(named)}."
    return "\n".join(
        [
            *about(rule, [name for name in options if name not in named]),
            "",
            *textwrap.wrap(text, 96),
            "",
            ">>> import torch, halfstep",
            ">>> model = torch.nn.Linear(64, 64).bfloat16()",
            ">>> params = list(model.named_parameters())",
            f">>> opt = halfstep.{rule.label}("
            f'params, lr={options["lr"]}, weights="bf16-sr", states="int8")',
            f'>>> opt = halfstep.optimizer("{rule.name}/bf16-sr/int8", params, lr={options["lr"]})'
            "  # the same",
            ">>> model(torch.ones(1, 64).bfloat16()).sum().backward()",
            ">>> opt.step()",
        ]
    )


# ---- The module ----------------------------------------------------------------------------------

HEAD = '''"""The optimizer classes, one for each rule of the library's table.

`make generate` writes this file (scripts/class_text.py). What a class does is in optimizer.py, and
what some rules do beside it in rules.py. This file is longer than 500 lines because each class has
all of its options.
"""

# fmt: off
from typing import Any, Mapping, Optional, Sequence, Tuple, Union

import torch

from . import rules
from ._library import abi
from ._settings.options import StoreLike
from .optimizer import Optimizer, Params

abi.check_rules("{fingerprint}")
'''


def _common_options():
    """Returns the keywords that Optimizer takes itself: their types, and their defaults."""
    with open(os.path.join(ROOT, "python", "halfstep", "optimizer.py"), encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    (body,) = (x.body for x in body if isinstance(x, ast.ClassDef) and x.name == "Optimizer")
    (init,) = (x.args for x in body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    kinds = {x.arg: ast.unparse(x.annotation) for x in init.kwonlyargs}
    return kinds, dict(zip(kinds, map(ast.literal_eval, init.kw_defaults)))


def _literal(value):
    """Returns a default as it is written."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _wrapped(items, indent):
    """Returns items as lines of at most 100 columns, each with a comma and none of them broken."""
    text = " ".join(item.replace(" ", "\0") + "," for item in items)
    lines = textwrap.wrap(text, 100 - indent, break_long_words=False, break_on_hyphens=False)
    return [" " * indent + line.replace("\0", " ") for line in lines]


def _class_of(rule, kinds, common):
    """Returns the lines of a rule's class. `kinds` and `common` are those of _common_options()."""
    positional, keywords = options_of(rule, common)
    options = {**positional, **keywords}

    def parameters(given):
        typed = {name: kinds.get(name) or type_of(name, value) for name, value in given.items()}
        return _wrapped([f"{name}: {typed[name]} = {_literal(given[name])}" for name in given], 8)

    own = [f'"{name}": {name}' for name in options if name not in common]
    if rule.name == "adamw":
        own.append('"decoupled_weight_decay": True')  # which torch's group has, as Adam's child
    base = f"rules._{rule.label}" if hasattr(rules, "_" + rule.label) else "Optimizer"
    first, *about = documentation(rule, options, common).splitlines()
    return [
        f"class {rule.label}({base}):",
        f'    """{first}',
        *(f"    {line}".rstrip() for line in about),
        '    """',
        "",
        f'    rule = "{rule.name}"',
        "",
        "    def __init__(",
        f"        self, params: {params_of(rule)},",
        *parameters(positional),
        "        *,",
        *parameters(keywords),
        "    ) -> None:",
        "        super().__init__(",
        "            params,",
        "            {",
        *_wrapped(own, 16),
        "            },",
        *_wrapped([f"{name}={name}" for name in options if name in common], 12),
        "        )",
    ]


def text():
    """Returns the text of the module."""
    kinds, common = _common_options()
    made = [rule for rule in abi.rules.values() if not rule.raw_gradient]
    out = HEAD.format(fingerprint=abi.rules_fingerprint()).splitlines()
    for rule in made:
        out += ["", "", *_class_of(rule, kinds, common)]
    out += ["", "", "__all__ = [", *_wrapped([f'"{rule.label}"' for rule in made], 4), "]"]
    out += ["", "rules.classes.update({", *_wrapped([f'"{r.label}": {r.label}' for r in made], 4)]
    return "\n".join([*out, "})", ""])
