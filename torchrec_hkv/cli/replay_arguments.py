"""Parses the arguments of ``torchrec-hkv replay`` to tables, policies and numbers of rows."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

import torch

from torchrec_hkv.cli.sizes import parse_bytes, parse_count
from torchrec_hkv.hash_table import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from torchrec_hkv.replay import Log, Policy, Rule, TableSettings, evictions
from torchrec_hkv.replay.policy import EPOCHS, parse_eviction

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(),
    "rowwise_adagrad": RowWiseAdagrad(),
    "adagrad": Adagrad(),
    "adam": Adam(),
}
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """A number of rows to try, absolute or as a share of a table's unique ids."""

    count: int = 0
    share: float = 0.0

    def of(self, distinct: int) -> int:
        """The number of rows.

        Args:
            distinct: number of unique ids of the table.
        """
        return self.count or max(1, round(self.share * distinct))


def parse_share(what: str, text: str) -> float:
    """Parses a share such as ``0.01`` or ``1%``, above 0 and at most 1.

    Raises:
        ValueError: the text is not a share.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(f"{what} is {text!r}, but must be a share such as 0.01 or 1%, up to 1.")
    return share


def parse_rows(text: str) -> list[RowCounts]:
    """Parses numbers of rows such as ``100k,1M`` or ``10%,25%``, or both.

    Raises:
        ValueError: a number is invalid.
    """
    rows = []
    for part in text.split(","):
        if part.endswith("%"):
            rows.append(RowCounts(share=parse_share("--rows", part)))
        else:
            rows.append(RowCounts(count=parse_count("--rows", part)))
    return rows


def parse_rule(text: str) -> Rule:
    """Parses an admission rule: ``none``, ``frequency:3``, ``frequency:3:1M``,
    ``frequency:3:64MiB`` or ``probability:0.1``.

    Raises:
        ValueError: the rule is invalid.
    """
    name, *arguments = text.split(":")
    rule = None
    if name == "none" and not arguments:
        return Rule()
    if name == "probability" and len(arguments) == 1:
        what = f"The probability of --admission {text!r}"
        return Rule(probability=parse_share(what, arguments[0]))
    if name == "frequency" and len(arguments) in (1, 2):
        count = parse_count(f"The count of --admission {text!r}", arguments[0])
        what = f"What counts in --admission {text!r}"
        if len(arguments) == 1:
            rule = Rule(count=count)
        elif arguments[1].lower().endswith("ib"):
            rule = Rule(count=count, sketch_bytes=parse_bytes(what, arguments[1]))
        else:
            rule = Rule(count=count, entries=parse_count(what, arguments[1]))
        rule.admission(1)  # raises for invalid values
        return rule
    raise ValueError(
        f"--admission is {text!r}, but must be none, frequency:COUNT, frequency:COUNT:ENTRIES, "
        "frequency:COUNT:SKETCH (such as 64MiB) or probability:P."
    )


def parse_policies(arguments: argparse.Namespace) -> tuple[Policy, ...]:
    """All combinations of eviction policies and admission rules.

    Raises:
        ValueError: one is unknown, or an epoch is missing or useless.
    """
    names = None
    if arguments.eviction is not None:
        names = list(dict.fromkeys(map(parse_eviction, arguments.eviction.split(","))))
    epoch = None
    if arguments.epoch is not None:
        epoch = parse_count("--epoch", arguments.epoch)
    if names is None:
        names = [name for name in evictions() if name not in EPOCHS or epoch]
    needing = [name for name in names if name in EPOCHS]
    if needing and epoch is None:
        raise ValueError(
            f"--epoch is missing, but --eviction {needing[0]} needs to know how many samples an "
            "epoch has."
        )
    if epoch and not needing:
        raise ValueError(
            f"--epoch is {arguments.epoch!r}, but none of {', '.join(map(str, names))} has epochs."
        )
    expire_after = None
    if arguments.expire_after is not None:
        expire_after = parse_count("--expire-after", arguments.expire_after)
        if expire_after >= 1 << 32:
            raise ValueError(f"--expire-after is {expire_after}, but must be less than 2^32.")
    rules = [parse_rule(text) for text in arguments.admission.split(",")]
    return tuple(
        Policy(name, rule, expire_after, epoch if name in EPOCHS else None)
        for name in names
        for rule in dict.fromkeys(rules)
    )


def parse_tables(texts: Sequence[str] | None, log: Log) -> dict[str, tuple[str, ...]]:
    """Columns by table: ``NAME`` or ``NAME=COLUMN,COLUMN``; by default one table for each column.

    Raises:
        ValueError: two tables have the same name, or the log lacks a column.
    """
    if texts is None:
        if not log.default_columns:
            raise ValueError(f"{log.name} has no column of ids; --table names one.")
        return {column: (column,) for column in log.default_columns}
    tables: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, columns = text.partition("=")
        if not name or (not columns and "=" in text):
            raise ValueError(f"--table is {text!r}, but must be NAME or NAME=COLUMN,COLUMN.")
        if name in tables:
            raise ValueError(f"--table names {name!r} twice.")
        tables[name] = tuple(columns.split(",")) if columns else (name,)
        log.check(tables[name])
    return tables


def parse_dims(texts: Sequence[str] | None, tables: Sequence[str]) -> dict[str, int]:
    """The dim of each table: ``64`` for all tables, ``NAME=64`` for one.

    Raises:
        ValueError: a dim is out of range, or a table does not exist.
    """
    dims = dict.fromkeys(tables, 64)
    for text in texts or ():
        name, _, number = text.rpartition("=")
        dim = parse_count("--dim", number)
        if dim > 2048:
            raise ValueError(f"--dim is {text!r}, but must be 1 to 2048.")
        if name and name not in dims:
            raise ValueError(
                f"--dim is {text!r}, but there is no table {name!r}; there are {', '.join(dims)}."
            )
        dims.update(dict.fromkeys([name] if name else tables, dim))
    return dims


def settings(
    arguments: argparse.Namespace,
    tables: dict[str, tuple[str, ...]],
    rows: dict[str, tuple[int, ...]],
    policies: tuple[Policy, ...],
) -> dict[str, TableSettings]:
    """The settings of the replay by table.

    Args:
        arguments: arguments of the command.
        tables: columns by table.
        rows: numbers of rows to try, by table.
        policies: policies to try.
    """
    dims = parse_dims(arguments.dim, list(tables))
    optimizer = OPTIMIZERS[arguments.optimizer]
    return {
        name: TableSettings(
            columns=columns,
            rows=rows[name],
            policies=policies,
            dim=dims[name],
            state_width=optimizer.state_width(dims[name]),
            element_bytes=DTYPES[arguments.dtype].itemsize,
        )
        for name, columns in tables.items()
    }
