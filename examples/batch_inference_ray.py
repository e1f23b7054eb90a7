"""Classifies all images of a directory with Ray Data, one compiled model in each actor.

    python examples/batch_inference_ray.py photos/ resnet50 --weights DEFAULT --output classes/

Needs the extra: pip install 'llga_fuser[ray]'. On one machine it starts Ray by itself. On a cluster
it runs unchanged: `ray job submit --working-dir examples -- python batch_inference_ray.py ...`,
with llga_fuser installed on the nodes and a directory (or bucket) that all of them see.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

# What torchvision's classification weights were trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Classifier:
    """One actor: the model is compiled once, for whole batches."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        # What Ray has reserved for the actor, or all actors would take all cores.
        torch.set_num_threads(options["threads"])
        from model import compiled

        size = options["image_size"]
        shape = (options["batch"], 3, size, size)
        self.net = compiled(options["model"], shape, options["dtype"], options["weights"])
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.deviation = torch.tensor(DEVIATION).view(3, 1, 1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np
        import torch

        images = torch.from_numpy(np.ascontiguousarray(batch["image"]))
        x = images.permute(0, 3, 1, 2).float().div_(255)
        x = x.sub_(self.mean).div_(self.deviation).contiguous()
        with torch.inference_mode():
            # The last batch may be smaller: that shape is compiled when it comes.
            scores = self.net(x).softmax(-1)
        best = scores.max(-1)
        return {
            "path": batch["path"],
            "class": best.indices.numpy(),
            "score": best.values.numpy(),
        }


def classify(directory: str, options: dict[str, Any], actors: int) -> Any:
    """The dataset of results; nothing has run yet."""
    import ray

    size = options["image_size"]
    images = ray.data.read_images(directory, size=(size, size), mode="RGB", include_paths=True)
    return images.map_batches(
        Classifier,
        fn_constructor_args=(options,),
        batch_size=options["batch"],
        num_cpus=options["threads"],
        compute=ray.data.ActorPoolStrategy(size=actors),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="classifies a directory of images with Ray Data")
    add = parser.add_argument
    add("directory", help="of images, or a URI that Ray Data reads")
    add("model", help="tiny, a torchvision classification model, or a file of torch.jit.save")
    add("--weights", help="of a torchvision model, such as DEFAULT; default: random ones")
    add("--output", metavar="DIRECTORY", help="for JSON lines; default: print them")
    add("--actors", type=int, default=1, metavar="N", help="copies of the model, default: 1")
    add("--threads", type=int, default=1, metavar="N", help="CPUs of each actor, default: 1")
    add("--batch", type=int, default=16, metavar="N", help="default: 16")
    add("--image-size", type=int, default=224, metavar="N", help="default: 224")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args(arguments)
    for name in ("actors", "threads", "batch", "image_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} is less than 1")
    if "://" not in options.directory and not pathlib.Path(options.directory).is_dir():
        parser.error(f"{options.directory}: no such directory")
    from model import check

    try:
        check(options.model)
    except ValueError as error:
        parser.error(str(error))
    try:
        import ray
    except ImportError:
        parser.error("Ray is missing: python -m pip install 'llga_fuser[ray]'")

    # `model.py` is found by the actors: on this machine Ray hands this process' sys.path on, and on
    # a cluster --working-dir brings it.
    ray.init(ignore_reinit_error=True, logging_level="WARNING")
    wanted, there = options.actors * options.threads, ray.cluster_resources().get("CPU", 0)
    if wanted >= there:
        parser.error(
            f"--actors {options.actors} x --threads {options.threads} need {wanted} CPUs, "
            f"and one more to read images; Ray has {there:g}"
        )
    settings = {
        k: getattr(options, k)
        for k in ("model", "weights", "threads", "batch", "image_size", "dtype")
    }
    results = classify(options.directory, settings, options.actors)
    if options.output:
        results.write_json(options.output)
    else:
        for row in results.iter_rows():
            print(f"{row['path']}\t{row['class']}\t{row['score']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
