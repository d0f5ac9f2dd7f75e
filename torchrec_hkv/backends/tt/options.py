"""Options of a ``tt`` table."""

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
_MAX = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class TTOptions(BackendOptions):
    """Options of a ``tt`` table. Its ids are row numbers, 0 to ``num_embeddings - 1``.

    Attributes:
        ranks: ranks between neighbouring cores. A single number is used for all, and reduced where
            the table is too small for it. None, without ``compression_ratio`` and ``max_bytes``:
            32, or the largest ranks that fit into memory, chosen by the planner, if the table's
            constraint leaves the kernel open.
        compression_ratio: minimal ratio of the table's elements to those of the cores; at least 1.
        max_bytes: maximal bytes of the cores.
        p: row factors; their product is at least ``num_embeddings``. None: balanced factors.
        q: column factors; their product is ``embedding_dim``. None: balanced factors.
        num_cores: 2, 3 or 4. None: the number that the factors or ranks imply, else 3.
        weight_dist: distribution of the initial cores, see
            :func:`torchrec_hkv.tensor_train.initial_cores`. Entries of the table have the mean and
            variance of the uniform distribution between the config's ``weight_init_min`` and
            ``weight_init_max``.
        seed: seed of the initial cores, mixed with the table's name; any int64.
        precision: precision of products on a GPU, ``"fp32"`` or ``"tf32"``, see
            :class:`torchrec_hkv.tensor_train.TTGroup`. All tables that are looked up together use
            ``"fp32"`` if one of them asks for it.
        strict: True: ids outside the table raise on a GPU, too; each step then waits for the GPU.
            False: on a GPU such ids have rows of zeros and are counted. On a CPU they always
            raise. All tables that are looked up together are strict if one of them is.
        cache_size: number of rows in the cache. It keeps the rows of the most frequent ids
            decompressed and trains them as rows (docs/concepts/tensor_train.md). 0: no cache. On
            a GPU, lookups of tables with a cache wait for the device.
        cache_counted_ids: number of ids whose frequencies are counted. None: four times
            ``cache_size``.
        cache_populate_every: number of training forwards between two selections of the cached
            rows. None: they are only selected by :func:`torchrec_hkv.sharding.populate_caches`.
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
        check_range("TTOptions", "seed", self.seed, -(1 << 63), _MAX)
        self._check_cache()

    def _check_cache(self) -> None:
        check_range("TTOptions", "cache_size", self.cache_size, 0, _MAX)
        for name, minimum in (("cache_counted_ids", self.cache_size), ("cache_populate_every", 1)):
            value = getattr(self, name)
            if value is not None and not self.cache_size:
                raise ValueError(
                    f"TTOptions: {name} is {value!r}, but cache_size is 0: give a cache_size or "
                    "leave it out."
                )
            check_range("TTOptions", name, value, minimum, _MAX, or_none=True)

    @property
    def cache(self) -> CacheSize | None:
        """The size of the cache; None without a cache."""
        if not self.cache_size:
            return None
        counted = self.cache_counted_ids or 4 * self.cache_size
        return CacheSize(self.cache_size, counted, self.cache_populate_every)

    @property
    def leaves_ranks_open(self) -> bool:
        """Whether no option fixes the size of the cores."""
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
