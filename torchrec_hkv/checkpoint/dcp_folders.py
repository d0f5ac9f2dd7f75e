"""Folders that :mod:`torch.distributed.checkpoint` wrote."""

from __future__ import annotations

from pathlib import Path

#: The file that describes all others of such a folder.
METADATA = ".metadata"


def is_dcp_folder(path: Path) -> bool:
    """Whether a folder looks like one."""
    return (path / METADATA).is_file()
