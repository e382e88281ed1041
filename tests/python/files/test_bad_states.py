"""States that no training leaves are found when they are loaded. The error names the parameter, and
nothing is changed."""

import copy
import math
import os
import stat
import threading

import pytest
import torch
from conftest import (
    assert_close,
    class_of,
    everything,
    parameters,
    run,
    saved,
    set_gradients,
    told,
    twins,
)

import halfstep
from halfstep._states import layout

safetensors = pytest.importorskip("safetensors.torch")

BF = torch.bfloat16
SHAPES = {"first": (8, 256), "matrix": (24, 256), "vector": (33,)}
#: rule, dtype, options; all have a state of every kind in "matrix"
KINDS = {
    "f32": ("adamw", torch.float32, {}),
    "int8": ("adamw", BF, {"weights": "bf16-kahan", "states": "int8"}),
    "fp8": ("adamw", BF, {"states": "fp8"}),
    "int6": ("adamw", BF, {"states": "int6"}),
    "int4": ("adamw", BF, {"states": "int4"}),
    "dyn8": ("adamw", BF, {"states": "dyn8"}),
    "bf16": ("adamw", BF, {"weights": "bf16-ecc8", "states": "bf16-kahan+f32"}),
    "schedulefree": ("schedulefree", BF, {"weights": "bf16-kahan"}),
    "adamw-delayed": ("adamw-delayed", BF, {"weight_decay": 0.5}),
    "lamb": ("lamb", BF, {}),
}
NAN, INF = math.nan, math.inf


def trained(kind, steps=2, seed=0):
    rule, dtype, options = KINDS[kind]
    params = parameters(dtype, SHAPES, seed)
    opt = class_of(rule)(params.items(), lr=0.01, seed=3, **options)
    run(opt, params, 0, steps)
    return params, opt


def refused(kind, change, match="matrix", warm=2):
    """Checks that the change makes an optimizer's file one that another refuses without being
    changed. The unchanged file is loaded."""
    _, writer = trained(kind)
    good = saved(writer.state_dict())
    bad = copy.deepcopy(good)
    change(bad)
    params, opt = trained(kind, warm, seed=4)
    before = everything(opt, params)
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(bad)
    assert everything(opt, params) == before
    run(opt, params, warm, warm + 1)
    opt.load_state_dict(good)
    residuals = any("weight.extra" in state for state in good["state"].values())
    with told("'first' was written", residuals):
        run(opt, params, 2, 3)


def of_matrix(key, value):
    """Changes the state of the second parameter: sets a value, applies a function, or drops it."""

    def change(file):
        state = file["state"][1]
        assert key in state
        if value is MISSING:
            del state[key]
        else:
            state[key] = value(state[key]) if callable(value) else value

    return change


MISSING = object()


def with_element(value, place=(3, 40)):
    def put(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return put


def with_scale(value):
    return lambda tensor: with_element(value, (3, 0) if tensor.dim() == 2 else (2,))(tensor)


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "kind,key",
    [
        ("f32", "exp_avg"),
        ("f32", "exp_avg_sq"),
        ("bf16", "exp_avg"),
        ("bf16", "exp_avg.extra"),
        ("bf16", "exp_avg_sq"),
        ("int8", "weight.extra"),
        ("schedulefree", "z"),
        ("schedulefree", "z.extra"),
        ("schedulefree", "exp_avg_sq"),
    ],
)
def test_values_that_are_not_finite(kind, key, value):
    refused(kind, of_matrix(key, with_element(value)), f"{key}.*matrix.*not finite")


@pytest.mark.parametrize("kind", ["f32", "bf16", "schedulefree", "adamw-delayed", "lamb"])
def test_negative_second_moments(kind):
    refused(kind, of_matrix("exp_avg_sq", with_element(-1e-6)), "exp_avg_sq.*matrix.*negative")


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0])
@pytest.mark.parametrize("key", ["exp_avg.scale", "exp_avg_sq.scale"])
@pytest.mark.parametrize("kind", ["int8", "int6", "fp8", "int4", "dyn8"])
def test_scales(kind, key, value):
    refused(kind, of_matrix(key, with_scale(value)), f"{key}.*matrix")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_scales_that_let_codes_overflow(kind):
    """The scale is finite, but decoded values are not. Only the codes in the file show that."""
    code = {"int8": 127, "fp8": 0x7E}[kind]
    for key in ("exp_avg", "exp_avg_sq"):

        def change(file, value=code):
            file["state"][1][key + ".scale"][3] = 3e38
            file["state"][1][key + ".codes"][3] = value

        refused(kind, change, f"{key}.*matrix.*not finite")
        _, opt = trained(kind)
        file = saved(opt.state_dict())
        if key == "exp_avg":
            change(file, 0)
            opt.load_state_dict(file)


# ---- What has to be there ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,key",
    [
        ("f32", "exp_avg_sq"),
        ("f32", "exp_avg"),
        ("f32", "step"),
        ("int8", "exp_avg_sq.codes"),
        ("int8", "exp_avg_sq.scale"),
        ("int8", "weight.extra"),
        ("int8", "step"),
        ("schedulefree", "z"),
        ("schedulefree", "z.extra"),
        ("bf16", "exp_avg.extra"),
    ],
)
def test_states_that_lack_something(kind, key):
    """Zeros in the place of exp_avg_sq moved weights by 133 instead of 0.009."""
    refused(kind, of_matrix(key, MISSING))
    refused(kind, of_matrix(key, None))


def test_plain_states_that_lack_something():
    """The same of torch's own."""
    params = parameters(shapes=SHAPES)
    theirs = torch.optim.AdamW(params.values(), amsgrad=True)
    run(theirs, params, 0, 2)
    fresh = twins(params)
    opt = halfstep.AdamW(fresh.items())
    for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        for value in (MISSING, None):
            file = copy.deepcopy(theirs.state_dict())
            of_matrix(key, value)(file)
            with pytest.raises(ValueError, match=f"matrix.*{key}|{key}.*matrix"):
                opt.load_state_dict(file)
            assert not opt.state
    for value in (NAN, INF, -1.0):
        file = copy.deepcopy(theirs.state_dict())
        of_matrix("exp_avg_sq", with_element(value))(file)
        with pytest.raises(ValueError, match="exp_avg_sq.*matrix"):
            opt.load_state_dict(file)
    opt.load_state_dict(theirs.state_dict())
    run(opt, fresh, 2, 3)


STRANGERS = {
    "Adamax": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "LBFGS": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("rule", ["adam", "adamw", "radam", "adan", "lion", "lamb"])
@pytest.mark.parametrize("named", [True, False])
def test_states_of_other_optimizers(name, rule, named):
    """Their states are others. Ours must not begin from zeros at their step count."""
    params = parameters(shapes=SHAPES)
    theirs = getattr(torch.optim, name)(list(params.values()), **STRANGERS[name])

    def closure():
        set_gradients(params, 1)
        return sum((p * p.grad).sum() for p in params.values()).detach()

    for _ in range(2):
        theirs.step(closure)
    fresh = twins(params)
    opt = class_of(rule)(list(fresh.items() if named else fresh.values()))
    if rule == "lion" and name == "Adamax":
        pytest.skip("which has an exp_avg that is as good as Lion's")
    wrong = (
        "Invalid betas"
        if (name, rule) == ("Adamax", "adan")
        else "first"
        if named
        else "0 of group 0"
    )
    with pytest.raises(ValueError, match=wrong):
        opt.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert not opt.state
    run(opt, fresh, 1, 2)


def test_a_momentum_that_has_not_begun():
    """torch's SGD keeps None for a parameter that had no gradient yet."""
    params = parameters(shapes=SHAPES)
    theirs = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    set_gradients(params, 0)
    params["vector"].grad = None
    theirs.step()
    theirs.state[params["vector"]]["momentum_buffer"] = None
    fresh = twins(params)
    opt = halfstep.SGD(fresh.values())
    opt.load_state_dict(theirs.state_dict())
    assert fresh["vector"] not in opt.state
    for o, ps in ((theirs, params), (opt, fresh)):
        run(o, ps, 1, 4)
    assert_close(params, fresh)


# ---- Numbers -------------------------------------------------------------------------------------

COUNTS = [-1, 1.5, NAN, INF, "3", None, True, 2**63, 2**64, torch.tensor([1, 2]), torch.tensor(-1)]


@pytest.mark.parametrize("value", COUNTS, ids=repr)
@pytest.mark.parametrize("key", ["state_steps", "full_steps", "writes", "step", "recipe"])
def test_counters(key, value):
    refused("int8", of_matrix(key, value))


@pytest.mark.parametrize("value", [-1, 2**63, NAN, "x", None, 0.5, -0.5, 1e300, INF])
@pytest.mark.parametrize(
    "kind,key",
    [
        ("schedulefree", "weight_sum"),
        ("schedulefree", "lr_max"),
        ("lamb", "trust_ratio"),
        ("lamb", "weight_norm"),
        ("adamw-delayed", "accumulated_decay"),
    ],
)
def test_scalars(kind, key, value):
    """Values that no update leaves. An accumulated decay of 2^63 would have been applied at
    once."""
    limits = {"weight_sum": 1e300, "lr_max": 1e6, "accumulated_decay": 1.0}
    if isinstance(value, (int, float)) and 0 <= value <= limits.get(key, 1e300):
        _, writer = trained(kind)
        file = saved(writer.state_dict())
        of_matrix(key, value)(file)
        trained(kind)[1].load_state_dict(file)
        return
    refused(kind, of_matrix(key, value))
    if value is not None and not isinstance(value, str):
        refused(kind, of_matrix(key, torch.tensor(float(value), dtype=torch.float64)))


@pytest.mark.parametrize(
    "value", [0, None, "x", 1.5, NAN, 2**64, torch.zeros(2, dtype=torch.int64)], ids=repr
)
def test_ids(value):
    refused("f32", of_matrix("id", value))


def test_ids_that_two_parameters_have():
    def change(file):
        file["state"][1]["id"] = file["state"][0]["id"]

    refused("f32", change, "first.*matrix.*same id")


@pytest.mark.parametrize("recipe", ["lion/bf16-kahan/int8", "radam/bf16-kahan/int8"])
def test_recipes_of_another_rule(recipe):
    refused(
        "int8",
        of_matrix("recipe", torch.tensor(layout.pack_recipe(recipe))),
        f"matrix.*{recipe}.*adamw",
    )


@pytest.mark.parametrize(
    "recipe", ["adamw/bf16-kahan/int4", "adamw/bf16-ecc8/int8", "adamw/bf16-kahan/f32"]
)
def test_recipes_of_other_tensors(recipe):
    refused("int8", of_matrix("recipe", torch.tensor(layout.pack_recipe(recipe))))


@pytest.mark.parametrize(
    "key,values",
    [
        ("seed", [None, "x", 1.5, NAN, True, 2**64, -(2**63) - 1, [1]]),
        ("group_steps", [None, -1, 1.5, "3", True, 2**63]),
        ("skipped_steps", [None, -1, 1.5, "3", True, 2**63]),
        ("last_norm", [None, NAN, INF, -1.0, "x", True]),
    ],
)
def test_numbers_of_groups(key, values):
    for value in values:
        refused("f32", lambda file, value=value: file["param_groups"][0].update({key: value}), key)


@pytest.mark.parametrize("names", [None, "x", [], [["a"]], [["a", "b", 3]], [None]])
def test_names(names):
    refused("f32", lambda file: file.update(param_names=names), "param_names")


@pytest.mark.parametrize(
    "key_of", [str, list(SHAPES).__getitem__, lambda number: number + 7], ids=["str", "name", "+7"]
)
def test_states_of_parameters_that_no_group_lists(key_of):
    """Such as those whose numbers JSON has made text. They would be lost."""

    def change(file):
        file["state"] = {key_of(number): state for number, state in file["state"].items()}

    said = f"states under {key_of(0)!r}, .*its groups list the parameters 0, 1, 2: use the same"
    refused("f32", change, said)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda file: {"state": file["state"]}, "this is a dictionary of 'state': give what"),
        (lambda file: {"param_groups": file["param_groups"]}, "a dictionary of 'param_groups'"),
        (lambda file: {}, "an empty dictionary"),
        (lambda file: None, "of type NoneType"),
        (lambda file: list(file["state"].values()), "of type list"),
        (lambda file: {"optimizer": file}, r"holds one, at \['optimizer'\]: give load_state_dict"),
        (lambda file: [file, file], r"holds 2 of them, at \[0\], \[1\]: give load_state_dict"),
        (lambda file: {"opt": {"g": file, "d": file}}, r"at \['opt'\]\['g'\], \['opt'\]\['d'\]"),
    ],
)
def test_what_is_no_state_of_an_optimizer(change, said):
    params, opt = trained("int8")
    before = everything(opt, params)
    with pytest.raises(ValueError, match=said):
        opt.load_state_dict(change(opt.state_dict()))
    assert everything(opt, params) == before


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "bf16"])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.told("was put beside it by hand", kind="int8", written=False)
@pytest.mark.told("was put beside it by hand", kind="bf16", written=False)
def test_states_that_a_trainer_cuts_by_name(kind, written):
    """As trainers of points do. The error says what to do about codes and residuals."""
    params, opt = trained(kind)
    old, rows = params["matrix"], torch.arange(24) % 2 == 0
    state = opt.state.pop(old)
    assert state.get("exp_sq") is None
    for made in (copy.deepcopy(state), opt.state_dict()["state"][0], saved(dict(state))):
        assert type(made) is dict
    with pytest.raises(KeyError, match="'exp_sq'"):
        state["exp_sq"]
    if kind != "bf16":
        assert "exp_avg" not in state and state.get("exp_avg") is None
        with pytest.raises(KeyError, match=r"optimizer.read_state\(p, 'exp_avg'\)"):
            state["exp_avg"]
    new = torch.nn.Parameter(old.detach() if written else old.detach()[rows])
    for name in ("exp_avg", "exp_avg_sq"):
        if kind == "bf16":
            state[name] = state[name][rows]
        elif written:
            state[name] = torch.zeros_like(new)
    opt.state[new] = state
    group = opt.param_groups[0]
    group["params"][1] = new
    new.grad = torch.ones_like(new)
    before = new.detach().clone()
    said = "has both a state" if written and kind != "bf16" else "cut or extend all tensors"
    with pytest.raises(ValueError, match=f"'matrix'.* {said}"):
        opt.step()
    assert torch.equal(new, before)
    if not written:  # all tensors by rows
        for key, value in state.items():
            if value.dim() and len(value) == 24:
                state[key] = value[rows]
        opt.step()
        assert not torch.equal(new, before) and opt.state[new]["step"] == 3


@pytest.mark.parametrize("state", [3, [1], "x", torch.ones(3)], ids=repr)
def test_a_state_that_is_no_dictionary(state):
    refused("f32", lambda file: file["state"].update({1: state}))


# ---- Files ---------------------------------------------------------------------------------------


def rewritten(path, tensors=None, metadata=None):
    """Rewrites a safetensors file with some tensors and metadata replaced, or dropped if None."""
    with safetensors.safe_open(path, "pt") as file:
        every, words = {k: file.get_tensor(k) for k in file.keys()}, dict(file.metadata())
    for held, changed in ((every, tensors), (words, metadata)):
        for key, value in (changed or {}).items():
            assert key in held, key
            value = value(held[key]) if callable(value) else value
            if value is None:
                del held[key]
            else:
                held[key] = value
    safetensors.save_file(every, path, words)


def replaced(word, text):
    def change(line):
        words = line.split()
        words[words.index(word) + 1] = text
        return " ".join(words)

    return change


@pytest.mark.parametrize(
    "kind,tensors,metadata",
    [
        ("f32", {"matrix/exp_avg_sq": None}, None),
        ("f32", {"matrix/exp_avg_sq": with_element(NAN)}, None),
        ("f32", {"matrix/exp_avg_sq": with_element(-1.0)}, None),
        ("f32", {"matrix/exp_avg": with_element(INF)}, None),
        ("int8", {"matrix/exp_avg_sq.scale": with_scale(-1.0)}, None),
        ("int8", {"matrix/exp_avg": None}, None),
        ("int8", {"matrix/weight.extra": with_element(NAN)}, None),
        ("fp8", {"matrix/exp_avg.scale": with_scale(INF)}, None),
        ("int8", {"matrix/exp_avg": lambda t: t[1:].clone()}, None),
        *(
            ("f32", None, {"counters.matrix": change})
            for change in (
                None,
                "",
                "state_steps",
                "state_steps 1",
                "x y",
                replaced("state_steps", "-1"),
                replaced("writes", str(2**63)),
                replaced("full_steps", "1.5"),
                replaced("id", "0"),
                replaced("id", str(2**64)),
                replaced("id", "x"),
            )
        ),
        *(
            ("adamw-delayed", None, {"scalars.matrix": change})
            for change in (
                "accumulated_decay",
                "accumulated_decay x",
                "accumulated_decay nan",
                "accumulated_decay inf",
                f"accumulated_decay {float(2**63)!r}",
                "accumulated_decay -0.125",
                "accumulated_decay 1e99999",
                "accumulated_decay 0x1p-3",
            )
        ),
        *(
            ("int8", None, {"recipe.matrix": change})
            for change in ("adamw/bf99", "x", "lion/bf16-kahan/int8", "adamw/bf16-kahan/int4")
        ),
        (
            "int8",
            {
                "matrix/exp_avg_sq.scale": with_scale(3e38),
                "matrix/exp_avg_sq": with_element(127, (3, slice(None))),
            },
            None,
        ),
        *(("f32", None, {"seed": text}) for text in ("x", "1.5", "", str(2**64), "-1", "07")),
        *(("f32", None, {"skipped_steps": text}) for text in ("x", "-1", "1.5", "1_0", str(2**63))),
        *(
            ("f32", None, {"gradient_norm": text})
            for text in ("x", "nan", "inf", "-1", "1e99999", "0x1p0")
        ),
        *(("f32", None, {"group.0.steps": text}) for text in ("x", "-1", "01", str(2**63))),
        *(("f32", None, {"group.0.lr": text}) for text in ("x", "nan", "-1", "0x1p-3", "1_0")),
        *(("f32", None, {"group_of.matrix": text}) for text in ("x", "-1", "00", "1")),
        ("f32", None, {"group.0.beta1": "1.5"}),
        ("f32", None, {"generator": "dice"}),
        ("f32", None, {"format": "other"}),
        ("f32", None, {"rule": "lion"}),
        *(
            ("f32", None, {key: None})
            for key in (
                "rule",
                "seed",
                "generator",
                "skipped_steps",
                "gradient_norm",
                "group.0.steps",
                "recipe.matrix",
                "group_of.matrix",
            )  # fmt: skip
        ),
        ("int8", None, {"scalars.matrix": None}),
        ("adamw-delayed", None, {"scalars.matrix": None}),
    ],
)
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.told("was loaded without hashes, and is larger", kind="int8")
def test_bad_safetensors(kind, tensors, metadata, warm, tmp_path):
    path = tmp_path / "o.safetensors"
    _, writer = trained(kind)
    writer.save_safetensors(path)
    good = path.read_bytes()
    rewritten(path, tensors, metadata)
    params, opt = trained(kind, warm, seed=4)
    before = everything(opt, params)
    of_parameter = tensors or any(".matrix" in key for key in metadata)
    with pytest.raises(ValueError, match="matrix" if of_parameter else None):
        opt.load_safetensors(path)
    assert everything(opt, params) == before and opt.generator == "lattice"
    run(opt, params, warm, warm + 1)
    path.write_bytes(good)
    opt.load_safetensors(path)
    run(opt, params, 2, 3)


# ---- Where files are written ---------------------------------------------------------------------


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_the_mode_of_a_file(tmp_path, umask):
    """A new file has the umask's mode, and an old one keeps its own. The temporary file has
    0600."""
    _, opt = trained("f32")
    path = tmp_path / "o"
    opt.save_safetensors(path)
    assert mode(path) == 0o640
    for wanted in (0o604, 0o600, 0o664):
        os.chmod(path, wanted)
        opt.save_safetensors(path)
        assert mode(path) == wanted
    assert os.listdir(tmp_path) == ["o"]
    opt.load_safetensors(path)


def test_a_symbolic_link_is_followed(tmp_path):
    """The target may not exist yet, or may be behind a chain of links. The link stays."""
    _, opt = trained("f32")
    (tmp_path / "real").mkdir()
    target, link, second = tmp_path / "real" / "o", tmp_path / "link", tmp_path / "second"
    link.symlink_to(os.path.join("real", "o"))
    second.symlink_to("link")
    for path in (link, second):
        opt.save_safetensors(path)
        assert path.is_symlink() and target.is_file() and not target.is_symlink()
        os.chmod(target, 0o606)
        opt.save_safetensors(str(path))
        assert mode(target) == 0o606 and sorted(os.listdir(tmp_path / "real")) == ["o"]
        opt.load_safetensors(path)
        target.unlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "real", "second"]


def test_what_is_no_regular_file_is_written_in_place(tmp_path):
    _, opt = trained("f32")
    opt.save_safetensors(os.devnull)
    assert not stat.S_ISREG(os.stat(os.devnull).st_mode)
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    opt.save_safetensors(pipe)
    reader.join()
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    (tmp_path / "o").write_bytes(found[0])
    before = everything(opt)
    opt.load_safetensors(tmp_path / "o")
    assert everything(opt) == before
    with pytest.raises(OSError):
        opt.save_safetensors(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    _, opt = trained("f32")
    path = tmp_path / "o"
    opt.save_safetensors(path)
    before = path.read_bytes()
    for name in ("fsync", "replace", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *a, **k: (_ for _ in ()).throw(OSError("no")))
            with pytest.raises(OSError):
                opt.save_safetensors(path)
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["o"]
