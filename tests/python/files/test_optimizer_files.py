"""Moves optimizers in files between C and Python. halfstep_read_optimizer() reads what
save_safetensors() writes, and load_safetensors() what halfstep_write_optimizer() writes. The bits
must be those of a run that stays where it is.
"""

import ast
import ctypes
import os
import re
import struct
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

import pytest
import torch
from conftest import (
    RECIPES,
    class_of,
    everything,
    parameters,
    run,
    set_gradients,
    twins,
    weights_of,
)
from test_bad_states import rewritten
from test_convert import reader_of_the_page

from halfstep._library import abi
from halfstep._states import files
from halfstep._tensors import matrices

pytest.importorskip("safetensors.torch")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
LIBRARY = os.path.join(
    os.environ.get("HALFSTEP_BUILD", os.path.join(ROOT, "build")), "libhalfstep_io.so"
)

pytestmark = pytest.mark.skipif(not os.path.exists(LIBRARY), reason=f"{LIBRARY} is not built")

FORMATS = {torch.float32: b"f32", torch.bfloat16: b"bf16"}


class FileOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("settings", c_uint32),
        ("leave", c_void_p),
        ("subset", c_uint32),
        ("reserved", c_uint32),
        ("shapes", c_void_p),
        ("optimizer_file", c_char_p),
        ("model_file", c_char_p),
    ]


def addresses(tensors):
    """Returns an array of addresses. A tensor without memory gets one that is not null."""
    found = [tensor.data_ptr() or 64 for tensor in tensors]
    return (c_void_p * len(found))(*found)


class InC:
    """The optimizer of the parameters `params` in C, with states of the library: a group for each
    recipe. `recipe` is one for all, or one for each name. `how` is what groups say of matrices."""

    def __init__(self, recipe, params, how=matrices.AUTO):
        # Its dependencies too: one copy of the core library serves both.
        self.lib = ctypes.CDLL(LIBRARY)
        for name in ("halfstep_read_optimizer", "halfstep_write_optimizer"):
            getattr(self.lib, name).argtypes = [
                c_char_p,
                c_void_p,
                c_void_p,
                POINTER(FileOptions),
                c_char_p,
                c_size_t,
            ]
        self.params = {name: p.detach().clone() for name, p in params.items()}
        self.handle, groups = c_void_p(), {}
        self.must(self.lib.halfstep_create(None, byref(self.handle)))
        recipes = recipe if isinstance(recipe, dict) else dict.fromkeys(self.params, recipe)
        for own in dict.fromkeys(recipes.values()):
            groups[own] = c_int32()
            self.must(self.lib.halfstep_add_group(self.handle, own.encode(), byref(groups[own])))
        for name, p in self.params.items():
            tensor = abi.Tensor(
                struct_size=ctypes.sizeof(abi.Tensor),
                group=groups[recipes[name]],
                name=name.encode(),
                **matrices.fields_of(matrices.lay(recipes[name].partition("/")[0], p.shape, how)),
                gradient=FORMATS[p.dtype],
            )
            self.must(self.lib.halfstep_add_tensor(self.handle, byref(tensor), byref(c_int32())))
        self.must(self.lib.halfstep_allocate_states(self.handle))
        self.sizes = [(c_uint64 * max(p.dim(), 1))(*p.shape) for p in self.params.values()]
        self.shapes = (c_void_p * len(self.sizes))(*(ctypes.addressof(s) for s in self.sizes))
        self.options = FileOptions(
            struct_size=ctypes.sizeof(FileOptions), shapes=ctypes.addressof(self.shapes)
        )

    def __del__(self):
        self.lib.halfstep_destroy(self.handle)

    def must(self, code, text=b""):
        if code:  # pytest would shorten the text of an assert
            raise ValueError(f"error {code}: {text.decode()}")

    def read(self, path):
        text = ctypes.create_string_buffer(512)
        self.must(
            self.lib.halfstep_read_optimizer(
                str(path).encode(), self.handle, None, byref(self.options), text, 512
            ),
            text.value,
        )

    def write(self, path, weights=False, shapes=True):
        """Writes the whole training into one file, with weights. Without shapes, as a program that
        knows only rows."""
        text = ctypes.create_string_buffer(512)
        held = addresses(self.params.values())
        options = FileOptions(
            struct_size=ctypes.sizeof(FileOptions), shapes=self.options.shapes if shapes else None
        )
        self.must(
            self.lib.halfstep_write_optimizer(
                str(path).encode(),
                self.handle,
                held if weights else None,
                byref(options),
                text,
                512,
            ),
            text.value,
        )

    def run(self, first, last):
        for step in range(first, last):
            params = {name: torch.nn.Parameter(p) for name, p in self.params.items()}
            set_gradients(params, step)
            weights = addresses(params.values())
            gradients = addresses(p.grad for p in params.values())
            self.must(self.lib.halfstep_step(self.handle, weights, gradients))


@pytest.mark.parametrize(
    "rule", ["adamw", "lion", "lamb", "muon", "ranger", "adan", "schedulefree"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_from_python_to_c_and_back(rule, recipe, tmp_path):
    dtype, options = RECIPES[recipe]
    params = parameters(dtype)
    opt = class_of(rule)(params.items(), lr=0.01, **options)
    run(opt, params, 0, 3)
    opt.save_safetensors(tmp_path / "python.safetensors")
    full = opt._parts.names.recipe(0, 0)
    in_c = InC(full, params)
    in_c.read(tmp_path / "python.safetensors")
    run(opt, params, 3, 5)
    in_c.run(3, 5)
    assert weights_of(params) == weights_of(in_c.params)

    in_c.write(tmp_path / "c.safetensors")
    back = twins(in_c.params)
    other = class_of(rule)(back.items(), lr=0.5, **options)
    other.load_safetensors(tmp_path / "c.safetensors")
    run(opt, params, 5, 7)
    run(other, back, 5, 7)
    assert weights_of(params) == weights_of(back)


#: options, and shapes that they fit. A vector over the columns of `square` has as many numbers as
#: one over its rows.
MATRICES = {
    "stacks": ({}, {"experts": (3, 6, 64), "conv": (8, 4, 3, 3), "w": (24, 96)}),
    "split": ({"split": [12, 6, 6]}, {"qkv": (24, 96), "square": (24, 8), "e": (2, 24, 64)}),
    "heads": ({"heads": 3}, {"qkv": (24, 96), "square": (24, 8), "e": (2, 24, 64)}),
}


@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("rule", ["muon", "adafactor", "came"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MATRICES)
def test_stacks_from_python_to_c_and_back(rule, recipe, shapes, kind, tmp_path):
    dtype, options = RECIPES[recipe]
    cut, sizes = MATRICES[kind]
    options = {**options, **cut}
    params = parameters(dtype, sizes)
    opt = class_of(rule)(params.items(), lr=0.01, **options)
    run(opt, params, 0, 2)
    opt.save_safetensors(tmp_path / "python.safetensors")
    in_c = InC(opt._parts.names.recipe(0, 0), params, matrices.how_of(cut))
    in_c.read(tmp_path / "python.safetensors")
    in_c.write(tmp_path / "c.safetensors", weights=True, shapes=shapes)
    back = twins(params)
    other = class_of(rule)(back.items(), lr=0.5, **options)
    other.load_safetensors(tmp_path / "c.safetensors")
    run(opt, params, 2, 4)
    run(other, back, 2, 4)
    assert weights_of(params) == weights_of(back)


@pytest.mark.parametrize("shape", [(3, 6, 64), (8, 4, 3, 3)])
@pytest.mark.parametrize("rule", ["muon", "adafactor", "came"])
def test_files_from_before_stacks(rule, shape, tmp_path):
    """A file that took the parameter for one matrix is refused by name, in C and in Python, or goes
    on with what is written there. Muon takes four dimensions for one matrix to this day."""
    params = parameters(torch.float32, {"experts": shape})
    opt = class_of(rule)(params.items(), lr=0.01, states="int8", matrix="flatten")
    run(opt, params, 0, 2)
    path, recipe = tmp_path / "old.safetensors", opt._parts.names.recipe(0, 0)
    opt.save_safetensors(path)
    flat = matrices.How("flatten")
    in_c = InC(recipe, params, flat)
    in_c.read(path)
    back = twins(params)
    other = class_of(rule)(back.items(), lr=0.01, states="int8", matrix="flatten")
    other.load_safetensors(path)
    for one, held in ((opt, params), (other, back)):
        run(one, held, 2, 4)
    assert weights_of(params) == weights_of(back)
    fresh = class_of(rule)(twins(params).items(), lr=0.01, states="int8")
    if rule == "muon" and len(shape) > 3:
        fresh.load_safetensors(path)
        return
    with pytest.raises(
        ValueError, match="'experts'.* goes on with matrix=\"flatten\" in its group"
    ):
        fresh.load_safetensors(path)
    assert not fresh.state
    with pytest.raises(ValueError, match="experts/.*describe the tensor as one matrix to go on"):
        InC(recipe, params).read(path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_file_with_weights_and_without_shapes(recipe, tmp_path):
    dtype, options = RECIPES[recipe]
    params = parameters(dtype)
    assert any(p.dim() > 2 for p in params.values())
    opt = class_of("adamw")(params.items(), lr=0.01, **options)
    run(opt, params, 0, 2)
    opt.save_safetensors(tmp_path / "python.safetensors")
    in_c = InC(opt._parts.names.recipe(0, 0), params)
    in_c.read(tmp_path / "python.safetensors")
    in_c.write(tmp_path / "c.safetensors", weights=True, shapes=False)
    run(opt, params, 2, 4)

    back = parameters(dtype)
    other = class_of("adamw")(back.items(), lr=0.5, **options)
    run(other, back, 5, 6)
    other.load_safetensors(tmp_path / "c.safetensors")
    run(other, back, 2, 4)
    assert weights_of(params) == weights_of(back)


def test_weights_of_another_shape_change_nothing(tmp_path):
    params = parameters()
    opt = class_of("adamw")(params.items(), lr=0.01)
    in_c = InC(opt._parts.names.recipe(0, 0), params)
    in_c.run(0, 1)
    in_c.write(tmp_path / "c.safetensors", weights=True)
    name, p = next((name, p) for name, p in params.items() if p.dim() == 2)
    other = torch.nn.Parameter(p.detach().t().clone())
    params[name] = other
    before = other.detach().clone()
    opt = class_of("adamw")(params.items(), lr=0.01)
    with pytest.raises(ValueError, match=f"{name}/weight"):
        opt.load_safetensors(tmp_path / "c.safetensors")
    assert torch.equal(other, before) and not opt.state


def test_a_parameter_that_python_has_not_stepped(tmp_path):
    params = parameters()
    opt = class_of("adamw")(params.items(), lr=0.01)
    set_gradients(params, 0)
    params["body.bias"].grad = None
    opt.step()
    opt.save_safetensors(tmp_path / "python.safetensors")
    in_c = InC(opt._parts.names.recipe(0, 0), params)
    in_c.read(tmp_path / "python.safetensors")
    run(opt, params, 1, 4)
    in_c.run(1, 4)
    assert weights_of(params) == weights_of(in_c.params)


# ---- Numbers in text -----------------------------------------------------------------------------


def spellings(*kinds):
    """Returns (kind, text, is good, bits) from the list that tests/io/test_optimizer_io.c reads."""
    with open(os.path.join(ROOT, "tests", "tools", "spellings.def"), encoding="utf-8") as file:
        rows = re.findall(r'^SPELLING\((\w+), ("[^"]*"), ([01]), (\w+)\)$', file.read(), re.M)
    return [
        (kind, ast.literal_eval(text).encode("latin-1").decode(), good == "1", int(bits, 0))
        for kind, text, good, bits in rows
        if kind in kinds
    ]


def test_what_spells_a_number():
    rows, readers = spellings("COUNT", "NUMBER"), {"COUNT": files.count, "NUMBER": files.number}
    assert len(rows) > 80
    for kind, text, good, bits in rows:
        if not good:
            with pytest.raises(ValueError):
                readers[kind](text)
                pytest.fail(f"{kind} {text!r}")
            continue
        found = readers[kind](text)
        if kind == "NUMBER":
            (found,) = struct.unpack("<Q", struct.pack("<d", found))
        assert found == bits, text


def test_what_spells_counters_and_scalars(tmp_path):
    path = tmp_path / "o.safetensors"
    sizes = {"linear": (40, 128)}
    options = {"weights": "bf16-kahan", "states": "int8"}
    params = parameters(torch.bfloat16, sizes)
    opt = class_of("lamb")(params.items(), lr=0.01, seed=3, **options)
    run(opt, params, 0, 3)
    opt.save_safetensors(path)
    whole, rows = path.read_bytes(), spellings("COUNTERS", "SCALARS")
    assert len(rows) > 40
    back = twins(params)
    other = class_of("lamb")(back.items(), lr=0.01, seed=4, **options)
    run(other, back, 0, 1)
    before = everything(other, back)
    for kind, text, good, _ in rows:
        path.write_bytes(whole)
        key = f"{kind.lower()}.linear"
        rewritten(path, None, {key: text})
        if good:
            fresh = class_of("lamb")(twins(params).items(), lr=0.01, **options)
            fresh.load_safetensors(path)
            continue
        with pytest.raises(ValueError, match="linear"):
            other.load_safetensors(path)
            pytest.fail(f"{key}: {text!r}")
        assert everything(other, back) == before, text


@pytest.mark.parametrize("seed", [-(2**63), -5, 0, 2**64 - 1])
def test_any_seed_goes_to_c_and_back(seed, tmp_path):
    dtype, options = RECIPES["ecc8-int8"]
    params = parameters(dtype)
    opt = class_of("adamw")(params.items(), lr=0.01, **{**options, "seed": seed})
    run(opt, params, 0, 1)
    opt.save_safetensors(tmp_path / "python.safetensors")
    in_c = InC(opt._parts.names.recipe(0, 0), params)
    in_c.read(tmp_path / "python.safetensors")
    back = twins(params)
    other = class_of("adamw")(back.items(), lr=0.5, **options)
    other.load_safetensors(tmp_path / "python.safetensors")
    run(opt, params, 1, 2)
    run(other, back, 1, 2)
    in_c.run(1, 2)
    assert weights_of(params) == weights_of(back) == weights_of(in_c.params)


@pytest.mark.parametrize("states", ["f32", "int8"])
def test_the_page_reads_a_moment_and_counters(states, tmp_path):
    read = reader_of_the_page("docs/checkpoints.md", "state_and_counters")
    params = parameters(torch.float32)
    opt = class_of("adamw")(params.items(), lr=0.01, states=states)
    run(opt, params, 0, 3)
    opt.save_safetensors(tmp_path / "python.safetensors")
    in_c = InC(opt._parts.names.recipe(0, 0), params)
    in_c.read(tmp_path / "python.safetensors")
    in_c.write(tmp_path / "c.safetensors")
    for name, p in params.items():
        state = opt.state[p]
        if not p.numel():
            continue  # a stream without bytes is left out
        for file in ("python.safetensors", "c.safetensors"):
            values, counters = read(tmp_path / file, name, "exp_avg")
            held = state["exp_avg"] if "exp_avg" in state else state["exp_avg.codes"]
            if held.dtype == torch.bfloat16:
                held = held.view(torch.uint16)
            assert values.shape == tuple(held.shape) and values.tobytes() == held.numpy().tobytes()
            assert counters == {
                "state_steps": 3,
                "full_steps": 3,
                "writes": 3,
                "id": state["id"].item() % 2**64,
            }
