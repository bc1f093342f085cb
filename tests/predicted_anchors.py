"""Writes what the planner predicts beside published figures of other trainers, in their configurations.

`python -m tests.predicted_anchors` prints the table; --write also replaces docs/benchmarks/predicted-anchors.json
and the table of docs/internals/predicted-and-published.md. Nothing is measured: figures of this engine are predictions.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.objective import ObjectiveOptions
from engine.config.parallel import ParallelOptions
from engine.config.rollout import RolloutOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.models.families import family_of
from engine.planning.machine import MACHINES
from engine.planning.memory_plan import memory_plan_of
from engine.planning.predict import workload_of
from engine.planning.rank_layout import Layout
from engine.planning.search import Candidate
from engine.planning.step_time import StepRange, predict_range
from engine.training.module_plan import decoder_in_training, training_plan

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs/benchmarks/predicted-anchors.json"
PAGE = ROOT / "docs/internals/predicted-and-published.md"
COMMAND = "python -m tests.predicted_anchors --write"
GIB = 2**30
_TABLE = re.compile(r"(<!-- table -->\n).*?(\n<!-- end -->)", re.DOTALL)

AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx"
BRIDGE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html"
SUROGATE = "https://docs.surogate.ai"
MLPERF = "https://mlcommons.org/benchmarks/training/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A published figure, and the configuration that it is predicted in.

    Args:
        name: what is trained on what.
        published: tokens a second and GPU; 0 where there is none.
        source: its address.
        model: of examples/memory/models.
        machine: of `engine.planning.machine`.
        gpus: GPUs.
        rows, micro_batch, length: of a step.
        documents: tokens of the documents that are packed into a row; 0 where one fills it.
        assumed: what was not published, and is taken here.
        (others): sections of the configuration.
    """

    name: str
    published: float
    source: str
    model: str
    machine: str = "h100-80"
    gpus: int = 1
    rows: int = 32
    micro_batch: int = 2
    length: int = 4096
    documents: int = 0
    assumed: str = ""
    base_dtype: Any = None
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    trainable: tuple[str, ...] = ()
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    rollout: RolloutOptions | None = None

    def config(self) -> RunConfig:
        """Returns the configuration of a run."""
        rank = 0 if self.trainable else 16
        lora = LoraOptions(rank=rank, dropout=self.dropout, **({"targets": self.targets} if self.targets else {}))
        return RunConfig(
            model=ModelOptions(path=self.model, dtype="bfloat16", base_dtype=self.base_dtype),
            objective=ObjectiveOptions(name="language_modeling" if self.rollout is None else "grpo"),
            rollout=self.rollout or RolloutOptions(),
            trainable=self.trainable,
            lora=lora,
            data=DataOptions(seq_length=self.length, packing=self.memory.cuda_graph != "none" or self.documents > 0),
            train=TrainOptions(micro_batch_size=self.micro_batch, global_batch_size=self.rows),
            parallel=self.parallel,
            memory=self.memory,
        )

    def predicted(self) -> tuple[Candidate, StepRange]:
        """Returns the configuration's memory and the range of its step."""
        config = self.config()
        path = ROOT / "examples/memory/models" / f"{self.model}.json"
        family, text = family_of(json.loads(path.read_text(encoding="utf-8")))
        decoder = decoder_in_training(config, family.config_from_hf(text), family.names)
        plan = training_plan(config, decoder, family.names)
        workload = workload_of(config, decoder, plan, device_type="cuda")
        if self.documents:
            workload = replace(workload, longest_document=self.documents)
        layout = Layout(parallel=self.parallel, data=self.gpus // self.parallel.model_parallel_size)
        memory = memory_plan_of(config)
        found = predict_range(workload, layout, memory, MACHINES[self.machine])
        return replace(Candidate.predict(workload, layout, memory, "balanced"), time=found.likely), found


NOT_GIVEN = "2 rows of 2,048 tokens in a micro-batch, adapters of rank 16 on all linears"
QWEN3_8B = {"model": "qwen3-8b", "length": 2048, "rows": 16, "assumed": NOT_GIVEN}
ANCHORS = (
    Anchor(
        name="Llama-3-8B, LoRA, one H100", published=12_473, source=AUTOMODEL, model="llama-3-8b",
        assumed="adapters of rank 16 on all linears",
    ),
    Anchor(
        name="Qwen2.5-7B, LoRA, one H100", published=14_110, source=AUTOMODEL, model="qwen2.5-7b",
        assumed="adapters of rank 16 on all linears",
    ),
    Anchor(
        name="Llama-3-70B, LoRA, 8 H100, tensor 2, sharded over 4", published=1_092, source=AUTOMODEL,
        model="llama-3-70b", gpus=8, parallel=ParallelOptions(tensor=2, shard="parameters"),
        memory=MemoryOptions(recompute="full"), assumed="all layers recomputed, without which it fills 77 GiB",
    ),
    Anchor(
        name="Llama-3-70B, LoRA in FP8, 8 H100, tensor 2, pipeline 4 x 20", published=2_643, source=BRIDGE,
        model="llama-3-70b", gpus=8, micro_batch=1, base_dtype="fp8",
        parallel=ParallelOptions(tensor=2, pipeline=4, virtual=20), assumed="adapters of rank 16 on all linears",
    ),
    Anchor(name="Qwen3-8B, LoRA, one H100", published=10_200, source=SUROGATE, **QWEN3_8B),
    Anchor(name="Qwen3-8B, LoRA in FP8, one H100", published=11_600, source=SUROGATE, base_dtype="fp8", **QWEN3_8B),
    Anchor(name="Qwen3-8B, LoRA on NF4, one H100", published=8_200, source=SUROGATE, base_dtype="nf4", **QWEN3_8B),
    Anchor(
        name="Qwen3-8B, LoRA, one H200", published=9_100, source=SUROGATE, machine="h200-141", **QWEN3_8B,
    ),
    Anchor(
        name="Qwen3-30B-A3B, all weights, 8 H100, expert 8", published=12_040, source=AUTOMODEL, model="qwen3-30b-a3b",
        gpus=8, rows=512, micro_batch=4, trainable=("*",), parallel=ParallelOptions(expert=8, shard="optimizer"),
        memory=MemoryOptions(recompute="full"), assumed="all layers recomputed",
    ),
    Anchor(
        name="Qwen3-30B-A3B, LoRA, one H200", published=0, source="", model="qwen3-30b-a3b", machine="h200-141",
        rows=16,
    ),
    Anchor(
        name="Llama-2-70B, LoRA in FP8, MLPerf, 8 H200, tensor 2", published=2_618, source=MLPERF, model="llama-2-70b",
        machine="h200-141", gpus=8, rows=8, micro_batch=1, length=8192, documents=8192, base_dtype="fp8",
        targets=("q_proj", "k_proj", "v_proj", "o_proj"), dropout=0.1, parallel=ParallelOptions(tensor=2),
        assumed="8 rows a step",
    ),
    Anchor(
        name="Llama-2-70B, the same, one H200", published=0, source="", model="llama-2-70b", machine="h200-141", rows=8,
        micro_batch=1, length=8192, documents=8192, base_dtype="fp8", targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        dropout=0.1, memory=MemoryOptions(offload_weights=True),
    ),
    Anchor(
        name="Llama-3-8B, GRPO, 64 completions of 512 tokens, one H100", published=0, source="", model="llama-3-8b",
        rows=64, micro_batch=4, length=1024,
        rollout=RolloutOptions(rewards=("exact_match",), slots=64, max_completion_length=512),
    ),
)  # fmt: skip

COLUMNS = [
    "configuration", "published", "slow", "likely", "fast", "verdict", "GiB", "step s", "assumed", "source",
]  # fmt: skip


def rows(anchors: Sequence[Anchor] = ANCHORS) -> list[dict[str, Any]]:
    """Returns a row for each anchor; speeds are tokens a second and GPU."""
    found = []
    for one in anchors:
        candidate, times = one.predicted()
        slow, likely, fast = (
            round(time.tokens_per_second / one.gpus, 1) for time in (times.slow, times.likely, times.fast)
        )
        found.append(
            dict(
                zip(
                    COLUMNS,
                    (
                        one.name, one.published or None, slow, likely, fast, _verdict(one.published, slow, fast),
                        round(candidate.peak / GIB, 1), round(times.likely.step, 3), one.assumed, one.source,
                    ),
                    strict=True,
                )
            )
        )  # fmt: skip
    return found


def _verdict(published: float, slow: float, fast: float) -> str:
    if not published:
        return "not published"
    return "slower" if fast < published else "faster" if slow > published else "open"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Returns the page's table."""
    lines = [
        "| configuration | published | predicted here | beside it | GiB a GPU |",
        "|---|---:|---:|---|---:|",
    ]
    for row in found:
        published = "-" if row["published"] is None else f"[{row['published']:,.0f}]({row['source']})"
        speeds = f"{_three(row['likely'])} ({_three(row['slow'])} to {_three(row['fast'])})"
        assumed = f"; assumed: {row['assumed']}" if row["assumed"] else ""
        lines.append(
            f"| {row['configuration']}{assumed} | {published} | {speeds} | {row['verdict']} | {row['GiB']:.1f} |"
        )
    return "\n".join(lines)


def _three(count: float) -> str:
    return f"{float(f'{count:.3g}'):,.0f}"


def record(found: list[dict[str, Any]], date: str) -> dict[str, Any]:
    """Returns what docs/benchmarks has."""
    import platform

    import torch

    counts = {name: sum(row["verdict"] == name for row in found) for name in ("faster", "open", "slower")}
    return {
        "title": "Predicted beside published: tokens a second and GPU",
        "date": date,
        "machine": {"CPU": "none matters: nothing was run, and the GPUs are those of each row"},
        "versions": {"Python": platform.python_version(), "torch": torch.__version__},
        "command": COMMAND,
        "columns": COLUMNS,
        "rows": found,
        "findings": [
            f"Of {sum(counts.values())} published figures {counts['faster']} are below the predicted range, "
            f"{counts['open']} inside of it and {counts['slower']} above.",
            "All figures of this engine are predictions: it has not been timed on a GPU.",
        ],
        "notes": ["Assumed speeds and their sources: docs/planning.md, times are ranges."],
    }


def main() -> None:
    import datetime

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the file and the page's table")
    arguments = parser.parse_args()
    found = rows()
    text = table(found)
    print(text)
    if arguments.write:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        FILE.write_text(json.dumps(record(found, date), indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_TABLE.sub(lambda match: match[1] + text + match[2], page), encoding="utf-8")


if __name__ == "__main__":
    main()
