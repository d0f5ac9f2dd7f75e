"""Converts tables of other programs to a checkpoint of this package, and back.

torchrec-hkv convert stock_dcp checkpoints/first --table user
torchrec-hkv convert dump checkpoints/first                        (dynamicemb)
torchrec-hkv convert user.parquet checkpoints/first --table ebc.embedding_bags.user
torchrec-hkv convert checkpoints/last stock_dcp --num-embeddings user=100000
torchrec-hkv convert checkpoints/last user.safetensors --table user

SOURCE is a folder of torch.distributed.checkpoint (stock tables, hash tables, or stock tables with
the ids of TorchRec's managed collision modules), a dump of dynamicemb, a file of ids and rows, or a
checkpoint of this package. A checkpoint of this package becomes a folder of
torch.distributed.checkpoint or a file of ids and rows. Any other source becomes a checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torchrec_hkv.cli.folders import add_memory, memory
from torchrec_hkv.cli.result import CommandResult
from torchrec_hkv.cli.sizes import parse_count, parse_id

HELP = "converts stock tables, dumps of dynamicemb and files of rows to a checkpoint, and back"
_BACKEND = "hkv"
_EVICTIONS = ("lru", "lfu", "customized")
_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "ftrl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments: source, destination and options."""
    parser.add_argument("source", help="folder or file to read")
    parser.add_argument(
        "into",
        help="folder to write; NAME.parquet or NAME.safetensors for one table of a checkpoint",
    )
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="NAME",
        help="full name or own name of a table to convert (default: all); other tables stay "
        "tensors. For a file of ids and rows, the full name of its table",
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="replace the prefix OLD of full names by NEW",
    )
    parser.add_argument(
        "--optimizer",
        choices=_OPTIMIZERS,
        help="optimizer of the states (default: derived from their shapes)",
    )
    parser.add_argument(
        "--eviction",
        choices=_EVICTIONS,
        help="policy of the new hash tables. It says what the scores are: lru: steps, lfu: counts "
        "(default: as in the source)",
    )
    parser.add_argument(
        "--seed",
        action="append",
        default=[],
        metavar="[TABLE=]SEED",
        help="HKVOptions.seed of the tables that will load it (default: 0)",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=("states", "scores"),
        help="leave out optimizer states, or scores and last steps",
    )
    parser.add_argument(
        "--num-embeddings",
        action="append",
        default=[],
        metavar="[TABLE=]ROWS",
        help="rows of the new stock tables (default: the largest id plus one)",
    )
    parser.add_argument(
        "--model-key",
        metavar="KEY",
        help="prefix of the model's entries in a folder of torch.distributed.checkpoint; '' for "
        "none (default: model, if all tables have it)",
    )
    parser.add_argument(
        "--optimizer-key",
        metavar="KEY",
        help="prefix of the optimizer's entries (default: optimizer)",
    )
    parser.add_argument(
        "--sequences",
        action="store_true",
        help="the dump of dynamicemb is of an EmbeddingCollection, not an EmbeddingBagCollection",
    )
    add_memory(parser)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Converts a folder or a file."""
    from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert

    options = ConversionOptions(
        tables=arguments.table,
        renamed=[_pair(text) for text in arguments.rename],
        optimizer=arguments.optimizer,
        eviction=arguments.eviction,
        seeds=_by_table(arguments.seed, lambda text: parse_id("--seed", text)),
        without=arguments.without,
        num_embeddings=_by_table(
            arguments.num_embeddings, lambda text: parse_count("--num-embeddings", text)
        ),
        model_key=arguments.model_key,
        optimizer_key=arguments.optimizer_key,
        sequences=arguments.sequences,
        backend=_BACKEND,
        batch_bytes=memory(arguments),
    )
    try:
        content = convert(arguments.source, arguments.into, options)
    except OSError as error:
        raise ValueError(f"Writing failed: {error}") from None
    return CommandResult(_text(arguments.into, content), content)


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise ValueError(f"--rename is {text!r}, but must be OLD=NEW.")
    return old, new


def _by_table(texts: list[str], parse: Callable[[str], int]) -> dict[str, int]:
    """Parses numbers by table; the key ``""`` is for all other tables."""
    numbers = {}
    for text in texts:
        table, _, number = text.rpartition("=")
        numbers[table] = parse(number)
    return numbers


def _text(into: str, content: dict[str, Any]) -> str:
    lines = [f"{into}: {content['into']}, from {content['source']}"]
    lines += [f"  {name}: {ids:,} ids" for name, ids in content["tables"].items()]
    if content["tensors"]:
        lines.append(f"  {content['tensors']:,} other entries as they were")
    return "\n".join(lines)
