"""CUDA stream order of input distribution, lookup and outputs in train pipelines."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


class BagContext(EmbeddingBagCollectionContext):
    """TorchRec's context, with the CUDA stream of the batch's input distribution."""

    exchanged_on: torch.cuda.Stream | None = None


class SequenceContext(EmbeddingCollectionContext):
    """TorchRec's context, with the CUDA stream of the batch's input distribution."""

    exchanged_on: torch.cuda.Stream | None = None


class FollowsExchange:
    """Orders input distribution, lookup and consumer of the outputs on the device; a mixin before
    TorchRec's sharded collections.

    Some of TorchRec's pipelines run them on different streams with missing dependencies. The
    semi-synchronous pipeline may look up ids that have not arrived. The pipeline that overlaps
    lookups with the optimizer may reuse the memory of outputs before they have been read.
    """

    _device: torch.device | None

    def input_dist(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Starts the input distribution, and records its stream."""
        self._note_stream(ctx)
        return super().input_dist(ctx, *args, **kwargs)  # type: ignore[misc]

    def _note_stream(self, ctx: Any) -> None:
        """Records the stream of an input distribution. Pipelines finish it on the same stream."""
        if self._device is not None and self._device.type == "cuda":
            ctx.exchanged_on = torch.cuda.current_stream(self._device)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        """Looks up a batch and starts its output distribution, after its ids have arrived."""
        # The module that contains this one may pass TorchRec's own context.
        exchanged_on = getattr(ctx, "exchanged_on", None)
        if exchanged_on is None:
            return super().compute_and_output_dist(ctx, input)  # type: ignore[misc]
        current = torch.cuda.current_stream(self._device)
        if current != exchanged_on:
            current.wait_stream(exchanged_on)
            input.record_stream(current)
            ctx.record_stream(current)
        outputs = super().compute_and_output_dist(ctx, input)  # type: ignore[misc]
        outputs.callbacks.append(functools.partial(_taken, looked_up_on=current))
        return outputs


def _taken(
    outputs: KeyedTensor | dict[str, JaggedTensor], looked_up_on: torch.cuda.Stream
) -> KeyedTensor | dict[str, JaggedTensor]:
    """A callback on the stream that takes the outputs."""
    current = torch.cuda.current_stream(looked_up_on.device)
    if current != looked_up_on:
        for tensor in [outputs] if isinstance(outputs, KeyedTensor) else outputs.values():
            tensor.record_stream(current)
        # The inputs of the outputs are freed by now; the lookup's stream may reuse their memory.
        looked_up_on.wait_stream(current)
    return outputs
