"""Reads stock tables and hash tables from folders of :mod:`torch.distributed.checkpoint`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchrec_hkv.backends.optimizers import optimizer_of_layout
from torchrec_hkv.backends.specs import OptimizerSpec
from torchrec_hkv.checkpoint.conversion.dcp_tensors import DcpFolder, DcpTensor
from torchrec_hkv.checkpoint.conversion.source import (
    ROW_STATES,
    Eviction,
    SourceTable,
    check_row_type,
    state_name,
    states_of,
)
from torchrec_hkv.checkpoint.conversion.zch import Remapping, find_remappings
from torchrec_hkv.hash_table.files.state_columns import StateColumns

_WEIGHT = re.compile(r"(?P<table>(?:.*\.)?(?:embedding_bags|embeddings)\.(?P<own>[^.]+))\.weight$")
_SUFFIX = ".weight"
#: TorchRec's names of an optimizer's second state; the first is always "momentum1".
_SECOND = ("exp_avg_sq", "momentum2")
#: Optimizers by the number of dimensions of their states.
_BY_STATES = {(1,): "rowwise_adagrad", (2,): "adagrad", (2, 2): "adam", (2, 1): "rowwise_adam"}


@dataclasses.dataclass(frozen=True)
class DcpKeys:
    """Prefixes of the names of entries.

    Attributes:
        model: prefix of the model's entries, such as ``"model."`` or ``""``.
        optimizer: prefix of the optimizer's entries, such as ``"optimizer."``; None without one.
    """

    model: str
    optimizer: str | None

    @classmethod
    def of(cls, folder: DcpFolder, model: str | None, optimizer: str | None) -> DcpKeys:
        """The given prefixes, or those of the folder.

        Args:
            folder: the folder to read.
            model: prefix of the model's entries without the dot. None: ``model``, if the names of
                all tables begin so.
            optimizer: prefix of the optimizer's entries without the dot. None: ``optimizer``, if
                there are such entries.

        Raises:
            ValueError: no entry begins with a given prefix.
        """
        for given in (model, optimizer):
            if given and not any(key.startswith(f"{given}.") for key in folder.entries):
                raise ValueError(
                    f"No entry of {folder.path} begins with {given + '.'!r}: they are "
                    f"{_some(folder.entries)}."
                )
        if model is None:
            weights = [key for key in folder.entries if _WEIGHT.fullmatch(key)]
            weights = [key for key in weights if not key.startswith("optimizer.")]
            is_nested = weights and all(key.startswith("model.") for key in weights)
            model = "model" if is_nested else ""
        if optimizer is None and any(key.startswith("optimizer.") for key in folder.entries):
            optimizer = "optimizer"
        return cls(f"{model}." if model else "", f"{optimizer}." if optimizer else None)


@dataclasses.dataclass(frozen=True)
class DcpTables:
    """The tables of a folder.

    Attributes:
        tables: the tables that can be converted.
        entries: names of each table's entries in the folder, by the table's name.
    """

    tables: list[SourceTable]
    entries: dict[str, list[str]]


def table_names(folder: DcpFolder, keys: DcpKeys) -> list[str]:
    """Full names of the tables of a folder: of stock tables and of hash tables."""
    return [name for name, *_ in _weights(folder, keys)]


def _weights(
    folder: DcpFolder, keys: DcpKeys
) -> Iterator[tuple[str, str, re.Match[str], Remapping | None]]:
    """For each table its full name, the entry with its rows, the match of that entry's name, and
    the remapping of its ids."""
    remapped = find_remappings(folder, keys.model)
    for key in folder.entries:
        match = _WEIGHT.fullmatch(key.removeprefix(keys.model))
        if match is None or not key.startswith(keys.model) or not folder.is_tensor(key):
            continue
        if len(folder.shape(key)) == 2:
            remapping = remapped.get(key)
            yield match["table"] if remapping is None else remapping.table, key, match, remapping


def dcp_tables(
    folder: DcpFolder,
    keys: DcpKeys,
    optimizer: str | None,
    without: Sequence[str],
    names: Collection[str] | None = None,
) -> DcpTables:
    """Finds the tables of a folder: stock tables and hash tables.

    Args:
        folder: the folder to read.
        keys: prefixes of the names of entries.
        optimizer: name of the optimizer; None: found from the states.
        without: ``"states"`` leaves out optimizer states, ``"scores"`` scores and last steps.
        names: full names of the tables to find; None for all. Others may be such that a conversion
            would refuse them.

    Raises:
        ValueError: the entries of a table contradict each other.
    """
    found = DcpTables([], {})
    for name, weight, match, remapping in _weights(folder, keys):
        if names is not None and name not in names:
            continue
        states = _stock_states(folder, keys, match["table"], match["own"])
        if remapping is not None:
            table = _ZchTable(folder, weight, states, remapping, optimizer, without)
            found.entries[table.name] = [weight, *states.values(), *remapping.entries]
        elif folder.is_tensor(f"{keys.model}{match['table']}.occupied"):
            table = _HashTable(folder, keys, match["table"], optimizer, without)
            found.entries[table.name] = table.all_entries
        else:
            table = _RowNumberTable(folder, weight, match["table"], states, optimizer, without)
            found.entries[table.name] = [weight, *states.values()]
        found.tables.append(table.source())
    return found


def _stock_states(folder: DcpFolder, keys: DcpKeys, table: str, short_name: str) -> dict[str, str]:
    """Entries with a stock table's optimizer states, by TorchRec's names of the states."""
    if keys.optimizer is None:
        return {}
    begin = f"{keys.optimizer}state.{table}{_SUFFIX}.{short_name}."
    return {key.removeprefix(begin): key for key in folder.entries if key.startswith(begin)}


class _RowNumberTable:
    """A stock table, whose ids are row numbers."""

    def __init__(
        self,
        folder: DcpFolder,
        weight: str,
        name: str,
        states: Mapping[str, str],
        optimizer: str | None,
        without: Sequence[str],
    ) -> None:
        self.name, self._folder = name, folder
        self._weight = folder.tensor(weight)
        check_row_type(name, self._weight.dtype)
        self._states: list[DcpTensor] = []
        self._optimizer: OptimizerSpec | None = None
        if "states" not in without:
            self._find_states(states, optimizer)

    def _find_states(self, states: Mapping[str, str], optimizer: str | None) -> None:
        rows = self._weight.shape[0]
        names = ["momentum1", *(name for name in _SECOND if name in states)]
        self._states = [self._folder.tensor(states[name]) for name in names if name in states]
        dims = tuple(len(state.shape) for state in self._states)
        unknown = sorted(set(states) - {"momentum1", *_SECOND})
        wrong = [state for state in self._states if state.shape[0] != rows]
        if unknown or wrong:
            state = repr(unknown[0]) if unknown else f"{wrong[0].key!r} of shape {wrong[0].shape}"
            raise ValueError(
                f"Table {self.name!r} has an optimizer state {state}, which can't be converted: "
                "leave states out by --without states."
            )
        if not self._states:
            self._optimizer = None if optimizer is None else OptimizerSpec(optimizer)
            return
        kind = optimizer or _BY_STATES.get(dims)
        found = StateColumns(dims.count(2), dims.count(1))
        if kind is None or states_of(OptimizerSpec(kind)) != found:
            raise ValueError(
                f"Table {self.name!r} has optimizer states of {dims} dimensions, which are not "
                f"those of {kind or 'a known optimizer'}: name another --optimizer, or leave them "
                "out by --without states."
            )
        self._optimizer = OptimizerSpec(kind)

    def source(self) -> SourceTable:
        """The table as a conversion reads it."""
        return SourceTable(
            self.name,
            self._weight.shape[1],
            self._weight.dtype,
            self._weight.shape[0],
            self._read,
            self._optimizer,
            is_exact=True,
        )

    def _row_bytes(self) -> int:
        return 8 + self._weight.row_bytes + sum(state.row_bytes for state in self._states)

    def _read(self, batch_bytes: int) -> Iterator[dict[str, Tensor]]:
        rows = self._weight.shape[0]
        size = max(1, batch_bytes // (3 * self._row_bytes()))
        for first in range(0, rows, size):
            yield self._rows(first, min(size, rows - first))

    def _rows(self, first: int, n: int) -> dict[str, Tensor]:
        batch = {"ids": torch.arange(first, first + n), "weight": self._weight.rows(first, n)}
        columns = 0
        for state in self._states:
            values = state.rows(first, n).float()
            if values.dim() == 1:
                batch[ROW_STATES] = values.unsqueeze(1)
            else:
                batch[state_name(columns)] = values
                columns += 1
        return batch


class _ZchTable(_RowNumberTable):
    """A stock table behind a managed collision module, which maps ids to its rows."""

    def __init__(
        self,
        folder: DcpFolder,
        weight: str,
        states: Mapping[str, str],
        remapping: Remapping,
        optimizer: str | None,
        without: Sequence[str],
    ) -> None:
        super().__init__(folder, weight, remapping.table, states, optimizer, without)
        self._remapping, self._with_scores = remapping, "scores" not in without

    def source(self) -> SourceTable:
        counts = self._remapping.counts if self._with_scores else None
        steps = self._remapping.last_steps if self._with_scores else None
        return dataclasses.replace(
            super().source(),
            eviction="lru" if counts is None else "lfu",
            clock=0 if steps is None else self._remapping.clock(),
            is_exact=False,
        )

    def _read(self, batch_bytes: int) -> Iterator[dict[str, Tensor]]:
        rows = self._weight.shape[0]
        ids, has_id, extra = self._remapping.by_row(rows, with_scores=self._with_scores)
        size = max(1, batch_bytes // (3 * self._row_bytes()))
        for first in range(0, rows, size):
            n = min(size, rows - first)
            at = has_id[first : first + n].nonzero().flatten()
            if len(at):
                batch = {name: tensor[at] for name, tensor in self._rows(first, n).items()}
                batch |= {name: tensor[first + at] for name, tensor in extra.items()}
                yield {**batch, "ids": ids[first + at]}


class _HashTable:
    """A hash table in a ``state_dict``."""

    def __init__(
        self,
        folder: DcpFolder,
        keys: DcpKeys,
        name: str,
        optimizer: str | None,
        without: Sequence[str],
    ) -> None:
        begin = f"{keys.model}{name}."
        self.name, self._folder = name, folder
        self.all_entries = [key for key in folder.entries if key.startswith(begin)]
        names = [key.removeprefix(begin) for key in self.all_entries]
        missing = sorted({"weight", "ids", "occupied", "last_steps", "table_state"} - set(names))
        if missing:
            raise ValueError(f"{folder.path} lacks {missing} of table {name!r}.")
        places = folder.shape(f"{begin}occupied")
        self._tensors = {
            what: folder.tensor(f"{begin}{what}")
            for what in names
            if what in ("weight", "ids", "occupied", "last_steps", "scores")
            or what.startswith("optimizer_")
        }
        wrong = [t for t in self._tensors.values() if t.shape[:1] != places]
        if wrong:
            raise ValueError(
                f"In {folder.path}, {wrong[0].key!r} has {wrong[0].shape[0]} rows, but table "
                f"{name!r} has {places[0]} places."
            )
        check_row_type(name, self._tensors["weight"].dtype)
        head = folder.tensor(f"{begin}table_state").all().tolist()
        if len(head) != 4:
            raise ValueError(
                f"In {folder.path}, 'table_state' of table {name!r} is {head}, but must have "
                "4 numbers."
            )
        self._head = head
        self._optimizer = self._find_optimizer(optimizer)
        if "states" in without:
            self._optimizer = None
            table_keys = [k for k in self._tensors if not k.startswith("optimizer_")]
            self._tensors = {k: self._tensors[k] for k in table_keys}
        if "scores" in without:
            self._tensors.pop("scores", None)
            del self._tensors["last_steps"]

    def _find_optimizer(self, optimizer: str | None) -> OptimizerSpec | None:
        saved = optimizer_of_layout(self._head[1])
        if optimizer is not None and saved is not None and optimizer != saved.name:
            raise ValueError(
                f"Table {self.name!r} has the states of {saved.kind}, but --optimizer is "
                f"{optimizer!r}: leave it out."
            )
        return saved

    def source(self) -> SourceTable:
        """The table as a conversion reads it."""
        weight, scores = self._tensors["weight"], self._tensors.get("scores")
        eviction: Eviction = "lru" if scores is None else "lfu"
        if self._head[0] >> 8 and scores is not None:
            raise ValueError(
                f"Table {self.name!r} has an epoch, which a conversion does not keep: load it by "
                "torchrec_hkv.checkpoint.load, or leave scores out by --without scores."
            )
        return SourceTable(
            self.name,
            weight.shape[1],
            weight.dtype,
            weight.shape[0],
            self._read,
            self._optimizer,
            eviction,
            self._head[3],
            self._head[2],
        )

    def _read(self, batch_bytes: int) -> Iterator[dict[str, Tensor]]:
        places = self._tensors["occupied"].shape[0]
        width = sum(tensor.row_bytes for tensor in self._tensors.values())
        size = max(1, batch_bytes // (3 * width))
        for first in range(0, places, size):
            n = min(size, places - first)
            at = self._tensors["occupied"].rows(first, n).nonzero().flatten()
            if len(at):
                yield {
                    name: tensor.rows(first, n)[at]
                    for name, tensor in self._tensors.items()
                    if name != "occupied"
                }


def _some(entries: Mapping[str, object]) -> str:
    shown = [repr(key) for key in list(entries)[:3]]
    return ", ".join(shown) + (", …" if len(entries) > 3 else "")
