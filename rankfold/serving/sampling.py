"""Completions of several requests in one run of the generation loop.

A random number is a function of (seed, which of the request's completions, position, token), so that a request with a
seed has the same completions whichever others it is executed with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.tokenizer_files import end_tokens
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.inference.generate import Generator
from engine.inference.model_part import InferenceStage, Parts
from engine.inference.options import Limits, Sampling
from engine.inference.rows import Answer, Request
from engine.training.build import Training
from rankfold.serving.images import ClientImages
from rankfold.serving.ranks import Ranks
from rankfold.serving.sample_request import Sample

_SEED_BITS = 31
_STOPPED, _TOO_LONG = 0, 1
_Completion = tuple[str, int]
"""Name of a request, and which of its completions."""


class Sampler:
    """Samples from models that read one base.

    Args:
        folder: of the base, with its tokenizer.
        ranks: of the server. Those that have copies of the model sample different completions.
        images: of the requests.
        slots: completions at a time; passes are always as large.
        context: tokens of the longest row.
    """

    def __init__(self, folder: Path, ranks: Ranks, images: ClientImages, *, slots: int, context: int) -> None:
        self._folder, self._ranks, self._images = folder, ranks, images
        self._slots, self._context = slots, context

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The base's tokenizer, which takes seconds to open.

        Raises:
            UserError: there is none that opens.
        """
        return load_tokenizer(self._folder)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return end_tokens(self._folder, self.tokenizer.eos_id)

    def run(self, training: Training, requests: Mapping[str, Sample]) -> dict[str, list[dict[str, Any]]]:
        """Returns the fields of each request's SampledSequence messages, on rank 0; nothing elsewhere. Collective.

        Args:
            training: the model.
            requests: by name, which seeds those without a seed.
        """
        rounds: list[dict[int, _Completion]] = []
        for name, request in requests.items():
            for number in range(request.count):
                row = first_row(name, request) + number
                settings = _settings(request)
                fits = (
                    one
                    for one in rounds
                    if row not in one and _settings(requests[next(iter(one.values()))[0]]) == settings
                )
                found = next(fits, None)
                if found is None:
                    rounds.append(found := {})
                found[row] = name, number
        answers: dict[_Completion, Answer] = {}
        for one in rounds:
            answers |= self._run(training, one, requests)
        if not self._ranks.is_first:
            return {}
        return {
            name: [_sequence(answers[name, number]) for number in range(request.count)]
            for name, request in requests.items()
        }

    def _run(
        self, training: Training, rows: Mapping[int, _Completion], requests: Mapping[str, Sample]
    ) -> dict[_Completion, Answer]:
        """Returns the answers of completions whose settings are the same, on rank 0."""
        asked = [
            Request(row=row, ids=requests[name].prompt, images=requests[name].images) for row, (name, _) in rows.items()
        ]
        request = requests[next(iter(rows.values()))[0]]
        longest = max(len(one.ids) for one in asked)
        new = request.max_tokens or self._context - longest
        stops = frozenset(request.stop_ids) | (self._ends if request.ends else frozenset())
        limits = Limits(
            max_new_tokens=new, stop_ids=stops, stop_texts=request.stop_texts, slots=self._slots, prefill_tokens=4096
        )
        greedy = request.temperature == 0
        mesh, partition = training.mesh, training.plan.partition
        copies = mesh.dp_cp
        # neighbours, as those of one prompt share its pass and its cache
        mine = asked[copies.rank * len(asked) // copies.size : (copies.rank + 1) * len(asked) // copies.size]
        family = self._images.family if any(one.images for one in asked) else None
        training.optimizer.flat.finish_publish()
        stage = InferenceStage(
            Parts(dict(zip(partition.parts(mesh.pp.rank), training.parts, strict=True)), partition.stage_rank),
            tp=mesh.tp,
            pp=mesh.pp,
            sampling=Sampling(
                temperature=request.temperature,
                top_k=None if greedy else request.top_k,
                top_p=1.0 if greedy else request.top_p,
            ),
            slots=self._slots,
            length=longest + new,
            new=new,
            group=min(self._slots, max(one.count for one in requests.values())),
            device=training.stages.step.device,
            with_logps=True,
            tokens_multiple=1 if family is not None else self._slots,  # positions of images are not filled up
        )
        # ranks that send each other tokens for experts do so in each pass
        together = copies if mesh.ep.size > 1 else None
        texts = self.tokenizer if request.stop_texts else None
        answers = Generator(stage, limits, texts, family=family, in_step_with=together).run(mine)
        found = self._ranks.gathered(answers if mesh.tp.rank == mesh.pp.rank == 0 else ())
        return {rows[answer.request.row]: answer for own in found for answer in own}


def _settings(request: Sample) -> tuple[object, ...]:
    """Returns what completions of one run have in common; without max_tokens, prompts of one length."""
    length = len(request.prompt) if request.max_tokens is None else 0
    return (
        request.max_tokens, request.temperature, request.top_k, request.top_p, request.stop_ids, request.stop_texts,
        request.ends, length, bool(request.images),
    )  # fmt: skip


def first_row(name: str, request: Sample) -> int:
    """Returns the number of the row of a request's first completion, a coordinate of random numbers.

    Args:
        name: of the request, which seeds it where it has no seed.
    """
    made = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    seed = (made if request.seed is None else request.seed) % (1 << _SEED_BITS)
    return seed << (63 - _SEED_BITS)


def _sequence(answer: Answer) -> dict[str, Any]:
    return {
        "stop_reason": _TOO_LONG if answer.ending == "length" else _STOPPED,
        "tokens": _bytes(answer.ids, np.int32),
        "logprobs": _bytes(answer.logps, np.float32),
    }


def _bytes(values: Sequence[float], dtype: Any) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()
