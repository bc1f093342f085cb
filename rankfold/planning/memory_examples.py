"""Answers for well-known models and machines: `rankfold plan memory --examples`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config.data import DataOptions
from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from rankfold.planning import time_report
from rankfold.planning.memory_question import GIB, Answer, answer_for
from rankfold.planning.memory_report import table

LLAMA_2_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """A model on some GPUs, LoRA of rank 16 on all linears, bf16, 8 rows per step."""

    name: str
    hf_config: dict[str, Any]
    devices: int
    gpu_memory: float
    seq_length: int = 8192

    def answer(self, reserve: float) -> Answer:
        """Searches, and returns the answer; `reserve` is the percentage of a GPU that is left free."""
        config = RunConfig(
            model=ModelOptions(path=self.name, dtype="bfloat16"),
            lora=LoraOptions(rank=16),
            data=DataOptions(seq_length=self.seq_length),
            train=TrainOptions(micro_batch_size=1, global_batch_size=8),
        )
        return answer_for(self.hf_config, config, devices=self.devices, gpu_memory=self.gpu_memory, reserve=reserve)


EXAMPLES = (
    Example("Llama-2-70B", LLAMA_2_70B, 8, 80),
    Example("Llama-2-70B", LLAMA_2_70B, 4, 80),
    Example("Llama-2-70B", LLAMA_2_70B, 1, 141),
    Example("Llama-3-8B", LLAMA_3_8B, 1, 24),
    Example("Llama-3-8B", LLAMA_3_8B, 1, 80),
)


def report(reserve: float) -> str:
    """Returns a table of predictions that leave `reserve` percent of each GPU free."""
    rows, layouts = [("model", "tokens", "GPUs", "GiB", "tokens/s per GPU")], ["layout"]
    for example in EXAMPLES:
        gpus = f"{example.devices} x {example.gpu_memory:g}"
        answer = example.answer(reserve)
        found = answer.found
        if found.fitting:
            best = found.fitting[0]
            speed = time_report.tokens(time_report.range_of(best, answer.machine), example.devices)
            peak, what = best.peak, best.label()
        else:
            smallest = found.too_large[0]
            part = smallest.estimate.largest_part()
            peak, speed = smallest.peak, "does not fit"
            what = f"smallest: {smallest.label()}; {part} alone {smallest.estimate.parts[part] / GIB:.1f}"
        rows.append((example.name, f"{example.seq_length}", gpus, f"{peak / GIB:.1f}", speed))
        layouts.append(what)
    lines = [f"{line}  {what}" for line, what in zip(table(rows).splitlines(), layouts, strict=True)]
    title = "LoRA of rank 16 on all linears, bf16, 8 rows of one document a step; predictions, not measurements"
    note = f"GiB: of the rank that holds most; {reserve:g}% of a GPU is left free. Speeds: see docs/planning.md."
    return "\n".join([title, "", *lines, "", note])
