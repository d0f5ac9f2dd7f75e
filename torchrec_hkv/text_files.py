"""Text files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a file, so that a reader sees the old text or the new one.

    A symbolic link stays, and the file that it names is replaced.

    Args:
        path: of the file, in a folder that exists.
        text: as it is written, line ends too.

    Raises:
        OSError: writing failed; the old file is as it was.
    """
    path = path.resolve() if path.is_symlink() else path
    # A new file of a name that nobody knows before: it can't be a link to something else.
    written = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(written, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
