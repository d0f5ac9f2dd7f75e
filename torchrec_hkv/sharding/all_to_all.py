"""The exchange of a batch's ids between ranks, waiting for the device once."""

from __future__ import annotations

import itertools
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


class CountedAllToAll(KJTAllToAll):
    """TorchRec's exchange of ids, in which the host waits for the device once and not three times.

    TorchRec asks the device how many ids go to each rank, sends that, asks how many come, and asks
    the finished batch how many ids each feature has. Each question drains the device's queue, which
    then stands idle while the host launches what follows. Here the device counts the ids of each
    feature and sends the counts itself, and one question gets all of it.

    Batches whose features have sizes of their own take TorchRec's way, and so does all that is
    given to a train pipeline, which puts its own function in the place of ``forward``.
    """

    def __init__(
        self, pg: dist.ProcessGroup, splits: list[int], stagger: int, device: torch.device | None
    ) -> None:
        """
        Args:
            pg: the ranks.
            splits: number of features that each rank gets, in the order of the features.
            stagger: as TorchRec's ``_get_recat`` has it.
            device: of the ids.
        """
        super().__init__(pg, splits, stagger)
        # In which order the features that have come, rank by rank, are put together.
        self._order: Tensor | None = _get_recat(splits[pg.rank()], pg.size(), stagger, device)

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[KJTAllToAllTensorsAwaitable]:
        """Starts the exchange.

        Args:
            input: bags of the features of all ranks, in the order of the ranks.
        """
        if self._pg.size() == 1 or input.variable_stride_per_key():
            return super().forward(input)
        with torch.no_grad():
            return _Counts(self._pg, input, self._splits, self._stagger, self._order)


class _Counts(Awaitable[KJTAllToAllTensorsAwaitable]):
    """How many ids and samples go to each rank and come from it: on their way."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,
        splits: list[int],
        stagger: int,
        order: Tensor | None,
    ) -> None:
        super().__init__()
        self._pg, self._input, self._splits = pg, input, splits
        self._stagger, self._order = stagger, order
        world_size, local = pg.size(), splits[pg.rank()]
        lengths, stride = input.lengths(), input.stride()
        counts = lengths.view(len(input.keys()), stride).sum(1, dtype=torch.int64)
        # To each rank the counts of its features, and the number of samples behind them.
        self._sent = torch.cat(
            [
                part
                for counted in counts.split(splits)
                for part in (counted, counted.new_full((1,), stride))
            ]
        )
        self._received = counts.new_empty(world_size * (local + 1))
        self._work = dist.all_to_all_single(
            self._received,
            self._sent,
            output_split_sizes=[local + 1] * world_size,
            input_split_sizes=[features + 1 for features in splits],
            group=pg,
            async_op=True,
        )

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        self._work.wait()
        numbers = torch.cat([self._sent, self._received]).tolist()
        sent, received = numbers[: self._sent.numel()], numbers[self._sent.numel() :]
        input, rank = self._input, self._pg.rank()
        local, stride = self._splits[rank], input.stride()
        bounds = [0, *itertools.accumulate(features + 1 for features in self._splits)]
        out = [sum(sent[begin : end - 1]) for begin, end in itertools.pairwise(bounds)]
        came = [received[at : at + local + 1] for at in range(0, len(received), local + 1)]
        samples = [counts[-1] for counts in came]
        ids = [sum(counts[:-1]) for counts in came]
        labels = input.dist_labels()
        like_ids = len(labels) - 1  # tensors: the ids, and their weights where they have some
        first = sum(self._splits[:rank])
        known = {
            "pg": self._pg,
            "input": input,
            "input_splits": [[n * stride for n in self._splits], *[out] * like_ids],
            "output_splits": [[n * local for n in samples], *[ids] * like_ids],
            "input_tensors": input.dist_tensors(),
            "labels": labels,
            "keys": input.keys()[first : first + local],
            "device": input.device(),
            "stagger": self._stagger,
            "stride_per_rank": samples,
        }
        if self._order is None or stride == 0 or samples != [stride] * len(samples):
            return KJTAllToAllTensorsAwaitable(splits=self._splits, **known)
        of_features = [sum(counts) for counts in list(zip(*came, strict=True))[:-1]]
        return _Ids(self._order, of_features, **known)


class _Ids(KJTAllToAllTensorsAwaitable):
    """Lengths, ids and weights on their way, where all ranks have as many samples."""

    def __init__(self, order: Tensor, length_per_key: list[int], **known: Any) -> None:
        """
        Args:
            order: of the features that come.
            length_per_key: ids of each feature, from all ranks.
            known: what TorchRec's takes.
        """
        # Told of no features, TorchRec's does not make the order anew.
        super().__init__(splits=[0] * known["pg"].size(), **known)
        self._recat = order
        self._length_per_key = length_per_key

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._awaitables:
            work.wait()
        lengths, values, *weights = self._output_tensors
        samples = self._stride_per_rank
        lengths, values, weight = torch.ops.fbgemm.permute_2D_sparse_data(
            self._recat,
            lengths.view(-1, samples[0]),
            values,
            weights[0] if weights else None,
            values.numel(),
        )
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weight,
            lengths=lengths.flatten(),
            stride=sum(samples),
            length_per_key=self._length_per_key,
            offset_per_key=[0, *itertools.accumulate(self._length_per_key)],
        )
