"""Each operator has a fake, or a reason why it needs none, and a test that calls opcheck."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

# These register the fakes.
import torchrec_hkv.hash_table
import torchrec_hkv.replay
import torchrec_hkv.serving.ops
import torchrec_hkv.tensor_train  # noqa: F401

NAMESPACE = "torchrec_hkv::"

#: Operators without a fake, each with the reason. An operator that returns an int, float or bool
#: known only at run time can't be traced past. Such operators belong to code that is not traced.
WITHOUT_FAKE = {
    "add_ids": "returns how many ids a set holds; checks of files call it",
    "are_placed": "returns whether slots are right; checks of files call it",
    "find_repeated": "returns a slot; loading calls it",
    "restore_batches": "returns how many entries were lost; loading calls it",
    "serving_open": "returns a handle; opening of an export calls it",
    "serving_quantize": "returns how many rows fit, and their range; export calls it",
    "serving_read_pages": "returns whether the system took an advice; opening calls it",
}


def operators() -> set[str]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return {name.removeprefix(NAMESPACE) for name in names if name.startswith(NAMESPACE)}


def has_fake(name: str) -> bool:
    """Whether an operator has a fake. A composite operator's kernel is not a fake."""
    entry = torch._library.simple_registry.singleton.find(NAMESPACE + name)
    return entry.fake_impl.kernel is not None


def opchecked() -> set[str]:
    """The last name in the first argument of each opcheck call in the tests.

    Names are resolved by assignments in the same file.
    """
    found = set()
    for file in Path(__file__).parent.rglob("test_*.py"):
        text = file.read_text()
        if "opcheck" not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        assigned = {
            target.id: node.value
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("opcheck"):
                operator = node.args[0]
                if isinstance(operator, ast.Name):
                    operator = assigned[operator.id]
                found.add(ast.unparse(operator).removesuffix(".default").rsplit(".", 1)[-1])
    return found


def test_each_has_a_fake_or_a_reason():
    assert {name for name in operators() if not has_fake(name)} == set(WITHOUT_FAKE)


def test_each_is_checked():
    assert operators() - opchecked() == set()
