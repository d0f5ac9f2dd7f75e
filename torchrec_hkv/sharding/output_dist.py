"""The exchange of pooled rows of row-wise tables.

TorchRec gathers the gradients of all ranks and then divides them by the number of ranks: a pass
over as many rows as all ranks have. Here a rank divides its own before they are gathered, which
gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division, get_use_sync_collectives
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from torchrec_hkv.once_differentiable import once_differentiable

_MESSAGE = (
    "The gradients of sharded embeddings can't be differentiated: they end at the exchange between "
    "ranks."
)


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """TorchRec's but for gradients, where ranks have equal batches and send what they have.

    A wire dtype, batches of different sizes and collectives that a compiler sees are TorchRec's.
    """

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """As TorchRec has it."""
        if self._codecs is None and self._is_even(sharding_ctx):
            return PooledEmbeddingsAwaitable(_Exchange(self._pg, local_embs))
        return super().forward(local_embs, sharding_ctx)

    def _is_even(self, context: EmbeddingShardingContext | None) -> bool:
        if self._pg.size() == 1 or get_use_sync_collectives() or torch.compiler.is_compiling():
            return False
        if context is None:
            return True
        return not context.variable_batch_per_feature and len(set(context.batch_size_per_rank)) <= 1


class _Exchange(Awaitable[Tensor]):
    """Sums of all ranks' rows under way, and in the backward their gradients."""

    def __init__(self, pg: dist.ProcessGroup, local_embs: Tensor) -> None:
        super().__init__()
        self.pg = pg
        #: Under way, and where it arrives.
        self.work: dist.Work | None = None
        self.arriving: Tensor | None = None
        # What autograd sees between what is sent and what arrives.
        self._sent: Tensor | None = _Send.apply(self, local_embs)

    def _wait_impl(self) -> Tensor:
        out = _Receive.apply(self, self._sent)
        self._sent = None
        if out.device.type == "cuda":  # it may be another stream that waits
            out.record_stream(torch.cuda.current_stream(out.device))
        return out

    def arrived(self) -> Tensor:
        """What was under way; the current stream waits for it, and on a CPU the host."""
        arrived, self.arriving = self.arriving, None
        self.work.wait()
        self.work = None
        return arrived


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, local_embs: Tensor) -> Tensor:
        rows, dim = local_embs.shape
        exchange.arriving = local_embs.new_empty(rows // exchange.pg.size(), dim)
        exchange.work = dist.reduce_scatter_tensor(
            exchange.arriving, local_embs.contiguous(), group=exchange.pg, async_op=True
        )
        ctx.exchange = exchange
        return local_embs.new_empty(0)

    @staticmethod
    @once_differentiable(_MESSAGE, linear=True)
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.arrived()


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, _: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.arrived()

    @staticmethod
    @once_differentiable(_MESSAGE, linear=True)
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        exchange, (rows, dim) = ctx.exchange, grad.shape
        ranks = exchange.pg.size()
        own = (grad / ranks if get_gradient_division() else grad).contiguous()
        exchange.arriving = grad.new_empty(rows * ranks, dim)
        exchange.work = dist.all_gather_into_tensor(
            exchange.arriving, own, group=exchange.pg, async_op=True
        )
        return None, grad.new_empty(0)
