"""A rank's part of the model for inference: the layers are split over the pipeline ranks, which run in turn.

Every rank runs the same passes in the same order. The residual stream is sent from part to part, and the tokens that
the last one has chosen are sent back to all. There is no sequence parallelism: a pass has few tokens.

Legend: T tokens of a pass, N rows of it, V vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.collectives import Handle, all_reduce, post_async
from engine.distributed.mesh import Axis
from engine.inference.key_value_cache import KeyValues
from engine.inference.pictures import PromptCoordinates
from engine.inference.sampling import Chooser, Sampling
from engine.models.decoder import Decoder
from engine.ops.attention.cache_protocol import KeyValueCache


@dataclass(slots=True)
class Waits:
    """The seconds for which this rank has waited for other pipeline ranks."""

    seconds: float = 0.0


class InferenceStage:
    """A rank's part of the model with its cache.

    Args:
        model: the part; without sequence parallelism.
        tp, pp: this rank's axes.
        sampling: how tokens are chosen.
        slots, length: of the cache.
        device: of the model.
        synchronise: wait for the device where times are taken, so that they are accurate; costs time on a GPU.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        tp: Axis,
        pp: Axis,
        sampling: Sampling,
        slots: int,
        length: int,
        device: torch.device,
        synchronise: bool = False,
    ) -> None:
        self.model, self.tp, self.pp, self.device = model, tp, pp, device
        self.cache = KeyValues(model, slots=slots, length=length, device=device, dtype=model.dtype)
        self.waits = Waits()
        self._synchronise = synchronise and device.type == "cuda"
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._sent: tuple[Tensor, list[Handle]] | None = None
        self._chooser = None
        if model.head is not None:
            pieces = model.vocab_spec.pieces
            self._chooser = Chooser(
                sampling,
                tp=tp,
                first_id=pieces[0].global_offset if pieces else model.config.vocab_size,
                num_ids=pieces[0].length if pieces else 0,
                vocab_size=model.config.vocab_size,
                slots=slots,
                device=device,
            )

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        coordinates: PromptCoordinates,
        slots: Sequence[int],
        rows: Sequence[int],
    ) -> list[int]:
        """Prefills slots of the cache with whole prompts, and chooses the token after each.

        Args:
            prompts: token ids, at least one each.
            coordinates: their positions and pictures.
            slots: free ones, one for each.
            rows: numbers of the rows in the run.

        Returns:
            One token for each prompt; the same on all ranks.
        """
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        if self._chooser is not None:
            for slot, ids in zip(slots, tokens.split(lengths), strict=True):
                self._chooser.start_row(slot, ids)
        positions = coordinates.positions_T.to(self.device)
        batch = replace(
            _batch(tokens[None], positions[None], tuple(lengths)),
            images=coordinates.images,
            cross_images=coordinates.cross_images,
            experts=coordinates.experts,
            bidirectional=coordinates.bidirectional,
            grid_positions_3BS=coordinates.grid_positions_3BS,
        )
        batch = (batch if self.model.embedding is not None else batch.without_pixels()).to(self.device)
        lasts = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        logits = self._logits(batch, self.cache.first_pass(slots, lengths), lasts)
        return self._choose(logits, slots, rows, lengths)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], places: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> list[int]:
        """Computes one token of each row in slots 0 to len(tokens) - 1.

        Args:
            tokens: the last one of each row.
            places: theirs in the row, from 0.
            positions: theirs for rotary embeddings, where tokens of a picture may share one.
            rows: numbers of the rows in the run.

        Returns:
            The next token of each; the same on all ranks.
        """
        column = torch.tensor(tokens, device=self.device)[:, None]
        rotations = torch.tensor(positions, device=self.device)[:, None]
        batch = _batch(column, rotations, (1,) * len(tokens))
        logits = self._logits(batch, self.cache.next_pass(places), None)
        return self._choose(logits, range(len(tokens)), rows, [place + 1 for place in places])

    def move(self, source: int, target: int) -> None:
        """Moves a row to another slot."""
        self.cache.move(source, target)
        if self._chooser is not None:
            self._chooser.move_row(source, target)

    def finish(self) -> None:
        """Waits for pending sends."""
        if self._sent is not None:
            for handle in self._sent[1]:
                handle.wait()
            self._sent = None

    def now(self) -> float:
        """Returns the seconds of a monotonic clock, after the device's work where `synchronise` is set."""
        if self._synchronise:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _logits(self, batch: Batch, cache: KeyValueCache, lasts: Tensor | None) -> Tensor | None:
        """Returns [N, V / R] logits of each row's last token on the last pipeline rank; None on the others."""
        model = self.model
        if model.embedding is not None:
            x, encoded_KC = model.embed(batch), None
        else:
            x, encoded_KC = model.unpack(self._receive(model.message_rows(batch, model.part.first)), batch)
        context = replace(model.context(batch, self._step, training=False, encoded_KC=encoded_KC), cache=cache)
        x = model.run_layers(x, context)
        if model.head is None:
            self._send(model.pack(x, context))
            return None
        return model.logits(x if lasts is None else x[lasts], context)

    def _choose(
        self, logits: Tensor | None, slots: Sequence[int], rows: Sequence[int], positions: Sequence[int]
    ) -> list[int]:
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        if self._chooser is not None:
            assert logits is not None
            places = (torch.tensor(list(values), device=self.device) for values in (slots, rows, positions))
            tokens = self._chooser.choose(logits, *places)
        if self.pp.size == 1:
            return tokens.tolist()
        began = self.now()
        all_reduce(tokens, self.pp)
        chosen: list[int] = tokens.tolist()
        if self._chooser is None:
            self.waits.seconds += self.now() - began
        return chosen

    def _receive(self, num_rows: int) -> Tensor:
        x = torch.empty(num_rows, self.model.config.hidden, dtype=self.model.dtype, device=self.device)
        began = self.now()
        for handle in post_async([(False, x, self.pp.rank - 1)], self.pp):
            handle.wait()
        self.waits.seconds += self.now() - began
        return x

    def _send(self, x: Tensor) -> None:
        self.finish()  # the buffer of the previous pass
        x = x.contiguous()
        self._sent = x, post_async([(True, x, self.pp.rank + 1)], self.pp)


def _batch(tokens_BS: Tensor, positions_BS: Tensor, lengths: tuple[int, ...]) -> Batch:
    """Returns a batch of the tokens without labels, as consecutive documents of these lengths."""
    offsets = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=torch.full_like(tokens_BS, IGNORE_LABEL),
        positions_BS=positions_BS,
        token_index_BS=torch.zeros_like(tokens_BS),
        loss_weights_BS=torch.zeros(tokens_BS.shape, device=tokens_BS.device),
        document_offsets=offsets.to(tokens_BS.device),
        document_lengths=lengths,
    )
