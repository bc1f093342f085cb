"""Text from the current model, while it trains: greedy continuations of prompts.

The passes are those of an evaluation, so that every layout that trains can do it: without a cache, each token is a
pass through the whole of its row, with its images. A few short samples cost as much as evaluating a few hundred rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.checkpoint.tokenizer_files import end_tokens
from engine.config.run import RunConfig
from engine.data.collate import rank_batch
from engine.data.dataset import dataset_of
from engine.data.row_shape import round_up
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import all_reduce
from engine.errors import UserError
from engine.inference.generate import context_limit
from engine.inference.model_part import chooser_of
from engine.inference.options import Sampling
from engine.inference.text import TextStream, push_all
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.ops.attention.token_context import TokenContext
from engine.seams import resolve
from engine.training.build import Training
from engine.training.row_shape import shape_on_mesh


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """The tokens of a prompt, and its images in their order."""

    ids: list[int]
    images: tuple[Any, ...] = ()


@dataclass(slots=True)
class _Row:
    prompt: SamplePrompt
    stream: TextStream
    ids: list[int] = field(default_factory=list)
    ended: bool = False


def read_prompts(config: RunConfig, tokenizer: Tokenizer, decoder: DecoderConfig, family: Any) -> list[SamplePrompt]:
    """Returns the tokens of train.sample_prompts.

    Args:
        family: of a vision-language model, which writes its conversations; None for a model of text alone.

    Raises:
        UserError: the model needs an image in each prompt; a prompt has no tokens, or no room in the model's context
            for train.sample_tokens more; a chat template is needed and missing; or an image cannot be read, or is given
            to a model of text alone.
    """
    options = config.train
    if family is None and any(options.sample_images):
        raise UserError(
            "train.sample_images names an image, but the model reads text alone: remove train.sample_images."
        )
    if options.sample_chat and family is None and not tokenizer.has_chat_template:
        raise UserError(
            "train.sample_chat is true, but the tokenizer has no chat template: set data.chat_template, or "
            "train.sample_chat to false."
        )
    prompts = []
    limit = context_limit(decoder)
    for number, text in enumerate(options.sample_prompts, 1):
        image = options.sample_images[number - 1] if options.sample_images else ""
        # a model whose layers attend to an image has no other prompts
        if family is not None and (options.sample_chat or image or decoder.needs_images):
            read = resolve("engine.vision.data.reader:sample_conversation")
            prompt = SamplePrompt(*read(family, config.data.image_folder, text, image, number))
        elif options.sample_chat:
            prompt = SamplePrompt(list(tokenizer.chat_prompt([{"role": "user", "content": text}])))
        else:
            prompt = SamplePrompt(list(tokenizer.encode(text, bos=tokenizer.adds_bos)))
        if not prompt.ids or len(prompt.ids) + options.sample_tokens > limit:
            raise UserError(
                f"train.sample_prompts has {text!r} of {len(prompt.ids)} tokens, to which train.sample_tokens "
                f"{options.sample_tokens} are added, but a prompt has at least one token and the model's context is "
                f"{limit}: change one of them."
            )
        prompts.append(prompt)
    return prompts


class TextSamples:
    """Continues the prompts of a run. Collective: every rank makes the same calls.

    Args:
        config, training: of the run.
        tokenizer: of the model.
        prompts: their tokens, as `read_prompts` gives them.
        family: of a vision-language model.
    """

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        tokenizer: Tokenizer,
        prompts: list[SamplePrompt],
        family: Any,
    ) -> None:
        self._training, self._tokenizer, self._prompts, self._family = training, tokenizer, prompts, family
        self._texts = config.train.sample_prompts
        self._limit = config.train.sample_tokens
        self._ends = end_tokens(training.source.model.path, tokenizer.eos_id)
        mesh = training.mesh
        # copies of the model on other data ranks continue the same prompts
        device = training.stages.step.device
        shape = shape_on_mesh(config, device, mesh)
        self._shape, self._cp = replace(shape, length_multiple=1), mesh.cp
        # all lengths of a text, which grows by a token at a time
        self._length_multiple = math.lcm(2 * shape.pad_multiple * mesh.cp.size, shape.length_multiple)

    def run(self) -> list[tuple[str, str]]:
        """Returns each prompt and its continuation; the same on all ranks."""
        return list(zip(self._texts, self.continued(self._prompts, self._limit), strict=True))

    def continued(self, prompts: Sequence[SamplePrompt], limit: int) -> list[str]:
        """Returns the continuations of prompts, of at most `limit` tokens; the same on all ranks."""
        rows = [_Row(prompt, TextStream(self._tokenizer, (), prompt.ids)) for prompt in prompts]
        decoded: dict[Any, Any] = {}  # each image once, though every token takes a pass over all of its text
        while active := [row for row in rows if not row.ended]:
            found = list(zip(active, self._next(active, decoded), strict=True))
            push_all([(row.stream, token) for row, token in found if token not in self._ends])
            for row, token in found:
                row.ids.append(token)
                row.ended = token in self._ends or len(row.ids) == limit
        for row in rows:
            row.stream.finish()
        return [row.stream.text for row in rows]

    def _next(self, rows: list[_Row], decoded: dict[Any, Any]) -> list[int]:
        """Returns the most likely token after each row's text; all rows go through the pipeline together."""
        mesh, stages = self._training.mesh, self._training.stages
        texts = [row.prompt.ids + row.ids for row in rows]
        longest = round_up(max(map(len, texts)), self._length_multiple)
        images = [row.prompt.images for row in rows]
        dataset = dataset_of(
            [(ids, [False] * len(ids)) for ids in texts],
            seq_length=longest,
            extras=[resolve("engine.vision.data.columns:columns_of_images")(images)] if any(images) else (),
        )
        dataset.read_with(self._family, decoded)
        batches = [rank_batch(dataset, [row], [row], self._shape) for row in range(len(texts))]
        lasts = [row * longest + len(ids) - 1 for row, ids in enumerate(texts)]

        def choose(model: Decoder, x: Tensor, batch: Batch, context: TokenContext) -> Tensor:
            """Returns int64 [1], 0 where the text's last token is on another context rank."""
            logits = model.logits(x, context)
            index = batch.token_index_BS.flatten()
            here = (index == lasts[int(index[0]) // longest]).nonzero().flatten()
            chooser = chooser_of(model, Sampling(), slots=1, device=x.device)
            token = chooser.choose(logits[here if len(here) else here.new_zeros(1)], *[here.new_zeros(1)] * 3)
            return token if len(here) else torch.zeros_like(token)

        found = stages.read_head(batches, choose)
        tokens = torch.zeros(len(texts), dtype=torch.int64, device=stages.step.device)
        if found is not None:
            tokens = all_reduce(torch.cat(found), mesh.cp)
        chosen: list[int] = all_reduce(tokens, mesh.pp).tolist()
        return chosen
