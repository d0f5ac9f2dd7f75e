"""DLRM on Criteo's files, and DeepFM, run as a user does."""

import json

import pytest

from tests.support.example_runs import (
    criteo_lines,
    refusal,
    run_example,
    shared_file,
    write_ratings,
)


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    path.write_text("\n".join(criteo_lines()) + "\n")
    return path


def trained(script, path, tmp_path, *arguments, processes=None, device="cpu"):
    figures = tmp_path / "figures.json"
    done = run_example(
        script,
        *("--data", path, "--json", figures, "--batch-size", 32, *arguments),
        processes=processes,
        device=device,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(figures.read_text())["runs"]["hkv"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_dlrm_learns_from_criteos_text(processes, criteo, tmp_path):
    output, run = trained("train_dlrm.py", criteo, tmp_path, "--epochs", 8, processes=processes)
    assert run["test_auc"] > 0.75
    assert run["counters"]["lookups"] > 0
    assert f"test AUC {run['test_auc']:.4f}" in output
    assert "hit rate" in output


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_evaluations_in_between_change_nothing(processes, criteo, tmp_path):
    _, alone = trained("train_dlrm.py", criteo, tmp_path, processes=processes)
    output, run = trained(
        "train_dlrm.py", criteo, tmp_path, "--evaluate-every", 20, processes=processes
    )
    evaluations = run["evaluations"]
    assert [one["step"] for one in evaluations] == [20, 40, 50]
    assert alone["evaluations"] == []
    assert run["test_auc"] == alone["test_auc"]
    assert run["train_loss"] == alone["train_loss"]
    assert run["counters"] == alone["counters"]
    # TorchRec's AUC depends on the order of equal predictions.
    assert evaluations[-1]["auc"] == pytest.approx(run["test_auc"], abs=5e-4)
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert f"after 50 steps: test loss {evaluations[-1]['loss']:.4f}" in output


@pytest.mark.slow
def test_deepfm_learns(tmp_path, device_type):
    ratings = write_ratings(tmp_path / "ratings.dat")
    output, run = trained("train_deepfm.py", ratings, tmp_path, "--epochs", 8, device=device_type)
    assert run["test_auc"] > 0.7
    assert f"test AUC {run['test_auc']:.4f}" in output


@pytest.mark.slow
def test_small_tables_evict(tmp_path):
    ratings = write_ratings(tmp_path / "ratings.dat")
    _, run = trained("train_deepfm.py", ratings, tmp_path, "--rows", 0.25)
    assert run["counters"]["evicted"] > 0


@pytest.mark.slow
def test_real_clicks(tmp_path):
    path = shared_file("criteo_clicks_60k.npz")
    _, run = trained("train_dlrm.py", path, tmp_path, "--limit", 4000)
    assert run["counters"]["size"] > 1000


@pytest.mark.slow
def test_bad_input_gets_one_sentence(tmp_path, criteo):
    assert "There is no data file" in refusal("train_dlrm.py", "--data", tmp_path / "none.txt")
    assert "required: --data" in refusal("train_dlrm.py")
    refused = refusal("train_dlrm.py", "--data", criteo, "--evaluate-every", "0")
    assert "--evaluate-every: '0' is not a positive number" in refused
    assert "--rows: 0.0 is not above 0" in refusal("train_dlrm.py", "--data", criteo, "--rows", "0")
