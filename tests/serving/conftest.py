"""One exported model for all tests that only serve it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import exported

_MADE: list[tuple[Path, list[Any]]] = []


@pytest.fixture
def device_type() -> str:
    """Tests of a GPU have another."""
    return "cpu"


@pytest.fixture
def served(
    run_ranks: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> tuple[Path, list[Any]]:
    """A copy of a model that was exported once, and what the trainer's evaluation gave."""
    if not _MADE:
        folder = tmp_path_factory.mktemp("served") / "model"
        _MADE.append((folder, run_ranks(1, exported, folder)[0]))
    folder, want = _MADE[0]
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path / "model", want
