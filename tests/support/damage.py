"""Damaged copies of a file's bytes."""

from __future__ import annotations

from random import Random


def cut(data: bytes, random: Random) -> bytes:
    """Cuts off the end of a file that is not empty.

    More than the newline at the end of a JSON file is cut off, because the file is whole without
    it.
    """
    return data[: random.randrange(len(data.rstrip(b"\n")))]
