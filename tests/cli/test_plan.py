"""``torchrec-hkv plan``: the planner's figures, for GPUs that are not here."""

import json

from torchrec_hkv.cli import main
from torchrec_hkv.hash_table import Adam, RowWiseAdagrad, gpu_table_bytes, table_memory

BILLION = ["plan", "--table", "user:1B:64", "--optimizer", "adam"]


def answer(capsys, *arguments):
    code = main([*arguments, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert code == (0 if content["fits"] else 1)
    return content


def memory(rows, dim, optimizer):
    return table_memory(rows, dim, optimizer.state_width(dim), "lru")


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
    """Two GPUs share it."""
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


def test_no_gpus_of_this_size_are_enough(capsys):
    content = answer(capsys, "plan", "--table", "a:1B:64", "--hbm", "1MiB")
    assert content["fits_on_gpus"] is None


def test_text(capsys, caplog):
    assert main([*BILLION, "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "125,000,000 x8" in text
    assert text.rstrip().endswith("It fits.")
    assert main(BILLION) == 1
    assert "8 of these GPUs are enough." in capsys.readouterr().out
    assert not [record for record in caplog.records if record.name.startswith("torchrec.")]
