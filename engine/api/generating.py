"""Text from models that a Python program has opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from engine.api.configuration import AnyPath
from engine.api.interrupts import briefly_interrupted
from engine.api.process import require_no_group
from engine.config.command_line import named_as
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator, Request, check_requests
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.runtime.launch import Launch, start, stop
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation: {"role": "user", "content": ...}."""


@briefly_interrupted
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
        require_no_group()
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
