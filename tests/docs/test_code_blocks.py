"""Every fenced code block of the README and the docs runs unchanged, each in a new folder.

A comment above a block says how to run it:

- ``<!-- run: torchrun --nproc_per_node 2 -->``: the launcher of the block.
- ``<!-- run: torchrun --nproc_per_node 2, after sharded_model.py -->``: the same for a block that
  continues this file in this folder. The test ends the process group.
- ``<!-- needs: tensorboard -->``: the test skips where this package is missing.
- ``<!-- needs: no GPU -->``: the output shown is that of a machine without a GPU.
- ``<!-- not run: ... -->``: the block is not tested, with the reason.

Blocks of ``text`` are not run.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.code_blocks import DIRECTIVE, CodeBlock, code_blocks, console_commands, matches
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: Its blocks run one after the other, in ``test_tutorial.py``.
TUTORIAL = ROOT / "docs" / "guide" / "tutorial.md"
# Blocks of text show outputs and folders.
BLOCKS = [
    block
    for page in PAGES
    if page != TUTORIAL
    for block in code_blocks(page)
    if block.language != "text"
]
# A gloo thread that frees a tensor while the interpreter shuts down sometimes aborts the process,
# so the interpreter does not shut down.
END_OF_RANK = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


END_OF_GROUP = "\ndist.barrier()\ndist.destroy_process_group()\n"
HERE = Path(__file__).parent


def name(block: CodeBlock) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def environment_of(folder: Path) -> dict[str, str]:
    """Environment in which ``torchrec-hkv`` and ``python`` are those of this interpreter."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for tool, arguments in (("torchrec-hkv", "-m torchrec_hkv"), ("python", "")):
        (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (tools / tool).chmod(0o755)
    python_path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHREC_HKV_CALIBRATION": "",
    }


def run(command: list[str], folder: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command; ``folder`` is for helper programs."""
    environment = environment_of(folder)
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )


def run_script(block: CodeBlock, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a block of Python: the README's as a user does, others without the time to import
    TorchRec."""
    script = folder / "block.py"
    has_ranks = block.mark == "run"
    launch, _, before = block.value.partition(", after ")
    if block.page.name == "README.md":
        script.write_text(block.code + (END_OF_RANK if has_ranks else ""))
        launcher = ["-m", *launch.replace("torchrun", "torch.distributed.run").split()]
        options = [*launcher, "--standalone"] if has_ranks else []
        return run([sys.executable, *options, str(script)], folder, folder)
    given = (HERE / before).read_text() if before else ""
    script.write_text(given + block.code + (END_OF_GROUP if before else ""))
    ranks = int(launch.rpartition(" ")[2]) if has_ranks else None
    return run_python([str(script)], environment_of(folder), ranks, folder=folder)


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of a console. Our own command runs without the time to import TorchRec, unless
    it needs a shell or prints what is imported."""
    words = shlex.split(command)
    plain = not set(command) & set("|&;<>$`*?~#()\n")
    if words[0] == "torchrec-hkv" and words[1] != "env" and plain:
        return run_python(["-m", "torchrec_hkv", *words[1:]], environment_of(folder), folder=folder)
    return run(["bash", "-euc", command], folder, folder)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_block(block, tmp_path):
    if block.mark == "not run":
        pytest.skip(block.value)
    if block.value == "no GPU":
        if torch.cuda.is_available():
            pytest.skip("its output is that of a machine without a GPU")
    elif block.mark == "needs" and importlib.util.find_spec(block.value) is None:
        pytest.skip(f"needs the package {block.value}")
    if block.language == "python":
        done = run_script(block, tmp_path)
        assert done.returncode == 0, done.stderr
    elif block.language == "sh":
        done = run(["bash", "-euc", block.code], tmp_path, ROOT)
        assert done.returncode == 0, done.stderr
    else:
        assert block.language == "console", "blocks are python, sh, console or text, or are not run"
        commands = console_commands(block.code)
        assert commands
        for command, shown in commands:
            done = run_command(command, tmp_path)
            assert done.returncode == 0, done.stderr
            assert matches(done.stdout, shown), done.stdout


def test_all_fences_are_found():
    for page in PAGES:
        text = DIRECTIVE.sub("", page.read_text())
        fences = [line for line in text.splitlines() if line.startswith("```")]
        assert len(fences) == 2 * len(code_blocks(page)), page
    assert len({block.page for block in BLOCKS if block.language == "python"}) >= 8


@pytest.mark.parametrize(
    ("output", "shown", "same"),
    [
        ("a\nb  \n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\nb\nc\nd\n", "a\n...\nd\n", True),
        ("a\nd\n", "a\n...\nd\n", True),
        ("a\nb\n", "a\n...\nd\n", False),
        ("python 3.11\n", "python 3...\n", True),
        ("python 2.7\n", "python 3...\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_outputs_are_compared(output, shown, same):
    assert matches(output, shown) == same


def test_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n<!-- not run: no network -->\n```sh\npip\n```\n\n```python\n1\n```\n")
    first, second = code_blocks(page)
    assert (first.mark, first.value, first.language) == ("not run", "no network", "sh")
    assert (second.mark, second.line, second.code) == ("", 8, "1\n")
    page.write_text("<!-- skip: why -->\n```sh\npip\n```\n")
    with pytest.raises(ValueError, match=r"page.md:3: the mark is 'skip', but must be in"):
        code_blocks(page)
