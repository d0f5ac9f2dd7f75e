"""Writes a trained model to a folder that :func:`torchrec_hkv.serving.load` opens."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrec_hkv.collective import on_every_rank, on_leader
from torchrec_hkv.serving.arguments import ExportArguments, ExportSettings, Rows, Unknown
from torchrec_hkv.serving.export_folder import ExportFolder
from torchrec_hkv.serving.lookup_counts import CountsWriter
from torchrec_hkv.serving.manifest import (
    Initial,
    ServingFileRecord,
    ServingManifest,
    ServingTableRecord,
    ShapeRecord,
    TTGroupRecord,
)
from torchrec_hkv.serving.model_tables import (
    ModelTable,
    find_tables,
    gives_ids,
    has_bags,
    is_weighted,
    outputs_of,
)
from torchrec_hkv.serving.packaging import write_package
from torchrec_hkv.serving.sources import ZEROS
from torchrec_hkv.serving.table_builder import MEMORY_BYTES, TableBuilder
from torchrec_hkv.serving.tracing import (
    CurrentHandle,
    LookupCall,
    Output,
    PooledLookup,
    Program,
    SequenceLookup,
    describe_inputs,
    trace,
    unwrapped,
    with_lookups,
)


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    rows: Rows | None = None,
    *,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    unknown: Unknown | Mapping[str, Unknown] = "initial",
    deltas: str | os.PathLike[str] | None = None,
    memory_bytes: int = MEMORY_BYTES,
    package: bool = False,
    lookup_counts: bool = False,
) -> None:
    """Writes a model for serving. This is a collective call if the model is sharded.

    Writes the model's forward in evaluation mode as one program, and its tables. The model does not
    change.

    Args:
        model: a ``DistributedModelParallel``, or a module with unsharded collections, in host
            memory or on GPUs. With ``checkpoint``, the module as it is before sharding; its
            parameters may be on the meta device.
        folder: the folder to write, the same on all ranks. A model in it is replaced in one step.
        rows: row formats, for all tables or by table: ``"fp32"``, ``"fp16"``, ``"bf16"``,
            ``"int8"`` or ``"int4"``. Other tables keep their own format. Tensor-Train tables are
            written as cores unless they are named here.
        inputs: positional arguments of the model's forward, as in training: a batch of at least two
            samples and two ids. Only its shapes and dtypes matter.
        kwargs: keyword arguments of the model's forward.
        checkpoint: folder of a checkpoint, or of a base of a chain, to read rows, cores and dense
            tensors from, in one process without a process group. For a base,
            :func:`torchrec_hkv.serving.follow` begins with the delta after it. Means of weighted
            bags are refused, because they depend on the sharding. None: ``model`` provides them.
        unknown: the row of an id that a table lacks, for all tables or by table: ``"initial"``, the
            row that training starts from (zeros for stock tables); ``"zero"``; or ``embedding_dim``
            numbers.
        deltas: the folder of a ``DeltaWriter`` that has just written the current state of the
            model. :func:`torchrec_hkv.serving.follow` then begins with the next delta. None: it
            begins with the chain's base.
        memory_bytes: memory for ids and rows of a table, in its row format, in bytes. Further
            entries go through a temporary file in the folder.
        package: whether to also compile the program for the CPU, as an AOTInductor package for C++
            programs (``package.pt2``). This needs a C++ compiler and about a minute, and supports
            no tables that are written as cores.
        lookup_counts: whether to also write the number of lookups of each row in training, one byte
            for each row, for hash tables whose eviction counts lookups (``"adaptive"``, ``"lfu"``,
            ``"epoch_lfu"`` and ``AgedLFU``). ``load(hbm_bytes=)`` then begins with the rows that
            were looked up most.

    Raises:
        TypeError: ``inputs`` contain anything but tensors, ``KeyedJaggedTensor``, numbers, strings
            and None.
        ValueError: an argument is invalid, the model has no collection of tables, its forward can't
            be exported, the checkpoint is damaged or of another model, or another process exports
            to the folder. The folder does not change.
        OSError: the folder can't be written.
    """
    target = Path(folder)
    export_arguments = ExportArguments(
        model, target, rows, inputs, kwargs, unknown, checkpoint, deltas, memory_bytes, package,
        lookup_counts,
    )  # fmt: skip
    tables = find_tables(model)
    checked: list[ExportSettings] = []
    on_every_rank(lambda: checked.append(ExportSettings.of(export_arguments, tables)))
    place = ExportFolder(target)
    try:
        on_leader(place.open)
        _Writer(export_arguments, tables, checked[0], place.path).write()
        on_leader(place.replace)
    finally:
        place.close()


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """The Tensor-Train tables that one call looks up: the tables, and the table of each output."""

    tables: list[ModelTable]
    feature_tables: list[int]


class _Writer:
    """Writes the files of a model; all ranks take part."""

    def __init__(
        self,
        arguments: ExportArguments,
        tables: Sequence[ModelTable],
        choices: ExportSettings,
        folder: Path,
    ) -> None:
        self._arguments, self._tables = arguments, tables
        self._choices, self._source = choices, choices.source
        self._folder = folder

    def write(self) -> None:
        of_rows = [table for table in self._tables if not self._choices.has_cores(table)]
        records = [self._rows(table, number) for number, table in enumerate(of_rows)]
        groups, lookups = self._lookups([table.name for table in of_rows])
        group_records = [self._cores(group, number) for number, group in enumerate(groups)]
        on_leader(lambda: self._program(lookups, records, group_records))

    def _rows(self, table: ModelTable, number: int, largest: float = 0.0) -> ServingTableRecord:
        """Writes a table, given the largest known absolute value of its rows."""
        row_format, memory = self._choices.rows[table.name], self._choices.memory_bytes
        order = self._source.order(table)
        with (
            TableBuilder(table.dim, row_format, self._folder, memory, largest, order) as builder,
            CountsWriter(self._folder) as counts,
        ):
            failure = self._feed(builder, counts, table)
            again = on_leader(lambda: None if failure else builder.largest_if_void)
            if again is None:
                return on_leader(lambda: self._finished(builder, counts, table, number, failure))
        return self._rows(table, number, again)  # all ranks yield all rows again

    def _feed(
        self, builder: TableBuilder, counts: CountsWriter, table: ModelTable
    ) -> Exception | None:
        """Passes all rows of a table to the builder, and returns its error. Every rank iterates to
        the end, because batches are collective calls."""
        failure: Exception | None = None
        consumers = [(builder.add, self._source.batches(table))]
        if self._arguments.lookup_counts:
            consumers.append((counts.add, self._source.counts(table)))
        for add, batches in consumers:
            for ids, rows in batches:
                if _is_writer() and failure is None:
                    try:
                        add(ids, rows)
                    except (OSError, ValueError) as error:
                        failure = error
        return failure

    def _finished(
        self,
        builder: TableBuilder,
        counts: CountsWriter,
        table: ModelTable,
        number: int,
        failure: Exception | None,
    ) -> ServingTableRecord:
        if failure is not None:
            raise _named(table, failure)
        try:
            written = builder.finish(self._folder / f"rows-{number:04d}.table")
            of_counts = counts.finish(self._folder / f"counts-{number:04d}.bin", written)
        except ValueError as error:
            raise _named(table, error) from None
        unknown = self._choices.unknown[table.name]
        row = unknown if isinstance(unknown, list) else None
        return ServingTableRecord(
            table.name, written, self._initial(table, unknown), row, of_counts
        )

    def _initial(self, table: ModelTable, unknown: str | list[float]) -> Initial:
        seed, start = self._source.start(table) if unknown == "initial" else ZEROS
        arguments = dict(start)
        for bound in ("low", "high"):
            if abs(arguments[bound]) == float("inf"):
                arguments[bound] = None
        return Initial(seed=seed, **arguments)

    def _cores(self, group: _Group, number: int) -> TTGroupRecord | None:
        path = self._folder / f"cores-{number:04d}.bin"
        cores = [core for table in group.tables for core in self._source.cores(table)]

        def write() -> TTGroupRecord:
            with open(path, "xb") as file:
                for core in cores:
                    file.write(core.contiguous().view(torch.uint8).numpy())
                file.flush()
                os.fsync(file.fileno())
            shapes = [self._source.shape(table) for table in group.tables]
            return TTGroupRecord(
                [table.name for table in group.tables],
                [ShapeRecord(s.num_embeddings, s.embedding_dim, s.p, s.q, s.ranks) for s in shapes],
                group.feature_tables,
                str(cores[0].dtype).removeprefix("torch."),
                ServingFileRecord.of(path),
            )

        return on_leader(write)

    def _lookups(self, of_rows: Sequence[str]) -> tuple[list[_Group], dict[int, _Collection]]:
        """Groups of Tensor-Train tables, and collections by their ``id``."""
        numbers = {name: number for number, name in enumerate(of_rows)}
        by_name = {table.name: table for table in self._tables}
        groups: list[_Group] = []
        found: dict[int, _Collection] = {}
        for module in {id(table.collection): table.collection for table in self._tables}.values():
            tables = [table for table in self._tables if table.collection is module]
            outputs = outputs_of(module, tables, [self._source.backend(t) is None for t in tables])
            rows: list[int] = []
            cores: dict[tuple[bool, int], list[int]] = {}
            for number, output in enumerate(outputs):
                table = by_name[output.table]
                if self._choices.has_cores(table):
                    # All sequences of a call have the same dim.
                    dim = 0 if has_bags(module) else output.dim
                    cores.setdefault((table.is_mean, dim), []).append(number)
                else:
                    rows.append(number)
            parts = [LookupCall(rows, [numbers[outputs[n].table] for n in rows])] if rows else []
            for (is_mean, _), members in cores.items():
                names = list(dict.fromkeys(outputs[number].table for number in members))
                feature_tables = [names.index(outputs[number].table) for number in members]
                parts.append(LookupCall(members, group=len(groups), is_mean=is_mean))
                groups.append(_Group([by_name[name] for name in names], feature_tables))
            found[id(module)] = _Collection(module, outputs, parts)
        return groups, found

    def _program(
        self,
        collections: Mapping[int, _Collection],
        records: Sequence[ServingTableRecord],
        groups: Sequence[TTGroupRecord],
    ) -> None:
        current = CurrentHandle()
        lookups = {key: collection.lookup(current) for key, collection in collections.items()}
        tree, leaves, tensors = describe_inputs(
            tuple(self._arguments.inputs), dict(self._arguments.kwargs or {})
        )
        served = with_lookups(self._arguments.model, lookups, self._source.dense)
        program = Program(served, current, tree, leaves).eval()
        exported = trace(program, [tensor.detach().cpu() for tensor in tensors])
        path = self._folder / "program.pt2"
        program_bytes = io.BytesIO()  # so that a full disk is an OSError
        torch.export.save(exported, program_bytes)
        path.write_bytes(program_bytes.getbuffer())
        _sync(path)
        package = None
        if self._arguments.package:
            write_package(exported, self._folder / "package.pt2", records, groups)
            _sync(self._folder / "package.pt2")
            package = ServingFileRecord.of(self._folder / "package.pt2")
        ServingManifest(
            secrets.token_hex(8),
            list(records),
            list(groups),
            ServingFileRecord.of(path),
            torch.utils._pytree.treespec_dumps(tree),
            leaves,
            self._source.digest,
            package,
            _parameters(self._arguments.model, len(self._arguments.inputs)),
        ).write(self._folder)


@dataclasses.dataclass(frozen=True, eq=False)
class _Collection:
    """A collection of the model, its outputs, and the calls that look them up."""

    module: nn.Module
    outputs: list[Output]
    parts: list[LookupCall]

    def lookup(self, current: CurrentHandle) -> nn.Module:
        """The module that replaces the collection in the program."""
        if has_bags(self.module):
            return PooledLookup(self.outputs, self.parts, is_weighted(self.module), current)
        return SequenceLookup(self.outputs, self.parts, gives_ids(self.module), current)


def _parameters(model: nn.Module, count: int) -> list[str]:
    """Names of the forward's first ``count`` parameters; fewer if it takes ``*args``."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return names[:count]


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _named(table: ModelTable, error: Exception) -> Exception:
    return type(error)(f"table {table.name!r}: {error}") if isinstance(error, ValueError) else error


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
