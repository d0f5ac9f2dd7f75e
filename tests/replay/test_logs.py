"""The same ids from every format; damaged logs are refused in one sentence."""

from __future__ import annotations

import gzip
import io
import sys

import numpy as np
import pytest
import torch

from torchrec_hkv.replay import LogError, open_log
from torchrec_hkv.replay.text import TextLog

N = 3000
MIN, MAX = -(2**63), 2**63 - 1


@pytest.fixture
def ids():
    generator = np.random.default_rng(4)
    user = generator.integers(MIN, MAX, N, endpoint=True)
    user[:4] = MIN, MAX, -1, 0
    return {"user": user, "item": generator.integers(0, 500, N)}


def read(log, *columns):
    """Ids of each column, and the sample of each, over all parts."""
    columns = columns or log.default_columns
    values, samples, begin = {c: [] for c in columns}, {c: [] for c in columns}, 0
    for part in log.parts(columns):
        for column in columns:
            found = part.columns[column]
            at = torch.arange(part.num_samples) if found.samples is None else found.samples
            assert at.numel() == found.values.numel()
            assert found.values.dtype == torch.int64
            values[column] += found.values.tolist()
            samples[column] += (at + begin).tolist()
        begin += part.num_samples
    return values, samples


def lines(ids, separator=",", header=True, end="\n"):
    rows = [list(ids)] if header else []
    rows += list(zip(*(column.tolist() for column in ids.values()), strict=True))
    return "".join(separator.join(map(str, row)) + end for row in rows)


def same(log, ids, names=None):
    values, samples = read(log, *(names or ids))
    for name, column in zip(names or ids, ids.values(), strict=True):
        assert values[name] == column.tolist()
        assert samples[name] == list(range(len(column)))


def test_arrays(tmp_path, ids):
    np.savez(tmp_path / "log.npz", price=np.ones(N), pair=np.stack([*ids.values()], 1), **ids)
    log = open_log([str(tmp_path / "log.npz")])
    assert log.columns == ("pair_0", "pair_1", "user", "item")
    same(log, ids)
    same(log, ids, ["pair_0", "pair_1"])
    np.save(tmp_path / "two.npy", np.stack([*ids.values()], 1))
    same(open_log([str(tmp_path / "two.npy")]), ids, ["0", "1"])
    np.save(tmp_path / "one.npy", ids["item"].astype(np.uint16))
    same(open_log([str(tmp_path / "one.npy")]), {"ids": ids["item"]})
    np.save(tmp_path / "unsigned.npy", ids["user"].view(np.uint64))
    same(open_log([str(tmp_path / "unsigned.npy")]), {"ids": ids["user"]})


@pytest.mark.parametrize("separator", [",", "\t", "::", ";", "|", " "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("header", [True, False])
def test_text(tmp_path, ids, separator, end, header):
    path = tmp_path / "log.csv"
    path.write_bytes(lines(ids, separator, header, end).encode())
    same(open_log([str(path)]), ids, None if header else ["0", "1"])


def test_blocks_of_text_end_anywhere(tmp_path, ids):
    path = tmp_path / "log.csv"
    path.write_text(lines(ids)[:-1])  # the last line has no end
    for size in (64, 1000, 4097):
        same(TextLog(path, block=size), ids)


def test_gzip_and_several_files(tmp_path, ids):
    half = N // 2
    for name, part in (("a", slice(half)), ("b", slice(half, None))):
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt") as file:
            file.write(lines({key: column[part] for key, column in ids.items()}))
    same(open_log([str(tmp_path / "a.csv.gz"), str(tmp_path / "b.csv.gz")]), ids)


def test_standard_input(monkeypatch, ids):
    def given(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    given(lines(ids).encode())
    log = open_log(["-"])
    assert not log.is_repeatable
    same(log, ids)
    given("".join(f"{ident}\n" for ident in ids["user"]).encode())
    same(open_log(["-"]), {"ids": ids["user"]})
    given(ids["user"].tobytes())
    same(open_log(["-"], "int64"), {"ids": ids["user"]})


def test_int64_without_header(tmp_path, ids):
    (tmp_path / "log.bin").write_bytes(ids["user"].tobytes())
    same(open_log([str(tmp_path / "log.bin")], "int64"), {"ids": ids["user"]})
    (tmp_path / "log.bin").write_bytes(b"123456789")
    with pytest.raises(LogError, match="ends within an id"):
        read(open_log([str(tmp_path / "log.bin")], "int64"))


def test_texts_missing_ids_quotes_and_unsigned_numbers(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        'who,when,price,n\n"ann",1,1.5,18446744073709551615\nbob,,2.5,-9223372036854775808\n'
        "ann,3,.5,+7\n,4,1,2\n"
    )
    log = open_log([str(path)])
    assert log.columns == ("who", "when", "price", "n")
    assert log.default_columns == ("who", "when", "n")
    values, samples = read(log)
    who = values["who"]
    assert who[0] == who[2] != who[1]
    assert samples["who"] == [0, 1, 2]
    assert (values["when"], samples["when"]) == ([1, 3, 4], [0, 2, 3])
    assert values["n"] == [-1, MIN, 7, 2]


def test_a_missing_id_and_the_order_of_time(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("user,second\n5,30\n-1,10\n7,20\n-1,40\n")
    sorted_log = open_log([str(path)], sort_by="second", missing=-1)
    assert sorted_log.default_columns == ("user",)
    assert read(sorted_log) == ({"user": [7, 5]}, {"user": [1, 2]})
    with pytest.raises(LogError, match="has no column of ids 'time'"):
        open_log([str(path)], sort_by="time")


@pytest.mark.parametrize("time", ["2024-01-01T00:00:{:02d}", "{}.5", "{} s"])
def test_texts_have_no_order(time, tmp_path):
    """They are hashed."""
    path = tmp_path / "log.csv"
    path.write_text("user,time\n" + "".join(f"5,{time.format(n)}\n" for n in (3, 1, 2)))
    with pytest.raises(LogError, match="can't be sorted by 'time', which is not a column of int"):
        open_log([str(path)], sort_by="time")


def test_parquet_sorted_by_times(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    seconds = np.array([30, -10, 20])
    table = pyarrow.table(
        {
            "user": [1, 2, 3],
            "stamp": seconds.astype("datetime64[us]"),
            "day": pyarrow.array(seconds.astype(np.int32)).view(pyarrow.date32()),
            "clock": pyarrow.array(seconds.astype(np.int32) + 50).view(pyarrow.time32("s")),
            "text": ["c", "a", "b"],
        }
    )
    parquet.write_table(table, path := tmp_path / "log.parquet")
    for column in ("stamp", "day", "clock"):
        log = open_log([str(path)], sort_by=column)
        assert log.columns == ("user", "text")
        assert read(log, "user")[0] == {"user": [2, 3, 1]}
    with pytest.raises(LogError, match="can't be sorted by 'text'"):
        open_log([str(path)], sort_by="text")


def test_criteo(tmp_path):
    def line(label, count, ident):
        return "\t".join([label, *[count] * 13, *[ident] * 26]) + "\n"

    text = line("0", "3", "a73ee510") + line("1", "", "") + line("0", "-1", "0000ffff")
    path = tmp_path / "train.txt"
    path.write_text(text)
    log = open_log([str(path)])
    assert log.columns == log.default_columns == tuple(f"C{i}" for i in range(1, 27))
    values, samples = read(log, "C1", "C26")
    assert values == {name: [0xA73EE510, 0xFFFF] for name in ("C1", "C26")}
    assert samples["C1"] == [0, 2]
    path.write_text(text + line("0", "1", "zz"))
    with pytest.raises(LogError, match=r"column 'C1' is 'zz' in line 4, but must be a hexadecimal"):
        read(open_log([str(path)]), "C1")


def test_parquet(tmp_path, ids):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lists = [[ident, -ident] if ident % 3 else [] for ident in ids["item"].tolist()]
    nulls = [ident if ident % 2 else None for ident in ids["item"].tolist()]
    names = [None if ident % 5 == 0 else f"n{ident}" for ident in ids["item"].tolist()]
    table = pyarrow.table(
        {
            "user": ids["user"],
            "item": ids["item"].astype(np.int32),
            "price": np.ones(N),
            "bag": lists,
            "some": nulls,
            "name": names,
            "kind": pyarrow.array(names).dictionary_encode(),
        }
    )
    (tmp_path / "days").mkdir()
    half = N // 2
    parquet.write_table(table[:half], tmp_path / "days/1.parquet", row_group_size=700)
    parquet.write_table(table[half:], tmp_path / "days/2.parquet")
    log = open_log([str(tmp_path / "days")])
    assert log.columns == ("user", "item", "bag", "some", "name", "kind")
    same(log, ids)
    values, samples = read(log, "bag", "some", "name", "kind")
    assert values["bag"] == [ident for bag in lists for ident in bag]
    assert samples["bag"] == [at for at, bag in enumerate(lists) for _ in bag]
    assert values["some"] == [ident for ident in nulls if ident is not None]
    assert samples["some"] == [at for at, ident in enumerate(nulls) if ident is not None]
    assert values["name"] == values["kind"]
    named = [name for name in names if name is not None]
    pairs = set(zip(values["name"], named, strict=True))
    assert len(pairs) == len(set(named)) == len({value for value, _ in pairs})


def test_a_text_is_the_same_id_in_every_format(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "log.csv").write_text("name\nann\nbob\n")
    parquet.write_table(pyarrow.table({"name": ["ann", "bob"]}), tmp_path / "log.parquet")
    assert read(open_log([str(tmp_path / "log.csv")])) == read(
        open_log([str(tmp_path / "log.parquet")])
    )


DAMAGED = {
    "a,b\n1,2\n3\n": r"line 3 has 1 fields, but must have 2",
    "": "is empty",
    "a,a\n1,2\n": "columns must have different names",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_text(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(LogError, match=DAMAGED[text]):
        read(open_log([str(path)]))


def test_an_integer_column_stays_one(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("a\n" + "1\n" * 2000 + "99999999999999999999\n")
    with pytest.raises(LogError, match=r"'99999999999999999999' in line 2002, but must be an int"):
        read(open_log([str(path)]))


def test_files_that_are_something_else(tmp_path):
    with pytest.raises(LogError, match=r"There is no log .*no\.csv\."):
        open_log([str(tmp_path / "no.csv")])
    for name in ("a.npy", "a.npz", "a.csv.gz", "a.parquet"):
        (tmp_path / name).write_bytes(b"something else")
        with pytest.raises(LogError) as refused:
            read(open_log([str(tmp_path / name)]))
        assert name in str(refused.value)
    np.savez(tmp_path / "b.npz", a=np.arange(3), b=np.arange(4))
    with pytest.raises(LogError, match=r"must be of one length, but they have a 3, b 4 rows"):
        open_log([str(tmp_path / "b.npz")])
    np.save(tmp_path / "c.npy", np.ones(3))
    with pytest.raises(LogError, match="has no array of integers"):
        open_log([str(tmp_path / "c.npy")])
    (tmp_path / "folder").mkdir()
    with pytest.raises(LogError, match="has no Parquet file"):
        open_log([str(tmp_path / "folder")])
    with pytest.raises(LogError, match="can't be joined"):
        open_log(["-", str(tmp_path / "c.npy")])
    with pytest.raises(LogError, match="can't be of format 'npy'"):
        open_log(["-"], "npy")


@pytest.mark.parametrize("base", [10, 16])
def test_numbers_of_all_lengths(tmp_path, base):
    generator = np.random.default_rng(6)
    numbers = [int(generator.integers(0, 2**64, dtype=np.uint64)) >> k for k in range(64)] * 3
    numbers += [2**64 - 1, 2**63, 10**19, 0, 1, 99999999, 10**8, 10**16, 0xFFFFFFFF]
    path = tmp_path / "log.txt"
    if base == 10:
        texts = [f"{n}" for n in numbers] + ["-9223372036854775808", "-1", "+5", "000000000012"]
        path.write_text("\n".join(["n", *texts]))
        values = read(open_log([str(path)]))[0]["n"]
        numbers += [2**63, 2**64 - 1, 5, 12]
        for text in (
            "18446744073709551616",
            "-9223372036854775809",
            "1x",
            "1.5",
            "123456789012345678901",
        ):
            path.write_text("\n".join(["n", *["7"] * 1000, text]))
            with pytest.raises(LogError, match="in line 1002, but must be an integer of 64 bits"):
                read(open_log([str(path)]))
    else:
        head = "\t".join(["1"] + ["2"] * 13)
        lines = [f"{head}\t{n:x}" + f"\t{n:016X}" * 25 for n in numbers]
        path.write_text("\n".join(lines))
        both = read(open_log([str(path)], "criteo"), "C1", "C2")[0]
        values = both["C1"]
        assert both["C2"] == values
    assert [value % 2**64 for value in values] == numbers
