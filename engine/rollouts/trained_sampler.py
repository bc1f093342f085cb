"""Samples completions with the trained model in place: in its layout, from its current weights.

Copies of the model that hold the same weights answer different prompts. All ranks then know all completions. A sampled
token is a function of (seed, generation batch, prompt, member of its group, position, token), and so the same in every
layout, but for the rounding of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from engine.config.run import RunConfig
from engine.distributed.collectives import all_reduce, gather_objects
from engine.inference.decode_graphs import decode_capture
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage, Parts
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Request
from engine.inference.waiting_rows import RECOMPUTED
from engine.layers.merged_codes import kept_bytes, merged_codes
from engine.rollouts.cache_size import PREFILL_TOKENS, cache_size
from engine.rollouts.data.prompts import Prompt
from engine.rollouts.sampler import ConversationParts, Sampled
from engine.rollouts.turns.feed import TurnFeed, leads
from engine.rollouts.weights import Weights, trained_digest
from engine.telemetry.format import format_bytes
from engine.training.build import Training

_ROW_BITS = 32


class TrainedSampler:
    """Samples the completions of a run with the model that it trains; see `engine.rollouts.sampler.Sampler`.

    Args:
        config, training: of the run.
        ends: tokens that end a completion.
        longest_prompt: tokens of the longest prompt.
        say: prints a line on rank 0.
        talk: what completions of several turns share; on ranks that lead no copy of the model without processes.
        greedy: whether the most likely token is taken, whatever the temperature.
    """

    elsewhere = False
    delivery: float | None = None
    ahead: Weights | None = None

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        *,
        ends: frozenset[int],
        longest_prompt: int,
        say: Callable[[str], None],
        talk: ConversationParts | None = None,
        greedy: bool = False,
    ) -> None:
        self._training, self._rollout, self._say, self._talk = training, config.rollout, say, talk
        rollout, mesh = config.rollout, training.mesh
        self._cache = cache_size(rollout, prompt=longest_prompt, row=config.data.seq_length)
        self._limits = Limits(
            max_new_tokens=rollout.max_completion_length,
            stop_ids=ends,
            slots=rollout.slots,
            prefill_tokens=PREFILL_TOKENS,
        )
        self._sampling = Sampling(
            temperature=0.0 if greedy else rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            seed=config.train.seed % 2**32,
        )
        # ranks that gather a layer's weights from each other, or send each other tokens for experts, do so in each pass
        together = config.parallel.shard == "parameters" or config.parallel.expert > 1
        self._others = mesh.dp_cp if together else None
        self._capture = decode_capture(rollout.cuda_graph, training.stages.step.device)
        self._merges_once = config.lora.merge_aware and rollout.merge_once
        if self._merges_once and not greedy:
            kept = format_bytes(kept_bytes(training.parts, training.weights))
            say(
                f"rollouts: merge-aware codes are made once for each generation batch, with {kept} of the base's kept "
                "beside them on each rank meanwhile (rollout.merge_once false merges in each pass)"
            )
        self.notes: tuple[str, ...] = ()
        """What the passes do without, of the last rollout; see `engine.inference.model_part.InferenceStage`."""

    def take(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> tuple[list[Sampled], Weights]:
        known, weights = self.notes, Weights(step, trained_digest(self._training))
        completions = self.sample(prompts, generation=generation)
        for note in self.notes[len(known) :]:
            self._say(f"rollouts: {note}")
        for note in () if self._talk is None else self._talk.notes():
            self._say(note)
        return completions, weights

    def begin(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> None:
        """Does nothing: the devices are training."""

    def begin_again(
        self, prompts: Sequence[Prompt], files: Callable[[str], bytes], *, generation: int, step: int
    ) -> None:
        """Does nothing: nothing was begun."""

    def files(self) -> Mapping[str, bytes]:
        return {}

    def close(self, *, failed: bool) -> None:
        """Ends the processes of environments; the cache was freed with the completions."""
        if self._talk is not None:
            self._talk.close()

    def sample(self, prompts: Sequence[Prompt], *, generation: int) -> list[Sampled]:
        """Samples the completions of some prompts, those of the first one first. Collective.

        Args:
            prompts: of a generation batch.
            generation: its number in the run, from 0.
        """
        # a rank that has no prompts runs no forward, which would take part in gathering the weights of the last step
        self._training.optimizer.flat.finish_publish()
        with self._merged():
            return self._sampled(prompts, generation)

    def _merged(self) -> AbstractContextManager[None]:
        """Has a merge-aware run's codes made once, from the weights as they are, for all passes within."""
        if not self._merges_once:
            return nullcontext()
        return merged_codes(self._training.parts, self._training.weights)

    def _sampled(self, prompts: Sequence[Prompt], generation: int) -> list[Sampled]:
        copies, members = self._training.mesh.dp_cp, self._rollout.num_generations
        total, width = len(prompts) * members, self._rollout.max_completion_length
        # neighbours, as those of one prompt share its pass and its cache
        mine = range(copies.rank * total // copies.size, (copies.rank + 1) * total // copies.size)
        if self._talk is not None:
            return self._with_turns(prompts, mine, generation, self._talk)
        requests = [Request(row=(generation << _ROW_BITS) + row, ids=prompts[row // members].ids) for row in mine]
        answers = self._generator().run(requests)
        tokens = torch.zeros(total, width, dtype=torch.int32)
        logps = torch.zeros(total, width, dtype=torch.float32)
        lengths = torch.zeros(total, dtype=torch.int32)
        for row, answer in zip(mine, answers, strict=True):
            lengths[row] = count = len(answer.ids)
            tokens[row, :count] = torch.tensor(answer.ids, dtype=torch.int32)
            logps[row, :count] = torch.tensor(answer.logps, dtype=torch.float32)
        if copies.size > 1:  # each has its own rows, and zeros elsewhere
            device = self._training.stages.step.device
            tokens, logps, lengths = (all_reduce(one.to(device), copies).cpu() for one in (tokens, logps, lengths))
        found = []
        for row_tokens, row_logps, length in zip(tokens.numpy(), logps.numpy(), lengths.tolist(), strict=True):
            truncated = int(row_tokens[length - 1]) not in self._limits.stop_ids
            found.append(
                Sampled(tokens=row_tokens[:length].copy(), logps=row_logps[:length].copy(), truncated=truncated)
            )
        return found

    def _with_turns(
        self, prompts: Sequence[Prompt], mine: range, generation: int, talk: ConversationParts
    ) -> list[Sampled]:
        """Samples completions of several turns.

        Args:
            mine: places of those that this copy of the model samples.
        """
        mesh, members = self._training.mesh, self._rollout.num_generations
        rows = {place: (generation << _ROW_BITS) + place for place in mine}
        own = None
        if leads(mesh):
            talk.listen(mesh.dp_cp.rank)
            own = {row: talk.converse(prompts[place // members]) for place, row in rows.items()}
        first = list[Request]()
        if not talk.pool.has_environment:  # which may add to a prompt
            first = [
                Request(row=row, ids=prompts[place // members].ids, max_new=talk.longest) for place, row in rows.items()
            ]
        feed = TurnFeed(own, len(mine) - len(first), mesh, talk.pool.size)
        generator = self._generator()
        try:
            generator.run(first, further=feed)
            found = feed.sampled()
        finally:
            feed.close()
        if generator.recomputes_turns:
            self.notes = (*self.notes, RECOMPUTED)
        of_copies = gather_objects(found, mesh.dp_cp)
        return [one for copy in of_copies for one in cast(list[Sampled], copy)]

    def _generator(self) -> Generator:
        """Makes the generator; its cache takes memory as long as it lives."""
        training, mesh = self._training, self._training.mesh
        partition = training.plan.partition
        numbers = partition.parts(mesh.pp.rank)
        # passes are as large as the slots allow, however many rows are left: a product of another shape may be computed
        # in another order, and a row's numbers would depend on the others
        stage = InferenceStage(
            Parts(dict(zip(numbers, training.parts, strict=True)), partition.stage_rank),
            tp=mesh.tp,
            pp=mesh.pp,
            sampling=self._sampling,
            slots=self._limits.slots,
            length=self._cache.length,
            new=self._cache.new,
            group=self._cache.group,
            conversations=self._cache.conversations,
            device=training.stages.step.device,
            with_logps=True,
            tokens_multiple=self._limits.slots,
            capture=self._capture,
        )
        self.notes = stage.notes
        return Generator(stage, self._limits, None, in_step_with=self._others)
