"""Metrics as scalars of TensorBoard."""

import dataclasses
import importlib.util

import pytest
import torch

from torchrec_hkv.hash_table import HashTable
from torchrec_hkv.metrics import TableMetrics, TensorBoard, collect

BEFORE = TableMetrics(lookups=100, hits=50, inserted=20, size=10, capacity=100, host_bytes=5)
NOW = TableMetrics(
    lookups=300,
    hits=200,
    host_hits=200,
    inserted=100,
    evicted=3,
    size=20,
    capacity=100,
    host_bytes=9,
)


class Writer:
    def __init__(self):
        self.scalars = {}
        self.closed = False

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars[tag, global_step] = scalar_value

    def close(self):
        self.closed = True


def written(writer, step):
    return {tag: value for (tag, at), value in writer.scalars.items() if at == step}


def test_counts_are_those_since_the_last_time():
    writer = Writer()
    with TensorBoard(writer=writer) as board:
        board(10, {"a": BEFORE})
        board(20, {"a": NOW})
        board.scalars(20, loss=0.5)
    assert written(writer, 20) == {
        "a/lookups": 200,
        "a/hits": 150,
        "a/inserted": 80,
        "a/evicted": 3,
        "a/hit_rate": 0.75,
        "a/size": 20,
        "a/load_factor": 0.2,
        "a/host_bytes": 9,
        "loss": 0.5,
    }
    assert writer.scalars["a/hit_rate", 10] == 0.5
    assert not writer.closed


def test_a_table_has_only_what_it_uses():
    """A CPU's table without admission, expiry and memory of evictions has no metrics for them."""
    table = HashTable(4, 100, device="cpu")
    table.find_or_insert(torch.arange(10))
    writer = Writer()
    with TensorBoard(writer=writer) as board:
        board(1, collect(table))
    names = {tag.partition("/")[2] for tag in written(writer, 1)}
    assert names == {
        *("lookups", "inserted", "evicted", "hit_rate", "size", "load_factor", "host_bytes")
    }


@pytest.mark.parametrize(
    "name", ["hits", "refused", "unadmitted", "expired", "fetched", "written_back", "returned"]
)
def test_a_count_is_written_from_its_first_value_on(name):
    without, with_it = (dataclasses.replace(BEFORE, **{name: count}) for count in (0, 60))
    counts = [without, with_it, with_it, with_it]
    writer = Writer()
    with TensorBoard(writer=writer) as board:
        for step, metrics in enumerate(counts):
            board(step, {"a": metrics, "b": without})
    seen = [written(writer, step).get(f"a/{name}") for step in range(4)]
    assert seen == [None, 60, 0, 0]
    assert not any(tag == f"b/{name}" for tag, _ in writer.scalars)


def test_hits_by_memory_of_a_table_in_both():
    writer = Writer()
    both = TableMetrics(lookups=10, hits=8, host_hits=2, capacity=9, hbm_bytes=5, host_bytes=7)
    with TensorBoard(writer=writer) as board:
        board(1, {"a": both})
        # There is no rate without lookups.
        board(2, {"a": both})
    first = written(writer, 1)
    assert (first["a/host_hits"], first["a/hbm_hit_rate"], first["a/host_hit_rate"]) == (
        2,
        0.6,
        0.2,
    )
    assert (first["a/hbm_bytes"], first["a/host_bytes"]) == (5, 7)
    assert "a/evicted" not in first
    assert {tag for tag in written(writer, 2) if tag.endswith("rate")} == set()
    assert written(writer, 2)["a/host_hits"] == 0


def test_files_of_tensorboard(tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ImportError, match=r"^TensorBoard needs the package tensorboard"):
            TensorBoard(tmp_path)
        return
    with TensorBoard(tmp_path / "run") as board:
        board(1, {"a": NOW})
    assert list((tmp_path / "run").iterdir())


def test_neither_folder_nor_writer():
    with pytest.raises(ValueError, match="needs a log_dir or a writer"):
        TensorBoard()
