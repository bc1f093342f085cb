"""The weights that sampled a token: how many steps they had been trained for, and a digest of them.

A digest of the trained model is a sum over the bits of its fp32 masters, each times an odd number of its place in the
whole tensor, modulo 2^64; so ranks add up their parts, and all layouts of the same weights have the same. Any change of
one element changes it. A digest of an adapter that was written is of the bytes of its files. A generation batch keeps
the version of each token and the digest of each version; the run keeps the digests as well, and compares the two before
it trains on a token, also after it was killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.folder import ADAPTER_CONFIG
from engine.checkpoint.reshard import boxes_of
from engine.conversion.peft_read import ADAPTER_WEIGHTS
from engine.distributed.collectives import all_reduce
from engine.errors import UserError
from engine.layers.host_copies import HostCopy
from engine.training.build import Training
from engine.training.gathering import whole_shapes
from engine.training.state import once

_BYTES = 16
_CHUNK = 1 << 20
"""Elements that are multiplied at a time, at least one row."""
_FACTOR = 0x1E3779B97F4A7C15
"""Spreads places over 64 bits: 2^64 over the golden ratio, without its highest bit."""
SHOWN_DIGITS = 12
"""Digits of a digest in names and lines."""


class Weights(NamedTuple):
    """The weights that sample.

    Args:
        version: steps that they were trained for.
        digest: hexadecimal digits.
    """

    version: int
    digest: str


def trained_digest(training: Training) -> str:
    """Returns the digest of what the run trains, as it is now, the same on all ranks and in all layouts. Collective.

    It is computed on the device, in one pass over the weights.
    """
    device, shards = training.stages.step.device, training.optimizer.flat.master_shards()
    shapes = dict(sorted(whole_shapes(training, shards).items()))
    places = {name: place for place, name in enumerate(shapes)}
    sums = torch.zeros(len(places), dtype=torch.int64, device=device)
    for shard in once(training, shards):
        for box, first in boxes_of(shard.spec):
            piece = shard.tensor if box.dim is None else shard.tensor.narrow(box.dim, first, box.length)
            held = _sum(piece.detach(), box.ranges(shard.spec.global_shape), shard.spec.global_shape)
            sums[places[shard.name]] += held.to(device)
    found = HostCopy(all_reduce(sums, training.mesh.world)).read().tolist()
    text = [f"{name} {list(shape)} {value}" for (name, shape), value in zip(shapes.items(), found, strict=True)]
    return hashlib.blake2b("\n".join(text).encode(), digest_size=_BYTES).hexdigest()


def _sum(piece: Tensor, ranges: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Tensor:
    """Returns the sum of a box of a float32 tensor, int64.

    Args:
        ranges: of the box in the whole tensor, first and last of each dimension.
        shape: of the whole tensor.
    """
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    if not shape:
        piece, ranges, shape = piece[None], ((0, 1),), (1,)
    (first, _), *others = ranges
    inner = torch.zeros((), dtype=torch.int64, device=piece.device)
    for (start, stop), size in zip(others, shape[1:], strict=True):
        inner = inner[..., None] * size + torch.arange(start, stop, device=piece.device)
    rows = max(1, _CHUNK // max(1, inner.numel()))
    for offset in range(0, len(piece), rows):
        part = piece[offset : offset + rows]
        outer = torch.arange(first + offset, first + offset + len(part), device=piece.device) * prod(shape[1:])
        places = outer[:, None] + inner.flatten()
        bits = part.contiguous().view(torch.int32).view(places.shape)
        total += (bits.long() * ((places * _FACTOR) | 1)).sum()
    return total


def adapter_digest(folder: Path) -> str:
    """Returns the digest of an adapter that was written."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        data = (folder / name).read_bytes()
        found.update(len(data).to_bytes(8) + data)
    return found.hexdigest()


class Ledger:
    """The digests of the versions that a run has sampled with, and may still train on.

    Args:
        known: digests by version.
    """

    def __init__(self, known: Mapping[int, str] | None = None) -> None:
        self._known = dict(known or {})

    def keep(self, *used: Weights | None) -> None:
        """Records the weights that sampled what is trained on or is being sampled, and forgets all others."""
        self._known = {one.version: one.digest for one in used if one is not None}

    def require(self, found: Iterable[Weights], what: str) -> None:
        """Refuses tokens of weights that the run has not recorded.

        Args:
            found: the weights that are recorded as having sampled them.
            what: has the tokens, for a message.

        Raises:
            UserError: a version is unknown, or has another digest.
        """
        for weights in found:
            known = self._known.get(weights.version)
            if known != weights.digest:
                own = "has none" if known is None else f"says {known[:SHOWN_DIGITS]}"
                raise UserError(
                    f"{what} is of the weights of step {weights.version} with the digest "
                    f"{weights.digest[:SHOWN_DIGITS]}, and the run's record of that step {own}: use another checkpoint."
                )

    def state(self) -> dict[str, str]:
        """Returns the record as JSON."""
        return {str(version): digest for version, digest in sorted(self._known.items())}

    @staticmethod
    def is_state(values: object) -> bool:
        """Returns whether a value is one that `state` gives."""
        return isinstance(values, dict) and all(
            isinstance(version, str) and version.isdecimal() and isinstance(digest, str)
            for version, digest in values.items()
        )

    @classmethod
    def from_state(cls, values: Mapping[str, str]) -> Ledger:
        """Returns the record that `state` wrote."""
        return cls({int(version): digest for version, digest in values.items()})
