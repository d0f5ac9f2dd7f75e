"""The order of a batch's exchange, lookup and outputs where a train pipeline has more streams."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


class BagContext(EmbeddingBagCollectionContext):
    """TorchRec's, and the stream that the batch is exchanged on, where that is a GPU's."""

    exchanged_on: torch.cuda.Stream | None = None


class SequenceContext(EmbeddingCollectionContext):
    """TorchRec's, and the stream that the batch is exchanged on, where that is a GPU's."""

    exchanged_on: torch.cuda.Stream | None = None


class FollowsExchange:
    """Puts the exchange of a batch, its lookup and what takes the outputs in order, on the device.

    Some of TorchRec's pipelines have these on different streams, and lack some of the order: the
    semi-synchronous one looks up ids that may not be there yet, and the one whose lookups run
    beside the optimizer lets the memory of outputs be written again before they have been read.

    A mixin, to stand before TorchRec's sharded collections.
    """

    _device: torch.device | None

    def input_dist(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """TorchRec's; notes the stream."""
        self._note_stream(ctx)
        return super().input_dist(ctx, *args, **kwargs)  # type: ignore[misc]

    def _note_stream(self, ctx: Any) -> None:
        """Notes the stream of an exchange: pipelines end one on the stream that it began on."""
        if self._device is not None and self._device.type == "cuda":
            ctx.exchanged_on = torch.cuda.current_stream(self._device)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> Any:
        """TorchRec's, once the batch is there."""
        # Modules around this one may bring TorchRec's own context.
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
    """Called on the stream that takes the outputs, once it has been given all that makes them."""
    current = torch.cuda.current_stream(looked_up_on.device)
    if current != looked_up_on:
        for tensor in [outputs] if isinstance(outputs, KeyedTensor) else outputs.values():
            tensor.record_stream(current)
        # What the outputs were made of is free by now, and the lookups' stream may have it next.
        looked_up_on.wait_stream(current)
    return outputs
