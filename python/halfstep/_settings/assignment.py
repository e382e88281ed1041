"""Decides which parameters Muon steps, where AdamW steps the rest."""

from fnmatch import fnmatchcase
from glob import escape

import torch
from torch.nn.parameter import UninitializedTensorMixin

from .naming import without_wrappers

#: patterns for matrices that AdamW steps beside Muon: embeddings and heads; biases, norms and
#: decays, which are matrices in stacks of experts or models. A pattern fits a whole name, or a part
#: of it between dots
ADAMW_NAMES = tuple(
    "*embed* emb emb_* *_emb wte wpe shared.weight *.shared.weight w.weight transformer.w.weight"
    " *_tokens *lm_head head classifier score fc.weight output.weight output_layer proj_out.weight"
    " *predictions.decoder.weight pred_layer to_logits qa_outputs"
    " *bias* *norm.weight *norm?.weight *ln_?.weight *bn?.weight A_log".split()
)
#: options of a group that mean something else to each rule
_EACH_ITS_OWN = ("lr", "eps")
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_patterns(patterns):
    """Returns the option adamw_names as a tuple. Raises TypeError if it is no list of strings."""
    if patterns is None:
        return ADAMW_NAMES
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"halfstep: adamw_names={patterns!r} must be a list of names, such as"
            ' ["lm_head", "*embed*"]; () leaves every matrix to Muon'
        )
    return tuple(patterns)


def patterns_of(model):
    """Returns the default of adamw_names for a model. It has the usual names, those of the model's
    embeddings, and those of the output layers that its modules tell, as transformers' models do."""
    found = set()
    for module in model.modules():
        layers = [module] if isinstance(module, _EMBEDDINGS) else []
        try:
            layers.append(module.get_output_embeddings())
        except (AttributeError, NotImplementedError):
            pass
        for layer in layers:
            if isinstance(layer, torch.nn.Module):
                found.update(map(id, layer.parameters()))
    own = [escape(without_wrappers(n)) for n, p in model.named_parameters() if id(p) in found]
    return (*ADAMW_NAMES, *own)


def check_options(given, known):
    """Returns the option adamw as a dictionary. Raises TypeError or ValueError if it is none, or
    has an option that is not among those known."""
    if not hasattr(given, "keys"):
        raise TypeError(
            f"halfstep: adamw={given!r} must be a dictionary of AdamW's options, such as"
            ' {"lr": 3e-4}; {} takes the defaults'
        )
    for key in given:
        if key not in known:
            raise ValueError(
                f"halfstep: adamw= has the key {key!r}, which is not an option of AdamW's groups;"
                f" they have {', '.join(sorted(known))}"
            )
    return {key: given[key] for key in given}


def is_matrix(p):
    """Returns True if at least two dimensions of a parameter are larger than 1."""
    return not isinstance(p, UninitializedTensorMixin) and sum(n > 1 for n in p.shape) > 1


def is_listed(name, patterns):
    """Returns True if a pattern fits the name of a parameter, or a part of it between dots."""
    name = without_wrappers(name)
    return any(fnmatchcase(part, p) for part in (name, *name.split(".")) for p in patterns)


def _is_for_muon(p, name, patterns):
    if not is_matrix(p):
        return False
    if name is None and patterns:
        raise ValueError(
            "halfstep: Muon(adamw=...) has to know the names of matrices, because AdamW steps"
            " embeddings and heads: give the model, its named_parameters(), or groups with"
            " use_muon, or adamw_names=() if Muon is to step every matrix"
        )
    return not (patterns and is_listed(name, patterns))


def divide(group, name_of, patterns):
    """Returns a group as two: the matrices that Muon steps, and the rest. Leaves out a group
    without parameters. "adamw" of the group holds options of the rest alone. name_of(p) returns a
    name or None.

    Raises ValueError for a matrix without a name, because it may be an embedding, and for an option
    that cannot be meant for both."""
    options = {key: group[key] for key in group if key not in ("params", "param_names", "adamw")}
    params, own = group["params"], group.get("adamw")
    names = group.get("param_names") or [None] * len(params)
    muon = [_is_for_muon(p, name or name_of(p), patterns) for p, name in zip(params, names)]
    both = len(set(muon)) > 1
    shared = {key: options[key] for key in options if not (both and key in _EACH_ITS_OWN)}
    if both and own is None and len(shared) < len(options):
        key = next(key for key in _EACH_ITS_OWN if key in options)
        raise ValueError(
            f"halfstep: a group has {key}={options[key]!r}, and Muon steps some of its parameters"
            f' and AdamW others: give it "adamw": {{{key!r}: ...}} too, or make two groups, with'
            " use_muon True and False"
        )
    found = []
    for side, given in ((True, options), (False, {**shared, **(own or {})})):
        places = [i for i, other in enumerate(muon) if other == side]
        if places or side and not params:
            half = {"params": [params[i] for i in places], **given, "use_muon": side}
            if "param_names" in group:
                half["param_names"] = [names[i] for i in places]
            found.append(half)
    return found
