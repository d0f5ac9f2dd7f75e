"""Compression of a trained DLRM's tables, as a user runs it."""

import json

import pytest

from tests.support.example_runs import refusal, run_example, write_ratings


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ratings")
    return write_ratings(folder / "ratings.dat", users=240, movies=240)


def compressed(ratings, tmp_path, *arguments, processes=None, device="cpu"):
    figures = tmp_path / "figures.json"
    done = run_example(
        "compress_dlrm.py",
        *("--data", ratings, "--json", figures, "--batch-size", 32, "--epochs", 6, *arguments),
        processes=processes,
        device=device,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(figures.read_text())["stages"]


def check_stages(output, stages):
    dense, cut, tuned = stages
    assert dense["table_bytes"] > cut["table_bytes"] == tuned["table_bytes"]
    assert cut["ratio"] == pytest.approx(dense["table_bytes"] / cut["table_bytes"])
    assert 0 < cut["error"] < 1
    assert dense["auc"] > 0.7
    for stage in stages:
        assert f"{stage['auc']:.4f}" in output
    assert "Tensor-Train tables: " in output  # the line of progress


@pytest.mark.parametrize("processes", [None, 2])
def test_tables_are_compressed_by_rank_and_trained_on(processes, ratings, tmp_path):
    arguments = ("--rank", 4, "--tune-steps", 150)
    output, stages = compressed(ratings, tmp_path, *arguments, processes=processes)
    check_stages(output, stages)
    assert stages[2]["auc"] > stages[1]["auc"]  # much was cut away


def test_tables_are_compressed_to_an_error(ratings, tmp_path, device_type):
    _, stages = compressed(
        ratings, tmp_path, "--error", 0.05, "--tune-steps", 1, device=device_type
    )
    dense, cut, _ = stages
    assert cut["error"] <= 0.05
    # So little is cut away that predictions stay, which are those of all other parts of the model.
    assert cut["auc"] == pytest.approx(dense["auc"], abs=0.005)


def test_help():
    done = run_example("compress_dlrm.py", "--help")
    assert done.returncode == 0
    assert "--tune-steps" in done.stdout


def test_bad_input_gets_one_sentence(ratings, tmp_path):
    assert "There is no data file" in refusal("compress_dlrm.py", "--data", tmp_path / "none.dat")
    both = refusal("compress_dlrm.py", "--data", ratings, "--rank", 4, "--error", 0.5)
    assert "--error: not allowed with argument --rank" in both
    assert "'0' is not a positive number" in refusal(
        "compress_dlrm.py", "--data", ratings, "--rank", 0
    )
    assert "'2' is not a number above 0" in refusal(
        "compress_dlrm.py", "--data", ratings, "--error", 2
    )


def test_a_log_without_large_columns(tmp_path):
    lines = ["\t".join(["1", *["3"] * 13, *["0000000a"] * 26])] * 50
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    message = refusal("compress_dlrm.py", "--data", path, "--batch-size", 8)
    assert "no column of many ids" in message
