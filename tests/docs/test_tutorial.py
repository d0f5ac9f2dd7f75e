"""The tutorial's blocks run in order, print what it shows and write its plots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import END_OF_RANK, environment_of
from tests.support.code_blocks import code_blocks, matches
from tests.support.processes import run_python

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "tutorial.md"
MARK = "-- end of block"


@pytest.mark.slow
def test_tutorial(tmp_path):
    blocks = code_blocks(PAGE)
    code = "".join(
        f"{block.code}\nprint({MARK!r})\n" for block in blocks if block.language == "python"
    )
    script = tmp_path / "tutorial.py"
    script.write_text(code + END_OF_RANK)
    done = run_python([str(script)], environment_of(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr

    printed = iter(done.stdout.split(f"{MARK}\n"))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            output = next(printed)
            shown = following.code if following and following.language == "text" else ""
            assert matches(output, shown), output
    plots = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text())
    assert plots
    for plot in plots:
        assert (tmp_path / plot).stat().st_size > 1000, plot
        assert (PAGE.parent / plot).exists()
