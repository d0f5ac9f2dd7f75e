"""``--plot`` draws what the runs of the demo gave."""

import importlib.util
from types import SimpleNamespace

import pytest
from plot import write_plot

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


@pytest.mark.parametrize("count", [1, 4])
def test_equal_results_give_equal_pictures(count, tmp_path):
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("one.svg", "two.svg"):
        write_plot(tmp_path / name, "a title", results(count))
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    # Glyphs are drawn; matplotlib names them in comments.
    assert f"run {count - 1}" in texts[0]
    assert "test AUC" in texts[0]
    assert f"run {count}" not in texts[0]
