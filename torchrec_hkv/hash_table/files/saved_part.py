"""A shard of a saved table: its folder, its owner buckets, and the saves that it builds on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torchrec_hkv.hash_table.files.layers import check_layers
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.shard_files import Field, manifest_fields
from torchrec_hkv.hash_table.files.state_columns import ColumnRange


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """A shard of a saved table.

    Attributes:
        folder: the folder of the shard.
        owners: range ``[first, end)`` of owner buckets whose ids the shard held.
        manifest: manifest of the folder.
        earlier: if the folder holds only changes: folders and manifests of the earlier saves, the
            newest first. The last one holds the whole table.

    Raises:
        ValueError: the folders do not make up a table.
    """

    folder: Path
    owners: tuple[int, int]
    manifest: Manifest
    earlier: tuple[tuple[Path, Manifest], ...] = ()

    def __post_init__(self) -> None:
        check_layers(self.layers)

    @property
    def layers(self) -> list[tuple[Path, Manifest]]:
        """All folders with their manifests, the newest first."""
        return [(self.folder, self.manifest), *self.earlier]

    @property
    def columns(self) -> ColumnRange:
        """The columns of the shard."""
        begin = self.manifest.table["column_offset"]
        return ColumnRange(begin, begin + self.manifest.table["dim"])

    @property
    def fields(self) -> tuple[Field, ...]:
        """The tensors of the shard's files."""
        return manifest_fields(self.manifest)

    @property
    def has_no_optimizer(self) -> bool:
        """Whether the table was saved without an optimizer, for example a converted one."""
        return self.manifest.state_layout == 0 and self.manifest.table["state_dim"] == 0


def saved_rows(parts: Sequence[SavedPart]) -> int:
    """Number of rows of a saved table over all ranks."""
    first = min(part.columns.begin for part in parts)
    return sum(part.manifest.capacity for part in parts if part.columns.begin == first)
