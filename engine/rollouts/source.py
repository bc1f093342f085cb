"""The steps of a run that trains on its own samples: prompts in, completions, rewards, advantages, rows out.

A buffer is filled between two steps, on all ranks, and emptied by the steps that follow. Completions become ordinary
documents in ordinary rows, so that every layout trains on them as on any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader, with_even_rows
from engine.data.row_shape import round_up
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.rollouts.agents.agent import Agent
from engine.rollouts.agents.metrics import branch_note
from engine.rollouts.buffer import FILE, Buffer, OpenBuffer
from engine.rollouts.data.completions import Completion, CompletionColumns, completion_columns
from engine.rollouts.data.prompts import Prompt, PromptLoader, PromptSet
from engine.rollouts.data.routes import DifferingRoutes, RouteColumns, RouteShape, routes_fit
from engine.rollouts.ends import completion_ends
from engine.rollouts.evaluation import CompletionValidation, evaluation_sampler
from engine.rollouts.figures import OVERLONG, SHOWN, format_completions, mismatch, staleness, step_figures
from engine.rollouts.learned import Learned
from engine.rollouts.moving_reference import MovingReference
from engine.rollouts.objective.advantages import (
    Advantages,
    advantages,
    advantages_of_each,
    overlong_penalties,
    total_rewards,
)
from engine.rollouts.objective.policy import row_weight
from engine.rollouts.resuming import buffer_options, is_state, require_unchanged
from engine.rollouts.rewards.pool import Sample
from engine.rollouts.sampler import Sampled, Sampler
from engine.rollouts.scorer import Scorer, samples_of
from engine.rollouts.served import ServedSampler
from engine.rollouts.teachers.differences import divergences, token_advantages
from engine.rollouts.teachers.teachers import Teachers
from engine.rollouts.token_logps import token_logps
from engine.rollouts.trained_sampler import TrainedSampler
from engine.rollouts.turns.tools import Tools
from engine.rollouts.weights import Ledger
from engine.runtime.launch import Launch
from engine.telemetry.format import counted
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training
from engine.training.prefixes import choose_sharing
from engine.training.row_shape import shape_on_mesh
from engine.training.step_source import SourceState, StepRows

ROLLOUT, REWARD, TEACHERS = "rollout_seconds", "reward_seconds", "teacher_seconds"


class RolloutSource:
    """Steps on the model's own completions; see `engine.training.step_source.StepSource`. Also a context manager,
    which ends the processes that call reward functions.

    Args:
        config, launch, training: of the run.
        loader: of its prompts.
        tokenizer: of the model.
        rewards: functions of a Python program, by their names.
        tools: that the model may call, or the agent that drives its conversations; None for none.
        validation: held-out prompts; None for none.
        routes: as `engine.rollouts.served.check_server` returned it.
        metrics: gets completions with their rewards.
        say: prints a line on rank 0.
        run_dir: the run's folder.

    Raises:
        UserError: no token ends a completion.
    """

    def __init__(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        loader: PromptLoader,
        tokenizer: Tokenizer,
        *,
        rewards: Mapping[str, Callable[..., Any]],
        tools: Tools | Agent | None = None,
        validation: PromptSet | None = None,
        routes: RouteShape | None = None,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        run_dir: Path,
    ) -> None:
        self._config, self._training, self._loader, self._tokenizer = config, training, loader, tokenizer
        self._metrics, self._say = metrics, say
        model = training.source.model
        self._routes = RouteShape.of(model.decoder)
        self._sharing = choose_sharing(config, model.decoder)
        if self._sharing.obstacle is not None:
            say(f"prompts are computed with each completion: {self._sharing.obstacle}")
        ends = completion_ends(model.path, tokenizer)
        if outside := sorted(end for end in ends if not 0 <= end < model.decoder.vocab_size):
            say(
                f"warning: {model.path} names token {outside[0]} as one that ends completions, but its vocabulary has "
                f"{model.decoder.vocab_size} entries: none ends with it"
            )
        talk = None if tools is None else tools.talk(config, ends=ends, vocabulary=model.decoder.vocab_size)
        self._sampler: Sampler
        if config.rollout.server is None:
            longest = loader.prompts.longest
            self._sampler = TrainedSampler(config, training, ends=ends, longest_prompt=longest, say=say, talk=talk)
        else:
            prompts = [one.ids for one in loader.prompts.prompts]
            self._sampler = ServedSampler(
                config, launch, training, ends=ends, run_dir=run_dir, talk=talk, prompts=prompts, routes=routes, say=say
            )
        self._scorer = Scorer(config, launch, columns=loader.prompts.columns, in_program=rewards)
        self._teachers = Teachers(config, launch, training) if config.distillation.teachers else None
        self.validation: CompletionValidation | None = None
        if validation is not None:
            sample = evaluation_sampler(
                config, training, self._sampler, ends=ends, longest_prompt=validation.longest, say=say, talk=talk
            )
            self.validation = CompletionValidation(
                config, validation, sample=sample, scorer=self._scorer, tokenizer=tokenizer, say=say
            )
        moves = config.objective.reference_sync_steps is not None
        self._reference = MovingReference(config, training) if moves else None
        self._open: OpenBuffer | None = None
        self._ledger = Ledger()
        self._generation, self._prompts_answered = 0, 0
        """The number of the next buffer, and the prompts that earlier ones have taken."""
        self.num_micro_batches, self.stalled = loader.num_micro_batches, 0.0
        self.work_seconds: dict[str, float] = {ROLLOUT: 0.0, REWARD: 0.0}
        if self._teachers is not None:
            self.work_seconds[TEACHERS] = 0.0

    @property
    def buffer(self) -> Buffer | None:
        """The buffer that the steps come from; None before the first."""
        return None if self._open is None else self._open.buffer

    @property
    def shown(self) -> Mapping[str, str]:
        return SHOWN | {f"teachers/{name}/kl": f"kl {name}" for name in self._config.distillation.names}

    def sentence(self) -> str:
        return self._loader.sentence()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._scorer.close()
        if self._teachers is not None:
            self._teachers.close()
        self._sampler.close(failed=error[0] is not None)

    def stream(self, step: int, consumed: int, num_steps: int) -> Generator[StepRows]:
        for number in range(step, step + num_steps):
            if self._reference is not None:
                self._reference.follow(number)
            if self._open is None or self._open.is_used_up(consumed):
                buffer = self._filled(number, last=step + num_steps)
                self._open = OpenBuffer(buffer, consumed, self._config.train.global_batch_size)
            yield self._rows(self._open.buffer, self._open.taken(consumed))
            consumed += self._config.train.global_batch_size

    def state(self, consumed: int) -> SourceState:
        values: dict[str, Any] = {"generation": self._generation, "prompts": self._prompts_answered}
        files: dict[str, bytes] = {}
        if (ahead := self._sampler.ahead) is not None:
            values["begun_at"] = ahead.version
            files |= self._sampler.files()
        if self._open is not None and not self._open.is_used_up(consumed):
            buffer = self._open.buffer
            values |= {
                "taken": self._open.taken(consumed),
                "num_steps": buffer.num_steps,
                "iterations": buffer.iterations,
                "lag": buffer.lag,
                "options": self._buffer_options(),
            }
            files[FILE] = buffer.to_bytes()
        values["weights"] = self._ledger.state()
        return SourceState({"rollout": values}, files)

    def restore(self, checkpoint: TrainingCheckpoint, consumed: int) -> None:
        values = checkpoint.state.get("rollout")
        if values is None:
            raise UserError(
                f"{checkpoint.folder} is of a run that did not sample its completions: start a new run from its "
                "adapter with lora.init_from, or from its merged model."
            )
        if not is_state(values):
            raise UserError(f"{checkpoint.folder} is damaged: training.state.rollout is no state of rollouts.")
        self._generation, self._prompts_answered = values["generation"], values["prompts"]
        self._ledger = Ledger.from_state(values["weights"])
        if "begun_at" in values:
            self._begin_again(checkpoint, values["begun_at"])
        if "taken" not in values:
            return
        require_unchanged(checkpoint, values["options"], self._buffer_options(), data=self._loader.fingerprint())
        buffer = Buffer.from_bytes(
            checkpoint.beside(FILE),
            checkpoint.folder / FILE,
            generation=self._generation - 1,
            num_steps=values["num_steps"],
            iterations=values["iterations"],
            lag=values.get("lag", 0),
        )
        self._require_fits(buffer, checkpoint.folder / FILE)
        self._ledger.require(buffer.weights, str(checkpoint.folder / FILE))
        batch = self._config.train.global_batch_size
        self._open = OpenBuffer(buffer, consumed - values["taken"] * batch, batch)

    def _require_fits(self, buffer: Buffer, path: Path) -> None:
        """Refuses a buffer that this run cannot have sampled.

        Raises:
            UserError: its prompts, completions or rewards are not those of a generation batch of this run.
        """
        rollout, size = self._config.rollout, self._training.source.model.decoder.vocab_size
        options = self._config.distillation
        teachers = 0 if options.whole else len(options.teachers)
        tokens = np.concatenate([one.tokens for one in buffer.completions])
        found = {
            f"{buffer.group} completions of a prompt": buffer.group == rollout.num_generations,
            f"{buffer.rewards_NF.shape[1]} rewards of a completion": buffer.rewards_NF.shape[1] == len(self._names()),
            f"{_count(buffer)} teachers": _count(buffer) == teachers,
            "prompts that data.train does not have": 0
            <= buffer.prompts.min()
            <= buffer.prompts.max()
            < len(self._loader.prompts.prompts),
            "tokens that the model does not have": 0 <= tokens.min() <= tokens.max() < size,
        }
        fault = next((name for name, fits in found.items() if not fits), None)
        if fault is None and not routes_fit(self._routes, self._route_counts(buffer)):
            fault = "experts of other tokens, or of another model"
        if fault is not None:
            raise UserError(f"{path} has {fault}, which this run cannot have sampled: use another checkpoint.")

    def _route_counts(self, buffer: Buffer) -> list[tuple[NDArray[Any] | None, int]]:
        """Returns the routes of each completion of a buffer, and the number of its tokens and its prompt's."""
        return [
            (one.routes, len(self._prompt_ids(buffer, place)) + len(one.tokens))
            for place, one in enumerate(buffer.completions)
        ]

    def _prompt_ids(self, buffer: Buffer, place: int) -> tuple[int, ...]:
        """Returns the tokens of the prompt that a completion of a buffer answers."""
        if (own := buffer.completions[place].prompt) is not None:
            return tuple(own.tolist())
        return self._loader.prompts.prompts[int(buffer.prompts[place // buffer.group])].ids

    def _begin_again(self, checkpoint: TrainingCheckpoint, step: int) -> None:
        """Begins again to sample the batch that was under way when a checkpoint was saved. Collective.

        Args:
            step: steps that the adapter had been trained for.
        """
        what = f"generation batch {self._generation + 1} was being sampled by the adapter of step {step} when "
        if not self._config.rollout.overlap:
            self._say(f"{what}{checkpoint.folder} was saved: it is sampled by the newest weights instead")
            return
        self._say(f"{what}{checkpoint.folder} was saved: it is sampled again, by the same adapter")
        prompts = self._next_prompts()[1]
        self._sampler.begin_again(prompts, checkpoint.beside, generation=self._generation, step=step)
        if (again := self._sampler.ahead) is not None:
            self._ledger.require([again], f"the adapter in {checkpoint.folder}")

    def _buffer_options(self) -> dict[str, Any]:
        return buffer_options(self._config, [] if self._teachers is None else self._teachers.identities)

    # filling

    def _filled(self, step: int, *, last: int) -> Buffer:
        """Returns the next generation batch, sampled and scored. Collective.

        Args:
            step: steps that were taken.
            last: after which the run ends.
        """
        config = self._config
        device = self._training.stages.step.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the step before is not part of the rollout's time
        begin = time.monotonic()
        numbers, prompts = self._next_prompts()
        generation = self._generation
        completions, weights = self._sampler.take(prompts, generation=generation, step=step)
        self._generation, self._prompts_answered = generation + 1, self._prompts_answered + len(prompts)
        self._begin_next(step, last)
        if (note := branch_note(completions)) is not None:
            self._say(f"step {step + 1}: {note}")
        sampled = time.monotonic()
        self.work_seconds[ROLLOUT] += sampled - begin
        samples = samples_of(prompts, completions, self._tokenizer)
        scores = self._scorer.score(samples)
        for problem in scores.problems:
            self._say(f"warning: step {step + 1}: {problem}")
        rewards_NF = self._with_penalties(scores.rewards, completions)
        found = self._advantages(rewards_NF)
        buffer = Buffer(
            generation=generation,
            prompts=numbers,
            completions=tuple(replace(one, dialogue=None).sampled_by(weights.version) for one in completions),
            rewards_NF=rewards_NF,
            advantages=found.of_completions,
            uniform=~found.varies,
            num_steps=config.rollout.steps_per_generation,
            iterations=config.objective.num_iterations,
            lag=step - weights.version,
            weights=(weights,),
        )
        self._ledger.keep(weights, self._sampler.ahead)
        self.work_seconds[REWARD] += time.monotonic() - sampled
        self._show(step, samples, buffer)
        if buffer.total_steps > 1 or self._sampler.elsewhere:
            buffer = self._with_old_logps(buffer)
        if self._sampler.elsewhere:
            self._compare(buffer, step)
        if self._reference is not None:
            dataset = self._dataset(buffer, range(len(buffer.prompts)), masks=False, routes=False)
            buffer = replace(buffer, reference_logps=buffer.of_each(self._reference.logps(dataset), dataset))
        if self._teachers is not None and not config.distillation.whole:
            begin = time.monotonic()
            buffer = replace(buffer, teacher_logps=self._teacher_logps(self._teachers, buffer))
            self.work_seconds[TEACHERS] += time.monotonic() - begin
        return buffer

    def _next_prompts(self) -> tuple[NDArray[np.int64], list[Prompt]]:
        """Returns the prompts of the next generation batch, with their numbers."""
        loader = self._loader
        numbers = loader.prompt_order.rows(self._prompts_answered)
        return numbers, [loader.prompts.prompts[number] for number in numbers.tolist()]

    def _begin_next(self, step: int, last: int) -> None:
        """Begins to sample the generation batch that follows the current one, where that is asked for. Collective."""
        rollout = self._config.rollout
        if not rollout.overlap:
            return
        if step + rollout.steps_per_generation * self._config.objective.num_iterations < last:
            self._sampler.begin(self._next_prompts()[1], generation=self._generation, step=step)

    def _compare(self, buffer: Buffer, step: int) -> None:
        """Acts on the distance between a server's log-probabilities and the trainer's over a whole buffer.

        Raises:
            UserError: the distance is larger than the run allows.
        """
        rollout = self._config.rollout
        found = mismatch(buffer, range(len(buffer.prompts)), bound=rollout.mismatch_bound)
        if found.mean <= rollout.mismatch_bound:
            return
        old = f", and its adapter is {counted(buffer.lag, 'step')} old" if buffer.lag else ""
        line = f"step {step + 1}: {found.sentence(rollout.mismatch_bound)}{old}"
        if rollout.mismatch == "stop":
            raise UserError(
                f"{line}: serve the model of model.path, in the precision of model.dtype, or raise "
                "rollout.mismatch_bound."
            )
        self._say(f"warning: {line}{', for which losses are corrected' if rollout.corrects_sampler else ''}")

    def _advantages(self, rewards_NF: NDArray[np.float64]) -> Advantages:
        """Returns the advantages of a generation batch's rewards and penalties."""
        options, group = self._config.objective, self._config.rollout.num_generations
        weights = [source.weight for source in self._config.rollout.reward_sources]
        judged = ~np.isnan(rewards_NF[:, : len(weights)]).all(axis=1)
        factors = [*weights, *[1.0] * (rewards_NF.shape[1] - len(weights))]
        if options.reward_aggregation == "normalize_then_sum":
            return advantages_of_each(rewards_NF, factors, judged=judged, group=group)
        totals = np.where(judged, total_rewards(rewards_NF, factors), np.nan)
        return advantages(totals, group=group, scale=options.scale_rewards)

    def _with_penalties(self, rewards_NF: NDArray[np.float64], completions: Sequence[Sampled]) -> NDArray[np.float64]:
        """Returns the rewards with a column for the penalty, where there is one."""
        rollout = self._config.rollout
        if rollout.overlong_buffer is None:
            return rewards_NF
        penalties = overlong_penalties(
            np.array([one.num_sampled for one in completions]),
            longest=rollout.max_completion_length,
            buffer=rollout.overlong_buffer,
        )
        return np.column_stack((rewards_NF, penalties))

    def _with_old_logps(self, buffer: Buffer) -> Buffer:
        """Returns the buffer with the trainer's log-probabilities of the completions before the first step on them, and
        the share of its own choices of experts that are not the server's. Collective."""
        mesh, stages = self._training.mesh, self._training.stages
        # of truncated completions too, which are compared with their sampler
        dataset = self._dataset(buffer, range(len(buffer.prompts)), masks=False)
        given = dataset.extra(RouteColumns) is not None
        differing = DifferingRoutes(stages.step.device) if given else None
        logps = token_logps(self._config, mesh, stages, dataset, differing=differing)
        share = None if differing is None else differing.share(mesh)
        return replace(buffer, old_logps=buffer.of_each(logps, dataset), routes_differ=share)

    def _teacher_logps(self, teachers: Teachers, buffer: Buffer) -> tuple[NDArray[np.float32], ...]:
        """Returns the teachers' log-probabilities of the completions, [K, tokens] of each. Collective."""
        # a teacher's layers may be of a kind that cannot share
        dataset = self._dataset(buffer, range(len(buffer.prompts)), masks=False, routes=False, shares=False)
        return buffer.of_each(teachers.logps(dataset), dataset)

    def _show(self, step: int, samples: Sequence[Sample], buffer: Buffer) -> None:
        for number, line in enumerate(format_completions(samples, buffer, self._names(), self._config.rollout.show), 1):
            self._metrics.text(step=step + 1, name=f"completion/{number}", text=line)
            self._say(f"step {step + 1}: {line}")

    def _names(self) -> list[str]:
        """Returns the names of the columns of a buffer's rewards."""
        names = [source.name for source in self._config.rollout.reward_sources]
        return names if self._config.rollout.overlong_buffer is None else [*names, OVERLONG]

    # emptying

    def _rows(self, buffer: Buffer, taken: int) -> StepRows:
        """Returns the rows of the next step from a buffer.

        Args:
            taken: steps that were trained from it.
        """
        prompts, learned = buffer.step_prompts(taken), self._learned(buffer, taken)
        trained = self._trained(buffer, prompts)
        dataset = self._dataset(buffer, trained, taken=taken)
        loader = self._row_loader(dataset)
        weights = [source.weight for source in self._config.rollout.reward_sources]
        figures = step_figures(buffer, prompts, self._names(), weights, dropped=len(prompts) - len(trained))
        figures["off_policy_steps"] = float(buffer.lag + taken)
        self._ledger.require(buffer.weights, "the buffer")
        figures |= staleness(buffer, prompts, taken, limit=self._config.rollout.max_staleness)
        if buffer.teacher_logps is not None:
            figures |= self._divergences(buffer, prompts)
        if self._sampler.elsewhere:
            bound = self._config.rollout.mismatch_bound
            if self._sampler.delivery is not None:
                figures["sampler_delivery"] = self._sampler.delivery
            if buffer.routes_differ is not None:
                figures["sampler_routes"] = buffer.routes_differ
            figures["sampler_outside"] = mismatch(buffer, prompts, bound=bound).outside
        return StepRows(
            batches=loader.batches(0),
            targets=max(1, loader.target_count(0)),  # where all of them are masked, the loss is 0
            samples=self._config.train.global_batch_size,
            rows=len(dataset),
            tokens=int(dataset.row_lengths.sum()),
            figures=figures,
            has_signal=any(self._teaches(buffer, prompt, learned) for prompt in prompts),
            is_followed_by_work=taken + 1 == buffer.total_steps,
        )

    def _divergences(self, buffer: Buffer, prompts: range) -> dict[str, float]:
        """Returns an estimate of the divergence from each teacher over the completions of a step, by name."""
        assert buffer.teacher_logps is not None
        learned = self._learned(buffer, 0).completions
        places = [place for prompt in prompts for place in buffer.places(prompt) if learned[place]]
        names = self._config.distillation.names
        if not places:
            return {f"teachers/{name}/kl": float("nan") for name in names}
        sampled = [buffer.completions[place].sampled_mask() for place in places]
        found = divergences(
            [buffer.teacher_logps[place][:, mask] for place, mask in zip(places, sampled, strict=True)],
            [buffer.own_logps[place][mask] for place, mask in zip(places, sampled, strict=True)],
        )
        return {f"teachers/{name}/kl": float(one) for name, one in zip(names, found, strict=True)}

    def _trained(self, buffer: Buffer, prompts: range) -> list[int]:
        """Returns the prompts of a step that are trained on; at least one, so that there are rows."""
        if not self._config.rollout.drop_uniform_groups or self._teachers is not None:
            return [*prompts]
        return [prompt for prompt in prompts if not buffer.uniform[prompt]] or [prompts.start]

    def _teaches(self, buffer: Buffer, prompt: int, learned: Learned) -> bool:
        """Returns whether any completion of a prompt of the buffer has a gradient."""
        told = self._teachers is not None or not buffer.uniform[prompt]
        members = [place for place in buffer.places(prompt) if learned.completions[place]]
        return told and any(self._is_trained(buffer.completions[place]) for place in members)

    def _learned(self, buffer: Buffer, taken: int) -> Learned:
        rollout = self._config.rollout
        return Learned.of(buffer, taken, num_rewards=len(rollout.rewards), limit=rollout.max_staleness)

    def _is_trained(self, completion: Sampled) -> bool:
        return not (completion.truncated and self._config.objective.mask_truncated)

    def _dataset(
        self,
        buffer: Buffer,
        prompts: Sequence[int],
        *,
        masks: bool = True,
        taken: int = 0,
        routes: bool = True,
        shares: bool = True,
    ) -> TokenDataset:
        """Returns the completions of some prompts of a buffer as rows, those alone that are learned from; without a
        target the first of them, where there is no other.

        Args:
            masks: False for all completions, with all their tokens that were sampled as targets.
            taken: steps that were trained from the buffer.
            routes: whether routers are given the experts that the server chose, where these are known.
            shares: whether completions may share their prompt in a row.
        """
        config, learned = self._config, self._learned(buffer, taken)
        documents, given = [], []
        kept = {"old_logps": buffer.old_logps, "reference_logps": buffer.reference_logps}
        known: dict[str, list[NDArray[np.float32]]] = {name: [] for name in kept}
        every = [place for prompt in prompts for place in buffer.places(prompt)]
        for place in [place for place in every if not masks or learned.completions[place]] or every[:1]:
            one = buffer.completions[place]
            ids = self._prompt_ids(buffer, place)
            left_out = learned.left_out(place) if masks else one.written
            documents.append(
                Completion(
                    prompt=ids,
                    tokens=one.tokens.tolist(),
                    sampled_logps=one.logps.tolist(),
                    advantage=float(buffer.advantages[place]),
                    token_advantages=self._token_advantages(buffer, place),
                    written=None if left_out is None else left_out.tolist(),
                    trained=(self._is_trained(one) and bool(learned.completions[place])) or not masks,
                )
            )
            if routes and one.routes is not None:
                given.append(one.routes)
            for name, logps in kept.items():
                if logps is not None:
                    known[name] += [np.zeros(len(ids), dtype=np.float32), logps[place]]
        dataset = TokenDataset(
            completion_columns(documents, row_weight(config.objective.loss_type)),
            seq_length=config.data.seq_length,
            packing=config.data.packing is True,
        )
        given_logps: dict[str, Any] = {name: np.concatenate(found) for name, found in known.items() if found}
        if given_logps:
            columns = dataset.extra(CompletionColumns)
            assert columns is not None
            dataset.put(replace(columns, **given_logps))
        if given and self._routes is not None:
            dataset.put(RouteColumns.of(given, self._routes))
        return self._sharing.rows(dataset, ranks=self._training.mesh.dp.size) if shares else dataset

    def _token_advantages(self, buffer: Buffer, place: int) -> list[float] | None:
        """Returns what teachers add to the advantage of each token of a completion; None without teachers."""
        if buffer.teacher_logps is None:
            return None
        options, own = self._config.distillation, buffer.own_logps[place]
        added, sampled = np.zeros(len(own), dtype=np.float32), buffer.completions[place].sampled_mask()
        added[sampled] = token_advantages(
            buffer.teacher_logps[place][:, sampled], own[sampled], options.factors, options.discount
        )
        return [float(one) for one in added]

    def _row_loader(self, dataset: TokenDataset) -> DataLoader:
        """Returns the loader that makes one global batch of all rows, filled up so that every rank has as many
        micro-batches."""
        device, mesh = self._training.stages.step.device, self._training.mesh
        shape = with_even_rows(shape_on_mesh(self._config, device, mesh), dataset)
        return DataLoader(
            dataset,
            shape,
            global_batch_size=round_up(len(dataset), shape.micro_batch_size * mesh.dp.size),
            seed=0,
            shuffle=False,
            num_workers=0,
            pin_memory=device.type == "cuda",
        )


def _count(buffer: Buffer) -> int:
    """Returns the number of teachers of a buffer."""
    return 0 if buffer.teacher_logps is None else len(buffer.teacher_logps[0])
