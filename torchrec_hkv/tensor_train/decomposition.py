"""Decomposes a dense table into cores: TT-SVD (Oseledets 2011), by ranks or by error."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.dense import dense_blocks
from torchrec_hkv.tensor_train.shape_arguments import check_shape_arguments
from torchrec_hkv.tensor_train.shapes import TTShape, factor_dim, factor_rows, max_ranks


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The result of :func:`tt_svd`.

    Attributes:
        shape: shape of the Tensor-Train table.
        cores: float32 cores, each of :meth:`TTShape.core_shape`, on the table's device.
        relative_error: Frobenius norm of (table - cores) over that of the table, measured with the
            float32 cores.
    """

    shape: TTShape
    cores: list[Tensor]
    relative_error: float


def tt_svd(
    table: Tensor,
    *,
    ranks: int | Sequence[int] | None = None,
    max_error: float | None = None,
    num_cores: int = 3,
    p: Sequence[int] | None = None,
    q: Sequence[int] | None = None,
) -> Decomposition:
    """Decomposes a dense table into cores.

    The unfoldings are split one after the other, by the eigenvectors of the smaller Gram matrix in
    float64. The squared error is at most the sum of the truncated parts, which is at most
    ``cores - 1`` times the squared error of the best cores of these ranks. Relative errors below
    about 1e-7 can't be reached.

    Args:
        table: ``[num_embeddings, embedding_dim]``, any float dtype. About three float64 copies are
            made.
        ranks: see :func:`torchrec_hkv.tensor_train.make_shape`.
        max_error: bound on the relative error (Frobenius norm), which determines the ranks; instead
            of ``ranks``.
        num_cores: 2, 3 or 4; used if neither ``p`` nor ``q`` is given.
        p: row factors; balanced by default.
        q: column factors; balanced by default.

    Raises:
        TypeError: the table is not a float tensor, or another argument has a wrong type.
        ValueError: the table does not have two dimensions, has values that are not finite, not
            exactly one of ``ranks`` and ``max_error`` is given, or numbers do not fit.
    """
    if not table.is_floating_point():
        raise TypeError(f"table is of dtype {table.dtype}, but must be of a float dtype.")
    if table.dim() != 2 or table.numel() == 0:
        raise ValueError(
            f"table has shape {tuple(table.shape)}, but must have two dimensions, none of them 0."
        )
    if (ranks is None) == (max_error is None):
        raise ValueError("tt_svd needs exactly one of ranks and max_error: give one of them.")
    if max_error is not None:
        if isinstance(max_error, bool) or not isinstance(max_error, numbers.Real):
            raise TypeError(f"max_error is {max_error!r}, but must be a number.")
        if not 0 <= max_error < math.inf:
            raise ValueError(f"max_error is {max_error}, but must be finite and not negative.")
    rows, dim = table.shape
    if p is not None or q is not None:
        num_cores = check_shape_arguments(p=p, q=q, ranks=ranks)
    else:
        check_shape_arguments(num_cores=num_cores, ranks=ranks)
    p = factor_rows(rows, num_cores) if p is None else tuple(p)
    q = factor_dim(dim, num_cores) if q is None else tuple(q)
    limits = max_ranks(p, q)
    if isinstance(ranks, int):
        ranks = [min(ranks, maximum) for maximum in limits]
    # Raises if the numbers do not fit.
    TTShape(rows, dim, p, q, tuple(limits if ranks is None else ranks))

    with torch.no_grad():
        rest = _unfolded(table.double(), p, q)
        norm = float(rest.norm())
        if not math.isfinite(norm):
            raise ValueError("table has values that are infinite or NaN, but all must be finite.")
        budget = None if max_error is None else (max_error * norm) ** 2 / (num_cores - 1)
        cores, before = [], 1
        for k in range(num_cores - 1):
            matrix = rest.reshape(before * p[k] * q[k], -1)
            max_rank = None if ranks is None else ranks[k]
            left, rest = _split(matrix, max_rank, budget)
            after = left.shape[1]
            core = left.reshape(before, p[k], q[k], after).transpose(0, 1)
            cores.append(core.float().contiguous())
            before = after
        last = rest.reshape(before, p[-1], q[-1], 1).permute(1, 2, 0, 3)
        cores.append(last.float().contiguous())
        shape = TTShape(rows, dim, p, q, tuple(core.shape[3] for core in cores[:-1]))
        # Balance the norms of the cores: the first cores are orthonormal, so the last core has the
        # whole norm.
        _balance(cores)
        squares = sum(
            float((table[first : first + block.shape[0]].double() - block).square().sum())
            for first, block in dense_blocks(shape, cores)
        )
    error = math.sqrt(squares) / norm if norm > 0 else math.sqrt(squares)
    return Decomposition(shape, cores, error)


def _unfolded(table: Tensor, p: Sequence[int], q: Sequence[int]) -> Tensor:
    """``[p_1, q_1, p_2, q_2, ...]``, padded with rows of zeros."""
    cores = len(p)
    padded = table.new_zeros(math.prod(p), table.shape[1])
    padded[: table.shape[0]] = table
    order = [axis for k in range(cores) for axis in (k, cores + k)]
    return padded.reshape(*p, *q).permute(order).contiguous()


def _split(matrix: Tensor, rank: int | None, budget: float | None) -> tuple[Tensor, Tensor]:
    """Splits a matrix into an orthonormal left and a right factor, of a given rank, or of the least
    rank that drops at most a budget."""
    rows, columns = matrix.shape
    gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if rank is None:
        # dropped[r]: squared error of rank r.
        dropped = torch.cat([values.flip(0).cumsum(0).flip(0), values.new_zeros(1)])
        rank = max(1, int((dropped > budget).sum()))
    vectors = vectors[:, :rank]
    if rows <= columns:
        return vectors, vectors.T @ matrix
    # left = matrix V / s. QR makes it orthonormal, even if the matrix is nearly singular.
    left, _ = torch.linalg.qr(matrix @ vectors)
    return left, left.T @ matrix


def _balance(cores: list[Tensor]) -> None:
    norms = [float(core.norm() / math.sqrt(core.numel())) for core in cores]
    if min(norms) <= 0:
        return
    mean = math.exp(sum(map(math.log, norms)) / len(norms))
    for core, norm in zip(cores, norms, strict=True):
        core.mul_(mean / norm)
