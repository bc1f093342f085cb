"""A vLLM or SGLang server as everything that asks one needs it: which models it has, whether its tokens are the run's,
and the log-probabilities of texts.

Samplers and teachers stand on it, so that both refuse the same servers in the same sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.choices import ServerKind
from engine.errors import UserError
from engine.foreign.fields import is_integer
from engine.rollouts.servers.dialects import Call, WrongValue, dialect_of
from engine.rollouts.servers.http import SMALL_ANSWER, CallRefused, HttpServer
from engine.sentences import listed

_LIST_BYTES = 1 << 20
"""Maximum bytes of the list of models: vLLM writes under 1 KiB for each of them and each adapter."""
_TOKEN_BYTES = 16
"""Maximum bytes of a token in a list of ids."""
_CARD_FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("id", str, "a text"),
    ("owned_by", str | None, "a text"),
    ("parent", str | None, "a text or null"),
    ("max_model_len", int | None, "an integer"),
)
"""The fields that are read of a model in the list: the name, its kind in Python, and in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRole:
    """What a server is for, in the words of messages.

    Args:
        kind: the option that has its kind.
        model: the option that names one of its models; None where it must have one alone.
        wanted: the model that is to be named.
        verb: what cannot be done with it, as in "cannot be sampled from".
        serves: which model it is to serve.
    """

    kind: str
    model: str | None
    wanted: str
    verb: str
    serves: str


SAMPLER = ServerRole(
    kind="rollout.server_kind",
    model="rollout.server_model",
    wanted="the one that is trained",
    verb="sampled from",
    serves="the model of model.path, with its tokenizer",
)
TEACHER = ServerRole(
    kind="distillation.server_kind",
    model=None,
    wanted="a server of one model",
    verb="a teacher",
    serves="a model of the same family as model.path",
)


class ServerClient:
    """A server.

    Args:
        url: its address.
        kind: of it.
        role: what it is for.
        timeout: seconds of a call with all its attempts.
        key: that it asks for; None for none.
    """

    def __init__(self, url: str, kind: ServerKind, role: ServerRole, *, timeout: float, key: str | None = None) -> None:
        self.http = HttpServer(url, timeout=timeout, key=key)
        self.dialect = dialect_of(kind)
        self._kind, self._role = kind, role

    @property
    def url(self) -> str:
        return self.http.url

    def cards(self) -> dict[str, dict[str, Any]]:
        """Returns the server's records of its models and adapters, by name."""
        answer = self.http.call("/v1/models", most_bytes=_LIST_BYTES)
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise UserError(f"{self.url}/v1/models lists no models: give the address of a {self.dialect.name} server.")
        for card in cards:
            for name, kind, expected in _CARD_FIELDS:
                if not isinstance(card.get(name), kind) or isinstance(card.get(name), bool):
                    given = self.http.described(card[name])
                    raise UserError(
                        f"{self.url}/v1/models gives {given} as {name} of a model, and {expected} is expected: give "
                        f"the address of a {self.dialect.name} server."
                    )
        return {card["id"]: card for card in cards}

    def require_model(self, name: str | None, length: int, needed: str) -> str:
        """Returns the name of the model.

        Args:
            name: the one that was chosen; None for the only one.
            length: tokens that its context must have.
            needed: the same in words.

        Raises:
            UserError: the server is of another kind, has no such model, several without a choice, or a short context.
        """
        role = self._role
        bases = {one: card for one, card in self.cards().items() if not card.get("parent")}
        owners = {card.get("owned_by") for card in bases.values()} & {"vllm", "sglang"}
        if owners and self.dialect.owner not in owners:
            raise UserError(
                f"{role.kind} is {self._kind}, and {self.url} says that it is {owners.pop()}: change {role.kind}."
            )
        if name is None and len(bases) == 1:
            (name,) = bases
        if name not in bases:
            served = f"{len(bases) or 'no'} model{'s' if len(bases) != 1 else ''}{self.http.repeated(listed(bases))}"
            if role.model is None:
                raise UserError(f"{self.url} serves {served}: give the address of {role.wanted}.")
            asked = f"{role.model} is not set" if name is None else f"{role.model} is {name}"
            raise UserError(f"{asked}, and {self.url} serves {served}: name {role.wanted}.")
        limit = bases[name].get("max_model_len")
        if is_integer(limit) and limit < length:
            facts = self.http.repeated(f"{listed([name])}: {limit} tokens")
            raise UserError(
                f"{self.url} serves a context that is shorter than {needed}{facts}: raise the server's, or lower "
                "data.seq_length."
            )
        assert name is not None
        return name

    def compare_tokens(self, model: str, text: str, own: Sequence[int]) -> list[str]:
        """Refuses a server whose tokenizer splits a text into other tokens.

        Returns:
            A note where it could not be compared.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            most = SMALL_ANSWER + _TOKEN_BYTES * len(text.encode())
            answer = self.http.call("/tokenize", body, most_bytes=most)
        except CallRefused as refusal:
            return [f"the server's tokenizer could not be compared: {refusal}"]
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if tokens != list(own):
            raise UserError(
                f"{self.url} has another tokenizer, which makes other tokens of prompts that are {_few(own)}"
                f"{self.http.repeated(_few(tokens))}: serve {self._role.serves}."
            )
        return []

    def post(self, call: Call) -> Any:
        """Returns the answer to a call."""
        return self.http.call(call.path, call.body, most_bytes=call.most_bytes)

    def refused(self, error: UserError) -> UserError:
        """Returns the error of an answer that cannot be used, with the server in its sentence."""
        told = error.with_value(self.http.described) if isinstance(error, WrongValue) else str(error)
        return UserError(f"{self.url} cannot be {self._role.verb}: {told.rstrip('.')}.")

    def close(self) -> None:
        """Ends the calls under way."""
        self.http.close()


def _few(ids: object) -> str:
    """Returns some tokens for a sentence."""
    if not isinstance(ids, Sequence) or not all(map(is_integer, ids)):
        return "no tokens"
    shown = ", ".join(str(one) for one in list(ids)[:6])
    return f"[{shown}{', ...' if len(ids) > 6 else ''}]"
