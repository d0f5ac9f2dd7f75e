"""CUDA stream order of input distribution, lookup and outputs in train pipelines.

Some of TorchRec's pipelines run these stages on different streams without the needed dependencies.
The semi-synchronous pipeline may look up ids that have not arrived. The pipeline that overlaps
lookups with the optimizer may reuse the memory of outputs before they have been read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor


class BagContext(EmbeddingBagCollectionContext):
    """TorchRec's context, with the CUDA stream of the batch's input distribution."""

    exchange_stream: torch.cuda.Stream | None = None


class SequenceContext(EmbeddingCollectionContext):
    """TorchRec's context, with the CUDA stream of the batch's input distribution."""

    exchange_stream: torch.cuda.Stream | None = None


def note_exchange(ctx: Any, device: torch.device | None) -> None:
    """Records the stream of a batch's input distribution, at its start. Pipelines finish it on the
    same stream.

    Args:
        ctx: context of the batch.
        device: device of the tables.
    """
    if device is not None and device.type == "cuda":
        ctx.exchange_stream = torch.cuda.current_stream(device)


def follow_exchange(
    ctx: Any, input: KJTList, device: torch.device | None
) -> torch.cuda.Stream | None:
    """Makes the current stream, on which a batch will be looked up, wait for the batch's ids.

    Args:
        ctx: context of the batch.
        input: the ids.
        device: device of the tables.

    Returns:
        The current stream; None without a GPU.
    """
    # The module that contains this one may pass TorchRec's own context.
    exchange_stream = getattr(ctx, "exchange_stream", None)
    if exchange_stream is None:
        return None
    current = torch.cuda.current_stream(device)
    if current != exchange_stream:
        current.wait_stream(exchange_stream)
        input.record_stream(current)
        ctx.record_stream(current)
    return current


def follow_lookup(outputs: LazyAwaitable[Any], lookup_stream: torch.cuda.Stream | None) -> None:
    """Makes the stream that takes the outputs of a lookup wait for the lookup's stream.

    Args:
        outputs: the outputs.
        lookup_stream: result of :func:`follow_exchange`.
    """
    if lookup_stream is not None:
        outputs.callbacks.append(functools.partial(_record_stream, lookup_stream=lookup_stream))


def _record_stream(
    outputs: KeyedTensor | dict[str, JaggedTensor], lookup_stream: torch.cuda.Stream
) -> KeyedTensor | dict[str, JaggedTensor]:
    """A callback on the stream that takes the outputs."""
    current = torch.cuda.current_stream(lookup_stream.device)
    if current != lookup_stream:
        for tensor in [outputs] if isinstance(outputs, KeyedTensor) else outputs.values():
            tensor.record_stream(current)
        # The lookup's inputs are freed by now, and the lookup's stream may reuse their memory.
        lookup_stream.wait_stream(current)
    return outputs
