"""``--tensorboard`` of the examples."""

import importlib.util

import pytest

from tests.support.example_runs import refusal, run_example, write_ratings


@pytest.mark.slow
def test_files_are_written_or_the_package_is_asked_for(tmp_path):
    arguments = ["--data", write_ratings(tmp_path / "ratings.dat"), "--limit", 1000]
    arguments += ["--tensorboard", tmp_path / "board"]
    if importlib.util.find_spec("tensorboard") is None:
        message = refusal("train_deepfm.py", *arguments)
        assert message.startswith("error: TensorBoard needs the package tensorboard")
        return
    done = run_example("train_deepfm.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "board" / "hkv").iterdir())
