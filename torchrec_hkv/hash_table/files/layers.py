"""A saved table and later changes of it (layers), read as one table.

Layers are folders of one table, the newest first; the last one holds the whole table. An entry is
valid unless a newer layer lists its slot, as the slot of an entry or as one whose id left. Slot
numbers are the same in all layers, even if the table grew in between: the layer written after a
growth lists the entries that moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.changes import read_removed_ids
from torchrec_hkv.hash_table.files.manifest import Manifest

# Number of pairs of slot and id that are read at a time.
_PAIRS = 1 << 16


def check_layers(layers: Sequence[tuple[Path, Manifest]]) -> None:
    """Checks that layers belong to one table and end with a whole one.

    Args:
        layers: folders and their manifests, the newest first.

    Raises:
        ValueError: the layers do not; the message names the folder.
    """
    folder, newest = layers[0]
    *later, (first_folder, first) = layers
    if first.changes is not None:
        raise ValueError(
            f"{first_folder} holds only changes of a table: load the folder of its chain of "
            "deltas instead."
        )
    for base, manifest in later:
        if manifest.changes is None:
            raise ValueError(f"{base} holds a whole table, so {first_folder} must not follow it.")
    for other, manifest in layers[1:]:
        for what in ("table", "state_layout", "bucket_slots", "reduced"):
            if getattr(manifest, what) != getattr(newest, what):
                raise ValueError(
                    f"{folder} holds changes of another table than {other}: their {what} differ."
                )
        if manifest.buckets > newest.buckets:
            raise ValueError(
                f"{folder} holds changes of another table than {other}, which has "
                f"{manifest.buckets} buckets instead of at most {newest.buckets}."
            )


class SlotFilter:
    """Determines which entries of layers are valid. Layers must be processed from the newest on.

    It takes one byte per slot of the table.

    Args:
        layers: folders and their manifests, the newest first.
    """

    def __init__(self, layers: Sequence[tuple[Path, Manifest]]) -> None:
        self._layers = layers
        newest = layers[0][1]
        # All entries of a single layer are valid.
        slots = newest.buckets * newest.bucket_slots if len(layers) > 1 else 0
        self._named = torch.zeros(slots, dtype=torch.bool)
        self._layer = 0

    def pick(self, layer: int, slots: Tensor) -> Tensor | None:
        """Which entries are valid, bool ``[n]``; None if all are.

        Args:
            layer: index of the entries' layer; must not decrease between calls.
            slots: slots of the entries. Pass each slot of a layer once.
        """
        if len(self._layers) == 1:
            return None
        while self._layer < layer:
            folder, manifest = self._layers[self._layer]
            if manifest.changes is not None:
                for removed_slots, _ in read_removed_ids(folder, manifest.changes, _PAIRS):
                    self._named[removed_slots] = True
            self._layer += 1
        picked = ~self._named[slots]
        self._named[slots] = True
        return picked
