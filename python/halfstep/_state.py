"""Saved states: loading without casts, conversion between formats, plain torch states, safetensors.

torch's own loader casts every state tensor to the dtype of its parameter, which would turn 8-bit codes and fp32 scales into
BF16. Here states pass through it wrapped, so that its checks and hooks all run and its casts do not.
"""
import os
import tempfile
import warnings
from collections import OrderedDict, defaultdict

import torch

from . import _abi
from ._abi import lib

#: group keys that only this package has
OURS = ("weights", "states", "decay", "reference_lr", "seed", "ids", "recipes", "group_steps", "skipped_steps", "last_norm",
        "centralize", "param_names")


#: rules whose optimizers in torch save no count of steps
_UNCOUNTED = ("sgd", "muon")


class _Wrapped:
    """A state on its way through torch's loader, which leaves alone what is no tensor, dictionary or sequence."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def unwrap(states):
    out = defaultdict(dict)
    for p, value in states.items():
        out[p] = _copy(value.value) if isinstance(value, _Wrapped) else value
    return out


def _copy(value):
    """A copy that shares no memory with the dictionary it came from: steps write in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value


def load(optimizer, state_dict, torch_load):
    """optimizer.load_state_dict(): torch_load is that of the base class."""
    before = [dict(group) for group in optimizer.param_groups]

    def wrap(_, given):
        given = dict(given)
        given["state"] = {k: v if isinstance(v, _Wrapped) else _Wrapped(v) for k, v in given["state"].items()}
        groups = []
        for group, own in zip(given["param_groups"], before):
            group = dict(group)
            # Missing values, and formats, are the constructor's.
            for key, value in own.items():
                if key in ("weights", "states", "fused", "foreach", "capturable", "differentiable"):
                    group[key] = value
                elif key not in ("params", "recipes", "group_steps", "skipped_steps", "last_norm"):
                    group.setdefault(key, value)
            if isinstance(own.get("lr"), torch.Tensor) and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = torch.tensor(float(group["lr"]), dtype=own["lr"].dtype, device=own["lr"].device)
            groups.append(group)
        # A wrong number of groups is for torch to complain about.
        given["param_groups"] = groups + list(given["param_groups"][len(before):])
        return given

    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict(hooks)
    optimizer._optimizer_load_state_dict_pre_hooks["halfstep"] = wrap
    kept = (optimizer.state, optimizer.param_groups, optimizer._watch)
    # The dictionary may share this optimizer's own, edited; what the handle knows must not go over it.
    state_dict = dict(state_dict)
    state_dict["state"] = {k: dict(v) if isinstance(v, dict) else v for k, v in state_dict["state"].items()}
    optimizer._sync()
    try:
        torch_load(state_dict)
        _check(optimizer)
    except BaseException:
        optimizer.state, optimizer.param_groups, optimizer._watch = kept
        optimizer._engine = None
        raise
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks
    _warn_of_conversions(optimizer)


def step_count(state, name, default=0):
    """state["step"] as a float; ValueError where it is no count."""
    step = state.get("step")
    if step is None:
        return float(default)
    try:
        count = float(step)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not 0.0 <= count < 2.0 ** 63:
        raise ValueError(f"halfstep: state 'step' of parameter {name!r} is {step!r}, which counts nothing")
    return count


def _check(optimizer):
    """Raises ValueError where loaded states cannot be what they claim, before anything depends on them."""
    rule = _abi.rules[optimizer.rule]
    names = {s.name for s in rule.states}
    streams = {}
    for g, group in enumerate(optimizer.param_groups):
        optimizer._check_options(group)
        hypers = optimizer._hypers(group)
        for i, p in enumerate(group["params"]):
            state, name, recipe = optimizer.state.get(p), optimizer._name_of(g, i), group["recipes"][i]
            if not state or p.numel() == 0:
                continue
            if not isinstance(state, dict):
                raise ValueError(f"halfstep: the state of parameter {name!r} is a {type(state).__name__}, not a dictionary")
            step_count(state, name)
            for key in ("state_steps", "full_steps", "writes"):
                if not isinstance(state.get(key, 0), int) or state.get(key, 0) < 0:
                    raise ValueError(f"halfstep: state {key!r} of parameter {name!r} is {state[key]!r}, which counts nothing")
            for key in rule.scalars:
                value = state.get(key, 0.0)
                if not isinstance(value, (int, float)) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                    raise ValueError(f"halfstep: state {key!r} of parameter {name!r} is {state[key]!r}, not a number")
            if recipe is None:
                # Of torch, or of this package before it kept recipes: the streams themselves are as good.
                there = optimizer._full_recipe(g, i)
                if any(key in state and key not in names for key in (s.key for s in _streams(streams, there, hypers, p, name))):
                    recipe = group["recipes"][i] = there
            if recipe is not None:
                if not isinstance(recipe, str) or recipe.partition("/")[0] != optimizer.rule:
                    raise ValueError(f"halfstep: the states of parameter {name!r} are of the recipe {recipe!r}; this optimizer is "
                                     f"{optimizer.rule}")
                for s in _streams(streams, recipe, hypers, p, name):
                    if s.key in state:
                        adopt(state[s.key], s, name, False)
                    elif s.extra:
                        raise ValueError(f"halfstep: parameter {name!r} has no state {s.key!r}, which {recipe} needs")
            for key in names & set(state):
                value = state[key]
                if value is not None and (not isinstance(value, torch.Tensor) or recipe is None and value.shape != p.shape):
                    found = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                    raise ValueError(f"halfstep: state {key!r} of parameter {name!r} is {found}, the parameter of shape "
                                     f"{tuple(p.shape)}")


def _streams(known, recipe, hypers, p, name):
    key = (recipe, tuple(p.shape), tuple(hypers.items()))
    if key not in known:
        codec = _Codec(recipe, hypers, tuple(p.shape), name)
        codec.close()
        known[key] = codec.streams
    return known[key]


def _warn_of_conversions(optimizer):
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            there = group["recipes"][i]
            if there is None or p not in optimizer.state:
                continue
            here = optimizer._full_recipe(g, i)
            if there != here:
                warnings.warn(f"halfstep: the loaded states are {there}, this optimizer is {here}; they are converted at the "
                              "next step", UserWarning, stacklevel=4)
                return


# ---- Conversion ----


class _Codec:
    """One tensor in a handle of its own, to decode or encode its slots."""

    def __init__(self, recipe, hypers, shape, name):
        from . import _engine  # which needs this module in turn
        self.engine = _engine
        self.rule = _abi.rules[recipe.partition("/")[0]]
        self.handle = _engine.create_handle(1, 0)
        try:
            known = {k: v for k, v in hypers.items() if k in self.rule.hypers}
            group = _engine.add_group(self.handle, recipe, known, {})
            self.index = _engine.add_tensor(self.handle, group, name, 0, shape, "f32")
            self.streams, _ = _engine.streams_of(self.handle, self.index, self.rule, shape)
        except BaseException:
            self.close()
            raise
        self.shape = shape

    def close(self):
        lib.halfstep_destroy(self.handle)

    def bind(self, tensors):
        self.engine.bind_streams(self.handle, self.index, self.streams, tensors)

    def read(self, slot, data=None):
        return self.engine.read_rows(lib.halfstep_read_slot, self.handle, self.index, self.shape, slot, data)

    def write(self, slot, values, data=None):
        self.engine.write_rows(self.handle, self.index, slot, data, values.contiguous())


def adopt(tensor, stream, name, take=True):
    """A state tensor of another device or layout as the stream wants it; ValueError where it is something else."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != stream.dtype or tuple(tensor.shape) != stream.shape \
            or tensor.device.type == "meta" or tensor.layout != torch.strided:
        found = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            found = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, {tensor.layout}"
        raise ValueError(f"halfstep: state {stream.key!r} of parameter {name!r} is {found}, not {stream.dtype} of shape "
                         f"{stream.shape}")
    return tensor.detach().cpu().contiguous() if take else tensor


@torch.no_grad()
def convert(optimizer, m, state, old):
    """The streams of member m in its recipe, from `state`, which is of the recipe `old`, or plain (None)."""
    group = optimizer.param_groups[m.group]
    hypers = optimizer._hypers(group)
    values, weight = {}, None
    if old is None:
        names = {s.name for s in _abi.rules[optimizer.rule].states}
        for key, value in state.items():
            if key in names and isinstance(value, torch.Tensor):
                values[key] = value.detach().to("cpu", torch.float32).reshape(m.shape)
    else:
        source = _Codec(old, hypers, m.shape, m.name)
        try:
            streams = {s.key: s for s in source.streams}
            missing = [s for s in source.streams if s.key not in state]
            tensors = {key: adopt(state[key], s, m.name) for key, s in streams.items() if key in state}
            # States that this optimizer's hyper-parameters need and the file's did not start at zero.
            tensors.update((s.key, torch.zeros(s.shape, dtype=s.dtype)) for s in missing)
            source.bind(tensors)
            skip = {s.key for s in missing}
            for i, s in enumerate(source.rule.states):
                if s.name in streams and s.name not in skip:
                    values[s.name] = source.read(2 + i)
            if "weight.extra" in streams and "weight.extra" not in skip:
                weight = source.read(0, m.p.detach().contiguous().data_ptr())
        finally:
            source.close()
    target = _Codec(m.recipe, hypers, m.shape, m.name)
    try:
        # The same tensor, so the same streams.
        made = {}
        for s in m.streams:
            made[s.key] = torch.zeros(s.shape, dtype=s.dtype) if s.key in values else s.initial(m.p)
        target.bind(made)
        for i, s in enumerate(target.rule.states):
            if s.name in values and s.name in made:
                target.write(2 + i, values[s.name])
        if weight is not None and "weight.extra" in made:
            held = m.p.detach().contiguous()
            target.write(0, weight, held.data_ptr())
            m.p.copy_(held)
    finally:
        target.close()
    for key in [k for k in state if (k.endswith((".extra", ".scale"))) and k not in made]:
        del state[key]
    return made


def empty(recipe, hypers, p):
    """The states of a parameter without elements: those that any other would have, as empty."""
    codec = _Codec(recipe, hypers, (1,), "empty")
    codec.close()
    return {s.key: torch.empty(p.shape, dtype=s.dtype) for s in codec.streams if not s.extra}


# ---- Plain torch states ----


@torch.no_grad()
def plain(optimizer):
    """optimizer.torch_state_dict()"""
    rule = _abi.rules[optimizer.rule]
    packed, states, flat, place = [], {}, 0, {}
    optimizer._sync()
    for group in optimizer.param_groups:
        for p in group["params"]:
            place.setdefault(p, flat)
            flat += 1
            held = optimizer.state.get(p)
            if held:
                out = {"step": held["step"].clone()} if "step" in held and optimizer.rule not in _UNCOUNTED else {}
                for s in rule.states:
                    if s.name in held:
                        out[s.name] = optimizer.read_state(p, s.name)
                states[place[p]] = out
        packed.append({**{k: v for k, v in group.items() if k not in OURS and k != "params"},
                       "params": [place[p] for p in group["params"]]})
    return {"state": states, "param_groups": packed}


# ---- safetensors ----


def save_safetensors(optimizer, path):
    """optimizer.save_safetensors()"""
    from safetensors.torch import save_file
    optimizer._notice()
    optimizer._sync()
    tensors, metadata = {}, {"format": "halfstep optimizer 1", "rule": optimizer.rule, "seed": str(optimizer.seed)}
    rule = _abi.rules[optimizer.rule]
    first = optimizer.param_groups[0]
    metadata["generator"] = optimizer.generator or _abi.choices("generator")[0]
    metadata["skipped_steps"] = str(first.get("skipped_steps", 0))
    metadata["gradient_norm"] = float(first.get("last_norm", 0.0)).hex()
    for g, group in enumerate(optimizer.param_groups):
        for key, value in optimizer._hypers(group).items():
            metadata[f"group.{g}.{key}"] = repr(float(value))
        for key, value in optimizer._choices(group).items():
            metadata[f"group.{g}.{key}"] = value
        metadata[f"group.{g}.steps"] = str(group.get("group_steps", 0))
        for i, p in enumerate(group["params"]):
            name, held = optimizer._name_of(g, i), optimizer.state.get(p)
            metadata[f"group_of.{name}"] = str(g)
            if not held:
                continue
            recipe = group["recipes"][i]
            if recipe is None:
                raise ValueError(f"halfstep: the states of {name!r} were loaded and not used yet; make a step first")
            metadata[f"recipe.{name}"] = recipe
            steps = held.get("state_steps", int(held["step"]))
            metadata[f"counters.{name}"] = (f"state_steps {steps} full_steps {held.get('full_steps', steps)} "
                                            f"writes {held.get('writes', steps)} id {group['ids'][i]}")
            scalars = [f"{s} {float(held[s]).hex()}" for s in rule.scalars if s in held]
            if scalars:
                metadata[f"scalars.{name}"] = " ".join(scalars)
            for key, value in held.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    if f"{name}/{key}" in tensors:
                        raise ValueError(f"halfstep: two parameters are called {name!r}")
                    tensors[f"{name}/{key}"] = value.detach().contiguous()
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=".halfstep-", dir=folder)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def load_safetensors(optimizer, path):
    """optimizer.load_safetensors()"""
    from safetensors import safe_open
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != "halfstep optimizer 1":
            raise ValueError(f"halfstep: {path} holds no optimizer of halfstep")
        if "rule" not in metadata:
            metadata["rule"] = metadata.get("recipe", "").partition("/")[0]
        if metadata["rule"] != optimizer.rule:
            raise ValueError(f"halfstep: {path} is of {metadata['rule']}, this optimizer of {optimizer.rule}")
        keys = defaultdict(list)
        for key in file.keys():
            name, _, stream = key.rpartition("/")
            keys[name].append((stream, key))
        found = optimizer.state_dict()
        found = {"state": {}, "param_groups": [dict(group) for group in found["param_groups"]]}
        flat = 0
        for g, group in enumerate(optimizer.param_groups):
            saved = found["param_groups"][g]
            saved["ids"], saved["recipes"] = list(saved["ids"]), list(saved["recipes"])
            # The C program's files do not say which tensor is of which group; theirs are then taken in order.
            source = str(g)
            for i, p in enumerate(group["params"]):
                name = optimizer._name_of(g, i)
                source = metadata.get(f"group_of.{name}", source)
                counters = metadata.get(f"counters.{name}")
                if counters is not None:
                    words = counters.split()
                    numbers = {words[k]: int(words[k + 1]) for k in range(0, len(words), 2)}
                    saved["ids"][i] = numbers.pop("id")
                    saved["recipes"][i] = _abi.recipe_full(metadata.get(f"recipe.{name}") or metadata["recipe"])
                    state = {stream: file.get_tensor(key) for stream, key in keys[name]}
                    state["step"] = torch.tensor(float(numbers["state_steps"]), dtype=torch.float32)
                    state.update(numbers)
                    words = metadata.get(f"scalars.{name}", "").split()
                    state.update((words[k], float.fromhex(words[k + 1])) for k in range(0, len(words), 2))
                    found["state"][flat] = state
                elif p in optimizer.state:
                    raise ValueError(f"halfstep: {path} has nothing of parameter {name!r}")
                flat += 1
            saved["group_steps"] = int(metadata.get(f"group.{source}.steps", 0))
            _take_hypers(optimizer, saved, metadata, source)
        found["param_groups"][0]["skipped_steps"] = int(metadata.get("skipped_steps", 0))
        found["param_groups"][0]["last_norm"] = float.fromhex(metadata.get("gradient_norm", "0x0p0"))
        for saved in found["param_groups"]:
            saved["seed"] = int(metadata.get("seed", saved.get("seed", 0)))
        generator = metadata.get("generator", optimizer.generator)
        if generator is not None and generator not in _abi.choices("generator"):
            raise ValueError(f"halfstep: {path} draws random bits from {generator!r}, which this library does not have")
    optimizer.load_state_dict(found)
    optimizer.generator = generator


def _take_hypers(optimizer, saved, metadata, source):
    """Hyper-parameters of one group of the file, under the names that the group has them by."""
    betas = list(saved["betas"]) if saved.get("betas") is not None else []
    for name in _abi.rules[optimizer.rule].hypers:
        text = metadata.get(f"group.{source}.{name}")
        if text is None:
            continue
        value = float(text)
        if name in _abi.BETAS and betas:
            place = _abi.BETAS.index(name)
            if place < len(betas):
                betas[place] = value
        elif name in saved and not isinstance(saved[name], torch.Tensor):
            saved[name] = bool(value) if isinstance(saved[name], bool) else value
        elif name in saved:
            saved[name] = torch.tensor(value, dtype=saved[name].dtype)
    if betas:
        saved["betas"] = tuple(betas)
