"""A saved table and later changes of it, read as one.

Layers are folders of one table, the newest first; the last one holds the whole table. An entry is
the table's unless a newer layer names its slot: as the slot of an entry, or as one whose id left.
Slots of all layers count alike, also where the table grew in between: an entry that growth moved is
named by the layer that was written next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.changes import read_left
from torchrec_hkv.hash_table.files.manifest import Manifest

# Pairs of slot and id that are read at a time.
_PAIRS = 1 << 16


def check_layers(layers: Sequence[tuple[Path, Manifest]]) -> None:
    """Refuses layers that do not end with a whole table, or are of several.

    Args:
        layers: folders and their manifests, the newest first.

    Raises:
        ValueError: the sentence names the folder.
    """
    folder, newest = layers[0]
    *later, (first_folder, first) = layers
    if first.changes is not None:
        raise ValueError(
            f"{first_folder} holds changes of a table only: load the folder that the chain of "
            "deltas is in."
        )
    for whole, manifest in later:
        if manifest.changes is None:
            raise ValueError(f"{whole} holds a whole table, to which {first_folder} adds nothing.")
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
    """Says which entries of layers are the table's; layers are asked for newest first.

    It takes one byte for each slot of the table.

    Args:
        layers: folders and their manifests, the newest first.
    """

    def __init__(self, layers: Sequence[tuple[Path, Manifest]]) -> None:
        self._layers = layers
        newest = layers[0][1]
        # A single layer is whole: nothing hides its entries.
        slots = newest.buckets * newest.bucket_slots if len(layers) > 1 else 0
        self._named = torch.zeros(slots, dtype=torch.bool)
        self._layer = 0

    def pick(self, layer: int, slots: Tensor) -> Tensor | None:
        """Which entries are the table's, bool ``[n]``; None: all.

        Args:
            layer: the entries' layer, not lower than in the call before.
            slots: the entries'; each is given once.
        """
        if len(self._layers) == 1:
            return None
        while self._layer < layer:
            folder, manifest = self._layers[self._layer]
            if manifest.changes is not None:
                for left, _ in read_left(folder, manifest.changes, _PAIRS):
                    self._named[left] = True
            self._layer += 1
        picked = ~self._named[slots]
        self._named[slots] = True
        return picked
