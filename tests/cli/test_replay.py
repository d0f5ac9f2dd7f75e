"""``torchrec-hkv replay``: its output, files and plots."""

from __future__ import annotations

import json

import numpy as np
import pytest

from torchrec_hkv.cli import main
from torchrec_hkv.hash_table import AgedLFU
from torchrec_hkv.replay import ReplayedLog


@pytest.fixture
def log(tmp_path):
    generator = np.random.default_rng(1)
    path = tmp_path / "log.npz"
    user = (2000 * generator.random(20_000) ** 3).astype(np.int64)
    np.savez(path, user=user, item=generator.integers(0, 300, 20_000))
    return str(path)


REPLAY = ["--rows", "100,300,1k", "--eviction", "lru,lfu", "--batch-size", "100"]


def test_json(log, capsys):
    command = ["replay", log, *REPLAY, "--target", "0.5", "--budget", "300KiB", "--json"]
    assert main([*command, "--dim", "16", "--dim", "item=8"]) == 0
    content = json.loads(capsys.readouterr().out)
    user = content["tables"]["user"]
    assert user["lookups"] == 20_000
    assert [curve["eviction"] for curve in user["curves"]] == ["lru", "lfu"]
    for curve in user["curves"]:
        rates = [point["hit_rate"] for point in curve["points"]]
        assert rates == sorted(rates)
        assert [point["rows"] for point in curve["points"]] == [100, 300, 1000]
    rows = user["meeting_target"][0]["rows"]
    assert 100 <= rows <= 1000
    assert user["meeting_target"][0]["options"].startswith("HKVOptions(eviction='")
    chosen = {name: table["under_budget"] for name, table in content["tables"].items()}
    assert sum(table["bytes"] for table in chosen.values()) <= 300 << 10
    item = content["tables"]["item"]["curves"][0]["points"][0]["bytes"]
    assert item < user["curves"][0]["points"][0]["bytes"]


def test_text(log, capsys):
    assert main(["replay", log, *REPLAY, "--table", "user", "--target", "0.7"]) == 0
    text = capsys.readouterr().out
    assert "user: 20,000 lookups of " in text
    assert "70.00% need about " in text
    assert "num_embeddings=" in text
    assert "options=HKVOptions(eviction=" in text
    assert "item" not in text


def test_ages_between_lru_and_lfu(log, tmp_path, capsys):
    """c = 0 gives LRU, a very large c gives LFU, as in the table."""
    out = tmp_path / "replay.json"
    names = "lru,aged_lfu:0,aged_lfu:3,aged_lfu:inf,lfu"
    command = ["replay", log, "--table", "user", "--rows", "100", "--eviction", names]
    assert main([*command, "--batch-size", "50", "--out", str(out)]) == 0
    curves = ReplayedLog.read(out).tables["user"].curves
    assert [str(curve.policy) for curve in curves] == names.split(",")
    lru, zero, three, infinite, lfu = (curve.points[0].hit_rate for curve in curves)
    assert zero == pytest.approx(lru, abs=0.01)
    assert infinite == pytest.approx(lfu, abs=0.01)
    assert len({lru, three, lfu}) == 3
    assert curves[2].policy.options(100).eviction == AgedLFU(c=3)
    assert "AgedLFU(c=3.0)" in curves[2].policy.code(100)


def test_a_target_out_of_reach_is_an_answer(log, capsys):
    assert main(["replay", log, *REPLAY, "--table", "user", "--target", "99.99%"]) == 1
    assert (
        "Nothing that was tried reaches 99.99%: with a row for each id" in capsys.readouterr().out
    )


def test_shares_of_the_ids_and_admission(log, capsys):
    rules = "none,frequency:2,frequency:3:64KiB,probability:0.5"
    command = ["replay", log, "--rows", "10%,50", "--admission", rules, "--table", "user", "--json"]
    assert main(command) == 0
    user = json.loads(capsys.readouterr().out)["tables"]["user"]
    expected = sorted({50, round(0.1 * user["distinct"])})
    assert [point["rows"] for point in user["curves"][0]["points"]] == expected
    unadmitted = [curve["points"][0]["unadmitted"] for curve in user["curves"][:4]]
    assert unadmitted[0] == 0 < min(unadmitted[1:])
    assert user["curves"][2]["admission"]["sketch_bytes"] == 64 << 10


def test_files(log, tmp_path, capsys):
    picture, out = tmp_path / "curve.svg", tmp_path / "replay.json"
    pytest.importorskip("matplotlib")
    command = ["replay", log, *REPLAY, "--table", "all=user,item"]
    assert main([*command, "--plot", str(picture), "--out", str(out)]) == 0
    assert "</svg>" in picture.read_text()
    written = ReplayedLog.read(out)
    assert written.tables["all"].lookups == 40_000
    first = picture.read_bytes()
    assert main([*command, "--plot", str(picture)]) == 0
    assert picture.read_bytes() == first


BAD = {
    "--rows is 'many', but must be a whole number": ["--rows", "many"],
    "--rows is '0%', but must be a share": ["--rows", "0%"],
    "The eviction is 'fifo', but must be in lru, lfu": ["--eviction", "fifo"],
    "The eviction 'aged_lfu:x' must have a number of at least 0": ["--eviction", "aged_lfu:x"],
    "--admission is 'twice', but must be none": ["--admission", "twice"],
    "count is 1, but must be an integer from 2 to 65535": ["--admission", "frequency:1"],
    "The probability of --admission 'probability:2' is '2'": ["--admission", "probability:2"],
    "has no column of ids 'page'; it has user, item.": ["--table", "page"],
    "--table names 'user' twice.": ["--table", "user", "--table", "user=item"],
    "--target is '2', but must be a share": ["--target", "2"],
    "--sample is '0', but must be a share": ["--sample", "0"],
    "Table 'user': a sample of 0.01 leaves 1 of 100 rows, but must leave": ["--sample", "1%"],
    "--dim is '4096', but must be 1 to 2048.": ["--dim", "4096"],
    "--dim is 'page=8', but there is no table 'page'": ["--dim", "page=8"],
    "--plot is curve.gif, but must be a file": ["--plot", "curve.gif"],
    "--out is /no/such/folder/a.json, but must be": ["--out", "/no/such/folder/a.json"],
    "--epoch is '100', but none of lru has epochs.": ["--epoch", "100", "--eviction", "lru"],
    "--expire-after is '0', but must be": ["--expire-after", "0"],
    "The budget is 1,024 bytes, but the fewest rows": ["--budget", "1KiB"],
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input(log, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["replay", log, "--rows", "100", *BAD[sentence]])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_shares_need_to_read_twice(capsys):
    import io
    import sys

    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(b"1\n2\n"))
    try:
        with pytest.raises(SystemExit):
            main(["replay", "-", "--rows", "10%"])
    finally:
        sys.stdin = before
    assert "the standard input can be read once" in capsys.readouterr().err
