"""Parts of tests of conversations whose rows stay in the cache: models with drawn factors, and what a rank samples."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.data.dataset import TokenDataset
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.data.prompts import PromptLoader
from engine.rollouts.sampler import Sampled
from engine.rollouts.token_logps import token_logps
from engine.rollouts.trained_sampler import TrainedSampler
from tests.support.family_models import make_model
from tests.support.rollout_runs import prepared
from tests.support.tool_runs import ENDS, VOCABULARY, tool_settings

_ENDS = frozenset(range(len(ENDS)))
_PROGRAMS = '''
import random
import time


def open_door(hand: int) -> str:
    """Opens a door, after a while.

    Args:
        hand: Which one.
    """
    time.sleep(random.SystemRandom().random() * DELAY)
    return f"hand {hand} " * (hand % 4 + 1)


class Door:
    def reset(self, number, **columns):
        time.sleep(random.SystemRandom().random() * DELAY)
        self.number = number
        return "".join(random.SystemRandom().choices("0123456789", k=4)) if SHOWS else None

    def open_door(self, hand: int) -> str:
        """Opens the door, after a while.

        Args:
            hand: Which one.
        """
        return f"{self.number} {open_door(hand)}"

    def get_reward(self):
        return 1.0
'''
"""A tool and an environment, behind a line that says for how many seconds they may wait, and whether prompts are added
to."""


def family_settings(
    folder: Path,
    name: str,
    *,
    tools: bool = False,
    delay: float = 0.0,
    shows: bool = False,
    adapted: Any = "all-linear",
    sizes: dict[str, Any] | None = None,
    **changes: object,
) -> dict[str, object]:
    """Options of a run of a drawn model of a family with a drawn adapter, whose factors B are not zero.

    Args:
        tools: without an environment, so that prompts are known when sampling begins.
        delay: seconds that a call, or an environment's reset, takes at most, by chance.
        shows: whether an environment adds some digits to its prompt, which no other one has.
        adapted: PEFT's target_modules.
        sizes: of the model's config.
        changes: options, with __ for the point.
    """
    from peft import LoraConfig, get_peft_model

    folder.mkdir(parents=True, exist_ok=True)
    larger: dict[str, object] = {
        "data__seq_length": 128, "rollout__max_completion_length": 104, "rollout__temperature": 3.0, "lora__rank": 3,
        "lora__alpha": 5,
    }  # fmt: skip
    settings = tool_settings(folder, **(larger | changes))
    (folder / "doors.py").write_text(f"DELAY, SHOWS = {delay}, {shows}\n{_PROGRAMS}", encoding="utf-8")
    settings["rollout.environment"] = f"{folder}/doors.py:Door"
    if tools:
        del settings["rollout.environment"]
        settings |= {"rollout.tools": f"{folder}/doors.py:open_door", "rollout.rewards": "regex:a"}
    base = make_model(
        name, folder / "drawn", vocab_size=VOCABULARY, max_position_embeddings=128, eos_token_id=sorted(_ENDS),
        **(sizes or {}),
    )  # fmt: skip
    for file in (folder / "model").iterdir():
        if file.name.startswith(("tokenizer", "special")):
            (folder / "drawn" / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=adapted, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "start")
    targets = json.loads((folder / "start" / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    settings |= {
        "model.path": folder / "drawn", "model.init": "checkpoint", "model.dtype": "float32",
        "lora.init_from": folder / "start", "lora.targets": ",".join(sorted(targets)),
    }  # fmt: skip
    return settings


@dataclass(frozen=True, kw_only=True)
class Talked:
    """Conversations of a rank's copy and of all others, and what they took.

    Args:
        prompts, tokens: of each conversation.
        written: which of its tokens an environment wrote.
        sampled, trained: log-probabilities of its tokens, of sampling and of the training forward; of those that an
            environment wrote, zeros and whatever.
        computed: tokens of prompts and turns that this rank has computed.
        together: prompts of each pass of prompts.
        used: pages that are taken in the end.
        notes: of the sampler.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    written: list[list[bool]]
    sampled: list[list[float]]
    trained: list[list[float]]
    computed: int
    together: list[int]
    used: int
    notes: tuple[str, ...]

    @property
    def distance(self) -> float:
        """The largest difference of two log-probabilities of a sampled token."""
        pairs = zip(self.written, self.sampled, self.trained, strict=True)
        return max(
            abs(one - other) for own in pairs for is_written, one, other in zip(*own, strict=True) if not is_written
        )

    @property
    def turns(self) -> list[list[int]]:
        """The new tokens of each further turn of each conversation: of the results before it, and the last one that was
        sampled."""
        found = []
        for written in self.written:
            edges = np.flatnonzero(np.diff(np.array(written, dtype=np.int8)))
            found.append([int(end - start) + 1 for start, end in zip(edges[::2], edges[1::2], strict=True)])
        return found


def talked(
    settings: dict[str, object], count: int = 4, *, ahead: int = 0, capture: Any = None, **rollout: Any
) -> Talked:
    """Samples conversations of the first prompts; on any number of ranks.

    Args:
        ahead: passes that are launched before the tokens of one are read.
        capture: given the stage, returns the way to capture its decode passes.
        rollout: other options of rollouts.
    """
    with ExitStack() as opened:
        run = prepared(settings, opened)
        assert isinstance(run.data.train, PromptLoader)
        prompts = list(run.data.train.prompts.prompts[:count])
        config = replace(run.config, rollout=replace(run.config.rollout, **rollout))
        talk = run.data.tools.talk(config, ends=_ENDS, vocabulary=VOCABULARY)  # type: ignore[attr-defined]
        sampler = TrainedSampler(config, run.training, ends=_ENDS, longest_prompt=16, say=print, talk=talk)
        made, make, together = list[Any](), sampler._generator, list[int]()

        def generator() -> Any:
            made.append(make())
            made[-1]._ahead = ahead
            prefill = made[-1].stage.prefill
            made[-1].stage.prefill = lambda prompts, *more, **named: (
                together.append(len(prompts)) or prefill(prompts, *more, **named)
            )
            return made[-1]

        sampler._generator = generator  # type: ignore[method-assign]
        if capture is not None:
            sampler._capture = capture(lambda: made[-1].stage)
        try:
            found = sampler.sample(prompts, generation=0)
        finally:
            sampler.close(failed=False)
        members = config.rollout.num_generations
        first = [
            list(prompts[place // members].ids) if one.prompt is None else one.prompt.tolist()
            for place, one in enumerate(found)
        ]
        documents = [_document(ids, one) for ids, one in zip(first, found, strict=True)]
        dataset = TokenDataset(completion_columns(documents, "tokens"), seq_length=config.data.seq_length, packing=True)
        logps = token_logps(run.config, run.training.mesh, run.training.stages, dataset)
        ends = (dataset.starts + dataset.lengths).tolist()
        tables = made[0].stage.cache.tables.values()
        return Talked(
            prompts=first,
            tokens=[one.tokens.tolist() for one in found],
            written=[_written(one) for one in found],
            sampled=[one.logps.tolist() for one in found],
            trained=[logps[end - len(one.tokens) : end].tolist() for end, one in zip(ends, found, strict=True)],
            computed=made[0].speed.prefill_tokens,
            together=together,
            used=sum(table.used for table in tables),
            notes=sampler.notes,
        )


def _written(one: Sampled) -> list[bool]:
    assert one.written is not None
    return list(map(bool, one.written.tolist()))


def _document(prompt: list[int], one: Sampled) -> Completion:
    return Completion(
        prompt=tuple(prompt), tokens=one.tokens.tolist(), sampled_logps=one.logps.tolist(), advantage=0.0,
        written=_written(one),
    )  # fmt: skip
