"""The cores of Tensor-Train tables as parameters of a module, and their fused optimizer."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from torchrec_hkv.devices import checked_device
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_hkv.hash_table.spec_checks import check_flag
from torchrec_hkv.nn.replicas import refuse_replicas
from torchrec_hkv.tensor_train import (
    Pooling,
    Precision,
    TTDistribution,
    TTGroup,
    TTShape,
    gradient_norms,
    initial_cores,
)
from torchrec_hkv.tensor_train.float32 import keeping_float32
from torchrec_hkv.tensor_train.shape_advice import why_dense_is_smaller
from torchrec_hkv.warn import warn


class OptimType(enum.Enum):
    """Optimizers that are fused into the backward of Tensor-Train modules.

    Only slices of cores that occur in a batch change, with their states. ``EXACT_SGD`` and
    ``ADAGRAD`` are aliases.
    """

    SGD = "sgd"
    EXACT_SGD = "sgd"
    EXACT_ADAGRAD = "adagrad"
    ADAGRAD = "adagrad"
    #: One sum of mean(g^2) for each slice of each core.
    EXACT_ROWWISE_ADAGRAD = "rowwise_adagrad"
    #: Moments of slices that do not occur stay unchanged, as in ``torch.optim.SparseAdam``.
    ADAM = "adam"

    def optimizer(self, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> Optimizer:
        """The optimizer of this type. SGD ignores ``eps``; only Adam uses ``betas``."""
        match self:
            case OptimType.SGD:
                return SGD()
            case OptimType.EXACT_ADAGRAD:
                return Adagrad(eps=eps)
            case OptimType.EXACT_ROWWISE_ADAGRAD:
                return RowWiseAdagrad(eps=eps)
            case OptimType.ADAM:
                return Adam(betas=betas, eps=eps)


class TTTables(nn.Module):
    """Cores of several tables, looked up in one call.

    Args:
        shapes: shapes of the tables.
        feature_tables: see :class:`torchrec_hkv.tensor_train.TTGroup`.
        optimizer: optimizer that the backward applies; the cores are then parameters without
            gradients. None: the backward returns gradients of the cores.
        learning_rate: learning rate of the fused optimizer.
        weight_dist: distribution of the cores, see
            :func:`torchrec_hkv.tensor_train.initial_cores`.
        device: device of the cores.
        dtype: dtype of the cores, float32 or bfloat16.
        precision: see :class:`torchrec_hkv.tensor_train.TTGroup`.
        strict: see :class:`torchrec_hkv.tensor_train.TTGroup`.

    Attributes:
        tt_cores: ``nn.ParameterList``, table after table, each of
            :meth:`torchrec_hkv.tensor_train.TTShape.core_shape`.
    """

    def __init__(
        self,
        shapes: Sequence[TTShape],
        feature_tables: Sequence[int] | None = None,
        *,
        optimizer: Optimizer | None = None,
        learning_rate: float = 0.1,
        weight_dist: TTDistribution = "approx-normal",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        precision: Precision = "fp32",
        strict: bool = False,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype is {dtype}, but must be torch.float32 or torch.bfloat16.")
        device = checked_device(device or "cpu")
        self.group = TTGroup(shapes, feature_tables, optimizer, precision=precision, strict=strict)
        for name, shape in zip(self.group.names, self.group.shapes, strict=True):
            reason = why_dense_is_smaller(shape, dtype.itemsize)
            if reason is not None:
                warn(f"Tensor-Train table {name!r} is no smaller than a dense one: {reason}")
        self.weight_dist = weight_dist
        self.tt_cores = nn.ParameterList(
            nn.Parameter(core, requires_grad=optimizer is None)
            for shape in shapes
            for core in initial_cores(shape, weight_dist, device=device, dtype=dtype)
        )
        for number, state in enumerate(self.group.make_states(device)):
            self.register_buffer(f"optimizer_state_{number}", state, persistent=self.is_fused)
        step = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("optimizer_step", step, persistent=self.is_fused)
        rate = torch.tensor(_checked_rate(learning_rate), device=device)
        self.register_buffer("learning_rate", rate, persistent=False)

    @property
    def is_fused(self) -> bool:
        """Whether the backward updates the cores."""
        return self.group.optimizer is not None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TTTables:
        dtype = fn(self.tt_cores[0].detach()[:0].clone()).dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"The cores of Tensor-Train tables can't be made {dtype}: they are float32 or "
                "bfloat16."
            )
        if recurse:
            for child in self.children():
                child._apply(fn)
        # Optimizer states and the learning rate are float32, even if cores are bfloat16.
        return super()._apply(keeping_float32(fn), recurse=False)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the fused optimizer, from the next backward on.

        Raises:
            ValueError: the learning rate is negative or not finite.
        """
        self.learning_rate.fill_(_checked_rate(learning_rate))

    def reset_parameters(self) -> None:
        """Replaces the cores by random ones, and resets the optimizer states."""
        for table, shape in enumerate(self.group.shapes):
            cores = self.tt_cores[self.group.cores_of(table)]
            for core, new in zip(cores, initial_cores(shape, self.weight_dist), strict=True):
                core.data.copy_(new)
        for state in self.states:
            state.zero_()
        self.optimizer_step.zero_()

    @property
    def states(self) -> list[Tensor]:
        """Optimizer states, one a core."""
        return [getattr(self, f"optimizer_state_{k}") for k in range(len(self.tt_cores))]

    def cores_of(self, table: int) -> list[Tensor]:
        """The cores of a table, detached."""
        return [core.detach() for core in self.tt_cores[self.group.cores_of(table)]]

    def lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        **pooling: Unpack[Pooling],
    ) -> Tensor:
        """Like :meth:`torchrec_hkv.tensor_train.TTGroup.lookup`, fused if :attr:`is_fused`."""
        cores = list(self.tt_cores)
        if not (self.is_fused and self.training and torch.is_grad_enabled()):
            return self.group.lookup(cores, ids, offsets, batch_size, **pooling)
        refuse_replicas("cores that a fused optimizer trains", "make the module with sparse=False")
        anchor = torch.empty(0, device=ids.device, requires_grad=True)
        return self.group.lookup_fused(
            anchor,
            cores,
            self.states,
            self.optimizer_step,
            ids,
            offsets,
            batch_size,
            self.learning_rate,
            **pooling,
        )

    def gradient_norms(
        self,
        grad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        batch_size: int,
        *,
        weights: Tensor | None = None,
        mean: bool = False,
    ) -> list[list[float]]:
        """See :func:`torchrec_hkv.tensor_train.gradient_norms`."""
        cores = [core.detach() for core in self.tt_cores]
        return gradient_norms(
            self.group, cores, grad, ids, offsets, batch_size, weights=weights, mean=mean
        )


class TableBatchedTTEmbeddingBag(nn.Module):
    """Tensor-Train tables of different shapes behind one pooled lookup.

    Args:
        shapes: shapes of the tables, see :func:`torchrec_hkv.tensor_train.make_shape`.
        feature_tables: index of the table of each feature, in the order of the output's columns.
            None: one feature per table.
        sparse: True: the backward updates the cores; ``eval()`` freezes them, but
            ``requires_grad_(False)`` does not. False: cores get gradients.
        optimizer: optimizer of the fused update.
        learning_rate: learning rate of the fused update.
        eps: eps of the fused update.
        weight_dist: distribution of the cores.
        mode: ``"sum"`` or ``"mean"``.
        device: device of the cores.
        dtype: dtype of the cores, float32 or bfloat16.
        precision: precision of products on a GPU, ``"fp32"`` or ``"tf32"``, see
            :class:`torchrec_hkv.tensor_train.TTGroup`.
        strict: whether ids outside their tables also raise on a GPU, see there.

    Raises:
        ValueError: an argument has an invalid value; the message names it.
    """

    def __init__(
        self,
        shapes: Sequence[TTShape],
        feature_tables: Sequence[int] | None = None,
        *,
        sparse: bool = True,
        optimizer: OptimType = OptimType.SGD,
        learning_rate: float = 0.1,
        eps: float = 1e-10,
        weight_dist: TTDistribution = "approx-normal",
        mode: str = "sum",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        precision: Precision = "fp32",
        strict: bool = False,
    ) -> None:
        super().__init__()
        check_mode(mode)
        check_optimizer_type(optimizer)
        check_flag("TableBatchedTTEmbeddingBag", "sparse", sparse)
        check_eps(eps)
        self.mode = mode
        self.tables = TTTables(
            shapes,
            feature_tables,
            optimizer=optimizer.optimizer(eps) if sparse else None,
            learning_rate=learning_rate,
            weight_dist=weight_dist,
            device=device,
            dtype=dtype,
            precision=precision,
            strict=strict,
        )

    @property
    def tt_cores(self) -> nn.ParameterList:
        """The cores, table after table."""
        return self.tables.tt_cores

    def forward(
        self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools the rows of each bag.

        Args:
            ids: int32 or int64 ``[n]``, feature-major: all bags of the first feature, then of the
                second.
            offsets: ``[features * batch_size + 1]`` into ``ids``.
            per_sample_weights: float ``[n]`` or None.

        Returns:
            float32 ``[batch_size, sum of the features' dims]``.

        Raises:
            TypeError: ids or offsets are not integers.
            ValueError: a length is not as above. On a CPU also if an id is outside its table.
        """
        features = len(self.tables.group.feature_tables)
        if offsets.dim() != 1 or (offsets.numel() - 1) % features:
            raise ValueError(
                f"offsets have shape {tuple(offsets.shape)}, but must have {features} times the "
                "batch size, and one more, elements."
            )
        weights = None if per_sample_weights is None else per_sample_weights.float().contiguous()
        return self.tables.lookup(
            as_int64("ids", ids),
            as_int64("offsets", offsets),
            (offsets.numel() - 1) // features,
            weights=weights,
            mean=self.mode == "mean",
        )


def as_int64(name: str, tensor: Tensor) -> Tensor:
    """Converts a tensor to contiguous int64.

    Raises:
        TypeError: the tensor is not of an integer dtype.
    """
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be of dtype int32 or int64, but are of {tensor.dtype}.")
    return tensor.long().contiguous()


def _checked_rate(learning_rate: float) -> float:
    rate = math.nan
    if not isinstance(learning_rate, (bool, str, bytes)):
        try:
            rate = float(learning_rate)
        except (TypeError, ValueError, OverflowError):
            rate = math.nan
    if not 0 <= rate < math.inf:
        raise ValueError(f"learning_rate is {learning_rate!r}, but must be finite and at least 0.")
    return rate


def check_eps(eps: object) -> None:
    """Checks ``eps``, even if the optimizer has none.

    Raises:
        ValueError: ``eps`` is not a positive number.
    """
    Adagrad(eps=eps)


def check_mode(mode: str) -> None:
    """Checks a pooling mode.

    Raises:
        ValueError: the mode is not ``"sum"`` or ``"mean"``.
    """
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode is {mode!r}, but must be 'sum' or 'mean'.")


def check_optimizer_type(optimizer: object) -> None:
    """Checks an optimizer type.

    Raises:
        ValueError: ``optimizer`` is not an :class:`OptimType`.
    """
    if not isinstance(optimizer, OptimType):
        names = ", ".join(f"OptimType.{name}" for name in OptimType.__members__)
        raise ValueError(f"optimizer is {optimizer!r}, but must be one of {names}.")
