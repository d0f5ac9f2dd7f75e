"""How tables are put together for exchanges between ranks: in groups, each at its wire dtype.

TorchRec exchanges the rows of all tables of one sharding type at once. In several groups, the
exchange of one goes on while the next is looked up, and in the backward the other way round. What
is sent at another precision is a group of its own. Groups of row-wise pooled tables are parts of
one sharding, others are shardings of their own.
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
#: What is never split: replicas exchange nothing, and TorchRec asks for sequences' column shards
#: by the name of their sharding type.
_WHOLE = (ShardingType.DATA_PARALLEL.value,)


@dataclasses.dataclass(frozen=True)
class Part:
    """Tables of a group whose rows travel together.

    Attributes:
        tables: their names.
        codecs: of the wire, None where the sharder's are meant.
    """

    tables: frozenset[str]
    codecs: Codecs | None


class ExchangeGroup(list[Any]):
    """The tables of one exchange, as TorchRec hands them from hook to hook.

    Attributes:
        codecs: of the wire, None where the sharder's are meant.
        is_part: whether shardings of ours serve it though all tables are stock: those of its
            sharding type may be in several groups, or scores are sent.
        parts: in which rows are exchanged (:mod:`torchrec_hkv.sharding.modules.parts`); one if
            there are none.
    """

    codecs: Codecs | None = None
    is_part: bool = False
    parts: Sequence[Part] = ()

    @classmethod
    def ours(cls, infos: Sequence[Any]) -> ExchangeGroup:
        """The same tables, to be served by shardings of ours."""
        group = infos if isinstance(infos, ExchangeGroup) else cls(infos)
        group.is_part = True
        return group


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a sharder was told of exchanges.

    Attributes:
        num_groups: of the tables of each sharding type; fewer where there are fewer tables.
        wire_dtypes: ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"fp8"`` by table, for both directions;
            the key ``""`` is that of all other tables. Without it these go as the sharder's codecs
            say.
        is_checked: whether a collection must have all tables that have wire dtypes.

    Raises:
        ValueError: a number of groups below 1, or an unknown dtype.
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
                of = f" of table {table!r}" if table else ""
                raise ValueError(
                    f"The wire dtype{of} is {dtype!r}, but must be one of {list(WIRE_DTYPES)}."
                )

    @property
    def is_plain(self) -> bool:
        """Whether all is left to TorchRec."""
        return self.num_groups == 1 and not self.wire_dtypes

    def check_tables(self, tables: Sequence[str]) -> None:
        """Refuses wire dtypes of tables that a collection has not.

        Raises:
            ValueError: naming them.
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
        whole: Sequence[str] = (),
        parted: Sequence[str] = (),
    ) -> dict[str, ExchangeGroup]:
        """The tables of each sharding type, in groups.

        Args:
            by_type: TorchRec's, by sharding type.
            names: of the tables, by the id of their infos.
            weights: that groups are balanced by, likewise.
            whole: further sharding types that are not split.
            parted: those of which there is one group, in parts.

        Returns:
            By sharding type, and further groups by ``"{type}/{number}"``.
        """
        found: dict[str, ExchangeGroup] = {}
        for sharding_type, infos in by_type.items():
            if sharding_type in (*_WHOLE, *whole):
                found[sharding_type] = ExchangeGroup(infos)
                continue
            by_wire: dict[str | None, list[Info]] = {}
            for info in infos:
                by_wire.setdefault(self._wire(names[id(info)]), []).append(info)
            groups = [
                (part, None if wire is None else codecs_at(wire))
                for wire, own in by_wire.items()
                for part in _parts(own, self.num_groups, [weights[id(info)] for info in own])
            ]
            if sharding_type in parted and len(groups) > 1:
                group = ExchangeGroup(itertools.chain.from_iterable(part for part, _ in groups))
                group.is_part = True
                group.parts = [
                    Part(frozenset(names[id(info)] for info in part), codecs)
                    for part, codecs in groups
                ]
                found[sharding_type] = group
                continue
            for number, (part, codecs) in enumerate(groups):
                group = ExchangeGroup(part)
                group.codecs, group.is_part = codecs, True
                found[f"{sharding_type}/{number}" if number else sharding_type] = group
        return found

    def _wire(self, table: str) -> str | None:
        return self.wire_dtypes.get(table, self.wire_dtypes.get(""))


def wire_dtypes(
    given: str | torch.dtype | Mapping[str, str | torch.dtype] | None,
) -> dict[str, str]:
    """What a user says of wire dtypes, as :class:`Exchange` has it.

    Args:
        given: one for all tables, or by table; torch's dtypes or their names here.
    """
    if given is None:
        return {}
    if isinstance(given, str | torch.dtype):
        given = {"": given}
    return {
        table: _BY_DTYPE.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
        for table, dtype in given.items()
    }


def needs_ours(infos: Sequence[Any]) -> bool:
    """Whether shardings of ours serve these tables: where one is of ours, and where stock tables
    are in groups. With TorchRec's own, a rank that has no table of a group sends float32 although
    the others expect what the tables give."""
    return (isinstance(infos, ExchangeGroup) and infos.is_part) or has_ours(infos)


def has_ours(infos: Sequence[Any]) -> bool:
    """Whether a table of ours is among these."""
    return any(isinstance(info.param_sharding, BackendParameterSharding) for info in infos)


def codecs_of(infos: Sequence[Any], default: Codecs | None) -> Codecs | None:
    """The codecs of a group of tables: its own, or the sharder's."""
    own = infos.codecs if isinstance(infos, ExchangeGroup) else None
    return default if own is None else own


def codecs_at(wire: str) -> Codecs:
    """TorchRec's codecs of a precision, for both directions."""
    precision = WIRE_DTYPES[wire]
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=precision, backward_precision=precision)
    )


def _parts(items: Sequence[Info], count: int, weights: Sequence[float]) -> list[list[Info]]:
    """At most so many runs of neighbours, none empty, of about equal weight."""
    count = min(count, len(items))
    parts: list[list[Info]] = []
    position, held = 0, 0.0
    for number in range(1, count + 1):
        wanted, first = sum(weights) * number / count, position
        # One item at least, and one is left for each part to come.
        while position < len(items) - (count - number) and (
            position == first or held + weights[position] / 2 <= wanted
        ):
            held += weights[position]
            position += 1
        parts.append(list(items[first:position]))
    return parts
