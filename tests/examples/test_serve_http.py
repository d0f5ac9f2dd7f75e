"""The HTTP serving example: batches, bad requests, health and metrics."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.served_models import SEEDS, as_ids, exported, random_batch
from torchrec_hkv import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "serve_http.py"


@pytest.fixture
def device_type() -> str:
    return "cpu"


def lists_of(features) -> dict:
    keys, values, lengths, weights = as_ids(features)
    counts = lengths.flatten().tolist()
    samples = lengths.shape[1]

    def by_feature(flat: torch.Tensor) -> dict:
        bags = [bag.tolist() for bag in flat.split(counts)]
        return {key: bags[n * samples : (n + 1) * samples] for n, key in enumerate(keys)}

    made = {"ids": by_feature(values)}
    return made if weights is None else {**made, "weights": by_feature(weights)}


@pytest.mark.slow
def test_served(run_ranks, tmp_path):
    pytest.importorskip("fastapi", reason="needs FastAPI")
    pytest.importorskip("uvicorn", reason="needs uvicorn")
    pytest.importorskip("orjson", reason="needs orjson")
    pytest.importorskip("httpx", reason="needs httpx")
    from fastapi.testclient import TestClient

    want = run_ranks(1, exported, tmp_path / "model")[0]
    spec = importlib.util.spec_from_file_location("serve_http", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = serving.load(tmp_path / "model")
    bodies = []
    for seed in SEEDS:
        dense, features, weighted = random_batch(seed, 2 + seed)
        bodies.append({"args": [dense.tolist(), lists_of(features), lists_of(weighted)]})
    with TestClient(example.make_app(model, wait=0.05)) as client, ThreadPoolExecutor(8) as pool:
        bad = {"args": [[[1.0]], {"ids": {}}, {"ids": {}}]}
        sent = [*bodies * 3, bad]
        answers = list(pool.map(lambda body: client.post("/predict", json=body), sent))
        for number, answer in enumerate(answers[:-1]):
            assert answer.status_code == 200, answer.text
            got = torch.tensor(answer.json()["outputs"]["scores"])
            torch.testing.assert_close(got, want[number % 3]["scores"], rtol=1e-6, atol=1e-6)
        assert answers[-1].status_code == 422
        assert client.post("/predict", json={"args": [[[1.0]], [2], []]}).status_code == 422
        refused = client.post("/predict", json=[1])
        assert refused.status_code == 422
        assert refused.json()["detail"].startswith("the request is a list, but must be an object")
        health = client.get("/health")
        assert (health.status_code, health.json()["is_following"]) == (200, False)
        metrics = client.get("/metrics").text
        assert "torchrec_hkv_serving_call_seconds_count" in metrics
    calls = int(metrics.partition("call_seconds_count ")[2].split()[0])
    assert 1 <= calls < len(sent)  # some requests were served in one batch
