"""Two hosts, as two agents of torchrun on this machine: node-aware sharding, and a host that dies.

    TORCHREC_HKV_AGENTS=1 pytest tests/stress/test_two_agents.py

takes minutes. The surviving agent continues alone, from the last delta. The agents share this
machine's network, or have separate ones if the user can create network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.support.network_hosts import Host, in_namespaces, on_loopback

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "stress" / "two_agents.py"
STEPS = 30
pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("TORCHREC_HKV_AGENTS"),
        reason="takes minutes: set TORCHREC_HKV_AGENTS=1",
    ),
    pytest.mark.timeout(1800),
]
#: For a machine with other load.
_PATIENCE_S = 600


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request) -> Iterator[list[Host]]:
    if request.param == "loopback":
        yield on_loopback()
        return
    with contextlib.ExitStack() as stack:
        try:
            created = stack.enter_context(in_namespaces())
        except OSError as error:
            pytest.skip(f"no network namespaces: {error}")
        yield created


def _agent(
    folder: Path, port: int, nodes: str, hosts: Sequence[Host], node: int, *arguments: str
) -> subprocess.Popen:
    host = hosts[node]
    command = [*host.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
    command += ["--nproc_per_node", "2", "--max_restarts", "3", "--monitor_interval", "1"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{hosts[0].address}:{port}"]
    command += ["--local_addr", host.address]
    configured = {"is_host": int(node == 0), "last_call_timeout": 20, "keep_alive_interval": 1}
    command += ["--rdzv_id", "agents", "--rdzv_conf"]
    command += [",".join(f"{name}={value}" for name, value in configured.items())]
    of_host = {"GLOO_SOCKET_IFNAME": host.device, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / f"agent-{node}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, str(SCRIPT), str(folder), *arguments],
            cwd=ROOT,
            env={**os.environ, **of_host},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _progress(folder: Path, kind: str) -> list[tuple[int, int, int, str]]:
    """Ranks, ranks per host, step and digest of each line of a kind."""
    path = folder / "progress"
    lines = path.read_text().splitlines() if path.is_file() else []
    words = [line.split() for line in lines if line.startswith(kind)]
    return [(int(w[1]), int(w[2]), int(w[3]), w[4]) for w in words]


def _wait_for(folder: Path, agents: list[subprocess.Popen], kind: str, count: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while len(_progress(folder, kind)) < count:
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
        assert time.monotonic() < deadline, logs
        assert any(agent.poll() is None for agent in agents), logs
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rows(folder: Path) -> dict[str, dict[int, torch.Tensor]]:
    saved = torch.load(folder / "rows.pt", weights_only=True)
    return {
        name: {id_: row for ids, rows in parts for id_, row in zip(ids.tolist(), rows, strict=True)}
        for name, parts in saved.items()
    }


def _workers(agent: subprocess.Popen) -> list[int]:
    """Processes that an agent has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue  # no process, or an ended one
        if parent == str(agent.pid):
            found.append(int(entry.name))
    return found


def _kill_host(agent: subprocess.Popen) -> None:
    """Kills an agent and its workers at once; the workers have separate sessions."""
    workers = _workers(agent)
    agent.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    agent.wait()


def _end(agents: list[subprocess.Popen]) -> None:
    for agent in agents:
        if agent.poll() is None:
            _kill_host(agent)


def _run(folder: Path, hosts: Sequence[Host], sharding_type: str) -> None:
    folder.mkdir()
    port, nodes = _free_port(), len(hosts)
    agents = [
        _agent(folder, port, str(nodes), hosts, node, sharding_type, str(STEPS), "0")
        for node in range(nodes)
    ]
    try:
        _wait_for(folder, agents, "end", 1)
        assert [agent.wait(timeout=120) for agent in agents] == [0] * nodes
    finally:
        _end(agents)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, dict[int, torch.Tensor]]:
    """The rows after all steps on one host, row-wise, without failures."""
    folder = tmp_path_factory.mktemp("one") / "host"
    _run(folder, on_loopback()[:1], "row_wise")
    return _rows(folder)


def _check_rows(rows, expected) -> None:
    for name, its in expected.items():
        assert set(rows[name]) == set(its)
        assert len(its) > 100
        for id_, row in its.items():
            torch.testing.assert_close(rows[name][id_], row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharding_type", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_node_aware_sharding(tmp_path, hosts, expected, sharding_type):
    _run(tmp_path / "hosts", hosts, sharding_type)
    assert _progress(tmp_path / "hosts", "end")[0][0] == 4
    assert _progress(tmp_path / "hosts", "begin")[0][:2] == (4, 2)
    _check_rows(_rows(tmp_path / "hosts"), expected)


def test_a_host_that_dies(tmp_path, hosts, expected):
    port = _free_port()
    arguments = ("table_row_wise", str(STEPS), "0.3")
    agents = [_agent(tmp_path, port, "1:2", hosts, node, *arguments) for node in range(2)]
    try:
        _wait_for(tmp_path, agents, "wrote", 3)
        _kill_host(agents[1])
        _wait_for(tmp_path, agents, "end", 1)
        assert agents[0].wait(timeout=_PATIENCE_S) == 0
    finally:
        _end(agents)
    first, *later = _progress(tmp_path, "begin")
    assert first[:3] == (4, 2, 0)
    again = later[-1]
    assert again[:2] == (2, 2)
    assert again[2] >= 9
    # Bit for bit, training resumed from what was written.
    written = {
        step: digest for ranks, _, step, digest in _progress(tmp_path, "wrote") if ranks == 4
    }
    assert again[3] == written[again[2]]
    assert _progress(tmp_path, "end")[0][0] == 2
    _check_rows(_rows(tmp_path), expected)
