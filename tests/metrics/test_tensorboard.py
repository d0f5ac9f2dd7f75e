"""Metrics as scalars of TensorBoard."""

import importlib.util

import pytest

from torchrec_hkv.metrics import TableMetrics, TensorBoard

BEFORE = TableMetrics(lookups=100, hits=50, size=10, capacity=100, hbm_bytes=5)
NOW = TableMetrics(lookups=300, hits=200, evicted=3, size=20, capacity=100, host_bytes=9)


class Writer:
    def __init__(self):
        self.scalars = {}
        self.closed = False

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars[tag, global_step] = scalar_value

    def close(self):
        self.closed = True


def test_counts_are_those_since_the_last_time():
    writer = Writer()
    with TensorBoard(writer=writer) as board:
        board(10, {"a": BEFORE})
        board(20, {"a": NOW})
        board.scalars(20, loss=0.5)
    at_20 = {tag: value for (tag, step), value in writer.scalars.items() if step == 20}
    assert at_20 == {
        "a/lookups": 200,
        "a/hits": 150,
        "a/inserted": 0,
        "a/evicted": 3,
        "a/refused": 0,
        "a/unadmitted": 0,
        "a/expired": 0,
        "a/fetched": 0,
        "a/written_home": 0,
        "a/host_hits": 0,
        "a/returned": 0,
        "a/hit_rate": 0.75,
        "a/hbm_hit_rate": 0.75,
        "a/host_hit_rate": 0.0,
        "a/size": 20,
        "a/load_factor": 0.2,
        "a/hbm_bytes": 0,
        "a/host_bytes": 9,
        "loss": 0.5,
    }
    assert writer.scalars["a/hit_rate", 10] == 0.5
    assert not writer.closed


def test_files_of_tensorboard(tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ImportError, match=r"^TensorBoard needs the package tensorboard"):
            TensorBoard(tmp_path)
        return
    with TensorBoard(tmp_path / "run") as board:
        board(1, {"a": NOW})
    assert list((tmp_path / "run").iterdir())


def test_neither_folder_nor_writer():
    with pytest.raises(ValueError, match="Either a log_dir or a writer must be given"):
        TensorBoard()
