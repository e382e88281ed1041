"""Optimizers in safetensors files, in the layout of the library's checkpoints
(docs/checkpoints.md)."""

import math
import os
import re
import secrets
import stat
import tempfile
from collections import defaultdict

import torch

from .._library import abi
from .._settings import naming
from .._tensors import sharding
from .._tensors.matrices import Laid, how_of, lay, rows_of
from .._tensors.sharding import stored
from . import layout

FORMAT = "halfstep optimizer 1"
#: what load() advises beside a file that it cannot read
_OWN = "give a file that save_safetensors() wrote"


# ---- Writing -------------------------------------------------------------------------------------


def _rules(groups):
    """Returns the names of the rules of all groups, as the C library lists them."""
    return ", ".join(dict.fromkeys(groups.row_of(group).name for group in groups))


def _tensors(groups, names):
    """Returns the tensors and the metadata of the file."""
    first = groups[0]
    metadata = {
        "format": FORMAT,
        "rule": _rules(groups),
        "seed": str(first.get("seed", 0) % 2**64),
        "generator": first["generator"],
        "skipped_steps": str(first.get("skipped_steps", 0)),
        "gradient_norm": repr(float(first.get("last_norm", 0.0))),
    }
    tensors = {}
    for g, group in enumerate(groups):
        rule = groups.row_of(group)
        small = {"step", *layout.numbers_of(rule)}
        for key, value in groups.options.hypers(group).items():
            metadata[f"group.{g}.{key}"] = repr(float(value))
        for key, value in groups.options.choices(group).items():
            metadata[f"group.{g}.{key}"] = value
        metadata[f"group.{g}.steps"] = str(group.get("group_steps", 0))
        for i, p in enumerate(group["params"]):
            name, held = names.of(g, i), groups.state.get(p)
            metadata[f"group_of.{name}"] = str(g)
            if not held:
                continue
            recipe = layout.recipe_of(held, name)
            if recipe is None:
                raise ValueError(
                    f"halfstep: the states of {name!r} were loaded and not used yet; make a step"
                    " first"
                )
            metadata[f"recipe.{name}"] = recipe
            counts = {key: layout.take_number(held, key, name) for key in layout.COUNTERS}
            counts["id"] = layout.take_number(held, "id", name) % 2**64
            metadata[f"counters.{name}"] = " ".join(
                f"{key} {value}" for key, value in counts.items()
            )
            scalars = [
                f"{key} {layout.take_number(held, key, name)!r}"
                for key in layout.scalars_of(rule)
                if key in held
            ]
            if scalars:
                metadata[f"scalars.{name}"] = " ".join(scalars)
            for key, value in held.items():
                if isinstance(value, torch.Tensor) and key not in small:
                    key = f"{name}/{key[: -len('.codes')] if key.endswith('.codes') else key}"
                    if key in tensors:
                        raise ValueError(
                            f"halfstep: two parameters have the name {name!r}; in a file each needs"
                            " its own"
                        )
                    tensors[key] = value.detach().contiguous()
    return tensors, metadata


def _sync(path, flags):
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path, write):
    """Calls `write` for a file beside `path` and moves it there, as halfstep_write_file_atomic()
    does. Follows a symbolic link and keeps the mode of an existing file. Writes in place if `path`
    is not a regular file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        with tempfile.TemporaryDirectory() as folder:
            whole = os.path.join(folder, "whole")
            write(whole)
            with open(whole, "rb") as source, open(path, "wb", buffering=0) as target:
                while piece := memoryview(source.read(1 << 24)):
                    while piece:
                        piece = piece[target.write(piece) :]
        return
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".halfstep-{os.getpid()}-{secrets.token_hex(8)}")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
    )  # the umask applies
    try:
        mode = stat.S_IMODE((os.fstat(descriptor) if status is None else status).st_mode)
        os.close(descriptor)
        write(temporary)
        os.chmod(temporary, mode)
        _sync(temporary, os.O_RDWR)
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    _sync(folder, os.O_RDONLY)


def _refuse_parts(params):
    sharding.refuse(
        params,
        "a safetensors file",
        "torch.distributed.checkpoint saves them, for any number of ranks",
    )


def save(parts, path):
    """Writes the optimizer that has these parts to a file."""
    from safetensors.torch import save_file

    _refuse_parts(parts.groups.params())
    parts.saving.sync(decides=True)
    if parts.cache.store is not None:
        _replace(os.fspath(path), parts.store.save)
        return
    tensors, metadata = _tensors(parts.groups, parts.names)
    _replace(os.fspath(path), lambda temporary: save_file(tensors, temporary, metadata))


# ---- Reading -------------------------------------------------------------------------------------


def count(text):
    """Returns the whole number that a text spells (docs/checkpoints.md)."""
    if not re.fullmatch("0|[1-9][0-9]{0,19}", text) or int(text) >= 2**64:
        raise ValueError
    return int(text)


def number(text):
    """Returns the double that a text spells (docs/checkpoints.md)."""
    spelled = re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", text)
    if not spelled or len(text) > 64 or not math.isfinite(float(text)):
        raise ValueError
    return float(text)


def _needed(metadata, key, path):
    """Returns a text of the metadata. Raises ValueError if it is missing."""
    if key not in metadata:
        raise ValueError(
            f"halfstep: {path} has no {key!r} in its metadata: take a file that is whole"
        )
    return metadata[key]


def parsed(metadata, key, convert, path, *default):
    """Returns a value of the metadata, or the default if it is missing. Raises ValueError if the
    value cannot be read, or if it is missing and there is no default."""
    if default and key not in metadata:
        return default[0]
    text = _needed(metadata, key, path)
    try:
        return convert(text)
    except ValueError:
        raise ValueError(f"halfstep: {key!r} of {path} cannot be read: {text!r}") from None


def _pairs(convert, known):
    """Returns a function that reads "NAME VALUE NAME VALUE" into a dictionary. Each name must be
    known, and may come once."""

    def read(text):
        words = text.split(" ")
        names = words[::2]
        if len(words) % 2 or len(set(names)) != len(names) or not known.issuperset(names):
            raise ValueError
        return {name: convert(value) for name, value in zip(names, words[1::2])}

    return read


def _shaped(tensor, laid, over_columns=False):
    """Returns a tensor of the file in the shape of a parameter, as the library takes it. A program
    in C may have stored only its rows, or the rows of all matrices of a stack. `over_columns`: the
    tensor is a vector over columns."""
    shape = tuple(tensor.shape)
    if over_columns:
        fits = isinstance(laid, Laid) and shape == (math.prod(laid.columns),)
        return tensor.reshape(laid.columns) if fits else tensor
    if shape in (rows_of(tuple(laid)), rows_of(laid)):
        return tensor.reshape(tuple(laid))
    if isinstance(laid, Laid) and len(shape) < 3 and shape[:1] == laid.grid[:1]:
        return tensor.reshape(*laid.lines, *shape[1:])
    return tensor


def _state(file, path, metadata, name, laid, planes):
    """Returns the state of one parameter, or None if the file has none."""
    counted = [*layout.COUNTERS, "id"]
    numbers = parsed(metadata, f"counters.{name}", _pairs(count, set(counted)), path, None)
    if numbers is None:
        return None
    if list(numbers) != counted:
        raise ValueError(
            f"halfstep: 'counters.{name}' of {path} has {' '.join(numbers)}; it must have"
            f" {' '.join(counted)}"
        )
    recipe = _needed(metadata, f"recipe.{name}", path)
    try:
        packed = layout.pack_recipe(abi.recipe_full(recipe))
    except ValueError:
        raise ValueError(
            f"halfstep: the states of parameter {name!r} in {path} are of the recipe {recipe!r},"
            " which this library does not have"
        ) from None
    if not numbers["id"]:
        raise ValueError(
            f"halfstep: 'counters.{name}' of {path} has the id 0; ids are from 1 to 2**64 - 1"
        )
    rule, key = abi.rules[recipe.partition("/")[0]], f"scalars.{name}"
    scalars = parsed(metadata, key, _pairs(number, set(layout.scalars_of(rule))), path, {})
    lost = [scalar for scalar in rule.scalars if scalar not in scalars]
    if lost and (key in metadata or numbers["state_steps"] and math.prod(laid)):
        raise ValueError(f"halfstep: {key!r} of {path} lacks {' '.join(lost)}")
    state = {
        "step": numbers["state_steps"],
        **{key: numbers[key] for key in layout.COUNTERS},
        "id": numbers["id"],
        "recipe": packed,
        **scalars,
    }
    columns = {s.name for s in rule.states if s.extent == abi.EXTENT_COLUMNS}
    for plane, key in planes:
        if plane in state:
            raise ValueError(f"halfstep: {path} has a tensor {key!r}, where a number belongs")
        tensor = _shaped(file.get_tensor(key), laid, plane in columns)
        is_codes = "." not in plane and not tensor.is_floating_point()
        state[plane + ".codes" if is_codes else plane] = tensor
    return state


def _weight(file, path, name, p, laid, key):
    """Returns the weight that a single file of the C library holds beside the states."""
    weight, held = _shaped(file.get_tensor(key), laid), stored(p)
    if weight.dtype != held.dtype or weight.shape != held.shape:
        raise ValueError(
            f"halfstep: {key!r} of {path} is {weight.dtype} of shape {tuple(weight.shape)},"
            f" parameter {name!r} {held.dtype} of shape {tuple(held.shape)}"
        )
    return weight


def _named(ours, metadata, path):
    """Returns the name in the file for each of our names. Fails if the file lists other tensors
    than this optimizer has."""
    told = sorted(
        {key.partition(".")[2] for key in metadata if key.startswith(("counters.", "group_of."))}
    )
    found = naming.match_file(told, ours, os.fspath(path))
    return {name: told[place] for name, place in zip(ours, found)}


def damaged(path, error, advice):
    """Returns the error for a file that cannot be read."""
    first = re.split(r"\.\s|\n", str(error).strip())[0] or type(error).__name__
    return ValueError(f"halfstep: {path} is damaged or no checkpoint ({first}); {advice}")


def load(parts, path, numbers=False):
    """Reads a file for the optimizer that has these parts. Returns the state dictionary, and
    (parameter, weight) for each weight in the file. `numbers`: states have their numbers only."""
    # A DTensor of one rank is there as a whole.
    _refuse_parts([p for p in parts.groups.params() if sharding.is_divided(p)])
    return _read(parts, path, _OWN, numbers)


def load_states(parts, path, advice):
    """Returns the state dictionary of the states in a file, as a whole on every rank that has a
    part of the parameters: its memory is that of the file. `advice` ends the error for a file that
    cannot be read."""
    return _read(parts, path, advice, weights=False)[0]


def _read(parts, path, advice, numbers=False, weights=True):
    from safetensors import SafetensorError

    try:
        return _load(parts, path, numbers, weights)
    except SafetensorError as error:
        raise damaged(path, error, advice) from None


def _load(parts, path, numbers, with_weights):
    from safetensors import safe_open

    groups, names = parts.groups, parts.names
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"halfstep: {path} holds no optimizer of halfstep; {_OWN}")
        rule = _needed(metadata, "rule", path)
        if sorted(rule.split(", ")) != sorted(_rules(groups).split(", ")):
            raise ValueError(
                f"halfstep: {path} is of the rule {rule!r}, this optimizer of {_rules(groups)!r};"
                " make it with the rule of the file"
            )
        generator = _needed(metadata, "generator", path)
        abi.check_choice("generator", generator, f" in {path}")
        planes, weight_keys, weights = defaultdict(list), {}, []
        for key in file.keys():
            name, _, plane = key.rpartition("/")
            if plane == "weight":
                weight_keys[name] = key
            else:
                planes[name].append((plane, key))
        ours = [names.of(g, i) for g, i, _ in groups.members()]
        named = _named(ours, metadata, path)
        places = {p: i for i, p in enumerate(groups.params())}
        found = {
            "state": {},
            "param_groups": [
                {**group, "params": [places[p] for p in group["params"]]} for group in groups
            ],
        }
        for g, (group, saved) in enumerate(zip(groups, found["param_groups"])):
            source = None
            for i, p in enumerate(group["params"]):
                name = named[names.of(g, i)]
                laid = lay(groups.row_of(group).name, p.shape, how_of(group))
                others, source = source, parsed(metadata, f"group_of.{name}", count, path)
                if others not in (None, source):
                    raise ValueError(
                        f"halfstep: {path} has {name!r} in group {source}, and others of its group"
                        f" here in group {others}: put it into another group"
                    )
                if with_weights and name in weight_keys:
                    weights.append((p, _weight(file, path, name, p, laid, weight_keys[name])))
                some = () if numbers else planes[name]
                state = _state(file, path, metadata, name, laid, some)
                if state is not None:
                    found["state"][places[p]] = state
                elif planes[name] or p in groups.state and parts.cache.store is None:
                    raise ValueError(f"halfstep: {path} has no counters of parameter {name!r}")
            saved["skipped_steps"] = parsed(metadata, "skipped_steps", count, path)
            saved["last_norm"] = parsed(metadata, "gradient_norm", number, path)
            saved["seed"] = parsed(metadata, "seed", count, path)
            saved["generator"] = generator
            if source is not None:  # a group without parameters continues none of the file
                saved["group_steps"] = parsed(metadata, f"group.{source}.steps", count, path)
                _take_hypers(groups, saved, metadata, source, path)
    return found, weights


def _take_hypers(groups, saved, metadata, source, path):
    """Sets the hyper-parameters of one group from the file."""
    for name in groups.row_of(saved).hypers:
        value = parsed(metadata, f"group.{source}.{name}", number, path, None)
        if value is not None:
            groups.options.take_hyper(saved, name, value)
