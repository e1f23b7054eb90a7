"""Autotuning: what it chooses is obeyed, remembered, right, and told.

Which choice is the fastest is the machine's business. So a test measures once, writes another
choice to the file, and looks at what runs then.
"""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llga_fuser
from util import (
    TOLERANCES,
    assert_same,
    check,
    fuses,
    has_avx2_kernels,
    has_own_attention,
    has_own_kernels,
    net,
    randomize,
    to_script,
)

pytestmark = pytest.mark.usefixtures("fuser")


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Autotuning is on, with an empty directory."""
    before = llga_fuser.set_autotune(True, directory=tmp_path / "choices")
    llga_fuser.clear_cache()
    yield tmp_path / "choices"
    llga_fuser.set_autotune(before)


def choices() -> dict[str, str]:
    """Name by what it is about."""
    return dict(llga_fuser._C.choices()[1])


def lines() -> list[str]:
    """Of the file."""
    text = pathlib.Path(llga_fuser.autotune_info().path).read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def measured(fn: Any, inputs: list[Tensor]) -> None:
    """Whatever is chosen, and be it the interpreter on a busy machine."""
    check(fn, inputs, groups=1, fallbacks=True)


def choose(partition: str = "usual", group: str = "usual") -> None:
    """Other choices, as if a process had written them; what is compiled next reads them."""
    path = pathlib.Path(llga_fuser.autotune_info().path)
    with path.open("a") as file:
        for key in choices():
            file.write(f"{group if is_group(key) else partition}\t{key}\n")
    llga_fuser.set_autotune(True, directory=path.parent)
    llga_fuser.clear_cache()


def is_group(key: str) -> bool:
    return ": group " in key


def is_partition(key: str) -> bool:
    return not is_group(key)


def implementations(model: Any, *inputs: Tensor) -> list[str]:
    groups = llga_fuser.report(model, *inputs, rounds=1).groups
    return [p.implementation for g in groups for p in g.primitives]


def convolution() -> tuple[nn.Module, list[Tensor]]:
    m = net("F.relu(self.c(x))", c=nn.Conv2d(64, 64, 3, padding=1)).eval()
    m = m.to(memory_format=torch.channels_last)
    return m, [torch.randn(1, 64, 28, 28).to(memory_format=torch.channels_last)]


def linear() -> tuple[nn.Module, list[Tensor]]:
    return net("F.relu(self.l(x))", l=nn.Linear(96, 80)).eval(), [torch.randn(40, 96)]


# ------------------------------------------------------------------------------- it is obeyed


@pytest.mark.parametrize("way", ["usual", "onednn", "onednn_plain", "winograd2", "winograd4"])
def test_way_of_a_convolution(way: str, directory: pathlib.Path) -> None:
    m, inputs = convolution()
    measured(m, inputs)
    choose(way)
    check(m, inputs, groups=1)
    gc.collect()
    before = llga_fuser.cache_info().packed_bytes
    made = llga_fuser.compile(m, inputs[0])
    packed = llga_fuser.cache_info().packed_bytes - before
    del made
    points = {"winograd2": 16, "winograd4": 36}
    if way in points and has_own_kernels():
        assert packed == points[way] * 64 * 64 * 4
    elif way == "onednn_plain":
        assert packed == 0
    found = implementations(m, *inputs)
    own = [name for name in found if name.startswith("llga_winograd")]
    if way != "usual":
        assert bool(own) == (way in points and has_own_kernels()), found


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("way", ["usual", "onednn", "onednn_plain", "gemm"])
def test_way_of_a_linear_layer(way: str, rows: int, directory: pathlib.Path) -> None:
    m, _ = linear()
    inputs = [torch.randn(rows, 96)]
    measured(m, inputs)
    choose(way)
    check(m, inputs, groups=1)
    found = implementations(m, *inputs)
    own = [name for name in found if name.startswith("llga_gemm")]
    if way != "usual":
        assert bool(own) == (way == "gemm" and has_own_kernels()), found
    else:
        usual = rows >= 8 if has_avx2_kernels() else has_own_kernels()
        assert bool(own) == usual, found


@pytest.mark.skipif(has_avx2_kernels(), reason="copied in any case there")
def test_product_of_transposed_matrices(directory: pathlib.Path) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y.permute(1, 2, 0)).relu()

    inputs = [torch.randn(3, 20, 24), torch.randn(28, 3, 24)]
    measured(f, inputs)
    steps = []
    for way in ("onednn", "onednn_copied"):
        choose(way)
        check(f, inputs, groups=1)
        steps.append(len(implementations(f, *inputs)))
    assert steps[1] == steps[0] + 1


@pytest.mark.parametrize("apart", [False, True])
def test_binaries_apart(apart: bool, directory: pathlib.Path) -> None:
    m = net("self.c(x) + y", "x, y", c=nn.Conv2d(16, 16, 1)).eval()
    inputs = [torch.randn(2, 16, 9, 9), torch.randn(2, 16, 9, 9)]
    measured(m, inputs)
    choose(group="binaries_apart" if apart else "usual")
    check(m, inputs, groups=1)
    groups = llga_fuser.report(m, *inputs, rounds=1).groups
    kinds = {p.kind for g in groups for p in g.primitives}
    if apart:
        assert kinds & {"binary", "pointwise"}


@pytest.mark.parametrize("fused", [False, True])
def test_activations_fused(fused: bool, directory: pathlib.Path) -> None:
    m = net("F.gelu(self.l(x))", l=nn.Linear(64, 128)).eval()
    inputs = [torch.randn(64, 64)]
    measured(m, inputs)
    choose(group="activations_fused" if fused else "usual")
    check(m, inputs, groups=1)
    found = implementations(m, *inputs)
    own = "llga_activation" in found
    assert own == (has_avx2_kernels() and not fused), found


class Excite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return x * self.excite(self.squeeze(mean).relu()).sigmoid()


@pytest.mark.parametrize("own", [False, True])
def test_own_kernel_of_a_group_is_left_out(own: bool, directory: pathlib.Path) -> None:
    m = Excite().eval().to(memory_format=torch.channels_last)
    inputs = [torch.randn(1, 32, 20, 20).to(memory_format=torch.channels_last)]
    measured(m, inputs)
    choose(group="usual" if own else "onednn")
    check(m, inputs, groups=1)
    found = implementations(m, *inputs)
    assert ("llga_excitation" in found) == (own and has_own_kernels()), found


def test_interpreter(directory: pathlib.Path) -> None:
    """The group runs in the interpreter, and the report says why."""
    m, inputs = linear()
    measured(m, inputs)
    choose(group="interpreter")
    check(m, inputs, groups=1, fallbacks=True)
    reasons = llga_fuser._C.fallbacks()
    assert any("autotuning" in reason for reason in reasons), reasons


# ----------------------------------------------------------------------------- it is remembered


def test_measured_once(directory: pathlib.Path) -> None:
    """What another process of this kind has measured is not measured again."""
    m, inputs = convolution()
    measured(m, inputs)
    first = lines()
    assert first
    assert llga_fuser.autotune_info().path.startswith(str(directory))
    llga_fuser.set_autotune(True, directory=directory)  # reads the file, as another process would
    llga_fuser.clear_cache()
    measured(m, inputs)
    assert lines() == first


def test_the_same_partition_in_two_models(directory: pathlib.Path) -> None:
    """Other numbers, the same kernel: what is about a partition or a group has no weights in it."""
    m, inputs = convolution()
    measured(m, inputs)
    first = lines()
    measured(randomize(m), inputs)
    assert lines() == first


def test_other_circumstances_are_another_choice(directory: pathlib.Path) -> None:
    m, inputs = linear()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            measured(m, inputs)
    finally:
        torch.set_num_threads(before)
    llga_fuser.set_fpmath_mode("any")
    try:
        check(m, inputs, groups=1, tol=TOLERANCES[torch.bfloat16], fallbacks=True)
    finally:
        llga_fuser.set_fpmath_mode("strict")
    keys = [key for key in choices() if is_group(key)]
    assert len(keys) == 3
    assert len({key.split(":")[0] for key in keys}) == 3


@pytest.mark.parametrize("damage", ["nothing\n", "no such way\t{key}\n", "\x00\xff\t\n\t\n", ""])
def test_damaged_file(damage: str, directory: pathlib.Path) -> None:
    """What can't be read is measured again."""
    m, inputs = linear()
    measured(m, inputs)
    path = pathlib.Path(llga_fuser.autotune_info().path)
    keys = list(choices())
    text = "".join(damage.replace("{key}", key) for key in keys)
    path.write_bytes(text.encode("latin-1"))
    llga_fuser.set_autotune(True, directory=directory)
    llga_fuser.clear_cache()
    measured(m, inputs)
    known = choices()
    names = set(llga_fuser.autotune_info().choices) - {"no such way", ""}
    assert set(keys) <= set(known)
    assert {known[key] for key in keys} <= names


@pytest.mark.filterwarnings("default")
def test_directory_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    """A warning, once a process; choices hold for it."""
    script = f"""
import torch, llga_fuser
llga_fuser.set_autotune(True, directory={str(tmp_path / "file" / "choices")!r})
for size in (8, 16):
    m = llga_fuser.compile(torch.nn.Linear(size, 24).eval(), torch.randn(16, size))
assert llga_fuser.autotune_info().choices
"""
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("can't write its choices") == 1


def test_environment(tmp_path: pathlib.Path) -> None:
    """On from the start, with the directory that the environment names."""
    script = """
import torch, llga_fuser
m = llga_fuser.compile(torch.nn.Linear(8, 24).eval(), torch.randn(16, 8))
print(llga_fuser.autotune_info())
"""
    variables = {
        "LLGA_FUSER_AUTOTUNE": "on",
        "LLGA_FUSER_CACHE_DIR": str(tmp_path / "own"),
        "XDG_CACHE_HOME": str(tmp_path / "general"),
    }
    command = [sys.executable, "-W", "ignore", "-c", script]
    others = {k: v for k, v in os.environ.items() if k != "LLGA_FUSER_CACHE_DIR"}
    done = subprocess.run(
        command, env={**others, **variables}, capture_output=True, text=True, check=True
    )
    assert "enabled=True" in done.stdout
    (file,) = (tmp_path / "own").iterdir()
    assert str(file) in done.stdout
    del variables["LLGA_FUSER_CACHE_DIR"]
    subprocess.run(command, env={**others, **variables}, check=True, capture_output=True)
    assert (tmp_path / "general" / "llga_fuser" / file.name).exists()


# ------------------------------------------------------------------------------------ it is right


class Block(nn.Module):
    """A bit of everything that has choices."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.a, self.b = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.excite = Excite()
        self.group = nn.Conv2d(32, 32, 3, padding=1, groups=8)
        self.head = nn.Linear(32, 48)
        self.last = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (x + self.b(self.a(x).relu())).relu()
        x = torch.nn.functional.silu(self.group(self.excite(x)))
        q = x.flatten(2).transpose(1, 2).reshape(x.shape[0], 1, -1, 32)
        x = torch.nn.functional.scaled_dot_product_attention(q, q, q).mean((1, 2))
        return torch.softmax(self.last(torch.nn.functional.gelu(self.head(x))), -1)


@pytest.mark.parametrize(
    ("autocast", "scripted"), [(False, False), (False, True), (True, False)], ids=str
)
def test_numbers(autocast: bool, scripted: bool, directory: pathlib.Path) -> None:
    m = randomize(Block()).eval()
    # Interpreted is right as well, and may be faster for numbers as few as these.
    check(m, [torch.randn(2, 3, 32, 32)], autocast=autocast, scripted=scripted, fallbacks=True)
    assert choices()


def test_numbers_of_special_values(directory: pathlib.Path) -> None:
    """NaN and infinities, whichever way was measured with other numbers."""
    for make in (convolution, linear):
        m, (x,) = make()
        with torch.no_grad():
            script = to_script(m, [x])
            for value in (1.0, float("nan"), float("inf")):
                y = x.clone()
                y[(0,) * y.dim()] = value
                for _ in range(3):
                    assert_same(script(y), m(y))


def test_numbers_of_int8(directory: pathlib.Path) -> None:
    def f(x: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(x, 0.05, 3, torch.quint8).dequantize()
        y = torch.nn.functional.conv2d(q, weight.dequantize()).relu()
        return torch.quantize_per_tensor(y, 0.1, 0, torch.quint8).dequantize()

    weight = torch.quantize_per_tensor(torch.randn(24, 16, 1, 1) / 4, 0.02, 0, torch.qint8)
    x = torch.randn(2, 16, 9, 9)
    with torch.no_grad():
        script = to_script(f, [x])
        for _ in range(3):
            # A value between two steps may round to either.
            assert (script(x) - f(x)).abs().max() <= 0.1 + 1e-6


def test_compile(tmp_path: pathlib.Path) -> None:
    """For one module; the process' setting is what it was."""
    before = llga_fuser.set_autotune(False, directory=tmp_path)
    try:
        m, inputs = convolution()
        llga_fuser.compile(m, inputs[0])
        assert llga_fuser.autotune_info().choices == {}
        made = llga_fuser.compile(m, inputs[0], autotune=True)
        info = llga_fuser.autotune_info()
        assert not info.enabled
        assert sum(info.choices.values()) >= 1
        assert_same(made(*inputs), m(*inputs).detach())
        assert len(lines()) == sum(info.choices.values())
    finally:
        llga_fuser.set_autotune(before)


@pytest.mark.skipif(not has_own_attention(torch.float32), reason="attention is PyTorch's there")
def test_own_attention_or_pytorch(directory: pathlib.Path) -> None:
    """A group without partitions has the choice of the interpreter."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    inputs = [torch.randn(1, 2, 16, 32) for _ in range(3)]
    check(f, inputs, fallbacks=True)
    (key,) = choices()
    assert is_group(key)


def test_bfloat16_module(directory: pathlib.Path) -> None:
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bfloat16 there")
    m, inputs = linear()
    check(m, inputs, dtype=torch.bfloat16, fallbacks=True)
    assert any("bf16" in key for key in choices() if is_partition(key))


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("value", [1, "on", None])
def test_enabled_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="enabled: expected a bool"):
        llga_fuser.set_autotune(value)


def test_bad_directories(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="directory: expected a directory, got the file"):
        llga_fuser.set_autotune(True, directory=file)
    wrong: Any = 3
    with pytest.raises(TypeError, match="directory: expected a path, got int"):
        llga_fuser.set_autotune(True, directory=wrong)
    assert not llga_fuser.autotune_info().enabled


def test_compile_takes_a_bool() -> None:
    wrong: Any = "yes"
    with pytest.raises(TypeError, match="autotune: expected a bool, got str"):
        llga_fuser.compile(nn.Linear(2, 2).eval(), torch.randn(1, 2), autotune=wrong)
