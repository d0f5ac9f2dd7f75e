"""The tested versions are those that the installation page lists."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "torchrec_versions.py"


def test_releases_are_those_of_the_page():
    page = (ROOT / "docs" / "guide" / "install.md").read_text()
    named = re.findall(r"^\| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|$", page, re.M)
    releases = runpy.run_path(str(TOOL))["RELEASES"]
    assert named == [
        tuple(version.rpartition(".")[0] for version in (one.torch, one.torchrec, one.fbgemm))
        for one in releases.values()
    ]
    assert [one.torchrec.rpartition(".")[0] for one in releases.values()] == list(releases)


def test_another_version_is_refused():
    done = subprocess.run(
        [sys.executable, TOOL, "2.0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "TorchRec 2.0 is not supported: 1.6, 1.7, 1.8, 1.9 are." in done.stderr


def test_older_torches_get_older_setuptools():
    packages = runpy.run_path(str(TOOL))["packages"]()
    assert any(line.startswith("pytest==") for line in packages)
    assert not any(line.startswith("setuptools") for line in packages)
