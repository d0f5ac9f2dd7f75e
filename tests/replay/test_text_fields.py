"""Fields of text as Python reads them: numbers, quotes, empty fields, separators and ends."""

from __future__ import annotations

import random

import pytest

from tests.replay.test_logs import read
from torchrec_hkv import _C
from torchrec_hkv.replay.text import TextLog


def _fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 * (value >= 2**63)


def _number(draw):
    digits = draw.randint(1, 19)
    number = draw.choice([draw.randrange(10**digits), draw.randrange(2**64), 2**63, 99999999])
    if draw.random() < 0.3:
        return f"-{min(number, 2**63)}"
    return f"{draw.choice(['', '', '+', '0'])}{number}"[:20].rstrip("+") or "0"


@pytest.mark.parametrize("seed", range(12))
def test_random_lines(tmp_path, seed):
    draw = random.Random(seed)
    separator, end = draw.choice([",", "::", "\t"]), draw.choice(["\n", "\r\n"])
    rows = [
        [
            "" if draw.random() < 0.1 else _number(draw),
            draw.choice(["", "x", "anna", "1e5", "ä"]),
            "" if draw.random() < 0.1 else _number(draw),
        ]
        for _ in range(300)
    ]
    rows[0] = ["1", "text", "2"]

    def quoted(field):
        return f'"{field}"' if field and draw.random() < 0.2 else field

    lines = [separator.join(map(quoted, row)) for row in rows]
    path = tmp_path / "log.csv"
    path.write_bytes((f"a{separator}b{separator}c{end}" + end.join(lines)).encode())
    values, samples = read(
        TextLog(path, separator, block=draw.choice([200, 1 << 20])), "c", "b", "a"
    )
    for at, name in enumerate("abc"):
        present = [(i, row[at]) for i, row in enumerate(rows) if row[at]]
        assert samples[name] == [i for i, _ in present]
        if name == "b":
            assert values[name] == [_fnv(text) for _, text in present]
        else:
            assert [value % 2**64 for value in values[name]] == [int(t) % 2**64 for _, t in present]


def test_bad_arguments():
    kind = _C.TextKind.integer
    with pytest.raises(ValueError, match="the separator is empty"):
        _C.parse_text(b"1\n", b"", 1, [(0, kind)])
    with pytest.raises(ValueError, match="field 0 must be above the one before"):
        _C.parse_text(b"1\n", b",", 1, [(0, kind), (0, kind)])


@pytest.mark.parametrize("first", ["user,item\n", ""])
def test_byte_order_mark(tmp_path, first):
    """Excel begins UTF-8 files with one; it belongs to no column's name and no id."""
    path = tmp_path / "log.csv"
    path.write_text(f"{first}7,8\n9,10\n", encoding="utf-8-sig")
    names = ("user", "item") if first else ("0", "1")
    for block in (1 << 20,) if first else (2, 4, 1 << 20):
        log = TextLog(path, block=block)
        assert log.columns == log.default_columns == names
        values, _ = read(log, *names)
        assert list(values.values()) == [[7, 9], [8, 10]]
