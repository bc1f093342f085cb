"""Completions that a server samples, in place of `engine.rollouts.trained_sampler`.

Rank 0 writes the adapters, asks the server in threads, and tells all ranks, which so have the same completions in every
layout. Before each generation batch the server loads the current adapters under a new name and unloads the previous
ones: a server caches prompts by the adapter's name.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from engine.checkpoint.model_folder import ModelFolder
from engine.config.rollout import KEY_VARIABLE, RolloutOptions
from engine.config.run import RunConfig
from engine.data.tokenizer import Tokenizer
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.files.durable import write_durably
from engine.files.refusals import reading, writing
from engine.files.staging import partial_folder
from engine.rollouts.data.prompts import Prompt, PromptSet
from engine.rollouts.data.routes import RouteShape, with_unknown
from engine.rollouts.delivery_check import DeliveryCheck
from engine.rollouts.ends import completion_ends
from engine.rollouts.rank_zero import broadcast_result
from engine.rollouts.sampler import ConversationParts, Conversing, Sampled
from engine.rollouts.served_adapter import FILES, gather_trained, write_adapter
from engine.rollouts.servers.dialects import Answer, Question, SamplingSettings
from engine.rollouts.servers.server import HOW_TO_ROUTE, Asked, Shown
from engine.rollouts.servers.several import CompletionServers
from engine.rollouts.turns.served_turns import ask_for_turns
from engine.rollouts.weights import SHOWN_DIGITS, Weights, adapter_digest
from engine.runtime.launch import Launch
from engine.runtime.secrets import secret
from engine.training.build import Training

_FOLDER = "served_adapters"
_COMPARED = 16
"""Prompts whose text is given to both tokenizers."""
_LAST_SECONDS = 10.0
"""Seconds that the server may take for each of the last calls."""


class Begun(NamedTuple):
    """A generation batch that is being sampled.

    Args:
        generation: its number in the run.
        weights: the adapter.
        asked: on rank 0.
    """

    generation: int
    weights: Weights
    asked: Asked[Answer] | Asked[Sampled] | None


class Drawing(NamedTuple):
    """How a server samples.

    Args:
        members: completions of each prompt.
        settings: of sampling.
    """

    members: int
    settings: SamplingSettings


@dataclass(frozen=True, slots=True)
class _InThread:
    """A call that runs in its own thread."""

    outcome: Future[str]

    @classmethod
    def begin(cls, call: Callable[[], str]) -> _InThread:
        pool = ThreadPoolExecutor(1, thread_name_prefix="served-adapter")
        outcome = pool.submit(call)
        pool.shutdown(wait=False)
        return cls(outcome)

    def wait(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            self.outcome.exception(seconds)
        return self.outcome.done()

    def result(self) -> str:
        return self.outcome.result()


def check_server(
    config: RunConfig,
    launch: Launch,
    tokenizer: Tokenizer,
    prompts: PromptSet,
    *,
    model: ModelFolder,
    say: Callable[[str], None],
) -> RouteShape | None:
    """Checks on rank 0 whether the server can take part in the run. Collective.

    Args:
        model: that is trained.
        say: gets notes.

    Returns:
        The shape of the experts that the server says it chose for each token, which training takes; None where
        training chooses for itself.

    Raises:
        UserError: it cannot; on all ranks.
    """
    problem: str | None = None
    replays, routes = False, _routes(config.rollout, model)
    if launch.rank == 0:
        server: CompletionServers | None = None
        try:
            server = CompletionServers(config.rollout, vocabulary=model.decoder.vocab_size, key=secret(KEY_VARIABLE))
            settings = sampling_settings(config.rollout, completion_ends(model.path, tokenizer))
            text = " ".join(tokenizer.decode(prompt.ids) for prompt in prompts.prompts[:_COMPARED])
            first = prompts.prompts[0].ids
            shown = Shown(config.data.seq_length, text, tokenizer.encode(text), first, unusual(tokenizer, first, text))
            for note in server.check(shown, settings):
                say(f"note: {note}")
            if routes is not None:
                replays = _replays(config.rollout, server, shown, replace(settings, routes=routes), say)
        except UserError as error:
            problem = str(error)
        finally:
            if server is not None:
                server.close()
    problem, replays = cast(tuple[str | None, bool], broadcast_object((problem, replays)))
    if problem is not None:
        raise UserError(problem)
    return routes if replays else None


def unusual(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> tuple[int, ...]:
    """Returns as many tokens as a prompt has, or fewer, whose text is made of other tokens; none where each character
    has one.

    Args:
        text: of which they are made, one character after the other.
    """
    pieces = [tokenizer.encode(character) for character in text[: len(prompt)]]
    ids = tuple(token for piece in pieces for token in piece)[: len(prompt)]
    return () if list(ids) == list(tokenizer.encode(tokenizer.decode(ids))) else ids


def _routes(rollout: RolloutOptions, model: ModelFolder) -> RouteShape | None:
    """Returns the shape of a model's routes; None where there are none, or they are not asked for.

    Raises:
        UserError: they are asked for, and there are none.
    """
    shape = RouteShape.of(model.decoder)
    if shape is None and rollout.router_replay == "on":
        raise UserError(
            f"rollout.router_replay is on, and this {model.decoder.family} model has no router of the engine's, whose "
            "choice could be replayed: remove it."
        )
    return None if rollout.router_replay == "off" else shape


def _replays(
    rollout: RolloutOptions,
    server: CompletionServers,
    shown: Shown,
    settings: SamplingSettings,
    say: Callable[[str], None],
) -> bool:
    """Returns whether all servers say which experts they chose for each token.

    Raises:
        UserError: one of them does not, and has to; or they are not those of the model.
    """
    without = server.without_routes(shown, settings)
    if not without:
        say("training takes the experts that the server chose for each token (rollout.router_replay)")
        return True
    if rollout.router_replay == "on":
        raise UserError(f"rollout.router_replay is on, and {without[0]} returns no routed_experts: {HOW_TO_ROUTE}.")
    say(
        f"note: {without[0]} returns no routed_experts, so that training chooses experts for itself, other ones than "
        f"the server for some tokens: {HOW_TO_ROUTE}"
    )
    return False


def sampling_settings(
    rollout: RolloutOptions, ends: frozenset[int], *, greedy: bool = False, routes: RouteShape | None = None
) -> SamplingSettings:
    """Returns the sampling settings.

    Args:
        ends: tokens that end a completion.
        greedy: whether the most likely token is taken, whatever the temperature.
        routes: of the experts that the server is to return; None for none.
    """
    return SamplingSettings(
        temperature=0.0 if greedy else rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        max_tokens=rollout.max_completion_length,
        ends=tuple(sorted(ends)),
        routes=routes,
    )


def completion_seed(seed: int, generation: int, place: int, turn: int = 0) -> int:
    """Returns the seed of one completion's noise: 0 to 2^31 - 1, another one for each of a generation batch.

    Args:
        seed: of the run.
        generation: the batch's number in the run.
        place: of the completion in it.
        turn: of the completion, from 0.
    """
    text = f"{seed} {generation} {turn}" if turn else f"{seed} {generation}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return (int.from_bytes(digest) + place) % 2**31


class ServedSampler:
    """Samples the completions of a run with a server; see `engine.rollouts.sampler.Sampler`.

    Args:
        config, launch, training: of the run.
        ends: tokens that end a completion.
        run_dir: the run's folder.
        talk: what completions of several turns share; None where they have one.
        prompts: of the run, as token ids.
        routes: as `check_server` returned it.
        say: prints a line on rank 0.
    """

    elsewhere = True

    def __init__(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        *,
        ends: frozenset[int],
        run_dir: Path,
        talk: ConversationParts | None = None,
        prompts: Sequence[Sequence[int]] = (),
        routes: RouteShape | None = None,
        say: Callable[[str], None],
    ) -> None:
        rollout = config.rollout
        self._talk, self._say = talk, say
        self._config, self._training, self._ends = config, training, ends
        self._drawing = Drawing(rollout.num_generations, sampling_settings(rollout, ends, routes=routes))
        self._parent = Path(rollout.adapter_dir or run_dir / _FOLDER).absolute()
        run = hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=4).hexdigest()
        self._prefix = f"rankfold-{run}-"
        # another name in each start of the run: the server may still have the last start's adapters in its cache
        self._start = f"{self._prefix}{secrets.token_hex(3)}-"
        self._server: CompletionServers | None = None
        if launch.rank == 0:
            self._server = self._servers(rollout)
        self._check = DeliveryCheck(config, training, prompts, self._server, say)
        self._loaded: tuple[Weights, Path] | None = None
        """The adapter that the server has, and its folder."""
        self._begun: Begun | None = None

    @property
    def delivery(self) -> float | None:
        return self._check.share

    @property
    def ahead(self) -> Weights | None:
        return None if self._begun is None else self._begun.weights

    def take(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> tuple[list[Sampled], Weights]:
        if self._begun is None:
            self.begin(prompts, generation=generation, step=step)
        begun, self._begun = self._begun, None
        assert begun is not None and begun.generation == generation, (begun, generation)
        answers: list[Answer | Sampled] = broadcast_result(begun.asked, self._config)
        for note in () if self._talk is None else self._talk.notes():
            self._say(note)
        return [one if isinstance(one, Sampled) else self._sampled(one) for one in answers], begun.weights

    def begin(self, prompts: Sequence[Prompt], *, generation: int, step: int) -> None:
        """Begins to sample a generation batch with the current adapters; see `take`."""
        self._deliver(step)
        self._ask(prompts, generation=generation)

    def evaluate(self, prompts: Sequence[Prompt], drawing: Drawing, *, generation: int, step: int) -> list[Sampled]:
        """Samples completions with the current adapters beside those that are trained on, and waits for them.
        Collective.

        Args:
            drawing: how they are sampled.
            generation: a number that no generation batch has.
            step: steps that were taken.

        Raises:
            UserError: the server failed; on all ranks.
        """
        beside = self._begun is not None and not self._has(step)
        if beside:  # the batch under way is sampled by the adapter before
            name = f"{self._start}evaluation{step}"
            self._publish_beside(name)
        else:
            name = self._deliver(step)
        answers: list[Answer | Sampled] = broadcast_result(
            self._asked(prompts, drawing, name=name, generation=generation), self._config
        )
        if beside:
            self._withdraw(name)
        return [one if isinstance(one, Sampled) else self._sampled(one) for one in answers]

    def _has(self, step: int) -> bool:
        return self._loaded is not None and self._loaded[0].version == step

    def _deliver(self, step: int) -> str:
        """Has the server load the current adapters, unless it has them; returns their name. Collective."""
        if not self._has(step):
            self._check.check(self._name(self._publish(step, self._writer())), step)
        assert self._loaded is not None
        return self._name(self._loaded[0])

    def _writer(self) -> Callable[[Path], Any]:
        """Returns a function that writes the current adapters into a folder. Collective."""
        trained, kind = gather_trained(self._training), self._config.rollout.server_kind
        return lambda folder: write_adapter(trained, self._config, self._training, folder, kind)

    def _publish_beside(self, name: str) -> None:
        """Has the server load the current adapters, and keep those it has. Collective."""
        folder, server, write = self._parent / name, self._server, self._writer()

        def publish() -> str:
            assert server is not None
            write(folder)
            server.load(name, str(folder))
            return name

        broadcast_result(None if server is None else _InThread.begin(publish), self._config)

    def _withdraw(self, name: str) -> None:
        """Has the server unload what `_publish_beside` had it load. Collective."""
        folder, server = self._parent / name, self._server

        def withdraw() -> str:
            assert server is not None
            server.unload(name)
            shutil.rmtree(folder, ignore_errors=True)
            return name

        broadcast_result(None if server is None else _InThread.begin(withdraw), self._config)

    def begin_again(
        self, prompts: Sequence[Prompt], files: Callable[[str], bytes], *, generation: int, step: int
    ) -> None:
        def write(folder: Path) -> None:
            with writing(folder):
                folder.mkdir(parents=True)
                for name, kept in FILES.items():
                    write_durably(folder / name, files(kept))

        self._publish(step, write)
        self._check.forget()
        self._ask(prompts, generation=generation)

    def files(self) -> Mapping[str, bytes]:
        if self._server is None or self._loaded is None:
            return {}
        with reading(self._loaded[1], "start the run again, and leave the adapters of a running run where they are"):
            return {kept: (self._loaded[1] / name).read_bytes() for name, kept in FILES.items()}

    def close(self, *, failed: bool) -> None:
        """Ends calls under way, and unloads the run's adapters from the server.

        Args:
            failed: whether the run failed, in which case the server may be gone.
        """
        if self._server is None:
            return
        self._server.close()
        if self._talk is not None:
            self._talk.close()
        if failed:
            return
        rollout = self._config.rollout
        quick = replace(rollout, server_timeout=min(_LAST_SECONDS, rollout.server_timeout))
        server = self._servers(quick)
        with suppress(UserError):
            server.unload_all(self._prefix)
        server.close()
        self._clear()
        if rollout.adapter_dir is None:
            with suppress(OSError):  # the run may have written none
                self._parent.rmdir()

    def _servers(self, rollout: RolloutOptions) -> CompletionServers:
        vocabulary = self._training.source.model.decoder.vocab_size
        return CompletionServers(rollout, vocabulary=vocabulary, key=secret(KEY_VARIABLE))

    def _name(self, weights: Weights) -> str:
        """Returns an adapter's name on the servers, which each request has, and each answer that names its model."""
        return f"{self._start}step{weights.version}-{weights.digest[:SHOWN_DIGITS]}"

    def _publish(self, step: int, write: Callable[[Path], Any]) -> Weights:
        """Has the server load an adapter, and unload the previous one.

        Args:
            step: steps that it was trained for.
            write: puts it into a folder, on rank 0.
        """
        folder, before = self._parent / f"{self._start}step{step}", self._loaded
        server = self._server

        def publish() -> str:
            assert server is not None
            if before is None:
                server.unload_all(self._prefix)
                self._clear()
            with writing(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
            write(folder)
            with reading(folder, "leave the adapters of a running run where they are"):
                digest = adapter_digest(folder)
            server.load(self._name(Weights(step, digest)), str(folder))
            if before is not None:
                server.unload(self._name(before[0]))
                shutil.rmtree(before[1], ignore_errors=True)
            return digest

        digest = broadcast_result(None if server is None else _InThread.begin(publish), self._config)
        weights = Weights(step, digest)
        self._loaded = weights, folder
        return weights

    def _clear(self) -> None:
        """Deletes the adapters, also those left behind by an earlier start of the run."""
        for pattern in (f"{self._prefix}*", partial_folder(Path(f"{self._prefix}*")).name):
            for folder in self._parent.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, prompts: Sequence[Prompt], *, generation: int) -> None:
        assert self._loaded is not None
        weights = self._loaded[0]
        asked = self._asked(prompts, self._drawing, name=self._name(weights), generation=generation)
        self._begun = Begun(generation, weights, asked)

    def _asked(
        self, prompts: Sequence[Prompt], drawing: Drawing, *, name: str, generation: int
    ) -> Asked[Answer] | Asked[Sampled] | None:
        """Asks the server for completions, on rank 0.

        Args:
            name: of the adapter.
        """
        if self._server is None:
            return None
        if self._talk is not None:
            return self._ask_for_turns(prompts, self._talk, self._server, drawing, name=name, generation=generation)
        members, seed = drawing.members, self._config.train.seed
        questions = [
            Question(prompts[place // members].ids, completion_seed(seed, generation, place))
            for place in range(len(prompts) * members)
        ]
        return self._server.ask(name, questions, drawing.settings)

    def _ask_for_turns(
        self,
        prompts: Sequence[Prompt],
        talk: ConversationParts,
        server: CompletionServers,
        drawing: Drawing,
        *,
        name: str,
        generation: int,
    ) -> Asked[Sampled]:
        rollout, seed = self._config.rollout, self._config.train.seed
        talk.listen(0)
        conversations = [talk.converse(prompt) for prompt in prompts for _ in range(drawing.members)]

        def sample(place: int, turn: int, one: Conversing) -> Answer:
            question = Question(one.ids, completion_seed(seed, generation, place, one.noise or turn))
            return server.sample(name, place, question, replace(drawing.settings, max_tokens=one.room))

        at_once = talk.pool.size if talk.pool.has_environment else rollout.slots * len(rollout.servers)
        return ask_for_turns(conversations, sample, at_once=at_once)

    def _sampled(self, answer: Answer) -> Sampled:
        return Sampled(
            tokens=np.array(answer.tokens, dtype=np.int32),
            logps=np.array(answer.logps, dtype=np.float32),
            truncated=answer.tokens[-1] not in self._ends,
            # the last token has not been through the model
            routes=None if answer.routes is None else with_unknown(answer.routes, len(answer.routes) + 1),
        )
