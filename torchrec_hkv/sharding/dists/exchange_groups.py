"""Splits tables into groups for the exchange between ranks; each group has its own wire dtype.

TorchRec exchanges the rows of all tables of a sharding type at once. With several groups, the
exchange of a group overlaps with the lookup of the next group, and in the backward with its update.
Tables with different wire dtypes are in different groups. Groups of row-wise pooled tables become
parts of one sharding; other groups become shardings of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import QuantizedCommCodecs, ShardingType

from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding

Info = TypeVar("Info")
Codecs = dict[str, QuantizedCommCodecs]

WIRE_DTYPES: dict[str, CommType] = {
    "fp32": CommType.FP32,
    "fp16": CommType.FP16,
    "bf16": CommType.BF16,
    "fp8": CommType.FP8,
}
_BY_DTYPE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Sharding types that are never split: data-parallel tables exchange no rows.
_NEVER_SPLIT = (ShardingType.DATA_PARALLEL.value,)


@dataclasses.dataclass(frozen=True)
class ExchangePart:
    """Tables of a group whose rows are sent together.

    Attributes:
        tables: names of the tables.
        codecs: codecs of the exchange; None for those of the sharder.
    """

    tables: frozenset[str]
    codecs: Codecs | None


class ExchangeGroup(list[Any]):
    """The tables of one exchange, in the form of the lists that TorchRec's hooks pass on.

    Attributes:
        codecs: codecs of the exchange; None for those of the sharder.
        uses_backend_sharding: whether this package's shardings serve the group even if all of its
            tables are stock, because their sharding type may be in several groups or scores are
            sent.
        parts: the parts in which rows are exchanged
            (:mod:`torchrec_hkv.sharding.modules.multi_part_lookup`); empty for a single exchange.
    """

    codecs: Codecs | None = None
    uses_backend_sharding: bool = False
    parts: Sequence[ExchangePart] = ()

    @classmethod
    def for_backend_sharding(cls, infos: Sequence[Any]) -> ExchangeGroup:
        """Makes a group that this package's shardings serve."""
        group = infos if isinstance(infos, ExchangeGroup) else cls(infos)
        group.uses_backend_sharding = True
        return group


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange options of a sharder.

    Attributes:
        num_groups: number of groups for each sharding type; at most the number of its tables.
        wire_dtypes: ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"fp8"`` by table, for both directions.
            The key ``""`` is for all other tables; without it they use the sharder's codecs.
        is_checked: whether a collection must have all tables named in ``wire_dtypes``.

    Raises:
        ValueError: ``num_groups`` is below 1, or a dtype is unknown.
    """

    num_groups: int = 1
    wire_dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_checked: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.num_groups, int) or self.num_groups < 1:
            raise ValueError(
                f"num_groups is {self.num_groups!r}, but must be a whole number of at least 1."
            )
        for table, dtype in self.wire_dtypes.items():
            if dtype not in WIRE_DTYPES:
                of_table = f" of table {table!r}" if table else ""
                raise ValueError(
                    f"The wire dtype{of_table} is {dtype!r}, but must be one of "
                    f"{list(WIRE_DTYPES)}."
                )

    @property
    def is_plain(self) -> bool:
        """Whether TorchRec's exchange is used without changes."""
        return self.num_groups == 1 and not self.wire_dtypes

    def check_tables(self, tables: Sequence[str]) -> None:
        """Checks that a collection has all tables with wire dtypes.

        Raises:
            ValueError: the collection lacks some; the message names them.
        """
        unknown = sorted(set(self.wire_dtypes) - {""} - set(tables))
        if unknown and self.is_checked:
            raise ValueError(
                f"Tables {unknown} have wire dtypes, but the collection has {sorted(tables)}."
            )

    def split(
        self,
        by_type: Mapping[str, Sequence[Info]],
        names: Mapping[int, str],
        weights: Mapping[int, float],
        unsplit: Sequence[str] = (),
        multi_part: Sequence[str] = (),
    ) -> dict[str, ExchangeGroup]:
        """Splits the tables of each sharding type into groups.

        Args:
            by_type: TorchRec's infos by sharding type.
            names: name of each table, by the ``id`` of its info.
            weights: weight of each table for balancing, by the ``id`` of its info.
            unsplit: further sharding types that are not split.
            multi_part: sharding types that become one group with parts.

        Returns:
            The groups. The first group of a sharding type has its name as key, further ones
            ``"{type}/{number}"``.
        """
        found: dict[str, ExchangeGroup] = {}
        for sharding_type, infos in by_type.items():
            if sharding_type in (*_NEVER_SPLIT, *unsplit):
                found[sharding_type] = ExchangeGroup(infos)
                continue
            by_wire: dict[str | None, list[Info]] = {}
            for info in infos:
                by_wire.setdefault(self._wire(names[id(info)]), []).append(info)
            groups = [
                (part, None if wire is None else codecs_at(wire))
                for wire, tables in by_wire.items()
                for part in _parts(tables, self.num_groups, [weights[id(info)] for info in tables])
            ]
            if sharding_type in multi_part and len(groups) > 1:
                group = ExchangeGroup(itertools.chain.from_iterable(part for part, _ in groups))
                group.uses_backend_sharding = True
                group.parts = [
                    ExchangePart(frozenset(names[id(info)] for info in part), codecs)
                    for part, codecs in groups
                ]
                found[sharding_type] = group
                continue
            for number, (part, codecs) in enumerate(groups):
                group = ExchangeGroup(part)
                group.codecs, group.uses_backend_sharding = codecs, True
                found[f"{sharding_type}/{number}" if number else sharding_type] = group
        return found

    def _wire(self, table: str) -> str | None:
        return self.wire_dtypes.get(table, self.wire_dtypes.get(""))


def wire_dtypes(
    given: str | torch.dtype | Mapping[str, str | torch.dtype] | None,
) -> dict[str, str]:
    """Converts a ``wire_dtype`` argument to the form of :class:`Exchange`.

    Args:
        given: one wire dtype for all tables, or wire dtypes by table; names or torch's dtypes.

    Raises:
        ValueError: it is neither.
    """
    if given is None:
        return {}
    if isinstance(given, str | torch.dtype):
        given = {"": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"wire_dtype is {given!r}, but must be a wire dtype, a dictionary of them by table, or "
            "None."
        )
    return {
        table: _BY_DTYPE.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
        for table, dtype in given.items()
    }


def needs_backend_sharding(infos: Sequence[Any]) -> bool:
    """Whether this package's shardings must serve some tables, because a table is on a backend, or
    because tables are split into groups. With TorchRec's shardings, a rank without tables in a
    group would send float32, although the other ranks expect the dtype of the tables."""
    return (isinstance(infos, ExchangeGroup) and infos.uses_backend_sharding) or has_backend_tables(
        infos
    )


def has_backend_tables(infos: Sequence[Any]) -> bool:
    """Whether one of some tables is on a backend."""
    return any(isinstance(info.param_sharding, BackendParameterSharding) for info in infos)


def codecs_of(infos: Sequence[Any], default: Codecs | None) -> Codecs | None:
    """The codecs of a group of tables: its own, or those of the sharder."""
    codecs = infos.codecs if isinstance(infos, ExchangeGroup) else None
    return default if codecs is None else codecs


def codecs_at(wire: str) -> Codecs:
    """TorchRec's codecs for a wire dtype, for both directions."""
    precision = WIRE_DTYPES[wire]
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=precision, backward_precision=precision)
    )


def _parts(items: Sequence[Info], count: int, weights: Sequence[float]) -> list[list[Info]]:
    """Splits a sequence into at most ``count`` non-empty runs of about equal weight."""
    count = min(count, len(items))
    parts: list[list[Info]] = []
    position, part_weight = 0, 0.0
    for number in range(1, count + 1):
        target_weight, first = sum(weights) * number / count, position
        # Take at least one item, and leave at least one per later part.
        while position < len(items) - (count - number) and (
            position == first or part_weight + weights[position] / 2 <= target_weight
        ):
            part_weight += weights[position]
            position += 1
        parts.append(list(items[first:position]))
    return parts
