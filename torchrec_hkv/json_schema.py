"""Schemas of JSON files: every value is checked before it is used.

A schema is built from the classes below and checks parsed JSON. Errors name the file, the key, the
value and what is allowed.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 80


@dataclasses.dataclass(frozen=True)
class JsonPlace:
    """The position of a value in a file.

    Attributes:
        file: path of the file.
        key: path from the outermost value to this one, such as ``shards[2].bytes``.
    """

    file: str
    key: str = ""

    def of(self, name: str) -> JsonPlace:
        """The position of a value in an object."""
        shown = name if re.fullmatch(r"\w+", name) else f"[{_shown.repr(name)}]"
        separator = "." if self.key and not shown.startswith("[") else ""
        return JsonPlace(self.file, f"{self.key}{separator}{shown}")

    def at(self, index: int) -> JsonPlace:
        """The position of an item in a list."""
        return JsonPlace(self.file, f"{self.key}[{index}]")

    def refuse(self, value: object, allowed: str) -> ValueError:
        """The error for a value that is not allowed here."""
        what = self.key or "the content"
        return ValueError(f"{self.file}: {what} is {_shown.repr(value)}, but must be {allowed}.")

    def missing(self, allowed: str) -> ValueError:
        """The error for a missing value."""
        return ValueError(f"{self.file}: {self.key} is missing, but must be {allowed}.")


class Schema(abc.ABC):
    """Base of schemas."""

    #: The allowed values, in the form that follows "must be" in an error.
    allowed: str

    @abc.abstractmethod
    def read(self, value: object, place: JsonPlace) -> Any:
        """Checks a value.

        Args:
            value: parsed JSON.
            place: position of the value.

        Returns:
            The value, or an object made from it.

        Raises:
            ValueError: the value is not allowed; the message names file, key, value and what is
                allowed.
        """


class Integer(Schema):
    """An integer in a range; not ``true`` or ``5.0``."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = minimum, maximum
        self.allowed = f"an integer from {_number(minimum)} to {_number(maximum)}"

    def read(self, value: object, place: JsonPlace) -> int:
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            raise place.refuse(value, self.allowed)
        return value


class Number(Schema):
    """A finite integer or fraction."""

    def __init__(self, minimum: float = -math.inf) -> None:
        self.minimum = minimum
        at_least = "" if minimum == -math.inf else f" of at least {minimum:g}"
        self.allowed = f"a finite number{at_least}"

    def read(self, value: object, place: JsonPlace) -> int | float:
        if type(value) not in (int, float) or not abs(value) < 1e308 or value < self.minimum:
            raise place.refuse(value, self.allowed)
        return value


class Flag(Schema):
    """``true`` or ``false``."""

    allowed = "true or false"

    def read(self, value: object, place: JsonPlace) -> bool:
        if type(value) is not bool:
            raise place.refuse(value, self.allowed)
        return value


class Text(Schema):
    """A string, which must match a pattern if one is given."""

    def __init__(self, pattern: str | re.Pattern[str] | None = None, allowed: str = "a string"):
        self.pattern = None if pattern is None else re.compile(pattern)
        self.allowed = allowed

    def read(self, value: object, place: JsonPlace) -> str:
        if type(value) is not str or not _is_text(value):
            raise place.refuse(value, self.allowed)
        if self.pattern is not None and not self.pattern.fullmatch(value):
            raise place.refuse(value, self.allowed)
        return value


class Choice(Schema):
    """One of several strings or integers."""

    def __init__(self, values: Sequence[str] | Sequence[int]) -> None:
        self.values = tuple(values)
        self.allowed = f"one of {', '.join(map(repr, self.values))}"

    def read(self, value: object, place: JsonPlace) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in self.values):
            raise place.refuse(value, self.allowed)
        return value


class OrNull(Schema):
    """``null``, or a value that another schema allows."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.allowed = f"{schema.allowed}, or null"

    def read(self, value: object, place: JsonPlace) -> Any:
        if value is None:
            return None
        if not isinstance(value, (dict, list)):  # errors in them name the position within them
            try:
                return self.schema.read(value, place)
            except ValueError:
                raise place.refuse(value, self.allowed) from None
        return self.schema.read(value, place)


class Items(Schema):
    """A list whose items have one schema."""

    def __init__(self, schema: Schema, length: int | None = None) -> None:
        self.schema, self.length = schema, length
        many = "" if length is None else f"{length} times "
        self.allowed = f"a list of {many}{schema.allowed}"

    def read(self, value: object, place: JsonPlace) -> tuple[Any, ...]:
        if type(value) is not list or (self.length is not None and len(value) != self.length):
            raise place.refuse(value, self.allowed)
        return tuple(self.schema.read(item, place.at(i)) for i, item in enumerate(value))


class Map(Schema):
    """An object with arbitrary keys of one schema and values of another."""

    def __init__(self, keys: Schema, values: Schema) -> None:
        self.keys, self.values = keys, values
        self.allowed = "an object"

    def read(self, value: object, place: JsonPlace) -> dict[Any, Any]:
        if type(value) is not dict:
            raise place.refuse(value, self.allowed)
        read = {}
        for key, item in value.items():
            name = self.keys.read(
                key, JsonPlace(place.file, f"a key of {place.key or 'the content'}")
            )
            read[name] = self.values.read(item, place.of(key))
        return read


class Fields(Schema):
    """An object with given keys.

    Args:
        fields: schemas by key.
        make: called with the values as keyword arguments; makes a dictionary by default.
        optional: keys that may be missing.
    """

    def __init__(
        self,
        fields: Mapping[str, Schema],
        make: Callable[..., Any] = dict,
        optional: Sequence[str] = (),
    ) -> None:
        self.fields, self.make, self.optional = dict(fields), make, frozenset(optional)
        self.allowed = f"an object with the keys {', '.join(self.fields)}"

    def read(self, value: object, place: JsonPlace) -> Any:
        if type(value) is not dict:
            raise place.refuse(value, self.allowed)
        for key in value:
            if key not in self.fields:
                raise JsonPlace(place.file, f"a key of {place.key or 'the content'}").refuse(
                    key, f"one of {', '.join(self.fields)}"
                )
        read = {}
        for key, schema in self.fields.items():
            if key in value:
                read[key] = schema.read(value[key], place.of(key))
            elif key not in self.optional:
                raise place.of(key).missing(schema.allowed)
        return self.make(**read)


class ByType(Schema):
    """An object with a key whose value selects the schema."""

    def __init__(self, key: str, schemas: Mapping[str, Fields]) -> None:
        self.key = key
        self.choice = Choice(list(schemas))
        self.schemas = {
            name: Fields(
                {key: Choice([name]), **schema.fields}, schema.make, tuple(schema.optional)
            )
            for name, schema in schemas.items()
        }
        self.allowed = f"an object whose {key} is {self.choice.allowed}"

    def read(self, value: object, place: JsonPlace) -> Any:
        if type(value) is not dict:
            raise place.refuse(value, self.allowed)
        if self.key not in value:
            raise place.of(self.key).missing(self.choice.allowed)
        return self.schemas[self.choice.read(value[self.key], place.of(self.key))].read(
            value, place
        )


class Plain(Schema):
    """Any JSON value."""

    allowed = "JSON"

    def read(self, value: object, place: JsonPlace) -> Any:
        return value


def parse_json(file: str | os.PathLike[str], data: bytes) -> Any:
    """Parses JSON strictly: NaN and repeated keys are not allowed.

    Args:
        file: file name for errors.
        data: the text.

    Raises:
        ValueError: the data is not JSON.
    """

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {_shown.repr(twice)} occurs twice")
        return found

    try:
        return json.loads(data, parse_constant=constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(file)} is damaged: it is not JSON ({error}).") from None


def _number(value: int) -> str:
    """Formats a number; large powers of two as powers."""
    for offset, suffix in ((0, ""), (1, " - 1")):
        power = abs(value) + offset
        if power >= 1 << 16 and power & (power - 1) == 0 and (value > 0 or not offset):
            return f"{'-' if value < 0 else ''}2^{power.bit_length() - 1}{suffix}"
    return str(value)


def _is_text(value: str) -> bool:
    """Whether a string can be encoded: an unpaired surrogate can't."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
