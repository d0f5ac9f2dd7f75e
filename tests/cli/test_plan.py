"""``torchrec-hkv plan`` prints the planner's figures for GPUs that this machine lacks."""

import json
import logging

import pytest

from torchrec_hkv.cli import main
from torchrec_hkv.hash_table import Adam, RowWiseAdagrad, gpu_table_bytes, table_memory

BILLION = ["plan", "--table", "user:1B:64", "--optimizer", "adam"]


def answer(capsys, *arguments):
    code = main([*arguments, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert code == (0 if content["fits"] else 1)
    return content


def memory(rows, dim, optimizer):
    return table_memory(rows, dim, optimizer.state_width(dim), "adaptive")  # the default


def test_a_billion_rows_on_eight_gpus(capsys):
    content = answer(capsys, *BILLION, "--gpus", "8", "--hbm", "141GiB")
    expected = memory(125_000_000, 64, Adam()).bytes
    assert content["fits"]
    assert content["tables"]["user"]["rows"] == [125_000_000] * 8
    assert content["tables"]["user"]["hbm"] == [expected] * 8
    assert (content["hbm_per_gpu"], content["host_per_gpu"]) == (expected, 0)


def test_a_billion_rows_on_one_gpu_need_host_memory(capsys):
    content = answer(capsys, *BILLION)
    assert not content["fits"]
    assert content["fits_on_gpus"] == 8
    limit = ["--hbm-per-table", "60GiB", "--host", "2TiB"]
    content = answer(capsys, *BILLION, *limit)
    table = memory(10**9, 64, Adam())
    hbm, host = gpu_table_bytes(table, 60 << 30)
    assert content["fits"]
    assert content["host_per_gpu"] == host == table.num_slots * table.row_bytes
    assert content["hbm_per_gpu"] == hbm
    assert 0.999 * (60 << 30) < hbm <= 60 << 30


def test_host_memory_is_that_of_a_machine(capsys):
    """Two GPUs share the host memory of a machine."""
    arguments = [*BILLION, "--hbm-per-table", "60GiB", "--host", "500GiB"]
    assert not answer(capsys, *arguments, "--gpus", "2", "--gpus-per-host", "2")["fits"]
    assert answer(capsys, *arguments, "--gpus", "2", "--gpus-per-host", "1")["fits"]


def test_several_tables_and_another_optimizer(capsys):
    content = answer(
        capsys,
        *("plan", "--table", "a:1_000_000:16", "--table", "b:2e6:32", "--gpus", "2"),
        *("--optimizer", "rowwise_adagrad"),
    )
    expected = {
        "a": memory(500_000, 16, RowWiseAdagrad()).bytes,
        "b": memory(1_000_000, 32, RowWiseAdagrad()).bytes,
    }
    assert {name: table["hbm"] for name, table in content["tables"].items()} == {
        name: [count] * 2 for name, count in expected.items()
    }
    assert content["hbm_per_gpu"] == sum(expected.values())


def test_a_kernel_of_torchrecs(capsys):
    content = answer(capsys, "plan", "--table", "a:1M:16", "--backend", "fused")
    assert content["tables"]["a"]["hbm"] == [3 * 64_000_000]


def test_a_backend_that_is_not_sharded_row_wise(capsys):
    """A Tensor-Train table lies whole on one rank."""
    content = answer(capsys, "plan", "--table", "a:1M:16", "--backend", "tt", "--gpus", "2")
    table = content["tables"]["a"]
    assert table["sharding"] in ("table_wise", "data_parallel")
    assert set(table["rows"]) == {1_000_000}
    assert content["hbm_per_gpu"] == max(table["hbm"]) < 64_000_000 / 10


@pytest.mark.parametrize(
    ("backend", "sharding", "ranks"),
    [
        ("tt", "data_parallel", [0, 1]),
        ("hkv", "table_wise", [0]),
        ("hkv", "column_wise", [0, 1]),
        ("fused", "table_wise", [0]),
    ],
)
def test_a_sharding_type_that_was_asked_for(backend, sharding, ranks, capsys, caplog):
    arguments = ["plan", "--table", "a:1M:256", "--gpus", "2", "--backend", backend]
    content = answer(capsys, *arguments, "--sharding", sharding)
    table = content["tables"]["a"]
    assert (table["sharding"], sorted(set(table["ranks"]))) == (sharding, ranks)
    assert content["hbm_per_gpu"] == sum(table["hbm"]) / len(ranks)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_planner_chooses_among_sharding_types(capsys):
    """A table that is too large for one GPU is split over both."""
    arguments = ["plan", "--table", "a:1B:32", "--gpus", "2", "--optimizer", "sgd"]
    arguments += ["--sharding", "table_wise", "--sharding", "row_wise"]
    content = answer(capsys, *arguments)
    assert content["tables"]["a"]["sharding"] == "row_wise"
    assert not answer(capsys, *arguments[:-2])["fits"]


def test_memory_of_each_gpu(capsys):
    content = answer(capsys, *BILLION, "--gpus", "8")
    table = content["tables"]["user"]
    assert len(content["memory"]) == 8
    for rank, memory in enumerate(content["memory"]):
        hbm = memory["hbm"]
        assert hbm["tables"] == table["hbm"][rank]
        assert hbm["tables"] < hbm["used"] < hbm["budget"] < 139 << 30
        assert hbm["free"] == hbm["budget"] - hbm["used"]
    assert "memory" not in answer(capsys, *BILLION)


@pytest.mark.slow
def test_no_gpus_of_this_size_are_enough(capsys):
    content = answer(capsys, "plan", "--table", "a:1B:64", "--hbm", "1MiB")
    assert content["fits_on_gpus"] is None


def test_text(capsys, caplog):
    assert main([*BILLION, "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "125,000,000 x8" in text
    assert text.rstrip().endswith("It fits.")
    assert "Times are not calibrated" in text
    assert "budget" in text
    assert main(BILLION) == 1
    assert "8 of these GPUs are enough." in capsys.readouterr().out
    assert not [record for record in caplog.records if record.name.startswith("torchrec.")]
