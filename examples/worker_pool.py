"""A pool of threads over one compiled module, behind HTTP on the loopback interface.

    python examples/worker_pool.py resnet50 --workers 4 --threads 1
    curl --data-binary @input.f32 -H 'Content-Type: application/octet-stream' \\
        http://127.0.0.1:8080/predict

The weights are in memory once, whatever the number of threads: TorchScript releases Python's lock
while it runs, and fusion groups may run in any number of threads at once. The pool needs nothing
but torch; `Pool.submit` returns a `concurrent.futures.Future`, which FastAPI and other asyncio
frameworks await through `asyncio.wrap_future`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.server
import json
import math
import queue
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class BadInputError(ValueError):
    """A request that the model cannot take; the message is for who sent it."""


class BusyError(RuntimeError):
    """The queue is full: come back later."""


class Pool:
    """Threads that call one module.

    Args:
        net: what to call with one tensor.
        shape: of the tensors it takes.
        workers: how many calls run at the same time.
        threads: that each call computes with. The module has to be compiled with the same number.
        capacity: how many requests may wait; one more is refused.
    """

    def __init__(
        self, net: Any, shape: Sequence[int], *, workers: int, threads: int = 1, capacity: int = 64
    ) -> None:
        self.net, self.shape = net, tuple(shape)
        self.served = 0
        self._lock = threading.Lock()
        self._closed = False
        # No `ThreadPoolExecutor`: its queue has no bound.
        self._queue: queue.Queue[tuple[Tensor, concurrent.futures.Future[Tensor]] | None] = (
            queue.Queue(capacity)
        )
        self._threads = [
            threading.Thread(target=self._work, args=(threads,), name=f"worker-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, x: Tensor) -> concurrent.futures.Future[Tensor]:
        """Queues a call.

        Raises:
            BadInputError: the tensor is not what the model takes.
            BusyError: the queue is full, or the pool is closed.
        """
        if tuple(x.shape) != self.shape or x.dtype != torch.float32:
            got = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            raise BadInputError(f"input: expected float32 {list(self.shape)}, got {got}")
        if not x.isfinite().all():
            raise BadInputError("input: expected finite numbers, got NaN or infinity")
        future: concurrent.futures.Future[Tensor] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise BusyError("the pool is closed")
            try:
                self._queue.put_nowait((x, future))
            except queue.Full:
                raise BusyError(f"{self._queue.maxsize} requests are waiting already") from None
        return future

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def close(self) -> None:
        """Finishes what is queued, takes nothing more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():  # a property of the thread
            while (item := self._queue.get()) is not None:
                x, future = item
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = self.net(x)
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    with self._lock:
                        self.served += 1


# ------------------------------------------------------------------------------------------- HTTP


def decode(body: bytes, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of a request.

    Raises:
        BadInputError: says what is wrong with it.
    """
    count = math.prod(shape)
    if kind == "application/octet-stream":
        if len(body) != 4 * count:
            raise BadInputError(
                f"body: expected {count} little-endian float32 ({4 * count} bytes), "
                f"got {len(body)} bytes"
            )
        return torch.frombuffer(bytearray(body), dtype=torch.float32).reshape(shape)
    if kind == "application/json":
        try:
            data = json.loads(body)
        except ValueError as error:
            raise BadInputError(f"body: not JSON ({error})") from None
        if not isinstance(data, dict) or "input" not in data:
            raise BadInputError('body: expected an object {"input": [...]}')
        try:
            return torch.tensor(data["input"], dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInputError(f"input: not an array of numbers ({error})") from None
    raise BadInputError(
        f"Content-Type: expected application/json or application/octet-stream, got {kind or 'none'}"
    )


class Server(http.server.ThreadingHTTPServer):
    """Loopback only: nothing here encrypts, or asks who is calling."""

    daemon_threads = True  # those of clients that keep their connection, and ask nothing

    def __init__(self, pool: Pool, port: int, timeout: float = 30.0) -> None:
        self._changed = threading.Condition()
        self._answering, self._closed = 0, False
        super().__init__(("127.0.0.1", port), Handler)
        self.pool, self.wait = pool, timeout
        # JSON takes at most some 25 characters for a number.
        self.longest = 1024 + 25 * math.prod(pool.shape)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Around what answers a request: `server_close` waits for its end.

        Raises:
            BusyError: the server is closed.
        """
        with self._changed:
            if self._closed:
                raise BusyError("the server is closed")
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def server_close(self) -> None:
        """Finishes what is being answered, takes nothing more.

        A thread that still held tensors while Python ends would end the process by an abort: they
        release Python's lock, which it would not get again.
        """
        super().server_close()
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._answering)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # for a client that does not send what it announced

    def answer(self, status: int, data: dict[str, Any], **headers: str) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:  # the body may not have been read
            self.close_connection = True
            self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        pool = self.server.pool
        if self.path == "/health":
            self.answer(200, {"served": pool.served, "waiting": pool.waiting})
        else:
            self.answer(404, {"error": f"{self.path}: there are /health and /predict (POST)"})

    def do_POST(self) -> None:
        try:
            with self.server.serving():
                self.predict()
        except BusyError as error:
            self.answer(503, {"error": str(error)}, Retry_After="1")

    def predict(self) -> None:
        if self.path != "/predict":
            self.answer(404, {"error": f"{self.path}: there are /health and /predict (POST)"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.answer(411, {"error": "Content-Length: expected the size of the body"})
            return
        if int(length) > self.server.longest:
            self.answer(413, {"error": f"body: at most {self.server.longest} bytes, got {length}"})
            return
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        pool = self.server.pool
        try:
            result = pool.submit(decode(self.rfile.read(int(length)), kind, pool.shape))
            output = result.result(self.server.wait)
        except BadInputError as error:
            self.answer(400, {"error": str(error)})
        except BusyError as error:
            self.answer(503, {"error": str(error)}, Retry_After="1")
        except concurrent.futures.TimeoutError:
            self.answer(504, {"error": f"no result within {self.server.wait:g} s"})
        except Exception as error:  # of the model: the client learns no more than that
            self.log_error("%s: %s", type(error).__name__, error)
            self.answer(500, {"error": "the model failed"})
        else:
            self.answer(200, {"output": output.float().tolist()})

    def log_message(self, text: str, *values: Any) -> None:
        if values and str(values[1:2]) != "('200',)":
            super().log_message(text, *values)


# -------------------------------------------------------------------------------------------- run


def measure(pool: Pool, seconds: float, clients: int) -> tuple[float, list[float]]:
    """Requests per second, and the time each of them took; without HTTP."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    def client() -> None:
        x = torch.rand(pool.shape)
        while time.perf_counter() < end:
            start = time.perf_counter()
            with contextlib.suppress(BusyError):
                pool.submit(x).result()
                times.append(time.perf_counter() - start)

    begin = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / (time.perf_counter() - begin), sorted(times)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="a pool of threads over one compiled module")
    add = parser.add_argument
    add("model", help="tiny, a torchvision classification model, or a file of torch.jit.save")
    add("--weights", help="of a torchvision model, such as DEFAULT; default: random ones")
    add("--workers", type=int, default=2, metavar="N", help="calls at the same time, default: 2")
    add("--threads", type=int, default=1, metavar="N", help="of each call, default: 1")
    add("--capacity", type=int, default=64, metavar="N", help="of the queue, default: 64")
    add("--image-size", type=int, default=224, metavar="N", help="default: 224")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--port", type=int, default=8080, metavar="N", help="on 127.0.0.1, default: 8080; 0: any")
    add("--benchmark", type=float, metavar="S", help="serve nothing, measure the pool so long")
    options = parser.parse_args(arguments)
    for name in ("workers", "threads", "capacity", "image_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} is less than 1")
    from model import compiled

    shape = (1, 3, options.image_size, options.image_size)
    torch.set_num_threads(options.threads)  # a group is compiled for a number of threads
    try:
        net = compiled(options.model, shape, options.dtype, options.weights)
    except ValueError as error:
        parser.error(str(error))
    pool = Pool(
        net, shape, workers=options.workers, threads=options.threads, capacity=options.capacity
    )
    if options.benchmark:
        rate, times = measure(pool, options.benchmark, clients=options.workers)
        pool.close()
        p99 = times[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)]
        print(
            f"{options.workers} workers x {options.threads} threads: {rate:.1f} requests/s, "
            f"median {1e3 * statistics.median(times):.3f} ms, p99 {1e3 * p99:.3f} ms"
        )
        return 0
    try:
        server = Server(pool, options.port)
    except (OSError, OverflowError) as error:
        parser.error(f"--port: {options.port}: {error}")
    with server:
        print(f"http://127.0.0.1:{server.server_address[1]}/predict", flush=True)
        # What a supervisor sends ends it as Ctrl-C does: what is queued is still answered.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
