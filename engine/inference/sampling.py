"""Samples the next token of each row, from logits whose vocabulary is split over the tensor-parallel ranks.

    z = logits, with a repetition penalty;   s = z / temperature;   s_i = -inf below the row's bound
    token = argmax_i (s_i + g_i),   g_i = -log(-log u_i)

which draws from softmax(s) (the Gumbel-max trick), so greedy choice and sampling are one argmax: each rank finds the
best of its own part, and two numbers per row and rank decide. u is Philox of (seed, row, position, token), and so the
same on every layout and in every batch: layouts differ only in the rounding of logits, which moves choices no
more than it moves the distribution. Top-k, top-p and min-p are all a lower bound on s, found from the best k of each
rank, from all of s for top-p alone, or from the maximum. Their order is penalty, temperature, top-k, top-p, min-p.

Legend: N rows, V vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce
from engine.distributed.mesh import Axis
from engine.inference.options import Sampling
from engine.kernels.linear_cross_entropy import LossKernels, combine_statistics
from engine.kernels.philox import philox4x32
from engine.ops.cross_entropy import over_axis
from engine.ops.kernels import GumbelArgmax

_MASK = 0xFFFFFFFF
_SITE = 0x67656E21
"""Second word of the key, unlikely to be a dropout site or the checksum of a tensor's name."""


class Chooser:
    """Chooses tokens on the ranks that have logits.

    Args:
        settings: the sampling settings.
        tp: ranks over which the vocabulary is split.
        first_id, num_ids: the token ids whose logits are here.
        vocab_size: of all ranks.
        slots: rows at a time.
        device: of logits.
        gumbel_argmax: the backend's; None for torch's operations.
    """

    def __init__(
        self,
        settings: Sampling,
        *,
        tp: Axis,
        first_id: int,
        num_ids: int,
        vocab_size: int,
        slots: int,
        device: torch.device,
        gumbel_argmax: GumbelArgmax | None = None,
    ) -> None:
        self._gumbel_argmax = gumbel_argmax
        self._settings, self._tp, self._vocab_size = settings, tp, vocab_size
        self._first_id, self._num_ids = first_id, num_ids
        self._seen: Tensor | None = None
        if settings.repetition_penalty != 1.0:
            # the last column is that of all ids elsewhere, so that noting them takes no mask, for which the host waits
            self._seen = torch.zeros(slots, num_ids + 1, dtype=torch.bool, device=device)

    def start_row(self, slot: int, ids: Tensor) -> None:
        """Starts a row with int64 `ids` in this slot."""
        if self._seen is not None:
            self._seen[slot] = False
            self._note(torch.full_like(ids, slot), ids)

    def move_row(self, source: int, target: int) -> None:
        """Moves a row to another slot."""
        if self._seen is not None:
            self._seen[target].copy_(self._seen[source])

    def choose(self, logits_NV: Tensor, slots: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the next token of each row; collective over the tensor-parallel ranks, the same on all.

        Args:
            logits_NV: [N, V / R] with padding columns; any float dtype.
            slots, rows, positions: int64 [N]: where the row is, its number in the run, and the position of the token
                that is chosen.

        Returns:
            int64 [N].
        """
        scores = self.scores(logits_NV, slots)
        if self._settings.greedy:
            tokens = self._argmax(scores)
        elif self._gumbel_argmax is not None and self._num_ids:
            key = (self._settings.seed & _MASK, _SITE)
            drawn = self._gumbel_argmax(self._bounded(scores), rows, positions, first_id=self._first_id, key=key)
            tokens = self._best_of_ranks(*drawn)
        else:
            tokens = self._argmax(self._bounded(scores).double() + self._noise(rows, positions))
        if self._seen is not None:
            self._note(slots, tokens)
        return tokens

    def scores(self, logits_NV: Tensor, slots: Tensor) -> Tensor:
        """Returns fp32 [N, ids here]: logits with the penalty, over the temperature."""
        scores = logits_NV[:, : self._num_ids].float()
        if self._seen is not None:
            penalty = self._settings.repetition_penalty
            repeated = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(self._seen[slots, : self._num_ids], repeated, scores)
        return self._over_temperature(scores)

    def logps(self, logits_NV: Tensor, ids: Tensor, kernels: LossKernels) -> Tensor:
        """Returns the log-probability of each row's token under softmax(logits / temperature) over the whole
        vocabulary, whatever bound it was drawn with; collective over the tensor-parallel ranks, the same on all.

        The arithmetic is that of training's loss, with training's kernels, which use up the logits.

        Args:
            logits_NV: as for `choose`.
            ids: int64 [N] tokens.
            kernels: the backend's.

        Returns:
            fp32 [N].
        """
        held = self._over_temperature(logits_NV[:, : self._num_ids])
        targets = ids - self._first_id
        targets = torch.where((targets >= 0) & (targets < self._num_ids), targets, -1)
        local = kernels.shard_statistics(held, targets)
        return -combine_statistics(local, **over_axis(self._tp)).losses()

    def _over_temperature(self, scores: Tensor) -> Tensor:
        settings = self._settings
        return scores if settings.greedy or settings.temperature == 1 else scores / settings.temperature

    def _note(self, slots: Tensor, ids: Tensor) -> None:
        assert self._seen is not None
        local = ids - self._first_id
        here = (local >= 0) & (local < self._num_ids)
        # a number of the host would be copied to the device first, for which the host waits
        self._seen.index_put_((slots, torch.where(here, local, self._num_ids)), here.new_ones(()))

    def _bounded(self, scores: Tensor) -> Tensor:
        """Returns the scores with -inf below the row's bound."""
        settings = self._settings
        if settings.top_k is None and settings.top_p == 1 and settings.min_p == 0:
            return scores
        bound = scores.new_full((scores.shape[0], 1), -torch.inf)
        if settings.top_k is not None:
            candidates = self._gathered(scores, settings.top_k)
            bound = candidates.topk(min(settings.top_k, self._vocab_size), dim=1).values[:, -1:]
        elif settings.top_p < 1:
            candidates = self._gathered(scores, None)
        else:
            candidates = self._maximum(scores)
        if settings.top_p < 1:
            bound = _nucleus(candidates.masked_fill(candidates < bound, -torch.inf), settings.top_p)
        if settings.min_p > 0:
            bound = torch.maximum(bound, candidates.amax(1, keepdim=True) + math.log(settings.min_p))
        return scores.masked_fill(scores < bound, -torch.inf)

    def _gathered(self, scores: Tensor, count: int | None) -> Tensor:
        """Returns [N, C] scores of all ranks, or of each rank the best `count`; -inf where a rank has fewer."""
        width = -(-self._vocab_size // self._tp.size)
        if count is not None and count < width:
            width = count
            scores = scores.topk(min(width, self._num_ids), dim=1).values
        full = scores.new_full((scores.shape[0], width), -torch.inf)
        full[:, : scores.shape[1]] = scores
        return all_gather(full.t().contiguous(), self._tp).t()

    def _maximum(self, scores: Tensor) -> Tensor:
        """Returns each row's maximum over all ranks, [N, 1]."""
        best = scores.new_full((scores.shape[0], 1), -torch.inf)
        if self._num_ids:
            best = scores.amax(1, keepdim=True)
        return all_reduce(best, self._tp, dist.ReduceOp.MAX)

    def _noise(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns fp64 [N, ids here] standard Gumbel numbers, functions of (seed, row, position, token id)."""
        first, last = self._first_id // 4, (self._first_id + max(self._num_ids, 1) - 1) // 4
        blocks = torch.arange(first, last + 1, device=rows.device, dtype=torch.int64)[None]
        row, position = rows[:, None], positions[:, None]
        words = philox4x32(
            (blocks, row & _MASK, (row >> 32) & _MASK, position & _MASK), (self._settings.seed & _MASK, _SITE)
        )
        skip = self._first_id - 4 * first
        draws = torch.stack(words, dim=-1).flatten(1)[:, skip : skip + self._num_ids]
        uniform = (draws.double() + 0.5) * 2.0**-32
        return -torch.log(-torch.log(uniform))

    def _argmax(self, scores: Tensor) -> Tensor:
        """Returns int64 [N] token id of the largest score over all ranks; of equal ones the first."""
        if not self._num_ids:
            none = scores.new_full((scores.shape[0],), -torch.inf)
            return self._best_of_ranks(none, torch.zeros_like(none))
        places = scores.argmax(1)
        return self._best_of_ranks(scores.gather(1, places[:, None])[:, 0], places)

    def _best_of_ranks(self, scores_N: Tensor, places_N: Tensor) -> Tensor:
        """Returns int64 [N] token id of the largest score over all ranks, for each rank's largest and its place."""
        ids = places_N + self._first_id
        if self._tp.size == 1:
            return ids
        best = torch.stack((scores_N.double(), ids.double()), dim=1)
        ranks_RN2 = all_gather(best, self._tp).view(self._tp.size, -1, 2)
        winner = ranks_RN2[..., 0].argmax(0, keepdim=True)
        return ranks_RN2[..., 1].gather(0, winner)[0].long()


def _nucleus(candidates_NC: Tensor, top_p: float) -> Tensor:
    """Returns [N, 1] the lowest score among the most likely ones whose probabilities together reach `top_p`."""
    ordered = candidates_NC.sort(dim=1, descending=True).values
    probabilities = ordered.double().softmax(1)
    before = probabilities.cumsum(1) - probabilities
    kept = before < top_p
    kept[:, 0] = True
    return ordered.masked_fill(~kept, torch.inf).amin(1, keepdim=True)
