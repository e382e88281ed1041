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
#: rules of which bitsandbytes keeps the same states in the same order
_BNB_RULES = ("adam", "adamw", "lion", "lamb")
_BNB_GROUP = ("alpha", "t_alpha", "t_beta3")


def _is_bitsandbytes(state):
    return _BNB_WRAPPED in state or "state1" in state


def _bitsandbytes(rule, state):
    """`state1`, `state2`: fp32, or codes of a map of 256 values with a scale for 256 elements (or one for all, before 0.39)."""
    held = {**state, **state.get(_BNB_WRAPPED, {})}
    if rule.name not in _BNB_RULES:
        raise ValueError(f"halfstep: states of bitsandbytes can be loaded by {', '.join(_BNB_RULES)}, not by {rule.name}")
    out, lost = {"step": held.get("step", 0)}, set()
    for i, name in enumerate([s.name for s in rule.states][:2], 1):
        codes = held.get(f"state{i}")
        if codes is None:
            continue
        if codes.dtype != torch.uint8:
            out[name] = codes.to(torch.float32)
            continue
        values = held[f"qmap{i}"].to(torch.float32)[codes.reshape(-1).int()]
        if f"absmax{i}" in held:
            values *= held[f"absmax{i}"].to(torch.float32).repeat_interleave(_BNB_BLOCK)[:values.numel()]
        else:
            values *= held[f"max{i}"].to(torch.float32)
        out[name] = values.reshape(codes.shape)
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


#: name, whether a state is one of its, and (plain state, names of what is left behind)
PACKAGES = (("bitsandbytes", _is_bitsandbytes, _bitsandbytes), ("torchao", _is_torchao, _torchao))


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
    groups = [{key: value for key, value in group.items() if key not in _BNB_GROUP} for group in state_dict["param_groups"]] \
        if "bitsandbytes" in packages else state_dict["param_groups"]
    if lost:
        warnings.warn(f"halfstep: of the states of {' and '.join(sorted(packages))}, {', '.join(sorted(lost))} cannot be carried over",
                      UserWarning, stacklevel=5)
    return {**state_dict, "state": states, "param_groups": groups}
