"""Tests what the rules of matrices take parameters for: stacks of matrices, kernels, heads and
splits."""

import pytest
import torch
from conftest import bits, randn
from torch.nn import Parameter

import halfstep
from halfstep._library import abi
from halfstep._states import layout

CLASSES = (halfstep.Muon, halfstep.Adafactor, halfstep.CAME)
#: options without sums over the parameter, which matrices by themselves do not share
APART = {
    halfstep.Muon: {},
    halfstep.Adafactor: {"d": 1e30, "scale_parameter": False, "beta1": 0.9},
    halfstep.CAME: {"clip_threshold": 0.0},
}


def stepped(cls, shapes, steps=4, cut=lambda grad: [grad], **options):
    """Steps parameters of these shapes, which are cut from one tensor, and returns them with their
    optimizer."""
    whole = randn(shapes[0], 0)
    params = [Parameter(part.clone()) for part in cut(whole)]
    opt = cls([(f"p{i}", p) for i, p in enumerate(params)], lr=1e-2, seed=3, **options)
    for step in range(steps):
        for p, grad in zip(params, cut(randn(shapes[0], step + 1))):
            p.grad = grad.clone()
        opt.step()
    return opt, params


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("shape", [(3, 12, 20), (5, 7, 33), (2, 3, 12, 20)])
def test_a_stack_is_its_matrices(cls, shape):
    how = {"matrix": "last-two"} if len(shape) > 3 else {}
    _, (stack,) = stepped(cls, [shape], **APART[cls], **how)
    _, matrices = stepped(cls, [shape], cut=lambda x: list(x.flatten(0, -3)), **APART[cls])
    assert bits(stack) == bits(torch.stack([p.detach() for p in matrices]).reshape(shape))
    assert not torch.equal(stack, randn(shape, 0))


@pytest.mark.parametrize("shape", [(8, 1, 4), (6, 5, 3), (4, 1, 31), (8, 4, 3, 3), (6, 5, 1, 1)])
def test_muon_flattens_kernels(shape):
    _, (kernel,) = stepped(halfstep.Muon, [shape])
    _, (matrix,) = stepped(halfstep.Muon, [shape], cut=lambda x: [x.flatten(1)])
    assert bits(kernel.flatten(1)) == bits(matrix)


@pytest.mark.parametrize("cls", (halfstep.Adafactor, halfstep.CAME))
def test_kernels_of_one_number_are_not_factored(cls):
    for shape in ((6, 5, 1, 1), (6, 1, 5), (6, 5, 1, 3)):
        opt, (p,) = stepped(cls, [shape], states="int8")
        assert not any(key.endswith(("_row", "_col", "row_var", "col_var")) for key in opt.state[p])
        _, (vector,) = stepped(cls, [shape], cut=lambda x: [x.flatten()], states="f32")
        _, (plain,) = stepped(cls, [shape], states="f32")
        assert torch.equal(plain.flatten(), vector)


def blocks_of(shape, sizes):
    """Returns a function that cuts a tensor into the blocks of rows of each of its matrices."""
    return lambda x: [
        part for matrix in x.reshape(-1, *shape[-2:]) for part in matrix.split(list(sizes))
    ]


#: option, shape, rows of the blocks of a matrix
BLOCKS = [
    ({"heads": 3}, (24, 20), (8, 8, 8)),
    ({"split": [12, 6, 6]}, (24, 20), (12, 6, 6)),
    ({"split": (2, 75, 13)}, (90, 33), (2, 75, 13)),
    ({"heads": 2}, (3, 12, 20), (6, 6)),
    ({"split": [5, 7]}, (3, 12, 20), (5, 7)),
    ({"split": [24]}, (24, 20), (24,)),
    ({"split": [5, 7], "matrix": "flatten"}, (12, 3, 20), None),
]


@pytest.mark.parametrize("options, shape, sizes", BLOCKS)
@pytest.mark.parametrize("cls", CLASSES)
def test_blocks_of_rows_are_matrices(cls, options, shape, sizes):
    cut = blocks_of(shape, sizes) if sizes else lambda x: list(x.flatten(1).split([5, 7]))
    _, (whole,) = stepped(cls, [shape], **options, **APART[cls])
    _, parts = stepped(cls, [shape], cut=cut, **APART[cls])
    assert bits(whole) == bits(torch.cat([p.detach() for p in parts]).reshape(shape))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "options, shape, words",
    [
        ({"heads": 5}, (24, 20), r"heads=5 cannot divide .* \(24, 20\), whose matrices have 24"),
        ({"heads": 3}, (6, 4, 20), r"heads=3 cannot divide .* \(6, 4, 20\), whose matrices have 4"),
        (
            {"split": [8, 8]},
            (24, 20),
            r"split=\[8, 8\] cannot divide .* 16 rows, .* it has 24; leave",
        ),
        ({"split": (8, 20)}, (24, 20), r"split=\[8, 20\] cannot divide .* 28 rows, .* it has 24"),
        ({"split": [2, 4]}, (6, 4, 20), r"split=\[2, 4\] cannot divide .* 6 rows, .* it has 4"),
        ({"split": [12, 12], "heads": 2}, (24, 20), r"heads=2 and split=\[12, 12\]; give one"),
        (
            {"split": [23, 1]},
            (24, 20),
            r"split=\[23, 1\] is not a list .* 16 blocks, .* at least 2",
        ),
        ({"split": [12.0, 12]}, (24, 20), r"split=\[12.0, 12\] is not a list"),
        ({"split": 12}, (24, 20), "split=12 is not a list"),
        ({"split": "12,12"}, (24, 20), "split='12,12' is not a list"),
        ({"split": [2] * 17}, (34, 20), "is not a list of the rows of up to 16 blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(cls, options, shape, words):
    with pytest.raises(ValueError, match=words):
        cls([Parameter(torch.zeros(shape))], **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_options_are_checked_by_name(cls):
    with pytest.raises(ValueError, match="unknown matrix='rows'; known: auto, last-two, flatten"):
        cls([Parameter(torch.zeros(2, 2))], matrix="rows")
    for heads in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match=f"heads={heads!r} is not a number"):
            cls([Parameter(torch.zeros(2, 2))], heads=heads)
    with pytest.raises(TypeError, match="matrix"):
        halfstep.AdamW([Parameter(torch.zeros(2, 2))], matrix="flatten")


def test_repr_says_what_was_taken_for_what():
    shapes = (4, 24, 32), (8, 1, 4), (6, 5, 3, 3), (6, 5, 1, 1), (24, 32), (7,)
    params = [Parameter(torch.zeros(shape)) for shape in shapes]
    text = repr(halfstep.Muon(params))
    assert (
        "taken for matrices: [4, 24, 32] as 4 matrices of 24 x 32; [8, 1, 4] as one matrix of 8 x"
        " 4; [6, 5, 3, 3] as one matrix of 6 x 45; [6, 5, 1, 1] as one matrix of 6 x 5\n"
    ) in text
    text = repr(halfstep.CAME(params))
    assert "[6, 5, 3, 3] as 30 matrices of 3 x 3; [6, 5, 1, 1] as no matrices\n" in text
    groups = [{"params": [Parameter(torch.zeros(24, 32))], "heads": 4}]
    assert "[24, 32] as 4 matrices of 6 x 32" in repr(halfstep.Adafactor(groups))
    groups[0] |= {"heads": 1, "split": [16, 8]}
    assert "[24, 32] as 2 matrices of 16, 8 x 32" in repr(halfstep.Adafactor(groups))
    groups = [{"params": params[:1], "split": [16, 8]}]
    assert "[4, 24, 32] as 8 matrices of 16, 8, ... x 32" in repr(halfstep.Muon(groups))
    assert "matrices" not in repr(halfstep.AdamW(params))


@pytest.mark.parametrize(
    "shape, cut",
    [((3, 12, 64), {}), ((24, 64), {"split": [16, 8]}), ((24, 64), {"heads": 3})],
    ids=("stack", "split", "heads"),
)
@pytest.mark.parametrize("states", ["f32", "int8"])
@pytest.mark.parametrize("cls", CLASSES)
def test_files_go_on(cls, states, shape, cut, tmp_path):
    """state_dict() and safetensors bring a stack back."""
    options = {"states": states, **cut}
    _, (wanted,) = stepped(cls, [shape], steps=6, **options)
    opt, (p,) = stepped(cls, [shape], steps=3, **options)
    opt.save_safetensors(tmp_path / "file")
    for way in ("dict", "file"):
        again = Parameter(p.detach().clone())
        other = cls([("p0", again)], lr=1e-2, seed=9, **options)
        if way == "dict":
            other.load_state_dict(opt.state_dict())
        else:
            other.load_safetensors(tmp_path / "file")
        for step in range(3, 6):
            again.grad = randn(shape, step + 1)
            other.step()
        assert bits(again) == bits(wanted), way


#: what a plan can be asked for: matrices, stacks, kernels, vectors, and what is no matrix
PLANNED = [
    *((24, 64), (3, 12, 64), (3, 12, 20), (5, 7, 33), (64, 1, 4), (6, 5, 3), (4, 1, 31)),
    *((8, 4, 3, 3), (6, 5, 1, 1), (2, 3, 12, 64), (130, 40), (7,), (), (1, 64), (64, 1), (0, 4)),
    *((3, 64, 64), (4096,), (2, 64, 128)),
]


@pytest.mark.parametrize("states", ["f32", "bf16-sr", "int8", "int4", "dyn8", "fp8"])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.told("muon: momentum_buffer in int4", cls=halfstep.Muon, states="int4")
def test_a_plan_has_the_bytes_that_are_allocated(cls, states):
    """One optimizer of each shape, in blocks of rows, blocks of the flattened tensor, and plain."""
    small = {"step", *layout.numbers_of(abi.rules[cls.rule])}
    for shape in PLANNED:
        p = Parameter(torch.zeros(shape))
        opt = cls([p], states=states)
        p.grad = torch.zeros(shape)
        opt.step()
        row = halfstep.plan([("p0", shape)], recipes=f"{cls.rule}/f32/{states}").rows[0]
        kept = [value for key, value in opt.state[p].items() if key not in small]
        assert row.states == sum(value.nbytes for value in kept), shape


@pytest.mark.parametrize("cls", CLASSES)
def test_states_of_one_matrix_go_on_with_flatten(cls):
    """A state of the version that took every parameter for one matrix is refused by name, and loads
    with matrix="flatten"."""
    shape, options = (3, 12, 64), {"states": "int8"}
    opt, (p,) = stepped(cls, [shape], matrix="flatten", **options)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["matrix"], group["heads"]
    words = "parameter 'p0'.* goes on with matrix=\"flatten\" in its group"
    with pytest.raises(ValueError, match=words):
        cls([("p0", Parameter(p.detach().clone()))], **options).load_state_dict(saved)
    again = Parameter(p.detach().clone())
    other = cls([("p0", again)], lr=1e-2, **options)
    saved["param_groups"][0]["matrix"] = "flatten"
    other.load_state_dict(saved)
    p.grad = again.grad = randn(shape, 9)
    opt.step()
    other.step()
    assert bits(again) == bits(p)


def test_another_option_counts_at_the_next_step_or_is_refused():
    opt, (p,) = stepped(halfstep.Muon, [(3, 12, 64)])
    other, (q,) = stepped(halfstep.Muon, [(3, 12, 64)])
    opt.param_groups[0]["matrix"] = "flatten"
    p.grad = q.grad = randn((3, 12, 64), 9)
    opt.step()
    other.step()
    assert not torch.equal(p, q)
    assert bits(opt.state[p]["momentum_buffer"]) == bits(other.state[q]["momentum_buffer"])
    opt, (p,) = stepped(halfstep.Adafactor, [(3, 12, 64)])
    opt.param_groups[0]["matrix"] = "flatten"
    with pytest.raises(ValueError, match="state 'row_var' of parameter 'p0'"):
        opt.step()


@pytest.mark.parametrize("states", ["f32", "int8"])
@pytest.mark.parametrize(
    "cut", [{}, {"heads": 3}, {"split": [5, 7]}], ids=("whole", "heads", "split")
)
@pytest.mark.parametrize("cls", CLASSES)
def test_release_has_the_bits_of_a_step(cls, cut, states):
    """Also with micro-batches in the states, which only Muon's matrices take."""
    shape, params, optimizers = (3, 12, 40), [], []
    for released in (False, True):
        params.append(Parameter(randn(shape, 0)))
        options = {"states": states, "gradient_release": released, **cut}
        optimizers.append(cls([("p", params[-1])], lr=1e-2, seed=3, **options))
    for step in range(6):
        micro = cls is halfstep.Muon and states == "f32" and step % 3 != 2
        for p, opt in zip(params, optimizers):
            opt.optimizer_accumulation = micro
            (p * randn(shape, step + 1)).sum().backward()
            opt.step()
            opt.zero_grad()
        assert bits(params[0]) == bits(params[1]), step


@pytest.mark.told("'p0' is not finite")
def test_a_nan_in_one_expert_leaves_the_stack_alone():
    for cls in CLASSES:
        opt, (p,) = stepped(cls, [(3, 12, 20)])
        before = bits(p), {key: bits(value) for key, value in opt.state[p].items()}
        p.grad = randn((3, 12, 20), 7)
        p.grad[1, 2, 3] = float("nan")
        opt.step()
        assert opt.skipped_steps == 1
        assert before == (bits(p), {key: bits(value) for key, value in opt.state[p].items()})
