"""Section `rollouts`: sampled completions, a group for each prompt, against `generate` of transformers and PEFT.

Both read one folder of weights and one PEFT adapter, which is not merged, each in its own process, and take turns. All
completions have the maximum length, so that both make the same number of tokens, in one batch of all rows, at
temperature 1 from the whole distribution. First, their greedy tokens must be the same. A time is that of a whole
call, cache and all; the engine's also records the log-probability of each token, which training needs.
transformers pads prompts on the left and runs each as many times as it has members.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import transformers

from engine.errors import UserError
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.inference.rows import Request
from engine.models.dtypes import TORCH_DTYPES
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from rankfold.benchmarking.generate import Prompts, seconds, write_model
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.processes import Offer, Worker
from rankfold.benchmarking.sections import RolloutsOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio

ENGINE, PEER = "engine", "transformers + peft"
MODEL, ADAPTER = "model", "adapter"


class _Engine:
    def __init__(self, folder: Path, options: RolloutsOptions, device: torch.device) -> None:
        self._options, self._device, self.cache_bytes = options, device, 0
        choice = ModelChoice(
            path=folder / MODEL, adapter=folder / ADAPTER, dtype=options.dtype, kernels=options.kernels
        )
        self._opened = open_for_generation(choice, Launch(rank=0, world_size=1, device=device), Log(1))

    def sample(self, prompts: Prompts, new: int, *, greedy: bool = False) -> list[list[int]]:
        group = 1 if greedy else self._options.group
        slots = len(prompts) * group
        stage = InferenceStage(
            self._opened.decoder,
            tp=self._opened.mesh.tp,
            pp=self._opened.mesh.pp,
            sampling=Sampling() if greedy else Sampling(temperature=1.0),
            slots=slots,
            length=max(map(len, prompts)) + new,
            new=new,
            group=group,
            device=self._device,
            with_logps=True,
            tokens_multiple=slots,  # as training has it
            capture=decode_capture("auto", self._device),
        )
        self.cache_bytes = stage.cache.num_bytes
        limits = Limits(max_new_tokens=new, slots=slots, prefill_tokens=4096)
        requests = [Request(row=row, ids=tuple(prompts[row // group])) for row in range(slots)]
        return [list(answer.ids) for answer in Generator(stage, limits, None).run(requests)]


class _Peer:
    def __init__(self, folder: Path, options: RolloutsOptions, device: torch.device) -> None:
        from peft import PeftModel

        base = transformers.AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=TORCH_DTYPES[options.dtype])
        self._model = PeftModel.from_pretrained(base.to(device), str(folder / ADAPTER)).eval()
        self._model.generation_config.eos_token_id = None
        self._options, self._device, self.cache_bytes = options, device, 0

    def sample(self, prompts: Prompts, new: int, *, greedy: bool = False) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=self._device)
        how = {"do_sample": False} if greedy else {
            "do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": self._options.group
        }  # fmt: skip
        with torch.no_grad():
            out = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0,
                return_dict_in_generate=True, **how,
            )  # fmt: skip
        self.cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
        return out.sequences[:, longest:].tolist()


_SIDES = {ENGINE: _Engine, PEER: _Peer}


def write_adapter(options: RolloutsOptions, folder: Path) -> None:
    """Writes an adapter on all linears of the blocks, whose factors B are drawn."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / MODEL)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    model.save_pretrained(str(folder / ADAPTER))


def offer(side: str, folder: Path, options: RolloutsOptions) -> Offer:
    """Returns the calls that the process of a side offers: greedy tokens, the seconds of sampled ones, and the bytes of
    keys and values in the call before."""
    device = set_up(options, keeps_freed_memory=side == ENGINE)
    work = _SIDES[side](folder, options, device)
    return {
        "greedy": partial(work.sample, greedy=True),
        "seconds": partial(seconds, work.sample, device),
        "cache_bytes": lambda: work.cache_bytes,
    }


def _prompts(options: RolloutsOptions) -> Prompts:
    """Returns random ids, of lengths evenly from a quarter of the longest to it."""
    generator, count = torch.Generator().manual_seed(options.prompts), options.prompts
    gaps = max(1, count - 1)
    lengths = [options.prompt * (gaps + 3 * row) // (4 * gaps) for row in range(count)]
    return [torch.randint(options.vocab, (max(1, length),), generator=generator).tolist() for length in lengths]


def run(options: RolloutsOptions) -> Table:
    """Measures both sides in turn.

    Raises:
        UserError: a missing device, or greedy tokens that differ.
    """
    device = set_up(options, keeps_freed_memory=False)
    prompts, times = _prompts(options), dict[str, list[float]]({side: [] for side in _SIDES})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(options, folder / MODEL)
        write_adapter(options, folder)
        sides = {side: Worker(offer, side, folder, options) for side in _SIDES}
        try:
            answers = {side: worker.ask("greedy", prompts, min(4, options.new)) for side, worker in sides.items()}
            if answers[ENGINE] != answers[PEER]:
                raise UserError("the engine and PEFT give different greedy tokens, so nothing was timed: report it.")
            for turn in range(options.repeats):
                for side in (list(sides), list(sides)[::-1])[turn % 2]:
                    times[side].append(sides[side].ask("seconds", prompts, options.new))
                progress("rollouts", f"{turn + 1} of {options.repeats}")
            cache = {side: worker.ask("cache_bytes") for side, worker in sides.items()}
        finally:
            for worker in sides.values():
                worker.close()
    made = options.prompts * options.group * options.new
    ratio, low, high = paired_ratio(times[PEER], times[ENGINE])
    return Table(
        title=f"Rollouts, {options.prompts} prompts x {options.group} completions x {options.new} tokens: hidden "
        f"{options.hidden}, {options.layers} layers, {options.heads}/{options.kv_heads} heads, MLP "
        f"{options.intermediate}, vocabulary {options.vocab}, rank {options.rank}, {options.dtype}",
        columns=("side", "seconds", "tokens/s", "keys and values, MiB"),
        rows=tuple(
            (
                side,
                f"{statistics.median(taken):.2f}",
                f"{made / statistics.median(taken):,.0f}",
                f"{cache[side] / 2**20:,.0f}",
            )
            for side, taken in times.items()
        ),
        findings=(
            f"transformers + peft / engine: {ratio:.2f} ({low:.2f} to {high:.2f}), the median and extremes of "
            f"{options.repeats} turns; above 1 the engine is faster.",
            f"Prompts have {min(map(len, prompts))} to {max(map(len, prompts))} tokens. Both gave the same greedy "
            "tokens.",
        ),
        machine=describe(device, ("transformers", "peft")),
        data={"section": "rollouts", "options": asdict(options), "seconds": times, "cache_bytes": cache},
    )
