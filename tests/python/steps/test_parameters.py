"""Tests single parameters and gradients: which are taken, in which format and rows, and the errors
for the others."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from halfstep._library import abi
from halfstep._tensors.matrices import rows_of
from halfstep._tensors.parameters import (
    PLAIN,
    SparseGradientError,
    check_cpu,
    check_dtypes,
    check_gradient,
    check_parameter,
    dense,
    follow_gradients,
    overlaps,
    weight_format,
)


class Unknown(torch.Tensor):
    pass


class Named(torch.nn.Parameter):
    """A Parameter whose data is a plain tensor, as other packages derive them."""


def zeros(shape):
    return torch._efficientzerotensor(shape)


ONES = torch.ones(4, 6)
#: what is no contiguous tensor of its own memory, and may be stepped all the same
TAKEN = {
    "scalar": torch.ones(()),
    "empty": torch.ones(0, 5),
    "empty rows": torch.ones(3, 0),
    "empty and expanded": torch.ones(1, 0).expand(4, 0),
    "one element, expanded": torch.ones(1).expand(1, 1),
    "transposed": ONES.T,
    "sliced": ONES[:, ::2],
    "turned": ONES.flip(0),
    "negated": torch._neg_view(ONES),
    "imaginary": torch.complex(ONES, ONES).conj().imag,
    "half": ONES.half(),
    "a class of Parameter": Named(ONES),
}
#: what may not be stepped: the exception, and what it says
REFUSED = {
    "not made yet": (lambda: torch.nn.LazyLinear(3).weight, ValueError, "is not initialized"),
    "a class": (lambda: ONES.as_subclass(Unknown), TypeError, "is a Unknown, a kind of tensor"),
    "data of a class": (
        lambda: Parameter(ONES.as_subclass(Unknown)),
        TypeError,
        "a kind of tensor that halfstep does not know",
    ),
    "sparse": (lambda: ONES.to_sparse(), TypeError, "is sparse .torch.sparse_coo."),
    "float64": (lambda: ONES.double(), TypeError, "is torch.float64; float32, bfloat16 and float"),
    "integers": (lambda: ONES.int(), TypeError, "is torch.int32; .* can be stepped"),
    "complex": (lambda: torch.complex(ONES, ONES), TypeError, "is torch.complex64"),
    "conjugate": (lambda: torch.complex(ONES, ONES).conj(), TypeError, "is torch.complex64"),
    "quantized": (
        lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8),
        TypeError,
        "is torch.qint8",
    ),
    "expanded": (lambda: torch.ones(1, 6).expand(4, 6), ValueError, r"strides \(0, 1\) of shape"),
    "expanded scalar": (lambda: torch.ones(()).expand(2), ValueError, "share memory"),
    "zeros": (lambda: zeros((4, 6)), ValueError, "zeros without memory"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_parameters_that_are_taken(kind):
    p = TAKEN[kind]
    check_parameter(p, "p")
    check_cpu(p, "p")
    assert not overlaps(p)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_parameters_that_are_refused(kind):
    make, error, said = REFUSED[kind]
    with pytest.raises(error, match=f"'some.name'.*{said}"):
        check_parameter(make(), "some.name")


def test_devices():
    with pytest.raises(ValueError, match="'p' is on meta; this works on tensors in CPU memory"):
        check_cpu(torch.ones(3, device="meta"), "p")


# ---- Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", PLAIN)
def test_gradients_of_any_strides(dtype):
    p = ONES.to(dtype)
    for grad in (p, p.T.contiguous().T, torch.ones(1, 6).expand(4, 6), torch._neg_view(p)):
        assert check_gradient(p, grad.to(dtype), "p") == PLAIN[dtype]
    for shape in ((), (0, 5)):
        p = torch.ones(shape, dtype=dtype)
        assert check_gradient(p, p, "p") == PLAIN[dtype]
    assert check_gradient(ONES, zeros((4, 6)), "p") == "f32"  # which takes no memory
    assert check_gradient(ONES, Parameter(ONES), "p") == "f32"


def freed():
    grad = ONES.clone()
    grad.untyped_storage().resize_(0)
    return grad


@pytest.mark.parametrize(
    "make, error, said",
    [
        (lambda: ONES.as_subclass(Unknown), TypeError, "is a Unknown, a kind of tensor"),
        (lambda: Named(ONES), TypeError, "is a Named, a kind of tensor"),
        (lambda: ONES.to_sparse(), SparseGradientError, "is sparse; only dense gradients"),
        (lambda: ONES.double(), TypeError, "is torch.float64; .* can be used"),
        (lambda: torch.complex(ONES, ONES).conj(), TypeError, "is torch.complex64"),
        (lambda: ONES.to("meta"), ValueError, "is on meta, the parameter on cpu"),
        (lambda: ONES[:, :5], ValueError, r"has shape \(4, 5\), the parameter \(4, 6\)"),
        (lambda: torch.ones(()), ValueError, r"has shape \(\), the parameter \(4, 6\)"),
        (freed, ValueError, "has 24 elements and no memory"),
    ],
)
def test_gradients_that_are_refused(make, error, said):
    with pytest.raises(error, match=f"the gradient of 'some.name' {said}"):
        check_gradient(ONES, make(), "some.name")


def test_a_sparse_gradient_is_both_errors():
    """torch's own optimizers raise a RuntimeError there."""
    assert issubclass(SparseGradientError, RuntimeError)
    assert issubclass(SparseGradientError, TypeError)


def test_followers_of_gradients_die_with_their_owner():
    class Owner:
        pass

    owner = Owner()
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    params[1].requires_grad_(False)
    seen = []
    handles = follow_gradients(params, owner, lambda held, p: seen.append((type(held), p.grad)))
    assert len(handles) == 1
    params[0].sum().backward()
    assert len(seen) == 1 and seen[0][0] is Owner and torch.equal(seen[0][1], torch.ones(3))
    del owner
    gc.collect()
    params[0].sum().backward()
    assert len(seen) == 1
    handles[0].remove()


# ---- Formats, rows, memory -----------------------------------------------------------------------


def test_formats_of_weights():
    assert weight_format(None, torch.bfloat16, "p") == "bf16-sr"
    assert weight_format("bf16-kahan", torch.float16, "p") == "f16-kahan"
    assert weight_format("bf16-kahan", torch.float32, "p") == "f32"
    assert weight_format("bf16", torch.bfloat16, "p") == "bf16"
    for asked, dtype, error, said in (
        ("bf16-sr", torch.float64, TypeError, "parameter 'p' is torch.float64"),
        ("bf17", torch.float32, ValueError, "unknown format weights='bf17'"),
        ("bf17", torch.bfloat16, ValueError, "weights='bf17' cannot store; formats are: bf16"),
        ("f32", torch.float16, ValueError, "'p' is torch.float16, which weights='f32' cannot"),
    ):
        with pytest.raises(error, match=said):
            weight_format(asked, dtype, "p")


@pytest.mark.parametrize(
    "shape, rows",
    [
        ((), (1, 1)),
        ((7,), (7, 1)),
        ((4, 6), (4, 6)),
        ((4, 3, 2, 5), (4, 30)),
        ((0,), (0, 1)),
        ((0, 5), (0, 5)),
        ((5, 0, 3), (5, 0)),
    ],
)
def test_rows(shape, rows):
    assert rows_of(shape) == rows == rows_of(torch.Size(shape))


@pytest.mark.parametrize(
    "shape, strides, shared",
    [
        ((4, 4), (4, 1), False),
        ((4, 4), (1, 4), False),
        ((4, 4), (9, 2), False),
        ((4, 4), (2, 1), True),
        ((3, 4), (1, 2), True),
        ((4, 1), (0, 0), True),
        ((1, 1), (0, 0), False),
        ((2, 3), (1, 2), False),
        ((0, 4), (0, 0), False),
        ((), (), False),
    ],
)
def test_shared_memory(shape, strides, shared):
    assert overlaps(torch.ones(64).as_strided(shape, strides)) == shared


def test_dense():
    assert dense(ONES) is ONES
    for tensor in (ONES.T, ONES[:, ::2], torch._neg_view(ONES), zeros((4, 6))):
        found = dense(tensor)
        assert found.is_contiguous() and not found.is_neg() and found.data_ptr()
        assert torch.equal(found, tensor.clone())


def test_a_dtype_of_a_new_format_is_told_at_import():
    check_dtypes(abi.formats.values())
    for code, extra in (("F8_E4M3", None), ("U8", "F8_E4M3")):
        with pytest.raises(ImportError, match="elements of F8_E4M3, .* add it to DTYPES of _tens"):
            check_dtypes([SimpleNamespace(code_dtype=code, extra_dtype=extra)])


def test_plain_formats_are_formats():
    assert set(PLAIN.values()) <= set(abi.formats)
