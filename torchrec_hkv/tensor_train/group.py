"""A group of Tensor-Train tables that are looked up and trained in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.hash_table.optimizers import Optimizer
from torchrec_hkv.hash_table.spec_checks import check_flag
from torchrec_hkv.tensor_train import ops
from torchrec_hkv.tensor_train.shape_arguments import is_sequence
from torchrec_hkv.tensor_train.shapes import TTShape
from torchrec_hkv.tensor_train.strict import refuse_ids_outside

__all__ = ["Precision", "TTGroup", "check_precision", "ops"]

_ops = torch.ops.torchrec_hkv
# Resolved once, because resolving the overload in each call is slow for small batches.
_lookup = _ops.tt_lookup.default
_lookup_fused = _ops.tt_lookup_fused.default
CORE_DTYPES = (torch.float32, torch.bfloat16)

#: Precision of products on a GPU: ``"fp32"``, or ``"tf32"`` with operands rounded to tf32.
Precision = Literal["fp32", "tf32"]


def _check_feature_tables(feature_tables: object) -> None:
    if not is_sequence(feature_tables) or not all(
        isinstance(table, int) and not isinstance(table, bool) for table in feature_tables
    ):
        raise TypeError(
            f"feature_tables are {feature_tables!r}, but must be a sequence of integers."
        )


def check_precision(precision: object) -> None:
    """Checks a precision.

    Raises:
        ValueError: ``precision`` is neither ``"fp32"`` nor ``"tf32"``.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}, but must be 'fp32' or 'tf32'.")


class Pooling(TypedDict, total=False):
    """How the rows of a batch are pooled: keyword arguments of a lookup.

    Attributes:
        weights: float32 ``[n]``, for pooled rows; None by default.
        mean: whether to divide a pooled sum by the number of ids in its bag; False by default.
        pooled: True by default. False: return a row per id; all tables must have the same dim.
    """

    weights: Tensor | None
    mean: bool
    pooled: bool


class SortedPooling(Pooling, total=False):
    """:class:`Pooling` for a batch that may be sorted already.

    Attributes:
        index: result of :meth:`TTGroup.sort` for this batch; None, the default, to sort it.
    """

    index: Tensor | None


class TTGroup:
    """A group of Tensor-Train tables. Their cores are tensors of the caller.

    The shapes of the tables may differ in any way. Cores are passed as one flat list, table after
    table, each of :meth:`TTShape.core_shape` (or of another shape with the same elements in the
    same order), all float32 or all bfloat16. Arithmetic and gradients of outputs are float32.

    Args:
        shapes: shapes of the tables.
        feature_tables: index of the table of each feature, in the order of the output's columns; by
            default one feature per table.
        optimizer: optimizer of :meth:`lookup_fused`: one of
            :mod:`torchrec_hkv.hash_table.optimizers` except LAMB. It treats a slice of a core like
            a row: row-wise Adagrad has one sum of squares for each slice ``i_k`` of each core.
        names: names of the tables in messages.
        precision: precision of products on a GPU. ``"fp32"``: three tensor core products with split
            operands, within 1e-5 of float64. ``"tf32"``: one product with operands rounded to tf32,
            within 1e-3; not allowed on a CPU.
        strict: True: ids outside their tables raise on a GPU, too. Each batch then synchronizes
            with the device, and can't be captured in a CUDA graph. On a CPU such ids always raise.

    Raises:
        TypeError: shapes, feature_tables or names have a wrong type.
        ValueError: an argument has an invalid value; the message names it.
    """

    def __init__(
        self,
        shapes: Sequence[TTShape],
        feature_tables: Sequence[int] | None = None,
        optimizer: Optimizer | None = None,
        names: Sequence[str] | None = None,
        precision: Precision = "fp32",
        strict: bool = False,
    ) -> None:
        check_precision(precision)
        check_flag("TTGroup", "strict", strict)
        if not is_sequence(shapes) or not all(isinstance(each, TTShape) for each in shapes):
            raise TypeError(f"shapes are {shapes!r}, but must be a sequence of TTShape.")
        if feature_tables is not None:
            _check_feature_tables(feature_tables)
        if names is not None and not (
            is_sequence(names) and all(isinstance(name, str) for name in names)
        ):
            raise TypeError(f"names are {names!r}, but must be a sequence of str.")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer is {optimizer!r}, but must be None or one of "
                "torchrec_hkv.hash_table.optimizers, such as SGD()."
            )
        self.shapes = tuple(shapes)
        self.optimizer = optimizer
        self.precision: Precision = precision
        self.strict = strict
        self.names = tuple(names or (f"table_{t}" for t in range(len(self.shapes))))
        self.feature_tables = tuple(
            range(len(self.shapes)) if feature_tables is None else feature_tables
        )
        self._group = _C.TensorTrainGroup(
            names=list(self.names),
            rows=[shape.num_embeddings for shape in self.shapes],
            p=[list(shape.p) for shape in self.shapes],
            q=[list(shape.q) for shape in self.shapes],
            ranks=[list(shape.ranks) for shape in self.shapes],
            feature_tables=list(self.feature_tables),
            optimizer=_C.OptimizerConfig(kind=_C.Optimizer.NONE)
            if optimizer is None
            else optimizer.config(),
            tf32=precision == "tf32",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The extension's object can't be copied: a copy creates its own.
        named = (self.shapes, self.feature_tables, self.optimizer, self.names)
        return (TTGroup, (*named, self.precision, self.strict))

    @property
    def handle(self) -> int:
        """The number that identifies this group in ops."""
        return self._group.handle

    @property
    def total_dim(self) -> int:
        """Number of columns of the pooled output."""
        return self._group.total_dim

    @property
    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        """Shapes of all cores, table after table."""
        return [shape for table in self.shapes for shape in table.core_shapes]

    def cores_of(self, table: int) -> slice:
        """The position of a table's cores in the flat list."""
        first = sum(shape.num_cores for shape in self.shapes[:table])
        return slice(first, first + self.shapes[table].num_cores)

    def make_states(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Creates initial optimizer states: zeros, for each core float32 ``[p_k, width]``, where
        width is ``optimizer.state_width`` of the size of its slices."""
        width = (lambda size: 0) if self.optimizer is None else self.optimizer.state_width
        return [
            torch.zeros(shape.p[k], width(shape.slice_size(k)), device=device)
            for shape in self.shapes
            for k in range(shape.num_cores)
        ]

    def outside(self, device: torch.device | str) -> int:
        """Number of ids outside their tables in batches on this GPU so far. Synchronizes with the
        GPU.

        Rows of such ids are zeros and have no gradient. Returns 0 for a CPU, where such ids raise.
        """
        return self._group.outside(torch.device(device))

    def refuse_outside(self, ids: Tensor, offsets: Tensor, batch_size: int) -> None:
        """Raises if a batch on any device has ids outside their tables. Synchronizes with the
        device.

        Args:
            ids: see :meth:`sort`.
            offsets: see :meth:`sort`.
            batch_size: see :meth:`sort`.

        Raises:
            ValueError: an id is outside its table; the message names the table and the first id.
        """
        rows = [shape.num_embeddings for shape in self.shapes]
        refuse_ids_outside(self.names, rows, self.feature_tables, ids, offsets, batch_size)

    def sort(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        *,
        weights: Tensor | None = None,
        mean: bool = False,
        pooled: bool = True,
    ) -> Tensor:
        """Sorts a batch by slices, for its lookup and backward.

        On a GPU the result depends on ``weights``, ``mean`` and ``pooled``: pass the same ones to
        the lookup.

        Args:
            ids: int64 ``[n]``, feature-major; 0 to ``num_embeddings - 1`` of their table.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``.
            batch_size: number of bags of each feature.
            weights: see :class:`Pooling`.
            mean: see :class:`Pooling`.
            pooled: see :class:`Pooling`.

        Returns:
            An opaque int64 tensor.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another length or device. On a CPU also if an id is outside
                its table, or offsets decrease or do not end with ``n``. In a strict group on a GPU
                also if an id is outside its table.
        """
        self._refuse_if_strict(ids, offsets, batch_size)
        weights = None if weights is None else weights.detach()
        return _ops.tt_sort(self.handle, ids, offsets, weights, batch_size, mean, pooled)

    def lookup(
        self,
        cores: Sequence[Tensor],
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        **pooling: Unpack[SortedPooling],
    ) -> Tensor:
        """Looks up rows, pooled by bag; differentiable in the cores and in the weights.

        Args:
            cores: cores of all tables.
            ids: see :meth:`sort`.
            offsets: see :meth:`sort`.
            batch_size: see :meth:`sort`.
            pooling: see :class:`SortedPooling`.

        Returns:
            float32 ``[batch_size, total_dim]``, zeros for empty bags; unpooled ``[n, dim]``.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: see :meth:`sort`; or a core, weights or index has another size.
        """
        batch = self._lookup_arguments(ids, offsets, batch_size, **pooling)
        return _lookup(list(cores), self.handle, *batch)

    def lookup_fused(
        self,
        anchor: Tensor,
        cores: Sequence[Tensor],
        states: Sequence[Tensor],
        step: Tensor,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        learning_rate: Tensor,
        **pooling: Unpack[SortedPooling],
    ) -> Tensor:
        """Looks up rows like :meth:`lookup`. The backward applies the optimizer and returns no
        gradients of cores.

        Only slices that occur in the batch change. The backward uses the values that cores,
        learning rate and step have when it runs.

        Args:
            anchor: a float tensor that requires grad, so that autograd records the call. If it is
                empty, it is not an input of the graph, which makes the backward faster.
            cores: see :meth:`lookup`; updated by the backward.
            states: see :meth:`make_states`; updated by the backward.
            step: int64 ``[1]``, number of updates so far; incremented by the backward.
            ids: see :meth:`sort`.
            offsets: see :meth:`sort`.
            batch_size: see :meth:`sort`.
            learning_rate: float32 ``[]``.
            pooling: see :class:`SortedPooling`; weights may require grad.
        """
        batch = self._lookup_arguments(ids, offsets, batch_size, **pooling)
        return _lookup_fused(anchor, cores, states, step, self.handle, *batch, learning_rate)

    def gradients(
        self,
        cores: Sequence[Tensor],
        grad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        **pooling: Unpack[SortedPooling],
    ) -> list[Tensor]:
        """Gradients of the cores, with their dtype and shape, from the gradient of a lookup's
        output."""
        batch = self._sorted_arguments(ids, offsets, batch_size, **pooling)
        return _ops.tt_gradients(list(cores), self.handle, grad, *batch)

    def flat_gradients(
        self,
        cores: Sequence[Tensor],
        grad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        **pooling: Unpack[SortedPooling],
    ) -> Tensor:
        """Gradients of the cores in one tensor that ranks can sum, for :meth:`apply_gradients`.

        Returns:
            float32 ``[elements + slices]``: the gradients of all cores, one after the other, then
            for each slice of each core 1 if it occurs in the batch, else 0.
        """
        batch = self._sorted_arguments(ids, offsets, batch_size, **pooling)
        return _ops.tt_flat_gradients(list(cores), self.handle, grad, *batch)

    def apply_gradients(
        self,
        cores: Sequence[Tensor],
        states: Sequence[Tensor],
        step: Tensor,
        gradients: Tensor,
        learning_rate: Tensor,
    ) -> None:
        """Applies the optimizer to the slices that occurred, like the backward of
        :meth:`lookup_fused`.

        Args:
            cores: cores of all tables; updated.
            states: see :meth:`make_states`; updated.
            step: int64 ``[1]``; incremented.
            gradients: result of :meth:`flat_gradients`, or a (scaled) sum of such results. Slices
                whose flag is not above 0 do not change.
            learning_rate: float32 ``[]``.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: a tensor has another size, or the group has no optimizer.
        """
        _ops.tt_apply_gradients(
            list(cores), list(states), step, self.handle, gradients, learning_rate
        )

    def _refuse_if_strict(self, ids: Tensor, offsets: Tensor, batch_size: int) -> None:
        """Checks a batch on a GPU in a strict group; on a CPU the sort checks it."""
        if self.strict and ids.is_cuda:
            self.refuse_outside(ids, offsets, batch_size)

    def _batch(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        *,
        weights: Tensor | None = None,
        mean: bool = False,
        pooled: bool = True,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, bool, bool]:
        """Arguments of ops for a batch, in their order. Lookups sort it if there is no index."""
        return ids, offsets, weights, index, batch_size, mean, pooled

    def _lookup_arguments(
        self, ids: Tensor, offsets: Tensor, batch_size: int, **pooling: Unpack[SortedPooling]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, bool, bool]:
        """:meth:`_batch` for lookups, after the check of strict groups."""
        if self.strict and pooling.get("index") is None:
            self._refuse_if_strict(ids, offsets, batch_size)
        return self._batch(ids, offsets, batch_size, **pooling)

    def _sorted_arguments(
        self, ids: Tensor, offsets: Tensor, batch_size: int, **pooling: Unpack[SortedPooling]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int, bool, bool]:
        """:meth:`_batch` for ops that need an index."""
        *before, weights, index, _, mean, pooled = self._batch(ids, offsets, batch_size, **pooling)
        if index is None:
            index = self.sort(*before, batch_size, weights=weights, mean=mean, pooled=pooled)
        return ids, offsets, weights, index, batch_size, mean, pooled
