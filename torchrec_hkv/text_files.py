"""Text files that are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically: a reader sees the old text or the new one.

    A symbolic link is kept, and its target is replaced.

    Args:
        path: path of the file, in an existing folder.
        text: text to write, including line ends.

    Raises:
        OSError: writing failed; the old file is unchanged.
    """
    path = path.resolve() if path.is_symlink() else path
    # A random name, so that it can't be an existing link.
    written = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(written, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
