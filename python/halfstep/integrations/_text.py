"""Reads options that trainers pass on as text: those of command lines, and `1e-8` and `'false'` in
YAML."""

from __future__ import annotations

import ast
import json
import typing
from collections.abc import Mapping, Sequence
from inspect import isclass, signature

from ..rules import classes


def missing(module, error, packages):
    """Returns the error for a module of this folder whose trainer cannot be imported."""
    return ImportError(f"{module} needs {error.name}: pip install {packages}")


def _nothing(text):
    if text not in ("None", "null"):
        raise ValueError
    return None


def _whole(text):
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 1e3
        if number % 1:
            raise
        return int(number)


def _boolean(text):
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _literal(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError):
        return json.loads(text)


def _literal_of(*kinds):
    """Returns a function that reads the text of a value of these classes."""

    def read_literal(text):
        found = _literal(text)
        if not isinstance(found, kinds):
            raise ValueError
        return found

    return read_literal


def _name(text):
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


#: type of an option, how its text is read, and what to write. An option of several types takes the
#: first that reads its text
_READERS = (
    (type(None), _nothing, "None"),
    (int, _whole, "a whole number"),
    (float, float, "a number"),
    (bool, _boolean, "true or false"),
    (Sequence, _literal_of(list, tuple), "a list such as (0.9, 0.99)"),
    (Mapping, _literal_of(dict), 'a mapping such as {"lr": 3e-4}'),
    (str, _name, "a name"),
)


def _types(kind):
    """Returns the types in an annotation by their row of the table. Any stands for all types. None
    is always among them, because the class of an option judges whether it may be None."""
    if kind is typing.Any:
        return {row[0]: kind for row in _READERS}
    found = {type(None): None}
    for one in typing.get_args(kind) if typing.get_origin(kind) is typing.Union else (kind,):
        plain = typing.get_origin(one) or one
        found[Sequence if plain is tuple else plain] = one
    return found


def _value(name, kind, value):
    """Returns a value of an option, with text in it read as the type of its annotation."""
    types = _types(kind)
    if isinstance(value, str):
        rows = [row for row in _READERS if row[0] in types]
        for _, reader, _ in rows:
            try:
                found = reader(value.strip())
            except (ValueError, KeyError, OverflowError, SyntaxError):
                continue
            return found if isinstance(found, str) else _value(name, kind, found)
        words = [words for of, _, words in rows if of is not type(None)]
        raise ValueError(
            f"halfstep: {name}={value!r} is not understood; write {' or '.join(words)}"
        )
    if isinstance(value, (list, tuple)):
        inner = typing.get_args(types.get(Sequence)) or (typing.Any,)
        kinds = (*inner, *inner[-1:] * len(value))
        return type(value)(_value(name, of, part) for of, part in zip(kinds, value))
    if isinstance(value, Mapping) and name == "adamw":
        return read(classes["AdamW"], value)
    return value


def read(target, given):
    """Returns options of `target`, a class or function, whose annotations say how text is read.
    Leaves options that it does not have, and values that are no text, as they are. Raises
    ValueError for text that no type of an option reads."""
    kinds = {name: p.annotation for name, p in signature(target).parameters.items()}
    kinds.update(typing.get_type_hints(target.__init__ if isclass(target) else target))
    return {
        name: _value(name, kinds[name], value) if name in kinds else value
        for name, value in given.items()
    }
