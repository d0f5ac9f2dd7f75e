"""Serves an exported model through HTTP: batched requests, deltas, health and metrics.

    pip install fastapi orjson 'uvicorn[standard]'
    python examples/serving/serve_http.py model/ --deltas deltas/ --port 8000

    curl localhost:8000/predict -d '{"args": [[[0.5, 1.0]], {"ids": {"user": [[17]]}}]}'

``args`` and ``kwargs`` are the arguments of the model's forward. A tensor is nested lists of
numbers. A ``KeyedJaggedTensor`` is ``{"ids": {feature: [ids of each sample]}}``, with ``weights``
of the same shape if the model takes weights. Requests that arrive during a call of the model, or
within ``--wait-ms``, are served as one batch.

The event loop's thread calls the model, because a call takes less time than switching threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import orjson
import torch
import torch.utils._pytree as pytree
import uvicorn
from fastapi import FastAPI, Response
from starlette.types import Receive, Scope, Send

from torchrec_hkv import serving


def samples_of(given: Any) -> int:
    """Returns the number of samples of an argument."""
    if isinstance(given, dict) and "ids" in given:
        return len(next(iter(given["ids"].values()), []))
    if isinstance(given, dict):
        return samples_of(next(iter(given.values())))
    return len(given)


def merged(parts: Sequence[Any]) -> Any:
    """Concatenates the arguments of several requests."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        if any(not isinstance(part, dict) or part.keys() != first.keys() for part in parts):
            raise ValueError("requests of a batch have different features.")
        return {key: merged([part[key] for part in parts]) for key in first}
    return [sample for part in parts for sample in part]


def as_argument(given: Any) -> Any:
    """Converts JSON to an argument of the model."""
    if isinstance(given, dict) and "ids" in given:
        return serving.KeyedIds.from_lists(given["ids"], given.get("weights"))
    if isinstance(given, dict):
        return {key: as_argument(value) for key, value in given.items()}
    return torch.tensor(given, dtype=torch.float32)


class Call(NamedTuple):
    """A waiting request."""

    args: list[Any]
    kwargs: dict[str, Any]
    samples: int
    answer: asyncio.Future[Any]


class Batcher:
    """Serves concurrently waiting requests as one batch.

    Args:
        model: the model.
        maximum: largest number of samples of a batch with more than one request.
        wait: seconds that the first request of a batch waits for others.
    """

    def __init__(self, model: serving.ServingModel, maximum: int, wait: float) -> None:
        self._model, self._maximum, self._wait = model, maximum, wait
        self._waiting: asyncio.Queue[Call] = asyncio.Queue()

    async def predict(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the model's outputs for a request."""
        samples = {samples_of(given) for given in (*args, *kwargs.values())}
        if len(samples) != 1:
            raise ValueError(
                f"arguments have {sorted(samples)} samples, but must have as many each."
            )
        answer = asyncio.get_running_loop().create_future()
        await self._waiting.put(Call(args, kwargs, samples.pop(), answer))
        return await answer

    async def run(self) -> None:
        """Serves until it is cancelled."""
        while True:
            calls = [await self._waiting.get()]
            # With 0, the event loop still reads requests that have arrived.
            await asyncio.sleep(self._wait if self._waiting.empty() else 0)
            while not self._waiting.empty() and sum(c.samples for c in calls) < self._maximum:
                calls.append(self._waiting.get_nowait())
            answers = self._serve(calls)
            for call, answer in zip(calls, answers, strict=True):
                if call.answer.cancelled():
                    continue
                if isinstance(answer, Exception):
                    call.answer.set_exception(answer)
                else:
                    call.answer.set_result(answer)

    def _serve(self, calls: Sequence[Call]) -> list[Any]:
        try:
            args = [merged(parts) for parts in zip(*(c.args for c in calls), strict=True)]
            kwargs = merged([call.kwargs for call in calls])
            out = self._model(
                *map(as_argument, args), **{key: as_argument(v) for key, v in kwargs.items()}
            )
        except Exception as error:
            if len(calls) == 1:
                return [error]
            return [self._serve([call])[0] for call in calls]  # only the bad request fails
        answers, first = [], 0
        for call in calls:
            call_samples = slice(first, first + call.samples)
            answers.append(
                pytree.tree_map(
                    lambda tensor, call_samples=call_samples: tensor[call_samples].tolist(), out
                )
            )
            first += call.samples
        return answers


class Application(FastAPI):
    """FastAPI, except for prediction requests.

    FastAPI resolves dependencies of a route, and its middlewares wrap each message, which takes as
    long as the model. Prediction requests therefore use the ASGI protocol directly.
    """

    def __init__(self, batcher: Batcher, **options: Any) -> None:
        super().__init__(**options)
        self._batcher = batcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", "/predict"):
            await self._predict(receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _predict(self, receive: Receive, send: Send) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        try:
            body = orjson.loads(b"".join(parts))
            if not isinstance(body, dict):
                raise ValueError(
                    f"the request is a {type(body).__name__}, but must be an object with args or "
                    "kwargs."
                )
            outputs = await self._batcher.predict(body.get("args", []), body.get("kwargs", {}))
            status, answer = 200, orjson.dumps({"outputs": outputs})
        except (ValueError, TypeError, AttributeError) as error:
            status, answer = 422, orjson.dumps({"detail": str(error)})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def make_app(model: serving.ServingModel, maximum: int = 1024, wait: float = 0.0) -> FastAPI:
    """Creates the application."""
    batcher = Batcher(model, maximum, wait)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()

    app = Application(batcher, lifespan=lifespan)

    @app.get("/health")
    def health(response: Response) -> Any:
        freshness = model.freshness()
        if freshness.error is not None:
            response.status_code = 503
        return dataclasses.asdict(freshness)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(model.metrics(), media_type="text/plain; version=0.0.4")

    return app


def main() -> None:
    """Parses arguments and serves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder that serving.export has written")
    parser.add_argument("--deltas", help="folder of a DeltaWriter to follow")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=1024, help="samples of a batch")
    parser.add_argument(
        "--wait-ms", type=float, default=0.0, help="that a request waits for others"
    )
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, for a call")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = serving.load(given.model, given.device)
    if given.deltas is not None:
        serving.follow(model, given.deltas)
    app = make_app(model, given.max_batch, given.wait_ms / 1000)
    # Otherwise Python's garbage collections visit all imported and loaded objects, which takes a
    # tenth of a second.
    gc.collect()
    gc.freeze()
    uvicorn.run(
        app,
        host=given.host,
        port=given.port,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
    )


if __name__ == "__main__":
    main()
