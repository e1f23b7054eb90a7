"""Networks beside the suite of `python -m llga_fuser bench`.

    python benchmarks/networks.py       lists them

A spec is a name that the bench command knows, or "timm:NAME[@SIZE]", "hf:KIND[:eager]" (a
transformers model from a configuration), "py:NAME" (written here, the sizes as people use them),
or "lin:RxIxO" (one linear layer and a ReLU). All weights are random.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llga_fuser import _models

__all__ = ["NAMES", "Network", "build"]

Source = Callable[[int, int], Tensor]  # batch, seed


class Network(NamedTuple):
    """A module in evaluation mode, float32, and what to feed it."""

    name: str
    module: nn.Module
    inputs: Callable[[int, int], tuple[Tensor, ...]]  # batch, seed


class _Entry(NamedTuple):
    make: Callable[[], nn.Module]
    sources: tuple[Source, ...]
    calibrated: bool


_PY: dict[str, _Entry] = {}


def _py(name: str, *sources: Source, calibrated: bool = True) -> Callable[[Any], Any]:
    """Registers a class or function of no arguments as "py:NAME"."""

    def register(make: Any) -> Any:
        _PY[name] = _Entry(make, sources, calibrated)
        return make

    return register


# ----------------------------------------------------------------------------------------- inputs


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int) -> Source:
    return lambda batch, seed: torch.randn(batch, *shape, generator=_generator(seed))


def _uniform(*shape: int) -> Source:
    return lambda batch, seed: torch.rand(batch, *shape, generator=_generator(seed))


def _image(*shape: int) -> Source:
    make = _models._images(shape)
    return lambda batch, seed: make(batch, seed)[0]


def _ids(high: int, *shape: int) -> Source:
    return lambda batch, seed: torch.randint(high, (batch, *shape), generator=_generator(seed))


def _ones(*shape: int) -> Source:
    return lambda batch, _: torch.ones(batch, *shape, dtype=torch.int64)


def _adjacency(nodes: int, *, normalized: bool = False) -> Source:
    def make(batch: int, seed: int) -> Tensor:
        a = (torch.rand(batch, nodes, nodes, generator=_generator(seed)) < 0.1).float()
        a = torch.maximum(torch.maximum(a, a.transpose(1, 2)), torch.eye(nodes))
        if not normalized:
            return a
        d = a.sum(-1).rsqrt()
        return d[:, :, None] * a * d[:, None, :]

    return make


# ------------------------------------------------------------------------------------------ parts


def _cna(
    i: int,
    o: int,
    k: int = 3,
    s: int = 1,
    g: int = 1,
    d: int = 1,
    act: Callable[[], nn.Module] | None = nn.ReLU,
    conv: Callable[..., nn.Module] = nn.Conv2d,
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
) -> nn.Sequential:
    """Convolution, BatchNorm, activation."""
    layers = [conv(i, o, k, s, k // 2 * d, groups=g, dilation=d, bias=False), norm(o)]
    return nn.Sequential(*layers, *([act()] if act else []))


# The same in one dimension.
_cna1 = functools.partial(_cna, conv=nn.Conv1d, norm=nn.BatchNorm1d)


def _mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return nn.Sequential(*(layers if last else layers[:-1]))


def _leaky() -> nn.Module:
    return nn.LeakyReLU(0.1)


class _Residual(nn.Module):
    """x + f(x), and an activation after it."""

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut, act

    def forward(self, x: Tensor) -> Any:
        y = self.body(x) + (x if self.shortcut is None else self.shortcut(x))
        return y if self.act is None else self.act(y)


def _basic(i: int, o: int, s: int = 1, d: int = 1) -> nn.Module:
    """The basic block of ResNet."""
    shortcut = None if i == o and s == 1 else _cna(i, o, 1, s, act=None)
    return _Residual(
        nn.Sequential(_cna(i, o, 3, s, d=d), _cna(o, o, d=d, act=None)), shortcut, nn.ReLU()
    )


class _Pyramid(nn.Module):
    """A ResNet-18-like backbone, its maps of stride 4, 8, 16 and 32."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_cna(3, sizes[0], 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList(
            nn.Sequential(_basic(i, o, 2 if n else 1), _basic(o, o))
            for n, (i, o) in enumerate(itertools.pairwise((sizes[0], *sizes)))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class _Attention(nn.Module):
    """Multi-head attention over (batch, tokens, channels)."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class _Gated(nn.Module):
    """A feed-forward network of which one half gates the other: GEGLU, ReGLU."""

    def __init__(self, width: int, hidden: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width), act

    def forward(self, x: Tensor) -> Any:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(a * self.act(b))


def _prenorm(width: int, heads: int, feed_forward: nn.Module, causal: bool = False) -> nn.Module:
    return nn.Sequential(
        _Residual(nn.Sequential(nn.LayerNorm(width), _Attention(width, heads, causal))),
        _Residual(nn.Sequential(nn.LayerNorm(width), feed_forward)),
    )


class _Recurrent(nn.Module):
    """The sequence that an LSTM or GRU returns, without its state."""

    def __init__(self, kind: Callable[..., nn.Module], *sizes: int, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(*sizes, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)[0]


class _Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _SqueezeExcite(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(channels, hidden, 1), nn.Conv1d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.b(torch.relu(self.a(x.mean(2, keepdim=True)))))


# ------------------------------------------------------------------------------- speech and sound


@_py("kws", _normal(1, 49, 10))
def _kws() -> nn.Module:
    """DS-CNN for keyword spotting (Zhang et al. 2017)."""
    layers: list[nn.Module] = [
        nn.Conv2d(1, 64, (10, 4), 2, (5, 1), bias=False),
        *(nn.BatchNorm2d(64), nn.ReLU()),
    ]
    for _ in range(4):
        layers += [_cna(64, 64, g=64), _cna(64, 64, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12))


@_py("m5", _normal(1, 8000))
def _m5() -> nn.Module:
    """M5 for the waveform of half a second at 16 kHz (Dai et al. 2017)."""
    layers: list[nn.Module] = []
    for i, o, k, s in ((1, 32, 80, 16), (32, 32, 3, 1), (32, 64, 3, 1), (64, 64, 3, 1)):
        layers += [nn.Conv1d(i, o, k, s), nn.BatchNorm1d(o), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 35))


@_py("eegnet", _normal(1, 22, 256))
def _eegnet() -> nn.Module:
    """EEGNet-8,2 for 22 channels of an electroencephalogram (Lawhern et al. 2018)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, (1, 64), padding="same", bias=False), nn.BatchNorm2d(8)),
        *(nn.Conv2d(8, 16, (22, 1), groups=8, bias=False), nn.BatchNorm2d(16), nn.ELU()),
        nn.AvgPool2d((1, 4)),
        nn.Conv2d(16, 16, (1, 16), padding="same", groups=16, bias=False),
        *(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 8))),
        *(nn.Flatten(), nn.Linear(128, 4)),
    )


@_py("srcnn", _image(3, 128, 128))
def _srcnn() -> nn.Module:
    """SRCNN 9-1-5, which sharpens an enlarged image (Dong et al. 2014)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 9, padding=4), nn.ReLU(), nn.Conv2d(64, 32, 1), nn.ReLU()),
        nn.Conv2d(32, 3, 5, padding=2),
    )


@_py("alexnet", _image(3, 224, 224))
def _alexnet() -> nn.Module:
    """torchvision's AlexNet (Krizhevsky 2014)."""
    return _models.load_torchvision().models.alexnet(weights=None)


class _CausalBlock(nn.Module):
    def __init__(self, i: int, o: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.a = nn.Conv1d(i, o, 3, padding=self.pad, dilation=dilation)
        self.b = nn.Conv1d(o, o, 3, padding=self.pad, dilation=dilation)
        self.shortcut = nn.Conv1d(i, o, 1) if i != o else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x)[:, :, : -self.pad].contiguous())
        y = torch.relu(self.b(y)[:, :, : -self.pad].contiguous())
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


@_py("tcn", _normal(25, 256))
def _tcn() -> nn.Module:
    """Temporal convolutional network of 8 levels (Bai et al. 2018)."""
    blocks = [_CausalBlock(64 if i else 25, 64, 1 << i) for i in range(8)]
    return nn.Sequential(*blocks, nn.Conv1d(64, 10, 1))


@_py("wavenet", _normal(1, 2048))
class _WaveNet(nn.Module):
    """WaveNet: gated causal convolutions of dilation 1 to 512 (van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 32, 1)
        self.gates = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=1 << i) for i in range(10))
        self.residuals = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(10))
        self.skips = nn.ModuleList(nn.Conv1d(32, 64, 1) for _ in range(10))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(64, 64, 1), nn.ReLU(), nn.Conv1d(64, 256, 1))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        total: Any = 0
        layers = zip(self.gates, self.residuals, self.skips, strict=True)
        for i, (gate, residual, skip) in enumerate(layers):
            a, b = gate(F.pad(x, (1 << i, 0))).chunk(2, dim=1)
            y = torch.tanh(a) * torch.sigmoid(b)
            total = total + skip(y)
            x = x + residual(y)
        return self.out(total)


@_py("resnet1d", _normal(12, 1000))
def _resnet1d() -> nn.Module:
    """1-D ResNet for electrocardiograms (Hannun et al. 2019, Ribeiro et al. 2020)."""
    layers: list[nn.Module] = [_cna1(12, 64, 15, 2)]
    for i, o in itertools.pairwise((64, 64, 128, 196, 256)):
        body = nn.Sequential(_cna1(i, o, 15), _cna1(o, o, 15, 2, act=None))
        shortcut = nn.Sequential(nn.MaxPool1d(2, 2, ceil_mode=True), nn.Conv1d(i, o, 1, bias=False))
        layers.append(_Residual(body, shortcut, nn.ReLU()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 6))


def _separable(i: int, o: int, k: int, act: bool = True, d: int = 1) -> nn.Module:
    depthwise = nn.Conv1d(i, i, k, padding=k // 2 * d, groups=i, dilation=d, bias=False)
    return nn.Sequential(depthwise, _cna1(i, o, 1, act=nn.ReLU if act else None))


@_py("quartznet", _normal(64, 200))
def _quartznet() -> nn.Module:
    """QuartzNet 5x5 (Kriman et al. 2019)."""
    layers: list[nn.Module] = [
        nn.Conv1d(64, 64, 33, 2, 16, groups=64, bias=False),
        _cna1(64, 256, 1),
    ]
    i = 256
    for k, o in ((33, 256), (39, 256), (51, 512), (63, 512), (75, 512)):
        repeats = [_separable(o if r else i, o, k, act=r < 4) for r in range(5)]
        layers.append(_Residual(nn.Sequential(*repeats), _cna1(i, o, 1, act=None), nn.ReLU()))
        i = o
    layers += [_separable(512, 512, 87, d=2), _cna1(512, 1024, 1), nn.Conv1d(1024, 29, 1)]
    return nn.Sequential(*layers, nn.LogSoftmax(1))


class _HifiBlock(nn.Module):
    def __init__(self, channels: int, k: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(channels, channels, k, dilation=d, padding=k // 2 * d) for d in dilations
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(F.leaky_relu(x, 0.1)) + x
        return x


@_py("hifigan", _normal(80, 32))
class _HifiGan(nn.Module):
    """The generator of HiFi-GAN, V3 (Kong et al. 2020): mel frames to samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, 256, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        i = 256
        for rate, k in ((8, 16), (8, 16), (4, 8)):
            self.ups.append(nn.ConvTranspose1d(i, i // 2, k, rate, (k - rate) // 2))
            i //= 2
            for size, dilations in ((3, (1, 2)), (5, (2, 6)), (7, (3, 12))):
                self.blocks.append(_HifiBlock(i, size, dilations))
        self.last = nn.Conv1d(i, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = (self.blocks[3 * i](x) + self.blocks[3 * i + 1](x) + self.blocks[3 * i + 2](x)) / 3
        return torch.tanh(self.last(F.leaky_relu(x)))


@_py("convtasnet", _normal(1, 8000))
class _ConvTasNet(nn.Module):
    """Conv-TasNet for two speakers (Luo, Mesgarani 2019)."""

    def __init__(self) -> None:
        super().__init__()
        n, b, h = 256, 128, 256
        self.encoder = nn.Conv1d(1, n, 16, 8, bias=False)
        self.bottleneck = nn.Sequential(nn.GroupNorm(1, n, 1e-8), nn.Conv1d(n, b, 1))
        self.blocks, self.residuals, self.skips = (nn.ModuleList() for _ in range(3))
        for i in range(12):
            d = 1 << i % 6
            self.blocks.append(
                nn.Sequential(
                    *(nn.Conv1d(b, h, 1), nn.PReLU(), nn.GroupNorm(1, h, 1e-8)),
                    nn.Conv1d(h, h, 3, padding=d, dilation=d, groups=h),
                    *(nn.PReLU(), nn.GroupNorm(1, h, 1e-8)),
                )
            )
            self.residuals.append(nn.Conv1d(h, b, 1))
            self.skips.append(nn.Conv1d(h, b, 1))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(b, 2 * n, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(n, 1, 16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        w = torch.relu(self.encoder(x))
        y = self.bottleneck(w)
        total: Any = 0
        for block, residual, skip in zip(self.blocks, self.residuals, self.skips, strict=True):
            z = block(y)
            total = total + skip(z)
            y = y + residual(z)
        first, second = self.mask(total).chunk(2, dim=1)
        return torch.cat((self.decoder(w * first), self.decoder(w * second)), dim=1)


@_py("crnn", _image(3, 32, 100))
class _Crnn(nn.Module):
    """CRNN for text in images (Shi et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        c = nn.Conv2d
        self.conv = nn.Sequential(
            *(c(3, 64, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(c(64, 128, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
            *(_cna(128, 256), c(256, 256, 3, 1, 1), nn.ReLU()),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            *(_cna(256, 512), c(512, 512, 3, 1, 1), nn.ReLU()),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            *(c(512, 512, 2, bias=False), nn.BatchNorm2d(512), nn.ReLU()),
        )
        self.rnn = _Recurrent(nn.LSTM, 512, 256, 2, bidirectional=True)
        self.out = nn.Linear(512, 37)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).squeeze(2).transpose(1, 2)
        return F.log_softmax(self.out(self.rnn(y)), dim=2)


@_py("deepspeech2", _normal(1, 161, 200))
class _DeepSpeech2(nn.Module):
    """Deep Speech 2: convolutions over the spectrogram, GRUs (Amodei et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False),
            *(nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False),
            *(nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
        )
        self.rnn = _Recurrent(nn.GRU, 32 * 41, 256, 2, bidirectional=True)
        self.out = nn.Linear(512, 29)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(1, 2).transpose(1, 2)
        return F.softmax(self.out(self.rnn(y)), dim=-1)


@_py("tacotron_enc", _ids(148, 64))
def _tacotron_enc() -> nn.Module:
    """The encoder of Tacotron 2 (Shen et al. 2017)."""
    return nn.Sequential(
        *(nn.Embedding(148, 512), _Transpose()),
        *(_cna1(512, 512, 5) for _ in range(3)),
        *(_Transpose(), _Recurrent(nn.LSTM, 512, 256, bidirectional=True)),
    )


@_py("vad", _normal(129, 32))
def _vad() -> nn.Module:
    """Voice activity: convolutions over a spectrogram and an LSTM, as Silero's."""
    convs: list[nn.Module] = []
    for i, o, s in ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1)):
        convs += [nn.Conv1d(i, o, 3, s, 1), nn.ReLU()]
    return nn.Sequential(
        *(*convs, _Transpose(), _Recurrent(nn.LSTM, 128, 128)),
        *(nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid()),
    )


class _Res2(nn.Module):
    def __init__(self, channels: int, d: int, scale: int = 8) -> None:
        super().__init__()
        w = channels // scale
        self.scale = scale
        self.first, self.last = self._unit(channels, channels, 1), self._unit(channels, channels, 1)
        self.convs = nn.ModuleList(self._unit(w, w, 3, d) for _ in range(scale - 1))
        self.se = _SqueezeExcite(channels, 128)

    @staticmethod
    def _unit(i: int, o: int, k: int, d: int = 1) -> nn.Module:
        conv = nn.Conv1d(i, o, k, padding=k // 2 * d, dilation=d)
        return nn.Sequential(conv, nn.ReLU(), nn.BatchNorm1d(o))

    def forward(self, x: Tensor) -> Any:
        parts = self.first(x).chunk(self.scale, dim=1)
        done = [parts[0]]
        for i, conv in enumerate(self.convs):
            done.append(conv(parts[i + 1] + done[-1] if i else parts[i + 1]))
        return x + self.se(self.last(torch.cat(done, dim=1)))


@_py("ecapa", _normal(80, 200))
class _Ecapa(nn.Module):
    """ECAPA-TDNN speaker embedding of 512 channels (Desplanques et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        c = 512
        self.first = _Res2._unit(80, c, 5)
        self.blocks = nn.ModuleList(_Res2(c, d) for d in (2, 3, 4))
        self.merge = nn.Sequential(nn.Conv1d(3 * c, 1536, 1), nn.ReLU())
        self.attention = nn.Sequential(
            *(nn.Conv1d(3 * 1536, 128, 1), nn.ReLU(), nn.BatchNorm1d(128), nn.Tanh()),
            *(nn.Conv1d(128, 1536, 1), nn.Softmax(2)),
        )
        self.out = nn.Sequential(nn.BatchNorm1d(3072), nn.Linear(3072, 192), nn.BatchNorm1d(192))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        x = self.merge(torch.cat(maps, dim=1))
        mean, std = x.mean(2, keepdim=True), x.var(2, keepdim=True).clamp(min=1e-4).sqrt()
        w = self.attention(torch.cat((x, mean.expand_as(x), std.expand_as(x)), dim=1))
        mu = (w * x).sum(2)
        sigma = ((w * x * x).sum(2) - mu * mu).clamp(min=1e-4).sqrt()
        return self.out(torch.cat((mu, sigma), dim=1))


@_py("matchboxnet", _normal(64, 128))
def _matchboxnet() -> nn.Module:
    """MatchboxNet 3x2x64 for speech commands (Majumdar, Ginsburg 2020)."""
    layers: list[nn.Module] = [_cna1(64, 128, 11, 2)]
    for k, i in ((13, 128), (15, 64), (17, 64)):
        body = nn.Sequential(_separable(i, 64, k), _separable(64, 64, k, act=False))
        layers.append(_Residual(body, _cna1(i, 64, 1, act=None), nn.ReLU()))
    layers += [_separable(64, 128, 29, d=2), _cna1(128, 128, 1), nn.Conv1d(128, 30, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())


class _RelativeAttention(nn.Module):
    """With the two learnt biases of Transformer-XL, without its shift, as WeNet has it."""

    positions: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.p = nn.Linear(width, width, bias=False)
        self.u, self.w = (nn.Parameter(torch.randn(heads, width // heads)) for _ in range(2))
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.cat((angle.sin(), angle.cos()), 1)[None])

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.shape
        y = self.norm(x)
        q = self.q(y).view(b, t, self.heads, -1)
        k, v = (m(y).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.k, self.v))
        p = self.p(self.positions).view(1, t, self.heads, -1).transpose(1, 2)
        content = torch.matmul((q + self.u).transpose(1, 2), k.transpose(-2, -1))
        position = torch.matmul((q + self.w).transpose(1, 2), p.transpose(-2, -1))
        scores = torch.softmax((content + position) / math.sqrt(c / self.heads), dim=-1)
        return self.out(torch.matmul(scores, v).transpose(1, 2).reshape(b, t, c))


class _ConformerBlock(nn.Module):
    def __init__(self, c: int, length: int) -> None:
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(nn.LayerNorm(c), *_mlp(c, 4 * c, c, act=nn.SiLU)) for _ in range(2)
        )
        self.attention = _RelativeAttention(c, 4, length)
        self.conv = nn.Sequential(
            *(nn.LayerNorm(c), _Transpose(), nn.Conv1d(c, 2 * c, 1), nn.GLU(1)),
            nn.Conv1d(c, c, 31, padding=15, groups=c),
            *(nn.BatchNorm1d(c), nn.SiLU(), nn.Conv1d(c, c, 1), _Transpose()),
        )
        self.norm = nn.LayerNorm(c)

    def forward(self, x: Tensor) -> Any:
        x = x + 0.5 * self.ff1(x)
        x = x + self.attention(x)
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.ff2(x))


@_py("conformer", _normal(203, 80))
class _Conformer(nn.Module):
    """Conformer S, 4 blocks of 144 channels (Gulati et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        c = 144
        self.sub = nn.Sequential(nn.Conv2d(1, c, 3, 2), nn.ReLU(), nn.Conv2d(c, c, 3, 2), nn.ReLU())
        self.first = nn.Linear(c * 19, c)
        self.blocks = nn.Sequential(*(_ConformerBlock(c, 50) for _ in range(4)))
        self.out = nn.Linear(c, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.sub(x[:, None]).transpose(1, 2).flatten(2)
        return F.log_softmax(self.out(self.blocks(self.first(y))), dim=-1)


# ------------------------------------------------------------------------ sequences, text, series


@_py("lstm", _normal(64, 256))
def _lstm() -> nn.Module:
    """Two LSTM layers of 256."""
    return _Recurrent(nn.LSTM, 256, 256, 2)


@_py("bilstm", _normal(64, 256))
def _bilstm() -> nn.Module:
    """Two bidirectional LSTM layers of 256."""
    return _Recurrent(nn.LSTM, 256, 256, 2, bidirectional=True)


@_py("gru", _normal(64, 256))
def _gru() -> nn.Module:
    """Two GRU layers of 256."""
    return _Recurrent(nn.GRU, 256, 256, 2)


@_py("lm650", _ids(10000, 35))
def _lm650() -> nn.Module:
    """The "medium" language model (Zaremba et al. 2014)."""
    rnn = _Recurrent(nn.LSTM, 650, 650, 2)
    return nn.Sequential(nn.Embedding(10000, 650), rnn, nn.Linear(650, 10000))


@_py("tagger", _ids(20000, 40))
def _tagger() -> nn.Module:
    """Part-of-speech tagger, one bidirectional LSTM (Huang et al. 2015, without the CRF)."""
    rnn = _Recurrent(nn.LSTM, 100, 128, bidirectional=True)
    return nn.Sequential(nn.Embedding(20000, 100), rnn, nn.Linear(256, 17))


@_py("textcnn", _ids(20000, 64))
class _TextCnn(nn.Module):
    """Convolutions of 3, 4 and 5 words, the largest of each (Kim 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20000, 300)
        self.convs = nn.ModuleList(nn.Conv1d(300, 100, k) for k in (3, 4, 5))
        self.out = nn.Linear(300, 2)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids).transpose(1, 2)
        return self.out(torch.cat([torch.relu(c(x)).amax(2) for c in self.convs], dim=1))


@_py("fasttext", _ids(20000, 64))
class _FastText(nn.Module):
    """Mean of word vectors, one linear layer (Joulin et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20000, 100), nn.Linear(100, 10)

    def forward(self, ids: Tensor) -> Any:
        return self.out(self.table(ids).mean(1))


class _Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * torch.relu(self.value(x)) + (1 - t) * x


@_py("highway", _normal(784))
def _highway() -> nn.Module:
    """Highway network of 10 layers (Srivastava et al. 2015)."""
    return nn.Sequential(
        *(nn.Linear(784, 256), nn.ReLU()),
        *(_Highway(256) for _ in range(10)),
        nn.Linear(256, 10),
    )


@_py("char_cnn_highway", _ids(60, 35, 21))
class _CharCnn(nn.Module):
    """Character-aware language model, small (Kim et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 15)
        self.convs = nn.ModuleList(nn.Conv1d(15, 25 * k, k) for k in range(1, 7))
        self.highway = nn.Sequential(_Highway(525), _Highway(525))
        self.rnn = _Recurrent(nn.LSTM, 525, 300, 2)
        self.out = nn.Linear(300, 10000)

    def forward(self, ids: Tensor) -> Any:
        b, t, _ = ids.shape
        x = self.table(ids).flatten(0, 1).transpose(1, 2)
        y = torch.cat([torch.tanh(c(x)).amax(2) for c in self.convs], dim=1)
        return self.out(self.rnn(self.highway(y).view(b, t, -1)))


@_py("transformer_encoder", _normal(128, 256))
def _transformer_encoder() -> nn.Module:
    """torch.nn.TransformerEncoder, 4 layers; without gradients torch takes one operator a layer."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


@_py("transformer_encoder_plain", _normal(128, 256))
def _transformer_encoder_plain() -> nn.Module:
    """The same in single operators, which its norm_first with GELU does not change."""
    layer = _prenorm(256, 8, _mlp(256, 1024, 256, act=nn.GELU))
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)), nn.LayerNorm(256))


@_py("transformer_decoder", _normal(64, 256), _normal(32, 256))
class _Seq2Seq(nn.Module):
    """torch.nn.Transformer, 3 layers each way, with a causal mask (Vaswani et al. 2017)."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(256, 8, 3, 3, 1024, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, source: Tensor, target: Tensor) -> Any:
        return self.net(source, target, tgt_mask=self.mask)


class _NBeatsBlock(nn.Module):
    def __init__(self, past: int, future: int) -> None:
        super().__init__()
        self.body = _mlp(past, 256, 256, 256, 256, last=True)
        self.back = nn.Sequential(nn.Linear(256, 16, bias=False), nn.Linear(16, past, bias=False))
        self.fore = nn.Sequential(nn.Linear(256, 16, bias=False), nn.Linear(16, future, bias=False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.back(y), self.fore(y)


@_py("nbeats", _normal(120))
class _NBeats(nn.Module):
    """N-BEATS, generic, 8 blocks (Oreshkin et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_NBeatsBlock(120, 24) for _ in range(8))

    def forward(self, x: Tensor) -> Any:
        total: Any = 0
        for block in self.blocks:
            back, fore = block(x)
            x, total = x - back, total + fore
        return total


@_py("deepar", _normal(96, 5), _ids(370))
class _DeepAr(nn.Module):
    """DeepAR: an LSTM and the parameters of a normal distribution (Salinas et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(370, 20)
        self.rnn = _Recurrent(nn.LSTM, 25, 40, 3)
        self.mean, self.deviation = nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, x: Tensor, series: Tensor) -> tuple[Tensor, Tensor]:
        e = self.table(series)[:, None].expand(-1, x.shape[1], -1)
        y = self.rnn(torch.cat((x, e), dim=2))
        return self.mean(y).squeeze(-1), F.softplus(self.deviation(y)).squeeze(-1)


class _Grn(nn.Module):
    def __init__(self, i: int, c: int) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(i, c), nn.Linear(c, c), nn.Linear(c, 2 * c)
        self.shortcut = nn.Linear(i, c) if i != c else nn.Identity()
        self.norm = nn.LayerNorm(c)

    def forward(self, x: Tensor) -> Any:
        y = self.b(F.elu(self.a(x)))
        return self.norm(self.shortcut(x) + F.glu(self.gate(y), dim=-1))


@_py("tft_grn", _normal(96, 8))
class _Tft(nn.Module):
    """Temporal fusion transformer: variable selection, LSTM, attention (Lim et al. 2019)."""

    mask: Tensor

    def __init__(self, c: int = 64, variables: int = 8, length: int = 96) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(variables, c))
        self.select = _Grn(variables * c, variables)
        self.each = nn.ModuleList(_Grn(c, c) for _ in range(variables))
        self.rnn = _Recurrent(nn.LSTM, c, c)
        self.gate, self.norm = nn.Linear(c, 2 * c), nn.LayerNorm(c)
        self.enrich, self.positionwise = _Grn(c, c), _Grn(c, c)
        self.attention = _Attention(c, 4, causal=True)
        self.out = nn.Linear(c, 3)

    def forward(self, x: Tensor) -> Any:
        e = x[..., None] * self.weight
        w = torch.softmax(self.select(e.flatten(2)), dim=-1)
        y = torch.stack([grn(e[:, :, i]) for i, grn in enumerate(self.each)], dim=2)
        y = (w[..., None] * y).sum(2)
        y = self.norm(y + F.glu(self.gate(self.rnn(y)), dim=-1))
        y = self.enrich(y)
        y = y + self.attention(y)
        return self.out(self.positionwise(y))


@_py("performer", _normal(256, 256))
class _Performer(nn.Module):
    """Attention by positive random features, 2 layers (Choromanski et al. 2020)."""

    features: Tensor

    def __init__(self, c: int = 256, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, c // heads
        self.register_buffer("features", nn.init.orthogonal_(torch.empty(64, 64)) * 8)
        self.qkv = nn.ModuleList(nn.Linear(c, 3 * c) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(c, c) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(2 * layers))
        self.ffs = nn.ModuleList(_mlp(c, 4 * c, c, act=nn.GELU) for _ in range(layers))

    def kernel(self, x: Tensor, keys: bool) -> Tensor:
        x = x * self.size**-0.25
        y = x @ self.features.t() - 0.5 * (x * x).sum(-1, keepdim=True)
        top = y.amax((-1, -2), keepdim=True) if keys else y.amax(-1, keepdim=True)
        return torch.exp(y - top) + 1e-4

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.shape
        for i, (project, out, ff) in enumerate(zip(self.qkv, self.outs, self.ffs, strict=True)):
            y = project(self.norms[2 * i](x)).view(b, t, 3, self.heads, -1)
            q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.kernel(q, False), self.kernel(k, True)
            scale = 1 / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
            y = (q @ (k.transpose(-2, -1) @ v)) * scale
            x = x + out(y.transpose(1, 2).reshape(b, t, c))
            x = x + ff(self.norms[2 * i + 1](x))
        return x


@_py("linattn", _normal(64, 32, 32))
class _EfficientAttention(nn.Module):
    """Efficient attention over a feature map (Shen et al. 2018)."""

    def __init__(self, c: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        b, c, h, w = x.shape
        q, k, v = (m(x).view(b, self.heads, -1, h * w) for m in (self.q, self.k, self.v))
        context = torch.softmax(k, dim=-1) @ v.transpose(2, 3)
        y = context.transpose(2, 3) @ torch.softmax(q, dim=2)
        return x + self.out(y.reshape(b, c, h, w))


# -------------------------------------------------------------------------------- recommendations


@_py("dlrm", _normal(13), _ids(1000, 26))
class _Dlrm(nn.Module):
    """DLRM: the dot products of all pairs of features (Naumov et al. 2019)."""

    rows: Tensor
    columns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 16) for _ in range(26))
        self.bottom = _mlp(13, 512, 256, 64, 16, last=True)
        self.top = _mlp(351 + 16, 512, 256, 1)
        rows, columns = torch.tril_indices(27, 27, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        t = torch.stack([x, *(e(ids[:, i]) for i, e in enumerate(self.tables))], dim=1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat((x, z), dim=1)))


class _Fields(nn.Module):
    """One table for all 26 fields."""

    offsets: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(26000, width)
        nn.init.normal_(self.table.weight, std=0.1)
        self.register_buffer("offsets", torch.arange(26) * 1000)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids + self.offsets)


@_py("deepfm", _ids(1000, 26))
class _DeepFm(nn.Module):
    """DeepFM: a factorization machine beside an MLP (Guo et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.fields, self.linear = _Fields(16), _Fields(1)
        self.mlp = _mlp(26 * 16, 400, 400, 400, 1)

    def forward(self, ids: Tensor) -> Tensor:
        e = self.fields(ids)
        fm = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.linear(ids).sum(1) + fm + self.mlp(e.flatten(1)))


@_py("widedeep", _normal(13), _ids(1000, 26))
class _WideDeep(nn.Module):
    """Wide and deep (Cheng et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.fields, self.wide = _Fields(32), _Fields(1)
        self.linear = nn.Linear(13, 1)
        self.deep = _mlp(13 + 26 * 32, 1024, 512, 256, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        deep = self.deep(torch.cat((dense, self.fields(ids).flatten(1)), dim=1))
        return torch.sigmoid(self.wide(ids).sum(1) + self.linear(dense) + deep)


@_py("ncf", _ids(6040, 100), _ids(3706, 100))
class _Ncf(nn.Module):
    """NeuMF for 100 candidates (He et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.u1, self.i1 = nn.Embedding(6040, 32), nn.Embedding(3706, 32)
        self.u2, self.i2 = nn.Embedding(6040, 64), nn.Embedding(3706, 64)
        self.mlp = _mlp(128, 64, 32, 32, last=True)
        self.out = nn.Linear(64, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        a = self.u1(user) * self.i1(item)
        b = self.mlp(torch.cat((self.u2(user), self.i2(item)), dim=-1))
        return torch.sigmoid(self.out(torch.cat((a, b), dim=-1)))


class _Dice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.alpha = nn.Parameter(torch.full((width,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.alpha * x


@_py("din", _ids(10000, 50), _ids(10000))
class _Din(nn.Module):
    """Deep interest network: attention of a candidate over the history (Zhou et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10000, 64)
        self.attention = nn.Sequential(
            *(nn.Linear(256, 80), nn.PReLU(), nn.Linear(80, 40), nn.PReLU(), nn.Linear(40, 1))
        )
        self.mlp = nn.Sequential(
            *(nn.Linear(192, 200), _Dice(200), nn.Linear(200, 80), _Dice(80), nn.Linear(80, 1))
        )

    def forward(self, history: Tensor, target: Tensor) -> Tensor:
        h, t = self.table(history), self.table(target)
        q = t[:, None].expand_as(h)
        w = self.attention(torch.cat((q, h, q - h, q * h), dim=-1)).squeeze(-1)
        w = torch.where(history > 100, w, torch.zeros_like(w))
        interest = torch.bmm(w[:, None], h).squeeze(1)
        return torch.sigmoid(self.mlp(torch.cat((interest, t, interest * t), dim=1)))


@_py("twotower", _ids(10000, 20), _ids(10000, 100))
class _TwoTower(nn.Module):
    """Retrieval: a user's history against 100 items (Yi et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10000, 64)
        self.user, self.item = _mlp(64, 256, 128, 64), _mlp(64, 256, 128, 64)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        u = F.normalize(self.user(self.table(history).mean(1)), dim=-1)
        v = F.normalize(self.item(self.table(items)), dim=-1)
        return torch.bmm(v, u[:, :, None]).squeeze(-1) / 0.05


@_py("sasrec", _ids(3417, 50))
class _SasRec(nn.Module):
    """Self-attentive sequential recommendation (Kang, McAuley 2018)."""

    mask: Tensor

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(3417, c), nn.Parameter(0.1 * torch.randn(50, c))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(c, 1, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(5))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Conv1d(c, c, 1), nn.ReLU(), nn.Conv1d(c, c, 1)) for _ in range(2)
        )
        self.register_buffer("mask", torch.ones(50, 50, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Any:
        x = self.items(ids) * 8 + self.positions
        x = x * (ids != 0).unsqueeze(-1)
        for i, (attention, ff) in enumerate(zip(self.attentions, self.ffs, strict=True)):
            q = self.norms[2 * i](x)
            x = q + attention(q, x, x, attn_mask=self.mask, need_weights=False)[0]
            x = self.norms[2 * i + 1](x)
            x = x + ff(x.transpose(1, 2)).transpose(1, 2)
        return self.norms[4](x)[:, -1] @ self.items.weight.t()


@_py("tabtransformer", _ids(100, 10), _normal(5))
class _TabTransformer(nn.Module):
    """TabTransformer: attention between the embedded columns (Huang et al. 2020)."""

    def __init__(self, c: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, c) for _ in range(10))
        self.blocks = nn.Sequential(*(_prenorm(c, 8, _Gated(c, 4 * c, F.gelu)) for _ in range(6)))
        self.norm, self.mlp = nn.LayerNorm(5), _mlp(10 * c + 5, 1300, 650, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Any:
        e = torch.stack([t(ids[:, i]) for i, t in enumerate(self.tables)], dim=1)
        return self.mlp(torch.cat((self.blocks(e).flatten(1), self.norm(x)), dim=1))


@_py("ft_transformer", _normal(28))
class _FtTransformer(nn.Module):
    """FT-Transformer: each number becomes a token (Gorishniy et al. 2021)."""

    def __init__(self, c: int = 192) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(28, c)) for _ in range(2))
        self.token = nn.Parameter(torch.randn(1, 1, c))
        blocks = (_prenorm(c, 8, _Gated(c, 256, torch.relu)) for _ in range(3))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.LayerNorm(c), nn.ReLU(), nn.Linear(c, 2))

    def forward(self, x: Tensor) -> Any:
        e = x[:, :, None] * self.weight + self.bias
        e = torch.cat((self.token.expand(x.shape[0], -1, -1), e), dim=1)
        return self.head(self.blocks(e)[:, 0])


class _GluStep(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(i, 2 * o, bias=False), nn.BatchNorm1d(2 * o)

    def forward(self, x: Tensor) -> Any:
        a, b = self.norm(self.fc(x)).chunk(2, dim=1)
        return a * torch.sigmoid(b)


@_py("tabnet", _normal(54))
class _TabNet(nn.Module):
    """TabNet: 3 decision steps, each with a sparse mask of the features (Arik, Pfister 2019)."""

    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.n = n
        self.norm = nn.BatchNorm1d(54)
        self.shared = nn.ModuleList((_GluStep(54, 2 * n), _GluStep(2 * n, 2 * n)))
        self.own = nn.ModuleList(_GluStep(2 * n, 2 * n) for _ in range(8))
        self.masks = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 54, bias=False), nn.BatchNorm1d(54)) for _ in range(3)
        )
        self.out = nn.Linear(n, 7)

    def transform(self, x: Tensor, step: int) -> Any:
        x = self.shared[0](x)
        for layer in (self.shared[1], self.own[2 * step], self.own[2 * step + 1]):
            x = (x + layer(x)) * math.sqrt(0.5)
        return x

    @staticmethod
    def sparsemax(x: Tensor) -> Tensor:
        ordered = torch.sort(x, dim=1, descending=True)[0]
        ranks = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        inside = 1 + ranks * ordered > ordered.cumsum(1)
        count = inside.sum(1, keepdim=True)
        total = (ordered * inside).sum(1, keepdim=True)
        return torch.relu(x - (total - 1) / count)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        a = self.transform(x, 0)[:, self.n :]
        prior, total = torch.ones_like(x), torch.zeros_like(a)
        for i, attention in enumerate(self.masks):
            mask = self.sparsemax(attention(a) * prior)
            prior = prior * (1.3 - mask)
            y = self.transform(mask * x, i + 1)
            total = total + torch.relu(y[:, : self.n])
            a = y[:, self.n :]
        return self.out(total)


# ------------------------------------------------------------------------- graphs, points, physics


@_py("gcn", _normal(512, 256), _adjacency(512, normalized=True))
class _Gcn(nn.Module):
    """Graph convolutions over a dense adjacency matrix (Kipf, Welling 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 64, bias=False), nn.Linear(64, 7, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        y = torch.relu(torch.bmm(adjacency, self.a(x)))
        return F.log_softmax(torch.bmm(adjacency, self.b(y)), dim=-1)


class _GatLayer(nn.Module):
    def __init__(self, i: int, o: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fc = nn.Linear(i, o * heads, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(heads, o, 1) / 3) for _ in range(2))

    def forward(self, x: Tensor, adjacency: Tensor) -> Any:
        b, n, _ = x.shape
        h = self.fc(x).view(b, n, self.heads, -1).transpose(1, 2)
        e = F.leaky_relu(h @ self.source + (h @ self.target).transpose(2, 3), 0.2)
        e = e.masked_fill(adjacency[:, None] == 0, -9e15)
        return (torch.softmax(e, dim=-1) @ h).transpose(1, 2).reshape(b, n, -1)


@_py("gat", _normal(256, 128), _adjacency(256))
class _Gat(nn.Module):
    """Graph attention over a dense adjacency matrix (Velickovic et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _GatLayer(128, 8, 8), _GatLayer(64, 7, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        y = F.elu(self.a(x, adjacency))
        return F.log_softmax(self.b(y, adjacency), dim=-1)


@_py("gnn_message", _normal(32, 32), _normal(32, 32, 8), _adjacency(32))
class _Messages(nn.Module):
    """Message passing with an edge network (Gilmer et al. 2017), 3 steps."""

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(32, c)
        self.edges = nn.ModuleList(_mlp(2 * c + 8, 128, c, act=nn.SiLU, last=True) for _ in "abc")
        self.nodes = nn.ModuleList(_mlp(2 * c, 128, c, act=nn.SiLU) for _ in "abc")
        self.out = _mlp(c, 64, 1, act=nn.SiLU)

    def forward(self, x: Tensor, e: Tensor, adjacency: Tensor) -> Any:
        h = self.first(x)
        n = h.shape[1]
        for edge, node in zip(self.edges, self.nodes, strict=True):
            a, b = h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)
            m = edge(torch.cat((a, b, e), dim=-1)) * adjacency[..., None]
            h = h + node(torch.cat((h, m.sum(2)), dim=-1))
        return self.out(h.sum(1))


@_py("pointnet", _normal(3, 1024))
class _PointNet(nn.Module):
    """PointNet with its input transform (Qi et al. 2016)."""

    identity: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.t1 = nn.Sequential(_cna1(3, 64, 1), _cna1(64, 128, 1), _cna1(128, 1024, 1))
        self.t2 = _mlp(1024, 512, 256, 9)
        self.net = nn.Sequential(
            *(_cna1(3, 64, 1), _cna1(64, 64, 1), _cna1(64, 128, 1), _cna1(128, 1024, 1, act=None))
        )
        self.head = nn.Sequential(
            *(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU()),
            *(nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 40)),
        )
        self.register_buffer("identity", torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        t = self.t2(torch.max(self.t1(x), 2)[0]).view(-1, 3, 3) + self.identity
        y = torch.bmm(x.transpose(1, 2), t).transpose(1, 2)
        return F.log_softmax(self.head(torch.max(self.net(y), 2)[0]), dim=1)


@_py("nerf", _uniform(1024, 3), _uniform(1024, 3))
class _Nerf(nn.Module):
    """NeRF: 1024 points, sines and cosines, 8 layers (Mildenhall et al. 2020)."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(10))
        self.a = _mlp(63, *[256] * 5, last=True)
        self.b = _mlp(63 + 256, *[256] * 4, last=True)[:-2]
        self.density, self.feature = nn.Linear(256, 1), nn.Linear(256, 256)
        self.colour = nn.Sequential(*_mlp(256 + 27, 128, 3), nn.Sigmoid())

    def encode(self, x: Tensor, count: int) -> Tensor:
        y = (x[..., None, :] * self.frequencies[:count, None]).flatten(-2)
        return torch.cat((x, torch.sin(y), torch.cos(y)), dim=-1)

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        e = self.encode(x, 10)
        y = self.b(torch.cat((e, self.a(e)), dim=-1))
        rgb = self.colour(torch.cat((self.feature(y), self.encode(direction, 4)), dim=-1))
        return torch.cat((rgb, torch.relu(self.density(y))), dim=-1)


@_py("siren", _uniform(4096, 2), calibrated=False)
class _Siren(nn.Module):
    """SIREN: sines between the layers (Sitzmann et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(i, o) for i, o in itertools.pairwise((2, 256, 256, 256, 256))
        )
        self.out = nn.Linear(256, 3)
        for i, layer in enumerate(self.layers):
            bound = math.sqrt(6 / 256) / 30 if i else 1 / 2
            nn.init.uniform_(layer.weight, -bound, bound)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.out(x)


@_py("deeponet", _normal(100), _uniform(256, 2))
class _DeepONet(nn.Module):
    """DeepONet: a function at 100 sensors, evaluated at 256 points (Lu et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = _mlp(100, 128, 128, 128), _mlp(2, 128, 128, 128, last=True)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bp,bnp->bn", self.branch(u), self.trunk(y)) + self.bias


@_py("pinn", _uniform(1024, 1), _uniform(1024, 1))
class _Pinn(nn.Module):
    """Physics-informed network: tanh, 8 layers of 20 (Raissi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(2, *[20] * 8, 1, act=nn.Tanh)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        return self.net(torch.cat((x, t), dim=-1))


# ------------------------------------------------------------------------------ MLPs and policies


@_py("mlp_big", _normal(1024))
def _mlp_big() -> nn.Module:
    """Three wide layers: memory bandwidth."""
    return _mlp(1024, 4096, 4096, 1024)


@_py("mlp_gelu", _normal(512))
def _mlp_gelu() -> nn.Module:
    """Layers of 2048 with GELU and LayerNorm."""
    return nn.Sequential(
        *_mlp(512, 2048, 2048, act=nn.GELU), nn.LayerNorm(2048), nn.Linear(2048, 512)
    )


@_py("mlp_tiny", _normal(8))
def _mlp_tiny() -> nn.Module:
    """Next to nothing: the cost of a call."""
    return _mlp(8, 16, 1)


@_py("autoencoder", _normal(784))
def _autoencoder() -> nn.Module:
    """Deep autoencoder (Hinton, Salakhutdinov 2006)."""
    return nn.Sequential(*_mlp(784, 512, 256, 64, 256, 512, 784), nn.Sigmoid())


@_py("moe", _normal(64, 256))
class _Moe(nn.Module):
    """A dense soft mixture of 4 experts (Jacobs et al. 1991, MMoE)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(256, 4)
        self.experts = nn.ModuleList(_mlp(256, 512, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        w = torch.softmax(self.gate(x), dim=-1)
        y = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (w[..., None] * y).sum(-2)


@_py("attention_pool", _normal(100, 512))
class _AttentionPool(nn.Module):
    """Gated attention over a bag of instances (Ilse et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(512, 256), nn.ReLU())
        self.v, self.u, self.w = nn.Linear(256, 128), nn.Linear(256, 128), nn.Linear(128, 1)
        self.out = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h)))
        a = torch.softmax(a.transpose(1, 2), dim=-1)
        return torch.sigmoid(self.out(torch.bmm(a, h).squeeze(1)))


@_py("policy", _normal(17))
class _Policy(nn.Module):
    """Actor and critic of PPO, MuJoCo size (Schulman et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = _mlp(17, 64, 64, 6, act=nn.Tanh), _mlp(17, 64, 64, 1, act=nn.Tanh)
        self.deviation = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.actor(x)
        return mean, torch.exp(self.deviation).expand_as(mean), self.critic(x)


@_py("dqn", _ids(256, 4, 84, 84))
class _Dqn(nn.Module):
    """Deep Q-network for Atari (Mnih et al. 2015); frames are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), *_mlp(3136, 512, 6)),
        )

    def forward(self, frames: Tensor) -> Any:
        return self.net(frames.float() / 255)


@_py("alphazero", _normal(17, 19, 19))
class _AlphaZero(nn.Module):
    """AlphaZero on a 19x19 board, 6 blocks of 128 (Silver et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_cna(17, 128), *(_basic(128, 128) for _ in range(6)))
        self.policy = nn.Sequential(_cna(128, 2, 1), nn.Flatten(), nn.Linear(722, 362))
        self.value = nn.Sequential(_cna(128, 1, 1), nn.Flatten(), *_mlp(361, 256, 1), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return F.log_softmax(self.policy(y), dim=1), self.value(y)


# ------------------------------------------------------------------------- images: classification


@_py("lenet", _normal(1, 28, 28))
def _lenet() -> nn.Module:
    """LeNet-5 (LeCun et al. 1998), with tanh."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        *_mlp(400, 120, 84, 10, act=nn.Tanh),
    )


@_py("alexnet_small", _image(3, 32, 32))
def _alexnet_small() -> nn.Module:
    """AlexNet for CIFAR, with local response normalization (Krizhevsky et al. 2012)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5)),
        *(nn.Conv2d(64, 64, 5, 1, 2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, 1)),
        *(nn.Flatten(), *_mlp(4096, 384, 192, 10)),
    )


@_py("c3d", _image(3, 16, 56, 56))
def _c3d() -> nn.Module:
    """A small C3D for video (Tran et al. 2014)."""
    layers: list[nn.Module] = []
    for i, o, pool in ((3, 16, (1, 2, 2)), (16, 32, (2, 2, 2)), (32, 64, (2, 2, 2))):
        layers += [nn.Conv3d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool3d(pool)]
    layers += [nn.Conv3d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten()]
    return nn.Sequential(*layers, *_mlp(64 * 2 * 3 * 3, 512, 101))


class _Affine(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(c).uniform_(0.6, 1.4))
        self.beta = nn.Parameter(torch.empty(c).uniform_(-0.3, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.beta


class _ResMlpBlock(nn.Module):
    def __init__(self, c: int, patches: int) -> None:
        super().__init__()
        self.n1, self.n2 = _Affine(c), _Affine(c)
        self.mix, self.mlp = nn.Linear(patches, patches), _mlp(c, 4 * c, c, act=nn.GELU)
        self.s1, self.s2 = (nn.Parameter(torch.full((c,), 0.3)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = x + self.s1 * self.mix(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.s2 * self.mlp(self.n2(x))


@_py("resmlp", _image(3, 224, 224))
class _ResMlp(nn.Module):
    """ResMLP, 6 blocks of 384 (Touvron et al. 2021)."""

    def __init__(self, c: int = 384) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, c, 16, 16)
        self.blocks = nn.Sequential(*(_ResMlpBlock(c, 196) for _ in range(6)), _Affine(c))
        self.head = nn.Linear(c, 1000)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


@_py("siamese", _normal(1, 64, 64), _normal(1, 64, 64))
class _Siamese(nn.Module):
    """Two towers with the same weights and their distance (Koch et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            *(nn.Conv2d(1, 64, 7), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 128, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(128, 128, 4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(2048, 1024), nn.Sigmoid()),
        )
        self.out = nn.Linear(1024, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(self.out(torch.abs(self.tower(a) - self.tower(b))))


@_py("capsnet", _normal(1, 28, 28))
class _CapsNet(nn.Module):
    """Capsules with 3 steps of routing, small (Sabour et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, 64, 9), nn.Conv2d(64, 64, 9, 2)
        self.weight = nn.Parameter(0.1 * torch.randn(1, 288, 10, 16, 8))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = (x * x).sum(-1, keepdim=True)
        return square / (1 + square) * x / torch.sqrt(square + 1e-8)

    def forward(self, x: Tensor) -> Any:
        b = x.shape[0]
        y = self.primary(torch.relu(self.conv(x))).view(b, 8, 8, 36)
        u = self.squash(y.permute(0, 1, 3, 2).reshape(b, 288, 8))
        votes = torch.matmul(self.weight, u[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros_like(votes[..., :1])
        v = votes[:, :1]
        for i in range(3):
            v = self.squash((torch.softmax(logits, dim=2) * votes).sum(1, keepdim=True))
            if i < 2:
                logits = logits + (votes * v).sum(-1, keepdim=True)
        return v.squeeze(1).norm(dim=-1)


@_py("spatial_transformer", _normal(1, 28, 28))
class _SpatialTransformer(nn.Module):
    """A network that crops and turns its input first (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(
            *(nn.Conv2d(1, 8, 7), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(8, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), *_mlp(90, 32, 6)),
        )
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), *_mlp(320, 50, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        theta = torch.tanh(self.where(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        y = F.grid_sample(x, grid, align_corners=False)
        return F.log_softmax(self.net(y), dim=1)


class _Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1)


@_py("mobilefacenet", _image(3, 112, 112))
def _mobilefacenet() -> nn.Module:
    """MobileFaceNet: PReLU, a depthwise convolution as pooling (Chen et al. 2018)."""

    def unit(i: int, o: int, k: int = 1, s: int = 1, g: int = 1) -> list[nn.Module]:
        return [*_cna(i, o, k, s, g, act=None), nn.PReLU(o)]

    layers = [*unit(3, 64, 3, 2), *unit(64, 64, 3, 1, 64)]
    i = 64
    for t, o, n, s in (
        (2, 64, 5, 2),
        (4, 128, 1, 2),
        (2, 128, 6, 1),
        (4, 128, 1, 2),
        (2, 128, 2, 1),
    ):
        for r in range(n):
            h = i * t
            stride = 1 if r else s
            body = nn.Sequential(*unit(i, h), *unit(h, h, 3, stride, h), *_cna(h, o, 1, act=None))
            layers.append(_Residual(body) if i == o and stride == 1 else body)
            i = o
    return nn.Sequential(
        *(*layers, *unit(128, 512), nn.Conv2d(512, 512, 7, groups=512, bias=False)),
        *(nn.BatchNorm2d(512), nn.Flatten(), nn.Linear(512, 128, bias=False)),
        *(nn.BatchNorm1d(128), _Normalize()),
    )


@_py("arcface_r18", _image(3, 112, 112))
def _arcface_r18() -> nn.Module:
    """The improved ResNet-18 of ArcFace (Deng et al. 2018)."""
    layers: list[nn.Module] = [*_cna(3, 64, act=None), nn.PReLU(64)]
    for a, b in itertools.pairwise((64, 64, 128, 256, 512)):
        for i, s in ((a, 2), (b, 1)):
            body = nn.Sequential(
                *(
                    nn.BatchNorm2d(i),
                    *_cna(i, b, act=None),
                    nn.PReLU(b),
                    *_cna(b, b, 3, s, act=None),
                )
            )
            layers.append(_Residual(body, _cna(i, b, 1, s, act=None) if s == 2 else None))
    return nn.Sequential(
        *(*layers, nn.BatchNorm2d(512), nn.Flatten()),
        *(nn.Linear(512 * 49, 512), nn.BatchNorm1d(512)),
    )


# ---------------------------------------------------------------------- images: making new images


@_py("vae", _uniform(3, 64, 64))
class _Vae(nn.Module):
    """Convolutional variational autoencoder, its mean (Kingma, Welling 2013)."""

    def __init__(self) -> None:
        super().__init__()
        down: list[nn.Module] = []
        for i, o in itertools.pairwise((3, 32, 64, 128, 256)):
            down += [nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.LeakyReLU()]
        self.encoder = nn.Sequential(*down, nn.Flatten())
        self.mean, self.first = nn.Linear(4096, 128), nn.Linear(128, 4096)
        up: list[nn.Module] = []
        for i, o in itertools.pairwise((256, 128, 64, 32, 32)):
            up += [nn.ConvTranspose2d(i, o, 3, 2, 1, 1), nn.BatchNorm2d(o), nn.LeakyReLU()]
        self.decoder = nn.Sequential(*up, nn.Conv2d(32, 3, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(self.encoder(x))
        return self.decoder(self.first(mean).view(-1, 256, 4, 4)), mean


@_py("dcgan", _normal(100, 1, 1))
def _dcgan() -> nn.Module:
    """The generator of DCGAN, 64x64 (Radford et al. 2015)."""
    layers: list[nn.Module] = []
    for n, (i, o) in enumerate(itertools.pairwise((100, 512, 256, 128, 64))):
        conv = nn.ConvTranspose2d(i, o, 4, 2 if n else 1, 1 if n else 0, bias=False)
        layers += [conv, nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


@_py("fsrcnn", _uniform(1, 64, 64))
def _fsrcnn() -> nn.Module:
    """FSRCNN, super-resolution by 3 (Dong et al. 2016)."""
    layers: list[nn.Module] = []
    for i, o, k in ((1, 56, 5), (56, 12, 1), *[(12, 12, 3)] * 4, (12, 56, 1)):
        layers += [nn.Conv2d(i, o, k, padding=k // 2), nn.PReLU(o)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(56, 1, 9, 3, 4, 2))


@_py("espcn", _uniform(1, 128, 128))
def _espcn() -> nn.Module:
    """ESPCN, super-resolution by 3 with a pixel shuffle (Shi et al. 2016)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3)),
    )


class _Scaled(nn.Module):
    def __init__(self, body: nn.Module, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, scale

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * self.scale


@_py("edsr", _image(3, 48, 48))
def _edsr() -> nn.Module:
    """EDSR, 8 blocks of 64, by 2 (Lim et al. 2017)."""

    def conv(i: int, o: int) -> nn.Module:
        return nn.Conv2d(i, o, 3, padding=1)

    blocks = [_Scaled(nn.Sequential(conv(64, 64), nn.ReLU(), conv(64, 64)), 0.5) for _ in range(8)]
    return nn.Sequential(
        *(conv(3, 64), _Residual(nn.Sequential(*blocks, conv(64, 64)))),
        *(conv(64, 256), nn.PixelShuffle(2), conv(64, 3)),
    )


def _normed(i: int, o: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a in (i, o):
        layers += [nn.Conv2d(a, o, 3, padding=1, bias=False), nn.GroupNorm(8, o), nn.ReLU()]
    return nn.Sequential(*layers)


@_py("unet_deconv", _image(3, 128, 128))
class _UNetDeconv(nn.Module):
    """U-Net with GroupNorm and transposed convolutions (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 64, 128, 256)
        self.down = nn.ModuleList(_normed(a, b) for a, b in itertools.pairwise((3, *sizes)))
        back = sizes[-2::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * b, b, 2, 2) for b in back)
        self.join = nn.ModuleList(_normed(2 * b, b) for b in back)
        self.out = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Any:
        maps = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            maps.append(x)
        for up, join, before in zip(self.up, self.join, maps[-2::-1], strict=True):
            x = join(torch.cat((before, up(x)), dim=1))
        return self.out(x)


def _volume(i: int, o: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((i, max(i, o // 2)), (max(i, o // 2), o)):
        layers += [nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU()]
    return nn.Sequential(*layers)


@_py("unet3d", _normal(1, 32, 32, 32))
class _UNet3d(nn.Module):
    """3-D U-Net, small (Cicek et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((_volume(1, 16), _volume(16, 32), _volume(32, 64)))
        self.up = nn.ModuleList(
            (nn.ConvTranspose3d(64, 32, 2, 2), nn.ConvTranspose3d(32, 16, 2, 2))
        )
        self.join = nn.ModuleList((_volume(64, 32), _volume(32, 16)))
        self.out = nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor) -> Any:
        a = self.down[0](x)
        b = self.down[1](F.max_pool3d(a, 2))
        y = self.down[2](F.max_pool3d(b, 2))
        y = self.join[0](torch.cat((self.up[0](y), b), dim=1))
        y = self.join[1](torch.cat((self.up[1](y), a), dim=1))
        return self.out(y)


def _reflected(i: int, o: int, k: int, s: int = 1, *, act: bool = True) -> list[nn.Module]:
    """Reflection, convolution, InstanceNorm."""
    layers = [nn.ReflectionPad2d(k // 2), nn.Conv2d(i, o, k, s), nn.InstanceNorm2d(o, affine=True)]
    return [*layers, nn.ReLU()] if act else layers


@_py("style_transfer", _image(3, 128, 128))
def _style_transfer() -> nn.Module:
    """Fast style transfer (Johnson et al. 2016), with InstanceNorm and nearest upsampling."""
    blocks = (
        _Residual(nn.Sequential(*_reflected(128, 128, 3), *_reflected(128, 128, 3, act=False)))
        for _ in range(5)
    )
    return nn.Sequential(
        *(*_reflected(3, 32, 9), *_reflected(32, 64, 3, 2), *_reflected(64, 128, 3, 2), *blocks),
        *(nn.Upsample(scale_factor=2), *_reflected(128, 64, 3)),
        *(nn.Upsample(scale_factor=2), *_reflected(64, 32, 3)),
        *(nn.ReflectionPad2d(4), nn.Conv2d(32, 3, 9)),
    )


@_py("cyclegan", _image(3, 128, 128))
def _cyclegan() -> nn.Module:
    """The generator of CycleGAN, 6 blocks, 32 channels at first (Zhu et al. 2017)."""

    def normed(conv: nn.Module, o: int) -> list[nn.Module]:
        return [conv, nn.InstanceNorm2d(o), nn.ReLU()]

    blocks = (
        _Residual(
            nn.Sequential(
                *(nn.ReflectionPad2d(1), *normed(nn.Conv2d(128, 128, 3), 128)),
                *(nn.ReflectionPad2d(1), *normed(nn.Conv2d(128, 128, 3), 128)[:-1]),
            )
        )
        for _ in range(6)
    )
    return nn.Sequential(
        *(nn.ReflectionPad2d(3), *normed(nn.Conv2d(3, 32, 7), 32)),
        *(*normed(nn.Conv2d(32, 64, 3, 2, 1), 64), *normed(nn.Conv2d(64, 128, 3, 2, 1), 128)),
        *blocks,
        *normed(nn.ConvTranspose2d(128, 64, 3, 2, 1, 1), 64),
        *normed(nn.ConvTranspose2d(64, 32, 3, 2, 1, 1), 32),
        *(nn.ReflectionPad2d(3), nn.Conv2d(32, 3, 7), nn.Tanh()),
    )


@_py("pix2pix", _image(3, 128, 128))
class _Pix2Pix(nn.Module):
    """The U-Net generator of pix2pix, 7 levels, 32 channels at first (Isola et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 128, 256, 256, 256, 256)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for n, (i, o) in enumerate(itertools.pairwise(sizes)):
            layers: list[nn.Module] = [nn.LeakyReLU(0.2)] if n else []
            layers.append(nn.Conv2d(i, o, 4, 2, 1, bias=False))
            self.down.append(nn.Sequential(*layers, *([nn.BatchNorm2d(o)] if 0 < n < 6 else [])))
        for n in reversed(range(7)):
            i, o = sizes[n + 1] * (1 if n == 6 else 2), sizes[n]
            conv = nn.ConvTranspose2d(i, o, 4, 2, 1, bias=n == 0)
            self.up.append(nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(o) if n else nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for down in self.down:
            x = down(x)
            maps.append(x)
        for n, up in enumerate(self.up):
            x = up(torch.cat((x, maps[6 - n]), dim=1) if n else x)
        return x


# -------------------------------------------------------- images: detection, segmentation, posture


@_py("yolo_tiny", _image(3, 320, 320))
class _YoloTiny(nn.Module):
    """YOLOv3-tiny: leaky ReLU, upsampling, concatenation (Redmon, Farhadi 2018)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise((3, 16, 32, 64, 128)):
            layers += [_cna(i, o, act=_leaky), nn.MaxPool2d(2)]
        self.a = nn.Sequential(*layers, _cna(128, 256, act=_leaky))
        self.b = nn.Sequential(
            *(nn.MaxPool2d(2), _cna(256, 512, act=_leaky), nn.ZeroPad2d((0, 1, 0, 1))),
            *(nn.MaxPool2d(2, 1), _cna(512, 1024, act=_leaky), _cna(1024, 256, 1, act=_leaky)),
        )
        self.big = nn.Sequential(_cna(256, 512, act=_leaky), nn.Conv2d(512, 255, 1))
        self.up = nn.Sequential(_cna(256, 128, 1, act=_leaky), nn.Upsample(scale_factor=2))
        self.small = nn.Sequential(_cna(384, 256, act=_leaky), nn.Conv2d(256, 255, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a(x)
        b = self.b(a)
        return self.big(b), self.small(torch.cat((self.up(b), a), dim=1))


def _silu(i: int, o: int, k: int = 1, s: int = 1, g: int = 1) -> nn.Module:
    return _cna(i, o, k, s, g, act=nn.SiLU)


def _bottleneck(c: int, shortcut: bool, first: int) -> nn.Module:
    body = nn.Sequential(_silu(c, c, first), _silu(c, c, 3))
    return _Residual(body) if shortcut else body


class _C3(nn.Module):
    def __init__(self, i: int, o: int, n: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        c = o // 2
        self.a, self.b, self.out = _silu(i, c), _silu(i, c), _silu(2 * c, o)
        self.body = nn.Sequential(*(_bottleneck(c, shortcut, 1) for _ in range(n)))

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.cat((self.body(self.a(x)), self.b(x)), dim=1))


class _C2f(nn.Module):
    def __init__(self, i: int, o: int, n: int = 1, shortcut: bool = True) -> None:
        super().__init__()
        c = o // 2
        self.first, self.out = _silu(i, o), _silu((2 + n) * c, o)
        self.blocks = nn.ModuleList(_bottleneck(c, shortcut, 3) for _ in range(n))

    def forward(self, x: Tensor) -> Any:
        parts = list(self.first(x).chunk(2, dim=1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.out(torch.cat(parts, dim=1))


class _Sppf(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b, self.pool = _silu(c, c // 2), _silu(2 * c, c), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        y = self.pool(x)
        z = self.pool(y)
        return self.b(torch.cat((x, y, z, self.pool(z)), dim=1))


class _Yolo(nn.Module):
    """Backbone and path aggregation network that YOLOv5n and YOLOv8n share."""

    def __init__(self, block: Callable[..., nn.Module], stem: int, squeezed: bool) -> None:
        super().__init__()
        c = (16, 32, 64, 128, 256)
        layers: list[nn.Module] = [_cna(3, c[0], stem, 2, act=nn.SiLU)]
        for (i, o), n in zip(itertools.pairwise(c), (1, 2, 3 if squeezed else 2, 1), strict=True):
            layers += [_silu(i, o, 3, 2), block(o, o, n)]
        self.p3, self.p4 = nn.Sequential(*layers[:5]), nn.Sequential(*layers[5:7])
        self.p5 = nn.Sequential(*layers[7:], _Sppf(256))
        self.s5: nn.Module = _silu(256, 128) if squeezed else nn.Identity()
        self.s4: nn.Module = _silu(128, 64) if squeezed else nn.Identity()
        wide = 128 if squeezed else 256
        self.up = nn.Upsample(scale_factor=2.0)
        self.t4 = block(wide + 128, 128, 1, False)
        narrow = 64 if squeezed else 128
        self.t3 = block(narrow + 64, 64, 1, False)
        self.d3, self.b4 = _silu(64, 64, 3, 2), block(64 + narrow, 128, 1, False)
        self.d4, self.b5 = _silu(128, 128, 3, 2), block(128 + wide, 256, 1, False)

    def features(self, x: Tensor) -> list[Tensor]:
        p3 = self.p3(x)
        p4 = self.p4(p3)
        p5 = self.s5(self.p5(p4))
        t4 = self.s4(self.t4(torch.cat((self.up(p5), p4), dim=1)))
        n3 = self.t3(torch.cat((self.up(t4), p3), dim=1))
        n4 = self.b4(torch.cat((self.d3(n3), t4), dim=1))
        return [n3, n4, self.b5(torch.cat((self.d4(n4), p5), dim=1))]


def _grid(size: int, offset: float) -> Tensor:
    y, x = torch.meshgrid(*[torch.arange(size) + offset] * 2, indexing="ij")
    return torch.stack((x, y), dim=-1)


@_py("yolov5", _image(3, 320, 320))
class _YoloV5(_Yolo):
    """YOLOv5n at 320x320 with its boxes (Ultralytics 2020)."""

    def __init__(self) -> None:
        super().__init__(_C3, 6, squeezed=True)
        first: Any = self.p3[0]
        first[0] = nn.Conv2d(3, 16, 6, 2, 2, bias=False)
        self.heads = nn.ModuleList(nn.Conv2d(c, 255, 1) for c in (64, 128, 256))
        for i, (stride, size) in enumerate(((8, 40), (16, 20), (32, 10))):
            self.register_buffer(f"grid{i}", _grid(size, -0.5))
            anchors = torch.tensor([[1.25, 1.6], [2.0, 3.75], [4.1, 2.9]]) * stride
            self.register_buffer(f"anchors{i}", anchors.view(1, 3, 1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for i, (head, y) in enumerate(zip(self.heads, self.features(x), strict=True)):
            b, _, h, w = y.shape
            z = head(y).view(b, 3, 85, h, w).permute(0, 1, 3, 4, 2).contiguous()
            xy, wh, conf = torch.sigmoid(z).split((2, 2, 81), dim=4)
            xy = (xy * 2 + getattr(self, f"grid{i}")) * (8 << i)
            wh = (wh * 2) ** 2 * getattr(self, f"anchors{i}")
            out.append(torch.cat((xy, wh, conf), dim=4).view(b, -1, 85))
        return torch.cat(out, dim=1)


@_py("yolov8", _image(3, 320, 320))
class _YoloV8(_Yolo):
    """YOLOv8n at 320x320 with its boxes, a softmax over 16 distances (Ultralytics 2023)."""

    anchors: Tensor
    strides: Tensor

    def __init__(self) -> None:
        super().__init__(_C2f, 3, squeezed=False)
        sizes = (64, 128, 256)
        self.boxes = nn.ModuleList(
            nn.Sequential(_silu(c, 64, 3), _silu(64, 64, 3), nn.Conv2d(64, 64, 1)) for c in sizes
        )
        self.classes = nn.ModuleList(
            nn.Sequential(_silu(c, 80, 3), _silu(80, 80, 3), nn.Conv2d(80, 80, 1)) for c in sizes
        )
        self.dfl = nn.Conv2d(16, 1, 1, bias=False)
        grids = [_grid(s, 0.5).view(-1, 2) for s in (40, 20, 10)]
        self.register_buffer("anchors", torch.cat(grids).t()[None].contiguous())
        strides = [torch.full((len(g),), 8.0 * 2**i) for i, g in enumerate(grids)]
        self.register_buffer("strides", torch.cat(strides))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.features(x)
        b = x.shape[0]
        both = zip(self.boxes, self.classes, maps, strict=True)
        y = torch.cat([torch.cat((f(m), g(m)), 1).view(b, 144, -1) for f, g, m in both], dim=2)
        box, scores = y.split((64, 80), dim=1)
        distances = torch.softmax(box.view(b, 4, 16, -1).transpose(2, 1), dim=1)
        near, far = self.dfl(distances).view(b, 4, -1).chunk(2, dim=1)
        low, high = self.anchors - near, self.anchors + far
        boxes = torch.cat(((low + high) / 2, high - low), dim=1) * self.strides
        return torch.cat((boxes, torch.sigmoid(scores)), dim=1)


@_py("retinanet_head", _image(3, 192, 192))
class _RetinaNet(nn.Module):
    """ResNet-18, feature pyramid and the heads of RetinaNet, 128 channels (Lin et al. 2017)."""

    def __init__(self, c: int = 128) -> None:
        super().__init__()
        self.body = _Pyramid(64, 128, 256, 512)
        self.sides = nn.ModuleList(nn.Conv2d(i, c, 1) for i in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(3))
        self.classes, self.boxes = self._head(c, 9 * 20), self._head(c, 9 * 4)

    @staticmethod
    def _head(c: int, o: int) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(c, c, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(c, o, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = [side(y) for side, y in zip(self.sides, self.body(x)[1:], strict=True)]
        for i in (1, 0):
            maps[i] = maps[i] + F.interpolate(maps[i + 1], size=maps[i].shape[-2:])
        maps = [smooth(y) for smooth, y in zip(self.smooth, maps, strict=True)]
        b = x.shape[0]
        classes = [self.classes(y).permute(0, 2, 3, 1).reshape(b, -1, 20) for y in maps]
        boxes = [self.boxes(y).permute(0, 2, 3, 1).reshape(b, -1, 4) for y in maps]
        return torch.sigmoid(torch.cat(classes, dim=1)), torch.cat(boxes, dim=1)


def _resize(x: Tensor, size: Sequence[int] | torch.Size) -> Tensor:
    return F.interpolate(x, size=list(size), mode="bilinear", align_corners=False)


def _dilated() -> nn.Module:
    """A backbone of stride 8."""
    return nn.Sequential(
        *(_cna(3, 32, 3, 2), _basic(32, 32), _basic(32, 64, 2), _basic(64, 64)),
        *(_basic(64, 128, 2), _basic(128, 128, d=2), _basic(128, 128, d=4)),
    )


@_py("deeplab_aspp", _image(3, 192, 192))
class _DeepLab(nn.Module):
    """Atrous spatial pyramid pooling of DeepLabv3 on a small backbone (Chen et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _dilated()
        convs = [_cna(128, 64, 1), *(_cna(128, 64, d=d) for d in (6, 12, 18))]
        self.convs = nn.ModuleList(convs)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), _cna(128, 64, 1))
        self.head = nn.Sequential(_cna(320, 64, 1), _cna(64, 64), nn.Conv2d(64, 21, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        parts = [conv(y) for conv in self.convs]
        parts.append(_resize(self.pool(y), y.shape[-2:]))
        return _resize(self.head(torch.cat(parts, dim=1)), x.shape[-2:])


@_py("pspnet", _image(3, 192, 192))
class _PspNet(nn.Module):
    """Pyramid pooling of PSPNet on a small backbone (Zhao et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _dilated()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(n), _cna(128, 32, 1)) for n in (1, 2, 3, 6)
        )
        self.head = nn.Sequential(_cna(256, 64), nn.Conv2d(64, 19, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        parts = [y, *(_resize(pool(y), y.shape[-2:]) for pool in self.pools)]
        return _resize(self.head(torch.cat(parts, dim=1)), x.shape[-2:])


class _Refine(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv = _cna(i, o)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), _cna(o, o, 1, act=None), nn.Sigmoid())

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return y * self.gate(y)


@_py("bisenet", _image(3, 256, 256))
class _BiSeNet(nn.Module):
    """BiSeNet: a spatial and a context path (Yu et al. 2018), small."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Sequential(
            _cna(3, 64, 7, 2), _cna(64, 64, 3, 2), _cna(64, 64, 3, 2), _cna(64, 128, 1)
        )
        self.context = _Pyramid(32, 64, 128, 256)
        self.r16, self.r32 = _Refine(128, 128), _Refine(256, 128)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), _cna(256, 128, 1))
        self.h16, self.h32 = _cna(128, 128), _cna(128, 128)
        self.fuse = _cna(256, 256, 1)
        self.gate = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(256, 64, 1), nn.ReLU()),
            *(nn.Conv2d(64, 256, 1), nn.Sigmoid()),
        )
        self.out = nn.Sequential(_cna(256, 64), nn.Conv2d(64, 19, 1))

    def forward(self, x: Tensor) -> Tensor:
        s = self.spatial(x)
        _, _, c16, c32 = self.context(x)
        y = self.r32(c32) + self.pool(c32)
        y = self.h32(F.interpolate(y, size=c16.shape[-2:]))
        y = self.h16(F.interpolate(self.r16(c16) + y, size=s.shape[-2:]))
        f = self.fuse(torch.cat((s, y), dim=1))
        return _resize(self.out(f + f * self.gate(f)), x.shape[-2:])


def _preactivated(i: int, o: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b, k in ((i, o // 2, 1), (o // 2, o // 2, 3), (o // 2, o, 1)):
        layers += [nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, k, padding=k // 2)]
    return _Residual(nn.Sequential(*layers), nn.Conv2d(i, o, 1) if i != o else None)


class _Hourglass(nn.Module):
    def __init__(self, depth: int, c: int) -> None:
        super().__init__()
        self.side, self.down, self.up = (_preactivated(c, c) for _ in range(3))
        self.inner = _Hourglass(depth - 1, c) if depth > 1 else _preactivated(c, c)

    def forward(self, x: Tensor) -> Any:
        y = self.up(self.inner(self.down(F.max_pool2d(x, 2))))
        return self.side(x) + F.interpolate(y, scale_factor=2.0, mode="nearest")


@_py("handpose", _image(3, 128, 128))
def _handpose() -> nn.Module:
    """One stacked hourglass for 21 joints of a hand (Newell et al. 2016)."""
    return nn.Sequential(
        *(_cna(3, 64, 7, 2), _preactivated(64, 128), nn.MaxPool2d(2), _preactivated(128, 128)),
        *(_Hourglass(4, 128), _preactivated(128, 128), _cna(128, 128, 1), nn.Conv2d(128, 21, 1)),
    )


@_py("pose_lite", _image(3, 256, 192))
def _pose_lite() -> nn.Module:
    """MobileNetV2 and three transposed convolutions, 17 joints (Xiao et al. 2018)."""
    body = _models.load_torchvision().models.mobilenet_v2(weights=None).features
    layers: list[nn.Module] = []
    for i, o in ((1280, 64), (64, 64), (64, 64)):
        layers += [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(body, *layers, nn.Conv2d(64, 17, 1))


@_py("ocr_east", _image(3, 256, 256))
class _East(nn.Module):
    """EAST for text in scenes: merged maps, a score, distances, an angle (Zhou et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _Pyramid(32, 64, 128, 256)
        self.merge = nn.ModuleList(
            nn.Sequential(_cna(i, o, 1), _cna(o, o)) for i, o in ((384, 128), (192, 64), (96, 32))
        )
        self.last = _cna(32, 32)
        self.score, self.distance, self.angle = (nn.Conv2d(32, n, 1) for n in (1, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        *maps, y = self.body(x)
        for merge, before in zip(self.merge, reversed(maps), strict=True):
            y = F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True)
            y = merge(torch.cat((y, before), dim=1))
        y = self.last(y)
        distance = torch.sigmoid(self.distance(y)) * 512
        angle = (torch.sigmoid(self.angle(y)) - 0.5) * math.pi
        return torch.sigmoid(self.score(y)), torch.cat((distance, angle), dim=1)


# ----------------------------------------------------------------------------------- transformers


class _Kind(NamedTuple):
    """A configuration and a model class of transformers, by their names."""

    config: str
    model: str
    arguments: dict[str, Any]
    sources: dict[str, Source]  # by the parameter's name
    calibrated: bool = True


def _text(model: str, vocabulary: int, /, **arguments: Any) -> _Kind:
    sources = {"input_ids": _ids(vocabulary, 128), "attention_mask": _ones(128)}
    return _Kind(model.removesuffix("Model") + "Config", model, arguments, sources)


def _decoder(model: str, vocabulary: int = 32000, /, **arguments: Any) -> _Kind:
    return _text(model, vocabulary, vocab_size=vocabulary, **arguments)


def _vision(model: str, size: int = 224, **arguments: Any) -> _Kind:
    sources = {"pixel_values": _image(3, size, size)}
    return _Kind(model.removesuffix("Model") + "Config", model, arguments, sources)


def _both(model: str, vocabulary: int, /, **arguments: Any) -> _Kind:
    sources = {"input_ids": _ids(vocabulary, 128), "decoder_input_ids": _ids(vocabulary, 32)}
    return _Kind(model.removesuffix("Model") + "Config", model, arguments, sources)


_SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1408,
}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4}
_SEQ4: dict[str, Any] = {"encoder_layers": 4, "decoder_layers": 4}
_T5: dict[str, Any] = {"d_model": 512, "num_layers": 4, "num_decoder_layers": 4}

_HF: dict[str, _Kind] = {
    "albert": _text(
        *("AlbertModel", 30000),
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        num_hidden_layers=4,
    ),
    "ast": _Kind(
        *("ASTConfig", "ASTModel", {**_FOUR, "max_length": 256}),
        {"input_values": _normal(256, 128)},
    ),
    "bart": _both(
        "BartModel",
        50265,
        **{**_SEQ4, "d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
        encoder_attention_heads=12,
        decoder_attention_heads=12,
    ),
    "beit": _vision("BeitModel", **_FOUR, use_relative_position_bias=True),
    "bert": _text("BertModel", 30522),
    "bigbird": _text("BigBirdModel", 50358, attention_type="original_full", **_FOUR),
    "bit": _vision("BitModel"),
    "blenderbot": _both(
        *("BlenderbotModel", 8008),
        encoder_layers=2,
        decoder_layers=4,
        d_model=640,
        max_position_embeddings=128,
        encoder_ffn_dim=2560,
        decoder_ffn_dim=2560,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
    ),
    "blip_vision": _vision("BlipVisionModel", **_FOUR, image_size=224),
    "bloom": _decoder("BloomModel", hidden_size=512, n_layer=4, n_head=8),
    "camembert": _text("CamembertModel", 30522, **_FOUR),
    "canine": _text("CanineModel", 1000, num_hidden_layers=4),
    "clip": _Kind(
        *("CLIPConfig", "CLIPModel", {"text_config": {**_FOUR}, "vision_config": {**_FOUR}}),
        {"input_ids": _ids(49406, 77), "pixel_values": _image(3, 224, 224)},
    ),
    "clip_text": _Kind(
        *("CLIPTextConfig", "CLIPTextModel", {**_FOUR}),
        {"input_ids": _ids(49406, 77), "attention_mask": _ones(77)},
    ),
    "clip_vision": _vision("CLIPVisionModel", num_hidden_layers=4),
    "codegen": _decoder("CodeGenModel", n_embd=512, n_layer=4, n_head=8, rotary_dim=32),
    "cohere": _decoder("CohereModel", **_SMALL),
    "conditional_detr": _Kind(
        "ConditionalDetrConfig",
        "ConditionalDetrModel",
        {"use_timm_backbone": False, "backbone": None, "encoder_layers": 3, "decoder_layers": 3},
        {"pixel_values": _image(3, 320, 320)},
    ),
    "convbert": _text("ConvBertModel", 30522, **_FOUR),
    "convnextv2": _vision("ConvNextV2Model", hidden_sizes=[48, 96, 192, 384]),
    "cvt": _vision("CvtModel", embed_dim=[64, 192, 384], depth=[1, 2, 4]),
    "data2vec_vision": _vision("Data2VecVisionModel", **_FOUR, use_relative_position_bias=True),
    "deberta": _text(
        "DebertaModel", 50265, **_FOUR, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "deberta2": _text(
        *("DebertaV2Model", 32000),
        vocab_size=32000,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        num_hidden_layers=4,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=256,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "deit": _vision("DeiTModel", **_FOUR),
    "detr": _Kind(
        "DetrConfig",
        "DetrModel",
        {"use_timm_backbone": False, "backbone": None, "encoder_layers": 3, "decoder_layers": 3},
        {"pixel_values": _image(3, 320, 320)},
    ),
    "dinov2": _vision("Dinov2Model", **_FOUR, image_size=224),
    "dinov3": _vision("DINOv3ViTModel", **{**_FOUR, "hidden_size": 384, "num_attention_heads": 6}),
    "distilbert": _text("DistilBertModel", 30522),
    "dpt": _vision(
        *("DPTForDepthEstimation", 224), **_FOUR, backbone_out_indices=[0, 1, 2, 3], image_size=224
    )._replace(config="DPTConfig"),
    "electra": _text("ElectraModel", 30522),
    "ernie": _text("ErnieModel", 18000, vocab_size=18000, **_FOUR),
    "esm": _text(
        *("EsmModel", 33), vocab_size=33, pad_token_id=1, position_embedding_type="rotary", **_FOUR
    ),
    "falcon": _decoder("FalconModel", hidden_size=512, num_hidden_layers=4, num_attention_heads=8),
    "fnet": _Kind(
        "FNetConfig", "FNetModel", {**_FOUR, "vocab_size": 32000}, {"input_ids": _ids(32000, 128)}
    ),
    "focalnet": _vision("FocalNetModel", depths=[2, 2, 2, 2]),
    "funnel": _text("FunnelModel", 30522, block_sizes=[2, 2, 2]),
    "gemma": _decoder("GemmaModel", **_SMALL, num_key_value_heads=1, head_dim=64),
    "gemma2": _decoder("Gemma2Model", **_SMALL, num_key_value_heads=4, head_dim=64),
    "gemma3": _decoder("Gemma3TextModel", **_SMALL, num_key_value_heads=4, head_dim=64),
    "glm": _decoder("GlmModel", **_SMALL, num_key_value_heads=2, head_dim=64, pad_token_id=0),
    "glpn": _vision("GLPNForDepthEstimation")._replace(config="GLPNConfig"),
    "gpt2": _text("GPT2Model", 50257, n_layer=6),
    "gpt_bigcode": _decoder("GPTBigCodeModel", n_embd=512, n_layer=4, n_head=8),
    "gpt_neo": _decoder(
        *("GPTNeoModel", 32000),
        hidden_size=512,
        num_layers=4,
        num_heads=8,
        attention_types=[[["global", "local"], 2]],
    ),
    "gpt_neox": _decoder("GPTNeoXModel", **{**_SMALL, "intermediate_size": 2048}),
    "gptj": _decoder("GPTJModel", n_embd=512, n_layer=4, n_head=8, rotary_dim=64),
    "granite": _decoder("GraniteModel", **_SMALL),
    "hiera": _vision("HieraModel", depths=[1, 2, 2, 2]),
    "hubert": _Kind("HubertConfig", "HubertModel", {**_FOUR}, {"input_values": _normal(16000)}),
    "layoutlm": _Kind(
        *("LayoutLMConfig", "LayoutLMModel", {**_FOUR}),
        {"input_ids": _ids(30522, 128), "bbox": _ids(1, 128, 4)},
    ),
    "levit": _vision("LevitModel"),
    "lfm2": _decoder("Lfm2Model", **_SMALL),
    "llama": _decoder("LlamaModel", **_SMALL),
    "longformer": _text("LongformerModel", 50265, attention_window=64, **_FOUR),
    "mamba": _decoder("MambaModel", hidden_size=512, num_hidden_layers=4),
    "marian": _both(
        "MarianModel",
        32000,
        **{**_SEQ4, "d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048},
        vocab_size=32000,
        pad_token_id=0,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
    ),
    "minilm": _text(
        *("BertModel", 30522),
        hidden_size=384,
        num_attention_heads=12,
        intermediate_size=1536,
    ),
    "mistral": _decoder("MistralModel", **_SMALL, num_key_value_heads=4),
    "mobilebert": _text("MobileBertModel", 30522, num_hidden_layers=12),
    "mobilenet_v1": _vision("MobileNetV1Model"),
    "mobilevit": _vision("MobileViTModel", 256),
    "mobilevitv2": _vision("MobileViTV2Model", 256),
    "modernbert": _text("ModernBertModel", 50368, **_FOUR),
    "moonshine": _Kind(
        *("MoonshineConfig", "MoonshineModel"),
        {"encoder_num_hidden_layers": 4, "decoder_num_hidden_layers": 4},
        {"input_values": _normal(16000), "decoder_input_ids": _ids(30000, 16)},
    ),
    "mpnet": _text("MPNetModel", 30527, **_FOUR),
    "mpt": _decoder("MptModel", d_model=512, n_heads=8, n_layers=4),
    "mt5": _both("MT5Model", 32000, **_T5, vocab_size=32000, d_ff=1024, num_heads=6)._replace(
        calibrated=False
    ),
    "nemotron": _decoder("NemotronModel", **_SMALL, num_key_value_heads=8),
    "nystromformer": _text("NystromformerModel", 30000, **_FOUR),
    "olmo2": _decoder("Olmo2Model", **_SMALL),
    "opt": _decoder(
        "OPTModel",
        32000,
        **{**_FOUR, "hidden_size": 512, "ffn_dim": 2048, "num_attention_heads": 8},
        word_embed_proj_dim=512,
    ),
    "owlvit_vision": _vision("OwlViTVisionModel", **_FOUR, image_size=224),
    "patchtsmixer": _Kind(
        *("PatchTSMixerConfig", "PatchTSMixerModel"),
        {"num_input_channels": 7, "context_length": 512, "patch_length": 16, "patch_stride": 8},
        {"past_values": _normal(512, 7)},
    ),
    "patchtst": _Kind(
        *("PatchTSTConfig", "PatchTSTModel"),
        {"num_input_channels": 7, "context_length": 512, "patch_length": 16, "patch_stride": 8},
        {"past_values": _normal(512, 7)},
    ),
    "phi": _decoder("PhiModel", **{**_SMALL, "intermediate_size": 2048}),
    "phi3": _decoder("Phi3Model", **_SMALL, pad_token_id=0),
    "poolformer": _vision("PoolFormerModel"),
    "pvt": _vision("PvtModel"),
    "pvt_v2": _vision("PvtV2Model"),
    "qwen2": _decoder("Qwen2Model", **_SMALL, num_key_value_heads=2),
    "qwen3": _decoder("Qwen3Model", **_SMALL, num_key_value_heads=2, head_dim=64),
    "rembert": _text("RemBertModel", 30000, vocab_size=30000, **_SMALL),
    "roberta": _text("RobertaModel", 50265, **_FOUR),
    "roformer": _text("RoFormerModel", 30522, vocab_size=30522, **_FOUR),
    "rt_detr": _Kind(*("RTDetrConfig", "RTDetrModel", {}), {"pixel_values": _image(3, 320, 320)}),
    "sam_vision": _vision(
        "SamVisionModel", 256, **_FOUR, image_size=256, global_attn_indexes=[1, 3]
    ),
    "segformer": _vision("SegformerModel"),
    "sew": _Kind("SEWConfig", "SEWModel", {**_FOUR}, {"input_values": _normal(16000)}),
    "siglip_vision": _vision("SiglipVisionModel", **_FOUR),
    "squeezebert": _text("SqueezeBertModel", 30522, **_FOUR),
    "stablelm": _decoder("StableLmModel", **_SMALL, num_key_value_heads=8),
    "starcoder2": _decoder("Starcoder2Model", **_SMALL),
    "swin2sr": _vision("Swin2SRModel", 64, depths=[2, 2], num_heads=[6, 6]),
    "swinv2": _vision("Swinv2Model", depths=[2, 2, 2, 2]),
    "t5": _both("T5Model", 32000, **_T5, vocab_size=32000)._replace(calibrated=False),
    "timesformer": _Kind(
        *("TimesformerConfig", "TimesformerModel", {**_FOUR, "num_frames": 4}),
        {"pixel_values": _normal(4, 3, 224, 224)},
    ),
    "upernet": _vision("UperNetForSemanticSegmentation")._replace(config="UperNetConfig"),
    "videomae": _Kind(
        *("VideoMAEConfig", "VideoMAEModel", {**_FOUR, "num_frames": 4}),
        {"pixel_values": _normal(4, 3, 224, 224)},
    ),
    "vit": _vision("ViTModel", **_FOUR),
    "vitdet": _vision("VitDetModel", **_FOUR),
    "vivit": _Kind(
        *("VivitConfig", "VivitModel", {**_FOUR, "num_frames": 8}),
        {"pixel_values": _normal(8, 3, 224, 224)},
    ),
    "wav2vec2": _Kind(
        "Wav2Vec2Config", "Wav2Vec2Model", {**_FOUR}, {"input_values": _normal(16000)}
    ),
    "wav2vec2_conformer": _Kind(
        *("Wav2Vec2ConformerConfig", "Wav2Vec2ConformerModel", {**_FOUR}),
        {"input_values": _normal(16000)},
    ),
    "wavlm": _Kind("WavLMConfig", "WavLMModel", {**_FOUR}, {"input_values": _normal(16000)}),
    "whisper": _Kind(
        *("WhisperConfig", "WhisperModel"),
        {"max_source_positions": 250},  # 5 seconds, not 30
        {"input_features": _normal(80, 500), "decoder_input_ids": _ids(50000, 16)},
    ),
    "xlnet": _text("XLNetModel", 32000, n_layer=4, d_model=768, n_head=12, d_inner=3072),
    "yolos": _vision("YolosModel", image_size=[224, 224], num_detection_tokens=100, **_FOUR),
}


class _Wrapped(nn.Module):
    """The first result of a transformers model, by the names of its parameters."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)
        self.extra: dict[str, Any] = {"return_dict": False}
        if "use_cache" in inspect.signature(model.forward).parameters:
            self.extra["use_cache"] = False

    def call(self, *inputs: Tensor) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)), **self.extra)[0]


class _One(_Wrapped):
    def forward(self, x: Tensor) -> Any:
        return self.call(x)


class _Two(_Wrapped):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.call(x, y)


def _hf(kind: _Kind, attention: str | None) -> nn.Module:
    _models.load_torchvision()  # which transformers imports
    import transformers

    config = getattr(transformers, kind.config)(**kind.arguments)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if attention is not None:
        config._attn_implementation = attention
    model = getattr(transformers, kind.model)(config)
    return (_One if len(kind.sources) == 1 else _Two)(model, list(kind.sources))


def _timm(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    _models.load_torchvision()  # which timm imports
    import timm

    name, _, size = name.partition("@")
    module: Any
    if not size:
        module = timm.create_model(name, pretrained=False)
        return module, tuple(module.default_cfg["input_size"])
    try:
        module = timm.create_model(name, pretrained=False, img_size=int(size))
    except TypeError:  # it takes any
        module = timm.create_model(name, pretrained=False)
    return module, (3, int(size), int(size))


# ------------------------------------------------------------------------------------------ build


def _linear(sizes: str) -> tuple[nn.Module, tuple[Source, ...]]:
    rows, i, o = map(int, sizes.split("x"))
    # A batch of more is more rows.
    return nn.Sequential(nn.Linear(i, o), nn.ReLU()), (
        lambda batch, seed: torch.randn(batch * rows, i, generator=_generator(seed)),
    )


def _make(spec: str) -> tuple[nn.Module, tuple[Source, ...], bool]:
    """The module, its inputs, and whether it shall be calibrated."""
    torch.manual_seed(0)
    group, _, name = spec.partition(":")
    if group == "py" and name in _PY:
        entry = _PY[name]
        return entry.make(), entry.sources, entry.calibrated
    if group == "hf" and name.partition(":")[0] in _HF:
        kind = _HF[name.partition(":")[0]]
        attention = name.partition(":")[2] or None
        return _hf(kind, attention), tuple(kind.sources.values()), kind.calibrated
    if group == "timm":
        module, shape = _timm(name)
        return module, (_image(*shape),), True
    if group == "lin":
        return *_linear(name), True
    raise _models.ModelError(f"unknown network {spec!r}")


def _moderate(output: Any) -> bool:
    """Finite, and not blown up by channels that the samples hardly met."""
    if isinstance(output, Tensor):
        return bool((output.abs() < 1e6).all())
    return all(_moderate(x) for x in output)


def build(spec: str) -> Network:
    """Builds a network; see the top of the file for the specs.

    Raises:
        ModelError: the spec is unknown.
    """
    if ":" not in spec:
        known = _models.build(spec)
        return Network(spec, known.module, known.inputs)
    module, sources, calibrated = _make(spec)

    def inputs(batch: int, seed: int) -> tuple[Tensor, ...]:
        return tuple(source(batch, seed + 100 * i) for i, source in enumerate(sources))

    module.eval()
    if calibrated:
        try:
            with torch.no_grad():
                _models.randomize(module)
                # Statistics over the batch alone need many samples.
                size = inputs(1, 1)[0].numel() if spec.startswith("py:") else 1 << 20
                sample = inputs(32 if size < 4096 else 16 if size < 20000 else 4, 1)
                _models.calibrate(module, sample)
                fine = _moderate([module(*sample), module(*inputs(2, 2))])
        except Exception:  # of whatever kind: hooks may be left
            fine = False
        if not fine:
            module = _make(spec)[0].eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return Network(spec, module, inputs)


# Those of timm that are worth a look are listed; any other works as well.
_TIMM = (
    *("beitv2_base_patch16_224", "cait_xxs24_224", "coat_lite_tiny", "coatnet_0_rw_224"),
    *("convit_tiny", "convmixer_768_32", "convnext_tiny", "convnextv2_nano", "crossvit_9_240"),
    *("cspdarknet53", "cspresnet50", "davit_tiny", "deit3_small_patch16_224", "densenet121"),
    *("dla34", "dm_nfnet_f0", "dpn68", "edgenext_small", "efficientformer_l1"),
    *("efficientformerv2_s0", "efficientnet_b0", "efficientnet_lite0", "efficientvit_b0"),
    *("efficientvit_m2", "eva02_tiny_patch14_224", "fastvit_t8", "fbnetc_100", "focalnet_tiny_srf"),
    *("gcvit_xxtiny", "gernet_s", "ghostnet_100", "ghostnetv2_100", "gmixer_24_224"),
    *("gmlp_s16_224", "halonet26t", "hardcorenas_a", "hgnetv2_b0", "hiera_tiny_224"),
    *("hrnet_w18_small", "inception_v4", "lambda_resnet26t", "lcnet_050"),
    *("legacy_seresnet18", "levit_128", "maxvit_tiny_rw_224", "mixer_b16_224", "mixnet_s"),
    *("mobilenetv4_conv_small", "mobileone_s0", "mobilevit_s", "mobilevitv2_050", "mvitv2_tiny"),
    *("nest_tiny", "nf_resnet50", "pit_s_224", "poolformer_s12", "pvt_v2_b0"),
    *("regnety_002", "repghostnet_050", "repvgg_a0", "repvit_m0_9", "res2net50_26w_4s"),
    *("resmlp_12_224", "resnest14d", "resnet26d", "resnetv2_50", "rexnet_100", "seresnet18"),
    *(
        "selecsls42b",
        "sequencer2d_s",
        "skresnet18",
        "swiftformer_xs",
        "swin_tiny_patch4_window7_224",
    ),
    *("swinv2_tiny_window8_256", "tiny_vit_5m_224", "tinynet_a", "tnt_s_patch16_224"),
    *("tresnet_m", "twins_svt_small", "vgg11_bn", "visformer_tiny", "vit_small_patch16_224"),
    *("volo_d1_224", "vovnet39a", "xception41", "xcit_nano_12_p16_224"),
)
NAMES: dict[str, tuple[str, ...]] = {
    "py": tuple(f"py:{name}" for name in sorted(_PY)),
    "hf": tuple(f"hf:{name}" for name in _HF),
    "timm": tuple(f"timm:{name}" for name in _TIMM),
    "lin": ("lin:1x1024x1024", "lin:128x768x3072", "lin:1024x256x256"),
}


if __name__ == "__main__":
    for group in NAMES.values():
        print(*group, sep="\n")
