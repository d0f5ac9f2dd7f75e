"""docs/guide/moving_over.md: its code runs, and its diff applies."""

import os
import re
from pathlib import Path

import pytest

from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guide" / "moving_over.md").read_text()


def block(language):
    (code,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return code


def moved_over():
    """The code after the diff is applied. Each replaced piece must occur once."""
    code = block("python")
    for piece in re.split(r"^@@\n", block("diff"), flags=re.MULTILINE):
        lines = piece.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    return code


# This script's model holds the process group until the interpreter ends. A gloo thread that frees a
# tensor during shutdown then aborts the process (docs/guide/multi_gpu.md; torch 2.13, 4 of 42 runs
# of the original code on a busy machine). So the interpreter does not shut down.
END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["before", "after"])
def test_both_versions_run_on_two_processes(which, tmp_path):
    script = tmp_path / "training.py"
    script.write_text((block("python") if which == "before" else moved_over()) + END)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = run_python([str(script)], environment, processes=2)
    assert done.returncode == 0, done.stderr
    assert ("hkv" in done.stdout) == (which == "after")


def test_the_diff_is_a_few_lines():
    lines = block("diff").splitlines()
    assert sum(line[:1] == "+" for line in lines) <= 4
    assert sum(line[:1] == "-" for line in lines) <= 4
