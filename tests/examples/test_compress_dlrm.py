"""Compression of a trained DLRM's tables, run as a user does."""

import json
import re

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


@pytest.fixture(scope="module")
def whole(ratings, tmp_path_factory):
    """Output and stages of a whole run, and the options that let other runs begin with its saved
    dense model."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = ("--rank", 4, "--tune-steps", 150, "--save", folder / "saved")
    return *compressed(ratings, folder, *arguments), ("--resume", folder / "saved")


def check_stages(output, stages):
    dense, cut, tuned = stages
    assert dense["table_bytes"] > cut["table_bytes"] == tuned["table_bytes"]
    assert cut["ratio"] == pytest.approx(dense["table_bytes"] / cut["table_bytes"])
    assert 0 < cut["error"] < 1
    assert dense["auc"] > 0.7
    for stage in stages:
        assert f"{stage['auc']:.4f}" in output
    assert "Tensor-Train tables: " in output  # the progress line


@pytest.mark.slow
def test_tables_are_compressed_by_rank_and_trained_on(whole):
    output, stages, _ = whole
    check_stages(output, stages)
    assert stages[2]["auc"] > stages[1]["auc"]  # compression lost much


@pytest.mark.slow
def test_two_processes(whole, ratings, tmp_path):
    """Two processes compress and tune; they also train two more epochs."""
    arguments = ("--rank", 4, "--tune-steps", 150, "--epochs", 8, *whole[2])
    output, stages = compressed(ratings, tmp_path, *arguments, processes=2)
    check_stages(output, stages)
    assert stages[2]["auc"] > stages[1]["auc"]


@pytest.mark.slow
def test_tables_are_compressed_to_an_error(whole, ratings, tmp_path, device_type):
    arguments = ("--error", 0.05, "--tune-steps", 1, *whole[2])
    _, stages = compressed(ratings, tmp_path, *arguments, device=device_type)
    dense, cut, _ = stages
    assert cut["error"] <= 0.05
    # Compression loses so little that predictions hardly change.
    assert cut["auc"] == pytest.approx(dense["auc"], abs=0.005)


@pytest.mark.slow
def test_help():
    done = run_example("compress_dlrm.py", "--help")
    assert done.returncode == 0
    assert "--tune-steps" in done.stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_log_without_large_columns(tmp_path):
    lines = ["\t".join(["1", *["3"] * 13, *["0000000a"] * 26])] * 50
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    message = refusal("compress_dlrm.py", "--data", path, "--batch-size", 8)
    assert "no column of many ids" in message


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 7])
def test_the_state_of_the_highest_validation_auc_is_kept(every, whole, ratings, tmp_path):
    """A learning rate that ruins the tables does not make the model worse."""
    output, stages = compressed(
        ratings,
        tmp_path,
        *("--rank", 4, "--tune-steps", 40, "--tune-rate", 1, "--tune-dense-rate", 1),
        *("--validate-every", every, "--validation-share", 0.2, *whole[2]),
    )
    kept = re.search(
        r"kept the state after (\d+) of (\d+) steps: validation AUC (\S+) before, (\S+) then",
        output,
    )
    step, steps = int(kept[1]), int(kept[2])
    assert step % every == 0 or step == 40
    assert steps <= 40
    # Training ends after four validations without a higher AUC.
    assert steps == min(step + 4 * every, 40)
    assert float(kept[4]) >= float(kept[3])
    if step == 0:
        assert stages[2]["auc"] == stages[1]["auc"]


@pytest.mark.slow
def test_without_validation_rows_the_last_state_is_kept(whole, ratings, tmp_path):
    ruin = ("--rank", 4, "--tune-steps", 40, "--tune-rate", 1, "--tune-dense-rate", 1)
    arguments = (*ruin, "--validation-share", 0, *whole[2])
    output, stages = compressed(ratings, tmp_path, *arguments)
    assert "kept the state" not in output
    assert stages[2]["auc"] != stages[1]["auc"]


@pytest.mark.slow
def test_validation_rows_that_leave_less_than_a_batch(ratings):
    message = refusal("compress_dlrm.py", "--data", ratings, "--validation-share", 1)
    assert "--validation-share 1.0 leaves 0 rows to train on, but a batch has 256" in message
