"""Models that serve: opened from a folder, called as in training, without TorchRec."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.keyed_ids import tensors_of
from torchrec_hkv.serving.manifest import Manifest, TableRecord, TTGroupRecord
from torchrec_hkv.serving.metrics import Latencies, family, labelled
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables
from torchrec_hkv.tensor_train import TTGroup, TTShape

if TYPE_CHECKING:
    from torchrec_hkv.serving.following import Follower

__all__ = ["Freshness", "ServingModel", "load", "ops"]

#: How often a folder is opened again that another export replaces meanwhile.
_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """All that a call of a model reads; nothing of it changes.

    Attributes:
        tables: of the model.
        cores: of its groups of Tensor-Train tables, and the groups.
        program: takes the tables' handle and tensors.
        checkpoint: digest of the checkpoint that it holds; None: not known.
        number: of that one in its chain; None: not known.
        written: when that one was written, in seconds since 1970; None: not known.
    """

    tables: ReadOnlyTables
    cores: Sequence[tuple[TTGroup, list[Tensor]]]
    program: torch.nn.Module
    checkpoint: str | None = None
    number: int | None = None
    written: float | None = None


@dataclasses.dataclass(frozen=True)
class Freshness:
    """How new a served model is.

    Attributes:
        number: of the checkpoint in its chain that is served; None: not known.
        age: seconds since that one was written; None: not known.
        behind: how many later ones the chain had when it was last looked at; None: not known.
        is_following: whether later ones will be applied.
        error: why not, where something went wrong.
        apply_seconds: that the last one took; None: none was applied.
    """

    number: int | None
    age: float | None
    behind: int | None
    is_following: bool
    error: str | None
    apply_seconds: float | None


class ServingModel:
    """A model that serves. Calls of several threads may run at once.

    Made by :func:`load`.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        version: Version,
        device: torch.device,
        resident: bool,
    ) -> None:
        #: Where it was loaded from.
        self.folder = folder
        #: Where its tables are.
        self.device = device
        #: Whether its tables are in memory of this process, and not mapped.
        self.resident = resident
        self._inputs = manifest.inputs
        self._tree = pytree.treespec_loads(manifest.tree)
        self._version = version
        self._follower: Follower | None = None
        self._latencies = Latencies()

    @property
    def features(self) -> tuple[tuple[str, ...], ...]:
        """For each argument of ids, in their order, the names of its features."""
        return tuple(tuple(each.keys) for each in self._inputs if each.kind == "ids")

    def counters(self) -> dict[str, dict[str, int]]:
        """By full name of a table, ``lookups``, the ids that were looked up, and ``unknown``, those
        that it lacked. Tensor-Train tables don't count."""
        tables = self._version.tables
        return {
            name: {"lookups": counts[0], "unknown": counts[1]}
            for name, counts in zip(tables.names, tables.counters.tolist(), strict=True)
        }

    def freshness(self) -> Freshness:
        """Which checkpoint is served, and whether the model follows a chain of deltas."""
        version, now = self._version, time.time()
        age = None if version.written is None else max(0.0, now - version.written)
        if self._follower is None:
            return Freshness(version.number, age, None, False, None, None)
        return self._follower.freshness(version, age)

    def metrics(self) -> str:
        """Metrics in Prometheus' text format: lookups and unknown ids by table, the version, its
        age, how long it took to apply, and a histogram of the time of calls. On a GPU a call ends
        for it when its work is queued."""
        name, freshness, counters = "torchrec_hkv_serving", self.freshness(), self.counters()
        gauges = {
            "version": ("Number of the checkpoint that is served.", freshness.number),
            "age_seconds": ("Since that checkpoint was written.", freshness.age),
            "behind": ("Later checkpoints in the chain.", freshness.behind),
            "following": ("Whether they will be applied.", int(freshness.is_following)),
            "apply_seconds": ("That the last one took.", freshness.apply_seconds),
        }
        lines: list[str] = []
        for key, about in (
            ("lookups", "Ids that were looked up."),
            ("unknown", "Ids among them that a table lacked."),
        ):
            its = (labelled(f"{name}_{key}_total", n, c[key]) for n, c in counters.items())
            lines += family(f"{name}_{key}_total", "counter", about, its)
        for key, (about, value) in gauges.items():
            known = [] if value is None else [f"{name}_{key} {value}"]
            lines += family(f"{name}_{key}", "gauge", about, known)
        calls = f"{name}_call_seconds"
        lines += family(calls, "histogram", "Time of calls.", self._latencies.lines(calls))
        return "\n".join(lines) + "\n"

    @torch.inference_mode()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Args:
            args: as in training. In the place of a ``KeyedJaggedTensor``, one of these, a
                :class:`KeyedIds`, or a dictionary of lists, for each feature the ids of each
                sample.
            kwargs: likewise.

        Returns:
            What the model's forward returns.

        Raises:
            TypeError: an argument is of another type or dtype.
            ValueError: an argument has another structure or shape, or a feature is missing.
        """
        began = time.perf_counter()
        version = self._version  # the same one for all lookups of the call
        out = version.program(version.tables.handle, *self._flatten(args, kwargs))
        self._latencies.add(time.perf_counter() - began)
        return out

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        try:
            leaves = self._tree.flatten_up_to((args, kwargs))
        except ValueError as error:
            raise ValueError(
                f"the arguments have another structure than those that were exported: {error}"
            ) from None
        tensors: list[Tensor] = []
        for record, leaf in zip(self._inputs, leaves, strict=True):
            if record.kind == "ids":
                tensors += tensors_of(leaf, record.keys, record.is_weighted, self.device)
            elif record.kind == "tensor":
                if not isinstance(leaf, Tensor):
                    raise TypeError(
                        f"an argument is a {type(leaf).__name__}, but must be a tensor."
                    )
                tensors.append(leaf.to(self.device, non_blocking=True))
            elif leaf != record.value:
                raise ValueError(
                    f"an argument is {leaf!r}, but the model was exported with {record.value!r}."
                )
        return tensors


def load(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    mapped: bool = True,
    verify: bool = False,
) -> ServingModel:
    """Opens a model that :func:`torchrec_hkv.serving.export` has written.

    In host memory its tables are mapped, not read: processes of a machine share them, and what is
    looked up is read from the disk when it is first needed.

    Args:
        folder: of the model. It must stay while the model is used.
        device: to serve on.
        mapped: whether tables in host memory are mapped. Otherwise they are read at once, into
            memory of this process alone, in huge pages where the system grants them: lookups in
            tables much larger than the processor's caches are quicker.
        verify: whether to read all tables and compare their checksums. Those of other files always
            are.

    Raises:
        ValueError: a file is missing or damaged, or of another export; the sentence names it.
    """
    path, device = Path(folder).absolute(), torch.device(device)
    resident = not mapped and device.type == "cpu"
    for _ in range(_ATTEMPTS):
        manifest = Manifest.read(path)
        try:
            version = _open(path, manifest, device, resident, verify)
        except (ValueError, OSError):
            if not _is_replaced(path, manifest):
                raise
        else:
            if not _is_replaced(path, manifest):
                return ServingModel(path, manifest, version, device, resident)
    raise ValueError(f"{path} was replaced {_ATTEMPTS} times while it was loaded: try again.")


def _open(
    path: Path, manifest: Manifest, device: torch.device, resident: bool, verify: bool
) -> Version:
    manifest.program.check(path)
    tables = [_open_table(path, record, device, resident, verify) for record in manifest.tables]
    groups = [_open_group(path, record, device) for record in manifest.tensor_train]
    exported = torch.export.load(path / manifest.program.file)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        exported = move_to_device_pass(exported, device)
    opened = ReadOnlyTables(tables, _counters(len(tables), device), groups)
    return Version(opened, groups, exported.module(), manifest.checkpoint)


def _is_replaced(path: Path, manifest: Manifest) -> bool:
    """Whether another export has taken the folder's place: what was opened may be of both."""
    try:
        return Manifest.read(path).save != manifest.save
    except ValueError:
        return False


def _counters(tables: int, device: torch.device) -> Tensor:
    return torch.zeros(tables, 2, dtype=torch.int64, device=device)


def _open_table(
    folder: Path, record: TableRecord, device: torch.device, resident: bool, verify: bool
) -> ReadOnlyTable:
    if verify:
        record.rows.verify(folder)
    index, rows = record.rows.map(folder, resident)
    default = (
        None if record.default_row is None else torch.tensor(record.default_row, device=device)
    )
    return ReadOnlyTable(
        record.name,
        record.rows.dim,
        record.rows.row_format,
        index.to(device),
        rows.to(device),
        record.rows.unit,
        record.initial.seed,
        record.initial.arguments(),
        default,
    )


def _open_group(
    folder: Path, record: TTGroupRecord, device: torch.device
) -> tuple[TTGroup, list[Tensor]]:
    record.cores.check(folder)
    shapes = [TTShape(**dataclasses.asdict(shape)) for shape in record.shapes]
    group = TTGroup(shapes, record.feature_tables, None, record.names)
    dtype = getattr(torch, record.dtype)
    sizes = group.core_shapes
    counts = [torch.Size(size).numel() for size in sizes]
    if record.cores.bytes != sum(counts) * dtype.itemsize:
        raise ValueError(
            f"{folder / record.cores.file} has {record.cores.bytes} bytes, but its cores take "
            f"{sum(counts) * dtype.itemsize}."
        )
    flat = torch.from_file(str(folder / record.cores.file), size=sum(counts), dtype=dtype)
    pieces = zip(flat.split(counts), sizes, strict=True)
    return group, [piece.view(size).to(device, copy=True) for piece, size in pieces]
