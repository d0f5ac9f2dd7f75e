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
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable

from torchrec_hkv.once_differentiable import once_differentiable
from torchrec_hkv.sharding.all_to_all import Ready

_MESSAGE = (
    "The gradients of sharded embeddings can't be differentiated: they end at the exchange between "
    "ranks."
)


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """TorchRec's but for gradients, where ranks have equal batches and send what they have.

    A wire dtype, batches of different sizes and collectives that a compiler sees are TorchRec's.
    """

    def __init__(self, pg: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        """
        Args:
            pg: the ranks.
            args: TorchRec's.
            kwargs: TorchRec's.
        """
        super().__init__(pg, *args, **kwargs)
        self._is_alone = pg.size() == 1

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """As TorchRec has it."""
        if self._is_alone:
            return Ready(local_embs)
        if self._codecs is None and self._is_even(sharding_ctx):
            return _Exchange(self._pg, local_embs)
        return super().forward(local_embs, sharding_ctx)

    def _is_even(self, context: EmbeddingShardingContext | None) -> bool:
        if get_use_sync_collectives() or torch.compiler.is_compiling():
            return False
        if context is None:
            return True
        return not context.variable_batch_per_feature and len(set(context.batch_size_per_rank)) <= 1


class _Exchange(Awaitable[Tensor]):
    """Sums of all ranks' rows under way, and in the backward their gradients."""

    def __init__(self, pg: dist.ProcessGroup, local_embs: Tensor) -> None:
        super().__init__()
        self._pg, self._ranks = pg, pg.size()
        self._is_on_cpu = local_embs.device.type == "cpu"
        #: Under way, and where it arrives.
        self._work: dist.Work | None = None
        self._arriving: Tensor | None = None
        # What autograd sees between what is sent and what arrives.
        self._sent: Tensor | None = _Send.apply(self, local_embs)

    def _wait_impl(self) -> Tensor:
        out = _Receive.apply(self, self._sent)
        self._sent = None
        if out.device.type == "cuda":  # it may be another stream that waits
            out.record_stream(torch.cuda.current_stream(out.device))
        return out

    def wait(self) -> Tensor:
        """The sums. TorchRec's draws an interval for profilers, which takes longer."""
        out = self._wait_impl()
        for callback in self._callbacks:
            out = callback(out)
        return out

    def begin_sums(self, rows: Tensor) -> None:
        """Sends each rank its part of these rows."""
        if self._is_on_cpu:
            self._send_parts(rows.contiguous())
            return
        self._arriving = rows.new_empty(rows.shape[0] // self._ranks, rows.shape[1])
        self._work = dist.reduce_scatter_tensor(
            self._arriving, rows.contiguous(), group=self._pg, async_op=True
        )

    def sums(self) -> Tensor:
        """This rank's part, the sum of what all ranks have sent."""
        arrived = self._arrived()
        if not self._is_on_cpu:
            return arrived
        return arrived.view(self._ranks, -1, arrived.shape[1]).sum(0)

    def begin_gradients(self, grad: Tensor) -> None:
        """Sends all ranks the gradient of this rank's part."""
        rows, dim = grad.shape
        own = grad / self._ranks if get_gradient_division() else grad
        if self._is_on_cpu:
            self._send_parts(own.expand(self._ranks, rows, dim).reshape(-1, dim))
            return
        self._arriving = grad.new_empty(rows * self._ranks, dim)
        self._work = dist.all_gather_into_tensor(
            self._arriving, own.contiguous(), group=self._pg, async_op=True
        )

    def _send_parts(self, rows: Tensor) -> None:
        """To each rank as many of these rows, by a collective that gloo has at a third of the
        processor time of its reduce_scatter, and two thirds of its all_gather."""
        self._arriving = torch.empty_like(rows)
        self._work = dist.all_to_all_single(self._arriving, rows, group=self._pg, async_op=True)

    def gradients(self) -> Tensor:
        """Those of the rows of all ranks."""
        return self._arrived()

    def _arrived(self) -> Tensor:
        """What was under way; the current stream waits for it, and on a CPU the host."""
        arrived, self._arriving = self._arriving, None
        self._work.wait()
        self._work = None
        return arrived


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, local_embs: Tensor) -> Tensor:
        exchange.begin_sums(local_embs)
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
        return exchange.sums()

    @staticmethod
    @once_differentiable(_MESSAGE, linear=True)
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.begin_gradients(grad)
        return None, grad.new_empty(0)
