"""States that other packages saved, as plain states under torch's names: decoded exactly as the package decodes them, in fp32.

A package is a row of `PACKAGES`: how one parameter's state is recognized, and what it is.
"""
import warnings

import torch

from . import _abi

#: bitsandbytes keeps what torch's loader must not cast in a dictionary of its own
_BNB_WRAPPED = "__bnb_optimizer_quant_state__"
#: elements of its blocks
_BNB_BLOCK = 256
#: of the rules that bitsandbytes has: the states in its first tensor, or its two halves, and in its second
_BNB_RULES = {rule: (("exp_avg",), ("exp_avg_sq",)) for rule in ("adam", "adamw", "lamb")}
_BNB_RULES |= {"lion": (("exp_avg",),), "ademamix": (("exp_avg", "exp_avg_slow"), ("exp_avg_sq",))}
#: what it has in every group, and what AdEMAMix calls it here
_BNB_GROUP = {"alpha": "alpha", "t_alpha": "alpha_warmup", "t_beta3": "beta3_warmup"}
#: elements that share a scale in FlashOptim
_FLASH_BLOCK = 32


def _is_bitsandbytes(state):
    return _BNB_WRAPPED in state or "state1" in state


def _bitsandbytes(rule, state):
    """`state1`, `state2`: fp32, or codes of a map of 256 values with a scale for 256 elements (or one for all, before 0.39)."""
    held = {**state, **state.get(_BNB_WRAPPED, {})}
    if rule.name not in _BNB_RULES:
        raise ValueError(f"halfstep: states of bitsandbytes can be loaded by {', '.join(_BNB_RULES)}, not by {rule.name}")
    out, lost = {"step": held.get("step", 0)}, set()
    for i, names in enumerate(_BNB_RULES[rule.name], 1):
        codes = held.get(f"state{i}")
        if codes is None:
            continue
        if codes.dtype != torch.uint8:
            values = codes.to(torch.float32)
        else:
            values = held[f"qmap{i}"].to(torch.float32)[codes.int()].reshape(len(names), -1)
            if f"absmax{i}" in held:  # of the blocks of each half
                scales = held[f"absmax{i}"].to(torch.float32).reshape(len(names), -1)
                values *= scales.repeat_interleave(_BNB_BLOCK, 1)[:, :values.shape[1]]
            else:
                values *= held[f"max{i}"].to(torch.float32)
            values = values.reshape(codes.shape)
        out.update(zip(names, values if len(names) > 1 else (values,)))
    for key, what in (("gnorm_vec", "percentile clipping"), ("unorm_vec", "max_unorm")):
        if isinstance(held.get(key), torch.Tensor) and held[key].any():
            lost.add(f"{key} ({what})")
    return out, lost


def _is_torchao(state):
    return any(isinstance(v, torch.Tensor) and type(v) is not torch.Tensor and hasattr(v, "dequantize") and type(v).__module__.startswith("torchao")
               for v in state.values())


def _torchao(rule, state):
    """Tensors of classes of its own, which decode themselves."""
    return {key: value.dequantize().to(torch.float32) if type(value) is not torch.Tensor and hasattr(value, "dequantize") else value
            for key, value in state.items()}, set()


def _is_flashoptim(state):
    return "error_bits" in state or any(isinstance(key, str) and key.endswith("::quantized") for key in state)


def _flashoptim(rule, state):
    """Of each state int8 codes of a soft sign, or uint8 codes of a root, with an fp16 scale for 32 elements, which is seen as BF16 beside
    BF16 weights."""
    out = {key: value for key, value in state.items() if key != "error_bits" and "::" not in str(key)}
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
        values *= scales.to(torch.float32).repeat_interleave(_FLASH_BLOCK)[:values.numel()]
        out[name] = (values if signed else values * values).reshape(codes.shape)
    lost = {"error_bits (bring its weights over by its get_fp32_model_state_dict())"} if "error_bits" in state else set()
    return out, lost


#: name, whether a state is one of its, and (plain state, names of what is left behind)
PACKAGES = (("bitsandbytes", _is_bitsandbytes, _bitsandbytes), ("torchao", _is_torchao, _torchao),
            ("flashoptim", _is_flashoptim, _flashoptim))


def translate(rule_name, state_dict):
    """A state dictionary whose parameters have plain states where another package's were. Says once what is left behind."""
    states, lost, packages = {}, set(), set()
    for key, state in state_dict["state"].items():
        row = next((row for row in PACKAGES if row[1](state)), None) if isinstance(state, dict) else None
        if row is not None:
            state, left = row[2](_abi.rules[rule_name], state)
            packages.add(row[0])
            lost |= left
        states[key] = state
    if not packages:
        return state_dict
    groups = state_dict["param_groups"]
    if "bitsandbytes" in packages:
        known = _abi.rules[rule_name].hypers
        groups = [{**{key: value for key, value in group.items() if key not in _BNB_GROUP},
                   **{new: group[old] or 0.0 for old, new in _BNB_GROUP.items() if old in group and new in known}} for group in groups]
    if lost:
        warnings.warn(f"halfstep: of the states of {' and '.join(sorted(packages))}, {', '.join(sorted(lost))} cannot be carried over",
                      UserWarning, stacklevel=5)
    return {**state_dict, "state": states, "param_groups": groups}
