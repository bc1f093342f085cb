"""A teacher on a vLLM or SGLang server, which gives the log-probabilities of prompts.

Rank 0 sends each completion with its prompt, in threads, and tells all ranks. Nothing is sampled but the one token that
servers insist on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.rollout import KEY_VARIABLE
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.foreign.fields import is_integer
from engine.rollouts.rank_zero import broadcast_result
from engine.rollouts.servers.dialects import WrongValue, dialect_of
from engine.rollouts.servers.http import SMALL_ANSWER, CallRefused, HttpServer
from engine.rollouts.servers.server import Asked
from engine.runtime.launch import Launch
from engine.runtime.secrets import secret

_LIST_BYTES = 1 << 20
"""Maximum bytes of the list of models."""
_TOKEN_BYTES = 16
"""Maximum bytes of a token in a list of ids."""


class TeacherServer:
    """The server, as rank 0 speaks to it.

    Args:
        config: of the run.
        url: of the server.
    """

    def __init__(self, config: RunConfig, url: str) -> None:
        options = config.distillation
        self._config, self._url, self._dialect = config, url, dialect_of(options.server_kind)
        self._http = HttpServer(url, timeout=options.server_timeout, key=secret(KEY_VARIABLE))
        self._pool = ThreadPoolExecutor(config.rollout.slots, thread_name_prefix="teacher")
        self._model: str | None = None

    def check(self, tokenizer: Tokenizer, texts: Sequence[str], prompt: Sequence[int]) -> str | None:
        """Checks whether the server can judge the run's tokens.

        Args:
            texts: of some prompts.
            prompt: ids of one.

        Returns:
            A note on what could not be checked; None where there is none.

        Raises:
            UserError: it cannot.
        """
        self._require_model()
        note = self._compare_tokens(tokenizer, texts)
        self.logps([*prompt, *prompt][:2])
        return note

    def ask(self, rows: Sequence[Sequence[int]]) -> Asked:
        """Begins to ask for the log-probabilities of the tokens of some rows; see `logps`."""
        return Asked([self._pool.submit(self.logps, row) for row in rows])  # type: ignore[misc]

    def logps(self, ids: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token after the first.

        Raises:
            UserError: the server fails, or gives none.
        """
        call = self._dialect.score(self._require_model(), ids)
        try:
            return self._dialect.scored(self._http.call(call.path, call.body, most_bytes=call.most_bytes), ids)
        except CallRefused as refusal:
            raise UserError(f"{refusal}: see the log of the teacher's server.") from None
        except WrongValue as error:
            told = error.with_value(self._http.described)
            raise UserError(f"{self._url} cannot be a teacher: {told}.") from None
        except UserError as error:
            if self._url in str(error):
                raise
            raise UserError(f"{self._url} cannot be a teacher: {str(error).rstrip('.')}.") from None

    def close(self) -> None:
        """Ends the calls under way."""
        self._http.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _require_model(self) -> str:
        """Returns the name of the model that is served."""
        if self._model is not None:
            return self._model
        answer = self._http.call("/v1/models", most_bytes=_LIST_BYTES)
        cards = answer.get("data") if isinstance(answer, dict) else None
        known = [one for one in cards if isinstance(one, dict)] if isinstance(cards, list) else []
        bases = [one for one in known if isinstance(one.get("id"), str) and not one.get("parent")]
        if len(bases) != 1:
            raise UserError(
                f"distillation.teachers has {self._url}, which serves {len(bases) or 'no'} models: give the address of "
                "a server of one model, and its kind in distillation.server_kind."
            )
        limit, length = bases[0].get("max_model_len"), self._config.data.seq_length
        if is_integer(limit) and limit <= length:
            raise UserError(
                f"{self._url} serves a context of {limit} tokens, and data.seq_length {length} and one more are "
                "needed: raise the server's, or lower data.seq_length."
            )
        self._model = str(bases[0]["id"])
        return self._model

    def _compare_tokens(self, tokenizer: Tokenizer, texts: Sequence[str]) -> str | None:
        text = " ".join(texts)
        own: list[Any] = list(tokenizer.encode(text))
        body = {"model": self._require_model(), "prompt": text, "add_special_tokens": False}
        try:
            answer = self._http.call("/tokenize", body, most_bytes=SMALL_ANSWER + _TOKEN_BYTES * len(text.encode()))
        except CallRefused:
            return f"the tokenizer of {self._url} could not be compared"
        if (answer.get("tokens") if isinstance(answer, dict) else None) != own:
            raise UserError(
                f"{self._url} has another tokenizer, which makes other tokens of prompts: serve a model of the same "
                "family as model.path."
            )
        return None


class ServedTeacher:
    """A teacher on a server, as all ranks ask it.

    Args:
        config, launch: of the run.
        url: of the server.
    """

    def __init__(self, config: RunConfig, launch: Launch, url: str) -> None:
        self._config = config
        self._server = TeacherServer(config, url) if launch.rank == 0 else None

    def logps(self, dataset: TokenDataset) -> NDArray[np.float32]:
        """Returns float32 [T], the log-probability of each token of a data set given those before it in its document;
        0 for the first ones. Collective.

        Raises:
            UserError: the server fails; on all ranks.
        """
        ends = (dataset.starts + dataset.lengths).tolist()
        spans = list(zip(dataset.starts.tolist(), ends, strict=True))
        asked = None
        if self._server is not None:
            asked = self._server.ask([dataset.tokens[begin:end].tolist() for begin, end in spans])
        found = np.zeros(len(dataset.tokens), dtype=np.float32)
        for (begin, end), logps in zip(spans, broadcast_result(asked, self._config), strict=True):
            found[begin + 1 : end] = logps
        return found

    def close(self) -> None:
        """Ends the calls under way."""
        if self._server is not None:
            self._server.close()
