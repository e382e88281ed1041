"""States in a file (`store=`), which takes the place of memory and is the checkpoint.

halfstep_io does the work. A step reads the states from the file and writes them there. This module
opens the file, gives it what the optimizer knows beside states, and shows its tensors in
`state[p]`. It is longer than 500 lines because the file and the dictionaries that read it know each
other.
"""

import copy
import ctypes
import json
import os
import sys
from collections.abc import MutableMapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from weakref import WeakValueDictionary

import torch

from .._library import abi, calls
from .._library.abi import check, invoke, lib
from .._settings.groups import NO_OPTIONS
from .._tensors import devices, sharding
from .._tensors.sharding import stored
from .._tensors.torch_public import increment_versions, warn_once
from . import convert, layout
from .files import count, parsed
from .planes import Plane
from .watch import version

#: errors of the library that come from a file
_OF_FILES = (abi.ERROR_FORMAT, abi.ERROR_MISMATCH, abi.ERROR_IO)
#: the key of what a file keeps of Python's optimizer
_KEY = "python"
#: the stores of this process that have a file open, by its path
_open = WeakValueDictionary()

_text = c_char_p, c_size_t
_of_file = c_int, c_char_p, c_void_p, c_void_p
_SIGNATURES = {
    "store_create": (*_of_file, POINTER(abi.StoreOptions), POINTER(c_void_p), *_text),
    "store_open": (*_of_file, POINTER(abi.StoreOptions), POINTER(c_void_p), *_text),
    "store_bind": (c_int, c_void_p, c_void_p, *_text),
    "store_set_value": (c_int, c_void_p, c_char_p, c_char_p, *_text),
    "store_close": (None, c_void_p),
    "store_get_info": (c_int, c_char_p, POINTER(abi.StoreInfo), *_text),
    "store_free_info": (None, POINTER(abi.StoreInfo)),
    "write_optimizer": (*_of_file, POINTER(abi.FileOptions), *_text),
    "read_optimizer": (*_of_file, POINTER(abi.FileOptions), *_text),
}


@lru_cache(None)
def _io():
    """Returns the library halfstep_io, which lies beside the core library. HALFSTEP_IO_LIBRARY
    names another. Raises RuntimeError if there is none."""
    folder, name = os.path.split(abi.path)
    path = os.environ.get("HALFSTEP_IO_LIBRARY") or os.path.join(
        folder, name.replace("halfstep", "halfstep_io", 1)
    )
    try:
        library = ctypes.CDLL(os.path.abspath(path))
        for name, (result, *parameters) in _SIGNATURES.items():
            function = getattr(library, "halfstep_" + name)
            function.restype, function.argtypes = result, parameters
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"halfstep: store= needs the library halfstep_io, and {path} cannot be loaded"
            f" ({error}); build halfstep on a POSIX system with HALFSTEP_IO=ON, or leave store out"
        ) from error
    return library


def _call(name, *arguments):
    """Calls a function of halfstep_io, and raises its error."""
    text = ctypes.create_string_buffer(1024)
    code = getattr(_io(), "halfstep_" + name)(*arguments, text, len(text))
    check(code, detail=text.value.decode("utf-8", "replace"))


def contents(path):
    """Describes a file of states. Returns its StoreInfo without texts, its header, and the record
    of its last whole step."""
    info = abi.StoreInfo.new()
    _call("store_get_info", os.fsencode(path), byref(info))
    try:
        texts = [json.loads(ctypes.string_at(text)) for text in (info.header, info.commit)]
    finally:
        _io().halfstep_store_free_info(byref(info))
    return (info, *texts)


class StoredState(MutableMapping, dict):
    """`state[p]` of a parameter whose states are in a file. It holds counters and the like as
    tensors. A state is read from the file each time it is asked for, so changes of the tensor that
    is returned have no effect. Assigning a tensor writes it into the file, and the next step makes
    it durable. Copies and pickles are plain dictionaries."""

    __slots__ = ("store", "p", "token")

    def __init__(self, store, m, others):
        """m: the member. others: the rest of the state, by key."""
        dict.__init__(self, others)
        dict.update(self, {s.key: s for s in m.planes})
        self.store, self.p = store, m.p
        #: stands for the residual beside the weight: another tensor after somebody has written it
        self.token = None
        self._renew()

    def _renew(self):
        held = dict.__contains__(self, "weight.extra")
        self.token = torch.empty(0, dtype=torch.uint8, device="cpu") if held else None

    def __getitem__(self, key):
        value = dict.__getitem__(self, key)
        return self.store.read(self.p, value) if isinstance(value, Plane) else value

    def __setitem__(self, key, value):
        held = dict.get(self, key)
        if not isinstance(held, Plane):
            dict.__setitem__(self, key, value)
            return
        self.store.write(self.p, held, value)
        if key == "weight.extra":
            self._renew()

    def __delitem__(self, key):
        if isinstance(dict.get(self, key), Plane):
            raise TypeError(
                f"halfstep: state {key!r} is in {self.store.path} and cannot be deleted; delete"
                " the parameter's whole state to begin anew"
            )
        dict.__delitem__(self, key)

    # MutableMapping's would read states to find keys.
    __len__, __contains__ = dict.__len__, dict.__contains__

    def __iter__(self):
        return dict.__iter__(self)

    def clear(self):
        for key in list(self):
            del self[key]

    def copy(self):
        return dict(self.items())

    def __copy__(self):
        return self.copy()

    def __or__(self, other):
        return {**self, **other}

    def __ror__(self, other):
        return {**other, **self}

    def __ior__(self, other):
        self.update(other)
        return self

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol):
        return dict, (self.copy(),)

    def __repr__(self):
        return repr({key: "in a file" if isinstance(v, Plane) else v for key, v in self.raw()})

    def raw(self):
        """Yields keys and values, with a Plane for each state, and reads nothing."""
        return dict.items(self)


class StoreFile:
    """The file of an optimizer's states.

    file        the open file of halfstep_io, or None
    handle      the handle that is bound to it. It outlives its engine until the next is bound
    indices     the tensors of that handle and their names, by parameter
    places      (group, position) of the parameters that the file holds, or None before it is made
    versions    _mark() of weights as the file holds them, by parameter
    held        True while what is loaded is not to be made durable yet
    """

    file = handle = places = None
    closed = held = False

    def __init__(self, parts):
        self.groups, self.names, self.placement = parts.groups, parts.names, parts.placement
        self.residuals, self.cache, self.steps = parts.residuals, parts.cache, parts.steps
        self.indices, self.versions, self.exists, self.told = {}, {}, False, None

    @property
    def path(self):
        """The path of the file."""
        return self.groups.options.store.path

    def __del__(self, exiting=sys.is_finalizing):
        if not exiting():  # else modules may be gone already
            self.close()

    def close(self):
        """Closes the file, for good unless `closed` is reset."""
        self.closed = True
        handle, file = self.handle, self.file
        self.handle = self.file = None
        if handle is not None:
            handle.close()
        if file is not None:
            _io().halfstep_store_close(file)

    # ---- Opening and making ----------------------------------------------------------------------

    def begin(self, load, compiled):
        """Goes on from the file, or makes it if it does not exist. `load` is load_state_dict() of
        the optimizer, and `compiled` its option."""
        self._refuse_options(compiled)
        self.cache.store = self
        self.exists = os.path.exists(self.path)
        if self.exists:
            self._load_groups(load)
        self._build()

    def _build(self):
        """Opens or makes the file. The residuals and error codes in it belong to the weights that
        are there."""
        self.residuals.wrote(list(self.cache.build(decides=False).guarded))

    def _refuse_options(self, compiled=False):
        options = self.groups.options
        apart = "each rank would have a file, and they could be one step apart"
        for name, given, why in (
            ("compile", compiled, "a traced step cannot read a file"),
            ("norm_group", options.norm_group, apart),
            ("owners", options.owners, apart),
        ):
            if given:
                raise ValueError(
                    f"halfstep: store={self.path!r} is not available with {name}=, because {why}:"
                    " leave one of them out"
                )
        advice = "leave store out and save with torch.distributed.checkpoint"
        sharding.refuse(self.groups.params(), f"store={self.path!r}", advice)

    def _load_groups(self, load):
        _, _, commit = contents(self.path)
        kept = self._kept(commit)
        groups = kept.get("param_groups", ())
        if kept and len(groups) != len(self.groups):
            raise ValueError(
                f"halfstep: {self.path} has {len(groups)} parameter groups, and this optimizer has"
                f" {len(self.groups)}: make it as it was made for the file"
            )
        numbers, packed = iter(range(len(self.groups.params()))), []
        for group, there in zip(self.groups, groups or [{}] * len(self.groups)):
            there = {
                key: tuple(v) if isinstance(group.get(key), tuple) and v is not None else v
                for key, v in there.items()
            }
            packed.append({**there, "params": [next(numbers) for _ in group["params"]]})
        self._tell_differences(groups)
        metadata = commit["metadata"]
        for group in packed:  # a file that the C library has made says so only here
            group.setdefault("seed", parsed(metadata, "seed", count, self.path))
            group.setdefault("generator", metadata["generator"])
        load({"state": {}, "param_groups": packed})

    def _tell_differences(self, groups):
        """Warns of options that were given and that the file has otherwise."""
        differ = sorted(
            f"{key}={there[key]!r}, not {value!r}"
            for group, there in zip(self.groups, groups)
            for key, value in _plain(group).items()
            if key in there
            and key != "seed"  # which is drawn
            and (there.get("initial_lr") if key == "lr" and "initial_lr" in there else there[key])
            != (list(value) if isinstance(value, tuple) else value)
        )
        if differ:
            warn_once(
                f"options are those of {self.path}: {'; '.join(differ)}. To change them,"
                " set them in param_groups"
            )

    @staticmethod
    def _kept(commit):
        return json.loads(commit.get("values", {}).get(_KEY, "{}"))

    def has(self, group_index, position, p):
        """Returns True if the file holds, or is to hold, the states of a parameter. Raises
        ValueError for a gradient of another."""
        if self.places is None:
            return p.requires_grad
        if (group_index, position) in self.places:
            return True
        if self.placement.gradient_of(p) is not None:
            raise ValueError(
                f"halfstep: parameter {self.names.of(group_index, position)!r} has a gradient, and"
                f" {self.path} holds no states of it, because it was frozen when the file was made:"
                " make another file"
            )
        return False

    def attach(self, engine, state, meant):
        """Binds the file to the handle of a new engine. Puts a StoredState in place of every other
        state, and what such a state holds into the file. `state` and `meant` are as in Engine.
        Returns the parameters whose residual or error code was made here."""
        self._refuse_options()
        if len(engine.parts) != 1 or engine.asynchronous:
            name, device = next(
                (m.name, m.device) for m in engine.members if devices.is_asynchronous(m.device)
            )
            raise ValueError(
                f"halfstep: parameter {name!r} is on {device}, and states in a file are stepped by"
                " the processor: use halfstep.CPUOffload(..., store=), which copies weights and"
                " gradients"
            )
        handle, fresh = engine.handle, self.file is None
        if fresh:
            self._open(engine, handle, state)
        else:
            _call("store_bind", self.file, handle)
        before, self.handle = self.handle, handle
        if before is not None and before is not handle:
            before.close()
        self.indices = {m.p: (m.index, m.name) for m in engine.members}
        if fresh:
            places = {p: (g, i) for g, i, p in reversed(list(self.groups.members()))}
            self.places = {places[m.p] for m in engine.members}
        converted = []
        for m in engine.members:
            held = state.get(m.p)
            if isinstance(held, StoredState) and held.store is self:
                keys = ("step", *layout.numbers_of(m.rule, m.planes))
                for key, value in list(layout.repaired(held, keys, m.name)):
                    held[key] = layout.number(value or layout.initial(key), key)
            elif self._take(m, state, meant[m.group]):
                converted.append(m.p)
        return converted

    def _open(self, engine, handle, state):
        if self.closed:
            raise RuntimeError(f"halfstep: {self.path} was closed; make another optimizer from it")
        place = os.path.realpath(self.path)
        if self.exists and getattr(_open.get(place), "file", None) is not None:
            raise RuntimeError(
                f"halfstep: {self.path} holds the states of another optimizer of this process: call"
                " its close_store() first. A notebook's cell that is run again leaves such a one"
                " alive"
            )
        path, options = os.fsencode(self.path), self.groups.options
        weights = [self.placement.weight_here(m) for m in engine.members]
        pointers = (c_void_p * len(weights))(*map(sharding.address, weights))
        given = abi.StoreOptions.new(
            without_weights=not options.store.weights, memory=options.store.memory or 0
        )
        file, exists = c_void_p(), self.exists
        name = "store_open" if exists else "store_create"
        _call(name, path, handle, pointers, byref(given), byref(file))
        self.file, self.exists, self.told = file, True, None
        _open[place] = self
        for m in engine.members:
            state[m.p] = StoredState(self, m, self._numbers(m))
        if exists:
            kept = self._kept(contents(self.path)[2])
            params = self.groups.params()
            self.steps.restore({params[i]: True for i in kept.get("pending", ())})
            self._tell_groups(engine, handle)
            with torch.no_grad():
                for m, weight in zip(engine.members, weights):
                    if weight.data_ptr() != stored(m.p).data_ptr():
                        stored(m.p).copy_(weight)
            increment_versions([m.p for m in engine.members])
            self.groups.show_estimates()
        self.versions = {m.p: _mark(m.p) for m in engine.members}

    @staticmethod
    def _numbers(m):
        """Returns the small tensors of a state, from the record of its tensor."""
        record = calls.read(m.handle, abi.RECORD_TENSOR, m.index)
        values = {"step": float(record.state_steps), "id": layout.signed(m.id)}
        values["recipe"] = layout.pack_recipe(m.recipe)
        values.update((key, getattr(record, key)) for key in layout.COUNTERS)
        for key in layout.scalars_of(m.rule, m.planes):
            values[key] = calls.number(record, m.rule, key)
        return {key: layout.number(value, key) for key, value in values.items()}

    def _tell_groups(self, engine, handle):
        """Writes the counts of the file into the groups."""
        groups = self.groups.param_groups
        for group in engine.groups:
            groups[group.place]["group_steps"] = group.count_steps()
        skipped, norm = lib.halfstep_skipped_steps(handle), lib.halfstep_gradient_norm(handle)
        for group in groups:
            group["skipped_steps"], group["last_norm"] = int(skipped), float(norm)

    def _take(self, m, states, hypers):
        """Moves the state of a member into the file. Makes what it lacks. Returns True if this was
        the residual or error code of the weight."""
        made, obsolete, weight = convert.create_state(m, states, hypers)
        whole = {**(states.get(m.p) or {}), **made}
        for key in obsolete & set(whole):
            del whole[key]
        for s in m.planes:
            self.write(m.p, s, whole.pop(s.key))
        if weight is not None:
            with torch.no_grad():
                stored(m.p).copy_(weight)
        states[m.p] = StoredState(self, m, whole)
        return "weight.extra" in made

    def check_open_to_groups(self):
        """Raises RuntimeError if groups cannot be added any more."""
        if self.places is not None:
            raise RuntimeError(
                f"halfstep: no group can be added, because {self.path} holds the states of the"
                " groups that the optimizer was made with: give all of them to the constructor"
            )

    # ---- States ----------------------------------------------------------------------------------

    def _bytes(self, function, p, s, tensor):
        self.placement.settle()
        if self.handle is None or p not in self.indices:
            raise RuntimeError(f"halfstep: {self.path} was closed; make another optimizer from it")
        if tensor.numel():
            place, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            index, _ = self.indices[p]
            invoke(function, self.handle, index, s.slot, s.extra, 0, size, place)
        return tensor

    def read(self, p, s):
        """Returns the tensor of a plane of a parameter."""
        out = torch.empty(s.shape, dtype=s.dtype, device="cpu")
        return self._bytes(lib.halfstep_read_bytes, p, s, out)

    def write(self, p, s, tensor):
        """Writes the tensor of a plane of a parameter. The next step makes it durable."""
        _, name = self.indices.get(p, (None, "?"))
        tensor = convert.adopt(tensor, s, name)
        self._bytes(lib.halfstep_write_bytes, p, s, tensor)

    # ---- Steps -----------------------------------------------------------------------------------

    def prepare(self, engine, pending, keep, all=False):
        """Brings into the file what a step does not write: weights that were written by somebody
        else and have no gradient, and what Python knows. `pending` holds the parameters whose
        states will have micro-batches. `keep` is a list for tensors that live until the step.
        `all`: a round ends, for which no parameter counts as one with a gradient."""
        if all or not engine.weights_are_plain:
            for i, m in enumerate(engine.members):
                if not all and engine.gradients[i] is not None:
                    continue
                engine.weights[i] = None
                if _mark(m.p) != self.versions.get(m.p):
                    engine.weights[i] = self._bring_weight(m, keep)
        pending = self.steps.numbers_of(pending)
        groups = list(map(_plain, self.groups))
        text = json.dumps({"param_groups": groups, "pending": pending})
        if text != self.told:
            _call("store_set_value", self.file, _KEY.encode(), text.encode())
            self.told = text

    def _bring_weight(self, m, keep):
        """Writes a weight into the file, or returns its address if the file keeps only hashes."""
        weight = self.placement.weight_here(m)
        keep.append(weight)
        self.versions[m.p] = _mark(m.p)
        if not self.groups.options.store.weights:
            return weight.data_ptr()
        size = weight.numel() * weight.element_size()
        place = m.index, abi.SLOT_WEIGHT, 0, 0, size, weight.data_ptr()
        invoke(lib.halfstep_write_bytes, self.handle, *place)
        return None

    def round_weights(self, engine, keep):
        """Returns the addresses of all weights, of which a file without weights keeps the hashes.
        Returns None for other files."""
        if self.groups.options.store.weights:
            return None
        weights = [self.placement.weight_here(m) for m in engine.members]
        keep += weights
        return (c_void_p * len(weights))(*map(sharding.address, weights))

    def stepped(self, params):
        """Notes that a step wrote these weights, here and in the file."""
        self.versions.update((p, _mark(p)) for p in params)

    def settle(self):
        """Brings the states of a loaded dictionary into the file, and makes them durable."""
        if self.file is None or self.held:
            return
        engine, keep = self.cache.build(decides=False), []
        self.prepare(engine, self.steps.pending, keep, all=True)
        weights = self.round_weights(engine, keep)
        self.check(lib.halfstep_flush(self.handle, weights), self.handle)

    def save(self, path):
        """Writes the optimizer to a safetensors file, tensor by tensor."""
        members = self.cache.current().members
        sizes = [(c_uint64 * m.p.dim())(*m.p.shape) for m in members]
        shapes = (c_void_p * len(sizes))(*map(ctypes.addressof, sizes))
        options = abi.FileOptions.new(shapes=ctypes.addressof(shapes))
        _call("write_optimizer", os.fsencode(path), self.handle, None, byref(options))

    def takes(self, state):
        """Returns True if a state dictionary has the recipes of the file's tensors."""
        members = {p: self.names.recipe(g, i) for g, i, p in self.groups.members()}
        params = self.groups.params()
        return all(
            layout.recipe_of(held, "") == members[params[place]] for place, held in state.items()
        )

    def load(self, path, state_dict, load):
        """Reads a safetensors file, tensor by tensor. `state_dict` holds its numbers, and `load` is
        load_state_dict() of the optimizer. After an error the optimizer is what its file holds."""
        self.held = True
        try:
            load({**state_dict, "state": {}})
            members = self.cache.build(decides=False).members
            _call("read_optimizer", os.fsencode(path), self.handle, None, None)
            places = {p: i for i, p in enumerate(self.groups.params())}
            for m in members:
                held = state_dict["state"].get(places[m.p])
                if held is not None:
                    identity = layout.take_number(held, "id", m.name)
                    self.groups.state[m.p]["id"] = layout.number(identity, "id")
        except BaseException:
            self._reopen(load)
            raise
        finally:
            self.held = False
        self.settle()

    def _reopen(self, load=None):
        """Makes the optimizer what the file holds. `load` is for the options of groups."""
        for p in self.indices:
            self.groups.state.pop(p, None)
        self.cache.forget()
        self.steps.restart()
        self.close()
        self.closed = False
        if load is not None:
            self._load_groups(load)
        self._build()

    def check(self, code, handle):
        """Raises the error of a call. If the file has failed, first makes the optimizer what the
        file holds: the last whole step."""
        if code not in _OF_FILES:
            check(code, handle)
            return
        text = abi.why(handle)
        try:
            self._reopen()
        except Exception as error:
            now = (
                f"it could not be opened again ({error}), and weights may be stepped in part, so"
                " load weights and states from a copy of the file or another checkpoint"
            )
        else:
            now = (
                "states and weights are those of its last whole step, and step() goes on from there"
            )
        if not self.groups.options.store.weights:
            now = (
                "it keeps no weights, so load those of its last whole step and make the optimizer"
                " anew"
            )
        raise abi.HalfstepError(
            f"halfstep: the step was not made, because the file of states failed: {text}. Look"
            f" after {self.path} and its disk; {now}",
            code,
        )


def _mark(p):
    """Returns a mark of a weight that changes when the weight is written or replaced."""
    return version(p), stored(p).data_ptr()


def _plain(group):
    """Returns what JSON can hold of a group."""
    out = {}
    for key, value in group.items():
        if key in NO_OPTIONS or key == "train_mode":
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (str, int, float, type(None))):
            out[key] = value
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue  # an object of somebody else
        out[key] = value
    return out
