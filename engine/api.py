"""The functions for Python programs: make a configuration, train, export, generate. Only stable ones are here.

    from engine.api import export, generate, load_config, train

In one process it needs no launcher, and can be called again and again. A script that torchrun starts is one rank of as
many as there are, and each rank calls the same functions in the same order. The output of the command `rankfold` is
printed here too. Impossible requests raise `UserError`, whose message is one sentence.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import yaml

from engine.config.command_line import named_as
from engine.config.keys import check_text
from engine.config.load import load_config as load_arguments
from engine.config.option_names import sections
from engine.config.rules import check_config, check_files
from engine.config.run import RunConfig
from engine.conversion.commands import Options, run_export
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator, Request, check_requests
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.runtime.launch import Launch, start, stop, world_size_from_environment
from engine.telemetry.format import short_path
from engine.telemetry.listener import RunListener
from engine.telemetry.log import Log
from engine.training import trainer
from engine.training.generation import open_for_generation
from engine.training.reports.summary import RunSummary

__all__ = ["RunConfig", "RunListener", "RunSummary", "UserError", "export", "generate", "load_config", "train"]

AnyPath = str | PathLike[str]
Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation: {"role": "user", "content": ...}."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _briefly_interrupted(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets Ctrl-C leave a function with the caller's part of the traceback alone."""

    @functools.wraps(call)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(None) from None

    return wrapped


def load_config(source: AnyPath | Mapping[str, Any] | None = None, **options: Any) -> RunConfig:
    """Makes the configuration of a run from a YAML file, a mapping, keywords, or several of them.

    Args:
        source: path of a YAML file, or a mapping as such a file has: {"model": {"path": ...}}, or {"model.path": ...}.
        options: sections, or options without one, which win over `source`: lora={"rank": 8}, trainable=["lm_head"].
            Options that neither gives keep their defaults; `rankfold train --help all` explains every option.

    Returns:
        The configuration, checked as far as it can be without knowing the number of ranks. It is frozen.

    Raises:
        UserError: an unknown option, a value of the wrong kind, values that clash, or a path that does not exist.
    """
    given = _by_section([*(source.items() if isinstance(source, Mapping) else ()), *options.items()])
    if given:
        check_text(yaml.safe_dump(given), "The configuration")  # names, before values become arguments
    arguments = [] if source is None or isinstance(source, Mapping) else [f"--config={fspath(source)}"]
    for name, value in given.items():
        named = {f"{name}.{key}": one for key, one in value.items()} if name in sections() else {name: value}
        arguments += [f"--{option}={_argument(one)}" for option, one in named.items()]
    return load_arguments(arguments)


@_briefly_interrupted
def train(config: RunConfig, listener: RunListener | None = None) -> RunSummary:
    """Trains as configured, in this process, or as one rank where torchrun started it.

    Args:
        config: of `load_config`.
        listener: hears, on every rank, when things happen: steps, evaluations, the end.

    Returns:
        The results of the run. `run_dir` is its folder; `stopped` says which of a scheduler's signals stopped it, None
        at its end.

    Raises:
        KeyboardInterrupt: Ctrl-C; where steps had been taken, after the run was saved.
        UserError: something in the configuration, the model or the data cannot work, or another rank is lost. With one
            process the next call starts afresh; as a rank of several, let the process end.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train was called in a thread, but it answers signals: call it in the main thread.")
    check_config(config)
    check_files(config)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    _require_no_group()
    try:
        summary = trainer.train(config, listener)
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
    if summary.interrupted:
        raise KeyboardInterrupt(f"stopped after step {summary.steps} of the run in {short_path(summary.run_dir)}")
    return summary


@_briefly_interrupted
def export(
    run: AnyPath,
    out: AnyPath,
    *,
    format: Literal["peft", "hf"] = "peft",
    step: int | Literal["best"] | None = None,
    base: AnyPath | None = None,
    base_name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a run's trained parameters as a PEFT adapter or as a whole Hugging Face model.

    Stock PEFT or transformers opens the result, and their logits are compared with the engine's, before it takes its
    name. Call it on one rank.

    Args:
        run: folder of a run or of one of its checkpoints.
        out: folder to make.
        format: "peft" for the adapter by itself, "hf" for the whole model with adapters added into its weights.
        step: checkpoint of the run, or "best" for that of the lowest evaluation loss; None takes the newest.
        base: the base of the run, where it has moved.
        base_name: the adapter's name of its base, such as its name on the Hugging Face hub.
        overwrite: replace an adapter or a model at `out`.

    Returns:
        `out`.

    Raises:
        UserError: there is no such run or checkpoint, it does not hold the adapter or model, or `out` exists.
    """
    with named_as({"--base": "base", "--base-name": "base_name", "--step": "step", "--overwrite": "overwrite=True"}):
        run_export(
            Path(run),
            Path(out),
            form=format,
            merge=format == "hf",
            base=None if base is None else Path(base),
            step=step,
            options=Options(overwrite=overwrite),
            base_name=base_name,
        )
    return Path(out)


@_briefly_interrupted
def generate(
    model: AnyPath | None,
    prompts: Sequence[Prompt],
    *,
    adapter: AnyPath | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop_texts: Sequence[str] = (),
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> list[str]:
    """Continues texts and conversations with a model; several ranks share its layers' matrices.

    Args:
        model: Hugging Face folder or partitioned base; None takes the base that the run in `adapter` records.
        prompts: a text is continued as it is; messages are written with the chat template, up to the next answer.
        adapter: folder of a PEFT adapter, of a run or of its checkpoint, which is not merged; None for the model alone.
        max_new_tokens: of an answer, which ends before at an end token of the model or at one of `stop_texts`.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: with a temperature, only the k most likely tokens; None for all.
        top_p: with a temperature, only the most likely tokens that together reach this probability; 1 for all.
        seed: of the random numbers; the same seed gives the same answers on every number of ranks.
        stop_texts: texts that end an answer and are no part of it.
        dtype: of weights and arithmetic; None for float32 on a CPU and bfloat16 on a GPU.

    Returns:
        The answers in the order of the prompts, the same on all ranks.

    Raises:
        UserError: there is no such model or adapter, a prompt is empty or does not fit the context, or a value is out
            of its range.
    """
    with named_as(_KEYWORDS):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        limits = Limits(max_new_tokens=max_new_tokens, stop_texts=tuple(stop_texts))
        choice = ModelChoice(
            path=None if model is None else Path(model), adapter=None if adapter is None else Path(adapter), dtype=dtype
        )
        if isinstance(prompts, str):
            raise UserError("prompts is one text, but a list of them is expected: write [prompt].")
        _require_no_group()
        launch = start()
        answers = _answers(choice, list(prompts), sampling, limits, launch)
    stop()
    return answers


_KEYWORDS = {
    "--model": "model", "--base": "model", "--adapter": "adapter", "--max-new-tokens": "max_new_tokens",
    "--temperature": "temperature", "--top-k": "top_k", "--top-p": "top_p", "--seed": "seed", "--stop": "stop_texts",
}  # fmt: skip
"""A flag of `rankfold generate` -> the keyword here."""


def _answers(
    choice: ModelChoice, prompts: list[Prompt], sampling: Sampling, limits: Limits, launch: Launch
) -> list[str]:
    if not prompts:
        return []
    opened = open_for_generation(choice, launch, Log(launch.rank))
    trained = opened.tokenizer
    tokenizer = load_tokenizer(trained.path or opened.folder, ChatOptions(trained_template=trained.chat_template))
    requests = [Request(row=row, ids=_tokens(prompt, tokenizer)) for row, prompt in enumerate(prompts)]
    check_requests(requests, opened.config, limits.max_new_tokens)
    slots = min(limits.slots, len(requests))
    stage = InferenceStage(
        opened.decoder,
        tp=opened.mesh.tp,
        pp=opened.mesh.pp,
        sampling=sampling,
        slots=slots,
        length=max(len(request.ids) for request in requests) + limits.max_new_tokens,
        device=launch.device,
        capture=decode_capture("auto", launch.device),
    )
    ends = opened.end_tokens(tokenizer.eos_id)
    limits = replace(limits, stop_ids=ends, slots=slots)
    return [answer.text for answer in Generator(stage, limits, tokenizer).run(requests)]


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, bos=tokenizer.adds_bos))
    if not tokenizer.has_chat_template:
        raise UserError("a prompt has messages, but this model has no chat template: give a text.")
    return tuple(tokenizer.chat_prompt([dict(message) for message in prompt]))


def _require_no_group() -> None:
    if dist.is_initialized() and world_size_from_environment() == 1:
        raise UserError(
            "this process has a process group of its own, which training would use and leave: call "
            "torch.distributed.destroy_process_group() first."
        )


def _by_section(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Sections, and options without one; later values win, and names may have their section: optim.lr."""
    found: dict[str, Any] = {}
    for name, value in options:
        section, _, option = str(name).rpartition(".")
        plain = _plain({option: value} if section else value)
        key = section or option
        both = isinstance(plain, dict) and isinstance(found.get(key), dict)
        found[key] = {**found[key], **plain} if both else plain
    return found


def _plain(value: Any) -> Any:
    """Mappings, lists and paths as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise UserError(
        f"The configuration has a value of type {type(value).__name__}, but texts, numbers, lists and mappings are "
        "expected: convert it."
    )


def _argument(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
