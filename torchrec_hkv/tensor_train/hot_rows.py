"""A cache that keeps the rows of the most frequent ids of a Tensor-Train table decompressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_hkv.hash_table import HashTable
from torchrec_hkv.hash_table.optimizers import Optimizer
from torchrec_hkv.tensor_train.dense import rows_of
from torchrec_hkv.tensor_train.float32 import keeping_float32
from torchrec_hkv.tensor_train.fused_rows import fused_row_lookup, plain_row_lookup
from torchrec_hkv.tensor_train.replicas import Replicas
from torchrec_hkv.tensor_train.shapes import TTShape
from torchrec_hkv.tensor_train.write_back import write_back

#: Bound on the number of counted ids, more than any memory holds.
_MAX_COUNTED = 1 << 40
_NO_ID = torch.iinfo(torch.int64).max
#: Tensors of :meth:`HotRows.sized_state` besides the counts.
_SIZED = ("ids", "rows", "states", "step", "total", "populates")


class HotRows(nn.Module):
    """A cache of rows of one table.

    A hash table under LFU counts frequencies, and evicts rare ids when it is full. :meth:`populate`
    selects the most frequent ids. An id that stays keeps its slot, row and optimizer state. A new
    id gets the row computed from the cores. The row of an id that leaves is written back to the
    cores (:func:`write_back`). Then all counts are halved, so that old occurrences weigh less.

    Args:
        shape: shape of the table.
        size: number of rows.
        counted_ids: number of ids whose frequencies are counted, at least ``size``.
        optimizer: optimizer that updates the rows in the backward; None: :attr:`rows` is a
            parameter with gradients.
        device: device of the rows.

    Raises:
        ValueError: ``size`` exceeds the table's rows, or ``counted_ids`` is less than ``size``.
    """

    def __init__(
        self,
        shape: TTShape,
        size: int,
        counted_ids: int,
        optimizer: Optimizer | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if not 1 <= size <= shape.num_embeddings:
            raise ValueError(
                f"the cache has {size} rows, but must have 1 to {shape.num_embeddings}, the rows "
                "of the table."
            )
        if not size <= counted_ids <= _MAX_COUNTED:
            raise ValueError(
                f"frequencies are counted for {counted_ids} ids, but must be for at least as many "
                f"as the cache has rows, {size}, and at most {_MAX_COUNTED}."
            )
        self.shape, self.size, self.counted_ids, self.optimizer = (
            shape, size, counted_ids, optimizer
        )  # fmt: skip
        dim = shape.embedding_dim
        self.rows = nn.Parameter(
            torch.zeros(size, dim, device=device), requires_grad=optimizer is None
        )
        width = 0 if optimizer is None else optimizer.state_width(dim)
        self.register_buffer("states", torch.zeros(size, width, device=device))
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=device))
        #: The id of each row, sorted, to find rows by bisection.
        self.register_buffer("ids", torch.full((size,), _NO_ID, dtype=torch.int64, device=device))
        #: Number of counted occurrences, including ids that are no longer counted.
        self.register_buffer("total", torch.zeros(1, dtype=torch.int64, device=device))
        #: Number of calls of :meth:`populate`, used as seed of its random numbers.
        self.register_buffer("populates", torch.zeros(1, dtype=torch.int64, device=device))
        #: Number of cached ids in training lookups.
        self.register_buffer(
            "training_hits", torch.zeros(1, dtype=torch.int64, device=device), persistent=False
        )
        #: Number of ids looked up and of cached ids since the last reset.
        self.register_buffer(
            "tally", torch.zeros(2, dtype=torch.int64, device=device), persistent=False
        )
        self._counts: HashTable | None = None
        self._restored: dict[str, Tensor] | None = None
        #: Incremented by :meth:`populate`, which makes slots invalid.
        self.generation = 0
        #: The ranks that hold replicas of this cache; None for no replicas.
        self.replicas: Replicas | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HotRows:
        return super()._apply(keeping_float32(fn), recurse)

    @property
    def _is_training_lookup(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Looks up ids: ``(places, found)``, int64 and bool ``[n]``. Places of ids that are not
        cached are undefined. Counted in the hit rate."""
        places, found = self.find_uncounted(ids)
        self.tally[0] += ids.numel()
        hits = found.sum()
        self.tally[1] += hits
        if self._is_training_lookup:
            self.training_hits += hits
        return places, found

    def find_uncounted(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Like :meth:`find`, but does not count in the hit rate."""
        at = torch.searchsorted(self.ids, ids).clamp(max=self.size - 1)
        return at, self.ids[at] == ids

    @torch.no_grad()
    def clear(self) -> None:
        """Removes all rows without writing them back. Frequency counts are kept."""
        self.ids.fill_(_NO_ID)
        self.rows.zero_()
        self.states.zero_()

    def count(self, ids: Tensor) -> None:
        """Counts the occurrences of ids."""
        self._counter(ids.device).find_or_insert_slots(ids)
        self.total += ids.numel()

    def lookup(
        self, places: Tensor, offsets: Tensor, weights: Tensor, learning_rate: Tensor
    ) -> Tensor:
        """Weighted sums of rows by bag. The backward updates the rows, or returns their gradient.

        In evaluation mode, and under ``torch.no_grad()``, the optimizer is not applied.

        Args:
            places: int64 ``[n]`` from :meth:`find`.
            offsets: int64 ``[bags + 1]``.
            weights: float32 ``[n]``.
            learning_rate: float32 ``[]``, used with an optimizer.

        Raises:
            RuntimeError: in the backward, if :meth:`populate` was called since the forward.
        """
        if self.optimizer is None or not self._is_training_lookup:
            return plain_row_lookup(self, places, offsets, weights)
        return fused_row_lookup(self, places, offsets, weights, learning_rate)

    @torch.no_grad()
    def populate(self, cores: Sequence[Tensor]) -> None:
        """Fills the cache with the most frequent ids, and writes rows that leave back to the cores.

        Synchronizes with the device. For replicas, all ranks must call it; they select by the
        counts of all ranks.

        Args:
            cores: cores of the table; updated if rows leave.
        """
        rank_ids, rank_counts = self.frequencies()
        counted, counts, total = self._of_all_ranks(rank_ids, rank_counts)
        # On a GPU, ids outside the table may have been counted.
        exists = (counted >= 0) & (counted < self.shape.num_embeddings)
        # Sorted, so that a loaded table gives bitwise the same results.
        counted, order = counted[exists].sort()
        counts = counts[exists][order]
        if counted.numel() == 0:
            return
        # Ties are broken by the smaller id, so that all runs select the same ids.
        order = torch.argsort(counts, descending=True, stable=True)
        chosen = counted[order[: self.size]].sort().values
        places, stays = self.find_uncounted(chosen)
        leaves = ~torch.isin(self.ids, chosen) & (self.ids != _NO_ID)
        used = chosen.numel()
        rows, states = torch.zeros_like(self.rows), torch.zeros_like(self.states)
        rows[:used][stays], states[:used][stays] = (
            self.rows[places[stays]],
            self.states[places[stays]],
        )
        rows[:used][~stays] = rows_of(self.shape, cores, chosen[~stays]).to(rows.dtype)
        leaving, leaving_rows = self.ids[leaves], self.rows[leaves]
        if leaving.numel():
            written_ids, written_counts = self._write_back_ids(
                chosen, leaving, counted, counts, total
            )
            leaving_counts = self._counts_of(leaving, counted, counts)
            if self.replicas is None or self.replicas.is_first:
                write_back(
                    self.shape,
                    cores,
                    leaving,
                    leaving_rows,
                    leaving_counts,
                    written_ids,
                    written_counts,
                )
        self.rows.data.copy_(rows)
        self.states.copy_(states)
        self.ids.fill_(_NO_ID)
        self.ids[:used] = chosen
        if self.replicas is not None:
            # Ranks select the same ids, but computed values may differ in the last bits.
            for tensor in (*cores, self.rows):
                self.replicas.copy_first(tensor.data)
        self.generation += 1
        self.populates += 1
        self._halve_counts(rank_ids, rank_counts)

    def frequencies(self) -> tuple[Tensor, Tensor]:
        """The counted ids and their counts, int64 on the rows' device."""
        entries = list(self._counter(self.rows.device).export())
        none = torch.empty(0, dtype=torch.int64, device=self.rows.device)
        return (
            torch.cat([none, *(batch.ids for batch in entries)]),
            torch.cat([none, *(batch.scores for batch in entries)]),
        )

    @property
    def hit_rate(self) -> float:
        """Share of lookups whose id was cached; 0 without lookups. Synchronizes with the device."""
        lookups, hits = self.tally.tolist()
        return hits / lookups if lookups else 0.0

    @property
    def num_rows(self) -> int:
        """Number of rows in use. Synchronizes with the device."""
        return int((self.ids != _NO_ID).sum())

    def _of_all_ranks(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and counts summed over all ranks, and the total number of occurrences."""
        if self.replicas is None:
            return ids, counts, self.total
        all_ids, all_counts = self.replicas.gather(ids), self.replicas.gather(counts)
        distinct, positions = torch.unique(all_ids, return_inverse=True)
        sums = torch.zeros_like(distinct).index_add_(0, positions, all_counts)
        return distinct, sums, self.replicas.sum(self.total)

    def _write_back_ids(
        self, chosen: Tensor, leaving: Tensor, counted: Tensor, counts: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids whose rows the cores compute, and their number of occurrences: all counted ids, and a
        random sample of the others, which share the remaining occurrences."""
        others = ~torch.isin(counted, chosen) & ~torch.isin(counted, leaving)
        generator = torch.Generator().manual_seed(int(self.populates))
        drawn = torch.randint(
            0, self.shape.num_embeddings, (4 * counted.numel(),), generator=generator
        ).to(counted.device)
        drawn = drawn[~torch.isin(drawn, torch.cat([counted, leaving]))].unique()
        remaining = (total - counts.sum()).clamp(min=0).float() / max(drawn.numel(), 1)
        return (
            torch.cat([counted[others], drawn]),
            torch.cat([counts[others].float(), remaining.expand(drawn.numel())]),
        )

    def _halve_counts(self, counted: Tensor, counts: Tensor) -> None:
        """Halves all counts, so that old occurrences weigh less."""
        counts = counts // 2
        table = self._counter(self.rows.device)
        table.clear()
        is_positive = counts > 0
        zeros = self.rows.new_zeros(int(is_positive.sum()), 1)
        table.insert_or_assign(counted[is_positive], zeros, counts[is_positive])
        self.total //= 2

    def _counts_of(self, ids: Tensor, counted: Tensor, counts: Tensor) -> Tensor:
        """Counts of ids, 1 for ids that are no longer counted. ``counted`` is sorted."""
        if counted.numel() == 0 or ids.numel() == 0:
            return torch.ones_like(ids)
        at = torch.searchsorted(counted, ids).clamp(max=counted.numel() - 1)
        return torch.where(counted[at] == ids, counts[at], 1)

    def _counter(self, device: torch.device) -> HashTable:
        if self._counts is None or self._counts.device != device:
            saved = self._restored if self._counts is None else self.get_extra_state()
            self._counts = HashTable(1, self.counted_ids, device=device, eviction="lfu")
            self._restored = None
            if saved is not None and saved["ids"].numel():
                ids, scores = saved["ids"].to(device), saved["scores"].to(device)
                self._counts.insert_or_assign(ids, torch.zeros(ids.numel(), 1).to(device), scores)
        return self._counts

    def sized_state(self) -> dict[str, Tensor]:
        """A copy of the cache in tensors whose sizes only depend on its arguments.

        Returns:
            ``ids`` int64 ``[size]`` (2^63 - 1 for unused slots), ``rows`` float32 ``[size, dim]``,
            ``states`` float32 ``[size, width]``, ``counted`` and ``counts`` int64
            ``[counted_ids]``, the most frequent ids, and ``step``, ``total`` and ``populates``
            int64 ``[1]``.
        """
        counted, counts = self.frequencies()
        order = torch.argsort(counts, descending=True, stable=True)[: self.counted_ids]
        device = self.rows.device
        all_counted = torch.full((self.counted_ids,), _NO_ID, dtype=torch.int64, device=device)
        all_counts = torch.zeros(self.counted_ids, dtype=torch.int64, device=device)
        all_counted[: order.numel()] = counted[order]
        all_counts[: order.numel()] = counts[order]
        copies = {name: getattr(self, name).detach().clone() for name in _SIZED}
        return {**copies, "counted": all_counted, "counts": all_counts}

    @torch.no_grad()
    def load_sized_state(self, state: Mapping[str, Tensor]) -> None:
        """Loads a result of :meth:`sized_state` of a cache with the same sizes. With replicas, only
        the first rank loads the counts, so that they are not multiplied."""
        for name in _SIZED:
            getattr(self, name).copy_(state[name])
        if bool((self.ids.diff() < 0).any()):  # saved by an earlier version, with unsorted ids
            self.ids, order = self.ids.sort(stable=True)
            self.rows.data, self.states = self.rows.data[order], self.states[order]
        is_counted = state["counted"] != _NO_ID
        if self.replicas is not None and not self.replicas.is_first:
            is_counted = torch.zeros_like(is_counted)
            self.total.zero_()
        self.set_extra_state(
            {"ids": state["counted"][is_counted], "scores": state["counts"][is_counted]}
        )

    def get_extra_state(self) -> dict[str, Tensor]:
        """The frequency counts, for ``state_dict``."""
        if self._counts is None:
            none = torch.empty(0, dtype=torch.int64)
            return self._restored or {"ids": none, "scores": none}
        entries = list(self._counts.export())
        none = torch.empty(0, dtype=torch.int64)
        return {
            "ids": torch.cat([none, *(batch.ids.cpu() for batch in entries)]),
            "scores": torch.cat([none, *(batch.scores.cpu() for batch in entries)]),
        }

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Loads frequency counts from ``load_state_dict``."""
        self._counts, self._restored = None, state
        self.generation += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": None, "_restored": self.get_extra_state()}
