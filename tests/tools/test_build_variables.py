"""All environment variables of the build are documented, and changing one rebuilds."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "setup.py").read_text()
DOCUMENTED = re.findall(r"^    ([A-Z_]+):", ast.get_docstring(ast.parse(SETUP), False), re.M)


def test_a_change_of_any_rebuilds_the_extension():
    recorded = set(runpy.run_path(str(ROOT / "tools" / "setup_env.py"))["BUILD_VARIABLES"])
    assert set(DOCUMENTED) - {"MAX_JOBS"} <= recorded


def test_all_that_are_read_are_documented():
    code = SETUP.partition('"""\n\n')[2]
    read = set(re.findall(r'"(TORCHREC_HKV_[A-Z_]+)"', code))
    assert read <= set(DOCUMENTED) | {"TORCHREC_HKV_CUDA"}
    assert {"TORCHREC_HKV_DEBUG", "TORCHREC_HKV_RELEASE"} <= read
    assert "`TORCHREC_HKV_DEBUG=1`" in (ROOT / "CONTRIBUTING.md").read_text()
