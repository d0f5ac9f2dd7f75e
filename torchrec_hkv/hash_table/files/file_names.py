"""Names of the files of a saved table."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"


SHARD_NAME = re.compile(r"shard-[0-9a-f]{8}-[0-9]{5,}\.safetensors(\.zst)?")


COUNTS_NAME = re.compile(r"counts-[0-9a-f]{8}\.bin")


REMOVED_IDS_NAME = re.compile(r"left-[0-9a-f]{8}\.bin")


UNFINISHED = f".{MANIFEST}.saving"


def shard_name(save: str, index: int) -> str:
    """File name of a shard; ``save`` is 8 hexadecimal digits that are unique for the save."""
    return f"shard-{save}-{index:05d}.safetensors"


def counts_name(save: str) -> str:
    """File name of the admission counters; ``save`` as for :func:`shard_name`."""
    return f"counts-{save}.bin"


def removed_ids_name(save: str) -> str:
    """File name of the ids that left; ``save`` as for :func:`shard_name`."""
    return f"left-{save}.bin"


def is_of_table(name: str) -> bool:
    """Whether a file of this name, other than a manifest, belongs to a saved table."""
    return any(kind.fullmatch(name) for kind in (SHARD_NAME, COUNTS_NAME, REMOVED_IDS_NAME))
