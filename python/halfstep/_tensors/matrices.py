"""What a rule of matrices takes a parameter for: one matrix, a stack of matrices, or none.

The library takes rows of one length, in matrices of so many rows each (`matrix_rows` and `split` in
halfstep.h). A shape of torch alone does not say which rows these are.
"""

import itertools
import math
from typing import NamedTuple

from .._library import abi

#: what the option `matrix` can be
CHOICES = ("auto", "last-two", "flatten")
#: a last dimension below this is a kernel's (Conv1d), not a matrix's
_LEAST_COLUMNS = 16


class How(NamedTuple):
    """What a group says of its matrices."""

    matrix: str = "auto"
    heads: int = 1
    split: tuple = ()


AUTO = How()


class Laid(tuple):
    """A shape with how the library takes it.

    grid      the rows of the tensor, and their length
    blocks    the rows of each matrix; these repeat to the end of the tensor
    lines     the dimensions that the rows come from
    columns   the shape of a vector over the columns of all matrices; () if nothing is a matrix
    """

    def __new__(cls, shape, grid, blocks, lines, columns):
        laid = super().__new__(cls, shape)
        laid.grid, laid.blocks, laid.lines, laid.columns = grid, blocks, lines, columns
        return laid

    @property
    def starts(self):
        """The first row of each matrix, then the end."""
        each = self.grid[0] // max(sum(self.blocks), 1)
        return list(itertools.accumulate(self.blocks * each, initial=0))


def has_products(rule):
    """Returns True if a rule multiplies matrices, which a processor is slow at."""
    return rule.matrix and not is_factored(rule)


def check(group):
    """Raises ValueError for options of a group that are none."""
    matrix, heads, split = how_of(group)
    if matrix not in CHOICES:
        raise ValueError(f"halfstep: unknown matrix={matrix!r}; known: {', '.join(CHOICES)}")
    if not abi.is_count(heads, 1):
        raise ValueError(f"halfstep: heads={heads!r} is not a number of blocks of rows, from 1 on")
    if (
        not isinstance(split, tuple)
        or len(split) > abi.MAX_SPLIT
        or not all(abi.is_count(rows, 2) for rows in split)
    ):
        raise ValueError(
            f"halfstep: split={group['split']!r} is not a list of the rows of up to"
            f" {abi.MAX_SPLIT} blocks, each of at least 2"
        )
    if split and heads > 1:
        raise ValueError(
            f"halfstep: a group has heads={heads} and split={list(split)}; give one of them"
        )


def how_of(group):
    """Returns what a group says of its matrices, as lay() takes it."""
    split = group.get("split")
    return How(
        group.get("matrix") or "auto",
        1 if group.get("heads") is None else group["heads"],
        tuple(split) if isinstance(split, list) else () if split is None else split,
    )


def is_factored(rule):
    """Returns True for a rule whose second moment is one vector over rows and one over columns."""
    return any(state.extent == abi.EXTENT_COLUMNS for state in rule.states)


def _blocks_of(rows, shape, how):
    """Returns the rows of the matrices that a matrix of so many rows is cut into."""
    if how.split and sum(how.split) != rows:
        raise ValueError(
            f"halfstep: split={list(how.split)} cannot divide a parameter of shape {shape}: the"
            f" blocks have {sum(how.split)} rows, a matrix of it has {rows}; leave other shapes to"
            " another group"
        )
    if rows % how.heads:
        raise ValueError(
            f"halfstep: heads={how.heads} cannot divide a parameter of shape {shape}, whose"
            f" matrices have {rows} rows; leave other shapes to another group"
        )
    return how.split or (rows // how.heads,) * how.heads


def lay(rule, shape, how=AUTO):
    """Returns the shape of a parameter of a rule, as the library takes it. This is a plain tuple
    if dimension 0 gives the rows, and everything is one matrix."""
    shape, rule, matrix = tuple(shape), abi.rules[rule], how.matrix
    if not rule.matrix or len(shape) < 2:
        return shape
    factored = is_factored(rule)
    if matrix == "auto" and not factored:
        stack = len(shape) == 3 and shape[2] >= _LEAST_COLUMNS and shape[1] > 1
        matrix = "last-two" if stack else "flatten"
    if matrix == "flatten" or len(shape) == 2:
        blocks, grid = _blocks_of(shape[0], shape, how), rows_of(shape)
        return Laid(shape, grid, blocks, shape[:1], (len(blocks), grid[1])) if blocks[1:] else shape
    blocks = _blocks_of(shape[-2], shape, how)
    if min(shape[-2:]) < 2:  # no matrices, so nothing is factored
        return Laid(shape, rows_of(shape), (1,), shape[:1], ())
    grid, columns = (math.prod(shape[:-1]), shape[-1]), (len(blocks),) if blocks[1:] else ()
    return Laid(shape, grid, blocks, shape[:-1], (*shape[:-2], *columns, shape[-1]))


def lay_part(rule, whole, shape, how):
    """Returns the shape of the part of a parameter that this process has, as the library takes it.
    `whole` is the shape of the parameter, and `how` is as lay() takes it."""
    laid, shape = lay(rule, whole, how), tuple(shape)
    if not isinstance(laid, Laid) or shape == laid:
        return laid if shape == laid else shape
    if len(laid.lines) == 1:  # which blocks of a split are here, the library says
        blocks = () if laid.columns else laid.blocks
        return Laid(shape, rows_of(shape), blocks, shape[:1], laid.columns)
    grid = math.prod(shape[:-1]), shape[-1]
    columns = (shape[0], *laid.columns[1:])
    return Laid(shape, grid, laid.blocks, shape[:-1], columns)


def is_cut_between(rule, laid, ranks):
    """Returns True if a parameter whose dimension 0 is cut for so many ranks is cut between its
    matrices, and vectors over their columns can be cut in the same way. Else the ranks have to
    gather it."""
    if not isinstance(laid, Laid) or len(laid.lines) > 1:
        return isinstance(laid, Laid)
    if not ranks or not laid.columns:
        return False
    starts, count = laid.starts, len(laid.blocks)
    rows, matrices = -(-laid[0] // ranks), -(-count // ranks)
    factored = is_factored(abi.rules[rule])
    for rank in range(1, ranks):
        border = min(rank * rows, laid[0])
        if border not in starts:
            return False
        if factored and starts.index(border) != min(rank * matrices, count):
            return False
    return True


def rows_of(shape):
    """Returns the rows and the row length of a tensor, as the library counts them. Unless the shape
    says otherwise, dimension 0 gives the rows, and the rest is flattened."""
    if isinstance(shape, Laid):
        return shape.grid
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def fields_of(shape):
    """Returns the fields of the library's tensor structure for a whole tensor."""
    rows, length = rows_of(shape)
    fields = {"ndim": len(shape), "rows": rows, "row_length": length, "may_be_empty": 1}
    if isinstance(shape, Laid):
        equal = len(set(shape.blocks)) <= 1
        fields["matrix_rows"] = (
            (shape.blocks[0] if shape.blocks else 0) if equal else sum(shape.blocks)
        )
        fields["split"] = () if equal else shape.blocks
    return fields


def lines_of(shape, rows):
    """Returns the dimensions of a state's tensor that stand for the rows."""
    return shape.lines if isinstance(shape, Laid) else (rows,)


def vector_of(shape, info):
    """Returns the shape of a slot that stores a vector over rows or columns, by its slot's info."""
    if not isinstance(shape, Laid):
        return (info.rows * info.columns,)
    if info.columns == 1:
        return shape.lines
    return shape.columns if len(shape.lines) > 1 else (info.rows, info.columns)


def taken(rule, shapes, most=8):
    """Returns a text that says what a rule takes shapes for, or "" if all shapes say it. It has the
    first of them only."""
    if not abi.rules[rule].matrix:
        return ""
    found = [f"{list(x)} as {told(x)}" for x in dict.fromkeys(shapes) if told(x)]
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def told(shape):
    """Returns what a parameter was taken for, or None if its shape says it."""
    if isinstance(shape, Laid) and not shape.columns:
        return "no matrices"
    if isinstance(shape, Laid):
        each, count = shape.blocks, len(shape.starts) - 1
        rows = each[:1] if len(set(each)) == 1 else each
        more = ", ..." if len(rows) > 1 and count > len(rows) else ""
        return f"{count} matrices of {', '.join(map(str, rows))}{more} x {shape.grid[1]}"
    return "one matrix of {} x {}".format(*rows_of(shape)) if len(shape) > 2 else None
