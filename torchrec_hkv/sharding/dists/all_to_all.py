"""The exchange of a batch's ids between ranks, in two collectives with one device synchronization.

The ranks first send each other the number of ids of each feature, and then one block of words each:
the lengths of the bags and their ids (``csrc/routing/blocks.h``).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import (
    KJTAllToAll,
    KJTAllToAllTensorsAwaitable,
    _get_recat,
)
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.sharding.dists.awaitables import ReadyAwaitable, UnloggedAwaitable

_ops = torch.ops.torchrec_hkv


@dataclasses.dataclass(frozen=True)
class OutgoingBatch:
    """A batch with the features of all ranks, in the order of the ranks.

    Attributes:
        keys: the features that this rank looks up.
        stride: number of bags of each feature.
        lengths: integers ``[features * stride]``.
        values: int64 ids; None if ``blocks`` is given.
        weights: float32 ``[ids]``, or float64 for scores
            (:mod:`torchrec_hkv.sharding.dists.scores`); or None.
        blocks: the blocks to send, if they exist already.
    """

    keys: list[str]
    stride: int
    lengths: Tensor
    values: Tensor | None
    weights: Tensor | None
    blocks: Tensor | None = None


class CountedAllToAll(KJTAllToAll):
    """TorchRec's exchange of ids with fewer synchronizations and collectives.

    TorchRec reads from the device how many ids go to each rank, sends these numbers, reads how many
    ids arrive, sends lengths and ids separately, and reads from the final batch how many ids each
    feature has. Each read drains the device's queue, and the device idles until the host has
    launched more work. This class counts the ids of each feature on the device, sends the counts
    from there, reads all counts at once, and sends lengths together with ids.

    A batch with a separate batch size for each feature uses TorchRec's exchange. So does a batch
    whose size differs between ranks, after the counts have arrived. With a single rank the batch is
    returned unchanged.

    An input distribution must not store this object in an attribute ``_dist``, because train
    pipelines replace the ``forward`` of the object that they find there.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        splits: list[int],
        stagger: int,
        device: torch.device | None,
        *,
        needs_counts: bool = True,
    ) -> None:
        """
        Args:
            pg: the ranks.
            splits: number of features that each rank gets, in the order of the features.
            stagger: see TorchRec's ``_get_recat``.
            device: device of the ids.
            needs_counts: whether the number of ids of each feature will be read. Several ranks
                exchange it in any case; a single rank has to synchronize to get it.
        """
        super().__init__(pg, splits, stagger)
        self._is_alone = pg.size() == 1
        self._needs_counts = needs_counts
        self._plan = None if self._is_alone else _ExchangePlan(pg, splits, stagger, device)

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[KJTAllToAllTensorsAwaitable]:
        """Starts the exchange.

        Args:
            input: bags of the features of all ranks, in the order of the ranks.
        """
        if self._plan is None:
            return ReadyAwaitable(LocalBatchAwaitable(input, self._needs_counts))
        if input.variable_stride_per_key():
            return super().forward(input)
        return self.send(
            OutgoingBatch(
                self._plan.local_keys(input.keys()),
                input.stride(),
                input.lengths(),
                input.values(),
                input.weights_or_none(),
            )
        )

    def send(self, batch: OutgoingBatch) -> Awaitable[KJTAllToAllTensorsAwaitable]:
        """Starts the exchange of a batch with equal batch sizes, between several ranks."""
        with torch.no_grad():
            return _CountExchange(self._plan, batch)


class LocalBatchAwaitable(UnloggedAwaitable, KJTAllToAllTensorsAwaitable):
    """A batch that stays on its rank, with the interface of an exchanged batch."""

    def __init__(self, features: KeyedJaggedTensor, needs_counts: bool) -> None:
        """
        Args:
            features: the batch.
            needs_counts: whether the number of ids of each feature will be read.
        """
        Awaitable.__init__(self)  # the constructor of TorchRec's class would start collectives
        self._workers = 1
        # Copied, because lookups replace the weights of their batch.
        self._input = features if features.weights_or_none() is None else copy.copy(features)
        self._needs_counts = needs_counts
        self._input_splits = self._output_splits = {"values": [features.values().numel()]}
        self._recat = None
        self._stride_per_rank = None if features.variable_stride_per_key() else [features.stride()]

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._input.sync() if self._needs_counts else self._input


class _ExchangePlan:
    """The parameters that all exchanges of a distribution share."""

    def __init__(
        self, pg: dist.ProcessGroup, splits: list[int], stagger: int, device: torch.device | None
    ) -> None:
        self.pg, self.splits, self.stagger = pg, splits, stagger
        self.world_size, self.rank = pg.size(), pg.rank()
        self.local = splits[self.rank]
        first = sum(splits[: self.rank])
        self._local_features = slice(first, first + self.local)
        # The order in which the received features, rank by rank, are concatenated.
        order = _get_recat(self.local, self.world_size, stagger, device)
        self.order: Tensor = (
            torch.empty(0, dtype=torch.int32, device=device) if order is None else order
        )
        # The counts for each rank are followed by the number of samples.
        self.num_sent = sum(splits) + self.world_size
        self.num_received = self.world_size * (self.local + 1)
        self.sent_splits = [features + 1 for features in splits]
        self.received_splits = [self.local + 1] * self.world_size
        ends = list(itertools.accumulate(self.sent_splits))
        self.spans = list(zip([0, *ends], [end - 1 for end in ends], strict=False))
        of_counts = [at for begin, end in self.spans for at in range(begin, end)]
        self._of_counts = torch.tensor(of_counts, dtype=torch.int64, device=device)
        self._of_samples = torch.tensor([end for _, end in self.spans], device=device)

    def local_keys(self, keys: list[str]) -> list[str]:
        """The features that this rank looks up."""
        return keys[self._local_features]

    def counts(self, batch: OutgoingBatch) -> Tensor:
        """The counts to send, int64 ``[num_sent + num_received]``; the second part is not set."""
        places = (self._of_counts, self._of_samples)
        return _ops.count_ids(
            batch.lengths, *places, batch.stride, self.num_sent + self.num_received
        )


class _CountExchange(UnloggedAwaitable, Awaitable[KJTAllToAllTensorsAwaitable]):
    """The exchange of the numbers of ids and samples."""

    def __init__(self, plan: _ExchangePlan, batch: OutgoingBatch) -> None:
        super().__init__()
        self._plan, self._batch = plan, batch
        self._counts = plan.counts(batch)
        self._received = self._counts[plan.num_sent :]
        self._work = dist.all_to_all_single(
            self._received,
            self._counts[: plan.num_sent],
            output_split_sizes=plan.received_splits,
            input_split_sizes=plan.sent_splits,
            group=plan.pg,
            async_op=True,
        )

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        plan, batch = self._plan, self._batch
        self._work.wait()
        numbers = self._counts.tolist()
        sent = [sum(numbers[begin:end]) for begin, end in plan.spans]
        width = plan.local + 1
        received_counts = [
            numbers[at : at + width] for at in range(plan.num_sent, len(numbers), width)
        ]
        samples = [counts.pop() for counts in received_counts]
        received = [sum(counts) for counts in received_counts]
        with torch.no_grad():
            if samples == [batch.stride] * plan.world_size:
                return _IdExchange(plan, batch, self._received, sent, received, received_counts)
            return _uneven(plan, batch, sent, received, samples)


class _IdExchange(UnloggedAwaitable, KJTAllToAllTensorsAwaitable):
    """The exchange of lengths, ids and weights if all ranks have the same number of samples."""

    def __init__(
        self,
        plan: _ExchangePlan,
        batch: OutgoingBatch,
        counts: Tensor,
        sent: list[int],
        received: list[int],
        received_counts: list[list[int]],
    ) -> None:
        Awaitable.__init__(self)  # the constructor of TorchRec's class would start collectives
        self._plan, self._batch, self._counts = plan, batch, counts
        self._workers = plan.world_size
        stride, world_size = batch.stride, plan.world_size
        # Attributes that sharding contexts read.
        self._input_splits, self._output_splits = {"values": sent}, {"values": received}
        self._recat = plan.order if plan.local else None
        self._stride_per_rank = [stride] * world_size
        self._length_per_key = [
            sum(of_feature) for of_feature in zip(*received_counts, strict=True)
        ]

        lengths_sent = [features * stride for features in plan.splits]
        lengths_received = plan.local * stride
        blocks = batch.blocks
        if blocks is None:
            blocks = _ops.pack_blocks(batch.lengths, batch.values, lengths_sent, sent)
        self._input_tensors = [blocks]
        self._output_tensors: list[Tensor] = []
        self._awaitables: list[dist.Work] = []
        self._exchange(
            blocks,
            [lengths + ids for lengths, ids in zip(lengths_sent, sent, strict=True)],
            [lengths_received + ids for ids in received],
        )
        if batch.weights is not None:
            self._input_tensors.append(batch.weights)
            self._exchange(batch.weights, sent, received)

    def _exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> None:
        arriving = tensor.new_empty(sum(received))
        self._output_tensors.append(arriving)
        self._awaitables.append(
            dist.all_to_all_single(
                arriving,
                tensor,
                output_split_sizes=received,
                input_split_sizes=sent,
                group=self._plan.pg,
                async_op=True,
            )
        )

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._awaitables:
            work.wait()
        plan, batch = self._plan, self._batch
        blocks, weights = self._output_tensors[0], None
        if batch.weights is not None:
            weights = self._output_tensors[1]
        lengths, offsets, values, merged_weights = _merge_blocks(
            blocks,
            weights,
            self._counts,
            plan.order,
            plan.world_size,
            batch.stride,
            batch.lengths.dtype,
        )
        return KeyedJaggedTensor(
            keys=batch.keys,
            values=values,
            weights=None if weights is None else merged_weights,
            lengths=lengths,
            offsets=offsets,
            stride=plan.world_size * batch.stride,
            length_per_key=self._length_per_key,
            offset_per_key=[0, *itertools.accumulate(self._length_per_key)],
        )


def _merge_blocks(words: Tensor, weights: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Calls the op. 64-bit weights are reordered by positions, passed as float32 bits."""
    if weights is None or weights.dtype == torch.float32:
        return _ops.merge_blocks(words, weights, *args)
    count = weights.numel()
    positions = torch.arange(count, dtype=torch.int32, device=weights.device)
    *merged, order = _ops.merge_blocks(words, positions.view(torch.float32), *args)
    return *merged, weights.index_select(0, order.view(torch.int32))


def _uneven(
    plan: _ExchangePlan,
    batch: OutgoingBatch,
    sent: list[int],
    received: list[int],
    samples: Sequence[int],
) -> KJTAllToAllTensorsAwaitable:
    """TorchRec's exchange with known counts, for ranks with different numbers of samples."""
    stride, values = batch.stride, batch.values
    if values is None:  # extract the ids from the blocks, where they follow the lengths
        sizes = [
            n for pair in zip([f * stride for f in plan.splits], sent, strict=True) for n in pair
        ]
        values = torch.cat(batch.blocks.split(sizes)[1::2])
    tensors = [batch.lengths, values] + ([] if batch.weights is None else [batch.weights])
    labels = ["lengths", "values", "weights"][: len(tensors)]
    like_ids = len(tensors) - 1
    batch_of_ranks = KeyedJaggedTensor(
        keys=batch.keys, values=values, lengths=batch.lengths, weights=batch.weights, stride=stride
    )
    return KJTAllToAllTensorsAwaitable(
        pg=plan.pg,
        input=batch_of_ranks,
        splits=plan.splits,
        input_splits=[[features * stride for features in plan.splits], *[sent] * like_ids],
        output_splits=[[plan.local * n for n in samples], *[received] * like_ids],
        input_tensors=tensors,
        labels=labels,
        keys=batch.keys,
        device=values.device,
        stagger=plan.stagger,
        stride_per_rank=list(samples),
    )
