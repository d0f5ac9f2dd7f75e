"""Logs as text: CSV and similar formats, one id a line, and Criteo's files.

A line is a sample, a field an id. Fields are parsed by numpy, for all lines of a block at once:
byte by byte, over all fields.
"""

from __future__ import annotations

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

import numpy as np
import torch

from torchrec_hkv.replay.log import Ids, Log, LogError, Part, check_file

Kind = Literal["integer", "text", "hexadecimal"]

_SEPARATORS = ("\t", "::", ",", ";", "|", " ")
_NEWLINE, _RETURN, _QUOTE, _MINUS, _PLUS = b'\n\r"-+'
_INTEGER = re.compile(r"[-+]?[0-9]{1,20}")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
#: Fields of Criteo: a label, counts and ids.
_CRITEO = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
#: Most digits of a number, rounded up to a multiple of eight.
_MOST_DIGITS = 24
#: Constants of FNV-1a, a 64-bit hash.
_FNV_BASIS, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


@dataclasses.dataclass(frozen=True)
class Layout:
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
            is a number. Without a header the columns are ``0``, ``1``, ..., or ``ids`` if there is
            only one.
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
        with self._reading():
            self._blocks = self._read()
            first = next(self._blocks, b"")
        if not first:
            raise LogError(f"{self.name} is empty.")
        self._first: bytes | None = first
        self._layout = _criteo_layout() if criteo else self._seen(first, separator, header)
        self.columns = tuple(self._layout.kinds)

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self._layout.defaults

    def parts(self, columns: Sequence[str]) -> Iterator[Part]:
        if self._first is not None:
            blocks = itertools.chain([self._first], self._blocks)
            self._first = None
        else:
            blocks = self._read()
        line = 1
        while True:
            with self._reading():
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

    def _reading(self) -> _Reading:
        return _Reading(self.name)

    def _read(self) -> Iterator[bytes]:
        """Yields blocks of whole lines."""
        with self._opened() as file:
            rest = b""
            while data := file.read(self._block):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                rest = data[cut:]
                if cut:
                    yield data[:cut]
            if rest:
                yield rest + b"\n"

    def _opened(self) -> contextlib.AbstractContextManager[BinaryIO]:
        if self._path is None:
            return contextlib.nullcontext(sys.stdin.buffer)
        if self._path.suffix == ".gz":
            return gzip.open(self._path, "rb")  # type: ignore[return-value]
        return self._path.open("rb")

    def _seen(self, block: bytes, separator: str | None, header: bool | None) -> Layout:
        """Finds the format from the first lines."""
        lines = [line.decode(errors="replace") for line in block.splitlines()[:1000]]
        if separator is None:
            separator = next((mark for mark in _SEPARATORS if mark in lines[0]), ",")
        rows = [[field.strip(' "') for field in line.split(separator)] for line in lines]
        names = rows[0]
        if header is None:
            header = len(rows) > 1 and not any(_NUMBER.fullmatch(f) or not f for f in names)
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
        return Layout(separator.encode(), tuple(names), header, kinds, tuple(defaults))

    def _part(self, block: bytes, line: int, columns: Sequence[str]) -> Part:
        data = np.frombuffer(block, dtype=np.uint8)
        begins, ends = self._fields(data, line)
        is_plain = b'"' not in block and b"\r" not in block
        digits: dict[int, np.ndarray] = {}
        ids = {}
        for column in columns:
            at = self._layout.names.index(column)
            begin, end = begins[:, at], ends[:, at]
            if not is_plain:
                begin, end = _trimmed(data, begin, end)
            kind = self._layout.kinds[column]
            if kind == "text":
                values = hashed_texts(data, begin, end)
            else:
                base = 16 if kind == "hexadecimal" else 10
                if base not in digits:
                    digits[base] = _digits(data, base)
                values, wrong = _numbers(data, digits[base], begin, end, base)
                if wrong.any():
                    self._refuse(data, begin, end, int(np.flatnonzero(wrong)[0]), column, line)
            present = end > begin
            if present.all():
                ids[column] = Ids(torch.from_numpy(values))
            else:
                kept = np.flatnonzero(present)
                ids[column] = Ids(torch.from_numpy(values[kept]), torch.from_numpy(kept))
        return Part(len(begins), ids)

    def _fields(self, data: np.ndarray, line: int) -> tuple[np.ndarray, np.ndarray]:
        """Begin and end of each field of each line, ``[lines, fields]`` each."""
        separator = np.frombuffer(self._layout.separator, dtype=np.uint8)
        is_end = data == separator[0]
        for at, byte in enumerate(separator[1:], start=1):
            is_end[:-at] &= data[at:] == byte
            is_end[-at:] = False
        is_end |= data == _NEWLINE
        ends = np.flatnonzero(is_end)
        count = len(self._layout.names)
        is_last = data[ends] == _NEWLINE
        if (
            len(ends) % count
            or not is_last[count - 1 :: count].all()
            or is_last.sum() * count != (len(ends))
        ):
            lasts = np.flatnonzero(is_last)
            counts = np.diff(lasts, prepend=-1)
            wrong = int(np.flatnonzero(counts != count)[0])
            raise LogError(
                f"{self.name}: line {line + wrong} has {counts[wrong]} fields, but must have "
                f"{count}, as the first line."
            )
        begins = np.empty_like(ends)
        begins[0] = 0
        begins[1:] = ends[:-1] + np.where(is_last[:-1], 1, len(separator))
        return begins.reshape(-1, count), ends.reshape(-1, count)

    def _refuse(
        self, data: np.ndarray, begin: np.ndarray, end: np.ndarray, at: int, column: str, line: int
    ) -> NoReturn:
        text = bytes(data[begin[at] : end[at]])[:40].decode(errors="replace")
        is_integer = self._layout.kinds[column] == "integer"
        raise LogError(
            f"{self.name}: column {column!r} is {text!r} in line {line + at}, but must be "
            f"{'an integer' if is_integer else 'a hexadecimal number'} of 64 bits, as in the lines "
            "before."
        )


class _Reading:
    """Turns errors during the read of a file into a :class:`LogError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, EOFError, zlib.error)):
            raise LogError(f"{self._name} can't be read: {error}.") from None


def _criteo_layout() -> Layout:
    ids = _CRITEO[14:]
    return Layout(b"\t", _CRITEO, False, dict.fromkeys(ids, "hexadecimal"), ids)


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


def _trimmed(data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Strips quotes around fields and the carriage return at the end of a line."""
    begin, end = begin.copy(), end.copy()
    last = data[np.maximum(end - 1, 0)]
    end -= (end > begin) & (last == _RETURN)
    last = data[np.maximum(end - 1, 0)]
    quoted = (end > begin + 1) & (data[begin] == _QUOTE) & (last == _QUOTE)
    return begin + quoted, end - quoted


def _digits(data: np.ndarray, base: int) -> np.ndarray:
    """The value of each byte as a digit, or at least 128 for other bytes, after as many zeros as a
    number has digits at most."""
    digits = np.zeros(_MOST_DIGITS + len(data), dtype=np.uint8)
    shown = digits[_MOST_DIGITS:]
    if base == 10:
        np.subtract(data, ord("0"), out=shown)
        shown |= (shown > 9).view(np.uint8) << 7
    else:
        values = np.full(256, 128, dtype=np.uint8)
        for value, mark in enumerate("0123456789abcdef"):
            values[ord(mark)] = values[ord(mark.upper())] = value
        np.take(values, data, out=shown)
    return digits


def _numbers(
    data: np.ndarray, digits: np.ndarray, begin: np.ndarray, end: np.ndarray, base: int
) -> tuple[np.ndarray, np.ndarray]:
    """Parses fields as int64, and returns which fields are not numbers of 64 bits.

    Unsigned numbers from 2^63 on become the int64 with the same bits. Eight digits are parsed at a
    time, as one integer of which each byte is a digit.
    """
    first = data[np.minimum(begin, len(data) - 1)]
    minus = (first == _MINUS) & (end > begin)
    length = end - begin - (minus | ((first == _PLUS) & (end > begin)))
    most = 20 if base == 10 else 16
    wrong = ((length <= 0) & (end > begin)) | (length > most)
    eights = np.ndarray(len(digits) - 7, dtype="<u8", buffer=digits, strides=(1,))
    values = np.zeros(len(begin), dtype=np.uint64)
    for place in range(-(-min(int(length.max(initial=0)), most) // 8)):
        word = eights[end + (_MOST_DIGITS - 8 * (place + 1))]
        # The digits of the field are the upper bytes; a shift by 64 gives 0.
        lower = (64 - 8 * np.clip(length - 8 * place, 0, 8)).astype(np.uint64)
        word = (word >> lower) << lower if lower.any() else word
        word[lower == 64] = 0
        wrong |= (word & np.uint64(0x8080808080808080)) != 0
        part = _joined_digits(word, base)
        if place == 2:  # of 20 decimal digits
            low = np.uint64(((1 << 64) - 1) % 10**16)
            wrong |= (part > 1844) | ((part == 1844) & (values > low))
        values += part * np.uint64(base ** (8 * place))
    wrong |= minus & (values > np.uint64(1 << 63))
    values = np.where(minus, np.uint64(0) - values, values)
    return values.view(np.int64), wrong


def _joined_digits(word: np.ndarray, base: int) -> np.ndarray:
    """Combines eight digits to a number. The first digit is in the lowest byte."""
    for bits, mask in ((8, 0x0F0F0F0F0F0F0F0F), (16, 0x00FF00FF00FF00FF), (32, 0x0000FFFF0000FFFF)):
        # Adds neighbouring lanes of this many bits, after multiplying the lower by the upper's
        # range.
        factor = np.uint64((base ** (bits // 8) << bits) + 1)
        word = ((word & np.uint64(mask)) * factor) >> np.uint64(bits)
    return word & np.uint64(0xFFFFFFFF)


def hashed_texts(data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Hashes the bytes of each text to int64.

    Args:
        data: uint8, bytes of all texts.
        begin: begin of each text.
        end: end of each text.
    """
    length = end - begin
    values = np.full(len(begin), _FNV_BASIS, dtype=np.uint64)
    for place in range(int(length.max(initial=0))):
        active = length > place
        byte = data[np.where(active, begin + place, 0)]
        values = np.where(active, (values ^ byte) * _FNV_PRIME, values)
    return values.view(np.int64)
