"""Plans tables with their optimizer states for GPUs that need not be present.

    torchrec-hkv plan --table user:1B:64 --optimizer adam --gpus 8 --hbm 141GiB --host 2TiB
    torchrec-hkv plan --table user:1B:64 --table page:10M:32 --gpus 2 --hbm-per-table 40GiB
    torchrec-hkv plan --table page:100M:64 --backend tt --gpus 2
    torchrec-hkv plan --table user::64 --replay replay.json --gpus 2 --hbm 24GiB

Uses the same planner as training. Tables are sharded row-wise if the backend supports it;
--sharding names other sharding types. With --replay, tables get the policy, the frequencies of ids
and the hit rates from ``torchrec-hkv replay --out``, and the planner chooses the rows of tables
without a number.

Exit code 0: the tables fit; 1: they do not.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from torchrec.distributed.types import ShardingType
from torchrec.optim import RowWiseAdagrad

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.hkv import HKVOptions
from torchrec_hkv.cli.plan_replay import PlannedReplay, replay_lines
from torchrec_hkv.cli.planning import MAX_GPUS, Machines, Planning, TableArgument
from torchrec_hkv.cli.result import CommandResult
from torchrec_hkv.cli.sizes import parse_bytes, parse_count
from torchrec_hkv.planner import ParameterConstraints
from torchrec_hkv.planner.memory import Memory, ReportedPlan, describe_memory
from torchrec_hkv.planner.report import TableReport, format_bytes
from torchrec_hkv.sharding.validation import served_sharding_types

HELP = "whether tables fit GPUs, offline"
_SHARDING_TYPES = [kind.value for kind in ShardingType]
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
_DEFAULT_SHARDING = ShardingType.ROW_WISE.value
# Tables with fewer values take less than 2^60 bytes in float32; planning.py uses 2^60 as unlimited
# memory.
_MAX_VALUES = 1 << 58


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "--table",
        action="append",
        required=True,
        metavar="NAME:ROWS:DIM",
        help="a table; may be repeated. ROWS is a number such as 1000000, 1e9, 10M or 1B, or empty "
        "(user::64) for a table of --replay",
    )
    parser.add_argument(
        "--replay",
        metavar="FILE",
        help="file that torchrec-hkv replay --out wrote: policies, ids and hit rates of tables",
    )
    parser.add_argument(
        "--optimizer",
        choices=list(_OPTIMIZERS),
        default="adam",
        help="optimizer of all tables (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        default="hkv",
        metavar="NAME",
        help="a backend, or a kernel of TorchRec's such as fused (default: %(default)s)",
    )
    parser.add_argument(
        "--sharding",
        action="append",
        choices=_SHARDING_TYPES,
        metavar="TYPE",
        help="allowed sharding type; may be repeated. One of "
        f"{', '.join(_SHARDING_TYPES)} (default: row_wise if the backend allows it, else all that "
        "it allows)",
    )
    parser.add_argument(
        "--gpus", default="1", metavar="N", help="number of GPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus-per-host", default="8", metavar="N", help="GPUs of a machine (default: %(default)s)"
    )
    parser.add_argument(
        "--hbm",
        default="139GiB",
        metavar="SIZE",
        help="memory of a GPU (default: %(default)s, an H200)",
    )
    parser.add_argument(
        "--host",
        default="1TiB",
        metavar="SIZE",
        help="host memory of a machine (default: %(default)s)",
    )
    parser.add_argument(
        "--hbm-per-table",
        metavar="SIZE",
        help="HBM that an hkv table may take on each GPU; further rows are in host memory "
        "(default: all in HBM)",
    )
    parser.add_argument(
        "--batch-size",
        default="1024",
        metavar="N",
        help="samples of a GPU in a step (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> CommandResult:
    """Plans the tables.

    Raises:
        ValueError: an argument is invalid.
    """
    tables = [_table(text) for text in arguments.table]
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ValueError(f"Tables must have different names, but they are {', '.join(names)}.")
    machines = Machines(
        gpus=parse_count("--gpus", arguments.gpus),
        per_host=parse_count("--gpus-per-host", arguments.gpus_per_host),
        hbm=parse_bytes("--hbm", arguments.hbm),
        host=parse_bytes("--host", arguments.host),
    )
    if machines.gpus > MAX_GPUS:
        raise ValueError(f"--gpus is {machines.gpus}, but must be at most {MAX_GPUS}.")
    constraint, replay = _constraint(arguments), _replay(arguments, names)
    requested_rows = {table.name: table.rows for table in tables}
    planning = Planning(
        [_with_rows(table, replay) for table in tables],
        _OPTIMIZERS[arguments.optimizer],
        {
            name: constraint if replay is None else replay.constraint(name, constraint, rows)
            for name, rows in requested_rows.items()
        },
        constraint.sharding_types,
        _batch_size(arguments),
    )
    endless = planning.plan(machines, endless=True)
    if endless is None:
        kinds = ", ".join(planning.sharding_types)
        raise ValueError(
            f"TorchRec has no kernel {arguments.backend!r} for these tables sharded {kinds}: name "
            "another --backend or --sharding."
        )
    plan = planning.plan(machines)
    fits = plan is not None
    # If the tables do not fit, show the memory that they would take.
    shown = endless if plan is None else plan
    tables = {name: _described(report) for name, report in shown.plan[""].reports.items()}
    content: dict[str, Any] = {
        "fits": fits,
        "optimizer": arguments.optimizer,
        "backend": arguments.backend,
        "machines": dataclasses.asdict(machines),
        "tables": {name: tables[name] for name in names},
    }
    for key in ("hbm", "host"):
        used_bytes = [0] * machines.gpus
        for table in tables.values():
            for rank, count in zip(table["ranks"], table[key], strict=True):
                used_bytes[rank] += count
        content[f"{key}_per_gpu"] = max(used_bytes)
    if replay is not None:
        content["replay"] = {
            name: replay.expected(name, sum(_distinct_rows(tables[name])), requested_rows[name])
            for name in names
            if name in replay.tables
        }
    if plan is not None:
        content["memory"] = [
            {key: _memory(getattr(rank, key)) for key in ("hbm", "host")} for rank in plan.memory
        ]
    else:
        content["fits_on_gpus"] = planning.enough_gpus(machines)
    return CommandResult(_text(content, shown, machines), content, 0 if fits else 1)


def _table(text: str) -> TableArgument:
    parts = text.split(":")
    if len(parts) != 3 or not parts[0]:
        raise ValueError(f"--table is {text!r}, but must be NAME:ROWS:DIM, such as user:1B:64.")
    if "." in parts[0]:
        raise ValueError(f"The name of table {parts[0]!r} has a dot: choose a name without one.")
    rows = parse_count(f"The number of rows of table {parts[0]!r}", parts[1]) if parts[1] else None
    dim = parse_count(f"The dim of table {parts[0]!r}", parts[2])
    return _checked(TableArgument(parts[0], rows, dim))


def _checked(table: TableArgument) -> TableArgument:
    values = (table.rows or 1) * table.dim
    if values >= _MAX_VALUES:
        raise ValueError(
            f"Table {table.name!r} has {values:,} values, but must have fewer than 2^58."
        )
    return table


def _with_rows(table: TableArgument, replay: PlannedReplay | None) -> TableArgument:
    if table.rows is not None:
        return table
    if replay is None:
        raise ValueError(
            f"--table {table.name!r} has no number of rows: give one, as in "
            f"{table.name}:1M:{table.dim}, or give --replay."
        )
    return _checked(dataclasses.replace(table, rows=replay.rows(table.name)))


def _replay(arguments: argparse.Namespace, names: list[str]) -> PlannedReplay | None:
    if arguments.replay is None:
        return None
    if arguments.backend != "hkv":
        raise ValueError(
            f"--replay needs backend 'hkv', but --backend is {arguments.backend!r}: leave one out."
        )
    try:
        return PlannedReplay.read(arguments.replay, names)
    except OSError as error:
        raise ValueError(f"--replay is {arguments.replay!r}: {error.strerror}.") from None


def _batch_size(arguments: argparse.Namespace) -> int:
    batch_size = parse_count("--batch-size", arguments.batch_size)
    if batch_size >= 1 << 31:
        raise ValueError(f"--batch-size is {batch_size}, but must be less than 2^31.")
    return batch_size


def _constraint(arguments: argparse.Namespace) -> ParameterConstraints:
    options = None
    if arguments.hbm_per_table is not None:
        if arguments.backend != "hkv":
            raise ValueError(
                f"--hbm-per-table needs backend 'hkv', but --backend is {arguments.backend!r}: "
                "leave one out."
            )
        options = HKVOptions(hbm_bytes=parse_bytes("--hbm-per-table", arguments.hbm_per_table))
    return ParameterConstraints(
        sharding_types=_sharding_types(arguments.backend, arguments.sharding),
        compute_kernels=[arguments.backend],
        options=options,
    )


def _sharding_types(backend: str, requested: list[str] | None) -> list[str]:
    """The requested sharding types; by default row-wise if the backend supports it."""
    served = served_sharding_types(backend) if backend in registry.names() else _SHARDING_TYPES
    if requested is None:
        return [_DEFAULT_SHARDING] if _DEFAULT_SHARDING in served else served
    for sharding_type in requested:
        if sharding_type not in served:
            raise ValueError(
                f"--sharding is {sharding_type!r}, but backend {backend!r} is sharded "
                f"{' or '.join(served)}."
            )
    return list(dict.fromkeys(requested))


def _described(report: TableReport) -> dict[str, Any]:
    return {
        "sharding": report.sharding_type,
        "ranks": list(report.ranks),
        "rows": list(report.rows),
        "dim": report.dim,
        "hbm": [part.hbm for part in report.bytes],
        "host": [part.host for part in report.bytes],
    }


def _distinct_rows(table: dict[str, Any]) -> list[int]:
    """Numbers of rows of a table's shards, without column shards of the same rows."""
    return table["rows"] if table["sharding"] == _DEFAULT_SHARDING else table["rows"][:1]


def _memory(part: Memory) -> dict[str, int]:
    return {**dataclasses.asdict(part), "free": part.free}


def _text(content: dict[str, Any], plan: ReportedPlan, machines: Machines) -> str:
    kind = content["backend"]
    what = "a backend of this package" if kind in registry.names() else "a kernel of TorchRec's"
    gpus = "1 GPU" if machines.gpus == 1 else f"{machines.gpus} GPUs"
    replayed = replay_lines(content.get("replay", {}))
    lines = [
        f"{gpus} of {format_bytes(machines.hbm)}, machines of "
        f"{format_bytes(machines.host)}; {content['optimizer']}, {kind} ({what})",
        str(plan.plan[""]).strip("\n"),
        "",
        *replayed,
        *([""] if replayed else []),
        *([describe_memory(plan.memory)] if content["fits"] else []),
        f"A GPU gives its tables {format_bytes(content['hbm_per_gpu'])} of HBM and "
        f"{format_bytes(content['host_per_gpu'])} of host memory.",
    ]
    if content["fits"]:
        return "\n".join([*lines, "It fits."])
    lines.append(
        "It does not fit: besides tables, the planner leaves room for the dense model, "
        "communication and 15 % in reserve."
    )
    more = content["fits_on_gpus"]
    if more is not None:
        lines.append(f"{more} of these GPUs are enough.")
    elif kind == "hkv":
        lines.append("More GPUs of this kind are not enough; --hbm-per-table moves rows to hosts.")
    return "\n".join(lines)
