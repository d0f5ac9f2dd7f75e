"""Logs as text: CSV and similar formats, one id for each line, and Criteo's files.

A line is a sample, and a field an id. Blocks of lines are parsed in C++.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import itertools
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

from torchrec_hkv import _C
from torchrec_hkv.replay.log import Ids, Log, LogError, Part, check_file

Kind = Literal["integer", "text", "hexadecimal"]

_SEPARATORS = ("\t", "::", ",", ";", "|", " ")
_INTEGER = re.compile(r"[-+]?[0-9]{1,20}")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
#: Fields of Criteo: a label, counts and ids.
_CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """The format of the lines of a log.

    Attributes:
        separator: separator of fields.
        names: names of the fields.
        has_header: whether the first line holds the names.
        kinds: kinds of the fields that can be ids.
        defaults: fields that are replayed by default.
    """

    separator: bytes
    names: tuple[str, ...]
    has_header: bool
    kinds: dict[str, Kind]
    defaults: tuple[str, ...]


class TextLog(Log):
    """A log of lines with fields.

    Integers are ids. Other texts are hashed to 64 bits. An empty field is a missing id.

    Args:
        path: path of the file, compressed if its name ends with ``.gz``. None: the standard input.
        separator: separator of fields. None: the first of tab, ``::``, comma, semicolon, bar and
            space that the first line contains.
        header: whether the first line holds the names of columns. None: True if none of its fields
            is a number, unless it is the only line and has a single field. Without a header the
            columns are ``0``, ``1``, ..., or ``ids`` if there is only one.
        criteo: whether the fields are those of Criteo's click logs, with hexadecimal ids.
        block: number of bytes to read at a time.

    Raises:
        LogError: the file does not exist or is empty.
    """

    def __init__(
        self,
        path: Path | None,
        separator: str | None = None,
        header: bool | None = None,
        criteo: bool = False,
        block: int = 1 << 21,
    ) -> None:
        self.name = "the standard input" if path is None else str(path)
        self.is_repeatable = path is not None
        if path is not None:
            check_file(path)
        self._path, self._block = path, block
        with self._read_errors():
            self._blocks = self._read()
            first = next(self._blocks, b"")
        if not first:
            raise LogError(f"{self.name} is empty, but a log must have a line.")
        self._first: list[bytes] | None = [first]
        self._layout = _criteo_layout() if criteo else self._detect_layout(first, separator, header)
        self.columns = tuple(self._layout.kinds)
        if self._layout.has_header and not first.partition(b"\n")[2]:
            self._first.append(self._block_after_header(first))

    def _block_after_header(self, header: bytes) -> bytes:
        with self._read_errors():
            block = next(self._blocks, b"")
        if not block:
            raise LogError(
                f"{self.name} has a header, {header.decode(errors='replace').strip()!r}, and no "
                "line after it, but a log must have one. If the line holds ids, pass header=False "
                "(--no-header)."
            )
        return block

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self._layout.defaults

    @property
    def ordered_columns(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self._layout.kinds.items() if kind != "text")

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        if self._first is not None:
            blocks = itertools.chain(self._first, self._blocks)
            self._first = None
        else:
            blocks = self._read()
        line = 1
        while True:
            with self._read_errors():
                block = next(blocks, None)
            if block is None:
                return
            if line == 1 and self._layout.has_header:
                block = block.partition(b"\n")[2]
                line = 2
            if block:
                part = self._part(block, line, columns)
                line += part.num_samples
                yield part

    def _read_errors(self) -> _ReadErrors:
        return _ReadErrors(self.name)

    def _read(self) -> Iterator[bytes]:
        """Yields blocks of whole lines."""
        with self._open_file() as file:
            rest = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
            while data := file.read(self._block):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                rest = data[cut:]
                if cut:
                    yield data[:cut]
            if rest:
                yield rest.removesuffix(b"\n") + b"\n"

    def _open_file(self) -> contextlib.AbstractContextManager[BinaryIO]:
        if self._path is None:
            return contextlib.nullcontext(sys.stdin.buffer)
        if self._path.suffix == ".gz":
            return gzip.open(self._path, "rb")  # type: ignore[return-value]
        return self._path.open("rb")

    def _detect_layout(
        self, block: bytes, separator: str | None, header: bool | None
    ) -> TextLayout:
        """Finds the format from the first lines."""
        lines = [line.decode(errors="replace") for line in block.splitlines()[:1000]]
        if separator is None:
            separator = next((mark for mark in _SEPARATORS if mark in lines[0]), ",")
        rows = [[field.strip(' "') for field in line.split(separator)] for line in lines]
        names = rows[0]
        if header is None:
            # A single field in a single line is an id.
            header = max(len(rows), len(names)) > 1 and not any(
                _NUMBER.fullmatch(f) or not f for f in names
            )
        if not header:
            names = ["ids"] if len(names) == 1 else [str(at) for at in range(len(names))]
        if len(set(names)) < len(names):
            raise LogError(f"{self.name}: columns must have different names, but they are {names}.")
        kinds: dict[str, Kind] = {}
        defaults = []
        for at, name in enumerate(names):
            fields = [row[at] for row in rows[header:] if len(row) > at and row[at]]
            is_integer = all(_INTEGER.fullmatch(field) for field in fields)
            kinds[name] = "integer" if is_integer else "text"
            if is_integer or not all(_NUMBER.fullmatch(field) for field in fields):
                defaults.append(name)
        return TextLayout(separator.encode(), tuple(names), header, kinds, tuple(defaults))

    def _part(self, block: bytes, line: int, columns: Sequence[str]) -> Part:
        names = self._layout.names
        read = sorted(set(columns), key=names.index)
        fields = [
            (names.index(name), getattr(_C.TextKind, self._layout.kinds[name])) for name in read
        ]
        count, parsed, fault = _C.parse_text(block, self._layout.separator, len(names), fields)
        if fault is not None:
            wrong, found, column, text = fault
            if column < 0:
                raise LogError(
                    f"{self.name}: line {line + wrong} has {found} fields, but must have "
                    f"{len(names)}, as the first line."
                )
            self._refuse(text, read[column], line + wrong)
        ids = {name: Ids(*of_column) for name, of_column in zip(read, parsed, strict=True)}
        return Part(count, {name: ids[name] for name in columns})

    def _refuse(self, text: bytes, column: str, line: int) -> NoReturn:
        is_integer = self._layout.kinds[column] == "integer"
        raise LogError(
            f"{self.name}: column {column!r} is {text[:40].decode(errors='replace')!r} in line "
            f"{line}, but must be {'an integer' if is_integer else 'a hexadecimal number'} of 64 "
            "bits, as in the lines before."
        )


class _ReadErrors:
    """Turns errors during the read of a file into a :class:`LogError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, EOFError, zlib.error)):
            raise LogError(f"{self._name} can't be read: {error}.") from None


def _criteo_layout() -> TextLayout:
    ids = _CRITEO[14:]
    return TextLayout(b"\t", _CRITEO, False, dict.fromkeys(ids, "hexadecimal"), ids)


def looks_like_criteo(path: Path) -> bool:
    """Whether the first line looks like Criteo's."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            fields = file.readline(4096).rstrip(b"\r\n").split(b"\t")
    except OSError:
        return False
    hexadecimal = re.compile(rb"([0-9a-f]{8})?")
    return (
        len(fields) == len(_CRITEO)
        and fields[0] in (b"0", b"1")
        and all(hexadecimal.fullmatch(field) for field in fields[14:])
    )
