"""The command for all benchmarks.

python -m benchmarks NAME [arguments]
python -m benchmarks --list
"""

from __future__ import annotations

import argparse
import ast
import importlib
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def names() -> dict[str, str]:
    """Returns the first docstring line of each benchmark, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if not path.stem.startswith("__") and "main" in functions:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main() -> None:
    """Runs a benchmark by name, or lists all benchmarks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parser.add_argument("name", nargs="?", help="a benchmark; NAME --help prints its options")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    args = parser.parse_args()
    known = names()
    if args.list or args.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {title}" for name, title in known.items()))
        return
    if args.name not in known:
        parser.error(f"there is no benchmark {args.name!r}; known are {', '.join(known)}")
    module = f"benchmarks.{args.name}"
    importlib.invalidate_caches()
    sys.argv = [module, *args.arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
