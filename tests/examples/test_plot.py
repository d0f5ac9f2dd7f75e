"""``--plot`` plots an example's measurements."""

import importlib.util
import re
from types import SimpleNamespace

import pytest
from plot import write_auc_plot

from tests.support.example_runs import refusal, run_example, write_ratings


def results(count):
    return [
        SimpleNamespace(
            variant=SimpleNamespace(title=f"run {number}"),
            auc=0.6 + 0.05 * number,
            progress=[SimpleNamespace(step=8 * i, loss=0.5, auc=0.5 + 0.01 * i) for i in range(9)],
        )
        for number in range(count)
    ]


@pytest.mark.slow
def test_the_demo_draws_or_the_package_is_asked_for(tmp_path):
    arguments = ["--data", write_ratings(tmp_path / "ratings.dat"), "--limit", 1000]
    arguments += ["--runs", "hkv", "--epochs", 1, "--plot", tmp_path / "auc.png"]
    if importlib.util.find_spec("matplotlib") is None:
        message = refusal("train_movielens.py", *arguments)
        assert message.startswith("error: --plot needs the package matplotlib")
        return
    done = run_example("train_movielens.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "auc.png").read_bytes().startswith(b"\x89PNG")
    assert f"Written: {tmp_path / 'auc.png'}" in done.stdout


OTHERS = {
    "train_deepfm.py": ("--batch-size", 64),
    "train_two_tower.py": ("--batch-size", 64, "--epochs", 1),
    "train_online.py": ("--batch-size", 64, "--days", 4),
    "train_sequence.py": ("--batch-size", 16, "--epochs", 1, "--length", 8),
    "compress_dlrm.py": ("--batch-size", 64, "--rank", 4, "--tune-steps", 5),
}


def _texts(path):
    """Texts of a plot; matplotlib draws glyphs and gives their text in comments."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_examples(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    ratings = write_ratings(tmp_path / "ratings.dat", rows=2000)
    done = run_example(name, "--data", ratings, *OTHERS[name], "--plot", path)
    assert done.returncode == 0, done.stderr
    assert f"Written: {path}" in done.stdout
    labels = {
        "train_deepfm.py": {"test AUC", "hash tables"},
        "train_two_tower.py": {"recall@50", "most liked"},
        "train_online.py": {"AUC before training on it", "ids held"},
        "train_sequence.py": {"recall@10", "stock, every item known"},
        "compress_dlrm.py": {"test AUC", "MiB of tables", "Tensor-Train"},
    }[name]
    assert labels <= set(_texts(path))


@pytest.mark.slow
def test_billion_ids(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    done = run_example("billion_ids.py", "--ids", 50_000, "--batch-size", 1000, "--plot", path)
    assert done.returncode == 0, done.stderr
    assert {"million ids a second", "stated", "taken"} <= set(_texts(path))


@pytest.mark.parametrize("count", [1, 4])
def test_equal_results_give_equal_pictures(count, tmp_path):
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("one.svg", "two.svg"):
        write_auc_plot(tmp_path / name, "a title", results(count))
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    # matplotlib draws glyphs and gives their text in comments.
    assert f"run {count - 1}" in texts[0]
    assert "test AUC" in texts[0]
    assert f"run {count}" not in texts[0]
