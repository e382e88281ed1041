"""What a rule of matrices takes a parameter for: one matrix, a stack of matrices, or none.

The library takes rows of one length, in matrices of so many rows each (`matrix_rows` in
halfstep.h). A shape of torch alone does not say which rows these are.
"""

import math

from . import _abi

#: what the option `matrix` can be
CHOICES = ("auto", "last-two", "flatten")
#: a last dimension below this is a kernel's (Conv1d), not a matrix's
_LEAST_COLUMNS = 16


class Laid(tuple):
    """A shape with how the library takes it.

    grid          the rows of the tensor, and their length
    matrix_rows   the rows of each matrix
    lines         the dimensions that the rows come from
    columns       the shape of a vector over the columns of all matrices
    """

    def __new__(cls, shape, grid, matrix_rows, lines, columns):
        laid = super().__new__(cls, shape)
        laid.grid, laid.matrix_rows, laid.lines, laid.columns = grid, matrix_rows, lines, columns
        return laid


def has_products(rule):
    """Returns True if a rule multiplies matrices, which a processor is slow at."""
    return rule.matrix and not any(state.vector for state in rule.states)


def check(group):
    """Raises ValueError for options of a group that are none."""
    matrix, heads = how_of(group)
    if matrix not in CHOICES:
        raise ValueError(f"halfstep: unknown matrix={matrix!r}; known: {', '.join(CHOICES)}")
    if not _abi.is_count(heads, 1):
        raise ValueError(f"halfstep: heads={heads!r} is not a number of blocks of rows, from 1 on")


def how_of(group):
    """Returns what a group says of its matrices, as lay() takes it."""
    return group.get("matrix") or "auto", 1 if group.get("heads") is None else group["heads"]


def lay(rule, shape, how=("auto", 1)):
    """Returns the shape of a parameter of a rule, as the library takes it. This is a plain tuple
    if dimension 0 gives the rows, and everything is one matrix."""
    shape, rule, (matrix, heads) = tuple(shape), _abi.rules[rule], how
    if not rule.matrix or len(shape) < 2:
        return shape
    if heads > 1:
        if len(shape) > 2 or shape[0] % heads:
            raise ValueError(
                f"halfstep: heads={heads} cannot divide a parameter of shape {shape}; it takes"
                " matrices of two dimensions whose rows it divides: leave others to another group"
            )
        return Laid(shape, shape, shape[0] // heads, shape[:1], (heads, shape[1]))
    factored = any(state.vector for state in rule.states)
    if matrix == "auto" and not factored:
        stack = len(shape) == 3 and shape[2] >= _LEAST_COLUMNS and shape[1] > 1
        matrix = "last-two" if stack else "flatten"
    if matrix == "flatten" or len(shape) == 2:
        return shape
    if min(shape[-2:]) < 2:  # no matrices, so nothing is factored
        return Laid(shape, rows_of(shape), 1, shape[:1], ())
    grid = math.prod(shape[:-1]), shape[-1]
    return Laid(shape, grid, shape[-2], shape[:-1], (*shape[:-2], shape[-1]))


def rows_of(shape):
    """Returns the rows and the row length of a tensor, as the library counts them. Unless the shape
    says otherwise, dimension 0 gives the rows, and the rest is flattened."""
    if isinstance(shape, Laid):
        return shape.grid
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def fields_of(shape):
    """Returns the fields of the library's tensor structure for a whole tensor."""
    rows, length = rows_of(shape)
    matrix_rows = shape.matrix_rows if isinstance(shape, Laid) else 0
    return {"ndim": len(shape), "rows": rows, "row_length": length, "matrix_rows": matrix_rows}


def lines_of(shape, rows):
    """Returns the dimensions of a state's tensor that stand for the rows."""
    return shape.lines if isinstance(shape, Laid) else (rows,)


def vector_of(shape, info):
    """Returns the shape of a slot that stores a vector over rows or columns, by its slot's info."""
    if not isinstance(shape, Laid):
        return (info.rows * info.columns,)
    return shape.lines if info.columns == 1 else shape.columns


def told(shape):
    """Returns what a parameter was taken for, or None if its shape says it."""
    if isinstance(shape, Laid) and not shape.columns:
        return "no matrices"
    if isinstance(shape, Laid):
        count = math.prod(shape.lines) // max(shape.matrix_rows, 1)
        return f"{count} matrices of {shape.matrix_rows} x {shape.grid[1]}"
    return "one matrix of {} x {}".format(*rows_of(shape)) if len(shape) > 2 else None
