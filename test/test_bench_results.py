"""What `bench` makes of its results: the summary, JSON, plots, comparisons, progress."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import pathlib
import re
import sys
from typing import Any

import pytest

from llga_fuser import bench
from llga_fuser.__main__ import main
from llga_fuser.bench import AGREE, DIFFER, FAILED, compare, plot
from llga_fuser.bench.run import KNOWN, Engine, ModelResult, Options
from llga_fuser.bench.summary import fastest_peer, ratios, render_summary, summary_dict
from llga_fuser.bench.table import configuration, render

OPTIONS = Options("fp32", 1, None, 2, 3, 0.1, ("eager",), 100.0, verbose=False)


def engine(name: str, median: float, **values: Any) -> Engine:
    one = {"median": median, "min": median, "spread": 0.0, "foreign": 0.0, "counts": True}
    rounds = [dict(one) for _ in range(3)]
    given = {"agrees": True, "minimum": median, "first_result": 0.5, "rounds": rounds, **values}
    return Engine(name, median=median, **given)


def result(model: str, *engines: Engine, options: Options = OPTIONS) -> ModelResult:
    return ModelResult(model, "9x9", options, list(engines), rounds=3)


TWO = [
    result(
        "net",
        engine("eager", 8e-3),
        engine("openvino", 2e-3),
        engine("onnxruntime", 3e-3),
        engine("llga_fuser", 1e-3),
    ),
    result(
        "other",
        engine("eager", 1e-3),
        engine("openvino", 4e-3, failure="died"),
        engine("onnxruntime", 5e-4),
        engine("llga_fuser", 1e-3),
    ),
]


# ---------------------------------------------------------------------------------------- summary


def test_fastest_peer_is_right_and_is_not_ours() -> None:
    best = fastest_peer(TWO[0])
    assert best is not None
    assert best.name == "openvino"
    wrong = result("net", engine("eager", 8e-3), engine("ofi", 1e-3, agrees=False))
    best = fastest_peer(wrong)
    assert best is not None
    assert best.name == "eager"
    assert fastest_peer(result("net", engine("llga_fuser", 1e-3))) is None


def test_ratios() -> None:
    r = ratios(TWO[0])
    assert r is not None
    assert r.engines == pytest.approx({"eager": 8, "openvino": 2, "onnxruntime": 3})
    assert (r.fastest, r.versus_fastest) == ("openvino", pytest.approx(2))
    assert ratios(result("net", engine("eager", 1e-3))) is None


def test_ratios_are_those_within_the_rounds_that_count() -> None:
    def timed(name: str, *medians: float) -> Engine:
        rounds = [{"median": m, "counts": m < 1} for m in medians]
        return engine(name, sorted(medians)[len(medians) // 2], rounds=rounds)

    # Quotients of the medians would be 2 and 1.2.
    ours = timed("llga_fuser", 2e-3, 2e-3, 1e-3, 9.0)
    steady = timed("openvino", 4e-3, 3e-3, 1e-3, 9.0)
    other = timed("onnxruntime", 2e-3, 2.4e-3, 1e-3, 9.0)
    r = ratios(result("net", steady, other, ours))
    assert r is not None
    assert r.engines == pytest.approx({"openvino": 1.5, "onnxruntime": 1.0})
    assert (r.fastest, r.versus_fastest) == ("onnxruntime", pytest.approx(1.0))


def test_summary_has_geometric_means_over_what_ran() -> None:
    (entry,) = summary_dict(TWO)
    assert entry["geometric_means"] == pytest.approx(
        {"eager": math.sqrt(8), "openvino": 2, "onnxruntime": math.sqrt(1.5), "fastest": 1}
    )
    assert [m["fastest_peer"] for m in entry["models"]] == ["openvino", "onnxruntime"]


def test_summary_text() -> None:
    lines = render_summary(TWO).splitlines()
    rows = [line.split() for line in lines]
    assert ["net", "8.000", "2.000*", "3.000", "1.000"] in rows
    assert ["other", "1.000", "failed", "0.500*", "1.000"] in rows
    assert ["net", "8.00x", "2.00x", "3.00x", "2.00x"] in rows
    assert ["other", "1.00x", "-", "0.50x", "0.50x"] in rows
    assert ["geometric", "mean", "2.83x", "2.00x", "1.22x", "1.00x"] in rows


def test_summary_of_all_engines_fits_and_shows_what_is_not_applicable() -> None:
    engines = [engine(name, 0.123) for name in KNOWN]
    engines[KNOWN.index("onnxruntime")] = Engine("onnxruntime", not_applicable="no bf16 kernels")
    one = result("a_network_with_quite_a_long_name", *engines)
    text = render_summary([one])
    assert all(len(line) <= 100 for line in text.splitlines()), text
    assert "n/a" in text
    assert "not applicable: no bf16 kernels" in render(one)


def test_configurations_are_not_averaged_together() -> None:
    other = dataclasses.replace(OPTIONS, batch=16)
    both = [TWO[0], result("net", *TWO[0].engines, options=other)]
    assert [e["configuration"] for e in summary_dict(both)] == [
        "fp32  batch 1  2 threads",
        "fp32  batch 16  2 threads",
    ]
    assert "fpmath bf16" in configuration(dataclasses.replace(OPTIONS, fpmath="bf16"))


# ---------------------------------------------------------------------------------------- verdict


def test_peers_that_fail_or_are_wrong_do_not_decide() -> None:
    ours = engine("llga_fuser", 1e-3)
    assert bench.verdict(result("net", engine("inductor", 1, failure="died"), ours)) == AGREE
    assert bench.verdict(result("net", engine("ofi", 1, agrees=False), ours)) == AGREE
    left_out = Engine("onnxruntime", not_applicable="fp32 only")
    assert bench.verdict(result("net", left_out, engine("eager", 1.0))) == AGREE
    assert bench.verdict(result("net", left_out, engine("eager", 1.0, agrees=False))) == DIFFER


# ---------------------------------------------------------------------------------------- compare


def write(path: pathlib.Path, *results: ModelResult) -> str:
    path.write_text(bench._json({"torch": "2.13"}, list(results)))
    return str(path)


def compared(
    tmp_path: pathlib.Path, old: ModelResult, new: ModelResult, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    files = write(tmp_path / "old.json", old), write(tmp_path / "new.json", new)
    code = main(["bench", "--compare", *files])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "word", "code"),
    [
        (engine("llga_fuser", 1e-3), engine("llga_fuser", 1.5e-3), "slower", DIFFER),
        (engine("llga_fuser", 1.5e-3), engine("llga_fuser", 1e-3), "faster", AGREE),
        (engine("llga_fuser", 1e-3), engine("llga_fuser", 1.02e-3), "within the noise", AGREE),
        # The noise that the files record is larger than the change.
        (engine("llga_fuser", 1e-3, spread=0.4), engine("llga_fuser", 1.3e-3), "within", AGREE),
        (engine("llga_fuser", 1e-3, spread=0.2), engine("llga_fuser", 1.3e-3), "slower", DIFFER),
        (engine("llga_fuser", 1e-3), engine("llga_fuser", 1, failure="x"), "fails now", DIFFER),
        (engine("llga_fuser", 1, failure="x"), engine("llga_fuser", 1e-3), "runs now", AGREE),
        (engine("llga_fuser", 1), engine("llga_fuser", 1, agrees=False), "wrong now", DIFFER),
    ],
)
def test_compare(
    old: Engine,
    new: Engine,
    word: str,
    code: int,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    got, text = compared(tmp_path, result("net", old), result("net", new), capsys)
    assert got == code, text
    assert re.search(f"^llga_fuser: 1 {word}", text, re.MULTILINE), text


def test_compare_takes_the_spread_between_rounds_as_noise_too(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [{"median": m} for m in (0.6e-3, 1e-3, 1.4e-3)]
    old = result("net", engine("llga_fuser", 1e-3, rounds=rounds))
    code, text = compared(tmp_path, old, result("net", engine("llga_fuser", 1.3e-3)), capsys)
    assert code == AGREE
    assert "40%" in text


def test_compare_judges_by_our_engine(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = result("net", engine("eager", 1e-3), engine("llga_fuser", 1e-3))
    new = result("net", engine("eager", 2e-3), engine("llga_fuser", 1e-3))
    code, text = compared(tmp_path, old, new, capsys)
    assert code == AGREE
    assert "2.000" in text
    assert "slower" in text
    code, _ = compared(
        tmp_path, result("net", engine("eager", 1e-3)), result("net", engine("eager", 2e-3)), capsys
    )
    assert code == DIFFER


def test_compare_says_what_only_one_file_has(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = result("net", *TWO[0].engines[:2])
    _, text = compared(tmp_path, TWO[0], new, capsys)
    assert "only in the first: net 9x9 fp32 batch 1, 2 threads, onnxruntime" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("{", "not JSON"),
        ("[]", "not a file that bench --json wrote"),
        ('{"models": []}', "not a file that bench --json wrote"),
        (json.dumps({"format": compare.FORMAT, "version": 99}), "version 99 of the format"),
        (
            json.dumps({"format": compare.FORMAT, "version": compare.VERSION, "models": [{}]}),
            "damaged",
        ),
    ],
)
def test_compare_with_a_bad_file(
    content: str | None,
    message: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = write(tmp_path / "good.json", *TWO)
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    assert main(["bench", "--compare", good, str(bad)]) == FAILED
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_compare_only_some_models(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "two.json", *TWO)
    assert main(["bench", "other", "--compare", file, file]) == AGREE
    assert "net 9x9" not in capsys.readouterr().out
    assert main(["bench", "nosuchnet", "--compare", file, file]) == FAILED
    assert "no model and engine in common" in capsys.readouterr().err


def test_documented_keys_are_in_the_file() -> None:
    """docs/benchmark.md describes the format; what it names is there."""
    text = (pathlib.Path(__file__).parent.parent / "docs/benchmark.md").read_text()
    section = text.partition("## The JSON file")[2].partition("\n## ")[0]
    assert f"`version` {compare.VERSION}" in section
    data = json.loads(bench._json(bench.environment(), TWO))
    for prefix, entry in (
        ("", data),
        ("models[].", data["models"][0]),
        ("models[].engines[].", data["models"][0]["engines"][0]),
        ("summary[].", data["summary"][0]),
    ):
        documented = set(re.findall(rf"^\| `{re.escape(prefix)}(\w+)`", section, re.MULTILINE))
        assert documented == set(entry), prefix or "the file"


# ------------------------------------------------------------------------------------------- plot


@pytest.mark.parametrize("suffix", plot.FORMATS)
def test_plot(suffix: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra: plot")
    file = tmp_path / f"chart{suffix}"
    plot.write(str(file), TWO)
    head = file.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in file.read_bytes()


def test_what_the_plot_shows() -> None:
    base, values = plot.speedups(TWO)
    assert base == "eager"
    assert values["llga_fuser"] == pytest.approx([8, 1])
    assert values["openvino"] == [pytest.approx(4), None]
    assert plot.labels(TWO) == ["net", "other"]
    various = [TWO[0], result("net", options=dataclasses.replace(OPTIONS, threads=1))]
    assert plot.labels(various)[1] == "net\nfp32  batch 1  1 thread"


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    find = importlib.util.find_spec

    def found(name: str, *args: Any) -> Any:
        return None if name == package else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("matplotlib", ["--plot", "x.png"], "plot"),
        ("openvino", ["--engines", "eager,openvino"], "peers"),
        ("onnxruntime", ["--engines", "onnxruntime"], "peers"),
    ],
)
def test_a_missing_extra_is_named(
    package: str,
    arguments: list[str],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    hide(monkeypatch, package)
    assert main(["bench", "mlp", *arguments]) == FAILED
    error = capsys.readouterr().err
    assert f"pip install 'llga_fuser[{extra}]'" in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_sweep_is_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []

    def run_model(name: str, options: Options, progress: Any) -> ModelResult:
        seen.append((name, options.batch, options.threads))
        return result(name, engine("eager", 1e-3), options=options)

    monkeypatch.setattr(bench, "run_model", run_model)
    sweep = ["mlp", "tinyconv", "--batch", "1,16", "--threads", "2,1", "--no-progress"]
    assert main(["bench", *sweep]) == AGREE
    assert seen == [(m, b, t) for m in ("mlp", "tinyconv") for b in (1, 16) for t in (2, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name at least one MODEL"),
        (["mlp", "--plot", "x.gif"], "'x.gif' does not end in .png or .svg"),
        (["mlp", "--dtype", "bf16", "--fpmath", "bf16"], "--fpmath is for --dtype fp32"),
        (["mlp", "--shape", "1,2"], "--shape is for files"),
        (["a.pt"], "a.pt: --shape has to say which inputs it takes"),
        (["a.pt", "--shape", "1,2", "--dtype", "bf16"], "--dtype is for named models; a.pt has"),
        (["a.pt", "--shape", "1,2", "--batch", "2"], "--batch is for named models; a.pt has"),
        (["a.pt", "mlp", "--shape", "1,2"], "a.pt is a file: name files alone"),
    ],
)
def test_wrong_combinations(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == FAILED
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


# --------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_columns", lambda stream: 80)
    out = Terminal()
    progress = bench._Progress(out, True, runs=2, steps=4)
    progress.start("net")
    progress("load")
    assert "...................." in out.getvalue()
    progress("warm up")
    progress("round")
    progress.start("other")
    assert progress.fraction() == 0.5
    progress("load")
    last = out.getvalue().rpartition("\r\x1b[K")[2]
    assert last.startswith("##########.......... ")
    assert last.endswith("2/2 other: load")
