"""An error names a missing package in one sentence, also under torchrun; rich is optional."""

import os
import subprocess
import sys

import pytest

from tests.support.example_runs import ROOT, write_ratings
from tests.support.processes import run_python


def without(package, folder):
    """An environment in which a package can't be imported."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(package, folder, *arguments):
    """Runs an example in a new interpreter."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=without(package, folder),
        capture_output=True,
        text=True,
        timeout=280,
    )


def run_example(package, name, *arguments):
    """Like :func:`run`, but faster."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [example(name), *map(str, arguments)]
    return run_python(command, environment, missing=[package])


def example(name):
    return str(ROOT / "examples" / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "option", "name", "processes"),
    [
        ("tensorboard", "--tensorboard", "train_online.py", None),
        ("tensorboard", "--tensorboard", "train_movielens.py", 2),
        ("matplotlib", "--plot", "train_movielens.py", None),
    ],
)
def test_a_sentence_is_the_last_that_is_said(package, option, name, processes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    data = write_ratings(tmp_path / "ratings.dat")
    arguments = ("--device", "cpu", "--data", data, option, tmp_path / "board.png")
    if processes:
        done = run(package, tmp_path, *launcher, example(name), *arguments)
    else:
        done = run_example(package, name, *arguments)
    needed = f"needs the package {package}, which can't be imported ("
    way = f"): pip install {package}."
    own = (line for line in done.stderr.splitlines() if "torch/distributed/elastic" not in line)
    lines = [line for line in own if set(line) - set("=")]
    assert done.returncode == (1 if processes else 2)
    assert lines[0].startswith("error: ")
    assert needed in lines[0]
    assert lines[0].endswith(way)
    # The example prints it once; under torchrun, so does torchrun's final summary.
    assert sum(needed in line for line in lines) == (2 if processes else 1)
    assert lines[-1].endswith(lines[0])
    # The example prints no traceback; torchrun prints its own for any failure.
    assert f'{name}", line' not in done.stderr
    assert processes or "Traceback" not in done.stderr


@pytest.mark.slow
def test_tables_are_printed_without_rich(tmp_path):
    done = run_example(
        "rich",
        "train_movielens.py",
        *("--device", "cpu", "--data", write_ratings(tmp_path / "ratings.dat")),
        *("--limit", 1000, "--runs", "hkv", "--epochs", 1),
    )
    assert done.returncode == 0, done.stderr
    assert "test AUC" in done.stdout
    assert "hkv, room for every id" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["-m", "torchrec_hkv", "env"], ["-c", "from torchrec_hkv import get_default_sharders"]],
)
def test_torchrec_itself(command, tmp_path):
    done = run("torchrec", tmp_path, *command)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: torchrec_hkv needs TorchRec and FBGEMM, and there is no module "
        "'torchrec': install torchrec with fbgemm-gpu or fbgemm-gpu-cpu in the versions that "
        "docs/guide/install.md lists for this torch. Only torchrec_hkv.serving loads models "
        "without them."
    )
    assert "No module named" not in done.stderr
