"""The benchmark of replays runs, at sizes too small for meaningful figures."""

import csv

import pytest
import torch

from benchmarks import replay

SIZES = ["--lookups", "60000", "--rows", "7000", "9000", "--samples", "0.3", "--batch", "500"]


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_format(tmp_path):
    out = tmp_path / "out.csv"
    formats = ["npy", "npy32", "csv"]
    what = ["--what", "speed", "--repetitions", "1", "--policies", "lru"]
    replay.main([*what, *SIZES, "--formats", *formats, "--out", str(out)])
    rows = _rows(out)
    assert [row["format"] for row in rows] == formats
    assert all(float(row["m_lookups_s"]) > 0 for row in rows)


def test_a_row_for_each_stream_policy_and_size(tmp_path):
    out = tmp_path / "out.csv"
    what = ["--what", "error", "--streams", "power 0.8", "sessions", "--policies", "lru", "lfu"]
    replay.main([*what, *SIZES, "--draws", "2", "--out", str(out)])
    rows = _rows(out)
    assert [(row["stream"], row["policy"], row["rows"]) for row in rows] == [
        (stream, policy, size)
        for stream in ("power 0.8", "sessions")
        for policy in ("lru", "lfu")
        for size in ("7000", "9000")
    ]
    for row in rows:
        assert 0 < float(row["hit_rate"]) < 1
        assert float(row["rms"]) <= abs(float(row["worst"])) + 1e-5 < 0.05
