"""Our processes end without threads of gloo.

A gloo thread that frees a tensor while the interpreter shuts down aborts the process. The test
checks that no such thread is left, so its result doesn't depend on timing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.example_runs import ROOT, criteo_lines, write_ratings
from tests.support.processes import run_python

# Runs as the last thing before the interpreter ends, while modules still exist.
RUN = """
import atexit, os, runpy, sys
from pathlib import Path

def tell():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print("LEFT", sorted(name for name in names if "gloo" in name), flush=True)

sys.path.insert(0, str(Path(sys.argv[1]).parent))
sys.argv = sys.argv[1:]
atexit.register(tell)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

CALIBRATE = """
import sys
from tests.support.toy_backend import ToyBackend, ToyOptions
from torchrec_hkv import register_backend
from torchrec_hkv.backends import OptimizerSpec
from torchrec_hkv.backends.calibration import CalibrationBatch, CalibrationCase
from torchrec_hkv.cli import main

class Timed(ToyBackend):
    name = "timed"

    def calibration_cases(self, device_type):
        shapes = ((8, 1), (64, 1), (256, 1), (64, 4), (64, 4, 4.0))
        batches = tuple(CalibrationBatch(*shape) for shape in shapes)
        sizes = {"rows": 300, "capacity": 400, "dim": 4, "batches": batches, "size": 1e4}
        return [
            CalibrationCase(ToyOptions(), optimizer=OptimizerSpec("sgd"), tables=tables, **sizes)
            for tables in (1, 3)
        ]

register_backend(Timed())
sys.exit(main(["calibrate", "--device", "cpu", "--kernel", "timed", "--out", sys.argv[1]]))
"""

BY_HAND = """
import gc
import torch
import torch.distributed as dist
from tests.support.small_models import batch, make_small

def train():
    model = make_small(1, torch.device("cpu"), "hkv")
    model(batch(0, torch.device("cpu"), 0)).sum().backward()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train()
gc.collect()
dist.destroy_process_group()
"""


@pytest.fixture
def run_script(tmp_path):
    """A script that runs another, and then reports the gloo threads that are left."""
    path = tmp_path / "run_script.py"
    path.write_text(RUN)
    return path


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def left(run_script: Path, script: Path, *arguments: object) -> str:
    """The gloo threads that a script leaves at its end."""
    command = [str(run_script), str(script), *map(str, arguments)]
    return told(run_python(command, environment(), folder=ROOT))


def told(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LEFT")]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train_movielens.py", ["--batch-size", 200, "--epochs", 1, "--runs", "hkv"]),
        ("train_online.py", ["--batch-size", 64, "--days", 14]),
        ("train_sequence.py", ["--batch-size", 20, "--epochs", 1, "--runs", "hkv"]),
    ],
)
def test_examples(run_script, tmp_path, script, arguments):
    ratings = write_ratings(tmp_path / "ratings.dat", rows=1000)
    script = ROOT / "examples" / script
    arguments = ("--device", "cpu", "--data", ratings, *arguments)
    assert left(run_script, script, *arguments) == "LEFT []"


@pytest.mark.slow
def test_an_example_on_clicks(run_script, tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join(criteo_lines()) + "\n")
    arguments = ("--device", "cpu", "--data", path, "--batch-size", 32, "--epochs", 1)
    assert left(run_script, ROOT / "examples" / "train_dlrm.py", *arguments) == "LEFT []"


@pytest.mark.slow
def test_a_benchmark(run_script):
    sizes = ("--tables", 2, "--rows", 200, "--dim", 4, "--batch", 8, "--bag", 2)
    counts = ("--steps", 1, "--rounds", 1, "--warm-up", 1, "--device", "cpu")
    script = ROOT / "benchmarks" / "sharded_step.py"
    assert left(run_script, script, *sizes, *counts) == "LEFT []"


@pytest.mark.slow
def test_the_command(run_script, tmp_path):
    script = tmp_path / "calibrate.py"
    script.write_text(CALIBRATE)
    assert left(run_script, script, tmp_path / "calibration.json") == "LEFT []"


@pytest.mark.slow
def test_as_the_documentation_says_it(run_script, tmp_path):
    """Runs in a new interpreter, so that modules are imported in the script's order."""
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(run_script), str(script)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert told(done) == "LEFT []"
