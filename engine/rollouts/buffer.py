"""The buffer: a generation batch with its rewards, which several steps are trained on, as a checkpoint stores it.

Where a checkpoint is saved between two steps of one buffer, the buffer is saved with it: the weights that sampled it
are gone. Between two buffers there is nothing to save, since the weights sample the same one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from engine.data.dataset import TokenDataset
from engine.errors import UserError
from engine.rollouts.agents.metrics import metric_arrays, metrics_of
from engine.rollouts.sampler import Sampled, Turns
from engine.rollouts.weights import Weights

_COUNTS = [field.name for field in fields(Turns)]
FILE = "rollouts.safetensors"
"""Name of a buffer's file in the folder of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A generation batch. Its prompts are dealt out to the steps in their order, as many to each.

    Args:
        generation: its number in the run, from 0.
        prompts: int64 [P], numbers of the prompts.
        completions: of each prompt, one prompt after the other.
        rewards_NF: fp64, the score of each completion by each function, then the penalties; NaN where there is none.
        advantages: float32 [N].
        uniform: bool [P], whether all completions of a prompt are equally good.
        num_steps: steps that take their own prompts.
        iterations: times that these steps are taken.
        lag: steps between the weights that sampled it and the first step on it.
        weights: those that sampled its tokens.
        old_logps: float32 of each token of each completion, by the trainer before the first step; None where each
            completion is trained on once, right after the trainer's own model sampled it.
        teacher_logps: float32 [K, tokens] of each completion, by each teacher; None without teachers.
        reference_logps: as `old_logps`, by a reference that moves; None where none does.
        routes_differ: share of the pairs of a token and a layer for which the trainer would have chosen other experts
            than the server did; None where the server's are not known.
    """

    generation: int
    prompts: NDArray[np.int64]
    completions: tuple[Sampled, ...]
    rewards_NF: NDArray[np.float64]
    advantages: NDArray[np.float32]
    uniform: NDArray[np.bool_]
    num_steps: int
    iterations: int
    lag: int = 0
    weights: tuple[Weights, ...] = ()
    old_logps: tuple[NDArray[np.float32], ...] | None = None
    teacher_logps: tuple[NDArray[np.float32], ...] | None = None
    routes_differ: float | None = None
    reference_logps: tuple[NDArray[np.float32], ...] | None = None

    @property
    def group(self) -> int:
        """Completions of each prompt."""
        return len(self.completions) // len(self.prompts)

    @property
    def own_logps(self) -> tuple[NDArray[np.float32], ...]:
        """The log-probabilities of each completion's tokens under the model before the first step."""
        return self.old_logps or tuple(one.logps for one in self.completions)

    @property
    def total_steps(self) -> int:
        """Steps that are trained from it."""
        return self.num_steps * self.iterations

    def of_each(self, values_T: NDArray[np.float32], dataset: TokenDataset) -> tuple[NDArray[np.float32], ...]:
        """Returns the values of each completion's tokens.

        Args:
            values_T: float32 [..., T], of all tokens of a data set of its completions.
        """
        ends = (dataset.starts + dataset.lengths).tolist()
        found = zip(ends, self.completions, strict=True)
        return tuple(values_T[..., end - len(one.tokens) : end] for end, one in found)

    def step_prompts(self, step: int) -> range:
        """Returns the range of its prompts that a step takes.

        Args:
            step: counted from the buffer's first.
        """
        size = len(self.prompts) // self.num_steps
        first = step % self.num_steps * size
        return range(first, first + size)

    def places(self, prompt: int) -> range:
        """Returns the places of a prompt's completions."""
        return range(prompt * self.group, (prompt + 1) * self.group)

    def behind(self, completion: Sampled, taken: int) -> NDArray[np.int64]:
        """Returns how many steps the weights that sampled each token are behind those that are trained; arbitrary for
        tokens that were not sampled.

        Args:
            taken: steps that were trained from the buffer.
        """
        begin = max(one.version for one in self.weights) + self.lag
        return begin + taken - completion.token_versions.astype(np.int64)

    def to_bytes(self) -> bytes:
        """Returns the buffer as the bytes of a safetensors file."""
        lengths = [len(one.tokens) for one in self.completions]
        arrays: dict[str, NDArray[Any]] = {
            "prompts": self.prompts,
            "lengths": np.array(lengths, dtype=np.int64),
            "tokens": np.concatenate([one.tokens for one in self.completions]),
            "sampled_logps": np.concatenate([one.logps for one in self.completions]),
            "truncated": np.array([one.truncated for one in self.completions], dtype=np.bool_),
            "failed": np.array([one.failed for one in self.completions], dtype=np.bool_),
            "versions": np.concatenate([one.token_versions for one in self.completions]),
            "weights": np.array([one.version for one in self.weights], dtype=np.int32),
            "digests": np.array([list(bytes.fromhex(one.digest)) for one in self.weights], dtype=np.uint8),
            **_turn_arrays(self.completions),
            **_route_arrays(self.completions),
            **metric_arrays(self.completions),
            "rewards": self.rewards_NF,
            "advantages": self.advantages,
            "uniform": self.uniform,
        }
        if self.old_logps is not None:
            arrays["old_logps"] = np.concatenate(self.old_logps)
        if self.reference_logps is not None:
            arrays["reference_logps"] = np.concatenate(self.reference_logps)
        if self.teacher_logps is not None:
            arrays["teacher_logps"] = np.concatenate(self.teacher_logps, axis=1)
        if self.routes_differ is not None:
            arrays["routes_differ"] = np.array([self.routes_differ], dtype=np.float64)
        return save({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})

    @classmethod
    def from_bytes(
        cls, data: bytes, path: Path, *, generation: int, num_steps: int, iterations: int, lag: int = 0
    ) -> Buffer:
        """Reads the bytes that `to_bytes` wrote, whose checksum has been verified.

        Args:
            path: of the file, for a message.
            generation, num_steps, iterations, lag: not stored in the bytes.

        Raises:
            UserError: the file is not a buffer.
        """
        try:
            arrays = {name: tensor.numpy() for name, tensor in load(data).items()}
            ends = np.cumsum(arrays["lengths"])[:-1]
            parts = [
                np.split(arrays[name], ends) for name in ("tokens", "sampled_logps", "old_logps") if name in arrays
            ]
            teachers, reference = arrays.get("teacher_logps"), arrays.get("reference_logps")
            turns, metrics = _TurnColumns.of(arrays, ends), metrics_of(arrays, len(parts[0]))
            routes = _routes(arrays, len(ends) + 1)
            completions = tuple(
                Sampled(
                    tokens=tokens,
                    logps=logps,
                    truncated=bool(truncated),
                    routes=routes[place],
                    metrics=metrics[place],
                    failed=bool(failed),
                    versions=versions,
                    **turns.of_completion(place),
                )
                for place, (tokens, logps, truncated, failed, versions) in enumerate(
                    zip(
                        parts[0],
                        parts[1],
                        arrays["truncated"],
                        arrays["failed"],
                        np.split(arrays["versions"], ends),
                        strict=True,
                    )
                )
            )
            buffer = cls(
                prompts=arrays["prompts"],
                completions=completions,
                rewards_NF=arrays["rewards"],
                advantages=arrays["advantages"],
                uniform=arrays["uniform"],
                old_logps=tuple(parts[2]) if len(parts) > 2 else None,
                routes_differ=float(arrays["routes_differ"][0]) if "routes_differ" in arrays else None,
                reference_logps=None if reference is None else tuple(np.split(reference, ends)),
                teacher_logps=None if teachers is None else tuple(np.split(teachers, ends, axis=1)),
                generation=generation,
                num_steps=num_steps,
                iterations=iterations,
                lag=lag,
                weights=tuple(
                    Weights(version, digest.tobytes().hex())
                    for version, digest in zip(arrays["weights"].tolist(), arrays["digests"], strict=True)
                ),
            )
        except (SafetensorError, KeyError, IndexError, ValueError, TypeError) as error:
            raise UserError(f"{path} is no buffer of rollouts ({error}): use another checkpoint.") from error
        if (fault := buffer._fault()) is not None:
            raise UserError(f"{path} is no buffer of rollouts ({fault}): use another checkpoint.")
        return buffer

    def _fault(self) -> str | None:
        """Returns why these are not the parts of one generation batch, in words; None where they are."""
        count, completions = len(self.prompts), len(self.completions)
        if not count or count % self.num_steps or completions % count or not completions:
            return f"{completions} completions of {count} prompts in {self.num_steps} steps"
        expected: dict[str, tuple[NDArray[Any], type[np.generic], tuple[int, ...]]] = {
            "prompts": (self.prompts, np.int64, (count,)),
            "rewards": (self.rewards_NF, np.float64, (completions, *self.rewards_NF.shape[1:2])),
            "advantages": (self.advantages, np.float32, (completions,)),
            "uniform": (self.uniform, np.bool_, (count,)),
        }
        for name, (array, dtype, shape) in expected.items():
            if array.dtype != dtype or array.shape != shape:
                return f"{name} is {array.dtype} {list(array.shape)}"
        if not np.isfinite(self.advantages).all():
            return "advantages are not finite"
        known = np.array([one.version for one in self.weights])
        for place, one in enumerate(self.completions):
            logps = [one.logps, *(kept[place] for kept in (self.old_logps, self.reference_logps) if kept is not None)]
            if one.tokens.dtype != np.int32 or not one.tokens.size or one.tokens.ndim != 1:
                return f"completion {place} has no tokens"
            if any(each.dtype != np.float32 or each.shape != one.tokens.shape for each in logps):
                return f"completion {place} has no log-probability for each token"
            written = np.zeros(one.tokens.shape, np.bool_) if one.written is None else one.written
            if written.dtype != np.bool_ or written.shape != one.tokens.shape or written.all():
                return f"completion {place} has no token that was sampled"
            versions = one.token_versions
            if versions.dtype != np.int32 or versions.shape != one.tokens.shape:
                return f"completion {place} has no version for each token"
            if not np.isin(versions[~written], known).all():
                return f"completion {place} has tokens of weights that are not named"
            if self.teacher_logps is not None:
                of_teachers = self.teacher_logps[place]
                if of_teachers.dtype != np.float32 or of_teachers.shape != (len(of_teachers), len(one.tokens)):
                    return f"completion {place} has no log-probability of each teacher for each token"
            if one.prompt is not None and (one.prompt.dtype != np.int32 or not one.prompt.size):
                return f"completion {place} has no prompt"
        return None


def _turn_arrays(completions: Sequence[Sampled]) -> dict[str, NDArray[Any]]:
    """Returns the arrays of completions of several turns; none where they have one."""
    if all(one.turns is None for one in completions):
        return {}
    none = np.zeros(0, dtype=np.int32)
    counts = [one.turns or Turns() for one in completions]
    written = [np.zeros(len(one.tokens), np.bool_) if one.written is None else one.written for one in completions]
    prompts = [none if one.prompt is None else one.prompt for one in completions]
    return {
        "written": np.concatenate(written),
        "turns": np.array([list(astuple(one)) for one in counts], dtype=np.int64),
        "prompt_lengths": np.array([len(one) for one in prompts], dtype=np.int64),
        "prompt_tokens": np.concatenate([none, *prompts]),
    }


def _route_arrays(completions: Sequence[Sampled]) -> dict[str, NDArray[Any]]:
    """Returns the arrays of completions whose experts are known; none of others."""
    routes = [one.routes for one in completions if one.routes is not None]
    if not routes:
        return {}
    return {"routes": np.concatenate(routes), "route_lengths": np.array([len(one) for one in routes], dtype=np.int64)}


def _routes(arrays: Mapping[str, NDArray[Any]], count: int) -> Sequence[NDArray[Any] | None]:
    """Returns what `_route_arrays` stores, for each of so many completions."""
    if "routes" not in arrays:
        return [None] * count
    return np.split(arrays["routes"], np.cumsum(arrays["route_lengths"])[:-1])


@dataclass(frozen=True, slots=True)
class _TurnColumns:
    """What `_turn_arrays` stores, for each completion; empty where completions have one turn."""

    written: Sequence[NDArray[np.bool_]]
    turns: Sequence[Sequence[int]]
    prompts: Sequence[NDArray[np.int32]]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], ends: NDArray[np.int64]) -> _TurnColumns:
        if "turns" not in arrays:
            return cls((), (), ())
        places = np.cumsum(arrays["prompt_lengths"])[:-1]
        turns: list[list[int]] = arrays["turns"].tolist()
        return cls(np.split(arrays["written"], ends), turns, np.split(arrays["prompt_tokens"], places))

    def of_completion(self, place: int) -> dict[str, Any]:
        if not self.turns:
            return {}
        prompt = self.prompts[place]
        return {
            "written": self.written[place],
            "turns": Turns(**dict(zip(_COUNTS, self.turns[place], strict=False))),
            "prompt": prompt if prompt.size else None,
        }


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """A buffer that steps are trained from.

    Args:
        buffer: of the steps.
        begin: the data cursor before the first of them.
        batch: samples of a step.
    """

    buffer: Buffer
    begin: int
    batch: int

    def taken(self, consumed: int) -> int:
        """Returns the number of steps that were trained from the buffer when the data cursor is at `consumed`."""
        return (consumed - self.begin) // self.batch

    def is_used_up(self, consumed: int) -> bool:
        """Returns whether no step is left in the buffer."""
        return self.taken(consumed) >= self.buffer.total_steps
