"""Constraints of tables, and their translation for TorchRec's planner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints as StockParameterConstraints

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import BackendOptions
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.hash_table.spec_checks import check_flag
from torchrec_hkv.planner.quality_curve import QualityCurve, check_curves, check_loss
from torchrec_hkv.sharding.kernels.output_dtype import check_output_dtype
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.validation import check_sharding_type, served_sharding_types

_STOCK_KERNELS: frozenset[str] = frozenset(
    kernel.value for kernel in EmbeddingComputeKernel if kernel.value != KERNEL
)


@dataclasses.dataclass
class ParameterConstraints(StockParameterConstraints):
    """TorchRec's constraints of a table; ``compute_kernels`` may also name backends.

    Attributes:
        options: options of the backend, or a sequence with options of several backends. A backend
            without options uses its defaults. Several options of one backend are alternatives, such
            as a table in HBM and one in host memory.
        frequencies: how often ids are looked up. The planner uses it to estimate the number of
            unique ids in a step, the rows fetched from host memory, and the quality that fewer rows
            or a compressed table lose. None: all ids from 0 to ``num_embeddings - 1`` are equally
            frequent.
        quality_curves: the quality that this table loses, by what it gives up: ``"compression"``,
            ``"rows"`` or ``"precision"`` (:class:`torchrec_hkv.backends.Kept`). For None and for
            missing kinds, curves measured on MovieTweetings are used, in AUC.
        choose_sizes: whether the planner chooses the sizes that ``options`` leave open if the table
            has one backend and no other kernel. With other kernels it always does.
        max_quality_loss: bound on the table's loss, in the unit of its curves. None: only the
            planner's bound on all tables together applies.
    """

    options: BackendOptions | Sequence[BackendOptions] | None = None
    frequencies: IdFrequencies | None = None
    quality_curves: Mapping[str, QualityCurve] | None = None
    max_quality_loss: float | None = None
    choose_sizes: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.options, list):
            self.options = tuple(self.options)

    def __hash__(self) -> int:
        curves = tuple(sorted((self.quality_curves or {}).items(), key=lambda item: item[0]))
        fields = (self.options, self.frequencies, curves, self.max_quality_loss, self.choose_sizes)
        return hash((super().__hash__(), *fields))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A backend that may serve a table.

    Attributes:
        backend: name of the backend.
        options: its options for this table.
        label: the name, with the options if another candidate has the same backend.
        is_open: whether the planner may use variants of the options
            (:meth:`Backend.variants`).
    """

    backend: str
    options: BackendOptions
    label: str
    is_open: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The kernels that may serve a table.

    Attributes:
        candidates: backends with options; empty if the constraint only has frequencies.
        has_stock: whether stock kernels are allowed.
        frequencies: frequencies of the table's ids; None if unknown.
        curves: quality curves by kind that replace the built-in ones.
        max_loss: bound on the table's loss; None for no bound.
    """

    candidates: tuple[Candidate, ...]
    has_stock: bool
    frequencies: IdFrequencies | None = None
    curves: Mapping[str, QualityCurve] | None = None
    max_loss: float | None = None

    @property
    def backends(self) -> list[str]:
        """The names of the backends, without repetition."""
        return list(dict.fromkeys(candidate.backend for candidate in self.candidates))

    @property
    def is_settled(self) -> bool:
        """Whether only one kernel is possible."""
        return len(self.candidates) == 1 and not self.has_stock

    @property
    def leaves_sizes(self) -> bool:
        """Whether a candidate leaves sizes open."""
        return any(candidate.is_open for candidate in self.candidates)


def choices(
    constraints: Mapping[str, StockParameterConstraints] | None,
) -> dict[str, KernelChoice]:
    """The kernels of tables whose constraints name backends or have frequencies.

    Raises:
        ValueError: a compute kernel is unknown, options do not fit any backend of the table, no
            backend supports the sharding types, or a constraint only applies to stock kernels.
    """
    found: dict[str, KernelChoice] = {}
    for table, constraint in (constraints or {}).items():
        choice = _choice(table, constraint)
        if choice is not None:
            found[table] = choice
    return found


def translated(
    constraints: Mapping[str, StockParameterConstraints] | None,
    chosen_from: Mapping[str, KernelChoice],
) -> dict[str, StockParameterConstraints]:
    """Translates constraints for TorchRec's planner: backends become its customized kernel."""
    result: dict[str, StockParameterConstraints] = {}
    for table, constraint in (constraints or {}).items():
        choice = chosen_from.get(table)
        if choice is not None and choice.backends:
            kernels = [
                KERNEL if kernel in choice.backends else kernel
                for kernel in constraint.compute_kernels
            ]
            constraint = dataclasses.replace(
                constraint, compute_kernels=list(dict.fromkeys(kernels))
            )
        result[table] = constraint
    return result


def _choice(table: str, constraint: StockParameterConstraints) -> KernelChoice | None:
    kernels = constraint.compute_kernels or []
    options = getattr(constraint, "options", None)
    for kernel in kernels:
        if kernel not in _STOCK_KERNELS and kernel not in registry.names():
            raise ValueError(
                f"Table {table!r} is constrained to compute kernel {kernel!r}, which is neither a "
                f"registered backend ({registry.names()}) nor a kernel of TorchRec "
                f"({sorted(_STOCK_KERNELS)})."
            )
    backends = list(dict.fromkeys(kernel for kernel in kernels if kernel in registry.names()))
    frequencies = getattr(constraint, "frequencies", None)
    if frequencies is not None and not isinstance(frequencies, IdFrequencies):
        raise ValueError(
            f"Table {table!r} has frequencies of type {type(frequencies).__name__}, but they must "
            "be an IdFrequencies or None."
        )
    curves = getattr(constraint, "quality_curves", None)
    if curves is not None:
        check_curves(f"Table {table!r}: quality_curves", curves)
    max_loss = getattr(constraint, "max_quality_loss", None)
    check_loss(f"Table {table!r}: max_quality_loss", max_loss)
    chooses = getattr(constraint, "choose_sizes", False)
    check_flag(f"Table {table!r}", "choose_sizes", chooses)
    if not backends:
        if chooses:
            raise ValueError(
                f"Table {table!r} has choose_sizes=True but no backend whose sizes could be "
                f"chosen: name one of {registry.names()} in compute_kernels."
            )
        if options is not None:
            raise ValueError(
                f"Table {table!r} has options {type(options).__name__} but no backend that takes "
                f"them: name one of {registry.names()} in compute_kernels."
            )
        if curves is not None:
            raise ValueError(
                f"Table {table!r} has quality_curves but no backend that could lose quality: name "
                f"one of {registry.names()} in compute_kernels."
            )
        return None if frequencies is None else KernelChoice((), True, frequencies)
    has_stock = len(backends) < len(set(kernels))
    candidates = _candidates(table, backends, options, chooses or has_stock or len(backends) > 1)
    choice = KernelChoice(candidates, has_stock, frequencies, curves, max_loss)
    _check_numbers(table, constraint)
    _check_sharding_types(table, choice, constraint)
    _check_stock_only_fields(table, choice, constraint)
    return choice


def _candidates(
    table: str,
    names: Sequence[str],
    options: BackendOptions | Sequence[BackendOptions] | None,
    is_choice: bool,
) -> tuple[Candidate, ...]:
    """The candidates: each backend with its options, or once for each of its options. If a backend
    has several options, the user has chosen the sizes; otherwise open sizes may be chosen by the
    planner."""
    all_options = (
        [options] if options is None or isinstance(options, BackendOptions) else list(options)
    )
    found: dict[str, list[BackendOptions]] = {name: [] for name in names}
    for one in all_options:
        if one is None:
            continue
        takers = [name for name in names if isinstance(one, registry.get(name).options_type)]
        if not takers:
            others = "" if len(names) == 1 else f", and {names[1:]} don't take them either"
            raise ValueError(
                f"Table {table!r} is constrained to backend {names[0]!r} and has options "
                f"{type(one).__name__}: that backend takes "
                f"{registry.get(names[0]).options_type.__name__}{others}."
            )
        for name in takers:
            if one in found[name]:
                raise ValueError(
                    f"Table {table!r} has equal options {type(one).__name__} twice: remove one."
                )
            found[name].append(one)
    candidates = []
    for name, of_backend in found.items():
        for one in of_backend or [registry.get(name).options_type()]:
            text = registry.get(name).describe(one) or "defaults"
            label = f"{name} ({text})" if len(of_backend) > 1 else name
            candidates.append(Candidate(name, one, label, is_choice and len(of_backend) < 2))
    return tuple(candidates)


def _check_numbers(table: str, constraint: StockParameterConstraints) -> None:
    """Checks numbers that TorchRec does not check, although costs depend on them."""
    if constraint.min_partition is not None:
        minimum = constraint.min_partition
        if not isinstance(minimum, int) or isinstance(minimum, bool) or minimum < 1:
            raise ValueError(
                f"Table {table!r} has min_partition={minimum!r}, but it must be a positive integer "
                "or None."
            )
    for field, may_be_zero in (
        ("pooling_factors", True),
        ("num_poolings", False),
        ("batch_sizes", False),
    ):
        values = getattr(constraint, field)
        if values is None:
            continue
        if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or not values:
            raise ValueError(
                f"Table {table!r} has {field}={values!r}, but it must be a list with a number for "
                "each feature, or None."
            )
        for value in values:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                allowed = "finite and not negative" if may_be_zero else "finite and positive"
                raise ValueError(
                    f"Table {table!r} has {field}={values!r}, but each number must be {allowed}."
                )


def _check_sharding_types(
    table: str, choice: KernelChoice, constraint: StockParameterConstraints
) -> None:
    requested = constraint.sharding_types
    if choice.has_stock or not requested:
        return
    served = {kind for name in choice.backends for kind in served_sharding_types(name)}
    if not served & set(requested):
        check_sharding_type(table, choice.backends[0], requested)


def _check_stock_only_fields(
    table: str, choice: KernelChoice, constraint: StockParameterConstraints
) -> None:
    if choice.has_stock:
        return
    backend = choice.backends[0]
    fields = ("cache_params", "enforce_hbm", "stochastic_rounding", "key_value_params")
    for field in (*fields, "bounds_check_mode"):
        value = getattr(constraint, field)
        if value is not None:
            raise ValueError(
                f"Table {table!r} is constrained to backend {backend!r} and has "
                f"{field}={value}, which only stock kernels support: leave it None."
            )
    if constraint.use_virtual_table:
        raise ValueError(
            f"Table {table!r} is constrained to backend {backend!r} and has "
            "use_virtual_table=True, which only stock kernels support: leave it False."
        )
    for backend in choice.backends:
        check_output_dtype(table, backend, constraint.output_dtype)
