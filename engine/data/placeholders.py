"""Puts the stand-ins of images into a rendered conversation, before it becomes tokens.

They are put into the text and not among the tokens, because some (Gemma's) have line breaks that fuse with those around
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.data.chat import Span
from engine.errors import UserError


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The images of a conversation.

    Args:
        mark: text that a chat template writes for each image.
        texts: what each becomes, in order.
    """

    mark: str
    texts: tuple[str, ...]

    def put_into(self, text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
        """Returns the text with its stand-ins, and the same ranges of it; none of them begins or ends in a mark.

        Raises:
            UserError: the template wrote another number of marks than there are images.
        """
        pieces = text.split(self.mark)
        if len(pieces) - 1 != len(self.texts):
            raise UserError(
                f"the chat template writes {len(pieces) - 1} times {self.mark}, but the record has {len(self.texts)} "
                "images; remove the mark from the text, or give a chat template that writes images."
            )
        starts, grown, at = [], [], len(pieces[0])
        for piece, stand_in in zip(pieces[1:], self.texts, strict=True):
            starts.append(at)
            grown.append(len(stand_in) - len(self.mark))
            at += len(self.mark) + len(piece)

        def moved(place: int) -> int:
            return place + sum(more for start, more in zip(starts, grown, strict=True) if start < place)

        whole = "".join(piece + text for piece, text in zip(pieces, (*self.texts, ""), strict=True))
        return whole, [(moved(start), moved(end)) for start, end in spans]
