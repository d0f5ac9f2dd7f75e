"""Options of Tensor-Train tables as the planner's constraints give them."""

from __future__ import annotations

import dataclasses
import functools
from typing import get_args

from torchrec_hkv.backends.protocol import BackendOptions
from torchrec_hkv.backends.tt.caches import CacheSize
from torchrec_hkv.hash_table.spec_checks import check_flag, check_range
from torchrec_hkv.tensor_train import (
    Precision,
    TTDistribution,
    TTShape,
    check_precision,
    make_shape,
)
from torchrec_hkv.tensor_train.shape_arguments import SIZES, check_shape_arguments

_DEFAULT_RANK = 32
_MOST = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class TTOptions(BackendOptions):
    """Options of a ``tt`` table. Ids are row numbers, 0 to ``num_embeddings - 1``.

    Attributes:
        ranks: between neighbouring cores; one number for all is lowered where a table has no use
            for it. None, with neither ``compression_ratio`` nor ``max_bytes``: 32, or where the
            table's constraint leaves the kernel open, what the planner finds to be the largest
            ranks that fit.
        compression_ratio: the cores are at least so many times smaller than the table in elements;
            at least 1.
        max_bytes: the cores take at most so many bytes.
        p: row factors, of a product not below ``num_embeddings``; None: balanced ones.
        q: column factors, of the product ``embedding_dim``; None: balanced ones.
        num_cores: 2, 3 or 4; None: as factors or ranks say, else 3.
        weight_dist: distribution of the initial cores, see
            :func:`torchrec_hkv.tensor_train.initial_cores`. Entries of the table have the mean and
            variance of the uniform distribution between the config's ``weight_init_min`` and
            ``weight_init_max``.
        seed: of the initial cores, mixed with the table's name; any int64.
        precision: of products on a GPU, ``"fp32"`` or ``"tf32"``, see
            :class:`torchrec_hkv.tensor_train.TTGroup`. Tables that are looked up together are all
            in ``"fp32"`` where one of them asks for it.
        strict: ids outside of the table are refused on a GPU too, as a CPU always does; otherwise
            they are counted there, with rows of zeros. A step waits for the GPU then. Tables that
            are looked up together are all strict where one of them is.
        cache_size: rows of the most frequent ids that are kept decompressed, and trained as rows
            (docs/concepts/tensor_train.md); 0: none. On a GPU lookups of tables with a cache
            wait for it.
        cache_counted_ids: ids whose frequencies are known at a time; None: four times the cache.
        cache_populate_every: training forwards from one choice of these rows to the next; None:
            only by :func:`torchrec_hkv.sharding.populate_caches`.
    """

    ranks: int | tuple[int, ...] | None = None
    compression_ratio: float | None = None
    max_bytes: int | None = None
    p: tuple[int, ...] | None = None
    q: tuple[int, ...] | None = None
    num_cores: int | None = None
    weight_dist: TTDistribution = "approx-normal"
    seed: int = 0
    precision: Precision = "fp32"
    strict: bool = False
    cache_size: int = 0
    cache_counted_ids: int | None = None
    cache_populate_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "p", "q"):
            value = getattr(self, name)
            if isinstance(value, list):  # TorchRec hashes options
                object.__setattr__(self, name, tuple(value))
        if self.weight_dist not in get_args(TTDistribution):
            raise ValueError(
                f"TTOptions: weight_dist is {self.weight_dist!r}, but must be one of "
                f"{', '.join(map(repr, get_args(TTDistribution)))}."
            )
        try:
            check_precision(self.precision)
            check_shape_arguments(
                num_cores=self.num_cores,
                p=self.p,
                q=self.q,
                **{name: getattr(self, name) for name in SIZES},
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"TTOptions: {error}") from None
        check_flag("TTOptions", "strict", self.strict)
        check_range("TTOptions", "seed", self.seed, -(1 << 63), _MOST)
        self._check_cache()

    def _check_cache(self) -> None:
        check_range("TTOptions", "cache_size", self.cache_size, 0, _MOST)
        for name, least in (("cache_counted_ids", self.cache_size), ("cache_populate_every", 1)):
            value = getattr(self, name)
            if value is not None and not self.cache_size:
                raise ValueError(
                    f"TTOptions: {name} is {value!r}, but cache_size is 0: give a cache_size or "
                    "leave it out."
                )
            check_range("TTOptions", name, value, least, _MOST, or_none=True)

    @property
    def cache(self) -> CacheSize | None:
        """The cache; None without one."""
        if not self.cache_size:
            return None
        counted = self.cache_counted_ids or 4 * self.cache_size
        return CacheSize(self.cache_size, counted, self.cache_populate_every)

    @property
    def leaves_ranks_open(self) -> bool:
        """Whether nothing says how large the cores are."""
        return all(getattr(self, name) is None for name in SIZES)

    def shape(self, num_embeddings: int, embedding_dim: int, element_size: int = 4) -> TTShape:
        """The shape of a table with these options.

        Raises:
            ValueError: the options do not fit the table.
        """
        return _shape(self, num_embeddings, embedding_dim, element_size)


@functools.lru_cache(1 << 14)
def _shape(
    options: TTOptions, num_embeddings: int, embedding_dim: int, element_size: int
) -> TTShape:
    sizes = {name: getattr(options, name) for name in SIZES}
    if options.leaves_ranks_open:
        sizes["ranks"] = _DEFAULT_RANK
    return make_shape(
        num_embeddings,
        embedding_dim,
        num_cores=options.num_cores,
        p=options.p,
        q=options.q,
        element_size=element_size,
        **sizes,
    )
