"""One exported model for all tests that only serve it, and a small disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_models import exported

_MADE: list[tuple[Path, list[Any]]] = []


@pytest.fixture
def device_type() -> str:
    """Tests of a GPU override it."""
    return "cpu"


@pytest.fixture
def served(
    run_ranks: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> tuple[Path, list[Any]]:
    """A copy of a model that was exported once, and the outputs of the trainer's evaluation."""
    if not _MADE:
        folder = tmp_path_factory.mktemp("served") / "model"
        _MADE.append((folder, run_ranks(1, exported, folder)[0]))
    folder, want = _MADE[0]
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path / "model", want


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    (folder := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={4 << 20}", "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs the command mount")
    if done.returncode:
        pytest.skip(f"may not mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
