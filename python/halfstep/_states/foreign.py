"""Translates states that other packages saved to plain states under torch's names. They are decoded
in fp32, exactly as their package decodes them.

A package is a row of `PACKAGES`: how one parameter's state is recognized, how it is translated, and
how its groups' options are renamed.
"""

import torch

from .._library import abi
from .._tensors.torch_public import warn

#: key of a dictionary in which bitsandbytes hides what torch's loader must not cast
_BNB_WRAPPED = "__bnb_optimizer_quant_state__"
#: elements of a block of bitsandbytes
_BNB_BLOCK = 256
#: for each rule of bitsandbytes: the states in its tensor `state1`, which may hold two in its
#: halves, and in `state2`
_BNB_RULES = {rule: (("exp_avg",), ("exp_avg_sq",)) for rule in ("adam", "adamw", "lamb")}
_BNB_RULES |= {"lion": (("exp_avg",),), "ademamix": (("exp_avg", "exp_avg_slow"), ("exp_avg_sq",))}
#: options in every group of bitsandbytes, and their names in AdEMAMix here
_BNB_GROUP = {"alpha": "alpha", "t_alpha": "alpha_warmup", "t_beta3": "beta3_warmup"}
#: numbers of prodigyopt's groups that each tensor has here; and all keys of its groups that are no
#: options here
_PRODIGY_SCALARS = abi.rules["prodigy"].scalars
_PRODIGY_OTHERS = "beta3 use_bias_correction decouple fsdp_in_use k d_hat d_denom".split()
_PRODIGY_TOLD = {*_PRODIGY_SCALARS, *_PRODIGY_OTHERS}
#: elements that share a scale in FlashOptim
_FLASH_BLOCK = 32


def _is_bitsandbytes(state):
    return _BNB_WRAPPED in state or "state1" in state


def _bitsandbytes(rule, state, group):
    """Decodes `state1` and `state2`: fp32, or codes of a map of 256 values with one scale for 256
    elements (before 0.39, one for all)."""
    held = {**state, **state.get(_BNB_WRAPPED, {})}
    if rule.name not in _BNB_RULES:
        raise ValueError(
            f"halfstep: states of bitsandbytes can be loaded by {', '.join(_BNB_RULES)}, not by"
            f" {rule.name}"
        )
    out, lost = {"step": held.get("step", 0)}, set()
    for i, names in enumerate(_BNB_RULES[rule.name], 1):
        codes = held.get(f"state{i}")
        if codes is None:
            continue
        if codes.dtype != torch.uint8:
            values = codes.to(torch.float32)
        else:
            values = held[f"qmap{i}"].to(torch.float32)[codes.int()].reshape(len(names), -1)
            if f"absmax{i}" in held:  # one for each block, by halves
                scales = held[f"absmax{i}"].to(torch.float32).reshape(len(names), -1)
                values *= scales.repeat_interleave(_BNB_BLOCK, 1)[:, : values.shape[1]]
            else:
                values *= held[f"max{i}"].to(torch.float32)
            values = values.reshape(codes.shape)
        out.update(zip(names, values if len(names) > 1 else (values,)))
    for key, what in (("gnorm_vec", "percentile clipping"), ("unorm_vec", "max_unorm")):
        if isinstance(held.get(key), torch.Tensor) and held[key].any():
            lost.add(f"{key} ({what})")
    return out, lost


def _is_quantized(value):
    """Returns True for a tensor of a class of its own, which has a method that decodes it."""
    own = isinstance(value, torch.Tensor) and type(value) is not torch.Tensor
    return own and hasattr(value, "dequantize")


def _is_torchao(state):
    return any(
        _is_quantized(value) and type(value).__module__.startswith("torchao")
        for value in state.values()
    )


def _torchao(rule, state, group):
    """Decodes tensors of torchao's own classes."""
    return {
        key: value.dequantize().to(torch.float32) if _is_quantized(value) else value
        for key, value in state.items()
    }, set()


def _is_flashoptim(state):
    return "error_bits" in state or any(
        isinstance(key, str) and key.endswith("::quantized") for key in state
    )


def _flashoptim(rule, state, group):
    """Decodes each state: int8 codes of a soft sign, or uint8 codes of a square root. 32 elements
    share an fp16 scale. Beside BF16 weights the scales' bits are seen as BF16."""
    out = {
        key: value for key, value in state.items() if key != "error_bits" and "::" not in str(key)
    }
    for key in state:
        name, colons, kind = str(key).partition("::")
        if not colons or kind != "quantized":
            continue
        codes, scales = state[key], state[name + "::scales"]
        scales = scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales
        signed = codes.dtype == torch.int8
        values = codes.reshape(-1).to(torch.float32) / (127.0 if signed else 255.0)
        if signed:
            values /= 2.0 - values.abs()
        values *= scales.to(torch.float32).repeat_interleave(_FLASH_BLOCK)[: values.numel()]
        out[name] = (values if signed else values * values).reshape(codes.shape)
    lost = (
        {"error_bits (bring its weights over by its get_fp32_model_state_dict())"}
        if "error_bits" in state
        else set()
    )
    return out, lost


def _is_prodigyopt(state):
    return "p0" in state and "d" not in state


def _prodigyopt(rule, state, group):
    """Completes states of prodigyopt, which are named as here, but flat.

    If the estimate is of every slice_p-th element, `s` and `p0` hold only those. `p0` is a single 0
    if all start weights were 0. The first moment is missing if beta1 is 0. The estimate is in the
    groups.
    """
    like = state["exp_avg_sq"]
    out = {
        "exp_avg": torch.zeros_like(like),
        **state,
        **{key: group[key] for key in _PRODIGY_SCALARS},
    }
    for name in ("s", "p0"):
        whole = torch.zeros_like(like, dtype=state[name].dtype).flatten()
        whole[:: group.get("slice_p", 1)] = state[name].flatten()
        out[name] = whole.reshape(like.shape)
    return out, set()


def prodigyopt_group(group, defaults=None):
    """Returns the options of a prodigyopt group under the names of halfstep.Prodigy. Options that
    have such a name already stay. `defaults` has the betas for a group that gives beta3 only."""
    out = {key: value for key, value in group.items() if key not in _PRODIGY_TOLD}
    betas = group.get("betas")
    betas = tuple((defaults or {}).get("betas", ()) if betas is None else betas)
    if len(betas) in (2, 3) and ("betas" in group or "beta3" in group):
        beta3 = group.get("beta3", betas[2] if len(betas) == 3 else None)
        out["betas"] = (*betas[:2], beta3 or 0.0)
    if "growth_rate" in group:
        out["growth_rate"] = min(
            group["growth_rate"], abi.rules["prodigy"].hypers["growth_rate"].maximum
        )
    if "use_bias_correction" in group:
        out["debias"] = group["use_bias_correction"]
    if "decouple" in group:
        abi.check_flags(decouple=group["decouple"])
        out["decay"] = "decoupled" if group["decouple"] else "l2"
    return out


def _is_factored(state):
    return "recipe" not in state and any(
        key in state for key in ("row_var", "variance", "exp_avg_sq_row", "RMS")
    )


def _factors(row, column):
    """Returns factors over the last two dimensions as vectors over them. Each factor has the
    parameter's shape, but one dimension is 1. Matrices of one row or column get one second moment
    instead."""
    row, column = row.to(torch.float32), column.to(torch.float32)
    whole = row * column / row.mean(-2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (whole,) if min(whole.shape[-2:]) < 2 else (row.squeeze(-1), column.squeeze(-2))


def _plain_factored(rule, state, group):
    """Translates states of torch's and transformers' Adafactor and of came_pytorch's CAME."""
    vectors = [s.name for s in rule.states if s.vector]
    single = next(s.name for s in rule.states if s.role == abi.ROLE_NONNEG)
    out = {key: value for key, value in state.items() if key == "step" or key == "exp_avg"}
    for key in ("variance", "exp_avg_sq"):
        if key in state:
            out[single] = state[key]
    for place, (row, column) in enumerate(
        (
            ("row_var", "col_var"),
            ("exp_avg_sq_row", "exp_avg_sq_col"),
            ("exp_avg_res_row", "exp_avg_res_col"),
        )
    ):
        if row not in state:
            continue
        kept = row == "row_var"  # this package keeps dimensions of 1
        found = _factors(
            state[row] if kept else state[row].unsqueeze(-1),
            state[column] if kept else state[column].unsqueeze(-2),
        )
        names = vectors[2:] if place == 2 else vectors[:2]
        out.update(
            zip(names, found) if len(found) == 2 else ((single, *found),) if place < 2 else ()
        )
    return out, set()


def factored_group(rule, group):
    """Returns the options of transformers' Adafactor and of came_pytorch's CAME under the names
    here. torch's options have these names already."""
    out = dict(group)
    if rule.name == "came" and hasattr(group.get("eps"), "__len__"):
        out["eps"], out["instability_eps"] = group["eps"]
    if rule.name == "adafactor" and "decay_rate" in group:
        out.update(
            beta2_decay=out.pop("decay_rate"),
            d=out.pop("clip_threshold"),
            beta1=group["beta1"] or 0.0,
            published=True,
            # With relative steps it is None, or the rate that AdafactorSchedule has reported.
            lr=rule.hypers["lr"].initial if group["relative_step"] else group["lr"],
        )
    return out


#: what dion calls the scales of an update, and their names here
_DION_SCALES = {"spectral_norm": "spectral_norm", "rms_norm": "match_rms_adamw", None: "none"}


def _dion_scale(value):
    if value not in _DION_SCALES:
        known = ", ".join(map(repr, _DION_SCALES))
        raise ValueError(f"halfstep: unknown adjust_lr={value!r}; known: {known}")
    return {"adjust_lr_fn": _DION_SCALES[value]}


#: options of dion's groups, and what they are here
_DION_OPTIONS = {
    "mu": lambda value: {"momentum": value},
    "muon_beta2": lambda value: {"row_beta": value},
    "epsilon": lambda value: {"eps": value},
    "adjust_lr": _dion_scale,
    "flatten": lambda value: {"matrix": "flatten" if value else "last-two"},
    "cautious_wd": lambda value: {"decay": "cautious" if value else "decoupled"},
    "num_heads": lambda value: {"heads": value or 1},
    "step": lambda value: {},
}


def dion_group(group):
    """Returns the options of a group of microsoft/dion under the names here. Options that have such
    a name already stay."""
    out = {}
    abi.check_flags(**{key: group[key] for key in ("flatten", "cautious_wd") if key in group})
    for key, value in group.items():
        out.update(_DION_OPTIONS[key](value) if key in _DION_OPTIONS else {key: value})
    if "beta1" in out and "beta2" in out and "betas" not in out:
        out["betas"] = (out.pop("beta1"), out.pop("beta2"))
    return out


def _is_dion(state):
    return "momentum" in state and "recipe" not in state


def _dion(rule, state, group):
    """Renames states of microsoft/dion. Gradients weigh 1 in its momentum of matrices."""
    out = {"step": group.get("step", 0)}
    if rule.name != "muon":
        names = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
        return {**out, **{names[key]: value for key, value in state.items()}}, set()
    out["momentum_buffer"] = state["momentum"].to(torch.float32) * (1.0 - group["mu"])
    if "variance_neuron" in state:
        out["second_momentum_buffer"] = state["variance_neuron"].squeeze(-1)
    return out, set()


def _is_normuon(state):
    rows = state.get("second_momentum_buffer")
    return "recipe" not in state and isinstance(rows, torch.Tensor) and rows.shape[-1:] == (1,)


def _normuon(rule, state, group):
    """Drops the last dimension of NorMuon's moments of rows, which is 1."""
    return {**state, "second_momentum_buffer": state["second_momentum_buffer"].squeeze(-1)}, set()


def _normuon_group(rule, group):
    out = dict(group)
    if rule.name == "muon" and "beta2" in group:
        out["row_beta"] = out.pop("beta2")
    return out


def _bitsandbytes_group(rule, group):
    return {
        **{key: value for key, value in group.items() if key not in _BNB_GROUP},
        **{
            new: group[old] or 0.0
            for old, new in _BNB_GROUP.items()
            if old in group and new in rule.hypers
        },
    }


#: name; recognizes a state; returns the plain state and the names of what is lost; renames the
#: options of a group, or None
PACKAGES = (
    ("bitsandbytes", _is_bitsandbytes, _bitsandbytes, _bitsandbytes_group),
    ("torchao", _is_torchao, _torchao, None),
    ("flashoptim", _is_flashoptim, _flashoptim, None),
    ("prodigyopt", _is_prodigyopt, _prodigyopt, lambda rule, group: prodigyopt_group(group)),
    ("another Adafactor or CAME", _is_factored, _plain_factored, factored_group),
    ("dion", _is_dion, _dion, lambda rule, group: dion_group(group)),
    ("NorMuon", _is_normuon, _normuon, _normuon_group),
)


class Translator:
    """Translates the states of parameters, one after the other.

    renames    the functions that rename the options of groups, by package
    lost       the names of what cannot be loaded
    """

    def __init__(self):
        self.renames, self.lost = {}, set()

    def plain(self, rule, state, group, whole=lambda value: value):
        """Returns a plain state in place of another package's, and any other state as it is.
        whole(value) returns the tensor that a tensor of the state stands for."""
        row = next((row for row in PACKAGES if row[1](state)), None)
        if row is None:
            return state
        state = {key: whole(value) for key, value in state.items()}
        state, lost = row[2](rule, state, group)
        self.renames[row[0]] = row[3]
        self.lost |= lost
        return state

    def warn(self):
        """Warns once about what is lost."""
        if self.lost:
            warn(
                f"these states of {' and '.join(sorted(self.renames))} cannot be loaded and are"
                f" left out: {', '.join(sorted(self.lost))}"
            )


def translate(rules, state_dict):
    """Returns a state dictionary with plain states in place of another package's. Warns once about
    what is lost. `rules` has the row of the rule of each group; the first is that of a group that
    this optimizer does not have."""
    states, translator = {}, Translator()
    groups = state_dict["param_groups"]
    rules = [*rules, *[rules[0]] * (len(groups) - len(rules))]
    place_of = {key: place for place, group in enumerate(groups) for key in group["params"]}
    for key, state in state_dict["state"].items():
        if isinstance(state, dict):
            place = place_of.get(key)
            group = {} if place is None else groups[place]
            state = translator.plain(rules[place or 0], state, group)
        states[key] = state
    if not translator.renames:
        return state_dict
    for rename in filter(None, translator.renames.values()):
        groups = [rename(rule, group) for rule, group in zip(rules, groups)]
    translator.warn()
    return {**state_dict, "state": states, "param_groups": groups}
