"""A lookup passes at most eight Python files, which docs/concepts/sharding.md names and draws."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_hkv
from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints

PACKAGE = Path(torchrec_hkv.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "sharding.md"
DRAWING = PAGE.with_name("lookup_path.svg")
OUTPUT = "sharding/dists/output_dist.py"  # its box follows the boxes of the lookup


def _files_on_stack(rank, world_size, device):
    """The package's files that are on the stack when a forward calls an op of the package."""
    table = EmbeddingBagConfig(name="t", num_embeddings=64, embedding_dim=4, feature_names=["f"])
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=["row_wise"])
    model = shard_model(make_model([table]), {"t": constraint}, world_size, device)
    features = KeyedJaggedTensor(
        keys=["f"],
        values=torch.arange(5, device=device),
        lengths=torch.tensor([2, 3], device=device),
    )
    model(features).sum().backward()  # the first batch also creates the input distribution

    files = set()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == torch._ops.__file__:
            owner = frame.f_locals.get("self")
            name = getattr(owner, "_qualified_op_name", None) or getattr(owner, "_name", "")
            if str(name).startswith("torchrec_hkv"):
                while frame := frame.f_back:
                    path = Path(frame.f_code.co_filename)
                    if path.is_relative_to(PACKAGE):
                        files.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(profile)
    try:
        model(features).cpu()
    finally:
        sys.setprofile(None)
    return sorted(files)


def _named():
    """The files that the section's table lists."""
    section = PAGE.read_text().split("## The path of a lookup")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE))


def test_files(run_ranks):
    for files in run_ranks(2, _files_on_stack):
        assert set(files) == _named()


def test_at_most_eight():
    assert len(_named()) <= 8


def test_drawing():
    drawn = re.findall(r">([\w/]+\.py)<", DRAWING.read_text())
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {*_named(), OUTPUT}
