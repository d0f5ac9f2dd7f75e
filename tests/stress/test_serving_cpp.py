"""CMake builds the C++ program of ``examples/serving/cpp`` against libtorch. Its outputs equal the
trainer's evaluation.

    TORCHREC_HKV_SERVING_CPP=1 pytest tests/stress/test_serving_cpp.py

Takes about a minute of a core, most of it to compile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from tests.support.models import shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, TTOptions, serving

SOURCE = Path(__file__).parents[2] / "examples" / "serving" / "cpp"
BIG = 104729 * 15485863
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not os.environ.get("TORCHREC_HKV_SERVING_CPP"), reason="TORCHREC_HKV_SERVING_CPP is not set"
    ),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture
def device_type() -> str:
    """The package runs on a CPU."""
    return "cpu"


class Scores(nn.Module):
    """Bags and a sequence of hash tables, a stock table, and dense inputs."""

    def __init__(self) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=90, feature_names=[name]
            )
            for name, dim in (("user", 8), ("page", 6), ("country", 12))
        ]
        sequence = [
            EmbeddingConfig(name="seen", embedding_dim=8, num_embeddings=90, feature_names=["seen"])
        ]
        self.ebc = EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
        self.ec = EmbeddingCollection(tables=sequence, device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(4 + 26, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, features):
        pooled = self.ebc(features)
        parts = [dense, *(pooled[key] for key in sorted(pooled.keys()))]
        seen = self.ec(features)["seen"].values().sum(0)
        return self.over(torch.cat(parts, dim=1)).sigmoid().squeeze(1), seen


def batch_of(seed: int, samples: int):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4, samples), generator=random)
    counts = lengths.sum(1).tolist()
    scales = {"user": -BIG, "page": 1, "country": 1, "seen": BIG}
    values = [
        torch.randint(0, 80, (count,), generator=random) * scale
        for count, scale in zip(counts, scales.values(), strict=True)
    ]
    features = KeyedJaggedTensor(
        keys=list(scales), values=torch.cat(values), lengths=lengths.flatten()
    )
    return torch.randn(samples, 4, generator=random), features


def exported(rank, world_size, device, folder: Path):
    torch.manual_seed(0)
    kinds = {
        "user": ("hkv", HKVOptions(seed=4)),
        "seen": ("hkv", HKVOptions(seed=5)),
        "page": ("tt", TTOptions(ranks=(2, 2))),
        "country": ("fused", None),
    }
    constraints = {
        name: ParameterConstraints(
            compute_kernels=[kernel], options=options, sharding_types=["table_wise"]
        )
        for name, (kernel, options) in kinds.items()
    }
    model = shard_model(Scores(), constraints, world_size, device)
    for step in range(3):
        scores, seen = model(*batch_of(step, 16))
        (scores.square().sum() + seen.square().sum()).backward()
    export = {"inputs": batch_of(0, 5), "package": True}
    with pytest.raises(ValueError, match=r"\['ebc.embedding_bags.page'\] are written as cores"):
        serving.export(model, folder / "model", **export)
    rows = {"page": "fp32"}
    serving.export(model, folder / "model", rows, unknown={"seen": [0.25] * 8}, **export)
    dense, features = batch_of(7, 9)
    torch.save([dense, features.values(), features.lengths().view(4, -1)], folder / "inputs.pt")
    served = serving.load(folder / "model")
    return [output.clone() for output in served(dense, features)]


def test_same_outputs(run_ranks, tmp_path):
    want = run_ranks(1, exported, tmp_path, timeout=1500)[0]
    build = tmp_path / "build"
    configure = ["cmake", "-S", SOURCE, "-B", build, "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    paths = [tmp_path / name for name in ("model", "inputs.pt", "outputs.pt")]
    done = subprocess.run([build / "serve", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "us a call; of " in done.stdout
    got = torch.load(tmp_path / "outputs.pt")
    assert len(got) == len(want) == 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert serving.load(tmp_path / "model", verify=True).counters()  # the package does not disturb
    missing = subprocess.run(
        [build / "serve", tmp_path, *paths[1:]], capture_output=True, text=True
    )
    assert missing.returncode == 1
    assert missing.stderr
