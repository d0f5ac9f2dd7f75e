"""Parses the command line and calls the verb."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchrec_hkv import __version__
from torchrec_hkv.cli import (
    calibrate,
    compact,
    convert,
    diff,
    env,
    export,
    inspect,
    plan,
    replay,
    verify,
)

_VERBS = {
    "calibrate": calibrate,
    "compact": compact,
    "convert": convert,
    "diff": diff,
    "env": env,
    "export": export,
    "inspect": inspect,
    "plan": plan,
    "replay": replay,
    "verify": verify,
}


class _Parser(argparse.ArgumentParser):
    """Prints errors in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        sentence = message if message.endswith(".") else f"{message}."
        first = sentence.partition(" ")[0].rstrip(":,")
        if first.isalpha() and not os.path.exists(first):  # not the name of a file
            sentence = sentence[:1].upper() + sentence[1:]
        self.exit(2, f"error: {sentence}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``torchrec-hkv``.

    Args:
        arguments: command line; None for the process's command line.

    Returns:
        0, or 1 if the answer is negative (a plan that does not fit, a hit rate that is not reached,
        a damaged checkpoint). Invalid input exits with 2, Ctrl-C with 130.
    """
    parser = _Parser(
        prog="torchrec-hkv",
        description="Looks at an installation, plans tables, replays logs of ids, looks into "
        "checkpoints and converts them.",
    )
    parser.add_argument("--version", action="version", version=f"torchrec-hkv {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for name, verb in _VERBS.items():
        described = verbs.add_parser(
            name,
            help=verb.HELP,
            description=verb.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        described.add_argument("--json", action="store_true", help="print JSON")
        verb.add_arguments(described)
    parsed = parser.parse_args(arguments)
    if parsed.verb is None:
        parser.error(f"a verb is missing: {' or '.join(_VERBS)}; --help says more")
    try:
        answer = _VERBS[parsed.verb].run(parsed)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "error: Interrupted.\n")
    try:
        print(json.dumps(answer.content, indent=2) if parsed.json else answer.text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, for example head, has ended
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.code
