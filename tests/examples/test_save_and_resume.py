"""``--save`` and ``--resume``: a resumed run ends like an uninterrupted one."""

import json

import pytest

from tests.support.example_runs import refusal, run_example, write_ratings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    return write_ratings(tmp_path_factory.mktemp("ratings") / "ratings.dat", rows=2000)


def _figures(name, folder, *arguments, processes=None):
    """The figures that an example writes with ``--json``."""
    path = folder / "figures.json"
    done = run_example(name, *arguments, "--json", path, processes=processes)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def _test_auc(figures):
    return {key: run["test_auc"] for key, run in figures["runs"].items()}


def test_click_models(ratings, tmp_path):
    """Two processes save and one resumes; results round differently by number of processes."""
    run = ("train_movielens.py", tmp_path, "--data", ratings, "--batch-size", 64)
    run += ("--runs", "stock", "hkv")
    _figures(*run, "--epochs", 1, "--save", tmp_path / "saved", processes=2)
    resumed = _figures(*run, "--epochs", 2, "--resume", tmp_path / "saved")
    whole = _figures(*run, "--epochs", 2)
    assert _test_auc(resumed) == pytest.approx(_test_auc(whole), abs=1e-3)
    steps = [len(figures["runs"]["hkv"]["progress"]) for figures in (resumed, whole)]
    assert steps[0] < steps[1]


def test_evaluations_in_between(ratings, tmp_path):
    run = ("train_deepfm.py", tmp_path, "--data", ratings, "--batch-size", 64)
    run += ("--evaluate-every", 10)
    _figures(*run, "--epochs", 1, "--save", tmp_path / "saved")
    resumed = _figures(*run, "--epochs", 2, "--resume", tmp_path / "saved")
    assert _test_auc(resumed) == pytest.approx(_test_auc(_figures(*run, "--epochs", 2)), abs=1e-6)


def test_two_towers(ratings, tmp_path):
    run = ("train_two_tower.py", tmp_path, "--data", ratings, "--batch-size", 64, "-k", 10)
    _figures(*run, "--epochs", 1, "--save", tmp_path / "saved")
    resumed = _figures(*run, "--epochs", 3, "--resume", tmp_path / "saved")
    assert resumed["recall"] == pytest.approx(_figures(*run, "--epochs", 3)["recall"], abs=1e-6)


def test_the_dense_model_that_is_compressed(ratings, tmp_path):
    run = ("compress_dlrm.py", tmp_path, "--data", ratings, "--batch-size", 64)
    run += ("--rank", 4, "--tune-steps", 10, "--epochs", 2)
    saved = _figures(*run, "--save", tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["dense", "tt"]
    resumed = _figures(*run, "--resume", tmp_path / "saved")
    for one, other in zip(saved["stages"], resumed["stages"], strict=True):
        assert other["auc"] == pytest.approx(one["auc"], abs=1e-6)


def test_known_sequences(ratings, tmp_path):
    run = ("train_sequence.py", tmp_path, "--data", ratings, "--batch-size", 16)
    run += ("--length", 8)
    saved = _figures(*run, "--epochs", 1, "--save", tmp_path / "saved")
    resumed = _figures(*run, "--epochs", 2, "--resume", tmp_path / "saved")
    for key, (score,) in saved["runs"].items():
        (other,) = resumed["runs"][key]
        assert other["predictions"] == score["predictions"]
        assert len(other["progress"]) == 1


def test_sequences_in_time_continue_with_later_rows(ratings, tmp_path):
    run = ("train_sequence.py", tmp_path, "--data", ratings, "--batch-size", 50)
    run += ("--runs", "hkv", "--order", "time", "--length", 8)
    _figures(*run, "--limit", 1000, "--save", tmp_path / "saved")
    (resumed,) = _figures(*run, "--resume", tmp_path / "saved")["runs"]["hkv"]
    (whole,) = _figures(*run)["runs"]["hkv"]
    assert resumed["items"] == whole["items"]
    assert min(step for step, _ in resumed["progress"]) > 20 * 0.5


@pytest.mark.parametrize("processes", [None, 2])
def test_a_table_of_many_ids(tmp_path, processes):
    run = ("billion_ids.py", tmp_path, "--batch-size", 4096, "--optimizer", "adagrad")
    saved = ("--save", tmp_path / "saved")
    _figures(*run, "--ids", 20_000, *saved, processes=processes)
    resume = ("--resume", tmp_path / "saved")
    figures = _figures(*run, "--ids", 50_000, *resume, processes=processes)
    assert figures["failures"] == []
    if processes is None:
        assert "holds 20,000 ids: give --ids at least as many." in refusal(
            "billion_ids.py", *("--ids", 10_000, "--optimizer", "adagrad"), *resume
        )


def test_what_can_not_be_resumed(ratings, tmp_path):
    run = ("train_deepfm.py", "--data", ratings, "--batch-size", 64)
    assert "but there is no such folder." in refusal(*run, "--resume", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no checkpoint" in refusal(*run, "--resume", tmp_path / "empty")
    (tmp_path / "file").touch()
    assert "but that is not a folder." in refusal(*run, "--save", tmp_path / "file")
    assert "There is no folder" in refusal(*run, "--save", tmp_path / "no" / "folder")
    assert run_example(*run, "--save", tmp_path / "saved").returncode == 0
    message = refusal(*run, "--resume", tmp_path / "saved")
    assert "holds the state after 1 of 1 epochs: give --epochs more than 1." in message
