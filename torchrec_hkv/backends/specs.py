"""Descriptions of tables, options and optimizers that a backend receives, and of their storage."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

import torch


@dataclasses.dataclass(frozen=True)
class ScoreSource:
    """Where the scores of the ids of a training lookup come from.

    Attributes:
        features: features of the same KeyedJaggedTensor, one per feature of the table. Their
            values are the scores, one int64 for each id. If empty, the scores are the weights of
            the table's features, mapped to int64 by
            :func:`torchrec_hkv.hash_table.scores_of_weights`, which keeps their order.
    """

    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """Base of every backend's options.

    Subclasses are frozen dataclasses of hashable fields, because TorchRec hashes them to group
    tables. ``__post_init__`` raises a ``ValueError`` for invalid values.
    """

    def rows_for(self, num_embeddings: int) -> int:
        """Rows over all ranks of a table whose config has ``num_embeddings``; the same number by
        default."""
        return num_embeddings

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Data type of the rows of a table whose config has ``dtype``; the same by default."""
        return dtype

    @property
    def score_source(self) -> ScoreSource | None:
        """Where the table's scores come from; None if it takes none, which is the default. If a
        table of a group takes scores, training lookups of the group get a keyword argument
        ``scores``."""
        return None

    @property
    def has_epochs(self) -> bool:
        """Whether :meth:`GroupLookup.set_epoch` affects the table; False by default."""
        return False


@dataclasses.dataclass(frozen=True)
class Kept:
    """An estimate of how much quality a table keeps, compared with a dense float32 row per id.

    Attributes:
        kind: what the table gives up. ``"compression"``: it has fewer bytes than rows for all its
            ids would take. ``"rows"``: some lookups are of ids without a row. ``"precision"``:
            rows have fewer bits than in the table's config.
        share: the share that is kept, between 0 and 1: bytes over dense bytes, the share of
            lookups that find a row, or bits over the config's bits.
        text: the same for the printed plan, such as ``"ranks 32 and 32 keep 0.3 % of the bytes"``.
    """

    kind: Literal["compression", "rows", "precision"]
    share: float
    text: str


OptionsT = TypeVar("OptionsT", bound=BackendOptions)


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer without its learning rate, which may change in every step.

    A backend reads the attributes that its optimizer of this name has. The caller has checked that
    all others have their defaults. See :mod:`torchrec_hkv.hash_table.optimizers` for the formulas.

    Attributes:
        name: the optimizer.
        eps: added to the square root of the sum or mean of squares.
        momentum: momentum of SGD.
        nesterov: Nesterov momentum of SGD.
        beta1: decay of the first moment of Adam, row-wise Adam and LAMB.
        beta2: decay of the second moment of these optimizers.
        step_mode: the number of updates that corrects the bias of the moments: the table's
            (``"global"``) or the row's own (``"row"``).
        weight_decay: weight decay factor.
        weight_decay_mode: ``"coupled"`` adds the decay to the gradient (L2); ``"decoupled"``
            subtracts it from the row. LAMB uses its own rule.
        initial_accumulator: initial value of the sum of squares.
        beta: beta of FTRL.
        l1: L1 regularization of FTRL.
        l2: L2 regularization of FTRL.
        clip_output: bound on the absolute values of the gradient of the pooled output (FBGEMM's
            ``max_gradient``); None for no bound.
        clip_value: bound on the absolute values of a row's gradient; None for no bound.
        clip_norm: bound on the L2 norm of a row's gradient; None for no bound.
        max_norm: bound on the L2 norm of a row after its update, for row-wise Adagrad; None for
            no bound.
        stochastic_rounding: whether updates of 16-bit rows are rounded stochastically.
        rounding_seed: seed of the stochastic rounding.
    """

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "ftrl"]
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    step_mode: Literal["global", "row"] = "global"
    weight_decay: float = 0.0
    weight_decay_mode: Literal["coupled", "decoupled"] = "coupled"
    initial_accumulator: float = 0.0
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    clip_output: float | None = None
    clip_value: float | None = None
    clip_norm: float | None = None
    max_norm: float | None = None
    stochastic_rounding: bool = True
    rounding_seed: int = 0

    @property
    def kind(self) -> str:
        """The name, and every attribute that decides which states the optimizer has."""
        momentum = " with momentum" if self.momentum else ""
        return f"{self.name}{momentum}" + (" with steps by row" if self.step_mode == "row" else "")


@dataclasses.dataclass(frozen=True)
class TableShard:
    """The part of one table that one rank holds.

    Attributes:
        name: the table's name in its config.
        capacity: number of rows this rank may hold.
        dim: number of columns this rank holds.
        num_embeddings: number of rows over all ranks: the config's, unless ``options`` say
            otherwise (:meth:`BackendOptions.rows_for`).
        embedding_dim: number of columns over all ranks.
        row_offset: first row of this shard, for backends whose ids are row numbers.
        column_offset: first column of this shard.
        dtype: data type of the rows.
        pooling: how the rows of a bag are reduced. A mean under row-wise sharding arrives here as
            ``"sum"``; TorchRec divides after the reduction over ranks.
        init_range: the config's ``weight_init_min`` and ``weight_init_max``, or TorchRec's default
            of plus and minus ``num_embeddings ** -0.5``.
        options: the backend's options for this table.
        full_name: the table's key in the model's ``state_dict`` without ``.weight``, for messages;
            ``""`` if unknown.
    """

    name: str
    capacity: int
    dim: int
    num_embeddings: int
    embedding_dim: int
    row_offset: int
    column_offset: int
    dtype: torch.dtype
    pooling: Literal["sum", "mean"]
    init_range: tuple[float, float]
    options: BackendOptions
    full_name: str = dataclasses.field(default="", compare=False)

    @property
    def label(self) -> str:
        """The table's name in messages: its full name if known."""
        return self.full_name or self.name

    @property
    def key(self) -> str:
        """Identifies a shard on its rank: the table's name, followed by ``/`` and the first column
        if this is not 0. A rank may hold several column shards of one table."""
        return f"{self.name}/{self.column_offset}" if self.column_offset else self.name

    def options_as(self, kind: type[OptionsT], backend: str) -> OptionsT:
        """The options, checked to be those of a backend.

        Args:
            kind: the options class of the backend.
            backend: the name of the backend.

        Raises:
            ValueError: the options are not of type ``kind``.
        """
        if not isinstance(self.options, kind):
            raise ValueError(
                f"table '{self.name}': options of type {type(self.options).__name__} were given to "
                f"backend '{backend}', which takes {kind.__name__}."
            )
        return self.options


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a table's saved state on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class StorageBytes:
    """Bytes that a table shard takes in HBM and in host memory. On a CPU all of it is ``host``."""

    hbm: int
    host: int
