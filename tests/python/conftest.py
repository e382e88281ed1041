"""Shared code of the test files: classes under test, recipes, parameters with gradients, all bits
of an optimizer. Also says how the tests run."""

import collections
import contextlib
import copy
import functools
import gc
import io
import itertools
import os
import pickle
import re
import shlex
import sys
import warnings
from pathlib import Path

import cells
import pytest
import torch
from common import bits, plain, states, stepped  # noqa: F401
from torch import nn

import halfstep
from halfstep._library import abi
from halfstep._states import layout
from halfstep._tensors import torch_public
from halfstep._weights8 import blocks

# A test may take fixtures and helpers from a test of another room.
sys.path += [str(room) for room in Path(__file__).parent.iterdir() if room.is_dir()]

#: the rules that step weights by gradients, in the order of the table
RULES = [name for name, rule in abi.rules.items() if not rule.raw_gradient]
#: steps after which every rule has moved a weight: the first may only begin a second moment
FIRST_MOVEMENT = 2
#: recipe by a short name -> dtype of the parameters, options
RECIPES = {
    "f32": (torch.float32, {}),
    "bf16-sr": (torch.bfloat16, {"weights": "bf16-sr"}),
    "kahan": (torch.bfloat16, {"weights": "bf16-kahan"}),
    "ecc8-int8": (torch.bfloat16, {"weights": "bf16-ecc8", "states": "int8"}),
    "sr-int4": (torch.bfloat16, {"weights": "bf16-sr", "states": "int4"}),
}
#: a matrix of whole blocks, one of short ones, an image kernel, a vector, a scalar, nothing at all
SHAPES = {
    "body.weight": (24, 96),
    "head.weight": (17, 50),
    "conv.weight": (8, 4, 3, 3),
    "body.bias": (33,),
    "scale": (),
    "empty": (0, 4),
}

TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
}
if hasattr(torch.optim, "Muon"):
    TORCH["muon"] = torch.optim.Muon
#: the rules that torch has, with options that use all of their states
TORCH_OPTIONS = [
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
    ("adam", {"amsgrad": True}),
    ("adamw", {}),
    ("radam", {"lr": 1e-2}),
    ("rmsprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
]

#: how the text of each warning of halfstep begins
OURS = "halfstep: "

#: two ways to copy anything
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda whole: pickle.loads(pickle.dumps(whole))}

rules = pytest.mark.parametrize("rule", RULES)
recipes = pytest.mark.parametrize("recipe", RECIPES)
#: what Muon says of the states in 4 bits
COARSE_TEXT = "muon: momentum_buffer in int4"
COARSE = pytest.mark.told(COARSE_TEXT, rule="muon", recipe="sr-int4")


def class_of(rule):
    return getattr(halfstep, abi.rules[rule].label)


def parameters(dtype=torch.float32, shapes=None, seed=0):
    """Returns parameters by name, made from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in (shapes or SHAPES).items()
    }


def randn(shape, seed, dtype=torch.float32):
    """Returns normal values that follow from the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def named(params):
    """Returns the parameters of a module or a dictionary by name."""
    return dict(params.named_parameters()) if isinstance(params, nn.Module) else params


def twins(params):
    return {name: nn.Parameter(p.detach().clone()) for name, p in named(params).items()}


def set_gradients(params, step, dtype=None):
    """Sets the gradients of a step. They depend on the name and the step only."""
    for name, p in named(params).items():
        p.grad = randn(p.shape, 1000 * step + sum(name.encode()), dtype or p.dtype)


def run(opt, params, first, last):
    for step in range(first, last):
        set_gradients(params, step)
        opt.step()


def weights_of(params):
    """Returns the bits of the weights of a module, a dictionary or a list."""
    params = named(params)
    return [bits(p) for p in (params.values() if isinstance(params, dict) else params)]


def everything(opt, params=None):
    """Returns all weights, states, counters and options of an optimizer, comparable with ==."""
    if params is None:
        params = [p for g in opt.param_groups for p in g["params"]]
    return weights_of(params), plain(opt.state_dict())


def streams(opt, p):
    """Returns what is stored for the elements of a parameter: its state without counters and the
    like."""
    return {
        key: value
        for key, value in opt.state[p].items()
        if key != "step" and key not in layout.numbers_of(abi.rules[opt.rule])
    }


def stored(opt, p):
    """Returns the names of the states that are stored for a parameter."""
    return [
        s.name
        for s in abi.rules[opt.rule].states
        if {s.name, s.name + ".codes"} & set(opt.state.get(p, ()))
    ]


def ids(opt):
    """Returns the ids of all parameters that have states."""
    return [
        int(opt.state[p]["id"]) % 2**64
        for g in opt.param_groups
        for p in g["params"]
        if p in opt.state
    ]


def group_options(opt):
    """Returns the options of all groups, except those that differ by parameter."""
    return [{k: plain(v) for k, v in g.items() if k != "params"} for g in opt.param_groups]


def make(rule, recipe="f32", named=True, shapes=None, seed=0, **options):
    """Makes parameters by name and an optimizer for them. Two calls give the same bits."""
    dtype, formats = RECIPES[recipe]
    params = parameters(dtype, shapes)
    return params, class_of(rule)(
        list(params.items()) if named else list(params.values()), seed=seed, **formats, **options
    )


def another(params, rule="adamw", recipe="f32", **options):
    """Copies parameters and makes an optimizer for the copies."""
    fresh = twins(params)
    return fresh, class_of(rule)(fresh.items(), **RECIPES[recipe][1], **options)


def saved(state_dict):
    """Saves to a file and reads it as torch.load() does by default."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a, b, params_a, params_b):
    assert weights_of(params_a) == weights_of(params_b)
    assert states(a) == states(b)


def same_steps(a, b, params_a, params_b, first, last):
    """Makes the same steps with both. They must end with the same bits."""
    run(a, params_a, first, last)
    run(b, params_b, first, last)
    same(a, b, params_a, params_b)


def assert_close(params, others, rtol=1e-5, atol=1e-6):
    for (name, p), q in zip(named(params).items(), named(others).values()):
        torch.testing.assert_close(
            p.detach(), q.detach(), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def outcome(act):
    """Returns what the error of a function says, or "stepped" if it raises none."""
    try:
        act()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "stepped"


def train(model, opt, first, last):
    """Makes steps with the gradients of loss_of()."""
    for step in range(first, last):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()


@contextlib.contextmanager
def warnings_are(action):
    """Treats all warnings inside in one way: "ignore", "error", or "always", which collects them in
    the list that it yields. "ignore" is for warnings of other packages: halfstep's still count."""
    with warnings.catch_warnings(record=action == "always") as found:
        warnings.simplefilter(action)
        if action == "ignore":
            warnings.filterwarnings("always", OURS)
        yield found


def peak(act):
    """Returns the most bytes that torch's allocator had handed out at once in a call, beyond those
    before it. What the call returns still counts."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = act()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    del kept
    return max(itertools.accumulate(changes, initial=0))


#: torch shares the memory of processors in /dev/shm alone, which some machines close to a user
CAN_SHARE = os.access("/dev/shm", os.W_OK)


def share(module):
    """Moves the memory of a module in place, into shared memory where torch can share any."""
    if CAN_SHARE:
        module.share_memory()
        return
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        storage, before = tensor.untyped_storage(), tensor.data_ptr()
        storage.resize_(storage.nbytes() + 64)
        assert tensor.data_ptr() != before


@contextlib.contextmanager
def no_other_warnings():
    """Fails at its end if halfstep warned inside where nothing expected it, as pytest.warns() does.
    Filters cannot hide these warnings. Those of other packages go on to pytest."""
    # What a test is told does not depend on the tests before it.
    torch_public.warn_once.cache_clear()
    blocks._judging = True
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", OURS)
        yield
    package = os.path.dirname(halfstep.__file__) + os.sep
    ours = []
    for w in found:
        if re.match(OURS, str(w.message)) or w.filename.startswith(package):
            ours.append(f"{w.filename}:{w.lineno}: {w.category.__name__}: {w.message}")
        else:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    if ours:
        raise AssertionError("nothing expected these warnings:\n" + "\n".join(ours))


def told(text, when=True):
    """Expects a warning of halfstep with this text inside, if `when` holds."""
    match = OURS + f".*{text}"
    return pytest.warns(Warning, match=match) if when else contextlib.nullcontext()


def network(dtype=torch.float32):
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(48, 64),
        nn.Tanh(),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    ).to(dtype)


def batch(step, dtype=torch.float32):
    return randn((8, 48), step, dtype)


def make_network(rule="adamw", recipe="f32", seed=0, **options):
    """Makes a model and an optimizer for it. Two calls give the same bits."""
    dtype, formats = RECIPES[recipe]
    model = network(dtype)
    return model, class_of(rule)(model.named_parameters(), seed=seed, **formats, **options)


def loss_of(model, step):
    return model(batch(step, next(model.parameters()).dtype)).float().pow(2).mean()


@pytest.fixture(autouse=True)
def one_thread():
    """Limits torch to one thread, because it would start threads for each small test."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def only_expected_warnings(request):
    """Fails a test for warnings of halfstep that it does not expect. A mark expects one, as told()
    does, where the test's parameters have the values that the mark names."""
    values = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with no_other_warnings(), contextlib.ExitStack() as expected:
        for mark in (*request.node.iter_markers("told"), COARSE.mark):
            if mark.kwargs.items() <= values.items():
                expected.enter_context(told(*mark.args))
        yield


@pytest.fixture(scope="session")
def pool():
    """A pool of up to four ranks of torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("no gloo")
    from ranks import Pool

    pool = Pool(4, no_other_warnings)
    yield pool
    pool.close()


@pytest.fixture
def caught():
    """Collects all warnings of a test in a list."""
    with warnings_are("always") as found:
        yield found


# ---- How tests run -------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.pluginmanager.register(cells)


def pytest_collection_modifyitems(items):
    """Chooses the cases that `make test` runs of a test with several parameters. Each value occurs
    at least once, combined with the values of the others in turn. The other cases of the product
    are marked "all". A test that makes the product itself joins the names of its values by "|".
    """
    tests = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("all"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        values = {
            case: {
                (i, part)
                for i, name in enumerate(case.callspec._idlist)
                for part in name.split("|")
            }
            for case in cases
        }
        left, uses = set().union(*values.values()), collections.Counter()
        while left:
            case = max(
                values, key=lambda c: (len(values[c] & left), -sum(uses[v] for v in values[c]))
            )
            chosen = values.pop(case)
            left -= chosen
            uses.update(chosen)
        for case in values:
            case.add_marker(pytest.mark.all)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a file's tests to one process. All files that start ranks go to the same process, so
    that at most one group of ranks runs at a time."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def starts_ranks(file):
        return "(pool" in (config.rootpath / file).read_text(encoding="utf-8")

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "ranks" if starts_ranks(file) else file

    return ByFile(config, log)


def pytest_collection_finish():
    """Hides long-lived objects from the garbage collector, because a test on a fake GPU ends with a
    collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Adds the command that runs a failed test alone."""
    report = (yield).get_result()
    if report.failed:
        report.sections.append(
            ("reproduce", "bash tests/tools/run_python.sh " + shlex.quote(report.nodeid))
        )
