"""A rank's parts of the model for inference: the layers are split over the pipeline ranks, which run in turn.

Every rank runs the same passes in the same order. The residual stream is sent from part to part, and the tokens that
the last one has chosen are sent back to all. They stay on the device for the next pass, which can so be launched before
the host has read them: the host knows a pass's other inputs without its tokens. A model that was built for training
runs as it is: where its layers split tokens over tensor ranks, a pass is filled up to a multiple of them, with an extra
row that is not read.

Legend: T tokens of a pass, N rows of it, V vocabulary, R tensor-parallel ranks.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.collectives import Handle, all_gather, all_reduce, local_part, post_async
from engine.distributed.mesh import Axis
from engine.inference.decode_graphs import DecodeGraphs, PassInputs, packed_inputs, pass_widths
from engine.inference.key_value_cache import KeyValues, NextPass
from engine.inference.prompt_coordinates import PromptCoordinates
from engine.inference.sampling import Chooser, Sampling
from engine.layers.graph_capture import Capture
from engine.layers.host_copies import HostCopy, sent
from engine.layers.recorded_calls import CallCapture
from engine.models.decoder import Decoder
from engine.ops.attention.cache_protocol import KeyValueCache


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the model that a rank holds, where those are several.

    Args:
        models: by the stage that they are, at least one.
        stage_rank: the pipeline rank of each stage.
    """

    models: Mapping[int, Decoder]
    stage_rank: Sequence[int]


@dataclass(slots=True)
class Waits:
    """The seconds for which this rank has waited for other pipeline ranks."""

    seconds: float = 0.0


class Chosen:
    """The tokens that a pass has chosen, which are on their way to the host.

    Args:
        found: fp64 [1 or 2, N] token ids, and their log-probabilities where these are kept, both of which it holds
            exactly; of the rows first, and then of those that fill up the pass.
        count: rows.
        waits: gets the time that reading takes; None where this rank has chosen the tokens itself.
    """

    def __init__(self, found: HostCopy, count: int, waits: Waits | None = None) -> None:
        self._copy, self._count, self._waits = found, count, waits

    def read(self) -> tuple[list[int], list[float]]:
        """Returns a token for each row, and its log-probability under logits / temperature and the whole vocabulary,
        where these are kept; waits for the pass, and for nothing that was launched after it."""
        began = time.perf_counter()
        ids, *logps = self._copy.read()[:, : self._count].tolist()
        if self._waits is not None:
            self._waits.seconds += time.perf_counter() - began
        return [int(one) for one in ids], logps[0] if logps else []


class InferenceStage:
    """A rank's parts of the model with their cache.

    Args:
        model: the part, of a rank that holds one; else its parts.
        tp, pp: this rank's axes.
        sampling: the choice of tokens.
        slots, length: of the cache.
        new: the most tokens that follow a prompt; None for any.
        group: rows that continue one prompt, one after the other, and share its cache; 1 where none do.
        conversations: whose rows may be in the cache, in slots or waiting for their next turn; 0 where none waits.
        device: of the model.
        synchronise: wait for the device where times are taken, so that they are accurate; costs time on a GPU.
        with_logps: keep the log-probability of each chosen token.
        tokens_multiple: tokens of a pass are filled up to a multiple of it. Products of other shapes may be computed in
            another order: with the number of slots, a row's numbers do not depend on the number of rows.
        capture: decode passes become graphs, where nothing of the model or its layout stands against it; None launches
            each kernel.
    """

    def __init__(
        self,
        model: Decoder | Parts,
        *,
        tp: Axis,
        pp: Axis,
        sampling: Sampling,
        slots: int,
        length: int,
        new: int | None = None,
        group: int = 1,
        conversations: int = 0,
        device: torch.device,
        synchronise: bool = False,
        with_logps: bool = False,
        tokens_multiple: int = 1,
        capture: Capture | None = None,
    ) -> None:
        parts = model if isinstance(model, Parts) else Parts({pp.rank: model}, range(pp.size))
        self._parts, self._stage_rank = dict(sorted(parts.models.items())), parts.stage_rank
        first = next(iter(self._parts.values()))
        self.config, self._splits_tokens = first.config, first.layout.splits_tokens
        self.tp, self.pp, self.device = tp, pp, device
        divides = self._splits_tokens or first.layout.routes_local_tokens
        self._multiple = math.lcm(tokens_multiple, tp.size if divides else 1)
        if first.reruns_rows is not None:
            group = 1
        attentions = [attention for part in self._parts.values() for attention in part.cached_attentions()]
        self.cache = KeyValues(
            attentions,
            first.layout.kernels,
            slots=slots,
            length=length,
            new=new,
            group=group,
            conversations=conversations,
            device=device,
            dtype=first.dtype,
        )
        if self.cache.gathered is None:
            self.cache.gathered = first.reruns_rows
        self.slots, self.group = slots, group
        self.carries_states = any(variant.carries_states for variant in self.config.variants)
        """Whether layers, of this rank or another, have states, which cannot be taken back to an earlier token."""
        self.adapters = True
        """Whether passes compute the adapters; the same for all of an answer."""
        self._waiting: tuple[Tensor, Tensor | None] | None = None
        """The ids of the prompt that waits for more rows, and its logits where they are."""
        self.waits = Waits()
        self._synchronise = synchronise and device.type == "cuda"
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._sent: tuple[Tensor, list[Handle]] | None = None
        self._chooser, self._with_logps = None, with_logps
        records = isinstance(capture, CallCapture)
        widths = pass_widths(slots, self._multiple, halfway=records)
        self._last = torch.zeros(widths[-1], dtype=torch.int64, device=device)
        """The newest token of the row in each slot."""
        last = self._parts[max(self._parts)]
        if last.head is not None:
            self._chooser = chooser_of(last, sampling, slots=slots, device=device)
            self._loss_kernels = last.layout.kernels.loss
        self.graph_obstacle = self._obstacle(first)
        """Why decode passes cannot be graphs, in words; None where they can."""
        obstacle = None if capture is None else self.graph_obstacle
        if records and obstacle is None and tp.size > 1:
            obstacle = "tensor ranks send each other numbers in each of them"
        kind = "recorded" if records else "CUDA graphs"
        no_graphs = None if obstacle is None else f"decode passes are not {kind}: {obstacle}"
        self.notes = tuple(note for note in (self.cache.gathered, no_graphs) if note is not None)
        """What the passes do without and why, in a sentence each."""
        self._graphs: DecodeGraphs | None = None
        if capture is not None and no_graphs is None:
            self._graphs = DecodeGraphs(self.cache, capture, widths=widths, last_W=self._last)

    def _obstacle(self, first: Decoder) -> str | None:
        """Returns why passes cannot be graphs, in words; None where they can."""
        config, reason = self.config, None if self.cache.gathered is None else "they do not read pages where they are"
        if self.pp.size > 1 or len(self._parts) > 1:
            reason = "pipeline ranks send each other every token"
        elif not all(part.has_resident_weights for part in self._parts.values()):
            reason = "weights come from other ranks or from host memory in each of them"
        elif first.layout.expert_axes.ep.size > 1:
            reason = "experts of other ranks are told on the host how many tokens they get"
        for variant in config.variants:
            reason = reason or variant.decoding_obstacle(config.family, self.device)
        return reason

    @torch.no_grad()  # not inference mode, whose tensors training could not take where both share a buffer
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        coordinates: PromptCoordinates,
        first_slot: int,
        rows: Sequence[Sequence[int]],
        *,
        waits: bool = False,
    ) -> Chosen:
        """Runs whole prompts, and chooses the first token of the rows that continue them.

        Args:
            prompts: token ids, at least one each.
            coordinates: their positions and images.
            first_slot: of the rows, which are in one after the other; `cache.begin` gave them their pages.
            rows: numbers in the run of the rows that continue each prompt, at least one each.
            waits: the last prompt waits for `start`.

        Returns:
            A token for each row, those of the first prompt first; the same on all ranks.
        """
        lengths = [len(prompt) for prompt in prompts]
        (tokens,) = self._to_device([token for prompt in prompts for token in prompt])
        ids = tokens.split(lengths)
        positions = sent(coordinates.positions_T, self.device)
        kept_lengths = lengths
        if fill := -sum(lengths) % self._multiple:
            tokens, positions = (torch.cat((one, one.new_zeros(fill))) for one in (tokens, positions))
            kept_lengths = [*lengths, fill]
        batch = _batch(tokens[None], positions[None], tuple(kept_lengths)).with_parts(*coordinates.parts)
        batch = (batch if 0 in self._parts else batch.without_input()).map(lambda one: sent(one, self.device))
        prompt_of = [number for number, own in enumerate(rows) for _ in own]
        slots = range(first_slot, first_slot + len(prompt_of))
        (lasts,) = self._to_device([end - 1 for end in accumulate(lengths)])
        prompt_of_N, *places = self._to_device(
            prompt_of, slots, [row for own in rows for row in own], [lengths[prompt] for prompt in prompt_of]
        )
        firsts = [slots[prompt_of.index(number)] for number in range(len(prompts))]
        logits = self._logits(batch, self.cache.first_pass(firsts, lengths, fill=fill), lasts)
        if waits:
            self._waiting = ids[-1], None if logits is None else logits[-1:].clone()
        if self._chooser is not None:
            for slot, prompt in zip(slots, prompt_of, strict=True):
                self._chooser.start_row(slot, ids[prompt])
        if logits is not None and len(prompt_of) > len(prompts):
            logits = logits.index_select(0, prompt_of_N)
        return self._choose(logits, *places)

    @torch.no_grad()
    def continue_row(self, slot: int, ids: Sequence[int], kept: int, positions: Sequence[int], row: int) -> Chosen:
        """Runs the tokens of a prompt that follow those which the row in a slot has in the cache, and chooses the next
        one.

        Args:
            ids: all tokens of the prompt.
            kept: the number of its first tokens that are in the cache; `cache.can_continue` allows it.
            positions: of the others, for rotary embeddings.
            row: its number in the run.

        Returns:
            A token; the same on all ranks.
        """
        count = len(ids) - kept
        fill = -count % self._multiple
        padding = [0] * fill
        tokens, at = self._to_device([*ids[kept:], *padding], [*positions, *padding])
        lengths = (count, fill) if fill else (count,)
        batch = _batch(tokens[None], at[None], lengths)
        batch = batch if 0 in self._parts else batch.without_input()
        lasts, slots, rows, places = self._to_device([count - 1], [slot], [row], [len(ids)])
        if self._chooser is not None:
            self._chooser.start_row(slot, self._to_device(ids)[0])
        cache = self.cache.continue_row(slot, kept, count, fill=fill)
        return self._choose(self._logits(batch, cache, lasts), slots, rows, places)

    @torch.no_grad()
    def start(self, first_slot: int, rows: Sequence[int]) -> Chosen:
        """Chooses the first token of further rows that continue the prompt that waits, without running it again.

        Args:
            first_slot: of the rows, which are in one after the other; `cache.begin_more` gave them their pages.
            rows: their numbers in the run.

        Returns:
            A token for each row; the same on all ranks.
        """
        assert self._waiting is not None
        ids, logits = self._waiting
        slots = range(first_slot, first_slot + len(rows))
        if self._chooser is not None:
            for slot in slots:
                self._chooser.start_row(slot, ids)
        if logits is not None:
            logits = logits.repeat(len(slots), 1)  # recording log-probabilities uses them up
        return self._choose(logits, *self._to_device(slots, rows, [len(ids)] * len(slots)))

    def end_waiting(self) -> None:
        """Lets go of the prompt that waits."""
        self._waiting = None
        self.cache.end_waiting()

    @torch.no_grad()
    def decode(self, places: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> Chosen:
        """Computes one token of each row in slots 0 to len(places) - 1, from the one that was chosen last.

        Args:
            places: of the row's newest token, from 0.
            positions: its position for rotary embeddings, where tokens of an image may share one.
            rows: numbers of the rows in the run.

        Returns:
            The next token of each; the same on all ranks.
        """
        count = len(places)
        width = count + -count % self._multiple if self._graphs is None else self._graphs.width(count)
        written = self.cache.write(places, fill=width - count)
        packed = packed_inputs(positions, rows, [place + 1 for place in places], written)
        if self._graphs is not None:
            return Chosen(self._graphs.launch(packed, self._prepared_pass, adapters=self.adapters), count)
        inputs = PassInputs.of(sent(torch.from_numpy(packed), self.device))
        cache = self.cache.next_pass(written, inputs.written, count)
        tokens = self._last[:width].clone()  # the pass overwrites them
        batch = _batch(tokens[:, None], inputs.rotations_N[:, None], (1,) * width)
        slots = torch.arange(count, device=self.device)
        return self._choose(self._logits(batch, cache, None), slots, inputs.rows_N[:count], inputs.places_N[:count])

    def _prepared_pass(self, inputs: PassInputs, last_N: Tensor) -> Callable[[NextPass], Tensor]:
        """See `engine.inference.decode_graphs.Prepare`."""
        width = len(last_N)
        batch = _batch(last_N[:, None], inputs.rotations_N[:, None], (1,) * width)
        slots = torch.arange(min(width, self.slots), device=self.device)
        stage = weakref.proxy(self)  # in a cycle of references the cache would outlive its last use

        def run(cache: NextPass) -> Tensor:
            logits = stage._logits(batch, cache, None)
            found: Tensor = stage._tokens(logits, slots, inputs.rows_N[: len(slots)], inputs.places_N[: len(slots)])
            return found

        return run

    @torch.no_grad()
    def idle(self) -> None:
        """Runs a pass that computes nothing of use. Where weights are gathered from ranks that have other rows, all of
        them run as many passes."""
        fill = [0] * self._multiple
        column = self._to_device(fill)[0, :, None]
        written = self.cache.write([], fill=len(fill))
        cache = self.cache.next_pass(written, sent(torch.from_numpy(written), self.device), 0)
        self._logits(_batch(column, column.clone(), (1,) * len(column)), cache, None)
        self.finish()

    def free(self, slot: int) -> None:
        """Ends a row."""
        self.cache.free(slot)

    def move(self, source: int, target: int) -> None:
        """Moves a row to another slot, which is free."""
        self.cache.move(source, target)
        self._last[target : target + 1].copy_(self._last[source : source + 1])
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
        """Returns [N, V / R] logits of the rows' last tokens (of all tokens where there is one each) on the last
        pipeline rank; None on the others."""
        message: Tensor | None = None
        for number, model in self._parts.items():
            if model.embedding is not None:
                x, carried = model.embed(batch, adapters=self.adapters), []
            else:
                if message is None:
                    message = self._receive(model, batch, self._stage_rank[number - 1])
                x, carried = model.unpack(message, batch)
            context = model.context(batch, self._step, training=False, adapters=self.adapters, carried=carried)
            context = replace(context, cache=cache)
            x = model.run_layers(x, context)
            if model.head is not None:
                return model.logits(x if lasts is None else self._rows(x, lasts), context)[
                    : None if lasts is None else len(lasts)
                ]
            message = model.pack(x, context)
            if (target := self._stage_rank[number + 1]) != self.pp.rank:
                self._send(message, target)
                message = None
        return None

    def _rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Returns rows of the residual stream, split over tensor ranks where the stream is."""
        if not self._splits_tokens:
            return x[index]
        fill = -len(index) % self.tp.size
        chosen = all_gather(x, self.tp)[torch.cat((index, index.new_zeros(fill)))]
        return local_part(chosen, self.tp).contiguous()

    def _to_device(self, *lists: Sequence[int]) -> Tensor:
        """Returns int64 [lists, N]."""
        return sent(torch.tensor([list(one) for one in lists], dtype=torch.int64), self.device)

    def _choose(self, logits: Tensor | None, slots: Tensor, rows: Tensor, places: Tensor) -> Chosen:
        """Chooses the next tokens of some rows; arguments as for `_tokens`."""
        began = self.now()
        found = HostCopy(self._tokens(logits, slots, rows, places))
        if self._chooser is not None:
            return Chosen(found, len(slots))
        self.waits.seconds += self.now() - began
        return Chosen(found, len(slots), self.waits)

    def _tokens(self, logits: Tensor | None, slots: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Chooses the next tokens of some rows, on the device alone.

        Args:
            logits: [N or more, V / R]; None on ranks that have none.
            slots, rows, places: int64 [N], slots of the rows, their numbers in the run, and the tokens' places in them.

        Returns:
            What `Chosen` takes.
        """
        found = torch.zeros(1 + self._with_logps, len(slots), dtype=torch.float64, device=self.device)
        if self._chooser is not None:
            assert logits is not None
            logits = logits[: len(slots)]
            tokens = self._chooser.choose(logits, slots, rows, places)
            found[0] = tokens
            if self._with_logps:
                found[1] = self._chooser.logps(logits, tokens, self._loss_kernels)
        found = all_reduce(found, self.pp)  # one message, from the last pipeline rank to all, and to the host
        self._last.index_copy_(0, slots, found[0].long())
        return found

    def _receive(self, model: Decoder, batch: Batch, source: int) -> Tensor:
        num_rows = model.message_rows(batch, model.part.first)
        x = torch.empty(num_rows, model.config.hidden, dtype=model.dtype, device=self.device)
        began = self.now()
        for handle in post_async([(False, x, source)], self.pp):
            handle.wait()
        self.waits.seconds += self.now() - began
        return x

    def _send(self, x: Tensor, target: int) -> None:
        self.finish()  # the buffer of the previous pass
        x = x.contiguous()
        self._sent = x, post_async([(True, x, target)], self.pp)


def chooser_of(model: Decoder, sampling: Sampling, *, slots: int, device: torch.device) -> Chooser:
    """Returns the choice of tokens by a part of the model that has the head; arguments as for `Chooser`."""
    pieces, size = model.vocab_spec.pieces, model.config.vocab_size
    return Chooser(
        sampling,
        tp=model.layout.tp,
        first_id=pieces[0].global_offset if pieces else size,
        num_ids=pieces[0].length if pieces else 0,
        vocab_size=size,
        slots=slots,
        device=device,
        gumbel_argmax=model.layout.kernels.gumbel_argmax,
    )


def _batch(tokens_BS: Tensor, positions_BS: Tensor, lengths: tuple[int, ...]) -> Batch:
    """Returns a batch of the tokens without labels, as consecutive documents of these lengths."""
    offsets = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=torch.full_like(tokens_BS, IGNORE_LABEL),
        positions_BS=positions_BS,
        token_index_BS=torch.zeros_like(tokens_BS),
        loss_weights_BS=torch.zeros(tokens_BS.shape, device=tokens_BS.device),
        document_offsets=sent(offsets, tokens_BS.device),
        document_lengths=lengths,
    )
