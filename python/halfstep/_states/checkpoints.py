"""Finds an optimizer's state in what trainers write, and makes it a state dictionary for an
optimizer whose groups may be others.

Nothing here runs code of a file. torch.load() is called with weights_only. The index of a folder of
torch.distributed.checkpoint may name the classes in INDEX only.
"""

import io
import os
import pickle
import re
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch

from .._settings import naming
from .._settings.groups import TOLD, check_generator
from .._tensors import sharding
from .._tensors.torch_private import INDEX
from .._tensors.torch_public import warn
from . import checks, files, foreign, layout
from .checks import is_state, states_in
from .sources import Sources, slices

#: where trainers put an optimizer's state in the dictionary of a file
_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
#: names of files that hold an optimizer's state; the first pattern that fits anything counts
_FILES = (
    r"\.metadata",
    r"optimizer(_0)?\.safetensors",
    r"optimizer(_\d+)?\.(pt|bin)",  # Accelerate's are one for each optimizer
    r"optim_world_size_(\d+)_rank_(\d+)\.pt",  # one for each rank
    r"recipe_state\.pt",
    r".+\.ckpt",
)
_RANKS = _FILES[3]
#: names of folders that hold such a file
_FOLDERS = r"optim|optimizer_\d+|recipe_state|actor"
_KNOWN = (
    "halfstep takes optimizer.pt, optimizer.bin, a .ckpt, recipe_state.pt, optim_world_size_*.pt, a"
    " folder of torch.distributed.checkpoint, a file of save_safetensors(), or a folder with one of"
    " them"
)


# ---- Files and folders ---------------------------------------------------------------------------


def _found(folder):
    """Returns the paths in a folder that hold an optimizer's state, of the first kind that is
    there."""
    names = sorted(os.listdir(folder))
    for pattern in _FILES:
        found = [os.path.join(folder, name) for name in names if re.fullmatch(pattern, name)]
        if found:
            return found
    inner = [os.path.join(folder, name) for name in names if re.fullmatch(_FOLDERS, name)]
    return [path for other in filter(os.path.isdir, inner) for path in _found(other)]


def _paths(path):
    """Returns the file that holds an optimizer's state in a file or folder, or the files of several
    optimizers."""
    if not os.path.isdir(path):
        return [path]
    found = _found(path)
    several = any(
        all(re.fullmatch(pattern, os.path.basename(one)) for one in found)
        for pattern in (_FILES[2], _RANKS)
    )
    if len(found) == 1 or several and len(set(map(os.path.dirname, found))) == 1:
        return found
    if found:
        raise ValueError(
            f"halfstep: {path} holds {len(found)} states of optimizers,"
            f" {naming.some([os.path.relpath(one, path) for one in found])}: give the path of one"
        )
    raise ValueError(f"halfstep: {path} holds no state of an optimizer; {_KNOWN}")


def _refused(path, error):
    first = str(error).strip().partition("\n")[0]
    return ValueError(
        f"halfstep: {path} cannot be read without running code of it ({first}); if you trust it,"
        " read it by torch.load(weights_only=False) and give its state to load_state_dict()"
    )


def _load(file, path, **how):
    """Reads a file of torch.save() that holds tensors and plain values only. `how` has more
    arguments of torch.load()."""
    try:
        import torch.distributed.tensor  # noqa: F401  so that its classes are known as safe
    except ImportError:  # a torch without torch.distributed writes none
        pass
    try:
        return torch.load(file, map_location="cpu", weights_only=True, **how)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from None
    except MemoryError:
        raise
    except Exception as error:  # half a file ends in an error of any class
        raise files.damaged(path, error, _KNOWN) from None


class _Index(pickle.Unpickler):
    """Reads the index of a folder of torch.distributed.checkpoint."""

    def find_class(self, module, name):
        if name in INDEX.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of such an index")


def _distributed(path, sources):
    """Reads what does not belong to the model from a folder of torch.distributed.checkpoint.
    Tensors are read when they are needed."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Reader(checkpoint.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            return index

    class Planner(checkpoint.DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            plain[read_item.dest_index.fqn] = _load(value, path)

    class Boxes(checkpoint.DefaultLoadPlanner):
        """Reads a box of each tensor, in place of what a DTensor would take."""

        def __init__(self, box):
            super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
            self.chunk = ChunkStorageMetadata(*map(torch.Size, box))

        def create_local_plan(self):
            held = index.state_dict_metadata
            items = [
                item
                for key in self.state_dict
                for item in create_read_items_for_chunk_list(key, held[key], [self.chunk])
            ]
            return checkpoint.LoadPlan(items)

        def resolve_tensor(self, read_item):
            box = read_item.dest_offsets, read_item.lengths
            return self.state_dict[read_item.dest_index.fqn][slices(box)]

    def load(values, planner):
        checkpoint.load(
            values, storage_reader=Reader(os.path.dirname(path)), planner=planner, no_dist=True
        )

    def read(key, held, box):
        found = torch.empty(tuple(box[1]), dtype=held.properties.dtype, device="cpu")
        if found.numel():
            load({key: found}, Boxes(box))
        return found

    with open(path, "rb") as file:
        try:
            index = _Index(io.BytesIO(file.read())).load()
        except (pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise _refused(path, error) from None
    plain, values, later = {}, {}, {}
    for key, held in index.state_dict_metadata.items():
        if not re.match(r"(.+\.)?(state|param_groups)\b", key):
            continue
        if not isinstance(held, TensorStorageMetadata):
            values[key] = None
        elif not held.size:
            values[key] = torch.empty(held.size, dtype=held.properties.dtype, device="cpu")
        else:
            later[key] = sources.stand_in(
                held.size, held.properties.dtype, partial(read, key, held)
            )
    if values:
        load(values, Planner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return {**values, **plain, **later}


# ---- State dictionaries --------------------------------------------------------------------------


def _unflattened(values):
    """Returns the state dictionary in a flat one, or None if there is none. Keys of a flat one are
    "state.NAME.KEY", and "param_groups.NAME.KEY" for each parameter, "param_groups.NUMBER.KEY" for
    each group, or "param_groups" for all, with a prefix before them."""
    if not all(isinstance(key, str) for key in values):
        return None
    begins = {
        found[1]
        for found in (re.match(r"((?:.+\.)?)param_groups(\.|$)", key) for key in values)
        if found
    }
    if len(begins) != 1:
        return None
    (begin,) = begins
    groups = values.get(begin + "param_groups")
    if groups is None:
        start, end = begin + "param_groups.", ".lr"
        groups = []
        for key in values:
            if key.startswith(start) and key.endswith(end):
                name = key[len(start) : -len(end)]
                own = f"{start}{name}."
                group = {k[len(own) :]: v for k, v in values.items() if k.startswith(own)}
                if "params" not in group:  # else it is one of a list of groups
                    group.update(params=[name], param_names=[name])
                groups.append(group)
    keys = {str(key): key for group in groups for key in group["params"]}
    state, start = {}, begin + "state."
    for key, value in values.items():
        name, rest = key[len(start) :], []
        if not key.startswith(start):
            continue
        while name not in keys and "." in name:
            name, _, last = name.rpartition(".")
            rest.insert(0, last)
        if rest:
            state.setdefault(keys.get(name, name), {})[".".join(rest)] = value
    return {"state": state, "param_groups": groups}


def _dictionary(held, path, rules):
    """Returns the state dictionary in what a file holds. `rules` are those of our groups."""
    if is_state(held):
        return held
    if isinstance(held, dict):
        for key in _KEYS:
            inner = held.get(key)
            if isinstance(inner, (list, tuple)) and len(inner) == 1:
                inner = inner[0]
            if is_state(inner):
                return inner
            if isinstance(inner, dict) and inner and all(map(_is_of_one, inner.values())):
                return _merged(inner)  # an optimizer for each parameter
            found = _unflattened(inner) if isinstance(inner, dict) else None
            if found is not None:
                return found
        found = _unflattened(held)
        if found is not None:
            return found
    several = states_in(held)
    if several:
        return _joined(
            several, rules, "read it by torch.load() and give load_state_dict() one of them"
        )
    raise ValueError(f"halfstep: {path} holds no state of an optimizer; {_KNOWN}")


def _is_of_one(value):
    return is_state(value) and [len(group["params"]) for group in value["param_groups"]] == [1]


def _merged(several):
    """Returns one state dictionary for those of optimizers of one parameter each, by its name."""
    found = {"state": {}, "param_groups": []}
    for name, one in several.items():
        for group in one["param_groups"]:
            found["param_groups"].append({**group, "params": [name], "param_names": [name]})
        for state in one["state"].values():
            found["state"][name] = state
    return found


def _joined(several, rules, advice):
    """Returns one state dictionary for those of several optimizers, by their places. They are in
    the order of our groups' `rules`, because positions count without names. `advice` says what to
    do if they do not fit."""

    def order(one):
        held = [state for state in one["state"].values() if isinstance(state, dict)]
        keys = {str(key).partition(".")[0] for state in held for key in state}
        firsts = [next(iter(rule.roles), None) for rule in rules]
        return next((i for i, first in enumerate(firsts) if first in keys), len(rules))

    found = {"state": {}, "param_groups": [], "pending": []}
    for place, one in sorted(several.items(), key=lambda item: order(item[1])):
        names = one.get("param_names") or [None] * len(one["param_groups"])
        for group, own in zip(one["param_groups"], names):
            keys = group["params"]
            if own is None and any(isinstance(key, str) for key in keys):
                own = keys
            new = {"param_names": own} if own and None not in own else {}
            found["param_groups"].append({**new, **group, "params": [(place, k) for k in keys]})
        found["state"].update({(place, k): value for k, value in one["state"].items()})
        found["pending"] += [(place, k) for k in one.get("pending", ())]
    if len(several) > 1:
        found["several"] = f"{len(several)} optimizers, {', '.join(several)}: {advice}"
    return found


def _whole(value, path):
    """Returns a tensor that a process alone held as a whole."""
    if sharding.is_divided(value):
        raise ValueError(
            f"halfstep: {path} holds one rank's part of the states: give the folder that has those"
            " of all ranks, or save them with torch.distributed.checkpoint"
        )
    return sharding.local(value)


def _of_ranks(paths, load, rules, sources):
    """Returns the state dictionary in the files of several ranks."""
    folder, several = os.path.dirname(paths[0]), {}
    for one in paths:
        count, rank = map(int, re.fullmatch(_RANKS, os.path.basename(one)).groups())
        several[rank] = _dictionary(load(one), one, rules)
        if count != len(paths):
            raise ValueError(
                f"halfstep: {folder} holds states of {len(paths)} ranks, and {count} have saved"
                " them: copy the files of all ranks there"
            )
    return sources.joined(several, folder)


def _read(path, parts, sources):
    """Returns the state dictionary in a file or folder."""
    rules = list(map(parts.groups.row_of, parts.groups))
    divided = any(map(sharding.is_divided, parts.groups.params()))
    path, *more = _paths(os.fspath(path))

    def load(one):
        with open(one, "rb") as file:  # older files cannot be mapped, and are read whole
            mapped = divided and file.read(2) == b"PK"
        return _load(one, one, **({"mmap": True} if mapped else {}))

    if more and re.fullmatch(_RANKS, os.path.basename(path)):
        return _of_ranks([path, *more], load, rules, sources)
    if more:
        several = {
            os.path.basename(one): _dictionary(load(one), one, rules) for one in (path, *more)
        }
        return _joined(several, rules, "give the path of one of them")
    if os.path.basename(path) == ".metadata":
        return _dictionary(_distributed(path, sources), os.path.dirname(path), rules)
    with open(path, "rb") as file:
        begin = file.read(16)
    if begin.startswith((b"PK", b"\x80")):
        return _dictionary(load(path), path, rules)
    if begin.startswith(b"halfstep states"):
        raise ValueError(
            f"halfstep: {path} is a file of store=, which one optimizer has as its own: make one"
            " with store= and this file, and save its state_dict()"
        )
    return files.load_states(parts, path, _KNOWN)


# ---- States for an optimizer ---------------------------------------------------------------------


class _Entry(NamedTuple):
    """A parameter of a state dictionary: its name or None, its state or None, its key there, and
    its group."""

    name: Any
    state: Any
    key: Any
    group: Any


def _entries(found, path):
    """Returns the parameters of a state dictionary in their order."""
    groups, all_names = found["param_groups"], found.get("param_names")
    entries = []
    for g, group in enumerate(groups):
        names = group.get("param_names") or (all_names[g] if all_names else ())
        for i, key in enumerate(group["params"]):
            name = names[i] if i < len(names) else None
            if isinstance(key, str) and not (key.isdigit() and name):
                name = key
            state = found["state"].get(key)
            if isinstance(state, dict):
                state = {k: _whole(value, path) for k, value in layout.flat(state).items()}
            entries.append(_Entry(name, state or None, key, group))
    return entries


def _places(entries, ours, path):
    """Returns the place among the entries of each of our parameters, or None for one without.
    `ours` has (name or None, True if it is frozen) for each group and parameter."""
    theirs, mine = [entry.name for entry in entries], [name for group in ours for name, _ in group]
    if None in mine or None in theirs:
        groups = Counter(id(entry.group) for entry in entries)
        if [len(group) for group in ours] != list(groups.values()):
            who = f"the parameters in {path}" if None in theirs else "this optimizer's parameters"
            raise ValueError(
                f"halfstep: {who} have no names, and the groups there have"
                f" {list(groups.values())} parameters, here {[len(group) for group in ours]}: give"
                " names (model.named_parameters(), or halfstep.name_parameters(model) before), or"
                " make the groups as they were saved"
            )
        warn(
            f"the states of {path} were taken by their positions, because"
            f" {'it has no names' if None in theirs else 'the parameters here have no names'}"
        )
        return list(range(len(mine)))
    some, wanted = list(range(len(theirs))), list(range(len(mine)))
    places = [None] * len(mine)
    if len(theirs) != len(mine):  # some are frozen on one side and not known on the other
        short = naming.without_wrappers
        frozen = {name for group in ours for name, frozen in group if frozen}
        stateless = {short(entry.name): i for i, entry in enumerate(entries) if not entry.state}
        places = [stateless.get(short(name)) for name in mine]
        some = [i for i, entry in enumerate(entries) if entry.state]
        wanted = [i for i in wanted if places[i] is None and mine[i] not in frozen]
        known = {short(mine[i]) for i in wanted}
        ours_there = [i for i in some if short(theirs[i]) in known]
        if len(ours_there) == len(wanted) < len(some):  # another optimizer has the rest
            left = [theirs[i] for i in some if i not in set(ours_there)]
            warn(
                f"{path} also holds states of {naming.some(left)}, which are not of this optimizer"
            )
            some = ours_there
    names = [theirs[i] for i in some], [mine[i] for i in wanted]
    for i, place in zip(wanted, naming.match_file(*names, os.fspath(path))):
        places[i] = some[place]
    return places


def read(parts, path):
    """Returns a state dictionary for the optimizer that has these parts, and the saved names by
    parameter. States, counters, seed and generator are those of a file or folder; groups and
    options are the optimizer's own."""
    groups, names, sources = parts.groups, parts.names, Sources()
    found = _read(path, parts, sources)
    checks.check_keys(found, path)
    for place, group in enumerate(found["param_groups"]):
        check_generator(group, place)
    entries = _entries(found, path)
    if not any(entry.state for entry in entries):
        raise ValueError(
            f"halfstep: {path} holds no states: it was saved before the first step, or without them"
        )
    known = names.all()
    ours = [
        [(name, not p.requires_grad) for name, p in zip(own, group["params"])]
        for own, group in zip(known, groups)
    ]
    try:
        places = iter(_places(entries, ours, path))
    except ValueError as error:
        if "several" not in found:
            raise
        text = str(error).removeprefix(f"{__package__}: ")
        raise ValueError(
            f"halfstep: {path} holds states of {found['several']}. Together they do not fit: {text}"
        ) from None
    out = {"state": {}, "param_groups": [], "pending": []}
    renamed, number, translator = {}, 0, foreign.Translator()
    for g, group in enumerate(groups):
        new, there = {**group, "params": []}, []
        for i, p in enumerate(group["params"]):
            place = next(places)
            if place is not None:
                entry = entries[place]
                there.append(entry.group)
                renamed[p] = entry.name
                if entry.state:
                    state = translator.plain(
                        groups.row_of(group), entry.state, entry.group, sources.whole
                    )
                    out["state"][number] = sources.state_of(groups, group, p, names.of(g, i), state)
                if entry.key in found.get("pending", ()):
                    out["pending"].append(number)
            new["params"].append(number)
            number += 1
        new.update(_counted(group, there or [entries[0].group]))
        out["param_groups"].append(new)
    translator.warn()
    return out, renamed


def _counted(own, theirs):
    """Returns what a group takes of the saved groups that its parameters were in."""
    first = theirs[0]
    new = {key: max(group.get(key, 0) for group in theirs) for key in TOLD}
    if "seed" in first:
        new.update(seed=first["seed"], generator=first["generator"])
    if "train_mode" in own:
        new["train_mode"] = first.get("train_mode", True)
    if not own.get("reference_lr"):
        new.update({key: first[key] for key in ("first_lr", "reference_lr") if first.get(key)})
    return new
