"""What is said of the tokens of prompts and completions, beside the completions themselves: log-probabilities of the
prompt's tokens, of tokens that the client names, of the most likely ones, and of ones that are drawn.

All come from passes of training's layers, without dropout. Those of a prompt have temperature 1; those of completions
have the temperature of their log-probabilities, that of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.inference.token_scores import Question, token_scores
from engine.models.decoder import Decoder
from engine.ops.attention.token_context import TokenContext
from engine.training.build import Training
from rankfold.serving.images import ClientImages
from rankfold.serving.ranks import Ranks
from rankfold.serving.sample_request import Sample
from rankfold.serving.sampling import first_row
from rankfold.serving.spread import Spread, place_of

_FLOAT32, _INT64 = 1, 2
_NOTHING = -99999.0
"""Log-probability where there is none, of a token 0."""
_Numbers = NDArray[np.float64]
_Tokens = NDArray[np.int64]


class _Row(NamedTuple):
    """A row to read: its tokens, the labels of its positions, what else is asked, what gets the answer, which is
    [T, 2, K]: ids, and their log-probabilities; and its images."""

    tokens: _Tokens
    labels: _Tokens
    question: Question
    take: Callable[[_Numbers], None]
    images: tuple[Any, ...]


class Scores:
    """Scores tokens of requests for samples.

    Args:
        spread, ranks: of the server.
        images: of the requests.
    """

    def __init__(self, spread: Spread, ranks: Ranks, images: ClientImages) -> None:
        self._spread, self._ranks, self._images = spread, ranks, images

    def add(
        self, training: Training, requests: Mapping[str, Sample], answers: Mapping[str, list[dict[str, Any]]]
    ) -> dict[str, dict[str, Any]]:
        """Returns the fields of each request's SampleResponse, on rank 0; nothing elsewhere. Collective.

        Args:
            training: the model.
            requests: by name.
            answers: the fields of their SampledSequence messages, on rank 0.
        """
        fields: dict[str, dict[str, Any]] = {name: {"sequences": answers.get(name, [])} for name in requests}
        for name, scores in self._prompt_logprobs(training, requests).items():
            fields[name]["prompt_logprobs"] = scores
        rows = []
        for name, request in requests.items():
            rows += _prompt_rows(name, request, fields[name])
        completions = {name: answers.get(name, []) for name, one in requests.items() if one.best_of_samples}
        if completions:
            told: dict[str, list[bytes]] = self._ranks.told(
                {name: [one["tokens"] for one in own] for name, own in completions.items()}
            )
            for name, own in told.items():
                targets = completions[name] or [{} for _ in own]
                rows += [
                    _completion_row(requests[name], np.frombuffer(data, "<i4").astype(np.int64), target)
                    for data, target in zip(own, targets, strict=True)
                ]
        self._read(training, rows)
        return fields if self._ranks.is_first else {}

    def _prompt_logprobs(self, training: Training, requests: Mapping[str, Sample]) -> dict[str, bytes]:
        """Returns float32 log-probabilities of the tokens of the prompts that are to be scored; NaN for the first, and
        for those not asked for. Of rank 0 alone."""
        scored = {name: one for name, one in requests.items() if one.prompt_logprobs}
        prompts = [np.asarray(one.prompt, np.int64) for one in scored.values() if len(one.prompt) > 1]
        found: list[Tensor] = []
        if prompts:
            seen = [one.images for one in scored.values() if len(one.prompt) > 1]
            batches = self._rows([ids[:-1] for ids in prompts], [ids[1:] for ids in prompts], seen)
            found = self._spread.gathered({"": self._spread.log_probabilities(training, batches)})[""]
        answers = {}
        for name, request in scored.items() if self._ranks.is_first else ():
            scores = np.full(len(request.prompt), np.nan, np.float32)
            if len(scores) > 1:
                scores[1:] = found.pop(0).numpy()
            if request.last is not None:
                scores[: -request.last] = np.nan
            answers[name] = scores.tobytes()
        return answers

    def _rows(
        self, tokens: Sequence[_Tokens], labels: Sequence[_Tokens], images: Sequence[tuple[Any, ...]]
    ) -> list[list[Batch]]:
        def dressed(row: Batch, place: int) -> Batch:
            own = images[place]
            return self._images.with_images(row, [(tokens[place], own)]) if own else row

        return self._spread.rows(tokens, labels, dressed)

    def _read(self, training: Training, rows: Sequence[_Row]) -> None:
        if not rows:
            return

        def read(model: Decoder, out: Tensor, batch: Batch, context: TokenContext) -> Tensor:
            place = place_of(batch)
            question = Question() if place < 0 else rows[place].question
            return token_scores(model, out, batch, context, question)

        batches = self._rows([row.tokens for row in rows], [row.labels for row in rows], [row.images for row in rows])
        found = self._spread.gathered({"": self._spread.read(training, batches, read)})[""]
        for row, one in zip(rows, found, strict=False):  # other ranks have none
            row.take(one.numpy().reshape(len(one), 2, -1))


def _prompt_rows(name: str, request: Sample, fields: dict[str, Any]) -> list[_Row]:
    """Returns the row of a prompt of which more is asked than the log-probabilities of its tokens."""
    ids = np.asarray(request.prompt, np.int64)
    best, drawn, targets = request.best_of_prompt, request.alternatives, request.targets
    if not (best or drawn or targets is not None):
        return []
    labels = _unnamed(len(ids) - 1) if targets is None else np.where(targets < 0, IGNORE_LABEL, targets)
    named = labels.shape[1]

    def take(found: _Numbers) -> None:
        if targets is not None:
            fields["target_prompt_logprobs"] = _target_scores(request, found[:, 1, :named])
        if best:
            fields["topk_prompt_logprobs"] = _listed(found[:, :, named : named + best], best, len(ids), request.last)
        if drawn:
            own = found[:, :, named + best :]
            fields["prompt_alt_tokens"] = {
                "tokens": _tensor(own[:, 0], _INT64),
                "logprobs": _tensor(own[:, 1], _FLOAT32),
            }

    if len(ids) == 1:
        take(np.zeros((0, 2, named + best + drawn)))
        return []
    question = Question(best=best, drawn=drawn, row=first_row(name, request), draw_temperature=request.temperature)
    return [_Row(ids[:-1], labels, question, take, request.images)]


def _completion_row(request: Sample, completion: _Tokens, target: dict[str, Any]) -> _Row:
    """Returns the row of a completion whose most likely tokens are asked for."""
    ids = np.concatenate([np.asarray(request.prompt, np.int64), completion])
    best, count = request.best_of_samples, len(completion)

    def take(found: _Numbers) -> None:
        target["topk_sampled_logprobs"] = _listed(found[len(found) - count :, :, 1:], best, count, None)

    question = Question(best=best, temperature=request.temperature or 1.0)
    return _Row(ids[:-1], _unnamed(len(ids) - 1), question, take, request.images)


def _unnamed(length: int) -> _Tokens:
    """Returns the labels of a row for which the client names no tokens."""
    return np.full((length, 1), IGNORE_LABEL, np.int64)


def _listed(found: _Numbers, count: int, length: int, last: int | None) -> dict[str, Any]:
    """Returns a TopkLogprobs message.

    Args:
        found: [positions, 2, count], of the last positions.
        length: of all positions; the others have nothing.
        last: how many of the positions are asked for; None for all.
    """
    shown = len(found) if last is None else min(last, len(found))
    ids, logps = np.zeros((length, count), np.int32), np.full((length, count), _NOTHING, np.float32)
    if shown:
        ids[-shown:], logps[-shown:] = found[-shown:, 0], found[-shown:, 1]
    return {"token_ids": ids.tobytes(), "logprobs": logps.tobytes(), "k": count, "length": length}


def _target_scores(request: Sample, logps: _Numbers) -> dict[str, Any]:
    """Returns a Tensor message in the layout of the request's targets, with 0 where there is none."""
    targets, layout = request.targets, request.targets_layout
    assert targets is not None
    scores = np.where(targets < 0, 0.0, logps)
    if not layout:
        return _tensor(scores, _FLOAT32)
    crow = np.asarray(layout["crow_indices"], np.int64)
    rows, columns = np.repeat(np.arange(len(scores)), np.diff(crow)), np.asarray(layout["col_indices"], np.int64)
    parts = {name: np.asarray(own, "<i8").tobytes() for name, own in layout.items()}
    values = scores[rows, columns].astype("<f4").tobytes()
    return {"sparse_csr": {"values": values, **parts}, "dtype": _FLOAT32, "shape": list(scores.shape)}


def _tensor(values: _Numbers, dtype: int) -> dict[str, Any]:
    data = values.astype("<f4" if dtype == _FLOAT32 else "<i8").tobytes()
    return {"dense": data, "dtype": dtype, "shape": list(values.shape)}
