"""Section `turns`: steps of GRPO whose model calls tools of an environment, against TRL's GRPOTrainer with PEFT.

Both read one folder of weights, take the same prompts, environment and options, and train a LoRA adapter of the same
modules; each in its own process, in turn. A step is everything from its prompts to its update. The model is drawn, and
its tokenizer has whole calls as tokens, so that it calls tools now and then: what the two sample differs, and is
alike in number; the tokens that each sampled and its environment wrote are counted, and so are turns.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from engine.runtime.launch import Launch
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.model import draw, hf_config
from rankfold.benchmarking.processes import Offer, Worker
from rankfold.benchmarking.sections import TurnsOptions
from rankfold.benchmarking.table import Table, progress
from rankfold.benchmarking.timing import paired_ratio

ENGINE, PEER = "engine", "trl + peft"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_END, _UNKNOWN = "<|im_end|>", "?"
_CALLS = [f'<tool_call>{{"name": "look", "arguments": {{"place": {place}}}}}</tool_call>' for place in range(2)]
_MARKS = ["<user>", "<assistant>", "<result>", "<tools>", "<tool_call>", "</tool_call>"]
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzRV 0123456789{}:,_." + '"'
TOKENS = [_END, _UNKNOWN, *_MARKS, *_CALLS, *_CHARACTERS]
"""Few, so that a turn of a drawn model, which any token may end, has about as many tokens, and calls a tool as often
as not."""
_TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}<user>{{ message.content }}"
    "{%- elif message.role == 'tool' %}<result>{{ message.content }}"
    "{%- elif message.role == 'assistant' %}<assistant>{% generation %}{{ message.content }}"
    "{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{% endgeneration %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{% endif %}"
)
_ENVIRONMENT = '''
class Places:
    def reset(self, **columns):
        self.looked = set()

    def look(self, place: int) -> str:
        """Looks at a place.

        Args:
            place: Its number.
        """
        self.looked.add(place)
        return "there is nothing here"

    def get_reward(self) -> float:
        return float(len(self.looked))
'''


class Steps(NamedTuple):
    """Figures of some steps, each a list with one of a step.

    Args:
        seconds: of the whole step.
        processor: seconds of processor time of it, in the process that trains.
        rollout: seconds of it until its completions have their rewards, without those of the environment.
        environment: seconds of it in which a call of the environment was under way; calls at the same time count once.
        sampled: tokens of the model.
        written: tokens of the environment.
        turns: of the model.
    """

    seconds: list[float]
    processor: list[float]
    rollout: list[float]
    environment: list[float]
    sampled: list[int]
    written: list[int]
    turns: list[int]


def _no_steps() -> Steps:
    return Steps(*([] for _ in Steps._fields))


class _Calls:
    """Measures the time in which at least one call is under way."""

    def __init__(self) -> None:
        self._lock, self._open, self._since, self.seconds = threading.Lock(), 0, 0.0, 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def other(*arguments: Any, **more: Any) -> Any:
            with self._lock:
                if self._open == 0:
                    self._since = time.perf_counter()
                self._open += 1
            try:
                return call(*arguments, **more)
            finally:
                with self._lock:
                    self._open -= 1
                    if self._open == 0:
                        self.seconds += time.perf_counter() - self._since

        return other


def write_job(options: TurnsOptions, folder: Path) -> None:
    """Writes the model, its tokenizer, the environment and the prompts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    shape = {**hf_config(options), "use_cache": True, "vocab_size": len(TOKENS), "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(**{**shape, "pad_token_id": 1, "bos_token_id": None})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        draw(name, parameter.data)
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({one: number for number, one in enumerate(TOKENS)}, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens([_END])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in (*_MARKS, *_CALLS)])
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _UNKNOWN,
        "clean_up_tokenization_spaces": False, "chat_template": _TEMPLATE,
    }  # fmt: skip
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "env.py").write_text(_ENVIRONMENT, encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(len(_CHARACTERS), (64, options.prompt - 7), generator=generator).tolist()
    prompts = ["".join(_CHARACTERS[one] for one in row) for row in drawn]
    lines = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Engine:
    def __init__(self, folder: Path, options: TurnsOptions) -> None:
        from engine.config.load import load_config
        from engine.rollouts.source import RolloutSource
        from engine.rollouts.turns.pool import _ProcessSeat
        from engine.training.prepare import prepare

        self._opened, self._calls, self._step = ExitStack(), _Calls(), 0
        _ProcessSeat.ask = self._calls.timed(_ProcessSeat.ask)  # type: ignore[method-assign]
        rows = options.prompts * options.group
        settings = {
            "model.path": folder / "model", "data.train": folder / "prompts.jsonl", "data.packing": "true",
            "data.seq_length": options.prompt + options.new, "objective.name": "grpo", "rollout.rewards": "environment",
            "rollout.environment": f"{folder}/env.py:Places", "rollout.num_generations": options.group,
            "rollout.max_completion_length": options.new, "rollout.max_turns": options.turns, "rollout.slots": rows,
            "rollout.environment_workers": options.workers or rows, "rollout.show": 0, "lora.rank": options.rank,
            "lora.alpha": 2 * options.rank, "lora.targets": json.dumps(TARGETS), "optim.lr": 1e-5,
            "optim.schedule": "constant", "train.steps": 10**6, "train.micro_batch_size": options.micro_batch,
            "train.global_batch_size": rows, "log.peak_tflops": 0, "checkpoint.dir": folder / "run",
        }  # fmt: skip
        arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        launch = Launch(rank=0, world_size=1, device=torch.device("cpu"))
        self._run = prepare(load_config(arguments), launch, Log(1), RunListener(), self._opened)
        assert isinstance(self._run.source, RolloutSource)
        self._source, self._rows = self._run.source, rows
        self._stream = self._source.stream(0, 0, 10**6)

    def steps(self, count: int) -> Steps:
        found = _no_steps()
        for _ in range(count):
            began, called, worked = time.perf_counter(), self._calls.seconds, time.process_time()
            rows = next(self._stream)
            sampled = time.perf_counter()
            result = self._run.training.step(rows.batches, rows.targets, self._run.step_plan.rate(self._step))
            float(result.loss)
            found.seconds.append(time.perf_counter() - began)
            found.processor.append(time.process_time() - worked)
            found.environment.append(self._calls.seconds - called)
            found.rollout.append(sampled - began - found.environment[-1])
            assert self._source.buffer is not None
            completions = self._source.buffer.completions
            written = sum(int(one.written.sum()) for one in completions if one.written is not None)
            found.written.append(written)
            found.sampled.append(sum(len(one.tokens) for one in completions) - written)
            found.turns.append(sum(one.turns.turns for one in completions if one.turns is not None))
            self._step += 1
        return found


class _Peer:
    def __init__(self, folder: Path, options: TurnsOptions) -> None:
        import trl
        from datasets import Dataset
        from peft import LoraConfig
        from trl.chat_template_utils import qwen3_template

        spec = importlib.util.spec_from_file_location("benchmark_environment", folder / "env.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._calls = _Calls()
        for name in ("reset", "look", "get_reward"):
            setattr(module.Places, name, self._calls.timed(getattr(module.Places, name)))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
        tokenizer.response_template = qwen3_template
        lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        rows = options.prompts * options.group
        config = trl.GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=options.micro_batch_of_peer or rows,
            gradient_accumulation_steps=rows // (options.micro_batch_of_peer or rows), num_generations=options.group,
            max_completion_length=options.new, max_tool_calling_iterations=options.turns - 1, learning_rate=1e-5,
            lr_scheduler_type="constant", beta=0.0, loss_type="grpo", temperature=1.0, report_to=[],
            logging_steps=10**6, save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True, dataloader_num_workers=0,
        )  # fmt: skip
        lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
        self._found = _no_steps()
        self._trainer = trl.GRPOTrainer(
            model=str(folder / "model"), args=config, processing_class=tokenizer, peft_config=lora,
            train_dataset=Dataset.from_list([json.loads(line) for line in lines]), environment_factory=module.Places,
        )  # fmt: skip
        self._trainer.add_callback(_steps_timed(self))
        self._sample, self._sampled = self._trainer._generate_and_score_completions, 0.0
        self._trainer._generate_and_score_completions = self._sampling

    def _sampling(self, inputs: Any) -> Any:
        began, called = time.perf_counter(), self._calls.seconds
        outputs = self._sample(inputs)
        environment = self._calls.seconds - called
        self._found.environment.append(environment)
        self._found.rollout.append(time.perf_counter() - began - environment)
        mask, own = outputs["completion_mask"], outputs["completion_mask"] * outputs.get("tool_mask", 1)
        self._found.written.append(int(mask.sum() - own.sum()))
        self._found.sampled.append(int(own.sum()))
        before = torch.nn.functional.pad(own, (1, 0))[:, :-1]
        self._found.turns.append(int(((own == 1) & (before == 0)).sum()))
        return outputs

    def steps(self, count: int) -> Steps:
        self._found = _no_steps()
        self._trainer.args.max_steps = count
        self._trainer.train()
        return self._found

    def began(self) -> None:
        self._since, self._worked = time.perf_counter(), time.process_time()

    def ended(self) -> None:
        self._found.seconds.append(time.perf_counter() - self._since)
        self._found.processor.append(time.process_time() - self._worked)


def _steps_timed(peer: _Peer) -> Any:
    """Returns a callback that tells a side where its steps begin and end."""

    class Timer(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **more: Any) -> None:
            peer.began()

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            peer.ended()

    return Timer()


_SIDES: dict[str, Callable[[Path, TurnsOptions], Any]] = {ENGINE: _Engine, PEER: _Peer}


def offer(side: str, folder: Path, options: TurnsOptions) -> Offer:
    """Returns the calls that the process of a side offers: some steps, and their figures."""
    set_up(options, keeps_freed_memory=side == ENGINE)
    torch.manual_seed(1)
    return {"steps": partial(_SIDES[side](folder, options).steps)}


def run(options: TurnsOptions) -> Table:
    """Measures both sides in turn."""
    device = set_up(options, keeps_freed_memory=False)
    figures = {side: _no_steps() for side in _SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(options, folder)
        sides = {side: Worker(offer, side, folder, options) for side in _SIDES}
        try:
            for side, worker in sides.items():
                worker.ask("steps", options.warmup)
                progress("turns", f"{side} is warm")
            for turn in range(options.repeats):
                for side in (list(sides), list(sides)[::-1])[turn % 2]:
                    for one, more in zip(figures[side], sides[side].ask("steps", 1), strict=True):
                        one += more
                progress("turns", f"{turn + 1} of {options.repeats}")
        finally:
            for worker in sides.values():
                worker.close()
    return _table(options, figures, describe(device, ("trl", "transformers", "peft")))


def _table(options: TurnsOptions, figures: dict[str, Steps], machine: dict[str, str]) -> Table:
    rows = []
    for side, found in figures.items():
        training = [
            whole - rollout - environment
            for whole, rollout, environment in zip(found.seconds, found.rollout, found.environment, strict=True)
        ]
        shown = (found.seconds, found.processor, found.rollout, found.environment, training)
        rows.append((
            side, *(f"{statistics.median(taken):.3f}" for taken in shown),
            *(f"{statistics.mean(counts):,.0f}" for counts in (found.sampled, found.written, found.turns)),
            f"{statistics.median(a / b for a, b in zip(found.sampled, found.seconds, strict=True)):,.0f}",
        ))  # fmt: skip
    ratio, low, high = paired_ratio(figures[PEER].seconds, figures[ENGINE].seconds)
    speeds = {
        side: [count / taken for count, taken in zip(found.sampled, found.seconds, strict=True)]
        for side, found in figures.items()
    }
    fair, least, most = paired_ratio(speeds[ENGINE], speeds[PEER])
    costs = {
        side: [taken / count for count, taken in zip(found.sampled, found.processor, strict=True)]
        for side, found in figures.items()
    }
    cheap, lowest, highest = paired_ratio(costs[PEER], costs[ENGINE])
    return Table(
        title=f"Steps of GRPO with calls, {options.prompts} prompts x {options.group} conversations of up to "
        f"{options.turns} turns and {options.new} tokens: hidden {options.hidden}, {options.layers} layers, "
        f"{options.heads}/{options.kv_heads} heads, MLP {options.intermediate}, vocabulary {len(TOKENS)}, rank "
        f"{options.rank}, float32",
        columns=(
            "side", "seconds", "processor seconds", "rollout", "environment", "training", "sampled tokens",
            "written tokens", "turns", "sampled tokens/s",
        ),
        rows=tuple(rows),
        findings=(
            f"{PEER} / engine: {ratio:.2f} ({low:.2f} to {high:.2f}), the median and extremes of {options.repeats} "
            "turns; above 1 the engine is faster.",
            f"By sampled tokens in a second, as the two do not sample the same: {fair:.2f} ({least:.2f} to "
            f"{most:.2f}).",
            f"By processor time for each of them, which other work on the machine disturbs less: {cheap:.2f} "
            f"({lowest:.2f} to {highest:.2f}).",
        ),
        machine=machine,
        data={
            "section": "turns", "options": asdict(options),
            "steps": {side: found._asdict() for side, found in figures.items()},
        },
    )  # fmt: skip
