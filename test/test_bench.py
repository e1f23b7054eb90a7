"""`python -m llga_fuser bench`: its answers, its exit codes and its models."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import llga_fuser
from llga_fuser import _models
from llga_fuser.__main__ import main
from llga_fuser.bench import AGREE, DIFFER, FAILED, SUITE, verdict
from llga_fuser.bench.run import BenchError, Engine, ModelResult, Options, Process, _judge
from llga_fuser.bench.table import render
from llga_fuser.bench.worker import count_fused

QUICK = ["--rounds", "1", "--seconds", "0.01", "--threads", "1", "--no-progress"]
OPTIONS = Options("fp32", 1, None, 2, 3, 0.1, ("eager",), 100.0, verbose=False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user calls it."""
    root = str(pathlib.Path(llga_fuser.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "llga_fuser", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_int8(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "result.json"
    done = run("bench", "tinyconv", "--dtype", "int8", *QUICK, "--json", str(file))
    assert done.returncode in (AGREE, DIFFER) and not done.stderr, done.stdout + done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines()), done.stdout
    assert "SQNR" in done.stdout and "top-1" in done.stdout and "rel err" not in done.stdout
    (model,) = json.loads(file.read_text())["models"]
    engines = {e["name"]: e for e in model["engines"]}
    assert list(engines) == ["eager", "llga_fp32", "torchscript", "llga_fuser"]
    assert all(e["failure"] is None and e["agrees"] for e in engines.values()), engines
    assert engines["eager"]["relative_error"] == 0 and engines["eager"]["top1"] == 1
    assert engines["llga_fp32"]["relative_error"] < 1e-4
    for name in ("torchscript", "llga_fuser"):
        assert 1e-4 < engines[name]["relative_error"] < 0.1, engines[name]  # 20 dB
        assert engines[name]["top1"] >= 0.5
    # A fallback is the one thing beside wrong numbers that the exit code tells.
    assert (done.returncode == DIFFER) is bool(engines["llga_fuser"]["fallbacks"])


@pytest.mark.parametrize(("sqnr", "code"), [(10.1, AGREE), (9.9, DIFFER), (None, DIFFER)])
def test_int8_verdict(sqnr: float | None, code: int) -> None:
    result = ModelResult("m", "1", dataclasses.replace(OPTIONS, dtype="int8"))
    result.engines = [Engine(name) for name in ("llga_fp32", "llga_fuser")]
    relative = None if sqnr is None else 10 ** (-sqnr / 20)
    answers = ({"relative": 1e-6}, {"relative": relative, "top1": 0.75})
    for engine, answer in zip(result.engines, answers, strict=True):
        _judge(result, engine, {"max_abs": answer["relative"], **answer})
    assert result.engines[0].agrees
    assert verdict(result) == code
    shown = "nan" if sqnr is None else f"{sqnr} dB"
    assert shown in render(result) and "75%" in render(result)


def test_int8_has_no_builtin_engine() -> None:
    done = run("bench", "mlp", "--dtype", "int8", "--engines", "builtin", *QUICK)
    assert done.returncode == FAILED
    assert "--engines: builtin has no int8" in done.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_engines(dtype: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "result.json"
    done = run("bench", "tinyconv", "--dtype", dtype, *QUICK, "--json", str(file))
    assert done.returncode == AGREE, done.stdout + done.stderr
    assert not done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines()), done.stdout
    (model,) = json.loads(file.read_text())["models"]
    engines = {e["name"]: e for e in model["engines"]}
    assert list(engines) == ["eager", "torchscript", "builtin", "llga_fuser"]
    for name, e in engines.items():
        assert e["failure"] is None
        assert e["agrees"], e
        assert 0 < e["minimum"] <= e["median"]
        assert e["warm_up"] > 0 or name == "eager"
        assert e["peak_memory"] > 50e6
        assert name in done.stdout
    assert engines["eager"]["groups"] is None
    ours = engines["llga_fuser"]
    assert ours["groups"] >= 1
    # The convolutions with what follows them, and the linear.
    assert ours["nodes_fused"] >= 5
    assert ours["fallbacks"] == {}


def test_json_to_standard_output() -> None:
    done = run("bench", "mlp", "--engines", "eager,llga_fuser", *QUICK, "--json", "-")
    assert done.returncode == AGREE, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["environment"]["torch"] == torch.__version__
    assert [e["name"] for e in result["models"][0]["engines"]] == ["eager", "llga_fuser"]


def test_progress_goes_to_standard_error() -> None:
    arguments = [a for a in QUICK if a != "--no-progress"]
    done = run("bench", "mlp", "--engines", "eager", *arguments)
    assert done.returncode == AGREE
    assert "mlp: round 1 of 1: eager" in done.stderr
    assert "round" not in done.stdout.replace("1 rounds", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet5"], "unknown model 'resnet5'; did you mean resnet50"),
        (["mlp", "--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (["alexnet", "--image-size", "8"], "alexnet"),
    ],
)
def test_failures_are_one_line(arguments: list[str], message: str) -> None:
    done = run("bench", *arguments, "--engines", "eager", *QUICK)
    assert done.returncode == FAILED
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "eager,nosuch"], "'nosuch' is not an engine"),
        (["--rounds", "0"], "'0' is not a number of at least 1"),
        (["--batch", "many"], "'many' is not a number of at least 1"),
        (["--dtype", "fp16"], "invalid choice: 'fp16'"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "mlp", *arguments])
    assert exit_.value.code == FAILED
    assert message in capsys.readouterr().err


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    for code in (AGREE, DIFFER, FAILED):
        assert f" {code}  " in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert torch.__version__ in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- verdict


def engine(name: str, **values: Any) -> Engine:
    median = values.setdefault("median", 1.0)
    rounds = [{"median": median, "min": median, "spread": 0.0, "foreign": 0.0, "counts": True}]
    return Engine(name, **{"agrees": True, "rounds": rounds, **values})


@pytest.mark.parametrize(
    ("engines", "code"),
    [
        ([engine("eager"), engine("llga_fuser", fallbacks={})], AGREE),
        ([engine("eager"), engine("llga_fuser", agrees=False)], DIFFER),
        ([engine("eager"), engine("llga_fuser", fallbacks={"dtype": 3})], DIFFER),
        ([engine("eager"), engine("llga_fuser", fallbacks={"oneDNN takes 9 times": 3})], AGREE),
        ([engine("eager"), engine("llga_fuser", failure="died")], FAILED),
        ([engine("eager", failure="died"), engine("llga_fuser")], FAILED),
        # The built-in fuser is there to compare with.
        ([engine("builtin", agrees=False), engine("llga_fuser")], AGREE),
        ([engine("builtin", failure="died"), engine("llga_fuser")], AGREE),
        ([engine("builtin", agrees=False)], DIFFER),
        ([engine("builtin", failure="died")], FAILED),
    ],
)
def test_verdict(engines: list[Engine], code: int) -> None:
    assert verdict(ModelResult("net", "1x1", OPTIONS, engines)) == code


def test_table_shows_what_is_wrong() -> None:
    engines = [
        engine("eager", median=2e-3, minimum=1e-3),
        engine("torchscript", median=1e-3, minimum=1e-3),
        engine("builtin", failure="the process died (killed by signal 11)" + 80 * "."),
        engine(
            "llga_fuser",
            median=5e-5,
            minimum=4e-5,
            agrees=False,
            max_abs_error=None,
            relative_error=None,
            groups=3,
            nodes_fused=7,
            nodes_outside=2,
            fallbacks={"dtype": 3},
            peak_memory=123 << 20,
        ),
    ]
    text = render(ModelResult("net", "9x9", OPTIONS, engines, rounds=3))
    ours = next(line for line in text.splitlines() if line.startswith("llga_fuser "))
    assert "50.00 us" in ours
    assert "20.00x" in ours
    assert "123 M" in ours
    assert ours.split()[-1] == "WRONG"
    assert "nan" in ours
    assert "signal 11" in text
    assert "7 of 9 operators in 3 fusion groups" in text
    assert "3 x dtype" in text
    assert all(len(line) <= 100 for line in text.splitlines()), text


# ---------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize(("engine_name", "expected"), [("builtin", False), ("llga_fuser", True)])
def test_only_one_engine_imports_the_fuser(
    engine_name: str, expected: bool, tmp_path: pathlib.Path
) -> None:
    """torch's own fuser would not be torch's own in a process where this one is imported."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = [{json.dumps(worker_arguments(engine_name, tmp_path))!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(worker_file())!r}, run_name='__main__')\n"
        "except SystemExit:\n"
        "    sys.stderr.write(str('llga_fuser' in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input="load\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert json.loads(done.stdout) == {}, done.stderr
    assert done.stderr.endswith(str(expected))


def worker_file() -> pathlib.Path:
    return pathlib.Path(llga_fuser.__file__).parent / "bench" / "worker.py"


def worker_arguments(engine_name: str, folder: pathlib.Path) -> dict[str, Any]:
    return {
        "engine": engine_name,
        "model": "mlp",
        "dtype": "fp32",
        "batch": 1,
        "image_size": None,
        "threads": 1,
        "seconds": 0.01,
        "folder": str(folder),
        "root": str(pathlib.Path(llga_fuser.__file__).parent.parent),
    }


def test_a_dead_process_is_a_failure(tmp_path: pathlib.Path) -> None:
    process = Process("eager", "mlp", str(tmp_path), OPTIONS)
    try:
        process._process.kill()
        with pytest.raises(BenchError, match="killed by signal 9"):
            process.ask("load")
    finally:
        process.close()


def test_an_exception_in_a_process_is_a_failure(tmp_path: pathlib.Path) -> None:
    process = Process("eager", "nosuchnet", str(tmp_path), OPTIONS)
    try:
        with pytest.raises(BenchError, match="unknown model"):
            process.ask("load")
    finally:
        process.close()


def test_a_silent_process_is_a_failure(tmp_path: pathlib.Path) -> None:
    process = Process("eager", "mlp", str(tmp_path), OPTIONS)
    try:
        process.timeout = 0.1
        with pytest.raises(BenchError, match="no answer within"):
            process.answer()
    finally:
        process.close()


def test_count_fused() -> None:
    graph = torch._C.parse_ir(
        """
        graph(%x : Tensor, %c : bool):
          %y : Tensor = aten::relu(%x)
          %z : Tensor = prim::If(%c)
            block0():
              %g : Tensor = llga::FusionGroup(%y)
              -> (%g)
            block1():
              %t : Tensor = aten::tanh(%y)
              -> (%t)
          return (%z)
        """
    )
    inner = torch._C.parse_ir(
        """
        graph(%x : Tensor):
          %a : Tensor = aten::relu(%x)
          %one : int = prim::Constant[value=1]()
          %b : Tensor = aten::add(%a, %x, %one)
          return (%b)
        """
    )
    for node in graph.findAllNodes("llga::FusionGroup"):
        node.g_("Subgraph", inner)
    assert count_fused(graph, "llga::FusionGroup") == {"groups": 1, "nodes": 2, "outside": 2}


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "size"),
    [("tinyconv", None), ("squeezenet1_1", 64), ("mobilenet_v3_small", 64), ("unet", 32)],
)
def test_models_are_the_same_each_time_and_not_degenerate(name: str, size: int | None) -> None:
    first, second = _models.build(name, size), _models.build(name, size)
    (x,), (y,) = first.inputs(4, 7), second.inputs(4, 7)
    assert torch.equal(x, y)
    with torch.no_grad():
        a, b = first.module(x), second.module(y)
    assert torch.equal(a, b)
    assert (a[0] - a[1]).norm() > 0.05 * a[0].norm()
    for m in first.module.modules():
        if isinstance(m, nn.BatchNorm2d):
            assert (m.running_mean - 0).abs().max() > 1e-3
            assert m.running_var.std() > 0


@pytest.mark.slow  # 124 million weights
def test_gpt2_attends_and_keeps_its_embedding() -> None:
    pytest.importorskip("transformers", reason="an optional extra of the tests")
    model = _models.build("gpt2")
    ids, mask = model.inputs(2, 7)
    assert ids.shape == mask.shape == (2, 128)
    with torch.no_grad():
        scores = model.module(ids, mask)
        ids[0, 0] = (ids[0, 0] + 1) % 50257  # the first token matters to what comes after the last
        other = model.module(ids, mask)
    assert scores.shape == (2, 50257)
    assert (scores[0] - scores[1]).norm() > 0.05 * scores[0].norm()
    assert (scores[0] - other[0]).norm() > 1e-3 * scores[0].norm()
    assert torch.equal(scores[1], other[1])
    net = model.module.gpt2
    assert net.lm_head.weight is net.transformer.wte.weight
    assert sum(p.numel() for p in net.parameters()) == 124_439_808  # as published


def test_unet_sizes() -> None:
    with pytest.raises(_models.ModelError, match="a multiple of 16, got 40"):
        _models.build("unet", 40)
    model = _models.build("unet", 32)
    assert sum(p.numel() for p in model.module.parameters()) == 7_763_041
    with torch.no_grad():
        assert model.module(*model.inputs(1, 0)).shape == (1, 1, 32, 32)


def test_every_model_of_the_suite_is_known() -> None:
    known = _models.load_torchvision().models.list_models()
    own = {"bert-base", "gpt2", "unet", "mlp", "tinyconv"}
    assert own < set(SUITE)
    assert set(SUITE) - own <= set(known)


def test_batch_norm_statistics_are_measured() -> None:
    """Behind each BatchNorm the data have the mean and the scale that its parameters say."""
    model = _models.build("tinyconv")
    seen: list[torch.Tensor] = []
    norm = model.module[1]
    handle = norm.register_forward_hook(lambda m, args, output: seen.append(output))
    with torch.no_grad():
        model.module(*model.inputs(8, 1))
    handle.remove()
    out = seen[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(out.mean(1), norm.bias, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out.std(1), norm.weight, atol=1e-2, rtol=1e-2)


MADE = """
import torch

def make():
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5))
    return net, (torch.randn(2, 8),)

def of_batches():
    return make()[0], lambda batch, seed: (torch.full((batch, 8), float(seed)),)

def raises():
    raise KeyError("nothing")

def alone():
    return make()[0]

def of_numbers():
    return make()[0], (1, 2)

five = 5
"""


def test_models_of_a_function(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(MADE)
    model = _models.build(f"{file}:make")
    assert (model.name, model.size) == ("make", "2x8")
    assert not model.module.training
    again = _models.build(f"{file}:make")  # the same seed: as each engine's process does
    assert torch.equal(again.module[0].weight, model.module[0].weight)
    assert torch.equal(model.inputs(1, 5)[0], again.inputs(1, 6)[0])
    with pytest.raises(_models.ModelError, match="a batch of 3 needs a function that makes inputs"):
        model.inputs(3, 0)
    assert torch.equal(_models.build(f"{file}:of_batches").inputs(3, 7)[0], torch.full((3, 8), 7.0))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"made.py:raises: KeyError: 'nothing'$"),
        ("alone", r"has to return a module and a tuple of tensors .*, got Sequential$"),
        ("of_numbers", r"got \(Sequential, tuple\)$"),
        ("five", r"has no function 'five'$"),
        ("other", r"has no function 'other'$"),
    ],
)
def test_functions_that_make_no_model(tmp_path: pathlib.Path, function: str, message: str) -> None:
    file = tmp_path / "made.py"
    file.write_text(MADE)
    with pytest.raises(_models.ModelError, match=message):
        _models.build(f"{file}:{function}")
    with pytest.raises(_models.ModelError, match="image size is for named models, got 32"):
        _models.build(f"{file}:{function}", 32)
    with pytest.raises(_models.ModelError, match="no such file"):
        _models.build(f"{tmp_path}/other.py:{function}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuchnet", r"unknown model 'nosuchnet'$"),
        ("mobilenetv3_large", r"did you mean .*mobilenet_v3_large"),
        ("fasterrcnn_resnet50_fpn", r"only classification, segmentation and video"),
        ("raft_small", r"only classification, segmentation and video"),
    ],
)
def test_models_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(_models.ModelError, match=message):
        _models.build(name)
