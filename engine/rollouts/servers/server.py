"""A completion server as a run uses it: checked once, given adapters now and then, asked for many completions at a
time.

Answers that would spoil a run are refused: no token ids, log-probabilities of another distribution, other ends of
completions, another tokenizer. Only the trainer can tell whether it computes with the weights that it was given, by
comparing log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

from engine.config.rollout import RolloutOptions
from engine.errors import UserError
from engine.foreign.deadline import Deadline
from engine.foreign.fields import is_integer
from engine.rollouts.servers.client import SAMPLER, ServerClient
from engine.rollouts.servers.dialects import (
    Answer,
    Call,
    Echo,
    OtherTokens,
    Question,
    SamplingSettings,
    WrongValue,
)
from engine.rollouts.servers.http import CallRefused
from engine.sentences import listed

_HOT = 2.0
"""The highest temperature that vLLM takes. Log-probabilities at it lie half as far apart as at 1."""
_HALVED = 0.75
"""The share of a distance at 1 below which that at `_HOT` counts as halved, not as the same but for rounding."""
_UNKNOWN_ADAPTER = "rankfold-looks"
"""An adapter that no server has."""
HOW_TO_ROUTE = "start it with --enable-return-routed-experts, or set rollout.router_replay to off"

_PASS_IDS = "let token ids reach it as they are, without a program between that works on texts"
"""Advice where a server works with other tokens than it was sent."""


class Shown(NamedTuple):
    """The parts of a run that a server is checked with.

    Args:
        length: of prompt and completion together.
        text, tokens: a text, and its tokens.
        prompt: tokens of a prompt.
        unusual: tokens whose text has others, so that they show whether it is made into tokens again; empty where
            there are none.
    """

    length: int
    text: str
    tokens: Sequence[int]
    prompt: Sequence[int]
    unusual: Sequence[int] = ()


_Made = TypeVar("_Made")


class Asked(Generic[_Made]):
    """Completions under way.

    Args:
        answers: the future of each.
    """

    def __init__(self, answers: Sequence[Future[_Made]]) -> None:
        self.answers = answers

    def wait(self, seconds: float) -> bool:
        """Returns whether all are there, or one failed, within some seconds."""
        done, left = wait(self.answers, seconds, return_when=FIRST_EXCEPTION)
        return not left or any(one.exception() is not None for one in done)

    def result(self) -> list[_Made]:
        """Returns the completions, in the order of the questions; waits for them.

        Raises:
            UserError: one failed.
        """
        done, _ = wait(self.answers, return_when=FIRST_EXCEPTION)
        failed = [one for one in done if one.exception() is not None]
        return [one.result() for one in failed or self.answers]


class CompletionServer:
    """A server.

    Args:
        url: its address.
        options: those that go with rollout.server.
        vocabulary: entries of the trained model's.
        key: that it asks for; None for none.
    """

    def __init__(self, url: str, options: RolloutOptions, *, vocabulary: int, key: str | None = None) -> None:
        self._options, self._vocabulary = options, vocabulary
        self._client = ServerClient(url, options.server_kind, SAMPLER, timeout=options.server_timeout, key=key)
        self._dialect, self._http = self._client.dialect, self._client.http
        self._pool = ThreadPoolExecutor(options.slots, thread_name_prefix="rollout")
        self._model: str | None = None

    # looking

    def check(self, shown: Shown, settings: SamplingSettings) -> list[str]:
        """Checks whether the server can take part in a run.

        Args:
            shown: of the run.
            settings: how it samples.

        Returns:
            Notes on properties that could not be checked.

        Raises:
            UserError: it cannot.
        """
        self._require_model(shown.length)
        notes = self._client.compare_tokens(self.model, shown.text, shown.tokens)
        for ids in filter(None, (shown.prompt, shown.unusual)):
            self._sample_one(Question(tuple(ids), 0), settings)
        self._require_scale(shown.prompt)
        self._require_adapters()
        return notes

    @property
    def url(self) -> str:
        """The server's address."""
        return self._http.url

    @property
    def model(self) -> str:
        """The model's name on the server.

        Raises:
            UserError: there is none, or several without a choice.
        """
        if self._model is None:
            self._require_model(0)
        assert self._model is not None
        return self._model

    def _require_model(self, length: int) -> None:
        needed = f"data.seq_length, which is {length}"
        self._model = self._client.require_model(self._options.server_model, length, needed)

    def _sample_one(self, question: Question, settings: SamplingSettings) -> None:
        """Refuses a server that does not sample as the run asks it to, which shows before any adapter is there."""
        try:
            one = replace(settings, max_tokens=1)
            self._completion(self._dialect.sample_base(self.model, question, one), question, one)
        except CallRefused as refusal:
            raise UserError(f"{refusal}: change the option that it names, or serve the model of model.path.") from None

    def gives_routes(self, shown: Shown, settings: SamplingSettings) -> bool:
        """Returns whether it says which experts it chose for each token.

        Args:
            shown: of the run.
            settings: how it samples, with the shape of the routes.

        Raises:
            UserError: they are not those of the model.
        """
        one = replace(settings, max_tokens=1)
        assert one.routes is not None
        call = self._dialect.sample_base(self.model, Question(tuple(shown.prompt), 0), one)
        try:
            answer = self._client.post(call)
            return self._dialect.routes(answer, one.routes, len(shown.prompt) + 1) is not None
        except CallRefused:  # SGLang may refuse to be asked for them
            return False
        except UserError as error:
            raise self._client.refused(error) from None

    def _require_scale(self, prompt: Sequence[int]) -> None:
        """Refuses log-probabilities of another distribution than that whose ratios training takes."""
        options, dialect, url = self._options, self._dialect, self._http.url
        try:
            looked = [
                dialect.likeliest(self._client.post(dialect.look(self.model, prompt, temperature)))
                for temperature in (1.0, _HOT)
            ]
        except CallRefused as refusal:
            raise UserError(f"{refusal}: see that the server serves the model of model.path.") from None
        if (largest := max(map(max, looked))) > 0:
            told = self._http.described(largest)
            raise UserError(f"{url} gives {told} for a log-probability: {dialect.how_to_scale}.")
        cold, hot = (max(one) - min(one) for one in looked)
        scaled = hot < _HALVED * cold
        if options.temperature != 1 and not scaled:
            raise UserError(
                f"rollout.temperature is {options.temperature:g}, and {url} gives log-probabilities of temperature 1: "
                f"{dialect.how_to_scale}, or set rollout.temperature to 1."
            )
        cuts = options.top_k is not None or options.top_p != 1 or options.min_p != 0
        shaped = (cuts and dialect.logps_are_cut) or options.repetition_penalty != 1
        if scaled and shaped:
            raise UserError(
                "rollout.top_k, rollout.top_p, rollout.min_p or rollout.repetition_penalty is set, and "
                f"{url} gives log-probabilities of the tokens they leave, while training sees the whole distribution: "
                "remove them, or set rollout.temperature to 1 and start a vLLM server with --logprobs-mode "
                "raw_logprobs."
            )

    def _require_adapters(self) -> None:
        try:
            self._tell(self._dialect.unload(_UNKNOWN_ADAPTER))
        except CallRefused as refusal:
            if not self._dialect.takes_adapters(refusal.status, refusal.words):
                raise UserError(
                    f"{self._http.url} takes no adapters while it runs ({refusal}): {self._dialect.how_to_load}."
                ) from None

    # adapters

    def unload_all(self, prefix: str) -> None:
        """Unloads the adapters whose names begin with `prefix`, left there by a run that was killed.

        Raises:
            UserError: the server is gone, or too slow.
        """
        deadline = Deadline(self._options.server_timeout)
        for name, card in self._client.cards().items():
            if card.get("parent") and name.startswith(prefix):
                if not deadline.has(0):
                    raise UserError(
                        f"{self._http.url} did not give up the run's adapters within {deadline.seconds:g} seconds: "
                        "start it again, or raise rollout.server_timeout."
                    )
                self.unload(name)

    def load(self, adapter: str, folder: str) -> None:
        """Loads an adapter.

        Args:
            adapter: its name.
            folder: as the server sees it.

        Raises:
            UserError: the server does not take it.
        """
        call = self._dialect.load(adapter, folder)
        try:
            try:
                self._tell(call)
            except CallRefused as refusal:
                if "already" not in refusal.words:
                    raise
                # an attempt before this one came through, and its answer was lost
                self.unload(adapter)
                self._tell(call)
        except CallRefused as refusal:
            raise UserError(
                f"{self._http.url} did not load the adapter in {folder} ({refusal}): it reads that folder itself, so "
                f"it must see it under this path (rollout.adapter_dir); {self._dialect.how_to_load}."
            ) from None

    def unload(self, adapter: str) -> None:
        """Unloads an adapter; does nothing where the server does not have it.

        Raises:
            UserError: the server is gone.
        """
        try:
            self._tell(self._dialect.unload(adapter))
        except CallRefused as refusal:
            if not self._dialect.takes_adapters(refusal.status, refusal.words):
                raise

    # sampling

    def ask(self, adapter: str, questions: Sequence[Question], settings: SamplingSettings) -> Asked[Answer]:
        """Begins to sample completions, as many at a time as rollout.slots says.

        Args:
            adapter: loaded under this name.
            questions: of them.
            settings: how they are sampled.
        """
        return Asked([self._pool.submit(self._sampled, adapter, one, settings) for one in questions])

    def ask_logps(self, adapter: str | None, rows: Sequence[Sequence[int]]) -> Asked[list[float] | None]:
        """Begins to ask for the log-probabilities of the tokens of some texts after their first, at temperature 1; None
        where the server does not give them.

        Args:
            adapter: loaded under this name; None for the model without.
            rows: token ids.
        """
        return Asked([self._pool.submit(self._logps, adapter, ids) for ids in rows])

    def _logps(self, adapter: str | None, ids: Sequence[int]) -> list[float] | None:
        """See `ask_logps`.

        Raises:
            UserError: the answer is another adapter's, or about other tokens.
        """
        try:
            answer = self._client.post(self._dialect.score(self.model if adapter is None else "", ids, adapter))
        except CallRefused:
            return None
        try:
            found = self._dialect.scored(answer, ids)
        except OtherTokens as error:
            raise UserError(f"{self._http.url} cannot be sampled from: {error}: {_PASS_IDS}.") from None
        except UserError:
            return None
        self._require_model_of(Echo(answer.get("model")), adapter)
        return found

    def close(self) -> None:
        """Ends the calls under way."""
        self._http.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sampled(self, adapter: str, question: Question, settings: SamplingSettings) -> Answer:
        try:
            return self._completion(self._dialect.sample(adapter, question, settings), question, settings, adapter)
        except CallRefused as refusal:
            advice = "see its log"
            if refusal.status == HTTPStatus.NOT_FOUND:
                advice = "where the server was started again, start the run again, which loads its adapter"
            raise UserError(f"{refusal}: {advice}.") from None

    def _completion(
        self, call: Call, question: Question, settings: SamplingSettings, adapter: str | None = None
    ) -> Answer:
        answer = self._client.post(call)
        try:
            found = self._dialect.completion(answer)
            echo = self._dialect.echo(answer)
            _require_question(echo, question.ids)
            self._check(found, settings)
            if settings.routes is not None:
                tokens = len(question.ids) + len(found.tokens)
                found = found._replace(routes=self._dialect.routes(answer, settings.routes, tokens))
                if found.routes is None:
                    raise UserError(f"the answer has no routed_experts: {HOW_TO_ROUTE}")
        except OtherTokens as error:
            raise UserError(f"{self._http.url} cannot be sampled from: {error}: {_PASS_IDS}.") from None
        except UserError as error:
            raise self._client.refused(error) from None
        self._require_model_of(echo, adapter)
        return found

    def _require_model_of(self, echo: Echo, adapter: str | None) -> None:
        """Refuses an answer of another model than was asked.

        Args:
            adapter: name of the one that was asked; None for the model without, which may have several names.
        """
        if adapter is None or echo.model is None or echo.model == adapter:
            return
        raise UserError(
            f"{self._http.url} was asked for tokens of the adapter {adapter} and answers with those of another model"
            f"{self._http.repeated(listed([echo.model]) if isinstance(echo.model, str) else 'no name')}: see its log, "
            "and that nothing in front of it sends requests elsewhere."
        )

    def _check(self, found: Answer, settings: SamplingSettings) -> None:
        """Refuses a completion that cannot be trained on.

        Raises:
            UserError: the completion is unusable; says why.
        """
        tokens, ends, longest = found.tokens, settings.ends, settings.max_tokens
        if not 1 <= len(tokens) <= longest:
            raise UserError(f"a completion has {len(tokens)} tokens, and 1 to {longest} were asked for")
        strange = [one for one in tokens if not 0 <= one < self._vocabulary]
        if strange:
            raise WrongValue(
                f"a completion has {{}} for a token, and the model's vocabulary {self._vocabulary} entries: serve the "
                "model of model.path",
                strange[0],
            )
        if any(token in ends for token in tokens[:-1]):
            raise UserError(
                "a completion continues after a token that ends one here: serve the model of model.path, with its "
                "generation_config.json"
            )
        if len(tokens) < longest and tokens[-1] not in ends:
            raise WrongValue(
                f"a completion ended after {len(tokens)} of {longest} tokens with {{}} for a token, which ends none "
                "here: serve the model of model.path, with its generation_config.json and tokenizer",
                tokens[-1],
            )

    def _tell(self, call: Call) -> None:
        self._http.tell(call.path, call.body)


def _require_question(echo: Echo, ids: Sequence[int]) -> None:
    """Refuses an answer to another question.

    Raises:
        OtherTokens: other tokens than `ids` were continued.
    """
    other = isinstance(echo.prompt, list) and echo.prompt != list(ids)
    if other or (is_integer(echo.length) and echo.length != len(ids)):
        raise OtherTokens(
            f"it was given {len(ids)} token ids and continued others, as where their text was made into tokens again"
        )
