"""The requests and answers of the two kinds of server: calls as JSON, without a connection.

Fields as in vLLM 0.33 (`vllm/entrypoints/openai/completion/protocol.py`, `serve/lora/protocol.py`) and SGLang 0.5.23
(`sglang/srt/managers/io_struct.py`, `sampling/sampling_params.py`). Every setting that shapes a distribution is given,
because both servers take missing ones from the model's generation_config.json or from their own options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from engine.choices import ServerKind
from engine.errors import UserError
from engine.foreign.fields import described, is_integer, is_number
from engine.rollouts.data.routes import RouteShape
from engine.rollouts.servers.http import SMALL_ANSWER
from engine.rollouts.servers.routes import NAME as ROUTES
from engine.rollouts.servers.routes import read_int32, read_npy, route_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How tokens are sampled.

    Args:
        temperature, top_k, top_p, min_p, repetition_penalty: see `engine.config.rollout.RolloutOptions`.
        max_tokens: of a completion.
        ends: tokens that end one, ascending.
        routes: shape of the experts of each token, which answers are to have; None where they are not asked for.
    """

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: int
    ends: tuple[int, ...]
    routes: RouteShape | None = None


class Question(NamedTuple):
    """A completion to sample.

    Args:
        ids: of the prompt.
        seed: of its noise, 0 to 2^31 - 1.
    """

    ids: tuple[int, ...]
    seed: int


class Answer(NamedTuple):
    """A completion.

    Args:
        tokens: with the one that ended it.
        logps: log-probability of each when it was sampled.
        routes: [tokens of prompt and completion - 1, M, K], the experts of each; see `engine.rollouts.data.routes`.
            None where they were not asked for.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    routes: NDArray[Any] | None = None


class Echo(NamedTuple):
    """The facts by which an answer says what it is an answer to; None for those that it does not tell.

    Args:
        model: name of the model or adapter that sampled.
        prompt: token ids that it continued.
        length: count of them.
    """

    model: object = None
    prompt: object = None
    length: object = None


class OtherTokens(UserError):
    """Raised where an answer is about other tokens than were sent, or contradicts itself about its own."""


class WrongValue(UserError):
    """Raised where an answer has a value that cannot be.

    Args:
        sentence: with {} in place of the value, and no other word of the server's.
        value: the server's.
    """

    def __init__(self, sentence: str, value: object) -> None:
        super().__init__(sentence.format(described(value)))
        self._sentence, self._value = sentence, value

    def with_value(self, describe: Callable[[object], str]) -> str:
        """Returns the sentence with another description of the value."""
        return self._sentence.format(describe(self._value))


class Call(NamedTuple):
    """A POST request: a path and its JSON.

    Args:
        most_bytes: that the answer may have.
    """

    path: str
    body: dict[str, Any]
    most_bytes: int = SMALL_ANSWER


class Dialect(Protocol):
    """The differences between kinds of server."""

    name: str
    """The name for messages."""
    owner: str
    """The owner that its list of models names."""
    logps_are_cut: bool
    """Whether log-probabilities at the sampling temperature are of the tokens that top_k, top_p and min_p leave."""
    how_to_scale: str
    """The instruction to have it give log-probabilities at the sampling temperature."""
    how_to_load: str
    """The instruction to have it take adapters while it runs."""

    def sample(self, adapter: str, question: Question, settings: SamplingSettings) -> Call:
        """Returns the call that samples one completion.

        Args:
            adapter: the name under which it was loaded.
        """
        ...

    def sample_base(self, model: str, question: Question, settings: SamplingSettings) -> Call:
        """Returns the same call without adapter.

        Args:
            model: the name of the base.
        """
        ...

    def completion(self, answer: Any) -> Answer:
        """Reads the answer to `sample`.

        Raises:
            UserError: it lacks tokens or log-probabilities, or has impossible ones.
        """
        ...

    def routes(self, answer: Any, shape: RouteShape, tokens: int) -> NDArray[Any] | None:
        """Reads the experts of each token out of an answer to `sample`; None where it has none.

        Args:
            shape: of the model's routes.
            tokens: of prompt and completion.

        Raises:
            UserError: they are not those of these tokens.
        """
        ...

    def look(self, model: str, ids: Sequence[int], temperature: float) -> Call:
        """Returns a call for the log-probabilities of the `LIKELIEST` tokens behind a prompt, without adapter."""
        ...

    def echo(self, answer: Any) -> Echo:
        """Returns the facts that the answer to `sample` gives about its question."""
        ...

    def likeliest(self, answer: Any) -> list[float]:
        """Reads the answer to `look`: log-probabilities, the largest first.

        Raises:
            UserError: it has too few numbers.
        """
        ...

    def score(self, model: str, ids: Sequence[int], adapter: str | None = None) -> Call:
        """Returns a call for the log-probability of each token of a text at temperature 1.

        Args:
            model: the name of the base.
            adapter: the name of one; None for none.
        """
        ...

    def scored(self, answer: Any, ids: Sequence[int]) -> list[float]:
        """Reads the answer to `score`: the log-probability of each token after the first.

        Raises:
            OtherTokens: its log-probabilities are of other tokens.
            UserError: it lacks log-probabilities, or has impossible ones.
        """
        ...

    def load(self, adapter: str, folder: str) -> Call:
        """Returns the call that loads an adapter from a folder under a name."""
        ...

    def unload(self, adapter: str) -> Call:
        """Returns the call that unloads an adapter."""
        ...

    def takes_adapters(self, status: int, words: str) -> bool:
        """Returns whether a server that refuses to unload an unknown adapter takes adapters at all."""
        ...


class Vllm:
    """vLLM's OpenAI-compatible server."""

    name, owner = "vLLM", "vllm"
    logps_are_cut = True
    how_to_scale = "start it with --logprobs-mode processed_logprobs"
    how_to_load = (
        "start it with --enable-lora, a --max-lora-rank of lora.rank or more, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
        "in its environment"
    )

    def sample(self, adapter: str, question: Question, settings: SamplingSettings) -> Call:
        return Call(
            "/v1/completions",
            {
                "model": adapter,
                "prompt": list(question.ids),
                "max_tokens": settings.max_tokens,
                "n": 1,
                "temperature": settings.temperature,
                "top_k": settings.top_k or 0,
                "top_p": settings.top_p,
                **_shaping(settings),
                "seed": question.seed,
                "logprobs": 0,  # of the sampled token alone
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "ignore_eos": True,  # the run's end tokens are below, and no others
                "stop_token_ids": list(settings.ends),
            },
            _most_bytes(len(question.ids) + settings.max_tokens, settings.routes),
        )

    def sample_base(self, model: str, question: Question, settings: SamplingSettings) -> Call:
        return self.sample(model, question, settings)

    def completion(self, answer: Any) -> Answer:
        choice = _first(answer, "choices")
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise UserError("the answer has no token_ids: use a vLLM that knows return_token_ids (0.10.2 or later)")
        given = choice.get("logprobs")
        logps = given.get("token_logprobs") if isinstance(given, dict) else None
        if not isinstance(logps, list):
            raise UserError("the answer has no token_logprobs: see that nothing between here and the server drops them")
        names = given.get("tokens") if isinstance(given, dict) else None
        _require_same(tokens, names, lambda name, token: name == f"token_id:{token}" or not _is_token_id(name))
        return _completion(("token_ids", tokens), ("token_logprobs", logps))

    def echo(self, answer: Any) -> Echo:
        usage, choice = answer.get("usage"), _first(answer, "choices")
        length = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return Echo(answer.get("model"), choice.get("prompt_token_ids"), length)

    def routes(self, answer: Any, shape: RouteShape, tokens: int) -> NDArray[Any] | None:
        return read_npy(_first(answer, "choices").get(ROUTES), shape, tokens - 1)

    def look(self, model: str, ids: Sequence[int], temperature: float) -> Call:
        settings = {"temperature": temperature, "top_k": 0, "top_p": 1.0, **_NEUTRAL}
        # two tokens may have the same text
        settings |= {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "n": 1, **settings}
        return Call("/v1/completions", body, _most_bytes(len(ids) + 1))

    def likeliest(self, answer: Any) -> list[float]:
        given = _first(answer, "choices").get("logprobs")
        # the sampled token is among them, wherever it ranks
        return _largest(_first(given, "top_logprobs").values(), "top_logprobs")

    def score(self, model: str, ids: Sequence[int], adapter: str | None = None) -> Call:
        body = {"model": adapter or model, "prompt": list(ids), "max_tokens": 1, "n": 1, "temperature": 1.0, **_NEUTRAL}
        body |= {"top_k": 0, "top_p": 1.0, "prompt_logprobs": 0}  # of the token that stands there alone
        return Call("/v1/completions", body, _most_bytes(len(ids) + 1))

    def scored(self, answer: Any, ids: Sequence[int]) -> list[float]:
        given = _first(answer, "choices").get("prompt_logprobs")
        entries = given if isinstance(given, list) else []
        _require_asked(
            entries[1:], ids[1:], lambda entry, token: str(token) in entry if isinstance(entry, dict) else None
        )
        found = []
        for token, entry in zip(ids[1:], entries[1:], strict=False):
            told = entry.get(str(token)) if isinstance(entry, dict) else None
            found.append(told.get("logprob") if isinstance(told, dict) else None)
        return _text_logps(found, len(ids), "prompt_logprobs")

    def load(self, adapter: str, folder: str) -> Call:
        return Call("/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": folder})

    def unload(self, adapter: str) -> Call:
        return Call("/v1/unload_lora_adapter", {"lora_name": adapter})

    def takes_adapters(self, status: int, words: str) -> bool:
        # without runtime updating there is no such path
        return not (status in (404, 405) and "cannot be found" not in words)


class Sglang:
    """SGLang's own interface, which takes and gives token ids."""

    name, owner = "SGLang", "sglang"
    logps_are_cut = False
    how_to_scale = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
    how_to_load = "start it with --enable-lora, --max-lora-rank and --lora-target-modules"

    def sample(self, adapter: str, question: Question, settings: SamplingSettings) -> Call:
        path, body, most_bytes = self.sample_base("", question, settings)
        return Call(path, {**body, "lora_path": adapter}, most_bytes)

    def sample_base(self, model: str, question: Question, settings: SamplingSettings) -> Call:
        sampling = {
            "max_new_tokens": settings.max_tokens,
            "n": 1,
            "temperature": settings.temperature,
            "top_k": settings.top_k or -1,
            "top_p": settings.top_p,
            **_shaping(settings),
            "sampling_seed": question.seed,
            # its ignore_eos would ignore these too
            "stop_token_ids": list(settings.ends),
        }
        body = {"input_ids": list(question.ids), "sampling_params": sampling, "return_logprob": True}
        if settings.routes is not None:
            body["return_routed_experts"] = True
        return Call("/generate", body, _most_bytes(len(question.ids) + settings.max_tokens, settings.routes))

    def completion(self, answer: Any) -> Answer:
        tokens = answer.get("output_ids") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise UserError(
                "the answer has no output_ids: see that rollout.server_kind is right, or use a later SGLang"
            )
        name = "output_token_logprobs"
        logps = self._logps(answer, name)
        names = [one[1] if len(one) > 1 else None for one in self._entries(answer, name) or ()]
        _require_same(tokens, names, lambda name, token: name is None or name == token)
        return _completion(("output_ids", tokens), (name, logps))

    def echo(self, answer: Any) -> Echo:
        facts = answer.get("meta_info")
        return Echo(answer.get("model"), None, facts.get("prompt_tokens") if isinstance(facts, dict) else None)

    def routes(self, answer: Any, shape: RouteShape, tokens: int) -> NDArray[Any] | None:
        facts = answer.get("meta_info") if isinstance(answer, dict) else None
        return read_int32(facts.get(ROUTES) if isinstance(facts, dict) else None, shape, tokens - 1)

    def look(self, model: str, ids: Sequence[int], temperature: float) -> Call:
        sampling = {"max_new_tokens": 1, "n": 1, "temperature": temperature, "top_k": -1, "top_p": 1.0, **_NEUTRAL}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
        return Call("/generate", {**body, "top_logprobs_num": LIKELIEST}, _most_bytes(len(ids) + 1))

    def likeliest(self, answer: Any) -> list[float]:
        (first, *_) = self._entries(answer, "output_top_logprobs") or [None]
        found = [one[0] for one in first if isinstance(one, list) and one] if isinstance(first, list) else []
        return _largest(found, "output_top_logprobs")

    def score(self, model: str, ids: Sequence[int], adapter: str | None = None) -> Call:
        sampling = {"max_new_tokens": 1, "n": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **_NEUTRAL}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        body |= {} if adapter is None else {"lora_path": adapter}
        return Call("/generate", body, _most_bytes(len(ids) + 1))

    def scored(self, answer: Any, ids: Sequence[int]) -> list[float]:
        name = "input_token_logprobs"
        entries = self._entries(answer, name) or []
        _require_asked(
            [one for one in entries if not isinstance(one, list) or one[:1] != [None]],  # the first has none
            ids[1:],
            lambda entry, token: entry[1] == token if isinstance(entry, list) and len(entry) > 1 else None,
        )
        entries = entries[-(len(ids) - 1) :] if len(ids) > 1 else []
        found = [
            entry[0] if isinstance(entry, list) and len(entry) > 1 and entry[1] == token else None
            for token, entry in zip(ids[1:], entries, strict=False)
        ]
        return _text_logps(found, len(ids), name)

    def load(self, adapter: str, folder: str) -> Call:
        return Call("/load_lora_adapter", {"lora_name": adapter, "lora_path": folder})

    def unload(self, adapter: str) -> Call:
        return Call("/unload_lora_adapter", {"lora_name": adapter})

    def takes_adapters(self, status: int, words: str) -> bool:
        return status == 400 and "not enabled" not in words

    def _logps(self, answer: Any, name: str) -> list[Any]:
        found = self._entries(answer, name)
        if found is None or not all(isinstance(one, list) and one for one in found):
            raise UserError(f"the answer has no {name}: see that nothing between here and the server drops them")
        return [one[0] for one in found]

    def _entries(self, answer: Any, name: str) -> list[Any] | None:
        facts = answer.get("meta_info") if isinstance(answer, dict) else None
        found = facts.get(name) if isinstance(facts, dict) else None
        return found if isinstance(found, list) else None


LIKELIEST = 5
"""Number of tokens whose log-probabilities are compared; servers give these unless they were started with a lower
limit."""
LEAST_LOGP = -1000.0
"""The least log-probability of a sampled token. A sampler in float32 draws none below -104; the rest is room for the
effect of penalties and temperature between the sampled distribution and the reported one."""
ROUNDING = 1e-3
"""The tolerance of a log-probability above 0."""
_BYTES_PER_TOKEN = 1 << 12
"""Bytes of an answer per token: its id, its log-probability, its text up to three times, and its experts, which vLLM
adds to every answer where it was started so."""
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def _shaping(settings: SamplingSettings) -> dict[str, float]:
    return _NEUTRAL | {"min_p": settings.min_p, "repetition_penalty": settings.repetition_penalty}


def _most_bytes(tokens: int, routes: RouteShape | None = None) -> int:
    """Returns the bytes that an answer on so many tokens may have, with their routes where these are asked for."""
    return SMALL_ANSWER + _BYTES_PER_TOKEN * tokens + (0 if routes is None else route_bytes(routes, tokens))


def _first(answer: Any, name: str) -> dict[str, Any]:
    """Returns the first of a list of objects under a name."""
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, list) or not found or not isinstance(found[0], dict):
        raise UserError(f"the answer has no {name}: see that rollout.server_kind is right")
    return found[0]


def _is_token_id(name: object) -> bool:
    return isinstance(name, str) and name.startswith("token_id:")


def _require_same(tokens: Sequence[Any], names: object, agree: Callable[[Any, Any], bool]) -> None:
    """Refuses a completion whose log-probabilities are of other tokens than it has.

    Args:
        names: of the tokens that the log-probabilities are of.
        agree: whether a name is a token's.

    Raises:
        OtherTokens: they differ.
    """
    if not isinstance(names, list) or len(names) != len(tokens):
        return
    differ = sum(not agree(name, token) for name, token in zip(names, tokens, strict=True))
    if differ:
        raise OtherTokens(
            f"{differ} of {len(tokens)} tokens of a completion are not those that its log-probabilities are of, as "
            "where its text was made into tokens again"
        )


def _require_asked(entries: Sequence[Any], tokens: Sequence[int], is_of: Callable[[Any, int], bool | None]) -> None:
    """Refuses log-probabilities of another text.

    Args:
        entries: of the answer, one for each of its tokens after the first.
        tokens: that were sent, after the first.
        is_of: whether an entry is of a token; None where it tells nothing.

    Raises:
        OtherTokens: they are others.
    """
    same = [is_of(entry, token) for entry, token in zip(entries, tokens, strict=False)]
    if not entries or None in same or (len(entries) == len(tokens) and all(same)):
        return
    raise OtherTokens(
        f"it was asked about {len(tokens) + 1} token ids and answers about {len(entries) + 1}, "
        f"{sum(map(bool, same))} of them the same behind the first, as where their text was made into tokens again"
    )


def _completion(tokens: tuple[str, list[Any]], logps: tuple[str, list[Any]]) -> Answer:
    """Returns a completion of two fields, each with its name.

    Raises:
        UserError: they are not tokens and their log-probabilities.
    """
    (name, ids), (name_of_logps, values) = tokens, logps
    for one in ids:
        if not is_integer(one):
            raise WrongValue(f"{name} has {{}}, where tokens are expected as integers", one)
    if len(ids) != len(values):
        raise UserError(f"a completion has {len(ids)} tokens and {len(values)} log-probabilities")
    for one in values:
        if not is_number(one) or not LEAST_LOGP <= one <= ROUNDING:
            raise WrongValue(
                f"{name_of_logps} has {{}} for a log-probability, and {LEAST_LOGP:g} to 0 are expected of tokens that "
                "were sampled",
                one,
            )
    return Answer(tuple(ids), tuple(map(float, values)))


def _text_logps(found: Sequence[object], length: int, name: str) -> list[float]:
    """Returns the log-probabilities of a text's tokens after the first.

    Args:
        found: of each; None where the answer has none of that token.
        length: tokens of the text.
        name: of the field.

    Raises:
        UserError: one is absent or impossible.
    """
    if len(found) != length - 1 or any(one is None for one in found):
        raise UserError(
            f"the answer has no {name} of all tokens that were sent: see that the server's kind is right, and that "
            "nothing between here and the server drops them"
        )
    for one in found:
        if not is_number(one) or one > ROUNDING:
            raise WrongValue(f"{name} has {{}} for a log-probability, and numbers up to 0 are expected", one)
    # a teacher may think a token impossible that was sampled
    return [max(float(one), LEAST_LOGP) for one in found if is_number(one)]


def _largest(found: Iterable[object], name: str) -> list[float]:
    """Returns the largest log-probabilities of an answer's."""
    values = [float(value) for value in found if is_number(value)]
    if len(values) < LIKELIEST:
        raise UserError(
            f"the answer has {len(values)} {name}, and {LIKELIEST} were asked for: let the server give that many "
            "(--max-logprobs), and see that nothing between here and the server drops them"
        )
    return sorted(values, reverse=True)[:LIKELIEST]


def dialect_of(kind: ServerKind) -> Dialect:
    """Returns the dialect of a kind of server."""
    return Vllm() if kind == "vllm" else Sglang()
