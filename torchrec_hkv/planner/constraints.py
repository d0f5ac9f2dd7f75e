"""What a user asks of the planner for each table, and what it means for TorchRec's planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints as StockParameterConstraints
from torchrec.modules.embedding_configs import DataType

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import BackendOptions
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.validation import check_sharding_type

_STOCK_KERNELS: frozenset[str] = frozenset(
    kernel.value for kernel in EmbeddingComputeKernel if kernel.value != KERNEL
)


@dataclasses.dataclass
class ParameterConstraints(StockParameterConstraints):
    """TorchRec's constraints of a table, where ``compute_kernels`` may name a backend.

    Attributes:
        options: the backend's options, its defaults when None.
    """

    options: BackendOptions | None = None

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.options))


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The backend that may serve a table.

    Attributes:
        backend: its name.
        options: for this table.
        is_only_choice: False where stock kernels are allowed too.
    """

    backend: str
    options: BackendOptions
    is_only_choice: bool


def assignments(
    constraints: Mapping[str, StockParameterConstraints] | None,
) -> dict[str, Assignment]:
    """The backends that constraints ask for, by table.

    Raises:
        ValueError: an unknown compute kernel, two backends for one table, options that no backend
            of the table takes, a sharding type that the backend can't serve, or a constraint that
            only stock kernels honour.
    """
    found: dict[str, Assignment] = {}
    for table, constraint in (constraints or {}).items():
        assignment = _assignment(table, constraint)
        if assignment is not None:
            found[table] = assignment
    return found


def translated(
    constraints: Mapping[str, StockParameterConstraints] | None,
    assigned: Mapping[str, Assignment],
) -> dict[str, StockParameterConstraints]:
    """Constraints as TorchRec's planner understands them: its placeholder for our kernels."""
    result: dict[str, StockParameterConstraints] = {}
    for table, constraint in (constraints or {}).items():
        assignment = assigned.get(table)
        if assignment is not None:
            kernels = [
                KERNEL if kernel == assignment.backend else kernel
                for kernel in constraint.compute_kernels
            ]
            constraint = dataclasses.replace(constraint, compute_kernels=kernels)
        result[table] = constraint
    return result


def _assignment(table: str, constraint: StockParameterConstraints) -> Assignment | None:
    kernels = constraint.compute_kernels or []
    options = getattr(constraint, "options", None)
    for kernel in kernels:
        if kernel not in _STOCK_KERNELS and kernel not in registry.names():
            raise ValueError(
                f"Table {table!r} is constrained to compute kernel {kernel!r}, which is neither a "
                f"registered backend ({registry.names()}) nor a kernel of TorchRec's "
                f"({sorted(_STOCK_KERNELS)})."
            )
    backends = [kernel for kernel in kernels if kernel in registry.names()]
    if len(backends) > 1:
        raise ValueError(
            f"Table {table!r} is constrained to backends {backends}: allowed is one, alone or with "
            "stock kernels."
        )
    if not backends:
        if options is not None:
            raise ValueError(
                f"Table {table!r} has options {type(options).__name__} and no backend that would "
                f"take them: name one of {registry.names()} in compute_kernels."
            )
        return None
    name = backends[0]
    assignment = Assignment(name, _options(table, name, options), len(kernels) == 1)
    _check_sharding_types(table, assignment, constraint)
    _check_stock_only_fields(table, assignment, constraint)
    return assignment


def _options(table: str, name: str, options: BackendOptions | None) -> BackendOptions:
    options_type = registry.get(name).options_type
    if options is None:
        return options_type()
    if not isinstance(options, options_type):
        raise ValueError(
            f"Table {table!r} is constrained to backend {name!r} and has options "
            f"{type(options).__name__}: that backend takes {options_type.__name__}."
        )
    return options


def _check_sharding_types(
    table: str, assignment: Assignment, constraint: StockParameterConstraints
) -> None:
    asked = constraint.sharding_types
    if assignment.is_only_choice and asked:
        check_sharding_type(table, assignment.backend, asked)


def _check_stock_only_fields(
    table: str, assignment: Assignment, constraint: StockParameterConstraints
) -> None:
    if not assignment.is_only_choice:
        return
    fields = ("cache_params", "enforce_hbm", "stochastic_rounding", "key_value_params")
    for field in (*fields, "bounds_check_mode"):
        value = getattr(constraint, field)
        if value is not None:
            raise ValueError(
                f"Table {table!r} is constrained to backend {assignment.backend!r} and has "
                f"{field}={value}, which only stock kernels honour: leave it None."
            )
    if constraint.use_virtual_table:
        raise ValueError(
            f"Table {table!r} is constrained to backend {assignment.backend!r} and has "
            "use_virtual_table=True, which only stock kernels honour: leave it False."
        )
    if constraint.output_dtype not in (None, DataType.FP32):
        raise ValueError(
            f"Table {table!r} is constrained to backend {assignment.backend!r} and has "
            f"output_dtype={constraint.output_dtype}: backends give float32."
        )
