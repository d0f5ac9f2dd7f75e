"""Default limits of the saves and loads of a table, and the check of given ones."""

from __future__ import annotations

#: Default memory limit of a save or a load, on the host and on a GPU each.
BATCH_BYTES = 64 << 20


def check_positive(**sizes: int) -> None:
    """Raises a ValueError that names the first size below 1."""
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"{what} is {size}, but must be at least 1.")
