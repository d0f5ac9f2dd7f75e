"""Checks that the values of a manifest are consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrec_hkv import _C
from torchrec_hkv.hash_table.files.manifest_parts import CountsFile, DeltaContent, ShardFile
from torchrec_hkv.hash_table.files.state_columns import OWN_STEPS
from torchrec_hkv.hash_table.initializers import initializer_from_fields
from torchrec_hkv.json_schema import JsonPlace

if TYPE_CHECKING:
    from torchrec_hkv.hash_table.files.manifest import Manifest


def check_manifest(manifest: Manifest, place: JsonPlace) -> None:
    """Checks that the values of a manifest are consistent.

    Raises:
        ValueError: a value is inconsistent; the message names the file, the key, the value and what
            is allowed.
    """
    _check_table(manifest, place)
    _check_geometry(manifest, place)
    entries = sum(shard.entries for shard in manifest.shards)
    if manifest.entries != entries:
        raise place.of("entries").refuse(manifest.entries, f"what its shards hold, {entries}")
    slots = manifest.buckets * manifest.bucket_slots
    if manifest.entries > slots:
        raise place.of("entries").refuse(manifest.entries, f"at most the number of slots, {slots}")
    _check_shards(manifest.shards, place.of("shards"))
    if manifest.changes is not None:
        _check_changes(manifest.changes, entries, slots, place.of("changes"))
    if manifest.counts is not None:
        _check_counts(manifest.counts, place.of("counts"))


def _check_table(manifest: Manifest, place: JsonPlace) -> None:
    fields, layout = manifest.table, manifest.state_layout
    if fields["initializer"] is not None:
        try:
            initializer_from_fields(fields["initializer"])
        except ValueError as error:
            raise ValueError(f"{place.file}: table.initializer is impossible: {error}") from None
    kind, own_steps = _C.Optimizer(layout % OWN_STEPS), layout >= OWN_STEPS
    needed = _C.OptimizerConfig(kind=kind, own_steps=own_steps).state_width(fields["dim"])
    if fields["state_dim"] < needed:
        raise (
            place.of("table")
            .of("state_dim")
            .refuse(fields["state_dim"], f"at least the {needed} values of state_layout {layout}")
        )


def _check_geometry(manifest: Manifest, place: JsonPlace) -> None:
    capacity, initial = manifest.capacity, manifest.initial_capacity
    if initial is not None and initial > capacity:
        raise place.of("initial_capacity").refuse(initial, f"at most the capacity, {capacity}")
    # Rounding up adds less than one slot per bucket.
    slots = manifest.buckets * manifest.bucket_slots
    minimum = capacity if initial is None else initial
    if not minimum <= slots < capacity + manifest.buckets:
        raise place.of("buckets").refuse(
            manifest.buckets,
            f"as many as hold {minimum} to {capacity} rows in buckets of {manifest.bucket_slots}",
        )


def _check_shards(shards: Sequence[ShardFile], place: JsonPlace) -> None:
    names: set[str] = set()
    begin, end = 0, 0
    for index, shard in enumerate(shards):
        at = place.at(index)
        if shard.file in names:
            raise at.of("file").refuse(shard.file, "the name of no other shard")
        names.add(shard.file)
        owners = (shard.owner_begin, shard.owner_end)
        # An owner bucket that is too large for a shard is cut into several shards.
        if owners[0] < end and owners != (begin, end):
            raise at.of("owner_begin").refuse(owners[0], f"at least {end}, where the last one ends")
        if owners[0] >= owners[1]:
            raise at.of("owner_end").refuse(owners[1], f"more than owner_begin, {owners[0]}")
        begin, end = owners


def _check_counts(counts: CountsFile, place: JsonPlace) -> None:
    if (counts.kind == "cells") != (counts.cell_bits == 128):
        allowed = "128" if counts.kind == "cells" else "8 or 16"
        raise place.of("cell_bits").refuse(counts.cell_bits, f"{allowed} for {counts.kind}")
    unit_bytes = 128 if counts.kind == "cells" else 16
    if counts.bytes % unit_bytes:
        raise place.of("bytes").refuse(counts.bytes, f"a multiple of {unit_bytes}")


def _check_changes(changes: DeltaContent, entries: int, slots: int, place: JsonPlace) -> None:
    if not entries <= changes.entries <= slots:
        raise place.of("entries").refuse(
            changes.entries,
            f"from {entries}, which the shards hold, to the number of slots, {slots}",
        )
    if changes.left > slots:
        raise place.of("left").refuse(changes.left, f"at most the number of slots, {slots}")
