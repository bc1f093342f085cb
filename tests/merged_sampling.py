"""Measures passes of sampling by a merge-aware model: with a merge in each, and from codes that are merged once.

    python -m tests.merged_sampling docs/benchmarks/sample-merge-aware-avx512.json

Both models have the same weights and answer the same prompts, one after the other in one process, and have to give the
same tokens. A time is the least of several, of processor time: prompt and passes, over the passes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from engine.distributed.mesh import Axis
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Request
from engine.kernels.native.quantize import NATIVE_ARITHMETIC
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.encoded_storage import encoded_entries, fill_encoded
from engine.layers.merged_codes import merge_codes
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, build_decoder
from engine.ops.backends import NATIVE
from engine.ops.encoded_weight import BaseEncoding
from tests.distributed.cases import small_config

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, LAYERS, RANK, NEW, TURNS = 2048, 8192, 2, 16, 16, 5
CONFIG = replace(
    small_config(num_layers=LAYERS, hidden=HIDDEN, intermediate=INTERMEDIATE, head_dim=64, vocab_size=1024),
    num_heads=32,
    num_kv_heads=8,
)


def _model(base: str) -> Decoder:
    settings = AdapterSettings(rank=RANK, scale=2.0, dropout=0.0)
    plan = TrainingPlan(adapter=lambda name: settings if name.endswith("_proj") else None, merge_aware=True)
    layout = TensorLayout(base=BaseEncoding.named(base, NATIVE_ARITHMETIC), kernels=NATIVE)
    model = build_decoder(CONFIG, layout=layout, plan=plan, device=CPU, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    for entry in shard_entries(model):
        size = 0.002 if "lora" in entry.name else 0.02
        value = torch.randn(entry.spec.global_shape, generator=draw) * size
        entry.parameter.data.copy_(torch.ones_like(value) if value.dim() == 1 else value)
    fill_encoded(encoded_entries(model), lambda entry: torch.randn(entry.spec.global_shape, generator=draw) * 0.02)
    return model


def _answered(model: Decoder, rows: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds of a pass, and the tokens."""
    stage = InferenceStage(
        model, tp=Axis("tp"), pp=Axis("pp"), sampling=Sampling(temperature=0.0), slots=rows, length=8 + NEW, new=NEW,
        device=CPU, capture=decode_capture("auto", CPU),
    )  # fmt: skip
    limits = Limits(max_new_tokens=NEW, stop_ids=frozenset(), slots=rows)
    requests = [Request(row=row, ids=tuple(range(1 + row, 9 + row))) for row in range(rows)]
    began = time.process_time()
    answers = Generator(stage, limits, None).run(requests)
    return (time.process_time() - began) / NEW, [tuple(one.ids) for one in answers]


def _rows(base: str) -> list[dict[str, object]]:
    each, once = _model(base), _model(base)
    began = time.process_time()
    merge_codes((once,))
    merging, found = time.process_time() - began, list[dict[str, object]]()
    for rows in (1, 8):
        times: dict[str, list[float]] = {"each": [], "once": []}
        for _ in range(TURNS):
            (slow, expected), (fast, tokens) = _answered(each, rows), _answered(once, rows)
            assert tokens == expected
            times["each"].append(slow)
            times["once"].append(fast)
        slow, fast = min(times["each"]), min(times["once"])
        found.append(
            {
                "base": base,
                "rows": rows,
                "ms a pass, merging in each": round(1e3 * slow, 1),
                "ms a pass, merged once": round(1e3 * fast, 1),
                "ratio": round(slow / fast, 2),
                "ms to merge once": round(1e3 * merging, 1),
            }
        )
        print(found[-1], flush=True)
    return found


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rows = [row for base in ("nvfp4", "mxfp4", "fp8_block", "int4") for row in _rows(base)]
    record = {
        "title": f"Passes of sampling, merge-aware: hidden {HIDDEN}, intermediate {INTERMEDIATE}, {LAYERS} layers, "
        f"rank {RANK}, float32",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {"CPU": "AMD EPYC, 2 cores, AVX512", "threads": "1"},
        "versions": {"Python": sys.version.split()[0], "torch": torch.__version__},
        "command": f"python -m tests.merged_sampling {out}",
        "columns": list(rows[0]),
        "rows": rows,
        "findings": [f"Processor time, the least of {TURNS} in one process, one after the other; the same tokens."],
        "notes": ["Other work filled both cores."],
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
