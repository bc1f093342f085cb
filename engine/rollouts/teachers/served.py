"""A teacher on a vLLM or SGLang server, which gives the log-probabilities of prompts.

Rank 0 sends each completion with its prompt, in threads, and tells all ranks. Nothing is sampled but the one token that
servers insist on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.config.rollout import KEY_VARIABLE
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.rollouts.rank_zero import broadcast_result
from engine.rollouts.servers.client import TEACHER, ServerClient
from engine.rollouts.servers.http import CallRefused
from engine.rollouts.servers.server import Asked
from engine.runtime.launch import Launch
from engine.runtime.secrets import secret


class TeacherServer:
    """The server, as rank 0 speaks to it.

    Args:
        config: of the run.
        url: of the server.
    """

    def __init__(self, config: RunConfig, url: str) -> None:
        options, self._length = config.distillation, config.data.seq_length
        self._client = ServerClient(
            url, options.server_kind, TEACHER, timeout=options.server_timeout, key=secret(KEY_VARIABLE)
        )
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
        text = " ".join(texts)
        notes = self._client.compare_tokens(self._require_model(), text, list(tokenizer.encode(text)))
        self.logps([*prompt, *prompt][:2])
        return "; ".join(notes) or None

    def ask(self, rows: Sequence[Sequence[int]]) -> Asked[list[float]]:
        """Begins to ask for the log-probabilities of the tokens of some rows; see `logps`."""
        return Asked([self._pool.submit(self.logps, row) for row in rows])

    def logps(self, ids: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token after the first.

        Raises:
            UserError: the server fails, or gives none.
        """
        client = self._client
        try:
            answer = client.post(client.dialect.score(self._require_model(), ids))
        except CallRefused as refusal:
            raise UserError(f"{refusal}: see the log of the teacher's server.") from None
        try:
            return client.dialect.scored(answer, ids)
        except UserError as error:
            raise client.refused(error) from None

    def identity(self) -> str | None:
        """Returns a hash of the model's name; None where the server does not tell it now."""
        try:
            return hashlib.blake2b(self._require_model().encode(), digest_size=16).hexdigest()
        except UserError:  # the next call says why
            return None

    def close(self) -> None:
        """Ends the calls under way."""
        self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _require_model(self) -> str:
        """Returns the name of the model that is served; a call needs room for one token more, which is sampled."""
        if self._model is None:
            room = self._length + 1
            self._model = self._client.require_model(
                None, room, f"data.seq_length {self._length} and one token more, which are {room}"
            )
        return self._model


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

    def identity(self) -> str | None:
        """Returns a hash that tells the model from others, on rank 0; None elsewhere, or where it is not known."""
        return None if self._server is None else self._server.identity()

    def close(self) -> None:
        """Ends the calls under way."""
        if self._server is not None:
            self._server.close()
