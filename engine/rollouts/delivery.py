"""Proof that a server computes with the adapter that it was given last.

A server may take an adapter and go on with another one, from a cache or by a module that it skips, and samples still
look right. So after each delivery the log-probabilities of a few prompts are asked of it, by the name of the adapter,
and compared with those that the trainer gives without adapters, w, gave under the adapter before, b, and gives now, n.
With s the server's, and o either of the old ones,

    share = (s - o) . (n - o) / |n - o|^2,   error = |s - o - share (n - o)| / (sqrt(tokens) |n - o|)

share is 1 where the server has the new adapter, and 0 where it has the old one, whatever the precision in which it
computes; error is its standard error. A server that applies a part of the modules, or scales them otherwise, has a
share of w that is not 1, or lies further from n than its precision explains, of which its log-probabilities without
adapters tell. A fault that changes less than a quarter of the effect of all adapters is not seen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.token_logps import token_logps
from engine.training.build import Training

_PROMPTS, _TOKENS = 16, 2048
"""Most prompts, and tokens of all, that are compared."""
_KNOWN = 0.1
"""The largest standard error with which a share tells anything."""
_HALF, _ERRORS = 0.5, 4.0
"""A share that is further below this than so many standard errors is of the adapter before. Rounding of the trainer's,
which is in both differences, moves shares of 0 and 1 towards it, and no further."""
_PART = 0.25
"""The largest part of the effect of all adapters by which a server may be off."""
_NOISE = 3.0
"""Factor of the distance without adapters up to which the precision explains one."""

Logps = NDArray[np.float32]


class Delivery(NamedTuple):
    """Where a server's log-probabilities lie between those of two adapters; see the module.

    Args:
        share: 0 for the old one, 1 for the new one.
        error: of the share.
    """

    share: float
    error: float

    @property
    def tells(self) -> bool:
        """Whether the two adapters are far enough apart for the server's precision."""
        return self.error <= _KNOWN

    @property
    def failed(self) -> bool:
        """Whether the server is nearer to the adapter before."""
        return self.tells and self.share < _HALF - _ERRORS * self.error


def delivery(served: Logps, before: Logps, now: Logps) -> Delivery:
    """Compares a server with the trainer.

    Args:
        served, before, now: log-probabilities of the same tokens: the server's, and the trainer's under two adapters.
    """
    change = now.astype(np.float64) - before
    length = float(change @ change)
    if not length:
        return Delivery(float("nan"), float("inf"))
    moved = served.astype(np.float64) - before
    share = float(moved @ change) / length
    rest = moved - share * change
    return Delivery(share, float(np.sqrt(rest @ rest / len(rest) / length)))


class Known(NamedTuple):
    """The trainer's log-probabilities of the probe.

    Args:
        without: without adapters.
        before: under the adapter that the server was given before; None where it was given none, or where that is not
            known.
        now: under the one that it was given last.
    """

    without: Logps
    before: Logps | None
    now: Logps

    @property
    def old(self) -> Logps:
        """Those that a server keeps which was given nothing."""
        return self.without if self.before is None else self.before


def fault(served: Logps, known: Known, *, noise: float | None, rows: Sequence[int] = ()) -> str | None:
    """Returns which fault of a server its log-probabilities show, as the end of a sentence about it that it was given
    an adapter; None for none.

    Args:
        served: the server's.
        known: the trainer's of the same tokens.
        noise: root of the mean squared difference of the two without adapters; None where the server did not tell.
        rows: tokens of each text, for faults of single answers.
    """
    whole = delivery(served, known.without, known.now)
    since = delivery(served, known.old, known.now)
    effect = _distance(known.without, known.now)
    nearest = min((known.now, known.old, known.without), key=lambda one: _distance(served, one))
    told = delivery(served, nearest, known.now)
    if told.failed:
        is_near = noise is None or _distance(served, nearest) <= _allowed(noise, _PART * effect)
        if is_near and abs(told.share) <= _PART + _moved(noise, _distance(nearest, known.now)):
            return _of_old(told, nearest, known, noise)
    elif noise is None or not _is_off(whole, _distance(served, known.now), noise, effect):
        return None
    if rows and (old := _old_rows(served, known, noise, rows)):
        return (
            f"computes with another one in {old} of {len(rows)} answers, where the rest is right: see that each server "
            "behind this address gets every adapter"
        )
    words = f"{whole.share:.2f} of the way from the model without adapter to the new one"
    if since.tells and known.before is not None:
        words += f", and {since.share:.2f} from the one before"
    return (
        "computes with neither this one, nor the one before, nor without: its log-probabilities of prompts lie "
        f"{words}, where 1 is expected: see its log for modules that it skips (a list of target modules, an unknown "
        "name), and that it scales by lora_alpha / r"
    )


def _of_old(told: Delivery, nearest: Logps, known: Known, noise: float | None) -> str:
    """Returns the end of the sentence on a server with an old adapter, or none; see `fault`.

    Args:
        told: its place between `nearest` and the new adapter.
        nearest: the trainer's log-probabilities that are its.
    """
    if known.before is None or _distance(known.before, known.without) <= _allowed(noise, 0.0):
        # an adapter that changes nothing is none
        which, why = "without adapter", "it ignores the call that loads one, or is one version behind"
    elif nearest is known.before:
        which, why = "with the one before", "it is one version behind"
    else:
        which, why = "without adapter", "it ignores the call that loads one"
    return (
        f"computes {which}: {why}; its log-probabilities of prompts lie {told.share:.2f} of the way from the old ones "
        "to the new ones, where 1 is expected: see its log, and that no cache in front of it answers"
    )


def _is_off(whole: Delivery, off: float, noise: float, effect: float) -> bool:
    """Returns whether log-probabilities are not those of an adapter, though nearer to them than to any others.

    Args:
        whole: between the model without adapters and with them.
        off: distance from those with them.
        noise: see `fault`.
        effect: distance of the two.
    """
    if whole.error <= _KNOWN / 2 and abs(whole.share - 1) > _PART + _moved(noise, effect):
        return True
    return off > _allowed(noise, _PART * effect)


def _moved(noise: float | None, effect: float) -> float:
    """Returns by how much rounding moves a share at most."""
    return (noise / effect) ** 2 if noise and effect else 0.0


def _old_rows(served: Logps, known: Known, noise: float | None, rows: Sequence[int]) -> int:
    """Returns how many answers are of an old adapter, where all others are of the new one; 0 where they are not."""
    ends, old = np.cumsum(rows)[:-1], 0
    parts = [np.split(one, ends) for one in (served, known.now, known.old, known.without)]
    for own, now, *others in zip(*parts, strict=True):
        nearest = min((now, *others), key=lambda one: _distance(own, one))
        if _distance(own, nearest) > _allowed(noise, _PART * _distance(now, others[-1])):
            return 0
        old += nearest is not now
    return old


def _allowed(noise: float | None, rest: float) -> float:
    return _NOISE * (noise or 0.0) + rest


def _distance(one: Logps, other: Logps) -> float:
    """Returns the root of the mean squared difference."""
    differences = one.astype(np.float64) - other
    return float(np.sqrt(differences @ differences / len(differences)))


def noise_of(served: Logps, without: Logps) -> float:
    """Returns the distance of a server's log-probabilities without adapters from the trainer's; see `fault`."""
    return _distance(served, without)


class Probe:
    """The prompts that are compared, and the trainer's log-probabilities of them.

    Args:
        config, training: of the run, whose rollout.temperature is 1.
        prompts: token ids; a few of them are taken.
    """

    def __init__(self, config: RunConfig, training: Training, prompts: Sequence[Sequence[int]]) -> None:
        self._config, self._training = config, training
        rows: list[tuple[int, ...]] = []
        for ids in prompts:
            if len(ids) > 1 and len(rows) < _PROMPTS and sum(map(len, rows)) + len(ids) <= _TOKENS:
                rows.append(tuple(ids))
        self.rows = rows
        """Token ids of each."""

    def logps(self, *, adapters: bool = True) -> NDArray[np.float32]:
        """Returns the log-probabilities of all their tokens but the first of each, one after the other. Collective.

        Args:
            adapters: False leaves them out.
        """
        documents = [
            Completion(prompt=ids[:1], tokens=ids[1:], sampled_logps=[0.0] * (len(ids) - 1), advantage=0.0)
            for ids in self.rows
        ]
        dataset = TokenDataset(
            completion_columns(documents, "tokens"),
            seq_length=self._config.data.seq_length,
            packing=self._config.data.packing is True,
        )
        mesh, stages = self._training.mesh, self._training.stages
        found = token_logps(self._config, mesh, stages, dataset, adapters=adapters)
        ends = (dataset.starts + dataset.lengths).tolist()
        return np.concatenate(
            [found[begin + 1 : end] for begin, end in zip(dataset.starts.tolist(), ends, strict=True)]
        )
