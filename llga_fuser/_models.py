"""Networks by name, with random weights under which a wrong number shows; and those of others.

Freshly initialised networks are degenerate: BatchNorm statistics of 0 and 1, activations that grow
or vanish with depth, layer scales of 1e-6, uniform attention, and after global pooling an output
that hardly depends on the input. `build` measures instead: one pass over random inputs sets each
layer's scale and each BatchNorm's statistics, and centres the classifier.

Imports nothing of the package, so that a process without the fuser can load this file alone.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import itertools
import pathlib
import sys
import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Model",
    "ModelError",
    "build",
    "from_file",
    "from_function",
    "is_file",
    "is_function",
    "load_torchvision",
]

_library: Any = None  # the definitions live as long as this


class ModelError(ValueError):
    """The name is unknown, or the model cannot be built; the message is for the user."""


class Model(NamedTuple):
    """A module in evaluation mode, and what to feed it."""

    name: str
    module: nn.Module
    inputs: Callable[[int, int], tuple[Tensor, ...]]  # batch, seed
    size: str  # of one input, for people


# ------------------------------------------------------------------------------------ small ones


def _mlp() -> nn.Module:
    sizes = (256, 256, 256, 256)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _tinyconv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def _conv_relu() -> nn.Module:
    """One fusion group that computes next to nothing: what is left is the cost of the call."""
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())


class _Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(), add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.bert(input_ids=ids, attention_mask=mask, return_dict=False)[0]


class _Gpt2(nn.Module):
    """The first step of generation: the scores of the token that comes after a prompt."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt2 = GPT2LMHeadModel(GPT2Config(use_cache=False))

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        out = self.gpt2(
            input_ids=ids,
            attention_mask=mask,
            use_cache=False,
            return_dict=False,
            logits_to_keep=1,
        )
        return out[0][:, -1]


class _UNet(nn.Module):
    """U-Net with BatchNorm and transposed convolutions, of 32 to 512 channels.

    Ronneberger, Fischer, Brox 2015, in the size that is widely used for 256x256 images (Buda,
    Saha, Mazurowski 2019): four steps down, four up, each joined with what was there before.
    """

    def __init__(self, width: int = 32, classes: int = 1) -> None:
        super().__init__()
        sizes = [width << i for i in range(5)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in itertools.pairwise((3, *sizes)))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * b, b, 2, stride=2) for b in reversed(sizes[:-1])
        )
        self.join = nn.ModuleList(self._block(2 * b, b) for b in reversed(sizes[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.out = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(channels: int, out: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        before = []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            before.append(x)
        before.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), before.pop()), dim=1))
        return torch.sigmoid(self.out(x))


class _Output(nn.Module):
    """The "out" entry of a segmentation network's dictionary."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)["out"]


# ------------------------------------------------------------------------------------ torchvision


def load_torchvision() -> Any:
    """Imports torchvision, also where its C++ operators do not load.

    A torchvision built for another variant of torch (CUDA beside a CPU one) cannot load them, and
    its import then stops at the first one it looks up. The networks need none of them: the schemas
    will do.
    """
    global _library
    if "torchvision" not in sys.modules:
        spec = importlib.util.find_spec("torchvision")
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                "torchvision is not installed: python -m pip install torchvision==0.28.0"
            )
        for extension in pathlib.Path(spec.submodule_search_locations[0]).glob("_C*.so"):
            try:
                torch.ops.load_library(str(extension))
            except OSError:
                continue
        if not hasattr(torch.ops.torchvision, "nms"):
            _library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                _library.define(
                    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
    import torchvision

    return torchvision


ALIASES = {"lraspp": "lraspp_mobilenet_v3_large"}
# Constructor arguments: no heads for training, no slow initialisation that is overwritten anyway.
_EXTRA: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
}
# Networks that are built for one image size.
_SIZE_ARGUMENT = {"vit": "image_size", "maxvit": "input_size"}


def _torchvision(name: str, image_size: int | None) -> tuple[nn.Module, tuple[int, ...]]:
    models = load_torchvision().models
    everything = models.list_models()
    name = ALIASES.get(name, name)
    if name not in everything:
        close = difflib.get_close_matches(
            name, [*everything, *_SMALL, *_TRANSFORMERS, "unet"], 3, 0.65
        )
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"unknown model {name!r}{hint}")
    family = models.get_model_builder(name).__module__.split(".")
    if any(f in family for f in ("detection", "quantization", "optical_flow")):
        raise ModelError(f"{name}: only classification, segmentation and video models can be run")

    preset = models.get_model_weights(name).DEFAULT.transforms()
    crop = getattr(preset, "crop_size", None) or preset.resize_size
    size = image_size or int(crop[0])
    arguments = dict(_EXTRA.get(name, {}))
    for prefix, argument in _SIZE_ARGUMENT.items():
        if name.startswith(prefix) and image_size:
            arguments[argument] = (size, size) if argument == "input_size" else size
    if "segmentation" in family:
        net = _Output(models.get_model(name, weights=None, weights_backbone=None, **arguments))
        return net, (3, size, size)
    net = models.get_model(name, weights=None, **arguments)
    return net, (3, 16, size, size) if "video" in family else (3, size, size)


# ----------------------------------------------------------------------------------------- inputs


def _images(shape: tuple[int, ...]) -> Callable[[int, int], tuple[Tensor, ...]]:
    def make(batch: int, seed: int) -> tuple[Tensor, ...]:
        """Blobs, a colour cast by which images differ after pooling too, and some noise."""
        g = torch.Generator().manual_seed(seed)
        spatial = shape[1:]
        mode = "bilinear" if len(spatial) == 2 else "trilinear"
        coarse = torch.randn(batch, 3, *(max(2, min(s, 6)) for s in spatial), generator=g)
        blobs = F.interpolate(coarse, size=spatial, mode=mode)
        cast = torch.randn(batch, 3, *(1 for _ in spatial), generator=g)
        noise = torch.randn(batch, *shape, generator=g)
        return (blobs + 1.5 * cast + 0.25 * noise,)

    return make


def _vectors(*shape: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    def make(batch: int, seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed)),)

    return make


def _tokens(vocabulary: int, length: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    def make(batch: int, seed: int) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (batch, length), generator=g)
        return ids, torch.ones_like(ids)

    return make


_SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, ...]], str]] = {
    "mlp": (_mlp, _vectors(256), "256"),
    "tinyconv": (_tinyconv, _images((3, 32, 32)), "32x32"),
    "conv_relu": (_conv_relu, _vectors(8, 4, 4), "8x4x4"),
}

_TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and their vocabulary
    "bert-base": (_Bert, 30522),
    "gpt2": (_Gpt2, 50257),
}


# ------------------------------------------------------------------------------------ calibration


def randomize(module: nn.Module) -> None:
    """Parameters whose usual start hides mistakes: norms that do nothing, layers scaled to 1e-6."""
    with torch.no_grad():
        for m in module.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.LayerNorm | nn.GroupNorm):
                # After a BatchNorm comes a ReLU or the like. Centred on 0, a deep random network is
                # chaotic there and blows a rounding error up to the size of the output.
                middle = 1.0 if isinstance(m, nn.modules.batchnorm._BatchNorm) else 0.0
                if isinstance(m.weight, Tensor):
                    m.weight.uniform_(0.6, 1.4)
                if isinstance(m.bias, Tensor):
                    m.bias.uniform_(middle - 0.3, middle + 0.3)
            elif isinstance(m, nn.Linear) and not m.weight.any():  # torchvision's ViT head
                nn.init.xavier_uniform_(m.weight)
        for name, parameter in module.named_parameters():
            if name.endswith("layer_scale"):
                parameter.uniform_(0.2, 0.5)
            elif name.endswith(("in_proj_weight", "qkv.weight", "c_attn.weight")):
                parameter.mul_(2)  # attention that attends to something


def _tied(module: nn.Module) -> list[nn.Module]:
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    return [m for m in module.modules() if isinstance(m, nn.Linear) and id(m.weight) in tables]


def calibrate(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Sets BatchNorm statistics and layer scales by what one pass over `inputs` meets."""
    tied = _tied(module)  # a head that is the embedding too keeps that one's scale
    done: set[nn.Module] = set()
    last: list[nn.Linear] = []

    def measure(m: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(m, nn.modules.batchnorm._BatchNorm)
        if m in done or m.running_mean is None or m.running_var is None:
            return
        done.add(m)
        x = args[0].transpose(0, 1).flatten(1)
        m.running_mean.copy_(x.mean(1))
        m.running_var.copy_(x.var(1).clamp_min(1e-4))

    def scale(m: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(m, nn.Linear | nn.modules.conv._ConvNd)
        if m in tied:
            last.clear()
            return output
        if isinstance(m, nn.Linear):
            last[:] = [m]
        if m in done:
            return output
        done.add(m)
        if isinstance(m, nn.Linear) and isinstance(m.bias, Tensor):
            # What all tokens have in common adds up from block to block, else.
            mean = output.flatten(0, -2).mean(0)
            m.bias.sub_(mean)
            output = output - mean
        std = output.std().clamp_min(1e-3)
        m.weight.div_(std)
        if m.bias is not None:
            m.bias.div_(std)
        return output / std

    handles = []
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            handles.append(m.register_forward_pre_hook(measure))
        elif isinstance(m, nn.Linear | nn.modules.conv._ConvNd):
            handles.append(m.register_forward_hook(scale))
    with torch.no_grad():
        output = module(*inputs)
        for handle in handles:
            handle.remove()
        # A classifier at the end: what all inputs have in common goes, what tells them apart stays.
        if (
            last
            and isinstance(output, Tensor)
            and output.shape == (len(inputs[0]), last[0].out_features)
            and len(output) > 1
        ):
            std = output.std(0).mean().clamp_min(1e-6)
            last[0].weight.div_(std)
            if last[0].bias is not None:
                last[0].bias.sub_(output.mean(0)).div_(std)


def build(
    name: str, image_size: int | None = None, *, seed: int = 0, calibrated: bool = True
) -> Model:
    """Builds a network by name.

    Args:
        name: a torchvision model, or "bert-base", "gpt2", "unet", "mlp", "tinyconv", "conv_relu";
            or "FILE.py:FUNCTION", see `from_function`.
        image_size: height and width; None is the size the published weights were trained for.
        seed: of the weights.
        calibrated: False leaves the weights as they are, for a caller that loads others. Those of a
            function always are.

    Raises:
        ModelError: the name is unknown, or what the model needs is not installed.
    """
    torch.manual_seed(seed)
    if is_function(name):
        if image_size is not None:
            raise ModelError(f"{name}: an image size is for named models, got {image_size}")
        return from_function(name)
    try:
        if name in _SMALL:
            factory, inputs, size = _SMALL[name]
            module = factory()
        elif name in _TRANSFORMERS:
            if importlib.util.find_spec("transformers") is None:
                raise ModelError(f"{name} needs transformers: python -m pip install transformers")
            load_torchvision()  # which transformers imports
            network, vocabulary = _TRANSFORMERS[name]
            module, inputs, size = network(), _tokens(vocabulary, 128), "128 tokens"
        elif name == "unet":
            pixels = image_size or 256
            if pixels % 16:
                raise ModelError(f"unet: the image size has to be a multiple of 16, got {pixels}")
            module, size = _UNet(), f"{pixels}x{pixels}"
            inputs = _images((3, pixels, pixels))
        else:
            module, shape = _torchvision(name, image_size)
            inputs, size = _images(shape), "x".join(map(str, shape[1:]))
    except (ValueError, RuntimeError, TypeError, ImportError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{name}: {str(error).strip().splitlines()[0]}") from error
    module.eval()
    if calibrated:
        randomize(module)
        # Enough images for statistics, not more pixels than eight of the common size.
        first = inputs(1, 0)[0]
        batch = max(2, min(8, 8 * 3 * 224 * 224 // first.numel()))
        calibrate(module, inputs(batch, seed + 1))
    return Model(name, module, inputs, size)


# ------------------------------------------------------------------------------------------ files


def is_file(name: str) -> bool:
    """Whether this means a file of torch.jit.save, and not a network by name."""
    return name.endswith((".pt", ".pth", ".ts", ".zip")) or pathlib.Path(name).exists()


def is_function(name: str) -> bool:
    """Whether this means a function in a file of Python's, as "FILE.py:FUNCTION"."""
    return name.rpartition(":")[0].endswith(".py")


def _function(name: str) -> Callable[[], Any]:
    path, _, function = name.rpartition(":")
    file = pathlib.Path(path)
    if not file.is_file():
        raise ModelError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)  # for what lies beside it
    spec.loader.exec_module(module)
    made: Any = getattr(module, function, None)
    if not callable(made):
        raise ModelError(f"{path}: it has no function {function!r}")
    call: Callable[[], Any] = made
    return call


def from_function(name: str) -> Model:
    """What a function in a file makes, with the weights it has; set to evaluation mode.

    Args:
        name: "FILE.py:FUNCTION". The function takes no arguments and returns a pair: an nn.Module,
            and a tuple of its input tensors, or a function of a batch size and a seed that returns
            such a tuple.

    Raises:
        ModelError: there is no such file or function, it raises, or returns something else. Of
            `inputs`: the batch is not 1 where the inputs are given.
    """
    try:
        made = _function(name)()
    except ModelError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise ModelError(f"{name}: {type(error).__name__}: {text[0]}") from error
    module: Any
    given: Any
    module, given = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    fixed = isinstance(given, tuple) and all(isinstance(i, Tensor) for i in given)
    if not isinstance(module, nn.Module) or not (fixed or callable(given)):
        raise ModelError(
            f"{name}: it has to return a module and a tuple of tensors (or a function of a batch "
            f"and a seed that makes one), got {_described(made)}"
        )

    def same(batch: int, seed: int) -> tuple[Tensor, ...]:
        if batch != 1:
            raise ModelError(
                f"{name}: a batch of {batch} needs a function that makes inputs, it returns tensors"
            )
        return tuple(given)

    inputs: Callable[[int, int], tuple[Tensor, ...]] = same if fixed else given
    size = ", ".join("x".join(map(str, t.shape)) for t in inputs(1, 0))
    return Model(name.rpartition(":")[2], module.eval(), inputs, size)


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(v).__name__ for v in value) + ")"
    return type(value).__name__


def _load(path: str) -> Any:
    if not pathlib.Path(path).exists():
        raise ModelError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ModelError(f"{path}: not a file that torch.jit.save wrote")
    # A detection model calls torchvision's operators, which have to be there before.
    with contextlib.suppress(ModelError, ImportError):
        load_torchvision()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(path, map_location="cpu").eval()
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(f"{path}: {lines[0] if lines else type(error).__name__}") from error


def _random(shape: Sequence[int], dtype: str, generator: torch.Generator) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.ones(shape, dtype=kind)
    if dtype.startswith("int"):
        return torch.randint(0, 2, shape, dtype=kind, generator=generator)
    return torch.randn(shape, generator=generator).to(kind)


def from_file(path: str, shapes: Sequence[tuple[Sequence[int], str]]) -> Model:
    """A module that torch.jit.save wrote, with the weights it has.

    Args:
        path: of the file.
        shapes: shape and data type of each input. They are random numbers, small ones if integers.
            Its `inputs` ignores the batch.

    Raises:
        ModelError: the file cannot be loaded, or takes another number of inputs.
    """
    module = _load(path)
    arguments = module.forward.schema.arguments[1:]
    required = sum(not a.has_default_value() for a in arguments)
    if not required <= len(shapes) <= len(arguments):
        takes = str(required) if len(arguments) == required else f"{required} to {len(arguments)}"
        raise ModelError(
            f"{path}: its forward takes {takes} inputs, --shape is given {len(shapes)} times"
        )

    def inputs(batch: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(_random(*s, generator) for s in shapes)

    size = ", ".join("x".join(map(str, shape)) for shape, _ in shapes)
    return Model(pathlib.Path(path).name, module, inputs, size)
