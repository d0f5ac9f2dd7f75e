"""Initial cores whose table has a given mean and variance.

An entry of the table is a sum over paths, one per combination of ranks ``r_1 ... r_{d-1}``, of
products of one element of each core. If elements have mean 0, the terms are uncorrelated, and the
variance of an entry is the number of paths times the product of the cores' variances. A nonzero
mean uses a separate path, the first of every rank, with constant elements.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrec_hkv.tensor_train.shapes import TTShape

TTDistribution = Literal["uniform", "normal", "approx-uniform", "approx-normal"]


def initial_cores(
    shape: TTShape,
    distribution: TTDistribution = "approx-normal",
    *,
    mean: float = 0.0,
    std: float | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Draws random cores, such that entries of the table have a given mean and standard deviation.

    Args:
        shape: shape of the table.
        distribution: distribution of the cores' elements. ``"uniform"`` and ``"normal"``:
            independent and identical in every core; entries of the table then have heavier tails
            than a normal. ``"approx-normal"``: random signs in the outer cores and normal elements
            in an inner one, which makes entries normal (exactly for two and three cores, nearly for
            four). ``"approx-uniform"``: uniform elements in that core instead; entries are bounded
            but nearly normal, because a sum of many paths can't be uniform.
        mean: mean of the entries.
        std: standard deviation of the entries; None: ``(3 * num_embeddings) ** -0.5``, as under
            TorchRec's default, which is uniform between plus and minus ``num_embeddings ** -0.5``.
        generator: CPU generator of the random numbers; None for torch's default.
        device: device of the result.
        dtype: dtype of the result.

    Returns:
        The cores, each of :meth:`TTShape.core_shape`.

    Raises:
        TypeError: ``mean`` or ``std`` is not a number.
        ValueError: the distribution is unknown, ``mean`` or ``std`` is not finite, ``std`` is
            negative, or ``mean`` is not 0 although a rank is 1.
    """
    if distribution not in get_args(TTDistribution):
        raise ValueError(
            f"distribution is {distribution!r}, but must be one of "
            f"{', '.join(map(repr, get_args(TTDistribution)))}."
        )
    std = (3 * shape.num_embeddings) ** -0.5 if std is None else std
    for name, value in (("mean", mean), ("std", std)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is {value!r}, but must be a number.")
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(
            f"mean is {mean} and std is {std}, but both must be finite and std must "
            "not be negative."
        )
    if mean != 0 and min(shape.ranks) < 2:
        raise ValueError(
            f"mean is {mean} and ranks are {list(shape.ranks)}, but a mean other than 0 needs "
            "ranks of at least 2."
        )
    reserved = int(mean != 0)
    paths = math.prod(rank - reserved for rank in shape.ranks)
    # Equal variances of the cores' elements, so that no core is much larger than another.
    core_std = (std / math.sqrt(paths)) ** (1 / shape.num_cores)
    draw = _unit_draws(distribution, shape.num_cores, generator)
    cores = []
    for k in range(shape.num_cores):
        before, after = shape.full_ranks[k], shape.full_ranks[k + 1]
        core = draw(k, (shape.p[k], before, shape.q[k], after)) * core_std
        if reserved:
            core = _with_mean_path(core, k, shape.num_cores, mean)
        if k == shape.num_cores - 1:
            core = core.transpose(1, 2)
        cores.append(core.to(device=device, dtype=dtype).contiguous())
    return cores


def _unit_draws(
    distribution: str, num_cores: int, generator: torch.Generator | None
) -> Callable[[int, tuple[int, ...]], Tensor]:
    """Returns a function that draws elements with mean 0 and variance 1 for core k."""

    def uniform(size: tuple[int, ...]) -> Tensor:
        return (torch.rand(size, generator=generator) * 2 - 1) * math.sqrt(3)

    def normal(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator)

    def signs(size: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 2, size, generator=generator).float() * 2 - 1

    smooth = uniform if distribution.endswith("uniform") else normal
    approximate = distribution.startswith("approx")

    def draw(k: int, size: tuple[int, ...]) -> Tensor:
        # One inner core determines the distribution; with two cores, the last core.
        return smooth(size) if not approximate or k == max(1, num_cores - 2) else signs(size)

    return draw


def _with_mean_path(core: Tensor, k: int, num_cores: int, mean: float) -> Tensor:
    """Makes index 0 of every rank a separate path with the mean as its product."""
    if k > 0:
        core[:, 0] = 0
    if k < num_cores - 1:
        core[..., 0] = 0
    constant = abs(mean) ** (1 / num_cores) * (math.copysign(1, mean) if k == 0 else 1)
    core[:, 0, :, 0] = constant
    return core
