"""What tests of generation share: prompts, stock transformers' greedy tokens, and the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.inference.rows import Answer, Request
from engine.layers.graph_capture import Captured, CudaCapture, Replayable
from engine.layers.recorded_calls import CallCapture
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from tests.support.graph_stand_in import FunctionCapture

if TYPE_CHECKING:
    from torch import nn

Prompts = Sequence[Sequence[int]]
STORIES = ([1, 403, 407, 261, 378], [1, 291], [1, 424, 338, 263, 399, 302, 267, 281, 270, 263, 385, 327, 285, 286], [1])
"""Token ids of four lengths, for the real model of 512 tokens."""


class Ids:
    """A tokenizer that writes ids, for models that have none."""

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(one) for one in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {token}" for token in ids)


def random_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """The same every time."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def stock_greedy(model: nn.Module, prompts: Prompts, max_new_tokens: int) -> list[list[int]]:
    """What transformers' generate continues each prompt with, alone, without an end token."""
    made: Any = model
    made.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = made.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def engine_answers(
    folder: Path | str,
    prompts: Prompts,
    limits: Limits,
    *,
    sampling: Sampling | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    group: int = 1,
    multiple: int = 1,
    graphs: list[Any] | None = None,
    recorded: bool = False,
    logps: bool = False,
    device: str = "cpu",
    **choice: Any,
) -> list[Answer]:
    """The engine's answers; where there are ranks, all of them call it.

    Args:
        group: rows that continue one prompt may share it.
        multiple: tokens of a pass are filled up to a multiple of it.
        graphs: gets what captured the decode passes, as its `captured`; None launches each kernel.
        recorded: on a CPU passes are recorded; else functions stand in for graphs.
        logps: keep log-probabilities, as with `graphs`.
    """
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    launch = Launch(rank=ranks[0], world_size=ranks[1], device=torch.device(device))
    log = Log(1)  # silent
    wanted = ModelChoice(path=Path(folder), tensor=tensor, pipeline=pipeline, **choice)
    opened = open_for_generation(wanted, launch, log)
    capture: Any = None
    if graphs is not None:
        on_cpu = launch.device.type == "cpu"
        capture = FunctionCapture(lambda: lasting_tensors(stage)) if on_cpu else GpuCapture(launch.device)
        capture = KeptRecordings() if recorded else capture
        graphs.append(capture)
    stage = InferenceStage(
        opened.decoder,
        tp=opened.mesh.tp,
        pp=opened.mesh.pp,
        sampling=sampling or Sampling(),
        slots=limits.slots,
        length=max(map(len, prompts)) + limits.max_new_tokens,
        new=limits.max_new_tokens,
        group=group,
        device=launch.device,
        with_logps=logps or graphs is not None,
        tokens_multiple=multiple,
        capture=capture,
    )
    requests = [Request(row=row, ids=tuple(ids)) for row, ids in enumerate(prompts)]
    return Generator(stage, limits, Ids()).run(requests)


class KeptRecordings(CallCapture):
    """Recordings, all of which it keeps, with the number of their replays."""

    def __init__(self) -> None:
        self.captured: list[CountedReplays] = []

    def capture(self, function: Captured, pool: Any) -> CountedReplays:
        self.captured.append(CountedReplays(super().capture(function, pool)))
        return self.captured[-1]


class CountedReplays:
    """A recording that counts its replays."""

    def __init__(self, recorded: Replayable) -> None:
        self.outputs, self._recorded, self.replays = recorded.outputs, recorded, 0

    def replay(self) -> None:
        self.replays += 1
        self._recorded.replay()


class GpuCapture(CudaCapture):
    """Graphs of a GPU, all of which it keeps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.captured: list[Replayable] = []

    def capture(self, function: Captured, pool: Any) -> Replayable:
        self.captured.append(super().capture(function, pool))
        return self.captured[-1]


def lasting_tensors(stage: InferenceStage) -> list[Tensor]:
    """Everything that a decode pass may leave changed."""
    pools = [pool for layer in stage.cache.layers.values() for pool in (layer.keys, layer.values)]
    states = [pool for of_layer in stage.cache._states._pools.values() for pool in of_layer]
    seen = [] if stage._chooser is None or stage._chooser._seen is None else [stage._chooser._seen]
    tables = [] if stage._graphs is None else [*stage._graphs._tables.values()]
    return [*pools, *states, *seen, *tables, stage._last]


def engine_tokens(folder: Path | str, prompts: Prompts, max_new_tokens: int, **more: Any) -> list[list[int]]:
    """Ids that the engine continues each prompt with; three rows at a time, so that they come and go."""
    limits = Limits(max_new_tokens=max_new_tokens, slots=more.pop("slots", 3))
    return [list(answer.ids) for answer in engine_answers(folder, prompts, limits, **more)]


def save_chat_model(folder: Path, data_dir: Path, context: int) -> Path:
    """Saves a random model of some tokens of context, with a real tokenizer that has a chat template."""
    import shutil

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=context, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    for file in (data_dir / "tokenizers" / "minimind").iterdir():
        shutil.copy(file, folder)
    return folder


def chat_ids(folder: Path, messages: list[dict[str, str]], new: int) -> tuple[list[int], list[int]]:
    """Prompt and greedy answer of stock transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(input_ids=ids, max_new_tokens=new, do_sample=False, pad_token_id=0)[0]
    return ids[0].tolist(), out[ids.shape[1] :].tolist()
