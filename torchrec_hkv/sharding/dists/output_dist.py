"""Output distribution: the exchange of pooled rows between ranks.

TorchRec divides gradients by the number of ranks after they have arrived from all ranks. In this
module, each rank divides its gradient before sending it, with the same result. Under row-wise
sharding it thus processes the rows of one rank instead of those of all ranks.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division, get_use_sync_collectives
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from torchrec_hkv.once_differentiable import once_differentiable
from torchrec_hkv.sharding.dists.awaitables import ReadyAwaitable, UnloggedAwaitable

_MESSAGE = (
    "Gradients of sharded embeddings can't be differentiated again, because the exchange between "
    "ranks does not support it: use first derivatives only."
)


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """TorchRec's output distribution for row-wise tables, faster for equal batches in full
    precision.

    TorchRec's own implementation handles wire dtypes, batch sizes that differ between ranks, and
    collectives under torch.compile.
    """

    def __init__(self, pg: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        """
        Args:
            pg: the ranks.
            args: further arguments of TorchRec's class.
            kwargs: keyword arguments of TorchRec's class.
        """
        super().__init__(pg, *args, **kwargs)
        self._is_alone = pg.size() == 1

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Starts the exchange, see TorchRec's class."""
        if self._is_alone:
            return ReadyAwaitable(local_embs)
        if self._codecs is None and _is_even(sharding_ctx):
            return _SumExchange(self._pg, local_embs)
        return super().forward(local_embs, sharding_ctx)


class TableWiseOutputDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Output distribution for whole tables or columns, in the cases of
    :class:`RowWiseOutputDist`."""

    def __init__(self, stock_dist: TwPooledEmbeddingDist) -> None:
        """
        Args:
            stock_dist: TorchRec's distribution, used in all other cases.
        """
        super().__init__()
        self._stock_dist = stock_dist
        self._pg = stock_dist._pg
        self._is_alone = self._pg.size() == 1
        self._dims = list(stock_dist._dim_sum_per_rank)
        self._callbacks = list(stock_dist._callbacks or ())
        self._is_plain = stock_dist._codecs is None

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Starts the exchange, see TorchRec's class."""
        if not self._is_plain or not _is_even(sharding_ctx):
            return self._stock_dist(local_embs, sharding_ctx)
        exchange: Awaitable[Tensor] = (
            ReadyAwaitable(local_embs)
            if self._is_alone
            else _ColumnExchange(self._pg, local_embs, self._dims)
        )
        exchange.callbacks.extend(self._callbacks)
        return exchange


def _is_even(context: EmbeddingShardingContext | None) -> bool:
    """Whether all ranks have the same batch size and may use asynchronous collectives."""
    if get_use_sync_collectives() or torch.compiler.is_compiling():
        return False
    if context is None:
        return True
    return not context.variable_batch_per_feature and len(set(context.batch_size_per_rank)) <= 1


class _Exchange(UnloggedAwaitable, Awaitable[Tensor]):
    """The exchange of pooled rows, and in the backward of their gradients."""

    def __init__(self, pg: dist.ProcessGroup, local_embs: Tensor) -> None:
        super().__init__()
        self._pg, self._ranks = pg, pg.size()
        #: The running collective, and its output.
        self._work: dist.Work | None = None
        self._arriving: Tensor | None = None
        # Connects sending and receiving in the autograd graph.
        self._sent: Tensor | None = _Send.apply(self, local_embs)

    def _wait_impl(self) -> Tensor:
        out = _Receive.apply(self, self._sent)
        self._sent = None
        if out.device.type == "cuda":  # the current stream may differ from the sending one
            out.record_stream(torch.cuda.current_stream(out.device))
        return out

    @abc.abstractmethod
    def begin_rows(self, rows: Tensor) -> None:
        """Starts sending each rank its part of the rows ``[ranks * samples, columns]``."""

    @abc.abstractmethod
    def rows(self) -> Tensor:
        """The received rows, ``[samples, columns]``."""

    @abc.abstractmethod
    def begin_gradients(self, grad: Tensor) -> None:
        """Starts sending the ranks the gradient of the received rows."""

    @abc.abstractmethod
    def gradients(self) -> Tensor:
        """The received gradient of the rows that this rank has sent."""

    def _arrived(self) -> Tensor:
        """The output of the collective. The current stream waits for it; on a CPU, the host."""
        arrived, self._arriving = self._arriving, None
        self._work.wait()
        self._work = None
        return arrived


class _SumExchange(_Exchange):
    """Row-wise exchange: each rank gets sums over ranks.

    On CPUs it uses gloo's all_to_all, which takes a third of the CPU time of gloo's reduce_scatter,
    and two thirds of that of its all_gather.
    """

    def begin_rows(self, rows: Tensor) -> None:
        if rows.device.type == "cpu":
            self._send_parts(rows.contiguous())
            return
        self._arriving = rows.new_empty(rows.shape[0] // self._ranks, rows.shape[1])
        self._work = dist.reduce_scatter_tensor(
            self._arriving, rows.contiguous(), group=self._pg, async_op=True
        )

    def rows(self) -> Tensor:
        arrived = self._arrived()
        if arrived.device.type == "cpu":
            return arrived.view(self._ranks, -1, arrived.shape[1]).sum(0)
        return arrived

    def begin_gradients(self, grad: Tensor) -> None:
        scaled = grad / self._ranks if get_gradient_division() else grad
        if grad.device.type == "cpu":
            self._send_parts(torch.cat([scaled] * self._ranks))
            return
        self._arriving = grad.new_empty(grad.shape[0] * self._ranks, grad.shape[1])
        self._work = dist.all_gather_into_tensor(
            self._arriving, scaled.contiguous(), group=self._pg, async_op=True
        )

    def gradients(self) -> Tensor:
        return self._arrived()

    def _send_parts(self, rows: Tensor) -> None:
        """Sends each rank an equal part of the rows."""
        self._arriving = torch.empty_like(rows)
        self._work = dist.all_to_all_single(self._arriving, rows, group=self._pg, async_op=True)


class _ColumnExchange(_Exchange):
    """Table-wise exchange: each rank gets columns of its samples from every rank."""

    def __init__(self, pg: dist.ProcessGroup, local_embs: Tensor, dims: Sequence[int]) -> None:
        self._dims = list(dims)
        self._shape = local_embs.shape
        self._samples = local_embs.shape[0] // pg.size()
        # Number of values received from each rank, and sent to each rank.
        self._receive_splits = [self._samples * dim for dim in dims]
        self._send_splits = [self._samples * local_embs.shape[1]] * pg.size()
        super().__init__(pg, local_embs)

    def begin_rows(self, rows: Tensor) -> None:
        self._send(rows.reshape(-1), self._send_splits, self._receive_splits)

    def rows(self) -> Tensor:
        return torch.cat(self._by_rank(self._arrived()), dim=1)

    def begin_gradients(self, grad: Tensor) -> None:
        flat = grad.new_empty(grad.numel())
        for to, part in zip(self._by_rank(flat), grad.split(self._dims, dim=1), strict=True):
            if get_gradient_division():
                torch.div(part, self._ranks, out=to)
            else:
                to.copy_(part)
        self._send(flat, self._receive_splits, self._send_splits)

    def gradients(self) -> Tensor:
        return self._arrived().view(self._shape)

    def _by_rank(self, flat: Tensor) -> list[Tensor]:
        """Views ``[samples, columns]`` of the values received from each rank."""
        return [
            part.view(self._samples, dim)
            for part, dim in zip(flat.split(self._receive_splits), self._dims, strict=True)
        ]

    def _send(self, values: Tensor, to: list[int], of: list[int]) -> None:
        self._arriving = values.new_empty(sum(of))
        self._work = dist.all_to_all_single(
            self._arriving,
            values,
            output_split_sizes=of,
            input_split_sizes=to,
            group=self._pg,
            async_op=True,
        )


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, local_embs: Tensor) -> Tensor:
        exchange.begin_rows(local_embs)
        ctx.exchange = exchange
        return local_embs.new_empty(0)

    @staticmethod
    @once_differentiable(_MESSAGE, linear=True)
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.gradients()


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, _: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.rows()

    @staticmethod
    @once_differentiable(_MESSAGE, linear=True)
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.begin_gradients(grad)
        return None, grad.new_empty(0)
