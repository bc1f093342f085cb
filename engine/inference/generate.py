"""The generation loop, with continuous batching: all active rows take one token per pass.

A row that ends gives its slot to the next prompt at once, and the last row moves into a slot that stays free, so
that a pass never computes a row that has ended. Prompts that begin together are run as one pass without padding; a
prompt that several rows continue is run once, and its pages and logits are kept while there are slots for only some
of the rows. Every rank runs this loop with the same prompts and sees the same tokens, so nothing about rows is ever
sent. Rows of conversations leave their slots between turns and stay in the cache (`engine.inference.waiting_rows`).

On a GPU the next pass is launched before the tokens of the last one are read, so that the device never waits for the
host to decide. A row that ends by its length has no further pass. One that a stop token or text ends is found one pass
late: it takes part in one more, whose token is discarded.
"""

from __future__ import annotations

import collections.abc as abc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.distributed.operations import LOG
from engine.errors import UserError
from engine.inference.kept_row import KeptRow
from engine.inference.model_part import Chosen, InferenceStage
from engine.inference.options import Limits
from engine.inference.prompt_coordinates import PromptCoordinates, text_coordinates
from engine.inference.rows import Answer, Request, Row
from engine.inference.text import TextStream, TokenDecoder, push_all
from engine.inference.waiting_rows import WaitingRows
from engine.layers.host_copies import HostCopy, sent
from engine.models.decoder_config import DecoderConfig
from engine.seams import resolve

_DONE, _WAITS, _BUSY = range(3)
"""The state of a rank: nothing is left to do, it waits for further prompts, or it has some or rows."""


class Further(Protocol):
    """Prompts that are not there when generation begins, since they depend on earlier answers. Every rank that holds a
    part of the model sees the same ones, in the same pass."""

    @property
    def pending(self) -> bool:
        """Whether there may be more."""
        ...

    def answered(self, answer: Answer) -> None:
        """Takes an answer, which may lead to another prompt."""
        ...

    def arrived(self, *, wait: bool) -> list[Request]:
        """Returns the prompts that have come since it was last asked.

        Args:
            wait: for a while, as there is nothing else to do.
        """
        ...

    def ended(self) -> list[int]:
        """Returns the numbers of the rows of which it is now known that no prompt follows; asked after `arrived`."""
        ...


@dataclass(slots=True)
class Speed:
    """Times and tokens of this rank's passes.

    Args:
        prefill_tokens, prefill_seconds: of prompts.
        decode_tokens, decode_passes, decode_seconds, decode_waited: of passes of one token per row; the last is the
            time for which this rank waited in them for other pipeline ranks.
        cache_bytes: read from the cache in these passes.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_passes: int = 0
    decode_seconds: float = 0.0
    decode_waited: float = 0.0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that was launched, with the rows that take its tokens."""

    rows: list[Row]
    chosen: Chosen
    decodes: bool = False


def context_limit(config: DecoderConfig) -> int:
    """Returns the maximum tokens of a row."""
    return min(config.max_length, config.max_row_length or config.max_length)


def check_requests(requests: Sequence[Request], config: DecoderConfig, max_new_tokens: int) -> None:
    """Refuses prompts that the model cannot continue.

    Raises:
        UserError: one is empty, has a token that the model does not know or no image where its layers attend to one,
            or does not fit the context.
    """
    limit = context_limit(config)
    for request in requests:
        number, length = request.row + 1, len(request.ids)
        if not length:
            raise UserError(f"prompt {number} has no tokens, and a model continues at least one: write a text.")
        if config.needs_images and not request.images:
            raise UserError(
                f"prompt {number} has no image, but every layer of this {config.family} model attends to one: ask "
                "about one with rankfold generate --image."
            )
        if (largest := max(request.ids)) >= config.vocab_size:
            raise UserError(
                f"prompt {number} has token {largest}, but the model has {config.vocab_size} tokens, counted from 0: "
                "give the tokenizer of this model with --tokenizer."
            )
        if length + max_new_tokens > limit:
            room = limit - length
            change = f"set --max-new-tokens to {room} or less" if room > 0 else "shorten the prompt"
            raise UserError(
                f"prompt {number} has {length} tokens and --max-new-tokens is {max_new_tokens}, but the model's "
                f"context is {limit}: {change}."
            )


class Generator:
    """Continues prompts on the ranks that hold the model.

    Args:
        stage: this rank's part.
        limits: when rows end; may be set to others between runs, with as many slots.
        tokenizer: of the model.
            None makes no text.
        family: of a model with a vision tower, which reads images; None where no prompt has any.
        speed: figures to add to; None for new ones.
        in_step_with: ranks with other prompts that must run as many passes as this one, because they gather weights
            from each other in each, or send each other tokens; None where there are none.
        ahead: passes that may be launched before the tokens of one are read; None for 1 on a GPU, and 0 on a CPU, where
            no pass runs beside the host.
        keeps_row: with one slot, the row stays in the cache, and a prompt that begins with the same tokens computes the
            others alone.
    """

    def __init__(
        self,
        stage: InferenceStage,
        limits: Limits,
        tokenizer: TokenDecoder | None,
        *,
        family: Any = None,
        speed: Speed | None = None,
        in_step_with: Axis | None = None,
        ahead: int | None = None,
        keeps_row: bool = False,
    ) -> None:
        assert tokenizer is not None or not limits.stop_texts, "stop texts are found in a text"
        assert limits.slots <= stage.slots, (limits.slots, stage.slots)
        self.stage, self.limits, self._tokenizer, self._family = stage, limits, tokenizer, family
        row_limit = stage.config.max_row_length
        # the prompts of one pass are in one row of tokens
        self._prefill_tokens = min(limits.prefill_tokens, row_limit or limits.prefill_tokens)
        self.speed = Speed() if speed is None else speed
        self._others = in_step_with
        self._ahead = int(stage.device.type == "cuda") if ahead is None else ahead
        self._asked: HostCopy | None = None
        """Whether any of them had rows left when this was last asked."""
        self._shared: Request | None = None
        """The prompt that waits for more rows to continue it, which are the next."""
        assert not keeps_row or limits.slots == stage.group == 1, "one row is kept"
        self._keeps_row = keeps_row
        self._last_row: Row | None = None
        """The row that is kept."""
        self._conversations: WaitingRows | None = None
        """The conversations under way, where their rows wait in the cache."""
        self.recomputes_turns = False
        """Whether further turns computed all of their tokens anew because of what layers keep of a row."""

    def run(
        self,
        requests: Sequence[Request],
        *,
        on_text: Callable[[Request, str], None] | None = None,
        on_answer: Callable[[Answer], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        further: Further | None = None,
    ) -> list[Answer]:
        """Continues all prompts. Collective: every rank calls it with the same ones.

        Args:
            requests: that pass `check_requests`, and fit the cache.
            on_text: called with text as it comes.
            on_answer: called when a row has ended.
            interrupted: asked before each pass, on every rank with the same result: whether all rows end as they are.
            further: prompts that come while others are continued; takes all answers. A prompt with the number of an
                earlier one is the next turn of its conversation.

        Returns:
            The answers in the order of `requests`; without those of prompts that had not begun when it was interrupted.

        Raises:
            UserError: an image that cannot be read; on all ranks.
        """
        passes = self.passes(requests, on_text=on_text, on_answer=on_answer, interrupted=interrupted, further=further)
        while True:
            try:
                next(passes)
            except StopIteration as end:
                answers: list[Answer] = end.value
                return answers

    def passes(
        self,
        requests: Sequence[Request],
        *,
        on_text: Callable[[Request, str], None] | None = None,
        on_answer: Callable[[Answer], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        further: Further | None = None,
    ) -> abc.Generator[None, None, list[Answer]]:
        """Does as `run`, and yields after each pass, of which every rank takes as many; see there."""
        waiting, rows, answers = deque(requests), list[Row](), dict[int, Answer]()
        unread = deque[_Pass]()
        self._asked, ahead = None, self._ahead
        if further is not None and self.stage.cache.conversations:
            # a row's window has lost no token that the next turn needs after one further pass, but after two it may
            together = self._prefill_tokens if requests else 1
            self._conversations, ahead = WaitingRows(self.stage, together), min(ahead, 1)

        def launched(new: _Pass) -> None:
            """Frees the slots of rows that have all their tokens, and reads passes that were launched before."""
            for row in new.rows:
                row.launched += 1
            self._close_gaps(rows)
            unread.append(new)
            while len(unread) > ahead:
                read()

        def end(ended: Sequence[Row]) -> None:
            for row in ended:
                answer = answers[row.request.row] = row.answer()
                if on_answer is not None:
                    on_answer(answer)
                if further is not None:
                    further.answered(answer)
            self._close_gaps(rows)

        def read() -> None:
            end(self._read(unread.popleft(), on_text))

        def start_more() -> None:
            """Starts further rows of a prompt without a pass, so that ranks in step run as many as before."""
            while more := self._next_of_shared(waiting, len(rows)):
                chosen = self.stage.start(len(rows), [one.drawn for one in more])
                new = [self._row(request, len(request.ids)) for request in more]
                rows.extend(new)
                if not self._continues_shared(waiting):
                    self._shared = None
                    self.stage.end_waiting()
                launched(_Pass(new, chosen))

        while True:
            while further is not None and unread and not self._can_run(waiting, rows):
                read()  # the answers may lead to other prompts
            waits = further is not None and further.pending
            state = self._state(_BUSY if self._can_run(waiting, rows) else _WAITS if waits else _DONE)
            if state == _DONE:
                break
            if further is not None and waits:
                waiting.extend(self._arrived(further, wait=state == _WAITS))
            if state == _WAITS:
                continue
            if interrupted is not None and interrupted():
                while unread:
                    read()
                end([self._interrupted(row, on_text) for row in rows])
                break
            start_more()  # places that conversations left
            if not self._can_run(waiting, rows):
                self.stage.idle()
                continue
            if (continued := self._continued(waiting, rows)) is not None:
                launched(continued)
            else:
                starting = self._next_prompts(waiting, len(rows))
                shares = self._shared is not None
                launched(self._prefill(starting, rows, waits=shares) if starting else self._decode(rows))
            start_more()
            yield
        while unread:
            read()
        self.stage.finish()
        if self._conversations is not None:
            self.recomputes_turns, self._conversations = self._conversations.recomputed, None
        return [answers[request.row] for request in requests if request.row in answers]

    def _can_run(self, waiting: deque[Request], rows: list[Row]) -> bool:
        """Returns whether there is a pass to run for this rank's rows."""
        if rows or self._conversations is None:
            return bool(waiting or rows)
        return self._conversations.is_ready or (bool(waiting) and self._conversations.room > 0)

    def _arrived(self, further: Further, *, wait: bool) -> list[Request]:
        """Returns the first prompts of conversations that have come."""
        requests = further.arrived(wait=wait)
        ended = further.ended()
        if self._conversations is None:
            return requests
        self._conversations.end(ended)
        return self._conversations.sorted(requests)

    def _read(self, one: _Pass, on_text: Callable[[Request, str], None] | None) -> list[Row]:
        """Takes the tokens of a pass; returns the rows that they end."""
        began, waited = self.stage.now(), self.stage.waits.seconds
        tokens, logps = one.chosen.read()
        LOG.progressed()
        running = [number for number, row in enumerate(one.rows) if row.ending is None]
        if one.decodes:
            self.speed.decode_seconds += self.stage.now() - began
            self.speed.decode_waited += self.stage.waits.seconds - waited
            self.speed.decode_tokens += len(running)
        else:
            self.speed.prefill_seconds += self.stage.now() - began
        pushed = [
            (number, (stream, tokens[number]))
            for number in running
            if (stream := one.rows[number].stream) is not None and tokens[number] not in self.limits.stop_ids
        ]
        texts = dict(zip([number for number, _ in pushed], push_all([push for _, push in pushed]), strict=True))
        for number in running:
            one.rows[number].logps += logps[number : number + 1]
            self._take(one.rows[number], tokens[number], texts.get(number, ""), on_text)
        return [one.rows[number] for number in running if one.rows[number].ending is not None]

    def _state(self, own: int) -> int:
        """Returns the state of the busiest rank, which decides whether there is another pass for its rows. Where passes
        run ahead, others are asked a pass ahead too, and all ranks run one more at the end."""
        if self._others is None or self._others.size == 1:
            return own
        any_busy = sent(torch.tensor(own), self.stage.device)
        before, self._asked = self._asked, HostCopy(all_reduce(any_busy, self._others, dist.ReduceOp.MAX))
        return int((before if before is not None and self._ahead else self._asked).read())

    def _next_prompts(self, waiting: deque[Request], running: int) -> list[list[Request]]:
        """Takes the next prompts to run, as many as there are slots, tokens and pages for, and gives them their pages;
        each with the rows that continue it."""
        if self._shared is not None:  # it has the next slots
            return []
        starting, total, most = list[list[Request]](), 0, self._prefill_tokens
        if self._conversations is not None:
            most = self._conversations.tokens_together()
        while waiting and running < self.limits.slots:
            prompt, members = waiting[0], self._members(waiting)
            total += len(prompt.ids)
            if starting and total > most:
                break
            count = min(members, self.limits.slots - running, self._room(prompt, waits=False))
            if count == 0:
                break
            starting.append(self._begun(waiting, count))
            slots = range(running, running + count)
            self.stage.cache.begin(slots, len(prompt.ids), self._most(prompt), waits=count < members)
            running += count
            if count < members:
                self._shared = prompt
                break
        assert starting or running, "a pool has room for one row"
        return starting

    def _next_of_shared(self, waiting: deque[Request], running: int) -> list[Request]:
        """Takes the next rows that continue the prompt that waits for them, as many as there are slots and pages for,
        and gives them its pages."""
        if self._shared is None or running == self.limits.slots:
            return []
        room = self._room(self._shared, waits=True)
        count = min(self._members(waiting), self.limits.slots - running, room)
        if count:
            slots = range(running, running + count)
            self.stage.cache.begin_more(slots, len(self._shared.ids), self._most(self._shared))
        return self._begun(waiting, count)

    def _begun(self, waiting: deque[Request], count: int) -> list[Request]:
        """Takes the next prompts."""
        begun = [waiting.popleft() for _ in range(count)]
        for request in begun if self._conversations is not None else ():
            self._conversations.begin(request)
        return begun

    def _continues_shared(self, waiting: deque[Request]) -> bool:
        return bool(waiting) and self._shared is not None and _continue_one(waiting[0], self._shared)

    def _members(self, waiting: deque[Request]) -> int:
        """Returns the number of the next requests that continue the first one's prompt, and may share its cached
        pages."""
        first = waiting[0]
        if self.stage.group == 1 or first.images:
            return 1
        return sum(1 for _ in takewhile(lambda one: _continue_one(one, first) and not one.images, waiting))

    def _room(self, prompt: Request, *, waits: bool) -> int:
        room = self.stage.cache.room(len(prompt.ids), self._most(prompt), waits=waits)
        return room if self._conversations is None else min(room, self._conversations.room)

    def _most(self, prompt: Request) -> int:
        """Returns the most tokens that follow a prompt."""
        return self.limits.max_new_tokens if prompt.max_new is None else prompt.max_new

    def _coordinates(self, prompts: Sequence[Request]) -> PromptCoordinates:
        ids, images = [request.ids for request in prompts], [request.images for request in prompts]
        if self._family is None:
            assert not any(images), "images need a family that reads them"
            return text_coordinates(list(map(len, ids)))
        found: PromptCoordinates = resolve("engine.vision.inference:prompt_coordinates")(self._family, ids, images)
        return found

    def _prefill(self, starting: list[list[Request]], rows: list[Row], *, waits: bool) -> _Pass:
        """Runs prompts; their rows are the last of `rows`.

        Args:
            waits: the last prompt waits for further rows.
        """
        prompts = [members[0] for members in starting]
        began = self.stage.now()
        # ranks that encode nothing read images too, so that a broken one ends all of them
        coordinates = self._coordinates(prompts)
        chosen = self.stage.prefill(
            [request.ids for request in prompts],
            coordinates,
            len(rows),
            [[request.drawn for request in members] for members in starting],
            waits=waits,
        )
        self.speed.prefill_seconds += self.stage.now() - began
        self.speed.prefill_tokens += sum(len(request.ids) for request in prompts)
        new = [
            self._row(request, position)
            for members, position in zip(starting, coordinates.next_positions, strict=True)
            for request in members
        ]
        rows += new
        return _Pass(new, chosen)

    def _row(self, request: Request, position: int) -> Row:
        stream = None
        if self._tokenizer is not None:
            stream = TextStream(self._tokenizer, self.limits.stop_texts, request.ids)
        return Row(request, stream, position)

    def _decode(self, rows: list[Row]) -> _Pass:
        places, positions = [row.place for row in rows], [row.position for row in rows]
        began, waited = self.stage.now(), self.stage.waits.seconds
        chosen = self.stage.decode(places, positions, [row.request.drawn for row in rows])
        speed = self.speed
        speed.decode_seconds += self.stage.now() - began
        speed.decode_waited += self.stage.waits.seconds - waited
        speed.decode_passes += 1
        speed.cache_bytes += self.stage.cache.bytes_read([place + 1 for place in places])
        return _Pass([*rows], chosen, decodes=True)

    def _take(self, row: Row, token: int, text: str, on_text: Callable[[Request, str], None] | None) -> None:
        row.ids.append(token)
        stream = row.stream
        if token in self.limits.stop_ids:
            row.ending = "stop_token"
        else:
            if stream is not None and stream.stopped:
                row.ending = "stop_text"
            elif len(row.ids) == self._most(row.request):
                row.ending = "length"
        if row.ending is not None and stream is not None:
            text += stream.finish()
            if stream.stopped and row.ending == "length":
                row.ending = "stop_text"
        if text and on_text is not None:
            on_text(row.request, text)

    def _interrupted(self, row: Row, on_text: Callable[[Request, str], None] | None) -> Row:
        """Returns the row, which ends as it is."""
        row.ending = "interrupted"
        if row.stream is not None and (text := row.stream.finish()) and on_text is not None:
            on_text(row.request, text)
        return row

    def _close_gaps(self, rows: list[Row]) -> None:
        """Removes rows that have ended, or have all their tokens; the last ones take their slots."""
        slot = 0
        while slot < len(rows):
            if self._leaves(rows[-1]):
                self._leave(rows.pop(), len(rows))
            elif self._leaves(rows[slot]):
                self._leave(rows[slot], slot)
                rows[slot] = rows.pop()
                self.stage.move(len(rows), slot)
            else:
                slot += 1

    def _leave(self, row: Row, slot: int) -> None:
        if self._conversations is not None:
            self._conversations.keep(row, slot)
        elif self._keeps_row:
            self._last_row = row
        else:
            self.stage.free(slot)

    def _kept_row(self) -> KeptRow | None:
        """Takes the row that is kept."""
        row, self._last_row = self._last_row, None
        if row is None:
            return None
        prompt, images = row.request.ids, row.request.images
        length = row.place  # the last token that was chosen is the input of no pass yet
        ids = (*prompt, *row.ids)[:length]
        return KeptRow(ids=ids, length=length, images=images, behind=len(prompt) - row.next_position)

    def _continued(self, waiting: deque[Request], rows: list[Row]) -> _Pass | None:
        """Runs the next turn of a row that is in the cache, which becomes the last of `rows`; None where there is none
        to run, or no slot."""
        if self._conversations is not None:
            found = None if len(rows) == self.limits.slots else self._conversations.next(len(rows))
            return None if found is None else self._turn(*found, rows)
        if (kept := self._kept_row()) is None:
            return None
        request = waiting[0]
        common = kept.common(request.ids, request.images)
        behind = self.stage.carries_states and common < kept.length
        if common == 0 or behind or not self.stage.cache.can_continue(0, kept.length, common):
            self.stage.free(0)
            return None
        return self._continue_row(waiting.popleft(), common, kept.behind, rows)

    def _turn(self, request: Request, count: int, rows: list[Row]) -> _Pass:
        """Runs a turn by itself.

        Args:
            count: of its first tokens, which are in the cache.
        """
        if count:
            return self._continue_row(request, count, 0, rows)
        self.stage.cache.begin([len(rows)], len(request.ids), self._most(request), waits=False)
        return self._prefill([[request]], rows, waits=False)

    def _continue_row(self, request: Request, count: int, behind: int, rows: list[Row]) -> _Pass:
        """Runs the tokens of a prompt behind the first `count`, which the free slot behind `rows` has in the cache."""
        began, length = self.stage.now(), len(request.ids)
        positions = range(count - behind, length - behind)
        chosen = self.stage.continue_row(len(rows), request.ids, count, positions, request.drawn)
        self.speed.prefill_seconds += self.stage.now() - began
        self.speed.prefill_tokens += length - count
        rows.append(self._row(request, length - behind))
        return _Pass(rows[-1:], chosen)

    def _leaves(self, row: Row) -> bool:
        most = self._most(row.request)
        if self._conversations is not None:
            return self._conversations.leaves(row, most)
        return row.ending is not None or row.launched == most


def _continue_one(one: Request, other: Request) -> bool:
    """Returns whether two rows continue the same prompt."""
    return one.ids == other.ids and one.max_new == other.max_new
