"""Text from the model as it is, while it trains: what prompts are continued with, greedily.

The passes are those of an evaluation, so that every layout that trains can do it: without a cache, each token is a
pass through the whole of its row. A few short samples cost as much as evaluating a few hundred rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config.run import RunConfig
from engine.data.collate import rank_batch, round_up
from engine.data.dataset import TokenDataset
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import all_reduce
from engine.errors import UserError
from engine.inference.generate import context_limit
from engine.inference.options import Sampling
from engine.inference.sampling import Chooser
from engine.inference.text import TextStream
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.ops.attention.token_context import TokenContext
from engine.training.build import Training
from engine.training.data import loader_options
from engine.training.generation import end_tokens


@dataclass(slots=True)
class _Row:
    prompt: list[int]
    stream: TextStream
    ids: list[int] = field(default_factory=list)
    ended: bool = False


def read_prompts(config: RunConfig, tokenizer: Tokenizer, decoder: DecoderConfig) -> list[list[int]]:
    """Tokens of train.sample_prompts.

    Raises:
        UserError: the model needs a picture in each; one has no tokens, or no room in the model's context for
            train.sample_tokens more; or a chat template is wanted and missing.
    """
    options = config.train
    if options.sample_prompts and decoder.cross_attention is not None:
        raise UserError(
            f"train.sample_prompts has texts, but every layer of this {decoder.family} model attends to a picture: set "
            "it to [], and ask about pictures with rankfold generate --image."
        )
    if options.sample_chat and not tokenizer.has_chat_template:
        raise UserError(
            "train.sample_chat is true, but the tokenizer has no chat template: set data.chat_template, or "
            "train.sample_chat to false."
        )
    prompts = []
    for text in options.sample_prompts:
        if options.sample_chat:
            ids = tokenizer.chat_prompt([{"role": "user", "content": text}])
        else:
            ids = tokenizer.encode(text, bos=tokenizer.adds_bos)
        limit = context_limit(decoder)
        if not ids or len(ids) + options.sample_tokens > limit:
            raise UserError(
                f"train.sample_prompts has {text!r} of {len(ids)} tokens, to which train.sample_tokens "
                f"{options.sample_tokens} are added, but a prompt has at least one token and the model's context is "
                f"{limit}: change one of them."
            )
        prompts.append(list(ids))
    return prompts


class TextSamples:
    """Continues the prompts of a run. Collective: every rank has one and runs it at the same places.

    Args:
        config, training: of the run.
        tokenizer: of the model.
        prompts: their tokens, as `read_prompts` gives them.
    """

    def __init__(self, config: RunConfig, training: Training, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
        self._training, self._tokenizer, self._prompts = training, tokenizer, prompts
        self._texts = config.train.sample_prompts
        self._limit = config.train.sample_tokens
        self._ends = end_tokens(training.source.model.path, tokenizer.eos_id)
        mesh = training.mesh
        # copies of the model on other data ranks continue the same prompts
        device = training.stages.step.device
        shape = loader_options(config, device, data_rank=0, data_size=1, context_rank=mesh.cp.rank)
        self._pad_multiple, self._cp = shape["pad_multiple"], mesh.cp
        # all lengths of a text, which grows by a token at a time
        self._length_multiple = math.lcm(2 * self._pad_multiple * mesh.cp.size, shape["length_multiple"])

    def run(self) -> list[tuple[str, str]]:
        """Each prompt and what it is continued with; the same on all ranks."""
        rows = [_Row(prompt, TextStream(self._tokenizer, (), prompt)) for prompt in self._prompts]
        while active := [row for row in rows if not row.ended]:
            for row, token in zip(active, self._next([row.prompt + row.ids for row in active]), strict=True):
                row.ids.append(token)
                if token not in self._ends:
                    row.stream.push(token)
                row.ended = token in self._ends or len(row.ids) == self._limit
        for row in rows:
            row.stream.finish()
        return list(zip(self._texts, (row.stream.text for row in rows), strict=True))

    def _next(self, texts: list[list[int]]) -> list[int]:
        """The most likely token after each text, all of which go through the pipeline together."""
        mesh, stages = self._training.mesh, self._training.stages
        longest = round_up(max(map(len, texts)), self._length_multiple)
        dataset = TokenDataset.from_documents([(ids, [False] * len(ids)) for ids in texts], seq_length=longest)
        batches = [
            rank_batch(
                dataset,
                [row],
                [row],
                pad_multiple=self._pad_multiple,
                pad_token=0,
                context_size=self._cp.size,
                context_rank=self._cp.rank,
            )
            for row in range(len(texts))
        ]
        lasts = [row * longest + len(ids) - 1 for row, ids in enumerate(texts)]

        def choose(model: Decoder, x: Tensor, batch: Batch, context: TokenContext) -> Tensor:
            """int64 [1], 0 where the text's last token is another context rank's."""
            logits = model.logits(x, context)
            index = batch.token_index_BS.flatten()
            here = (index == lasts[int(index[0]) // longest]).nonzero().flatten()
            token = _chooser(model, x.device).choose(
                logits[here if len(here) else here.new_zeros(1)], *[here.new_zeros(1)] * 3
            )
            return token if len(here) else torch.zeros_like(token)

        found = stages.read_head(batches, choose)
        tokens = torch.zeros(len(texts), dtype=torch.int64, device=stages.step.device)
        if found is not None:
            tokens = all_reduce(torch.cat(found), mesh.cp)
        chosen: list[int] = all_reduce(tokens, mesh.pp).tolist()
        return chosen


def quoted(text: str) -> str:
    """Quotes a text on one line, with what would move a terminal's cursor escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in f'"{text}"')


def _chooser(model: Decoder, device: torch.device) -> Chooser:
    """Takes the most likely of the tokens whose logits are on all tensor-parallel ranks."""
    pieces, size = model.vocab_spec.pieces, model.config.vocab_size
    return Chooser(
        Sampling(),
        tp=model.layout.tp,
        first_id=pieces[0].global_offset if pieces else size,
        num_ids=pieces[0].length if pieces else 0,
        vocab_size=size,
        slots=1,
        device=device,
    )
