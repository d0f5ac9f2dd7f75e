"""Models that serve: opened from a folder, called as in training, without TorchRec."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchrec_hkv import _C
from torchrec_hkv.serving import ops
from torchrec_hkv.serving.keyed_ids import tensors_of
from torchrec_hkv.serving.manifest import ServingManifest
from torchrec_hkv.serving.metrics import BUCKETS, family, histogram, labelled
from torchrec_hkv.serving.open_files import open_group, open_tables
from torchrec_hkv.serving.placement import HbmBytes, Placement, rechoose_hot_rows
from torchrec_hkv.serving.served_program import ServedProgram
from torchrec_hkv.serving.tables import ReadOnlyTables, ServingHotRows
from torchrec_hkv.tensor_train import TTGroup

if TYPE_CHECKING:
    from torchrec_hkv.serving.following import Follower

__all__ = ["Freshness", "ServingModel", "load", "ops"]

#: Number of attempts to load a folder that other exports replace during the load.
_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True, eq=False)
class ModelVersion:
    """The tables and parameters that a call of the model reads; immutable.

    Attributes:
        tables: the model's tables of rows.
        cores: the groups of Tensor-Train tables, each with its cores.
        program: the forward.
        checkpoint: digest of the checkpoint that this version holds, or None if unknown.
        number: number of the checkpoint in its chain, or None if unknown.
        written: time when the checkpoint was written, in seconds since 1970, or None if unknown.
        base: digest of the base that the tables' files hold; None if the export wrote the files.
    """

    tables: ReadOnlyTables
    cores: Sequence[tuple[TTGroup, list[Tensor]]]
    program: ServedProgram
    checkpoint: str | None = None
    number: int | None = None
    written: float | None = None
    base: str | None = None

    def with_hot_rows(self, rows: Tensor, hot: ServingHotRows) -> ModelVersion:
        """This version with other hot rows for the table whose rows are ``rows``, if it has it."""
        if all(table.rows is not rows for table in self.tables.tables):
            return self
        tables = [
            dataclasses.replace(table, hot=hot) if table.rows is rows else table
            for table in self.tables.tables
        ]
        opened = ReadOnlyTables(tables, self.tables.counters, self.cores)
        return dataclasses.replace(self, tables=opened)


@dataclasses.dataclass(frozen=True)
class Freshness:
    """How new a served model is.

    Attributes:
        number: number of the served checkpoint in its chain, or None if unknown.
        age: seconds since the checkpoint was written, or None if unknown.
        behind: number of later checkpoints that the chain had at the last poll, or None if unknown.
        is_following: whether later checkpoints will be applied.
        error: the error that ended following, or None.
        apply_seconds: seconds that the last checkpoint took to apply, or None if none was applied.
    """

    number: int | None
    age: float | None
    behind: int | None
    is_following: bool
    error: str | None
    apply_seconds: float | None


class ServingModel:
    """A model that serves. Several threads may call it at the same time.

    Create it by :func:`load`.
    """

    def __init__(
        self,
        folder: Path,
        manifest: ServingManifest,
        version: ModelVersion,
        placement: Placement,
    ) -> None:
        #: Folder from which the model was loaded.
        self.folder = folder
        #: Device of the tables.
        self.device = placement.device
        #: Whether the tables were read into this process's memory instead of mapped.
        self.resident = placement.resident
        self._placement = placement
        self._save = manifest.save
        self._inputs = manifest.inputs
        self._tree = pytree.treespec_loads(manifest.tree)
        self._parameters = tuple(manifest.parameters)
        self._names = _leaf_names(manifest)
        # Most models take positional arguments only, whose structure need not be matched.
        args, kwargs = self._tree.children()
        is_flat = all(child.is_leaf() for child in args.children()) and not kwargs.num_leaves
        self._flat_args = args.num_leaves if is_flat else None
        self._version = version
        self._follower: Follower | None = None
        # Held while one version replaces another, and while hot rows are chosen.
        self._switching, self._choosing = threading.Lock(), threading.Lock()
        self._calls = _C.ServedCalls(BUCKETS)

    @property
    def features(self) -> tuple[tuple[str, ...], ...]:
        """Names of the features of each argument of ids, in order."""
        return tuple(tuple(each.keys) for each in self._inputs if each.kind == "ids")

    def counters(self) -> dict[str, dict[str, int]]:
        """Counters by full table name: ``lookups``, the number of looked up ids, and ``unknown``,
        the number of these ids that the table lacks. Tables with rows in host memory
        (``hbm_bytes``) also have ``host_lookups``, the number of ids whose row was read from host
        memory. Tensor-Train tables are not counted."""
        tables = self._version.tables
        by_table = {
            name: {"lookups": counts[0], "unknown": counts[1]}
            for name, counts in zip(tables.names, tables.counters.tolist(), strict=True)
        }
        for table in tables.tables:
            if table.hot is not None:
                by_table[table.name]["host_lookups"] = int(table.hot.host_lookups)
        return by_table

    def choose_hot_rows(self) -> None:
        """Chooses the rows in HBM again, for tables with rows in host memory (``hbm_bytes``).

        Lookups count which rows they read. The rows with the largest counts are copied to HBM, and
        counts are halved, so that old lookups matter less at the next choice. Calls of the model
        run meanwhile, and use the new rows once all are in HBM. The copy needs as much HBM as the
        largest table's rows in HBM.

        Raises:
            torch.OutOfMemoryError: HBM has no room. Some tables keep their previous rows.
        """
        with self._choosing:
            for number in range(len(self._version.tables.tables)):
                table = self._version.tables.tables[number]
                if table.hot is None:
                    continue
                hot = rechoose_hot_rows(table)
                with self._switching:
                    self._version = self._version.with_hot_rows(table.rows, hot)
                    if self._follower is not None:
                        self._follower.use_hot_rows(table.rows, hot)

    def switch(self, version: ModelVersion) -> ModelVersion:
        """Serves another version; returns the previous one. The caller holds ``_switching``."""
        before = self._version
        for old, new in zip(before.tables.tables, version.tables.tables, strict=True):
            if new.hot is not old.hot and new.rows is old.rows:  # hot rows were chosen meanwhile
                version = version.with_hot_rows(old.rows, old.hot)
        self._version = version
        return before

    def freshness(self) -> Freshness:
        """Which checkpoint is served, and whether the model follows a chain of deltas."""
        version, now = self._version, time.time()
        age = None if version.written is None else max(0.0, now - version.written)
        if self._follower is None:
            return Freshness(version.number, age, None, False, None, None)
        return self._follower.freshness(version, age)

    def metrics(self) -> str:
        """Metrics in Prometheus' text format: lookups and unknown ids by table, the version, its
        age, the time to apply it, and a histogram of call times. On a GPU, the time of a call ends
        when its work is queued."""
        name, freshness, counters = "torchrec_hkv_serving", self.freshness(), self.counters()
        gauges = {
            "version": ("Number of the checkpoint that is served.", freshness.number),
            "age_seconds": ("Seconds since that checkpoint was written.", freshness.age),
            "behind": ("Later checkpoints in the chain.", freshness.behind),
            "following": ("Whether later ones are applied.", int(freshness.is_following)),
            "apply_seconds": ("Seconds to apply the last one.", freshness.apply_seconds),
        }
        lines: list[str] = []
        for key, about in (
            ("lookups", "Ids looked up."),
            ("unknown", "Ids looked up that the table lacks."),
            ("host_lookups", "Ids looked up whose row was in host memory, not in HBM."),
        ):
            counted = ((n, c[key]) for n, c in counters.items() if key in c)
            sample_lines = (labelled(f"{name}_{key}_total", *each) for each in counted)
            lines += family(f"{name}_{key}_total", "counter", about, sample_lines)
        for key, (about, value) in gauges.items():
            samples = [] if value is None else [f"{name}_{key} {value}"]
            lines += family(f"{name}_{key}", "gauge", about, samples)
        calls, times = f"{name}_call_seconds", self._calls.histogram()
        lines += family(calls, "histogram", "Time of calls.", histogram(calls, *times))
        return "\n".join(lines) + "\n"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward.

        Args:
            args: positional arguments, as in training. In place of a ``KeyedJaggedTensor``, you can
                pass a :class:`KeyedIds`, or a dictionary of lists: for each feature the ids of each
                sample.
            kwargs: keyword arguments, as in training.

        Returns:
            The result of the model's forward.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: an argument has the wrong structure or shape, or a feature is missing.
        """
        return self._calls.call(self._forward, (args, kwargs))

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        version = self._version  # all lookups of the call use the same version
        return version.program(version.tables.handle, self._flatten(args, kwargs))

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if kwargs:
            args, kwargs = self._positional(args, kwargs)
        leaves: Sequence[Any] = args
        if kwargs or len(args) != self._flat_args:
            try:
                leaves = self._tree.flatten_up_to((args, kwargs))
            except ValueError as error:
                raise ValueError(
                    f"the arguments have another structure than those that were exported: {error}"
                ) from None
        tensors: list[Tensor] = []
        for number, leaf in enumerate(leaves):
            record = self._inputs[number]
            if record.kind == "ids":
                tensors += tensors_of(leaf, record.keys, record.is_weighted, self.device)
            elif record.kind == "tensor":
                if not isinstance(leaf, Tensor):
                    raise TypeError(
                        f"{self._names[number]} is a {type(leaf).__name__}, but must be a tensor."
                    )
                tensors.append(leaf.to(self.device, non_blocking=True))
            elif leaf != record.value:
                raise ValueError(
                    f"{self._names[number]} is {leaf!r}, but the model was exported with "
                    f"{record.value!r}."
                )
        return tensors

    def _positional(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves arguments that were given by name, and exported by position, to their positions."""
        rest = dict(kwargs)
        for name in self._parameters[len(args) :]:
            if name not in rest:
                break
            args = (*args, rest.pop(name))
        return args, rest


def load(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    mapped: bool = True,
    verify: bool = False,
    hbm_bytes: HbmBytes | None = None,
) -> ServingModel:
    """Opens a model that :func:`torchrec_hkv.serving.export` has written.

    Tables in host memory are mapped, not read: processes on one machine share them, and a row is
    read from the disk at its first lookup.

    Args:
        folder: the model's folder. It must stay while the model is used.
        device: the device that holds the tables and runs the model.
        mapped: whether tables in host memory are mapped. If False, they are read at once into this
            process's memory, in huge pages if the system grants them. Lookups in tables much larger
            than the processor's caches are then faster.
        verify: whether to read all tables and compare their checksums. The checksums of other files
            are always compared.
        hbm_bytes: bytes of HBM for rows: one number that all tables share equally, or numbers by
            table. Tables whose rows fit are in HBM. Other tables have all rows in pinned host
            memory, which the GPU reads in place, and the rows that
            :meth:`ServingModel.choose_hot_rows` chooses also in HBM. At first these are the rows
            that were looked up most in training (``export(lookup_counts=True)``), or the first
            rows. A table's index, counts of lookups, and changes of deltas take further HBM. None,
            and tables that are not named: all rows are in HBM.

    Raises:
        ValueError: a file is missing, damaged or of another export, there is no such device, or
            ``hbm_bytes`` is invalid. The message names it.
    """
    path, device = Path(folder).absolute(), torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but this process has no CUDA GPU.")
    resident = not mapped and device.type == "cpu"
    for _ in range(_ATTEMPTS):
        manifest = ServingManifest.read(path)
        try:
            names = [record.name for record in manifest.tables]
            placement = Placement.checked(device, resident, hbm_bytes, names)
            version = _open(path, manifest, placement, verify)
        except (ValueError, OSError):
            if not _is_replaced(path, manifest):
                raise
        else:
            if not _is_replaced(path, manifest):
                return ServingModel(path, manifest, version, placement)
    raise ValueError(f"{path} was replaced {_ATTEMPTS} times while it was loaded: try again.")


def _open(
    path: Path, manifest: ServingManifest, placement: Placement, verify: bool
) -> ModelVersion:
    device = placement.device
    manifest.program.check(path)
    tables = open_tables(path, manifest, placement, verify)
    groups = [open_group(path, record, device) for record in manifest.tensor_train]
    exported = torch.export.load(path / manifest.program.file)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        exported = move_to_device_pass(exported, device)
    counters = torch.zeros(len(tables), 2, dtype=torch.int64, device=device)
    opened = ReadOnlyTables(tables, counters, groups)
    program = ServedProgram(exported, _names_of(manifest))
    return ModelVersion(opened, groups, program, manifest.checkpoint)


def _leaf_names(manifest: ServingManifest) -> list[str]:
    """Names of the arguments' leaves in messages, such as ``args[0]``."""
    tree = pytree.treespec_loads(manifest.tree)
    numbers = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
    names: list[str] = []
    for path, _ in pytree.tree_flatten_with_path(numbers)[0]:
        names.append(("kwargs" if path[0].idx else "args") + pytree.keystr(path[1:]))
    return names


def _names_of(manifest: ServingManifest) -> list[str]:
    """Names of the program's tensors in messages."""
    names: list[str] = []
    for record, name in zip(manifest.inputs, _leaf_names(manifest), strict=True):
        if record.kind == "ids":
            parts = (
                ("values", "lengths", "weights") if record.is_weighted else ("values", "lengths")
            )
            names += [f"{part} of {name}" for part in parts]
        elif record.kind == "tensor":
            names.append(name)
    return names


def _is_replaced(path: Path, manifest: ServingManifest) -> bool:
    """Whether another export has replaced the folder, so that the opened files may be mixed."""
    try:
        return ServingManifest.read(path).save != manifest.save
    except ValueError:
        return False
