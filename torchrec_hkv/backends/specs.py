"""What a backend is told of tables and optimizers, and what it says of their memory."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

import torch


@dataclasses.dataclass(frozen=True)
class ScoreSource:
    """Where the scores of the ids of a training lookup come from.

    Attributes:
        features: of the same KeyedJaggedTensor, one for each feature of the table: their values are
            the scores, an int64 for each id. Empty: the weights of the table's features are, in
            the order of :func:`torchrec_hkv.hash_table.scores_of_weights`.
    """

    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """Base of every backend's options.

    Subclasses are frozen dataclasses of hashable fields (TorchRec hashes them to group tables) that
    refuse impossible values in ``__post_init__`` with a ``ValueError`` of one sentence.
    """

    def rows_for(self, num_embeddings: int) -> int:
        """Rows of a table over all ranks, whose config has so many; as many by default."""
        return num_embeddings

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Data type of the rows of a table, whose config has this one; the same by default."""
        return dtype

    @property
    def score_source(self) -> ScoreSource | None:
        """Where the table's scores come from; None, the default: it takes none. Lookups of a group
        with a table that takes scores get ``scores`` as a keyword argument in training."""
        return None

    @property
    def has_epochs(self) -> bool:
        """Whether :meth:`GroupLookup.set_epoch` has an effect on the table; not by default."""
        return False


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a table keeps of what a dense float32 row for each id would learn.

    Attributes:
        kind: what is given up. ``"compression"``: the table has fewer bytes than rows for all its
            ids would take. ``"rows"``: some lookups are of ids that have no row.
            ``"precision"``: rows have fewer bits than the table's config says.
        share: what is kept, above 0 and below 1: bytes over dense bytes, the share of lookups that
            find a row, or bits over the config's.
        text: the same for the printed plan, such as ``"ranks 32 and 32 keep 0.3 % of the bytes"``.
    """

    kind: Literal["compression", "rows", "precision"]
    share: float
    text: str


OptionsT = TypeVar("OptionsT", bound=BackendOptions)


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer. The learning rate is not here: it is live.

    A backend uses the attributes that its optimizer of this name has; what sets them has checked
    that the others are at their defaults. :mod:`torchrec_hkv.hash_table.optimizers` has formulas.

    Attributes:
        name: which one.
        eps: added to the square root of sums or means of squares.
        momentum: of SGD.
        nesterov: of SGD.
        beta1: of Adam and its kin.
        beta2: of Adam and its kin.
        step_mode: whose number of updates corrects the bias of means: the table's (``"global"``)
            or the row's own (``"row"``).
        weight_decay: factor of the row.
        weight_decay_mode: whether it is added to the gradient (``"coupled"``, L2) or subtracted
            from the row (``"decoupled"``); LAMB has a way of its own.
        initial_accumulator: what sums of squares start from.
        beta: of FTRL.
        l1: of FTRL.
        l2: of FTRL.
        clip_output: bound on the values of the pooled output's gradient (FBGEMM's
            ``max_gradient``), None for none.
        clip_value: bound on the values of a row's gradient, None for none.
        clip_norm: bound on the norm of a row's gradient, None for none.
        max_norm: bound on the norm of a row after its update, None for none; of row-wise Adagrad.
        stochastic_rounding: of 16-bit rows.
        rounding_seed: of that.
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
        """The name, and what else decides which states there are."""
        momentum = " with momentum" if self.momentum else ""
        return f"{self.name}{momentum}" + (" with steps by row" if self.step_mode == "row" else "")


@dataclasses.dataclass(frozen=True)
class TableShard:
    """The part of one table that one rank holds.

    Attributes:
        name: the table's name in its config.
        capacity: rows this rank may hold.
        dim: columns this rank holds.
        num_embeddings: rows over all ranks, as in the table's config unless ``options`` have others
            (:meth:`BackendOptions.rows_for`).
        embedding_dim: columns over all ranks.
        row_offset: first row of this shard, for backends whose ids are row numbers.
        column_offset: first column of this shard.
        dtype: of the rows.
        pooling: how the ids of a bag are reduced. A row-wise sharded mean arrives as ``"sum"``;
            TorchRec divides after the reduction over ranks.
        init_range: the config's ``weight_init_min`` and ``weight_init_max``, or TorchRec's default
            of plus and minus ``num_embeddings ** -0.5``.
        options: the backend's options for this table.
        full_name: the table's key in the model's ``state_dict`` without ``.weight``, for messages;
            ``""`` where it is not known.
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
        """What messages call the table: its full name where that is known."""
        return self.full_name or self.name

    @property
    def key(self) -> str:
        """What tells the shards on one rank apart: the table's name, and behind it ``/`` and the
        first column where that is not 0, as a rank may hold several columns' shards of a table."""
        return f"{self.name}/{self.column_offset}" if self.column_offset else self.name

    def options_as(self, kind: type[OptionsT], backend: str) -> OptionsT:
        """The options, which must be those of a backend.

        Args:
            kind: the backend's options.
            backend: its name.

        Raises:
            ValueError: they are another's.
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
    """Bytes a table shard takes, apart for the two memories. On a CPU all of it is ``host``."""

    hbm: int
    host: int
