"""A Tensor-Train table as a replacement of ``nn.EmbeddingBag``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrec_hkv.hash_table.spec_checks import check_flag
from torchrec_hkv.nn.replicas import refuse_replicas
from torchrec_hkv.nn.tt_tables import (
    OptimType,
    TTTables,
    as_int64,
    check_eps,
    check_mode,
    check_optimizer_type,
)
from torchrec_hkv.tensor_train import Precision, TTDistribution, TTShape, make_shape, to_dense
from torchrec_hkv.tensor_train.fused_rows import check_hot_row_optimizer
from torchrec_hkv.tensor_train.hot_row_lookup import lookup_with_hot_rows
from torchrec_hkv.tensor_train.hot_rows import HotRows


class TTEmbeddingBag(nn.Module):
    """A Tensor-Train-compressed embedding table with pooling.

    The arguments have FBTT-Embedding's names. The module takes the inputs of ``nn.EmbeddingBag``:
    1-D ids with offsets, or 2-D ids, and ``per_sample_weights``.

    Args:
        num_embeddings: number of rows.
        embedding_dim: number of columns.
        tt_ranks: ranks, one per pair of neighbouring cores, or one number for all. None with
            ``compression_ratio`` or ``max_bytes``.
        tt_p_shapes: row factors; their product is at least ``num_embeddings``. None: balanced
            factors.
        tt_q_shapes: column factors; their product is ``embedding_dim``. None: balanced factors.
        sparse: True: the backward updates the cores and returns no gradients of them. The loss must
            then not be scaled, for example by a ``GradScaler``. ``eval()`` freezes the cores, but
            ``requires_grad_(False)`` does not. False: cores and cached rows get gradients for any
            torch optimizer.
        optimizer: optimizer of the fused update.
        learning_rate: learning rate of the fused update.
        eps: added to the denominator of the fused Adagrads and Adam.
        use_cache: whether to keep the rows of the most frequent ids decompressed (see
            :meth:`cache_populate`).
        cache_size: number of rows in the cache.
        hashtbl_size: number of ids whose frequencies are counted. None: four times ``cache_size``.
        weight_dist: ``"uniform"``, ``"normal"``, ``"approx-uniform"`` or ``"approx-normal"``, see
            :func:`torchrec_hkv.tensor_train.initial_cores`. Entries of the table have mean 0 and
            the variance of the uniform distribution up to ``num_embeddings ** -0.5``.
        mode: ``"sum"`` or ``"mean"``.
        include_last_offset: whether offsets end with the number of ids, as in ``nn.EmbeddingBag``.
        cache_populate_every: number of training forwards after which a forward calls
            :meth:`cache_populate` itself. None: it never does.
        num_cores: 2, 3 or 4. None: the number that factors or ranks imply, else 3.
        compression_ratio: determines the ranks, see :func:`torchrec_hkv.tensor_train.make_shape`.
        max_bytes: determines the ranks, see :func:`torchrec_hkv.tensor_train.make_shape`.
        device: device of the cores.
        dtype: dtype of the cores, float32 or bfloat16.
        precision: precision of products on a GPU, ``"fp32"`` or ``"tf32"``, see
            :class:`torchrec_hkv.tensor_train.TTGroup`.
        strict: whether ids outside the table also raise on a GPU, see there.

    Raises:
        TypeError: a size is not an integer.
        ValueError: an argument has an invalid value; the message names it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: int | Sequence[int] | None = None,
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
        sparse: bool = True,
        optimizer: OptimType = OptimType.SGD,
        learning_rate: float = 0.1,
        eps: float = 1e-10,
        use_cache: bool = False,
        cache_size: int = 0,
        hashtbl_size: int | None = None,
        weight_dist: TTDistribution = "approx-normal",
        *,
        mode: str = "sum",
        include_last_offset: bool = False,
        cache_populate_every: int | None = None,
        num_cores: int | None = None,
        compression_ratio: float | None = None,
        max_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        precision: Precision = "fp32",
        strict: bool = False,
    ) -> None:
        super().__init__()
        check_mode(mode)
        check_optimizer_type(optimizer)
        check_eps(eps)
        for name, flag in (
            ("sparse", sparse),
            ("use_cache", use_cache),
            ("include_last_offset", include_last_offset),
        ):
            check_flag("TTEmbeddingBag", name, flag)
        shape = make_shape(
            num_embeddings,
            embedding_dim,
            num_cores=num_cores,
            p=tt_p_shapes,
            q=tt_q_shapes,
            ranks=tt_ranks,
            compression_ratio=compression_ratio,
            max_bytes=max_bytes,
            element_size=dtype.itemsize,
        )
        for name, size in (
            ("cache_size", cache_size),
            ("hashtbl_size", hashtbl_size),
            ("cache_populate_every", cache_populate_every),
        ):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
                raise TypeError(f"{name} is {size!r}, but must be an integer.")
        has_cache_arguments = (
            cache_size != 0 or hashtbl_size is not None or cache_populate_every is not None
        )
        if has_cache_arguments and not use_cache:
            raise ValueError(
                f"cache_size is {cache_size}, hashtbl_size {hashtbl_size} and cache_populate_every "
                f"{cache_populate_every}, but use_cache is False: leave them out, or set "
                "use_cache=True."
            )
        if cache_populate_every is not None and cache_populate_every < 1:
            raise ValueError(
                f"cache_populate_every is {cache_populate_every}, but must be None or at least 1."
            )
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.cache_populate_every = cache_populate_every
        self._forwards = 0
        fused = optimizer.optimizer(eps) if sparse else None
        self.tables = TTTables(
            [shape],
            optimizer=fused,
            learning_rate=learning_rate,
            weight_dist=weight_dist,
            device=device,
            dtype=dtype,
            precision=precision,
            strict=strict,
        )
        self.hot_rows: HotRows | None = None
        if use_cache:
            check_hot_row_optimizer(fused)
            counted = 4 * cache_size if hashtbl_size is None else hashtbl_size
            self.hot_rows = HotRows(shape, cache_size, counted, fused, device or "cpu")

    @property
    def shape(self) -> TTShape:
        """Factors and ranks. ``shape.padding`` is the number of rows that the factors add."""
        return self.tables.group.shapes[0]

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.shape.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Number of columns."""
        return self.shape.embedding_dim

    @property
    def tt_cores(self) -> nn.ParameterList:
        """The cores, each of :meth:`torchrec_hkv.tensor_train.TTShape.core_shape`."""
        return self.tables.tt_cores

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of later fused updates."""
        self.tables.set_learning_rate(learning_rate)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows of each bag.

        Args:
            input: int32 or int64 ids, 0 to ``num_embeddings - 1``: ``[n]``, or ``[bags, length]``.
            offsets: where bags begin in 1-D ids, ``[bags]``, or ``[bags + 1]`` with
                ``include_last_offset``; None for 2-D ids.
            per_sample_weights: float, of the shape of ``input``; multiplies each row.

        Returns:
            float32 ``[bags, embedding_dim]``; an empty bag is zeros. With ``mode="mean"`` the
            weighted sum is divided by the number of ids of the bag.

        Raises:
            TypeError: ids or offsets are not integers.
            ValueError: a shape is not as above. On a CPU also if an id is outside the table, or
                offsets do not begin with 0, decrease, or exceed the number of ids.
        """
        ids, offsets = self._bags(input, offsets)
        weights = None
        if per_sample_weights is not None:
            if per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights have shape {tuple(per_sample_weights.shape)}, but must "
                    f"have that of the input, {tuple(input.shape)}."
                )
            weights = per_sample_weights.reshape(-1).float().contiguous()
        mean = self.mode == "mean"
        if self.hot_rows is None:
            bags = offsets.numel() - 1
            return self.tables.lookup(ids, offsets, bags, weights=weights, mean=mean)
        if ids.device.type == "cpu":
            # Refuses bad ids before the cache counts them.
            self.tables.group.sort(ids, offsets, offsets.numel() - 1)
        elif self.tables.group.strict:
            self.tables.group.refuse_outside(ids, offsets, offsets.numel() - 1)
        return self._with_cache(self.hot_rows, ids, offsets, weights, mean)

    def _bags(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """1-D ids, and offsets that end with their number."""
        ids = as_int64("input", input)
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets were given, but 2-D input has a bag a row: leave it out.")
            bags, length = input.shape
            return ids.reshape(-1), torch.arange(bags + 1, device=ids.device) * length
        if input.dim() != 1:
            raise ValueError(f"input has shape {tuple(input.shape)}, but must be 1-D or 2-D.")
        if offsets is None:
            raise ValueError("offsets are missing: 1-D input needs them.")
        if offsets.dim() != 1:
            raise ValueError(f"offsets have shape {tuple(offsets.shape)}, but must be 1-D.")
        starts = as_int64("offsets", offsets)
        if self.include_last_offset:
            if starts.numel() == 0:
                raise ValueError("offsets are empty, but must end with the number of ids.")
            return ids, starts
        return ids, torch.cat([starts, starts.new_full((1,), ids.numel())])

    def _with_cache(
        self, hot: HotRows, ids: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool
    ) -> Tensor:
        if self.training and torch.is_grad_enabled():
            refuse_replicas(
                "caches, which each process fills with ids of its own,",
                "make the module with use_cache=False",
            )
            if self.cache_populate_every and self._forwards == self.cache_populate_every:
                self.cache_populate()
            self._forwards += 1
            hot.count(ids)
        return lookup_with_hot_rows(
            {0: hot},
            [0],
            [self.embedding_dim],
            ids,
            offsets,
            offsets.numel() - 1,
            weights,
            mean,
            self.tables.learning_rate,
            lambda ids, offsets, weights: self.tables.lookup(
                ids, offsets, offsets.numel() - 1, weights=weights
            ),
        )

    def cache_populate(self) -> None:
        """Fills the cache with the ids that occurred most often in training forwards.

        Rows that stay in the cache do not change. Rows that enter start from the values of the
        cores. When rows leave, the cores are fitted to them and to all other rows outside the
        cache, by squared errors weighted by frequency. Then all counts are halved. Synchronizes
        with the device.

        Raises:
            ValueError: the module has no cache.
        """
        self._cache().populate(list(self.tt_cores))
        self._forwards = 0

    @property
    def cache_hit_rate(self) -> float:
        """Share of the looked up ids that were in the cache, since :meth:`reset_cache_hit_rate`.
        Synchronizes with the device.

        Raises:
            ValueError: the module has no cache.
        """
        return self._cache().hit_rate

    def reset_cache_hit_rate(self) -> None:
        """Resets :attr:`cache_hit_rate`.

        Raises:
            ValueError: the module has no cache.
        """
        self._cache().tally.zero_()

    def _cache(self) -> HotRows:
        if self.hot_rows is None:
            raise ValueError("this TTEmbeddingBag has no cache: make it with use_cache=True.")
        return self.hot_rows

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The dense table, float32 ``[num_embeddings, embedding_dim]``, with cached rows from the
        cache."""
        table = to_dense(self.shape, self.tables.cores_of(0))
        if self.hot_rows is not None:
            used = self.hot_rows.ids < self.num_embeddings
            table[self.hot_rows.ids[used]] = self.hot_rows.rows[used]
        return table

    def extra_repr(self) -> str:
        shape = self.shape
        return (
            f"{shape.num_embeddings}, {shape.embedding_dim}, p={list(shape.p)}, q={list(shape.q)}, "
            f"ranks={list(shape.ranks)}, ratio={shape.compression_ratio:.4g}, mode={self.mode!r}"
        )
