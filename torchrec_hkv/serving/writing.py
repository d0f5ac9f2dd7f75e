"""Writes a trained model to a folder that :func:`torchrec_hkv.serving.load` opens."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_hkv.backends.hkv.table import initializer_of
from torchrec_hkv.backends.tt.table import options_of as tt_options_of
from torchrec_hkv.backends.tt.table import shape_of
from torchrec_hkv.checkpoint.chain import Chain
from torchrec_hkv.checkpoint.rows import export_rows
from torchrec_hkv.collective import on_every_rank, on_leader
from torchrec_hkv.hash_table.files.manifest import sync_folder
from torchrec_hkv.hash_table.initial_rows import table_seed
from torchrec_hkv.hash_table.initializers import op_arguments
from torchrec_hkv.serving import ops
from torchrec_hkv.serving.manifest import (
    MANIFEST,
    FileRecord,
    Initial,
    Manifest,
    ShapeRecord,
    TableRecord,
    TTGroupRecord,
)
from torchrec_hkv.serving.row_formats import RowFormat, check_row_format
from torchrec_hkv.serving.table_file import MEMORY_BYTES, TableBuilder
from torchrec_hkv.serving.tracing import (
    Current,
    Output,
    Part,
    PooledLookup,
    Program,
    SequenceLookup,
    describe_inputs,
    trace,
    with_lookups,
)
from torchrec_hkv.sharding.modules.collection import BackendCollection, FoundTable
from torchrec_hkv.sharding.state.names import find_name, joined, named_modules
from torchrec_hkv.sharding.tables import SUMMED_OVER_RANKS

#: Tables of one of these formats of rows: for all tables, or by table.
Rows = RowFormat | Mapping[str, RowFormat]
#: What unknown ids get.
Unknown = str | Sequence[float] | Tensor

_BAGS = (ShardedEmbeddingBagCollection, EmbeddingBagCollection)
_SEQUENCES = (ShardedEmbeddingCollection, EmbeddingCollection)
_COLLECTIONS = (*_BAGS, *_SEQUENCES)
_TRAINED_AS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ZERO = {"distribution": "uniform", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    rows: Rows | None = None,
    *,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    unknown: Unknown | Mapping[str, Unknown] = "initial",
    deltas: str | os.PathLike[str] | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> None:
    """Writes a model for serving; a collective call where it is sharded.

    What is written is the model's own forward in evaluation mode, as one program, and its tables.
    The model stays as it is.

    Args:
        model: a ``DistributedModelParallel``, or a module with unsharded collections, in host
            memory or on GPUs.
        folder: to write to; all ranks name the same. A model that is there is replaced, in one
            step.
        rows: formats of rows: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"int8"`` or ``"int4"``, for all
            tables or by table. Tables of which nothing is said keep their own. Tensor-Train tables
            are written as cores, unless they are named here.
        inputs: positional arguments of the model's forward, as in training: a batch of at least two
            samples and two ids. Only its shapes and dtypes matter.
        kwargs: its keyword arguments.
        unknown: what ids that a table lacks get, for all tables or by table: ``"initial"``, the row
            that training would start from (zeros for stock tables); ``"zero"``; or a row of
            ``embedding_dim`` numbers.
        deltas: the folder of a ``DeltaWriter`` that has just written the model as it is.
            :func:`torchrec_hkv.serving.follow` then begins with the delta after that. None: it
            begins with the chain's base.
        memory_bytes: ids and rows of a table that are held in memory; more go through temporary
            files in the folder.

    Raises:
        TypeError: inputs hold something else than tensors, ``KeyedJaggedTensor``, numbers, strings
            and None.
        ValueError: an argument is impossible, the model has no collection of tables, or its forward
            can't be exported; the sentence says why. The folder stays as it was.
        OSError: the folder can't be written.
    """
    target = Path(folder)
    tables = _find_tables(model)
    chosen = on_every_rank(
        lambda: _Chosen.of(tables, rows, unknown, inputs, kwargs, target, deltas, memory_bytes)
    )[0]
    saving = target.absolute().with_name(f".{target.absolute().name}.saving")
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    try:
        on_leader(lambda: _make_folder(saving))
        records = [
            _write_rows(model, table, chosen, number, saving, is_writer)
            for number, table in enumerate(t for t in tables if not chosen.has_cores(t))
        ]
        groups, parts = _tensor_train_groups(tables, chosen)
        group_records = [
            _write_cores(group, number, saving, is_writer) for number, group in enumerate(groups)
        ]
        on_leader(
            lambda: _write_program(
                model, tables, chosen, parts, records, group_records, inputs, kwargs, saving
            )
        )
        on_leader(lambda: _replace(saving, target.absolute()))
    finally:
        if is_writer:
            shutil.rmtree(saving, ignore_errors=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    """A table of a model.

    Attributes:
        name: full.
        path: of its collection, and the collection.
        config: TorchRec's.
        found: where a backend serves it; None for a stock table.
        sharding_type: None where it is not sharded.
    """

    name: str
    collection: nn.Module
    config: Any
    found: FoundTable | None
    sharding_type: str | None

    @property
    def is_tensor_train(self) -> bool:
        return self.found is not None and self.found.planned.backend == "tt"

    @property
    def is_mean(self) -> bool:
        return getattr(self.config, "pooling", None) == PoolingType.MEAN

    @property
    def kind(self) -> int:
        """How its lookup in training pools."""
        kind = ops.SUM
        if self.is_mean:
            is_divided = self.sharding_type in SUMMED_OVER_RANKS
            own = ops.SCALED_SUM if self.found is None else ops.SCALED_ROWS
            kind = ops.DIVIDED_SUM if is_divided else own
        return kind + (ops.FUSED if self.found is None else 0)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Arguments of an export, by full name of a table."""

    rows: dict[str, RowFormat]
    unknown: dict[str, Any]
    checkpoint: str | None
    memory_bytes: int

    @classmethod
    def of(
        cls,
        tables: Sequence[_Table],
        rows: Rows | None,
        unknown: Unknown | Mapping[str, Unknown],
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        target: Path,
        deltas: str | os.PathLike[str] | None,
        memory_bytes: int,
    ) -> _Chosen:
        """Checked arguments.

        Raises:
            ValueError: one is impossible.
        """
        if not tables:
            raise ValueError(
                "the model has no EmbeddingBagCollection and no EmbeddingCollection: torch.export "
                "alone exports it."
            )
        if memory_bytes < 1:
            raise ValueError(f"memory_bytes is {memory_bytes}, but must be at least 1.")
        if (target.exists() or target.is_symlink()) and not (target / MANIFEST).is_file():
            raise ValueError(
                f"{target} is no exported model and would be replaced by one: name a folder that "
                "doesn't exist."
            )
        _check_inputs(inputs, kwargs)
        names = [table.name for table in tables]
        of_rows = _by_table(rows, names)
        of_unknown = _by_table(unknown, names)
        chosen: dict[str, RowFormat] = {}
        unknown_rows: dict[str, Any] = {}
        for table in tables:
            named = isinstance(rows, Mapping) and table.name in of_rows
            if not table.is_tensor_train or named:
                own = _TRAINED_AS.get(_dtype_of(table), "fp32")
                what = f"rows of table {table.name!r}"
                chosen[table.name] = check_row_format(of_rows.get(table.name, own), what)
            elif (shard := table.found.planned.shards[0]) and tt_options_of(
                shard
            ).cache is not None:
                raise ValueError(
                    f"table {table.name!r} has a cache, whose rows its cores lack: export it as "
                    f"rows, as by rows={{{table.config.name!r}: 'fp32'}}."
                )
            unknown_rows[table.name] = _checked_unknown(
                table, of_unknown.get(table.name, "initial")
            )
        return cls(chosen, unknown_rows, _newest_digest(deltas), memory_bytes)

    def has_cores(self, table: _Table) -> bool:
        """Whether a table is written as cores."""
        return table.name not in self.rows


def _newest_digest(deltas: str | os.PathLike[str] | None) -> str | None:
    if deltas is None:
        return None
    newest = Chain(Path(deltas)).newest()
    if newest is None:
        raise ValueError(
            f"deltas is {os.fspath(deltas)!r}, where no checkpoint of a DeltaWriter is: write one "
            "first."
        )
    return newest.digest


def _by_table(value: Any, names: Sequence[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    return {find_name(name, names): its for name, its in value.items()}


def _checked_unknown(table: _Table, value: Any) -> str | list[float]:
    dim = table.config.embedding_dim
    if isinstance(value, str) and value in ("initial", "zero"):
        return value
    if isinstance(value, Tensor) or (isinstance(value, Sequence) and not isinstance(value, str)):
        row = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
        if tuple(row.shape) == (dim,) and bool(row.isfinite().all()):
            return row.tolist()
    raise ValueError(
        f"unknown is {value!r} for table {table.name!r}, but must be 'initial', 'zero' or a row of "
        f"{dim} finite numbers."
    )


def _check_inputs(inputs: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        raise ValueError(
            f"inputs is a {type(inputs).__name__}, but must be a tuple of the positional arguments "
            "of the model's forward."
        )
    _, records, tensors = describe_inputs(tuple(inputs), dict(kwargs or {}))
    left = list(tensors)
    for record in records:
        if record.kind == "ids":
            values, lengths = left.pop(0), left.pop(0)
            del left[: record.is_weighted]
            if values.numel() < 2 or lengths.shape[1] < 2:
                raise ValueError(
                    f"inputs hold {values.numel()} ids of {lengths.shape[1]} samples, but must "
                    "hold at least 2 ids of 2 samples, so that any numbers are exported."
                )
        elif record.kind == "tensor":
            left.pop(0)


def _dtype_of(table: _Table) -> torch.dtype:
    if table.found is not None:
        return table.found.planned.shards[0].dtype
    names = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    return names.get(table.config.data_type.name, torch.float32)


def _find_tables(model: nn.Module) -> list[_Table]:
    """All tables of a model, in the order of its modules."""
    tables: list[_Table] = []
    for path, module in named_modules(model):
        if not isinstance(module, _COLLECTIONS):
            continue
        is_bags = isinstance(module, _BAGS)
        attribute = "embedding_bags" if is_bags else "embeddings"
        found = module.found_tables() if isinstance(module, BackendCollection) else {}
        plan = getattr(module, "module_sharding_plan", {})
        for config in _configs(module):
            sharding = plan.get(config.name)
            tables.append(
                _Table(
                    joined(joined(path, attribute), config.name),
                    module,
                    config,
                    found.get(config.name),
                    None if sharding is None else sharding.sharding_type,
                )
            )
    return tables


def _configs(module: nn.Module) -> Sequence[Any]:
    if isinstance(module, ShardedEmbeddingBagCollection):
        return module._embedding_bag_configs
    if isinstance(module, ShardedEmbeddingCollection):
        return module._embedding_configs
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs()


def _outputs(module: nn.Module, tables: Sequence[_Table]) -> list[Output]:
    """The outputs of a collection in the order that it gives them in."""
    features = [feature for table in tables for feature in table.config.feature_names]
    outputs: dict[str, Output] = {}
    for table in tables:
        for feature in table.config.feature_names:
            is_shared = features.count(feature) > 1
            name = f"{feature}@{table.config.name}" if is_shared else feature
            dim = table.config.embedding_dim
            outputs[name] = Output(name, feature, table.name, dim, table.kind)
    order = (
        module._embedding_names if isinstance(module, ShardedEmbeddingBagCollection) else outputs
    )
    return [outputs[name] for name in order]


def _batches(model: nn.Module, table: _Table) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and rows of a table, the same on every rank."""
    if table.found is None:
        attribute = "embedding_bags" if isinstance(table.collection, _BAGS) else "embeddings"
        module = getattr(table.collection, attribute)[table.config.name]
        weight = getattr(module, "weight", None)
        if table.sharding_type in (None, "data_parallel") and isinstance(weight, Tensor):
            for ids in torch.arange(weight.shape[0]).split(1 << 16):
                yield ids, weight.detach()[ids.to(weight.device)].float().cpu()
            return
    yield from export_rows(model, table.name)


def _write_rows(
    model: nn.Module, table: _Table, chosen: _Chosen, number: int, folder: Path, is_writer: bool
) -> TableRecord | None:
    """Writes a table; its record, on the rank that writes."""
    row_format = chosen.rows[table.name]
    dim = table.config.embedding_dim
    builder = TableBuilder(dim, row_format, folder, chosen.memory_bytes)
    failure: Exception | None = None
    for ids, rows in _batches(model, table):
        # All ranks take part to the end, also where this one can't write any more.
        if is_writer and failure is None:
            try:
                builder.add(ids, rows)
            except (OSError, ValueError) as error:
                failure = error

    def finish() -> TableRecord:
        if failure is not None:
            raise _named(table, failure)
        try:
            written = builder.finish(folder / f"rows-{number:04d}.table")
        except ValueError as error:
            raise _named(table, error) from None
        unknown = chosen.unknown[table.name]
        row = unknown if isinstance(unknown, list) else None
        return TableRecord(table.name, written, _initial(table, unknown), row)

    return on_leader(finish)


def _named(table: _Table, error: Exception) -> Exception:
    return type(error)(f"table {table.name!r}: {error}") if isinstance(error, ValueError) else error


def _initial(table: _Table, unknown: str | list[float]) -> Initial:
    seed, arguments = 0, dict(_ZERO)
    if unknown == "initial" and table.found is not None and table.found.planned.backend == "hkv":
        shard = table.found.planned.shards[0]
        seed = table_seed(shard.options.seed, shard.name)
        arguments = op_arguments(initializer_of(shard))
    for bound in ("low", "high"):
        if abs(arguments[bound]) == float("inf"):
            arguments[bound] = None
    return Initial(seed=seed, **arguments)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Tensor-Train tables of one call: each table once, and the table of each output."""

    tables: list[_Table]
    feature_tables: list[int]


def _tensor_train_groups(
    tables: Sequence[_Table], chosen: _Chosen
) -> tuple[list[_Group], dict[int, list[Part]]]:
    """Groups of Tensor-Train tables, and the parts of each collection, by its ``id``."""
    numbers = {
        table.name: n for n, table in enumerate(t for t in tables if not chosen.has_cores(t))
    }
    by_name = {table.name: table for table in tables}
    groups: list[_Group] = []
    parts: dict[int, list[Part]] = {}
    for collection in {id(table.collection): table.collection for table in tables}.values():
        its = [table for table in tables if table.collection is collection]
        outputs = _outputs(collection, its)
        rows: list[int] = []
        cores: dict[tuple[bool, int], list[int]] = {}
        for number, output in enumerate(outputs):
            table = by_name[output.table]
            if chosen.has_cores(table):
                # Sequences of one call have the same dim.
                dim = 0 if isinstance(collection, _BAGS) else output.dim
                cores.setdefault((table.is_mean, dim), []).append(number)
            else:
                rows.append(number)
        made = [Part(rows, [numbers[outputs[number].table] for number in rows])] if rows else []
        for (is_mean, _), members in cores.items():
            names = list(dict.fromkeys(outputs[number].table for number in members))
            feature_tables = [names.index(outputs[number].table) for number in members]
            made.append(Part(members, group=len(groups), is_mean=is_mean))
            groups.append(_Group([by_name[name] for name in names], feature_tables))
        parts[id(collection)] = made
    return groups, parts


def _write_cores(group: _Group, number: int, folder: Path, is_writer: bool) -> TTGroupRecord | None:
    path = folder / f"cores-{number:04d}.bin"
    cores = [core for table in group.tables for core in _cores(table)]

    def write() -> TTGroupRecord:
        with open(path, "xb") as file:
            for core in cores:
                file.write(core.contiguous().view(torch.uint8).numpy())
            file.flush()
            os.fsync(file.fileno())
        shapes = [shape_of(table.found.planned.shards[0]) for table in group.tables]
        return TTGroupRecord(
            [table.name for table in group.tables],
            [ShapeRecord(s.num_embeddings, s.embedding_dim, s.p, s.q, s.ranks) for s in shapes],
            group.feature_tables,
            str(cores[0].dtype).removeprefix("torch."),
            FileRecord.of(path),
        )

    return on_leader(write)


def _cores(table: _Table) -> list[Tensor]:
    """The cores of a table in host memory, on every rank."""
    state, shard = table.found.state, table.found.planned.shards[0]
    shape, holder = shape_of(shard), state.ranks[0]
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    rank = 0 if not dist.is_initialized() else dist.get_rank()
    own = None
    if is_alone or rank == holder:
        own = table.found.collection.group_lookups()[shard.key].cores(shard.key)
        own = [core.detach().cpu() for core in own]
    if is_alone:
        return own
    sent: list[Any] = [own]
    dist.broadcast_object_list(sent, src=holder, group=table.found.collection.sharding_group)
    assert len(sent[0]) == shape.num_cores
    return sent[0]


def _write_program(
    model: nn.Module,
    tables: Sequence[_Table],
    chosen: _Chosen,
    parts: Mapping[int, list[Part]],
    records: Sequence[TableRecord],
    groups: Sequence[TTGroupRecord],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    folder: Path,
) -> None:
    current = Current()
    lookups: dict[int, nn.Module] = {}
    for collection in {id(table.collection): table.collection for table in tables}.values():
        outputs = _outputs(collection, [t for t in tables if t.collection is collection])
        is_bags = isinstance(collection, _BAGS)
        make = PooledLookup if is_bags else SequenceLookup
        lookups[id(collection)] = make(
            outputs, parts[id(collection)], is_bags and bool(_is_weighted(collection)), current
        )
    tree, leaves, tensors = describe_inputs(tuple(inputs), dict(kwargs or {}))
    program = Program(with_lookups(model, lookups), current, tree, leaves).eval()
    exported = trace(program, [tensor.detach().cpu() for tensor in tensors])
    path = folder / "program.pt2"
    torch.export.save(exported, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    Manifest(
        secrets.token_hex(8),
        list(records),
        list(groups),
        FileRecord.of(path),
        torch.utils._pytree.treespec_dumps(tree),
        leaves,
        chosen.checkpoint,
    ).write(folder)


def _is_weighted(collection: nn.Module) -> bool:
    weighted = collection._is_weighted if hasattr(collection, "_is_weighted") else None
    return collection.is_weighted() if weighted is None else weighted


def _make_folder(saving: Path) -> None:
    if saving.exists():
        shutil.rmtree(saving)  # what a killed export left
    saving.mkdir(parents=True)


def _replace(saving: Path, target: Path) -> None:
    """Puts a folder in the place of an earlier one, or of none."""
    sync_folder(saving)
    previous = target.with_name(f".{target.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if target.exists():
        target.rename(previous)
    saving.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)
