"""Optimizers that train rows in the backward of a lookup.

Only the rows of ids in the batch change, and their states. Weight decay, momentum and means of
gradients do not affect other rows, as in ``torch.optim.SparseAdam``. The gradient of a row is the
sum over all occurrences of its id in the batch; each row is updated once.

The learning rate is not part of an optimizer. A lookup takes it as a tensor, which may change.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from torchrec_hkv import _C

WeightDecayMode = Literal["coupled", "decoupled"]
StepMode = Literal["global", "row"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base class of the optimizers, with their common options.

    Attributes:
        clip_value: bound on each value of a row's gradient.
        clip_norm: bound on the L2 norm of a row's gradient, after ``clip_value``.
        clip_output: bound on each value of the gradient of the pooled output, before it is summed
            by row and before the gradient of per-sample weights is computed. This is FBGEMM's
            ``gradient_clipping`` with ``max_gradient``.
        stochastic_rounding: rounds 16-bit rows up or down at random, so that the expected value is
            exact. Optimizer states are float32 in any case. Float32 rows are never rounded, and
            int8 rows are always rounded in this way.
        rounding_seed: seed of the rounding. The random bits are a function of the seed, the table's
            name and seed, the id, the column and the number of the table's update.
    """

    clip_value: float | None = None
    clip_norm: float | None = None
    clip_output: float | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0

    def __post_init__(self) -> None:
        self._check_bounds("clip_value", "clip_norm", "clip_output")
        self._check_flags("stochastic_rounding")
        seed = self.rounding_seed
        if not isinstance(seed, int) or isinstance(seed, bool) or not -(1 << 63) <= seed < 1 << 63:
            self._refuse("rounding_seed", "an integer from -2^63 to 2^63 - 1")

    def state_width(self, dim: int) -> int:
        """Returns the number of float32 values of state that a row of this dim keeps."""
        return self.config().state_width(dim)

    def config(self) -> _C.OptimizerConfig:
        """Returns the configuration that kernels take."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(Optimizer)}
        return _C.OptimizerConfig(**common, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        raise NotImplementedError

    def _refuse(self, name: str, allowed: str) -> None:
        raise ValueError(
            f"{type(self).__name__}: {name} is {getattr(self, name)!r}, but must be {allowed}."
        )

    def _check_bounds(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                self._refuse(name, "None or a positive number")

    def _check_flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")

    def _check_not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                self._refuse(name, "a finite number, not negative")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            # Smaller values are 0 in float32, and 0 / 0 would be NaN.
            if not (_is_number(value) and 1e-38 <= value < math.inf):
                self._refuse(name, "a finite positive number (at least 1e-38)")

    def _check_fraction(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < 1):
                self._refuse(name, "at least 0 and less than 1")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._refuse(name, " or ".join(map(repr, allowed)))

    def _check_decay(self) -> None:
        self._check_not_negative("weight_decay")
        self._check_choice("weight_decay_mode", ("coupled", "decoupled"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _decay(weight_decay: float, mode: WeightDecayMode) -> dict[str, float]:
    return {f"{mode}_decay": weight_decay}


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    State of a row: none without momentum; with momentum the velocity ``[dim]``.

    Attributes:
        momentum: decay factor of the velocity.
        nesterov: whether to use Nesterov momentum.
        weight_decay: factor of the row that is added to the gradient (``"coupled"``, L2) or
            subtracted from the row at the learning rate (``"decoupled"``).
        weight_decay_mode: ``"coupled"`` or ``"decoupled"``.

    Raises:
        ValueError: an attribute has an invalid value; the message names it. This holds for all
            optimizers.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "coupled"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fraction("momentum")
        self._check_flags("nesterov")
        self._check_decay()
        if self.nesterov and self.momentum == 0:
            self._refuse("nesterov", "False if momentum is 0")

    def _arguments(self) -> dict[str, Any]:
        return {
            "kind": _C.Optimizer.MOMENTUM if self.momentum else _C.Optimizer.SGD,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            **_decay(self.weight_decay, self.weight_decay_mode),
        }


@dataclasses.dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as ``torch.optim.Adagrad`` and FBGEMM's ``EXACT_ADAGRAD``.

    State of a row: the sums of squares ``[dim]``, without ``initial_accumulator``.

    Attributes:
        eps: added to the square root of the sums; positive.
        weight_decay: see :class:`SGD`.
        weight_decay_mode: see :class:`SGD`.
        initial_accumulator: initial value of the sums of squares.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "coupled"
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("eps")
        self._check_decay()
        self._check_not_negative("initial_accumulator")

    def _arguments(self) -> dict[str, Any]:
        return {
            "kind": _C.Optimizer.ADAGRAD,
            "eps": self.eps,
            "initial_accumulator": self.initial_accumulator,
            **_decay(self.weight_decay, self.weight_decay_mode),
        }


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one sum per row, the sum of its mean squares; FBGEMM's
    ``EXACT_ROWWISE_ADAGRAD``.

    State of a row: the sum ``[1]``. See :class:`Adagrad` for the other attributes.

    Attributes:
        max_norm: bound on the L2 norm of a row. If the norm is larger after an update, the row is
            scaled to the bound, as FBGEMM's GPU kernels do. None for no bound. The norm is computed
            from float32 values, before 16-bit rows are rounded.
    """

    max_norm: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_bounds("max_norm")

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "kind": _C.Optimizer.ROWWISE_ADAGRAD,
            "max_norm": self.max_norm,
        }


@dataclasses.dataclass(frozen=True)
class _Moments(Optimizer):
    """Base of the optimizers with means of gradients and of their squares.

    Attributes:
        betas: decay rates of the mean of gradients and of the mean of squares.
        eps: added to the square root of the mean of squares; positive.
        step_mode: the number of updates that corrects the bias of the means: ``"global"``, the
            table's, or ``"row"``, the row's own since its insertion, which is one more state value.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    step_mode: StepMode = dataclasses.field(default="global", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (
            isinstance(self.betas, tuple)
            and len(self.betas) == 2
            and all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            self._refuse("betas", "two numbers, at least 0 and less than 1")
        self._check_positive("eps")
        self._check_choice("step_mode", ("global", "row"))

    def _arguments(self) -> dict[str, Any]:
        return {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "own_steps": self.step_mode == "row",
        }


@dataclasses.dataclass(frozen=True)
class Adam(_Moments):
    """Adam, as ``torch.optim.Adam``.

    State of a row: the means of gradients ``[dim]``, the means of squares ``[dim]``, and under
    ``step_mode="row"`` the number of the row's updates ``[1]``.

    Attributes:
        betas: decay rates of the mean of gradients and of the mean of squares.
        eps: added to the square root of the mean of squares; positive.
        weight_decay: see :class:`SGD`. FBGEMM's ``ADAM`` uses decoupled weight decay.
        weight_decay_mode: see :class:`SGD`.
        step_mode: the number of updates that corrects the bias of the means: ``"global"``, the
            table's, or ``"row"``, the row's own since its insertion, which is one more state value.
    """

    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "coupled"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_decay()

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "kind": _C.Optimizer.ADAM,
            **_decay(self.weight_decay, self.weight_decay_mode),
        }


@dataclasses.dataclass(frozen=True)
class AdamW(_Moments):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` and FBGEMM's ``ADAM``.

    See :class:`Adam` for state and attributes.
    """

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("weight_decay")

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "kind": _C.Optimizer.ADAM,
            "decoupled_decay": self.weight_decay,
        }


@dataclasses.dataclass(frozen=True)
class RowWiseAdam(_Moments):
    """Adam with one mean of squares for each row; FBGEMM's ``PARTIAL_ROWWISE_ADAM``.

    State of a row: the means of gradients ``[dim]``, the mean of the mean of squares ``[1]``, and
    under ``step_mode="row"`` the number of the row's updates ``[1]``. See :class:`Adam` for the
    attributes. Weight decay is decoupled by default, as in FBGEMM.
    """

    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "decoupled"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_decay()

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "kind": _C.Optimizer.ROWWISE_ADAM,
            **_decay(self.weight_decay, self.weight_decay_mode),
        }


@dataclasses.dataclass(frozen=True)
class LAMB(_Moments):
    """LAMB applied to each row; FBGEMM's ``LAMB``.

    Adam's step, with weight decay, is scaled by the norm of the row over the norm of the step. If
    one of the norms is 0, the ratio is 1, as in the published algorithm. FBGEMM's ratio is 0 or NaN
    then, so that a row of zeros never moves. State of a row: see :class:`Adam`.

    Attributes:
        betas: see :class:`Adam`.
        eps: see :class:`Adam`.
        weight_decay: factor of the row that is added to the step before it is scaled.
        step_mode: see :class:`Adam`.
    """

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("weight_decay")

    def _arguments(self) -> dict[str, Any]:
        return {
            **super()._arguments(),
            "kind": _C.Optimizer.LAMB,
            "lamb_decay": self.weight_decay,
        }


@dataclasses.dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), with a learning rate that may change.

    For each column, n is ``initial_accumulator`` plus the sum of squares of its gradients::

        z   += g - (sqrt(n + g^2) - sqrt(n)) / lr * row
        row  = 0 if |z| <= l1 else -(z - sign(z) * l1) / ((beta + sqrt(n + g^2)) / lr + l2)

    The published algorithm starts from z = 0 for any row, so that ``beta`` and
    ``initial_accumulator`` make it forget the initial row. Here z starts from
    ``-(beta + sqrt(n)) / lr * initial row``, which is the same for initial rows of zeros. Without
    ``beta``, ``l1`` and ``l2`` the optimizer equals Adagrad as long as the learning rate does not
    change. A learning rate of 0 changes nothing.

    State of a row: z ``[dim]``, and the sums of squares ``[dim]`` without ``initial_accumulator``.

    Attributes:
        beta: beta of the paper, not negative.
        l1: L1 regularization: a value is 0 unless ``|z|`` exceeds it.
        l2: L2 regularization as in the paper; TensorFlow's is half of it.
        initial_accumulator: initial value of the sums of squares.
    """

    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("beta", "l1", "l2", "initial_accumulator")

    def _arguments(self) -> dict[str, Any]:
        return {
            "kind": _C.Optimizer.FTRL,
            "ftrl_beta": self.beta,
            "l1": self.l1,
            "l2": self.l2,
            "initial_accumulator": self.initial_accumulator,
        }
