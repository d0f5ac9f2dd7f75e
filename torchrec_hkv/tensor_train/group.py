"""Tensor-Train tables that are looked up and trained in one call."""

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
# Resolved once: each call of a small batch would look for the overload again.
_lookup = _ops.tt_lookup.default
_lookup_fused = _ops.tt_lookup_fused.default
CORE_DTYPES = (torch.float32, torch.bfloat16)

#: Of products on a GPU: as accurate as float32, or of operands rounded to tf32.
Precision = Literal["fp32", "tf32"]


def _check_feature_tables(feature_tables: object) -> None:
    if not is_sequence(feature_tables) or not all(
        isinstance(table, int) and not isinstance(table, bool) for table in feature_tables
    ):
        raise TypeError(
            f"feature_tables are {feature_tables!r}, but must be a sequence of integers."
        )


def check_precision(precision: object) -> None:
    """Refuses what is no precision.

    Raises:
        ValueError: it is not ``"fp32"`` or ``"tf32"``.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}, but must be 'fp32' or 'tf32'.")


class Pooling(TypedDict, total=False):
    """How the rows of a batch are pooled: keyword arguments of a lookup.

    Attributes:
        weights: float32 ``[n]``, of pooled rows; by default None.
        mean: divides a pooled sum by the number of ids of its bag; by default False.
        pooled: False: a row an id, where all tables have the same dim; by default True.
    """

    weights: Tensor | None
    mean: bool
    pooled: bool


class SortedPooling(Pooling, total=False):
    """The same, of a batch that may have been sorted ahead.

    Attributes:
        index: what :meth:`TTGroup.sort` gave for this batch; by default None: it is made then.
    """

    index: Tensor | None


class TTGroup:
    """What a group of Tensor-Train tables is; their cores are the caller's tensors.

    Tables may differ in every number of their shapes. Cores are handed over as one flat list, table
    after table, each of :meth:`TTShape.core_shape` (or of any shape with these elements in this
    order), all float32 or all bfloat16. Arithmetic and gradients of outputs are float32.

    Args:
        shapes: of the tables.
        feature_tables: for each feature, in the order of the output's columns, its table's index;
            by default one feature a table.
        optimizer: what :meth:`lookup_fused` trains with, one of
            :mod:`torchrec_hkv.hash_table.optimizers` but LAMB. Where it says row, a slice of a
            core is meant: row-wise Adagrad has one sum of squares for each slice ``i_k`` of each
            core.
        names: of the tables, for messages.
        precision: of products on a GPU. ``"fp32"``: three tensor core products of operands that
            are split in two, within 1e-5 of float64. ``"tf32"``: one, of operands rounded to tf32,
            within 1e-3; a CPU refuses it.
        strict: ids outside of their tables are refused on a GPU too, as a CPU always does. Each
            batch waits for the device, and can't be captured in a CUDA graph.

    Raises:
        TypeError: shapes, feature_tables or names are of another type.
        ValueError: an argument is impossible; the sentence names it.
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
        # The extension's object is not copied: a copy makes its own.
        named = (self.shapes, self.feature_tables, self.optimizer, self.names)
        return (TTGroup, (*named, self.precision, self.strict))

    @property
    def handle(self) -> int:
        """The number that names this group in ops."""
        return self._group.handle

    @property
    def total_dim(self) -> int:
        """Columns of the pooled output."""
        return self._group.total_dim

    @property
    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        """Of all cores, table after table."""
        return [shape for table in self.shapes for shape in table.core_shapes]

    def cores_of(self, table: int) -> slice:
        """Where a table's cores are in the flat list."""
        first = sum(shape.num_cores for shape in self.shapes[:table])
        return slice(first, first + self.shapes[table].num_cores)

    def make_states(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Optimizer states at the start: for each core float32 ``[p_k, width]`` zeros, where width
        is ``optimizer.state_width`` of its slices' size."""
        width = (lambda size: 0) if self.optimizer is None else self.optimizer.state_width
        return [
            torch.zeros(shape.p[k], width(shape.slice_size(k)), device=device)
            for shape in self.shapes
            for k in range(shape.num_cores)
        ]

    def outside(self, device: torch.device | str) -> int:
        """Ids outside of their tables that were sorted on this GPU so far (waits for it).

        Their rows are zeros and they have no gradient. 0 of a CPU, which refuses them.
        """
        return self._group.outside(torch.device(device))

    def refuse_outside(self, ids: Tensor, offsets: Tensor, batch_size: int) -> None:
        """Refuses a batch with ids outside of their tables, on any device (waits for it).

        Args:
            ids: as :meth:`sort` takes them.
            offsets: likewise.
            batch_size: likewise.

        Raises:
            ValueError: naming the table and the first of these ids.
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
        """Sorts a batch by slices: made once, for lookup and backward.

        On a GPU the result is of these weights, mean and pooled: the lookup takes the same ones.

        Args:
            ids: int64 ``[n]``, feature-major; of a table, 0 to ``num_embeddings - 1``.
            offsets: int64 ``[features * batch_size + 1]`` into ``ids``.
            batch_size: bags a feature.
            weights: as :class:`Pooling` says.
            mean: likewise.
            pooled: likewise.

        Returns:
            An opaque int64 tensor.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: a length or device is not as above; on a CPU also ids outside of their
                table, and offsets that decrease or do not end with ``n``; of a strict group ids
                outside of their table on a GPU too.
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
        """Rows of ids, pooled by bag; differentiable in the cores and in the weights.

        Args:
            cores: of all tables.
            ids: as :meth:`sort` takes them.
            offsets: likewise.
            batch_size: likewise.
            pooling: see there.

        Returns:
            float32 ``[batch_size, total_dim]``, zeros for empty bags; unpooled ``[n, dim]``.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: as :meth:`sort`, and a core, weights or index of another size.
        """
        batch = self._looked_up(ids, offsets, batch_size, **pooling)
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
        """As :meth:`lookup`; the backward applies the optimizer and returns no core gradients.

        Only slices that occur in the batch change. The gradient is of the cores as they are at the
        time of the backward, and so are the learning rate and the step.

        Args:
            anchor: any float tensor that requires grad, so that autograd records the call. Without
                elements it is no input of the graph, which saves the backward a step.
            cores: as in :meth:`lookup`; written by the backward.
            states: as :meth:`make_states` gives them; written by the backward.
            step: int64 ``[1]``, updates so far; the backward counts it on.
            ids: as in :meth:`lookup`.
            offsets: likewise.
            batch_size: likewise.
            learning_rate: float32 ``[]``.
            pooling: likewise; weights may require grad.
        """
        batch = self._looked_up(ids, offsets, batch_size, **pooling)
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
        """Gradients of the cores from that of a lookup's output, of the cores' dtype and shape."""
        batch = self._sorted(ids, offsets, batch_size, **pooling)
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
            float32 ``[elements + slices]``: the gradients of all cores, one after the other, and
            then for each slice of each core 1 where it took part in the batch, else 0.
        """
        batch = self._sorted(ids, offsets, batch_size, **pooling)
        return _ops.tt_flat_gradients(list(cores), self.handle, grad, *batch)

    def apply_gradients(
        self,
        cores: Sequence[Tensor],
        states: Sequence[Tensor],
        step: Tensor,
        gradients: Tensor,
        learning_rate: Tensor,
    ) -> None:
        """Applies the optimizer to the slices that took part, as the backward of
        :meth:`lookup_fused` does.

        Args:
            cores: of all tables; written.
            states: as :meth:`make_states` gives them; written.
            step: int64 ``[1]``; counted on.
            gradients: as :meth:`flat_gradients` gives them, or a sum of such, scaled or not.
                Slices whose flag is not above 0 stay.
            learning_rate: float32 ``[]``.

        Raises:
            TypeError: a dtype is not as above.
            ValueError: a tensor of another size, or a group without an optimizer.
        """
        _ops.tt_apply_gradients(
            list(cores), list(states), step, self.handle, gradients, learning_rate
        )

    def _refuse_if_strict(self, ids: Tensor, offsets: Tensor, batch_size: int) -> None:
        """Of a batch on a GPU; a CPU's sort refuses by itself."""
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
        """What ops are told of a batch, in their order. Lookups sort it where there is no index."""
        return ids, offsets, weights, index, batch_size, mean, pooled

    def _looked_up(
        self, ids: Tensor, offsets: Tensor, batch_size: int, **pooling: Unpack[SortedPooling]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, bool, bool]:
        """The same for lookups, once it is known that a strict group takes it."""
        if self.strict and pooling.get("index") is None:
            self._refuse_if_strict(ids, offsets, batch_size)
        return self._batch(ids, offsets, batch_size, **pooling)

    def _sorted(
        self, ids: Tensor, offsets: Tensor, batch_size: int, **pooling: Unpack[SortedPooling]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int, bool, bool]:
        """The same for ops that need an index."""
        *before, weights, index, _, mean, pooled = self._batch(ids, offsets, batch_size, **pooling)
        if index is None:
            index = self.sort(*before, batch_size, weights=weights, mean=mean, pooled=pooled)
        return ids, offsets, weights, index, batch_size, mean, pooled
