"""The scripts in examples/, on a small scale."""

from __future__ import annotations

import functools
import http.client
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import llga_fuser

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SHAPE = (1, 3, 8, 8)


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does for a script: its directory comes first."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@functools.cache
def example(name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(pathlib.Path(llga_fuser.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


# -------------------------------------------------------------------------------- multi_instance

needs_launcher = pytest.mark.skipif(
    shutil.which("lscpu") is None or shutil.which("taskset") is None,
    reason="PyTorch's launcher needs lscpu and taskset",
)
QUICK = ("--image-size", "16", "--seconds", "0.1")


@needs_launcher
def test_instances_run_on_cores_of_their_own(tmp_path: pathlib.Path) -> None:
    count = len(example("multi_instance").cores())
    if count < 2:
        pytest.skip("one core: no two instances")
    file = tmp_path / "out.json"
    # The launcher would leave this as it is, and each instance would have 7 threads.
    done = run("multi_instance", "tiny", *QUICK, "--json", str(file), OMP_NUM_THREADS="7")
    assert done.returncode == 0, done.stderr
    assert "throughput of the small ones" in done.stdout
    data = json.loads(file.read_text())
    first, second = (set(r["cpus"]) for r in data["several_small"])
    assert first and second and not first & second
    assert data["one_big"][0]["cpus"] == sorted(first | second)
    assert data["one_big"][0]["threads"] == len(first | second)
    assert all(r["threads"] == len(first) for r in data["several_small"])
    assert all(r["inputs_per_second"] > 0 for r in data["several_small"])
    rate = sum(r["inputs_per_second"] for r in data["several_small"])
    assert data["ratio"] == pytest.approx(rate / data["one_big"][0]["inputs_per_second"])


@needs_launcher
def test_an_instance_that_fails_is_an_error(tmp_path: pathlib.Path) -> None:
    """The launcher itself would report success."""
    file = tmp_path / "broken.pt"
    file.write_text("nothing that torch.jit.save wrote")
    done = run("multi_instance", str(file), "--instances", "1", *QUICK)
    assert done.returncode == 1
    assert "an instance failed" in done.stderr
    assert "not a file that torch.jit.save wrote" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ("0,0,0\n1,0,0\n2,1,0\n3,1,0\n", [0, 2]),  # neighbours are threads of one core
        ("0,0,0\n1,1,0\n2,0,0\n3,1,0\n", [0, 1]),
        ("0,0,0\n1,1,0\n2,0,1\n3,1,1\n", [0, 1, 2, 3]),  # cores are numbered by socket
    ],
)
def test_one_cpu_of_each_core(
    siblings: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = example("multi_instance")
    listed = subprocess.CompletedProcess([], 0, "# CPU,Core,Socket\n" + siblings)
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **kwargs: listed)
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda pid: set(range(4)))
    assert script.cores() == expected


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("multi_instance", ["nosuchnet"], "'nosuchnet' is not tiny"),
        ("multi_instance", ["nowhere.pt"], "nowhere.pt: no such file"),
        ("multi_instance", ["tiny", "--instances", "0"], "--instances: 0 is not above 0"),
        ("multi_instance", ["tiny", "--instances", "99999"], "99999 on"),
        ("worker_pool", ["nosuchnet"], "'nosuchnet' is not tiny"),
        ("worker_pool", ["tiny", "--workers", "0"], "--workers: 0 is less than 1"),
        ("worker_pool", ["tiny", "--image-size", "8", "--port", "99999"], "--port: 99999"),
        ("batch_inference_ray", ["nowhere", "tiny"], "nowhere: no such directory"),
        ("batch_inference_ray", [".", "nosuchnet"], "'nosuchnet' is not tiny"),
        ("batch_inference_ray", [".", "tiny", "--batch", "0"], "--batch: 0 is less than 1"),
    ],
)
def test_wrong_usage(
    name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as exit_:
        example(name).main(arguments)
    torch.set_num_threads(threads)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------- batch_inference_ray


def test_ray_classifies_a_directory(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("ray", reason="an optional extra: ray")
    image = pytest.importorskip("PIL.Image", reason="comes with the extra ray")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one CPU: none is left to read images")
    photos, classes = tmp_path / "photos", tmp_path / "classes"
    photos.mkdir()
    for i in range(10):
        image.new("RGB", (20 + i, 16), (25 * i, 250 - 25 * i, 100)).save(photos / f"{i}.png")
    done = run(
        "batch_inference_ray",
        *(str(photos), "tiny", "--image-size", "16", "--batch", "4", "--output", str(classes)),
        RAY_USAGE_STATS_ENABLED="0",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(s) for f in classes.glob("*.json") for s in f.read_text().splitlines()]
    got = {pathlib.Path(r["path"]).name: r for r in rows}
    assert sorted(got) == [f"{i}.png" for i in range(10)]

    net = example("model").load("tiny")
    script = example("batch_inference_ray")
    for i in range(10):
        pixels = torch.tensor([25 * i, 250 - 25 * i, 100]) / 255  # of one colour, at any size
        x = (pixels - torch.tensor(script.MEAN)) / torch.tensor(script.DEVIATION)
        with torch.no_grad():
            scores = net(x.view(1, 3, 1, 1).expand(1, 3, 16, 16).contiguous()).softmax(-1)[0]
        row = got[f"{i}.png"]
        assert row["class"] == int(scores.argmax())
        assert row["score"] == pytest.approx(float(scores.max()), abs=1e-4)


# ----------------------------------------------------------------------------------- worker_pool


@pytest.fixture
def pool() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    net = example("model").compiled("tiny", SHAPE, "fp32")
    made = example("worker_pool").Pool(net, SHAPE, workers=3)
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_pool_computes_what_the_module_does(pool: Any) -> None:
    inputs = [torch.rand(SHAPE) for _ in range(30)]
    misses, fallbacks = llga_fuser.cache_info().misses, llga_fuser.cache_info().fallbacks
    futures = [pool.submit(x) for x in inputs]
    plain = example("model").load("tiny")
    with torch.no_grad():
        for x, future in zip(inputs, futures, strict=True):
            torch.testing.assert_close(future.result(60), plain(x), atol=1e-5, rtol=1e-4)
    assert pool.served == 30
    # The threads have found what the main thread compiled.
    assert llga_fuser.cache_info().misses == misses
    assert llga_fuser.cache_info().fallbacks == fallbacks


def test_pool_refuses_bad_input(pool: Any) -> None:
    for x, message in (
        (torch.rand(2, 3, 8, 8), r"expected float32 \[1, 3, 8, 8\], got float32 \[2, 3, 8, 8\]"),
        (torch.rand(SHAPE).double(), "got float64"),
        (torch.full(SHAPE, float("nan")), "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.submit(x)
    assert pool.served == 0


def test_pool_queue_is_bounded_and_drained_by_close() -> None:
    script = example("worker_pool")
    started, go = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        started.set()
        assert go.wait(60)
        return x + 1

    pool = script.Pool(slow, (2,), workers=1, capacity=2)
    x = torch.zeros(2)
    first = pool.submit(x)
    assert started.wait(60)
    waiting = [pool.submit(x), pool.submit(x)]
    with pytest.raises(script.BusyError, match="2 requests are waiting already"):
        pool.submit(x)
    waiting[0].cancel()
    go.set()
    pool.close()
    pool.close()
    assert torch.equal(first.result(0), torch.ones(2))
    assert torch.equal(waiting[1].result(0), torch.ones(2))
    assert waiting[0].cancelled()
    with pytest.raises(script.BusyError, match="closed"):
        pool.submit(x)


def test_a_model_that_fails_stops_no_worker() -> None:
    script = example("worker_pool")

    def net(x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise RuntimeError("negative")
        return x

    pool = script.Pool(net, (2,), workers=1)
    with pytest.raises(RuntimeError, match="negative"):
        pool.submit(-torch.ones(2)).result(60)
    assert torch.equal(pool.submit(torch.ones(2)).result(60), torch.ones(2))
    pool.close()


@pytest.fixture
def port(pool: Any) -> Iterator[int]:
    with example("worker_pool").Server(pool, 0) as server:
        server.RequestHandlerClass.log_message = lambda *args: None
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        host, number = server.server_address[:2]
        assert host == "127.0.0.1"
        yield number
        server.shutdown()
        thread.join()


def ask(
    port: int, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Content-Type": kind})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_server_answers(port: int) -> None:
    x = torch.rand(SHAPE)
    with torch.no_grad():
        expected = example("model").load("tiny")(x)
    raw = x.numpy().astype("<f4").tobytes()
    text = json.dumps({"input": x.tolist()}).encode()
    for body, kind in (
        (raw, "application/octet-stream"),
        (text, "application/json; charset=utf-8"),
    ):
        status, answer = ask(port, "POST", "/predict", body, kind)
        assert status == 200, answer
        torch.testing.assert_close(torch.tensor(answer["output"]), expected, atol=1e-5, rtol=1e-4)
    assert ask(port, "GET", "/health") == (200, {"served": 2, "waiting": 0})


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (
            b"1234",
            "application/octet-stream",
            400,
            "expected 192 little-endian float32 (768 bytes)",
        ),
        (b"{", "application/json", 400, "not JSON"),
        (b"[1]", "application/json", 400, 'expected an object {"input": [...]}'),
        (b'{"input": [[1], [1, 2]]}', "application/json", 400, "not an array of numbers"),
        (b'{"input": "abc"}', "application/json", 400, "not an array of numbers"),
        (b'{"input": [1, 2]}', "application/json", 400, "expected float32 [1, 3, 8, 8]"),
        (b"x", "text/plain", 400, "Content-Type: expected application/json"),
        (b"1" * 10000, "application/json", 413, "body: at most"),
    ],
)
def test_server_says_what_is_wrong(
    body: bytes, kind: str, status: int, message: str, port: int
) -> None:
    got, answer = ask(port, "POST", "/predict", body, kind)
    assert got == status
    assert message in answer["error"]


def test_server_knows_its_paths(port: int) -> None:
    assert ask(port, "GET", "/")[0] == 404
    assert ask(port, "POST", "/elsewhere", b"{}")[0] == 404


def test_server_says_when_it_is_busy_or_late() -> None:
    script = example("worker_pool")
    go = threading.Event()
    pool = script.Pool(lambda x: go.wait(60) and x, (1,), workers=1, capacity=1)
    with script.Server(pool, 0, timeout=0.2) as server:
        server.RequestHandlerClass.log_message = lambda *args: None
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        body = b'{"input": [1]}'
        assert ask(port, "POST", "/predict", body)[0] == 504  # this one is being computed
        assert ask(port, "POST", "/predict", body)[0] == 504  # this one waits
        status, answer = ask(port, "POST", "/predict", body)
        assert status == 503
        assert "1 requests are waiting already" in answer["error"]
        go.set()
        pool.close()
        server.shutdown()
        thread.join()


def test_server_answers_before_it_closes() -> None:
    script = example("worker_pool")
    begun, go = threading.Event(), threading.Event()

    def net(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go.wait(60)
        return x

    pool = script.Pool(net, (1,), workers=1)
    answers: list[Any] = []
    server = script.Server(pool, 0)
    server.RequestHandlerClass.log_message = lambda *args: None
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    port = server.server_address[1]
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)  # one that stays open
    kept.request("GET", "/health")
    assert kept.getresponse().read() == b'{"served": 0, "waiting": 0}'
    client = threading.Thread(
        target=lambda: answers.append(ask(port, "POST", "/predict", b'{"input": [1]}'))
    )
    client.start()
    assert begun.wait(60)
    server.shutdown()
    closing = threading.Thread(target=server.server_close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go.set()
    for thread in (closing, client, serving):
        thread.join(60)
    assert answers == [(200, {"output": [1.0]})]
    kept.request("POST", "/predict", b'{"input": [1]}', {"Content-Type": "application/json"})
    response = kept.getresponse()
    assert response.status == 503
    assert json.loads(response.read()) == {"error": "the server is closed"}
    kept.close()
    pool.close()


def test_server_as_a_process() -> None:
    root = str(pathlib.Path(llga_fuser.__file__).parent.parent)
    command = [sys.executable, "-u", str(EXAMPLES / "worker_pool.py")]
    with subprocess.Popen(
        [*command, "tiny", "--image-size", "8", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port = int(url.removeprefix("http://127.0.0.1:").removesuffix("/predict"))
        status, answer = ask(port, "POST", "/predict", bytes(768), "application/octet-stream")
        assert status == 200
        assert len(answer["output"][0]) == 10
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_pool_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = ["tiny", "--image-size", "8", "--workers", "2", "--benchmark", "0.1"]
    assert example("worker_pool").main(arguments) == 0
    torch.set_num_threads(threads)
    assert "2 workers x 1 threads: " in capsys.readouterr().out
