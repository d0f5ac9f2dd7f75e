"""Constants measured on a device, for time estimates, and the file that stores them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchrec_hkv._version import __version__
from torchrec_hkv.backends import registry
from torchrec_hkv.backends.calibration import calibrate
from torchrec_hkv.backends.constants import CONSTANTS, Constants
from torchrec_hkv.json_schema import (
    Choice,
    Fields,
    Integer,
    JsonPlace,
    Map,
    Number,
    OrNull,
    Text,
    parse_json,
)
from torchrec_hkv.planner.stage_timing import StageTimer, stage_timers
from torchrec_hkv.planner.stages import StageTimes
from torchrec_hkv.planner.stock_kernels import FUSED, calibrate_fused
from torchrec_hkv.text_files import replace_text

_FORMAT = 2
#: Environment variable with the path of the calibration file; empty for none.
VARIABLE = "TORCHREC_HKV_CALIBRATION"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The result of ``torchrec-hkv calibrate``.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        device: name of the device.
        threads: number of torch's CPU threads.
        versions: versions of the measured packages.
        constants: constants by the name of a backend or stock kernel.
        stages: milliseconds of TorchRec's own code in the stages of a step
            (:mod:`torchrec_hkv.planner.stages`), without the kernels, by number of ranks: one, and
            the number of ranks that measured.
        exchange: bytes of rows exchanged in a millisecond between the ranks of a host; None with a
            single rank.
    """

    device_type: str
    device: str
    threads: int
    versions: dict[str, str]
    constants: dict[str, Constants]
    stages: dict[int, StageTimes] = dataclasses.field(default_factory=dict)
    exchange: float | None = None

    @classmethod
    def measured(
        cls,
        device: torch.device,
        names: Sequence[str] | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> Calibration:
        """Measures a device, in about a minute.

        With a process group, all ranks call it. The exchange between ranks is measured too. Only
        rank 0 gets the constants and the stages of a single rank.

        Args:
            device: device of the tables.
            names: backends to measure, and ``"fused"`` for TorchRec's kernel; None for all.
            progress: called with a line of text before each table is timed.

        Raises:
            ValueError: a name is unknown, or can't be measured.
        """
        backend_names = [FUSED, *registry.names()]
        measured_names = backend_names if names is None else list(names)
        for name in measured_names:
            if name not in backend_names:
                raise ValueError(f"{name!r} can't be calibrated: allowed are {backend_names}.")
        constants: dict[str, Constants] = {}
        times: dict[int, tuple[StageTimes, float | None]] = {}
        with contextlib.ExitStack() as stack:
            timers: dict[int, StageTimer] = {}
            if FUSED in measured_names:
                timers = stack.enter_context(stage_timers(device))
            # Stages are also measured in between, because the speed of the host varies.
            _measure_stages(timers, progress)
            for name in measured_names:
                found = _constants(name, device, progress) if is_leader() else None
                if found is not None:
                    constants[name] = found
                elif names is not None and is_leader():
                    raise ValueError(
                        f"Backend {name!r} has no calibration cases: leave it out of names."
                    )
                _measure_stages(timers, progress)
            times = {ranks: timer.times() for ranks, timer in timers.items()}
        stages = {ranks: parts for ranks, (parts, _) in times.items()}
        if FUSED in constants:
            kernel = constants[FUSED].group_time
            for parts in stages.values():
                for stage, work in (("forward", kernel.forward), ("backward", kernel.backward)):
                    parts[stage]["fixed"] = max(parts[stage]["fixed"] - work, 0.0)
        return cls(
            device.type,
            device_name(device),
            torch.get_num_threads(),
            {"torchrec_hkv": __version__, "torch": torch.__version__},
            constants,
            stages,
            times[max(times)][1] if times else None,
        )

    def stages_of(self, ranks: int) -> StageTimes:
        """Times of TorchRec's own code, for the measured number of ranks that is closest to
        ``ranks``; empty if none was measured."""
        if not self.stages:
            return {}
        return self.stages[min(self.stages, key=lambda known: abs(math.log(known / ranks)))]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, and creates its folder. An existing file is replaced atomically."""
        path = Path(path)
        content = {
            "format": _FORMAT,
            "device_type": self.device_type,
            "device": self.device,
            "threads": self.threads,
            "versions": self.versions,
            "stages_ms": {str(ranks): parts for ranks, parts in self.stages.items()},
            "exchange_bytes_per_ms": self.exchange,
            "constants_ms": {name: found.to_json() for name, found in self.constants.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file of :meth:`save`.

        Raises:
            ValueError: the file can't be read, or is not a calibration file.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(
                f"The calibration {os.fspath(path)!r} can't be read: {error.strerror}."
            ) from None
        try:
            return _SCHEMA.read(parse_json(path, data), JsonPlace(os.fspath(path)))
        except ValueError as error:
            raise ValueError(
                f"The calibration {os.fspath(path)!r} is not a file of torchrec-hkv calibrate: "
                f"{error}"
            ) from None


def _calibration(
    format: int,  # already checked by the schema
    stages_ms: dict[str, StageTimes],
    exchange_bytes_per_ms: float | None,
    constants_ms: dict[str, Constants],
    **facts: Any,
) -> Calibration:
    stages = {int(ranks): parts for ranks, parts in stages_ms.items()}
    return Calibration(
        **facts, constants=constants_ms, stages=stages, exchange=exchange_bytes_per_ms
    )


_SCHEMA = Fields(
    {
        "format": Choice((_FORMAT,)),
        "device_type": Text(),
        "device": Text(),
        "threads": Integer(1, 1 << 20),
        "versions": Map(Text(), Text()),
        "stages_ms": Map(
            Text("[1-9][0-9]{0,8}", "a number of ranks, at least 1"),
            Map(Text(), Map(Text(), Number())),
        ),
        "exchange_bytes_per_ms": OrNull(Number(0)),
        "constants_ms": Map(Text(), CONSTANTS),
    },
    _calibration,
)


def is_leader() -> bool:
    """Whether this process is rank 0 or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _measure_stages(timers: dict[int, StageTimer], progress: Callable[[str], None]) -> None:
    for ranks, timer in timers.items():
        progress(f"the parts of a step of {ranks} rank{'s' if ranks > 1 else ''}")
        timer.measure()


def _constants(
    name: str, device: torch.device, progress: Callable[[str], None]
) -> Constants | None:
    if name == FUSED:
        return calibrate_fused(device, progress)
    backend = registry.get(name)
    return calibrate(backend, backend.calibration_cases(device.type), device, progress)


def default_path(device_type: str) -> Path | None:
    """Default path of the calibration file for a device type: the environment variable
    ``TORCHREC_HKV_CALIBRATION`` (None if empty), else
    ``~/.cache/torchrec_hkv/calibration-cuda.json`` or ``calibration-cpu.json``
    (``XDG_CACHE_HOME`` replaces ``~/.cache``)."""
    configured = os.environ.get(VARIABLE)
    if configured is not None:
        return Path(configured) if configured else None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torchrec_hkv" / f"calibration-{device_type}.json"


def calibration_for(
    device_type: str, calibration: Calibration | str | os.PathLike[str] | None
) -> Calibration | None:
    """The calibration that a planner uses.

    Args:
        device_type: device type of the topology.
        calibration: a calibration or its file; None for the default file, if it exists and is for
            this device type.

    Raises:
        ValueError: the given file can't be read, or is for another device type.
    """
    if calibration is None:
        path = default_path(device_type)
        if path is None or not path.exists():
            return None
        found = Calibration.load(path)
        return found if found.device_type == device_type else None
    found = calibration if isinstance(calibration, Calibration) else Calibration.load(calibration)
    if found.device_type != device_type:
        raise ValueError(
            f"The calibration is for device type {found.device_type!r}, but the topology has "
            f"{device_type!r}: calibrate on such a device."
        )
    return found


def device_name(device: torch.device) -> str:
    """The product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
