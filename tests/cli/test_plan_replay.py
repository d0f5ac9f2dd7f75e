"""``torchrec-hkv plan --replay``: ids and hit rates of a replay decide the numbers of rows."""

from __future__ import annotations

import json

import pytest

from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.cli import main
from torchrec_hkv.replay import Curve, Point, Policy, Replayed, ReplayedLog

#: Ids: ten frequent ones, and others that occur once.
SEEN = IdFrequencies(((10, 1000.0), (9990, 1.0)))


def point(rows: int, hit_rate: float) -> Point:
    """A point; the number of bytes does not matter."""
    return Point(rows, hit_rate, 0.0, 0, 0, 0, 0, 0, rows, 100 * rows)


def table(name: str, small: float, large: float) -> Replayed:
    """LRU is best with few rows, LFU on average."""
    lru = Curve(Policy("lru"), (point(1000, small), point(4000, large - 0.2)))
    lfu = Curve(Policy("lfu"), (point(1000, small - 0.05), point(4000, large)))
    return Replayed(name, 20_000, 10_000, 0.9, SEEN, (lru, lfu))


@pytest.fixture
def replay(tmp_path) -> str:
    path = tmp_path / "replay.json"
    tables = {"user": table("user", 0.3, 0.8), "item": table("item", 0.8, 0.85)}
    ReplayedLog(64, 1.0, tables).write(path)
    return str(path)


def planned(capsys, *arguments: str) -> dict:
    main(["plan", "--batch-size", "64", "--optimizer", "rowwise_adagrad", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_all_ids_where_they_fit(capsys, replay):
    content = planned(capsys, "--table", "user::64", "--replay", replay)
    assert content["tables"]["user"]["rows"] == [10_000]
    assert content["replay"]["user"] == {
        "rows": 10_000,
        "options": "HKVOptions(eviction='lfu')",
        "hit_rate": 0.9,
        "unlimited_hit_rate": 0.9,
    }


def test_rows_go_where_they_save_most_lookups(capsys, replay):
    small = ("--hbm", "3MiB", "--host", "1MiB")
    arguments = ("--table", "user::64", "--table", "item::64", "--replay", replay)
    content = planned(capsys, *arguments, *small)
    assert content["fits"]
    told = content["replay"]
    # More rows gain much for ``user``, and little for ``item``.
    assert 4000 <= told["user"]["rows"] < 10_000
    assert told["item"]["rows"] < 4000
    assert 0.8 <= told["user"]["hit_rate"] < 0.9
    # The plan uses most of the budget.
    assert content["memory"][0]["hbm"]["free"] < 100_000
    wider = planned(capsys, *arguments, "--hbm", "4MiB", "--host", "1MiB")["replay"]
    assert sum(t["hit_rate"] for t in wider.values()) > sum(t["hit_rate"] for t in told.values())


def test_several_gpus_share_the_rows(capsys, replay):
    content = planned(capsys, "--table", "user::64", "--replay", replay, "--gpus", "2")
    assert content["tables"]["user"]["rows"] == [5000, 5000]
    assert content["replay"]["user"]["rows"] == 10_000


def test_host_memory_before_fewer_rows(capsys, replay):
    arguments = ("--table", "user::64", "--replay", replay, "--hbm", "2MiB", "--host", "100MiB")
    content = planned(capsys, *arguments)
    assert content["tables"]["user"]["rows"] == [10_000]
    assert content["tables"]["user"]["host"][0] > 0


def test_the_best_policy_for_given_rows(capsys, replay):
    content = planned(
        capsys,
        *("--table", "user:1000:64", "--table", "other:500:16", "--replay", replay),
        *("--hbm-per-table", "1MiB"),
    )
    told = content["replay"]
    assert set(told) == {"user"}
    assert told["user"]["options"] == "HKVOptions(eviction='lru')"
    assert told["user"]["hit_rate"] == pytest.approx(0.3)
    assert content["tables"]["user"]["rows"] == [1000]


def test_text(capsys, replay):
    arguments = ["plan", "--batch-size", "64", "--table", "user::64", "--replay", replay]
    assert main([*arguments, "--hbm", "3MiB", "--host", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert "user: about 7" in text
    assert "(with a row for each id 90.00%); num_embeddings=" in text
    assert "hkv without loss rejected: it does not fit" in text
    assert text.rstrip().endswith("It fits.")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--table", "user::64"], "--table 'user' has no number of rows: give one"),
        (["--table", "other::64", "--table", "user::64", "--replay"], "lacks the table"),
        (["--table", "other:10:64", "--replay"], "tables user, item, but --table names other"),
        (["--table", "user::64", "--backend", "fused", "--replay"], "needs backend 'hkv'"),
        (["--table", "user::64", "--replay", "nowhere.json"], "'nowhere.json': No such file"),
        (["--table", "user::64", "--replay", __file__], "test_plan_replay.py"),
    ],
)
def test_bad_input(capsys, replay, arguments, match):
    if arguments[-1] == "--replay":
        arguments = [*arguments, replay]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    assert match in capsys.readouterr().err
