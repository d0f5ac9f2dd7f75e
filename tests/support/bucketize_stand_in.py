"""``torch.ops.torchrec_hkv.bucketize`` in plain torch, where the extension is not built."""

from __future__ import annotations

import torch


def bucketize(
    lengths: torch.Tensor,
    values: torch.Tensor,
    block_sizes: torch.Tensor,
    world_size: int,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`torchrec_hkv.sharding.input_dist.bucketize`."""
    bags = lengths.numel()
    batch = bags // block_sizes.numel()
    bag = torch.repeat_interleave(torch.arange(bags, device=values.device), lengths.long())
    blocks = block_sizes[bag // batch]
    is_hashed = blocks == 0
    blocks = blocks.masked_fill(is_hashed, 1)
    rank = torch.where(is_hashed, owner_rank(values, world_size), values // blocks)
    local = torch.where(is_hashed, values, values % blocks)
    order = torch.argsort(rank * bags + bag, stable=True)
    new_lengths = torch.bincount(rank * bags + bag, minlength=world_size * bags)
    permute = torch.empty_like(order)
    permute[order] = torch.arange(order.numel(), device=values.device)
    new_weights = values.new_empty(0, dtype=torch.float32) if weights is None else weights[order]
    return new_lengths.to(lengths.dtype), local[order], new_weights, permute


def owner_rank(ids: torch.Tensor, world_size: int) -> torch.Tensor:
    """A hash's top 16 bits, in contiguous ranges of ranks."""
    mixed = ids
    for factor in (-49064778989728563, -4265267296055464877):
        mixed = (mixed ^ ((mixed >> 33) & ((1 << 31) - 1))) * factor
    mixed = mixed ^ ((mixed >> 33) & ((1 << 31) - 1))
    return (((mixed >> 48) & 0xFFFF) * world_size) >> 16


def install() -> None:
    """Defines the op unless the extension has."""
    if hasattr(torch.ops.torchrec_hkv, "bucketize"):
        return
    library = torch.library.Library("torchrec_hkv", "FRAGMENT")
    library.define(
        "bucketize(Tensor lengths, Tensor values, Tensor block_sizes, int world_size, "
        "Tensor? weights) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("bucketize", bucketize, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
