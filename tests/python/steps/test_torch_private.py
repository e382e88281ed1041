"""Tests the one module that knows torch's private names: that their comments are true of this
torch, what happens without them, and that no other module has one."""

import ast
import pickle
import re
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep._states import saving
from halfstep._tensors import devices, parameters, torch_private
from halfstep._tensors.torch_public import VERSION

PACKAGE = Path(halfstep.__file__).parent
FILE = Path(torch_private.__file__)
TEXT = FILE.read_text(encoding="utf-8")
#: names that are private in form, and not torch's: whose they are
OTHERS = {
    "_fields": "collections.namedtuple",
    "_from_config": "transformers",
    "_foreach_": "the schema of torch's operators",
    "_getframe": "sys",
    "_gradient_release_hooks": "optimi",
    "_load_best_model": "transformers' Trainer",
    "_models": "Accelerate's Accelerator",
    "_replace": "collections.namedtuple",
    "_type_": "ctypes",
}
#: what stands before operators, whose names begin with underscores as torch's schema has them
OPERATORS = "aten"


def is_private(name):
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*(?<!__)", name) is not None


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def asked(tree):
    """Yields (line, name) for each private name after a dot, quoted as an argument of a function,
    or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if getattr(node.value, "id", None) != OPERATORS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for given in node.args:
                if isinstance(given, ast.Constant) and is_private(given.value):
                    yield given.lineno, given.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]:
                yield from ((node.lineno, n) for n in (name or "").split(".") if is_private(n))
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            yield from ((node.lineno, n) for n in node.value.split(".") if is_private(n))


def quoted(tree):
    """Yields (line, name) for each private name in quotes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and is_private(node.value):
            yield node.lineno, node.value


def defined(tree):
    """Yields the private names that a module defines: its functions, classes and variables, and
    the attributes that its objects give themselves."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name) or getattr(node.value, "id", None) in ("self", "weight"):
                yield getattr(node, "id", getattr(node, "attr", None))


def known():
    """Returns torch's names that torch_private.py has."""
    tree = ast.parse(TEXT)
    names = {name for _, name in (*quoted(tree), *asked(tree))}
    return names - set(defined(tree)) | {"_sym_get_coordinate"}


def strangers(trees):
    """Returns the names of torch in these modules, by their paths in the package."""
    ours, torchs = {n for tree in trees.values() for n in defined(tree)}, known()
    found = []
    for path, tree in trees.items():
        own = {name for name, files in torch_private.ASKED.items() if path in files}
        here = [*quoted(tree), *((0, name) for name in defined(tree))]
        here = [*asked(tree), *(one for one in here if one[1] in torchs)]
        for line, name in here:
            foreign = name in torchs or name not in ours and not name.startswith("_halfstep")
            if foreign and name not in own and name not in OTHERS:
                found.append(f"{path}:{line}: {name}")
    return found


def test_no_other_module_has_a_private_name_of_torch():
    """A name is private in form if it begins with one underscore. Those of torch_private.py stand
    nowhere else after a dot, in quotes, in an absolute import or in a definition. A class has a
    name in ASKED only in the file that is said there. Any other private name that stands after a
    dot, as a quoted argument of a function, in an absolute import or in the path of a module of
    torch is one that this package defines, or that OTHERS has. Operators after `aten` are public.
    """
    trees = {
        str(path.relative_to(PACKAGE)): tree_of(path)
        for path in PACKAGE.rglob("*.py")
        if path != FILE
    }
    assert not strangers(trees), "\n".join(strangers(trees))
    for text, name in (
        ("from torch._C import Something", "_C"),
        ("from torch.distributed.tensor import _utils", "_utils"),
        ("optimizer._opt_called", "_opt_called"),
        ("self._opt_called = True", "_opt_called"),
        ("getattr(p, '_shard_param_infos', ())", "_shard_param_infos"),
        ("module._parameters", "_parameters"),
        ("sys.modules.get('torch.distributed.fsdp._flat_param')", "_flat_param"),
        ("class C:\n    def _fsdp_flattened(self): pass", "_fsdp_flattened"),
    ):
        assert any(line.endswith(f": {name}") for line in strangers({"a.py": ast.parse(text)})), (
            text
        )
    unused = set(OTHERS) - {name for tree in trees.values() for _, name in asked(tree)}
    assert not unused


# ---- Comments ------------------------------------------------------------------------------------


def pieces():
    """Returns each statement of the module with the comment above it."""
    lines, at, found = TEXT.splitlines(), 0, []
    for node in ast.parse(TEXT).body:
        found.append((node, "\n".join(lines[at : node.end_lineno])))
        at = node.end_lineno
    return found


def since():
    """Returns (name, file of torch, version) of all comments."""
    text = re.sub(r"\n *#?:? *", " ", TEXT)
    found = []
    for names, file, version in re.findall(
        r"((?:`\w+`,? ?(?:and )?)+)in (torch/[\w/.]+\w) since (2\.\d+)", text
    ):
        found += [(n, file, tuple(map(int, version.split(".")))) for n in re.findall(r"\w+", names)]
    return [one for one in found if one[0] != "and"]


def test_comments_name_all_private_names():
    """Each statement has its names in its comment, with a file and a version, or in the path of
    such a file."""
    files, names = " ".join(file for _, file, _ in since()), {name for name, _, _ in since()}
    for node, text in pieces():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Try)):
            said = " ".join(re.findall(r'"""(.*?)"""', text, re.S)) + " ".join(
                re.findall("#.*", text)
            )
            for _, name in asked(node):
                if name in known():
                    assert re.search(rf"\b{name}\b", said) or f"/{name}/" in files, (name, text)
    unsaid = {name for name in known() - names if not re.search(rf"/{name}(/|\.|\b)", files)}
    assert not unsaid


@pytest.mark.parametrize("name, file, version", since())
def test_comments_are_true_of_this_torch(name, file, version):
    if version > VERSION:
        pytest.skip("a later torch has it")
    text = (Path(torch.__file__).parent.parent / file).read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b", text)


def test_versions_are_those_of_the_matrix():
    rows = (Path(__file__).parents[2] / "packages/matrix/environments.txt").read_text()
    found = {*re.findall(r"torch==(\d+)\.(\d+)", rows)}
    found = sorted((int(major), int(minor)) for major, minor in found)
    assert {version for _, _, version in since()} <= set(found)
    ends = [".".join(map(str, version)) for version in (found[0], found[-1])]
    assert (
        f"up to torch {ends[1]}." in TEXT
        and '{}"\n            " {} to {}'.format("install a torch from", *ends) in TEXT
    )


# ---- Without a name ------------------------------------------------------------------------------


def without(*names):
    """Returns the module as it would be with a torch that does not have these names."""
    module = types.ModuleType("halfstep._tensors.without")
    module.__package__ = "halfstep._tensors"
    text = re.sub(rf"\b({'|'.join(names)})\b", r"\1_is_gone", TEXT)
    exec(compile(text, str(FILE), "exec"), vars(module))
    return module


class Buffer:
    """A part of an FSDP1 buffer."""

    _unpadded_unsharded_size = torch.Size([4])
    _fqns, _numels = ("a", "b"), (3, 1)
    _shard_param_infos = (
        types.SimpleNamespace(in_shard=False, intra_param_start_idx=None),
        types.SimpleNamespace(in_shard=True, intra_param_start_idx=None),
    )

    def numel(self):
        return 2


OPERATOR = torch.ops.aten.add_.Tensor
USES = {
    "_version": lambda m: m.version(torch.ones(2)),
    "_post_accumulate_grad_hooks": lambda m: m.gradient_hooks(torch.ones(2, requires_grad=True)),
    "DisableTorchFunctionSubclass": lambda m: m.as_plain(),
    "_make_wrapper_subclass": lambda m: m.make_wrapper(halfstep.nn.Int8Weight, (2, 2)),
    "_schema": lambda m: m.arguments_of(OPERATOR),
    "_dispatch_has_kernel_for_dispatch_key": lambda m: m.is_composite(OPERATOR),
    "_local_tensor": lambda m: m.put_local_part(types.SimpleNamespace(_local_tensor=1), 2),
    "_unpadded_unsharded_size": lambda m: m.is_cut(Buffer()),
    "_fqns": lambda m: list(m.parts_of(Buffer())),
    "_numels": lambda m: list(m.parts_of(Buffer())),
    "_shard_param_infos": lambda m: list(m.parts_of(Buffer())),
    "_apply": lambda m: m.apply_to_tensors(nn.Linear(2, 2), lambda t: t),
    "_save_to_state_dict": lambda m: m.check_module(),
    "_load_from_state_dict": lambda m: m.check_module(),
}


@pytest.mark.parametrize("name", USES)
def test_a_name_that_is_needed_is_missed_in_one_sentence(name):
    USES[name](torch_private)
    text = rf"^halfstep: torch \S+ has no {name}_is_gone, but [^;\n]+; install a torch from 2.1 to"
    with pytest.raises(ImportError, match=text):
        USES[name](without(name))


def test_parts_of_a_mesh_and_hooks_are_missed_in_one_sentence():
    with pytest.raises(ImportError, match="compute_local_shape_and_global_offset_is_gone, but"):
        without("compute_local_shape_and_global_offset").box_of((4,), None, ())
    hooks = []
    later = types.SimpleNamespace(register_state_dict_post_hook=hooks.append)
    without("_register_state_dict_hook").after_state_dict(later, 1)
    earlier = types.SimpleNamespace(_register_state_dict_hook=hooks.append)
    torch_private.after_state_dict(earlier, 2)
    assert hooks == [1, 2]
    with pytest.raises(ImportError, match="_register_state_dict_hook_is_gone, but"):
        without("_register_state_dict_hook").after_state_dict(earlier, 3)


@pytest.mark.parametrize("gone", ["", "_sync_final_model", "_authoritative_rank"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_end_of_join(monkeypatch, gone, packed):
    """Without a name of the wrapper's, join() is refused for 8-bit weights alone."""

    class Wrapper(nn.Sequential):
        def join(self):
            return self

        def _sync_final_model(self, last):
            self._authoritative_rank = 3

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Wrapper)
    sent, wrapper = [], Wrapper(nn.Linear(32, 2))
    if packed:
        halfstep.nn.quantize_(wrapper)
    module = without(gone) if gone else torch_private
    module.after_join(lambda wrapper, rank: sent.append(rank))

    def use():
        wrapper.join()._sync_final_model(True)

    if gone and (packed or gone == "_authoritative_rank"):
        with pytest.raises(ImportError, match=f"has no {gone}_is_gone, but 8-bit weights need it"):
            use()
        return
    use()
    assert sent == ([] if gone else [3])


def test_parameters_of_fsdp1_are_none_without_its_mark():
    p = nn.Parameter(torch.ones(3))
    p._fsdp_flattened = True
    assert torch_private.is_in_buffer(p) and not torch_private.is_in_buffer(nn.Parameter(p))
    assert not without("_fsdp_flattened").is_in_buffer(p)


def test_zeros_without_memory_are_refused_as_what_has_none(monkeypatch):
    gone = without("_is_zerotensor").is_zerotensor
    zeros = torch._efficientzerotensor(3)
    assert torch_private.is_zerotensor(zeros) and not gone(zeros)
    for module in (devices, parameters):
        monkeypatch.setattr(module, "is_zerotensor", gone)
    p = nn.Parameter(torch.ones(3))
    opt = halfstep.AdamW([p], lr=0.1)
    p.grad = zeros
    with pytest.raises(
        ValueError, match="^halfstep: the gradient of .* has 3 elements and no memory"
    ):
        opt.step()
    with pytest.raises(ValueError, match="^halfstep: parameter .* has 3 elements and no memory"):
        p = nn.Parameter(zeros)
        p.grad = torch.ones(3)
        halfstep.AdamW([p], lr=0.1).step()


def test_what_has_another_way_takes_it():
    assert without("_disable_dynamo")._disable is torch.compiler.disable
    assert vars(without("TensorGuards"))["TensorGuards_is_gone"] is None  # see test_guards.py
    assert without("_typed_storage").typed_storage is None
    assert without("_set_throw_on_mutable_data_ptr").guard_memory(torch.ones(1)) is None
    assert without("_functionalize_unsafe_set").with_aliasing(None, (), {}, "out") == "out"
    asks = without("_current_graph_task_id")
    assert asks.backward_pass() is None and torch_private.backward_pass() == -1
    without("_execution_engine").after_backward(pytest.fail)
    dtensor = types.SimpleNamespace(to_local=lambda: "here")
    assert torch_private.local_part(dtensor) == "here"


@pytest.mark.parametrize("gone", [(), ("_wrapped_by_lr_sched",), ("_opt_called",)])
def test_schedulers_put_a_function_around_a_step_that_does_not_note_calls(gone):
    module = without(*gone) if gone else torch_private

    class Own(halfstep.AdamW):
        @module.notes_its_calls
        def step(self, closure=None):
            module.note_step(self)
            self._step()

    p = nn.Parameter(torch.ones(3))
    opt = Own([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
    p.grad = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        schedule.step()
    assert p[0] < 1 and opt.param_groups[0]["lr"] == pytest.approx(0.01)


def test_pickles_with_attributes_of_this_process_go_on(monkeypatch):
    monkeypatch.setattr(
        saving, "is_transient", without("_zero_grad_profile_name", "_opt_called").is_transient
    )
    p = nn.Parameter(torch.ones(3))
    opt = halfstep.AdamW([p], lr=0.1)
    p.grad = torch.ones(3)
    opt.step()
    params, again = pickle.loads(pickle.dumps(([p], opt)))
    params[0].grad = p.grad
    assert "_opt_called" in vars(again)
    opt.step()
    again.step()
    assert torch.equal(params[0], p)


def weight():
    model = halfstep.nn.quantize_(nn.Sequential(nn.Linear(32, 32)))
    return model, torch.ones(2, 32)


def test_torch_refuses_what_its_compiler_cannot_tell(monkeypatch):
    """Not one makes parameters of bytes, or a graph of other memory."""
    model, x = weight()
    monkeypatch.setattr(torch_private, "makes_fake", without("meta_utils").makes_fake)
    with pytest.raises(RuntimeError, match="set the storage of a tensor|Only Tensors of floating"):
        torch.compile(model, backend="aot_eager")(x)


def test_torch_refuses_to_train_bytes(monkeypatch):
    model, x = weight()
    monkeypatch.setattr(torch_private, "unwraps", without("subclass_parametrization").unwraps)
    with pytest.raises(RuntimeError, match="Only Tensors of floating point"):
        torch.export.export(model, (x,)).run_decompositions()
