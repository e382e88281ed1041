"""Tests states in a file (`store=`): the bits of states in memory, resumed runs, kills, what
`state[p]` shows, and refusals."""

import copy
import os
import pickle
import resource
import signal
import tempfile

import pytest
import torch
from conftest import (
    RECIPES,
    class_of,
    everything,
    parameters,
    plain,
    randn,
    rules,
    saved,
    set_gradients,
    states,
    told,
    warnings_are,
    weights_of,
)
from test_cuda import gpu, held, start  # noqa: F401
from test_offload import backward, gradients
from torch.nn import Parameter

import halfstep
from halfstep import plan
from halfstep._library import abi
from halfstep._states import store

#: one that cuts() cuts, one in blocks of its own, one too small for blocks, a scalar
SHAPES = {"body.weight": (96, 160), "conv.weight": (8, 4, 3, 3), "bias": (33,), "scale": ()}

try:
    store._io()
except RuntimeError as reason:
    pytestmark = pytest.mark.skip(reason=str(reason))


@pytest.fixture
def path(tmp_path):
    """The path of a file, in memory where the system has such a place, because each step waits for
    the disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield os.path.join(folder, "run.states")


@pytest.fixture
def cuts(monkeypatch):
    """Makes files whose states are cut into pieces of 4 KiB."""
    new = abi.StoreOptions.new
    monkeypatch.setattr(abi.StoreOptions, "new", lambda **f: new(piece_bytes=4096, **f))


def make(rule="adamw", recipe="f32", shapes=SHAPES, weights_seed=0, **options):
    """Returns parameters and an optimizer for them."""
    dtype, formats = RECIPES[recipe]
    params = parameters(dtype, shapes, weights_seed)
    return params, class_of(rule)(params.items(), **{"seed": 3, **formats, **options})


def pair(path, rule="adamw", recipe="f32", store_weights=True, **options):
    """Makes an optimizer with its states in memory, and the same one with a file."""
    return [
        make(rule, recipe, **options),
        make(rule, recipe, store=halfstep.Store(path, store_weights), **options),
    ]


def resumed(one, rule="adamw", recipe="f32", **options):
    """Closes the file of an optimizer and goes on from it with an optimizer of other weights."""
    one[1].close_store()
    return make(rule, recipe, weights_seed=9, store=one[1].store.path, **{"seed": None, **options})


def steps(both, first, last, skip=()):
    """Makes steps in which the parameters `skip` have no gradient."""
    for params, opt in both:
        for step in range(first, last):
            set_gradients(params, step)
            for name in skip:
                params[name].grad = None
            opt.step()
            opt.zero_grad()


def same(both, compared=everything):
    (a, b), (c, d) = both
    assert weights_of(a) == weights_of(c)
    assert compared(d) == compared(b)


# ---- The bits of states in memory ----------------------------------------------------------------


@rules
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits(path, cuts, rule, recipe):
    """Also of a run that goes on from the file in between."""
    both = pair(path, rule, recipe, clip_norm=0.5)
    steps(both, 1, 3)
    both[1] = resumed(both[1], rule, recipe, clip_norm=0.5)
    same(both)
    steps(both, 3, 5, skip=["bias"])
    same(both)
    both[1] = resumed(both[1], rule, recipe, clip_norm=0.5)
    steps(both, 5, 6)
    same(both)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "clip": "delayed"}])
@pytest.mark.parametrize("keeps", [True, False])
def test_gradient_release(path, options, keeps):
    options["gradient_release"] = True
    both = pair(path, recipe="ecc8-int8", store_weights=keeps, **options)

    def some(first, last):
        for params, opt in both:
            for step in range(first, last):
                sum((p.float() * randn(p.shape, step)).sum() for p in params.values()).backward()
                opt.step()
                opt.zero_grad()

    some(1, 4)
    same(both)
    both[1][1].close_store()
    params = {n: Parameter(p.detach().clone()) for n, p in both[1][0].items()}
    options.update(RECIPES["ecc8-int8"][1])
    both[1] = params, halfstep.AdamW(params.items(), store=path, **options)
    some(4, 6)
    same(both)


@pytest.mark.parametrize("again", [False, True])
def test_micro_batches(path, again):
    """A run that goes on from the file knows which parameters have micro-batches in their
    states."""
    both = pair(path, "sgd", "bf16-sr", momentum=0.9)
    steps(both, 1, 2)
    for _, opt in both:
        opt.optimizer_accumulation = True
    steps(both, 2, 4, skip=["scale"])
    if again:
        both[1] = resumed(both[1], "sgd", "bf16-sr", momentum=0.9)
    for _, opt in both:
        opt.optimizer_accumulation = False
    steps(both, 4, 5, skip=["bias"])
    same(both)


@pytest.mark.parametrize("recipe", ["kahan", "ecc8-int8"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("release", [True, False])
def test_weights_on_a_gpu(gpu, path, recipe, keeps, release):  # noqa: F811
    dtype, formats = RECIPES[recipe]
    values = start(dtype, SHAPES)
    options = {**formats, "seed": 5, "clip_norm": 0.5, "gradient_release": release}
    here = {name: Parameter(v.clone()) for name, v in values.items()}
    plain_one = halfstep.AdamW(here.items(), **options)

    def offloaded(values):
        there = {name: Parameter(gpu.tensor(v)) for name, v in values.items()}
        how = {"store": halfstep.Store(path, keeps)}
        return there, halfstep.CPUOffload(there.items(), halfstep.AdamW, **how, **options)

    def some(both, first, last):
        for params, opt in both:
            for step in range(first, last):
                backward(gpu, params, gradients(params, step))
                opt.step()
                opt.zero_grad()

    both = [(here, plain_one), offloaded(values)]
    some(both, 1, 4)
    assert held(gpu, *both[1]) == held(gpu, *both[0])
    both[1][1].close_store()
    both[1] = offloaded({n: torch.zeros_like(p) if keeps else p.detach() for n, p in here.items()})
    some(both, 4, 6)
    assert held(gpu, *both[1]) == held(gpu, *both[0])


@pytest.mark.told("'bias' is not finite")
@pytest.mark.told("was written, but not by this optimizer")
def test_a_skipped_step_and_written_weights(path):
    """Weights without a gradient that somebody has written are in the file after the next step."""
    both = pair(path, recipe="kahan")
    steps(both, 1, 3)
    with warnings_are("ignore"):
        for params, opt in both:
            set_gradients(params, 3)
            params["bias"].grad[3] = torch.inf
            opt.step()
            with torch.no_grad():
                params["bias"].mul_(0.5)
                params["body.weight"].mul_(0.5)
        steps(both, 4, 5, skip=["bias"])
    same(both)
    both[1] = resumed(both[1], recipe="kahan")
    same(both)
    assert both[1][1].skipped_steps == 1


# ---- Goes on from the file -----------------------------------------------------------------------


@pytest.mark.told("options are those of .*run.states")
def test_a_killed_process(path):
    """The child makes steps and says so until it is killed."""
    reads, writes = os.pipe()
    with warnings_are("ignore"):  # of threads that the child does not have
        child = os.fork()
    if not child:
        try:
            params, opt = make(recipe="ecc8-int8", clip_norm=0.5, store=path, lr=0.5)
            opt.param_groups[0]["lr"] = 2e-3
            for step in range(1, 100000):
                set_gradients(params, step)
                opt.step()
                os.write(writes, b"s")
        finally:
            os._exit(1)
    os.close(writes)
    told = b""
    while len(told) < 3:
        told += os.read(reads, 1) or b"the child failed"
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.close(reads)
    params, opt = make(recipe="ecc8-int8", clip_norm=0.5, weights_seed=9, store=path)
    made = opt.param_groups[0]["group_steps"]
    assert made >= 3 and opt.param_groups[0]["lr"] == 2e-3
    whole = make(recipe="ecc8-int8", clip_norm=0.5, lr=2e-3)
    steps([whole], 1, made + 1)
    same([whole, (params, opt)])


@pytest.mark.told("options are those of .*run.states")
def test_a_schedule_goes_on(path):
    both, ends = pair(path, lr=1e-2), []
    for params, opt in both:
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n))
        for step in range(1, 4):
            set_gradients(params, step)
            opt.step()
            schedule.step()
        ends.append(schedule)
    opt = resumed(both[1])[1]
    last = opt.param_groups[0]["group_steps"] - 1
    assert opt.param_groups[0]["lr"] == 1e-2 * (1 / 3)  # that of the last whole step
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n), last_epoch=last)
    assert schedule.get_last_lr() == ends[0].get_last_lr() == [1e-2 * (1 / 4)]


@pytest.mark.told("options are those of .*run.states")
def test_prodigy_goes_on_with_its_estimate(path):
    both = pair(path, "prodigy", lr=1.0)
    for _ in range(6):
        steps(both, 1, 2)
    both[1] = resumed(both[1], "prodigy", lr=1.0)
    assert both[1][1].param_groups[0]["d"] == both[0][1].param_groups[0]["d"] > 1e-6


# ---- What state[p] shows -------------------------------------------------------------------------


def test_state_of_a_parameter(path):
    both = pair(path, recipe="ecc8-int8")
    steps(both, 1, 3)
    name = "body.weight"
    memory, file = (opt.state[params[name]] for params, opt in both)
    assert isinstance(file, dict) and len(file) == len(memory) and set(file) == set(memory)
    assert "exp_avg.codes" in file and "exp_avg" not in file and file.get("nothing", 5) == 5
    assert float(file["step"]) == 2.0 and "in a file" in repr(file)
    for made in (
        *(
            dict(file),
            {**file},
            file | {},
            {} | file,
            file.copy(),
            copy.copy(file),
            copy.deepcopy(file),
        ),
        pickle.loads(pickle.dumps(file)),
        dict(file.items()),
    ):
        assert type(made) is dict and plain(made) == plain(memory)
    steps(both, 3, 4)
    assert plain(dict(file)) == plain(memory)  # it shows the states of now
    for opt in (both[0][1], both[1][1]):
        state = opt.state[opt.param_groups[0]["params"][0]]
        state["exp_avg.codes"] = torch.zeros_like(state["exp_avg.codes"])
    steps(both, 4, 5)
    same(both)
    with pytest.raises(ValueError, match="exp_avg.codes.*body.weight.*torch.float32"):
        file["exp_avg.codes"] = torch.zeros(96, 160)
    with pytest.raises(TypeError, match="exp_avg.codes.*cannot be deleted"):
        del file["exp_avg.codes"]
    both[1] = resumed(both[1], recipe="ecc8-int8")
    same(both)


def test_what_others_change(path, cuts):
    """States and options that change between steps, also while some pieces stay in memory."""
    both = [
        make(recipe="ecc8-int8"),
        make(recipe="ecc8-int8", store=halfstep.Store(path, memory="36K")),
    ]

    def change(act):
        for params, opt in both:
            act(opt, opt.state, params["bias"])

    def count(opt, state, p):
        state[p]["step"] = torch.tensor(7.0)

    def replace(opt, state, p):
        state[p] = dict(state[p])

    def options(opt, state, p):
        opt.clip_norm = 0.2
        opt.param_groups[0].update(lr=0.1, betas=(0.8, 0.9), cautious=True)

    steps(both, 1, 3)
    for i, act in enumerate(
        (
            lambda opt, state, p: state.clear(),
            replace,
            count,
            lambda opt, state, p: state[p]["step"].fill_(9.0),
            lambda opt, state, p: state.pop(p),
            options,
        )
    ):
        change(act)
        steps(both, i + 3, i + 4)
        same(both)
    change(lambda opt, state, p: opt.param_groups[0].update(states="bf16-sr"))
    with pytest.raises(RuntimeError, match="body.weight.*bf16-sr here.*int8 in the file"):
        steps(both[1:], 9, 10)
    change(lambda opt, state, p: opt.param_groups[0].update(states="int8"))
    steps(both, 9, 10)
    same(both)


def test_reading_and_writing_as_numbers(path):
    both = pair(path, recipe="ecc8-int8")
    steps(both, 1, 3)
    seen = []
    for params, opt in both:
        p = params["body.weight"]
        opt.write_state(p, "exp_avg", opt.read_state(p, "exp_avg") * 0.5)
        opt.write_weight(p, opt.read_weight(p) * 0.5)
        seen.append(plain([opt.read_weight(p), opt.read_state(p, "exp_avg_sq")]))
    assert seen[0] == seen[1]
    steps(both, 3, 5)
    same(both)


def test_averages_of_schedule_free_training(path):
    both = pair(path, "schedulefree", "ecc8-int8")
    for _, opt in both:
        opt.train()
    steps(both, 1, 4)
    for _, opt in both:
        opt.eval()
    assert weights_of(both[0][0]) == weights_of(both[1][0])
    for _, opt in both:
        opt.train()
    steps(both, 4, 6)
    same(both)


def test_state_dictionaries(path, tmp_path):
    both = pair(path, recipe="ecc8-int8")
    steps(both, 1, 3)
    kept, weights = saved(both[1][1].state_dict()), {n: p.clone() for n, p in both[1][0].items()}
    assert plain(kept) == plain(both[0][1].state_dict())
    steps(both, 3, 4)
    for params, opt in both:
        opt.load_state_dict(kept)
        with torch.no_grad(), warnings_are("ignore"):
            for name, p in params.items():
                p.copy_(weights[name])
    both[1][1].load_state_dict(kept)
    steps(both, 3, 5)
    same(both)
    # One of other formats is converted, here and there.
    other = make(recipe="bf16-sr", states="bf16-sr")
    steps([other], 1, 3)
    with told("the loaded states are .* converted"):
        for _, opt in both:
            opt.load_state_dict(other[1].state_dict())
        steps(both, 5, 6)
    same(both)
    both[1] = resumed(both[1], recipe="ecc8-int8")
    same(both)


@pytest.mark.parametrize("recipe", ["ecc8-int8", "bf16-sr"])
def test_safetensors(path, tmp_path, recipe):
    """Files of both are loaded by both. One of other formats is converted."""
    pytest.importorskip("safetensors.torch")
    both, files = pair(path, recipe=recipe), [str(tmp_path / str(i)) for i in range(2)]
    steps(both, 1, 3)
    for (_, opt), file in zip(both, files):
        opt.save_safetensors(file)
    steps(both, 3, 4)
    with told("the loaded states are .* converted"):
        for (_, opt), file in zip(both, reversed(files)):
            opt.load_safetensors(file)
        steps(both, 4, 6)
        same(both, states)
        for _, opt in both:
            opt.load_safetensors(files[0])
        same(both, states)
        other = make(recipe="sr-int4")
        steps([other], 1, 3)
        other[1].save_safetensors(files[0])
        for _, opt in both:
            opt.load_safetensors(files[0])
        steps(both, 6, 7)
    same(both, states)
    both[1] = resumed(both[1], recipe=recipe)
    same(both, states)


@pytest.mark.told("options are those of .*run.states")
def test_a_safetensors_file_with_a_wrong_number(path, tmp_path):
    """The optimizer is what its own file holds."""
    safetensors = pytest.importorskip("safetensors.torch")
    both = pair(path, recipe="ecc8-int8")
    steps(both, 1, 3)
    file = str(tmp_path / "file")
    both[1][1].save_safetensors(file)
    steps(both, 3, 4)
    with safetensors.safe_open(file, "pt") as content:
        tensors = {key: content.get_tensor(key) for key in content.keys()}
        metadata = content.metadata()
    tensors["conv.weight/exp_avg_sq.scale"][3] = -1.0
    safetensors.save_file(tensors, file, metadata)
    with pytest.raises(RuntimeError, match="conv.weight"):
        both[1][1].load_safetensors(file)
    same(both)
    steps(both, 4, 5)
    same(both)


# ---- What a file takes ---------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_plan(path, keeps):
    """The two halves of the file are what plan() says; the rest are header and records."""
    shapes = {"a": (256, 1024), "b": (512, 64)}
    make(recipe="ecc8-int8", store=halfstep.Store(path, keeps), shapes=shapes)
    _, header, _ = store.contents(path)
    half = sum(-(-(states + weight) // 4096) * 4096 for *_, states, weight in header["pieces"])
    (row,) = halfstep.plan(shapes, "adamw/bf16-ecc8/int8", store=halfstep.Store(path, keeps)).rows
    assert row.disk == 2 * half < os.path.getsize(path)
    assert row.read == sum(piece[3] for piece in header["pieces"])
    assert row.written == row.read + keeps * row.weights
    assert row.states == half  # less than three pieces
    assert "disk" in str(halfstep.plan({"a": (40960, 4096)}, store=True))


@pytest.mark.all
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system counts no bytes")
@pytest.mark.parametrize("rule", ["adamw", "lamb", "prodigy"])
def test_bytes_of_a_step(path, rule):
    """Tensors that are cut, of a rule without sums, with sums over each, with sums over all."""

    def moved():
        with open("/proc/self/io") as file:
            return [int(line.split()[1]) for line in file][:2]

    shapes = {"a": (4096, 4096), "b": (4096, 4096)}
    params, opt = make(rule, states="int8", store=path, shapes=shapes)
    (row,) = halfstep.plan(shapes, f"{rule}/f32/int8", store=True).rows
    set_gradients(params, 1)
    for _ in range(2):
        before = moved()
        opt.step()
        read, written = (b - a for a, b in zip(before, moved()))
        assert row.read <= read < 1.005 * row.read
        assert row.written <= written < 1.005 * row.written


# ---- Errors --------------------------------------------------------------------------------------


def refused(match, error=ValueError, **options):
    with pytest.raises(error, match=match):
        make(**options)


@pytest.mark.told("options are those of .*run.states")
def test_refusals(path, tmp_path):
    both = pair(path, recipe="ecc8-int8")
    steps(both, 1, 2)
    opt = both[1][1]
    for act in (lambda: pickle.dumps(opt), lambda: copy.deepcopy(opt)):
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            act()
    with pytest.raises(RuntimeError, match="no group can be added"):
        opt.add_param_group({"params": [Parameter(torch.zeros(3))]})
    refused("call its close_store", RuntimeError, recipe="ecc8-int8", store=path)
    opt.close_store()
    with pytest.raises(RuntimeError, match="closed"):
        steps(both, 2, 3)
    refused("recipe", RuntimeError, recipe="sr-int4", store=path)
    refused("body.weight", RuntimeError, recipe="ecc8-int8", store=path, shapes={"other": (3, 5)})
    refused("compile=", store=path, compile=True)
    refused("memory='many' is not a size in bytes", store=f"{path}?memory=many")
    refused("store=3 is not a path", TypeError, store=3)
    with pytest.raises(ValueError, match="CPUOffload"):
        halfstep.StateStreaming(both[0][0].items(), halfstep.AdamW, store=path)
    other = tmp_path / "other"
    other.write_bytes(b"no file of states" * 1000)
    refused("other", RuntimeError, store=str(other))


@pytest.mark.parametrize(
    "text",
    ["a?", "a?b", "?weights=false", "a?weights=no", "a?weights=false&", "a?path=b", "a?memory"]
    + ["a?memory=1&memory=2", "a?weights=false&other=1", "what?.states"],
)
def test_text_that_is_neither_a_path_nor_options(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make_one in (lambda: make(store=text), lambda: plan({"a": (4, 4)}, store=text)):
        with pytest.raises(ValueError, match=r"weights=false&memory=8G'\. Write halfstep\.Store\("):
            make_one()
    assert not os.listdir(), "nothing was written"


def test_options_of_a_store_in_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, weights, memory in (
        ("a.states", True, None),
        ("a.states?weights=False", False, None),
        ("a.states?memory=8G&weights=true", True, 8 << 30),
        ("a=1&b.states?memory=1e6", True, 1000000),
    ):
        store = make(store=text)[1].store
        assert (store.weights, store.memory) == (weights, memory)
        assert store == halfstep.Store(text.partition("?")[0], weights, memory)
        assert store.path == os.fspath(store) == str(tmp_path / text.partition("?")[0])
        os.remove(store.path)
    odd = tmp_path / "what?weights=false"
    for given in (halfstep.Store(str(odd)), odd, os.fsencode(odd)):
        store = make(store=given)[1].store
        assert store.weights and odd.exists()
        odd.unlink()


def test_options_that_differ_from_the_file(path):
    both = pair(path, lr=1e-2)
    steps(both, 1, 2)
    with warnings_are("error"):
        opt = resumed(both[1], lr=1e-2)[1]
    opt.close_store()
    with pytest.warns(UserWarning, match="lr=0.01, not 0.5"):
        opt = make(store=path, lr=0.5)[1]
    assert opt.param_groups[0]["lr"] == 1e-2


def test_a_file_that_is_deleted(path):
    both = pair(path)
    steps(both, 1, 2)
    os.remove(path)
    with pytest.raises(halfstep.HalfstepError, match="was deleted while it was in use"):
        steps(both, 2, 3)


def test_a_parameter_that_was_frozen(path):
    params = parameters(torch.float32, SHAPES)
    params["bias"].requires_grad_(False)
    opt = halfstep.AdamW(params.items(), store=path)
    set_gradients(params, 1)
    with pytest.raises(ValueError, match="'bias' has a gradient.*make another file"):
        opt.step()


def test_weights_that_are_not_those_of_the_file(path):
    params, opt = make(store=f"{path}?weights=false")
    steps([(params, opt)], 1, 3)
    opt.close_store()
    refused("keeps no weights.*load the weights", RuntimeError, store=path, weights_seed=9)
    opt = halfstep.AdamW(params.items(), store=path)
    assert opt.param_groups[0]["group_steps"] == 2


@pytest.fixture
def full():
    """A function that lets files grow no further, or again. Puts back what was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda yes: resource.setrlimit(resource.RLIMIT_FSIZE, (65536 if yes else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(path, full):
    """Making fails at once. A step that fails leaves the last whole step, here and in the file."""
    full(True)
    refused("bytes", RuntimeError, store=path)
    assert not os.path.exists(path)
    full(False)
    both = pair(path, recipe="kahan", clip_norm=0.5)
    steps(both, 1, 3)
    full(True)
    with pytest.raises(RuntimeError, match="run.states.*are those of its last whole step"):
        steps(both[1:], 3, 4)
    same(both)
    full(False)
    steps(both, 3, 5)
    same(both)
    both[1] = resumed(both[1], recipe="kahan", clip_norm=0.5)
    same(both)


def test_a_full_disk_without_weights(path, full):
    both = pair(path, recipe="kahan", store_weights=False)
    steps(both, 1, 3)
    full(True)
    with pytest.raises(RuntimeError, match="keeps no weights, so load those of its last"):
        steps(both[1:], 3, 4)
    full(False)
    params = {n: Parameter(p.detach().clone()) for n, p in both[0][0].items()}
    both[1] = params, halfstep.AdamW(params.items(), store=path, **RECIPES["kahan"][1])
    same(both)
    steps(both, 3, 5)
    same(both)
