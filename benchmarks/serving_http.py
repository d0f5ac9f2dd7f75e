"""Load test of ``examples/serving/serve_http.py`` with wrk, on the same cores as the server.

    apt install wrk; pip install fastapi orjson 'uvicorn[standard]'
    python -m benchmarks serving_http --rate 500

A request is one sample with ``--ids`` pooled ids, drawn by a power law, of a table with ``--rows``
rows of ``--dim`` columns; 64 different requests are sent in turn. ``--rate`` is the total rate of
all connections; with 0, a connection sends a request as soon as it has the previous answer.
Latencies are measured by wrk, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from benchmarks.arguments import AtLeast
from benchmarks.environment import report
from torchrec_hkv import serving

EXAMPLE = Path(__file__).parents[1] / "examples" / "serving" / "serve_http.py"
KEYS = ("case", "rows", "dim", "ids", "rate", "connections")
PORT = 8613
#: Sends the bodies of a file in turn. Each connection waits for random times around the mean, so
#: that all connections together have about the rate and do not send at the same moments.
SCRIPT = """
local bodies, at = {}, 0
function init(args)
  for line in io.lines(args[1]) do bodies[#bodies + 1] = line end
  wait = tonumber(args[2])
end
function delay() return math.random(0, 2 * wait) end
function request()
  at = at %% #bodies + 1
  return wrk.format("POST", "/predict", {["Content-Type"] = "application/json"}, bodies[at])
end
function done(summary, latency, requests)
  local errors = summary.errors
  print(string.format("RESULT %%d %%d %%f %%f %%f %%d", summary.requests, summary.duration,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
""".replace("%%", "%")


class Model(nn.Module):
    """Pooled rows and two layers."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=dim, num_embeddings=rows, feature_names=["ids"]
        )
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.over = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)


def bodies(args: argparse.Namespace) -> list[str]:
    """Creates the bodies of the requests."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for _ in range(64):
        drawn = args.rows ** torch.rand(args.ids, generator=generator, dtype=torch.float64)
        ids = (drawn.long() - 1).clamp(0, args.rows - 1).tolist()
        requests.append(json.dumps({"args": [{"ids": {"ids": [ids]}}]}))
    return requests


def wait_for(process: subprocess.Popen) -> None:
    """Waits until the server answers."""
    ends = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("the server did not start") from None
            time.sleep(0.1)


def cases(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yields the only row of the benchmark."""
    lengths = torch.tensor([2, 2])
    features = KeyedJaggedTensor(keys=["ids"], values=torch.arange(4), lengths=lengths)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving.export(Model(args.rows, args.dim), folder / "model", inputs=(features,))
        (folder / "bodies").write_text("\n".join(bodies(args)))
        (folder / "script.lua").write_text(SCRIPT)
        server = [sys.executable, str(EXAMPLE), str(folder / "model"), "--port", str(PORT)]
        process = subprocess.Popen(server)
        try:
            wait_for(process)
            wait = 1000 * args.connections // args.rate if args.rate else 0
            wrk = ["wrk", "-t1", f"-c{args.connections}", f"-d{args.seconds}s", "-s"]
            wrk += [folder / "script.lua", f"http://127.0.0.1:{PORT}"]
            wrk += ["--", folder / "bodies", str(wait)]
            subprocess.run([*wrk[:3], "-d1s", *wrk[4:]], check=True, capture_output=True)
            out = subprocess.run(wrk, check=True, capture_output=True, text=True).stdout
        finally:
            process.terminate()
            process.wait()
    found = re.search(r"RESULT (\d+) (\d+) (\S+) (\S+) (\S+) (\d+)", out)
    if found is None:
        raise RuntimeError(f"wrk printed no result:\n{out}")
    requests, micros, median, p99, largest, errors = map(float, found.groups())
    yield {
        "case": "http",
        **{"rows": args.rows, "dim": args.dim, "ids": args.ids, "rate": args.rate},
        "connections": args.connections,
        "requests_per_s": round(requests / micros * 1e6, 1),
        "median_ms": round(median, 2),
        "p99_ms": round(p99, 2),
        "max_ms": round(largest, 2),
        "errors": int(errors),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=AtLeast(1), default=1_000_000)
    parser.add_argument("--dim", type=AtLeast(1), default=128)
    parser.add_argument("--ids", type=AtLeast(1), default=2000, help="of a request")
    parser.add_argument(
        "--rate", type=AtLeast(0), default=500, help="requests a second; 0: no limit"
    )
    parser.add_argument("--connections", type=AtLeast(1), default=8)
    parser.add_argument("--seconds", type=AtLeast(1), default=10)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args(arguments)
    args.device, args.threads = "cpu", 1
    report(cases(args), args.out, KEYS)


if __name__ == "__main__":
    main()
