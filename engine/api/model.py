"""A model that a Python program has opened, to continue texts, answer messages and score tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

import torch
import torch.distributed as dist

from engine.api.configuration import AnyPath
from engine.api.interrupts import briefly_interrupted
from engine.api.process import require_no_group
from engine.api.prompts import Messages, Prompt, PromptWriter
from engine.batch import IGNORE_LABEL, InputRank
from engine.choices import BaseDType
from engine.config.command_line import named_as
from engine.config.hub import local_folder
from engine.config.model import DType, Kernels, ModelOptions
from engine.config.run import RunConfig
from engine.data.collate import rank_batch
from engine.data.row_shape import RowShape
from engine.data.tokenizer import ChatOptions, Tokenizer, load_tokenizer
from engine.distributed.collectives import all_reduce
from engine.errors import UserError
from engine.files.documents import read_json
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator, check_requests, context_limit
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.inference.row_scores import read_scores, scored_rows, with_labels
from engine.inference.rows import Answer, Request
from engine.objectives.build import build_objective
from engine.pipeline.schedules import ScheduleChoice
from engine.runtime.launch import start, stop, world_size_from_environment
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.training.generation import OpenedModel, open_for_generation
from engine.training.rank_stages import Stages
from engine.training.row_shape import GPU_LENGTH_MULTIPLE
from engine.training.stage import ModelStage

_KEYWORDS = {
    "--model": "model", "--base": "model", "--adapter": "adapter", "--step": "step", "--tokenizer": "tokenizer",
    "--tensor": "tensor", "--pipeline": "pipeline", "--expert": "expert", "--dtype": "dtype",
    "--base-dtype": "base_dtype", "--kernels": "kernels", "--max-new-tokens": "max_new_tokens",
    "--temperature": "temperature", "--top-k": "top_k", "--top-p": "top_p", "--min-p": "min_p",
    "--repetition-penalty": "repetition_penalty", "--seed": "seed", "--stop": "stop_texts",
    "--batch": "batch", "--download": "download=True",
    "rankfold generate --image": "a record with images",
}  # fmt: skip
"""A flag of `rankfold generate` -> the keyword here."""


class GenerationOptions(TypedDict, total=False):
    """How answers are chosen and when they end.

    Attributes:
        max_new_tokens: of an answer, 128 by default, which ends before at an end token of the model or at one of
            `stop_texts`.
        temperature: logits are divided by it; 0, the default, takes the most likely token.
        top_k: with a temperature, only the k most likely tokens; None, the default, for all.
        top_p: with a temperature, only the most likely tokens that together reach this probability; 1 for all.
        min_p: with a temperature, only tokens that are at least this many times as likely as the most likely one; 0
            for all.
        repetition_penalty: of tokens that the prompt or the answer has already (arXiv 1909.05858); 1 for none.
        seed: of the random numbers, 0 by default; the same seed gives the same answers on every number of ranks.
        stop_texts: texts that end an answer and are no part of it.
        batch: prompts that are continued at a time, 8 by default.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop_texts: Sequence[str]
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a model has answered to a prompt.

    Args:
        text: of the answer, without the text that ended it.
        token_ids: of the answer, the token that ended it included.
        logps: natural logarithms of the probabilities of these tokens, given all before, under logits / temperature
            (temperature 1 where it is 0).
        ending: why it ended: "stop_token", "stop_text" or "length".
        prompt_tokens: number of tokens of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    ending: str
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How likely a model finds a text after another.

    Args:
        token_ids: of the text.
        logps: natural logarithms of the probabilities of these tokens, given all before, at temperature 1.
        is_greedy: of each token, whether it is the most likely one.
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    is_greedy: tuple[bool, ...]

    @property
    def logp(self) -> float:
        """The logarithm of the probability of the whole text."""
        return sum(self.logps)


class Model:
    """A model in memory, of `load_model`, until it is closed; also a context manager.

        with load_model("my-model", adapter="runs/mine") as model:
            print(model.chat([{"role": "user", "content": "Who are you?"}]))
            for text in model.stream("Once upon a time"):
                print(text, end="", flush=True)

    An error, Ctrl-C included, leaves it usable. Under torchrun, each rank holds a part and makes the same calls, and
    iterates over `stream` to its end.
    """

    def __init__(self, choice: ModelChoice, chat: ChatOptions, image_folder: Path | None) -> None:
        self._choice, self._chat, self._image_folder = choice, chat, image_folder
        self._stages: Stages | None = None
        if dist.is_initialized() and world_size_from_environment() > 1:
            raise UserError("this rank has another model or run open: close it first, on all ranks.")
        self._launch = start()
        self._log = Log(self._launch.rank)
        self._opened: OpenedModel | None = None
        self._open(choice)

    def _open(self, choice: ModelChoice) -> None:
        self._opened = opened = open_for_generation(choice, self._launch, self._log)
        self._stages = None
        trained = opened.tokenizer
        chat = replace(self._chat, trained_template=trained.chat_template)
        self._tokenizer = load_tokenizer(choice.tokenizer or trained.path or opened.folder, chat)
        for warning in self._tokenizer.chat_warnings():
            self._log.warning(warning)
        self._reader = self._image_reader(opened, self._tokenizer)
        self._choice = choice

    def _image_reader(self, opened: OpenedModel, tokenizer: Tokenizer) -> Any:
        """Returns the reader of prompts for a model that sees images; None for others."""
        config = opened.folder / "config.json"
        if not opened.config.sees_images or not config.is_file():
            return None
        family = resolve(opened.config.images)(read_json(config, "copy it again"), opened.folder, tokenizer)
        if family is None:
            return None
        return resolve("engine.vision.data.reader:ImageReader")(family, self._image_folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model's memory; under torchrun the ranks leave each other. May be called twice."""
        if self._opened is None:
            return
        self._opened = self._stages = None
        stop()

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return context_limit(self._model.config)

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter in use; None for the model alone."""
        return self._choice.adapter

    @property
    def _model(self) -> OpenedModel:
        if self._opened is None:
            raise UserError("this model is closed: load it again with load_model.")
        return self._opened

    @briefly_interrupted
    def use_adapter(self, adapter: AnyPath | None, *, step: int | Literal["best"] | None = None) -> None:
        """Takes another adapter in place of the present one; the weights are read again.

        Args:
            adapter: folder of a PEFT adapter, of a run or of its checkpoint; None for the model alone.
            step: checkpoint of a run; None for the newest.

        Raises:
            UserError: there is no such adapter, or it does not fit the model; the present one stays in use.
        """
        base = self._choice.path or self._model.folder
        with named_as(_KEYWORDS):
            path = None if adapter is None else Path(adapter)
            self._open(replace(self._choice, path=base, adapter=path, step=step))

    @briefly_interrupted
    def generate(self, prompts: Sequence[Prompt], **options: Unpack[GenerationOptions]) -> list[str]:
        """Continues texts and conversations.

        Args:
            prompts: see `Prompt`.
            options: see `GenerationOptions`.

        Returns:
            The answers in the order of the prompts, the same on all ranks.

        Raises:
            UserError: a prompt is empty, does not fit the context or has what the model cannot read, or an option is
                out of its range.
        """
        return [answer.text for answer in self._answers(prompts, options)]

    @briefly_interrupted
    def complete(self, prompts: Sequence[Prompt], **options: Unpack[GenerationOptions]) -> list[Completion]:
        """Continues as `generate` does, and returns the answers with their tokens and how likely these were.

        Args:
            prompts: as for `generate`.
            options: as for `generate`.

        Raises:
            UserError: as `generate`.
        """
        return [
            Completion(
                text=answer.text,
                token_ids=answer.ids,
                logps=answer.logps,
                ending=answer.ending,
                prompt_tokens=len(answer.request.ids),
            )
            for answer in self._answers(prompts, options, with_logps=True)
        ]

    @briefly_interrupted
    def chat(self, messages: Messages, **options: Unpack[GenerationOptions]) -> str:
        """Returns the assistant's answer to a conversation.

        Args:
            messages: the turns, the last of them the user's.
            options: see `GenerationOptions`.

        Raises:
            UserError: as `generate`.
        """
        (answer,) = self._answers([messages], options)
        return answer.text

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """Yields the answer to one prompt as it comes, in pieces that together are the text of `generate`.

        Args:
            prompt: see `Prompt`.
            options: see `GenerationOptions`.

        Raises:
            UserError: as `generate`.
        """
        with self._requests([prompt], options) as (requests, generator):
            pieces: list[str] = []
            passes = generator.passes(requests, on_text=lambda _, text: pieces.append(text))
            for _ in passes:
                yield from pieces
                pieces.clear()
            yield from pieces

    @briefly_interrupted
    def score(self, pairs: Sequence[tuple[Prompt, str | Sequence[int]]]) -> list[Score]:
        """Returns how likely the model finds texts after prompts.

        Args:
            pairs: a prompt, "" for the beginning of a document, and the text that may follow: as text, whose tokens are
                those that it adds to the prompt's text, or as token ids.

        Returns:
            A score for each pair, the same on all ranks.

        Raises:
            UserError: nothing stands before the text, or both do not fit the context.
        """
        model = self._model
        rows = []
        with self._writing() as writer:
            for number, (prompt, text) in enumerate(pairs, 1):
                ids, count = self._joined(writer, prompt, text, number)
                if not count or len(ids) <= count:
                    raise UserError(
                        f"pair {number} has {len(ids) - count} tokens before the {count} that are scored, but at least "
                        "one of both is expected: give a prompt and a text."
                    )
                if len(ids) > self.context_length + 1:
                    raise UserError(
                        f"pair {number} has {len(ids)} tokens, but the model's context is {self.context_length}: "
                        "shorten it."
                    )
                rows.append((ids, count))
        check_requests([Request(row=at, ids=ids[:-1]) for at, (ids, _) in enumerate(rows)], model.config, 0)
        return self._scores(rows)

    def _joined(
        self, writer: PromptWriter, prompt: Prompt, text: str | Sequence[int], number: int
    ) -> tuple[tuple[int, ...], int]:
        """Returns the tokens of a prompt and the text after it, and how many of them are the text's."""
        tokenizer = self._tokenizer
        if prompt == "":
            begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
            before: tuple[int, ...] = () if begin is None else (begin,)
            whole = (*before, *(tokenizer.encode(text) if isinstance(text, str) else text))
            return whole, len(whole) - len(before)
        written = writer.write(prompt, number)
        if written.images:
            raise UserError(f"pair {number} has images, and texts after images are not scored: leave images out.")
        if not isinstance(text, str):
            return (*written.ids, *text), len(text)
        if isinstance(prompt, str):
            whole = tuple(tokenizer.encode(prompt + text, bos=tokenizer.adds_bos))
            return whole, len(whole) - len(written.ids)
        own = tokenizer.encode(text)
        return (*written.ids, *own), len(own)

    def _scores(self, rows: Sequence[tuple[tuple[int, ...], int]]) -> list[Score]:
        if not rows:
            return []
        model, device = self._model, self._launch.device
        mesh, layout = model.mesh, model.decoder.layout
        if self._stages is None:
            # an objective is part of every stage; these passes compute none
            objective = build_objective(RunConfig(model=ModelOptions(path=str(model.folder))), cp=mesh.cp, dp=mesh.dp)
            stage = ModelStage(model.decoder, objective, device, trains=False)
            self._stages = Stages({mesh.pp.rank: stage}, mesh.pp, ScheduleChoice(num_ranks=mesh.pp.size))
        shape = RowShape(
            input_rank=InputRank.at(
                tensor=mesh.tp.rank, tensor_size=mesh.tp.size, context=0, context_size=1, pipeline=mesh.pp.rank
            ),
            pad_multiple=mesh.tp.size if layout.splits_tokens or layout.routes_local_tokens else 1,
            length_multiple=GPU_LENGTH_MULTIPLE if device.type == "cuda" else 1,
        )
        longest = max(len(ids) for ids, _ in rows)
        data = scored_rows(rows, seq_length=longest + shape.pad_multiple * shape.length_multiple)
        batches = [with_labels(rank_batch(data, [row], [row], shape)) for row in range(len(rows))]
        with torch.no_grad():
            found = self._stages.read_head(batches, read_scores)
        total = torch.zeros(2, sum(count for _, count in rows), dtype=torch.float64, device=device)
        if found is not None:
            labelled = [batch.labels_BS.flatten() != IGNORE_LABEL for batch in batches]
            total += torch.cat([one[:, at.to(device)] for one, at in zip(found, labelled, strict=True)], dim=1)
        logps, greedy = all_reduce(total, mesh.pp).tolist()
        scores, begin = [], 0
        for ids, count in rows:
            own = slice(begin, begin + count)
            begin += count
            scores.append(
                Score(
                    token_ids=ids[-count:], logps=tuple(logps[own]), is_greedy=tuple(one == 1.0 for one in greedy[own])
                )
            )
        return scores

    def _answers(
        self, prompts: Sequence[Prompt], options: GenerationOptions, *, with_logps: bool = False
    ) -> list[Answer]:
        if isinstance(prompts, (str, Mapping)):
            raise UserError("prompts is one prompt, but a list of them is expected: write [prompt].")
        if not prompts:
            return []
        with self._requests(prompts, options, with_logps=with_logps) as (requests, generator):
            return generator.run(requests)

    @contextmanager
    def _writing(self) -> Iterator[PromptWriter]:
        writer = PromptWriter(self._tokenizer, self._reader)
        try:
            yield writer
        finally:
            writer.close()

    @contextmanager
    def _requests(
        self, prompts: Sequence[Prompt], options: GenerationOptions, *, with_logps: bool = False
    ) -> Iterator[tuple[list[Request], Generator]]:
        """Opens what continues prompts: their requests, and a generator with a cache for them."""
        model = self._model
        given: dict[str, Any] = {**options}
        ends = model.end_tokens(self._tokenizer.eos_id)
        with named_as(_KEYWORDS), self._writing() as writer:
            limits = Limits(
                max_new_tokens=given.pop("max_new_tokens", 128),
                stop_texts=tuple(given.pop("stop_texts", ())),
                stop_ids=ends,
                slots=given.pop("batch", 8),
            )
            sampling = Sampling(**given)
            written = [writer.write(prompt, number) for number, prompt in enumerate(prompts, 1)]
            requests = [Request(row=row, ids=one.ids, images=one.images) for row, one in enumerate(written)]
            check_requests(requests, model.config, limits.max_new_tokens)
            slots = min(limits.slots, len(requests))
            stage = InferenceStage(
                model.decoder,
                tp=model.mesh.tp,
                pp=model.mesh.pp,
                sampling=sampling,
                slots=slots,
                length=max(len(request.ids) for request in requests) + limits.max_new_tokens,
                device=self._launch.device,
                with_logps=with_logps,
                capture=decode_capture("auto", self._launch.device),
            )
            family = None if self._reader is None else self._reader.family
            yield requests, Generator(stage, replace(limits, slots=slots), self._tokenizer, family=family)


@briefly_interrupted
def load_model(
    model: AnyPath | None = None,
    *,
    adapter: AnyPath | None = None,
    step: int | Literal["best"] | None = None,
    tokenizer: AnyPath | None = None,
    chat_template: str | None = None,
    chat_arguments: Mapping[str, Any] | None = None,
    image_folder: AnyPath | None = None,
    tensor: int | None = None,
    pipeline: int = 1,
    expert: int = 1,
    dtype: DType | None = None,
    base_dtype: BaseDType | None = None,
    kernels: Kernels = "auto",
    download: bool = False,
) -> Model:
    """Opens a model for generation; several ranks share it.

    Args:
        model: Hugging Face folder, its name on the hub, or partitioned base; None takes the base that the run in
            `adapter` records.
        adapter: folder of a PEFT adapter, of a run or of its checkpoint, which is not merged; None for the model alone.
        step: checkpoint of the run in `adapter`, or "best" for that of the lowest evaluation loss; None for the newest.
        tokenizer: its folder or file; None for the one that the adapter was trained with, else the model's.
        chat_template: name or file of a chat template, as for data.chat_template; None for the one that the adapter was
            trained with, else the tokenizer's.
        chat_arguments: variables for the chat template, such as {"enable_thinking": False}.
        image_folder: that paths of images are relative to; None for the current one.
        tensor: ranks that share each layer; None for all that `pipeline` leaves.
        pipeline: ranks that share the layers.
        expert: ranks of `tensor` that divide whole experts of a mixture.
        dtype: of weights and arithmetic; None for float32 on a CPU and bfloat16 on a GPU.
        base_dtype: storage format of the layers' linears, such as "nf4"; None for `dtype`.
        kernels: backend of the ops.
        download: whether a model, adapter or tokenizer that is named as on the Hugging Face hub may be downloaded.

    Returns:
        The model; close it, or use it as a context manager.

    Raises:
        UserError: there is no such model or adapter, they do not fit, or a value is out of its range.
    """
    with named_as(_KEYWORDS):
        choice = ModelChoice(
            path=local_folder(_path(model), download=download),
            adapter=local_folder(_path(adapter), download=download, need="adapter"),
            step=step,
            tokenizer=local_folder(_path(tokenizer), download=download, need="tokenizer"),
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            dtype=dtype,
            base_dtype=base_dtype,
            kernels=kernels,
        )
        require_no_group()
        return Model(choice, ChatOptions(template=chat_template, arguments=chat_arguments or {}), _path(image_folder))


def _path(given: AnyPath | None) -> Path | None:
    return None if given is None else Path(given)


@briefly_interrupted
def generate(
    model: AnyPath | None,
    prompts: Sequence[Prompt],
    *,
    adapter: AnyPath | None = None,
    dtype: DType | None = None,
    **options: Unpack[GenerationOptions],
) -> list[str]:
    """Continues texts and conversations with a model that is opened for this call alone; see `load_model` for more.

    Args:
        model: Hugging Face folder or partitioned base; None takes the base that the run in `adapter` records.
        prompts: see `Prompt`.
        adapter: folder of a PEFT adapter, of a run or of its checkpoint, which is not merged; None for the model alone.
        dtype: of weights and arithmetic; None for float32 on a CPU and bfloat16 on a GPU.
        options: see `GenerationOptions`.

    Returns:
        The answers in the order of the prompts, the same on all ranks.

    Raises:
        UserError: there is no such model or adapter, a prompt is empty or does not fit the context, or a value is out
            of its range.
    """
    if isinstance(prompts, (str, Mapping)):
        raise UserError("prompts is one prompt, but a list of them is expected: write [prompt].")
    with load_model(model, adapter=adapter, dtype=dtype) as opened:
        return opened.generate(prompts, **options)
