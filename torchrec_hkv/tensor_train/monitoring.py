"""Statistics of Tensor-Train tables in training: effective ranks, norms of rows and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.dense import rows_of
from torchrec_hkv.tensor_train.group import TTGroup
from torchrec_hkv.tensor_train.shapes import TTShape


def singular_values(shape: TTShape, cores: Sequence[Tensor]) -> list[Tensor]:
    """Singular values of the table's unfoldings, one tensor per rank, largest first.

    They depend on the table (with its padding rows), but not on the choice of its cores. They are
    computed in float64 from the Gram matrices of the cores left and right of the rank.
    """
    as_matrices = [_unfold(core.detach().double(), k, shape) for k, core in enumerate(cores)]
    lefts = [torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)]
    for matrices in as_matrices[:-1]:  # [slices, r, r']
        lefts.append(torch.einsum("ab,iac,ibd->cd", lefts[-1], matrices, matrices))
    rights = [torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)]
    for matrices in reversed(as_matrices[1:]):
        rights.append(torch.einsum("cd,iac,ibd->ab", rights[-1], matrices, matrices))
    values = []
    for left, right in zip(lefts[1:], reversed(rights[1:]), strict=True):
        # Eigenvalues of left @ right, computed from a symmetric matrix with the same eigenvalues.
        of_left, vectors = torch.linalg.eigh(left)
        root = vectors * of_left.clamp(min=0).sqrt()
        squares = torch.linalg.eigvalsh(root.T @ right @ root)
        values.append(squares.flip(0).clamp(min=0).sqrt())
    return values


def effective_ranks(shape: TTShape, cores: Sequence[Tensor]) -> list[float]:
    """The effective rank between each pair of neighbouring cores, from 1 to the rank.

    It is the exponential of the entropy of the squared singular values, as shares of their sum (Roy
    and Vetterli 2007); 0 for a table of zeros.
    """
    ranks = []
    for values in singular_values(shape, cores):
        squares = values.square()
        total = squares.sum()
        if total <= 0:
            ranks.append(0.0)
            continue
        shares = squares / total
        ranks.append(float(torch.special.entr(shares).sum().exp()))
    return ranks


@dataclasses.dataclass(frozen=True)
class NormHistogram:
    """A histogram of the norms of sampled rows.

    Attributes:
        counts: int64 ``[bins]``.
        edges: float32 ``[bins + 1]``.
        mean: mean norm.
        smallest: smallest norm.
        largest: largest norm.
    """

    counts: Tensor
    edges: Tensor
    mean: float
    smallest: float
    largest: float


def row_norms(
    shape: TTShape,
    cores: Sequence[Tensor],
    samples: int = 4096,
    bins: int = 32,
    generator: torch.Generator | None = None,
) -> NormHistogram:
    """Histogram of the norms of randomly sampled rows, from the smallest to the largest.

    Raises:
        ValueError: ``samples`` or ``bins`` is less than 1.
    """
    if samples < 1 or bins < 1:
        raise ValueError(f"samples is {samples} and bins is {bins}, but both must be at least 1.")
    ids = torch.randint(0, shape.num_embeddings, (samples,), generator=generator)
    norms = rows_of(shape, cores, ids.to(cores[0].device)).norm(dim=1).cpu()
    low, high = float(norms.min()), float(norms.max())
    edges = torch.linspace(low, high, bins + 1)
    counts = (
        torch.histc(norms, bins=bins, min=low, max=high) if high > low else norms.new_zeros(bins)
    )
    if high <= low:
        counts[0] = samples
    return NormHistogram(counts.long(), edges, float(norms.mean()), low, high)


def gradient_norms(
    group: TTGroup,
    cores: Sequence[Tensor],
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    batch_size: int,
    *,
    weights: Tensor | None = None,
    mean: bool = False,
) -> list[list[float]]:
    """The norm of each core's gradient, by table, given the gradient of a pooled output.

    Use it with fused updates, which do not keep gradients. It costs one more backward and
    synchronizes with the device.

    Args:
        group: the tables.
        cores: cores of all tables.
        grad: float32 ``[batch_size, total_dim]``.
        ids: see :meth:`TTGroup.sort`.
        offsets: see :meth:`TTGroup.sort`.
        batch_size: see :meth:`TTGroup.sort`.
        weights: see :class:`Pooling`.
        mean: see :class:`Pooling`.
    """
    gradients = group.gradients(cores, grad, ids, offsets, batch_size, weights=weights, mean=mean)
    return [
        [float(gradient.float().norm()) for gradient in gradients[group.cores_of(table)]]
        for table in range(len(group.shapes))
    ]


def _unfold(core: Tensor, k: int, shape: TTShape) -> Tensor:
    """``[p_k * q_k, r_k, r_{k+1}]``."""
    core = core.reshape(shape.core_shape(k))
    if k < shape.num_cores - 1:
        core = core.transpose(1, 2)
    return core.reshape(shape.p[k] * shape.q[k], *core.shape[2:])
