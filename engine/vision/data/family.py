"""What the data side knows of a family of vision-language models: one interface, and the records that go through it.

A family turns a conversation with images into tokens, of which some stand where features of the images go, and an
image into patches. The first needs only the images' sizes, so that tokenising reads no pixels. Everything here is a
pure function of configuration, text and sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from engine.data.chat import Learn
from engine.data.extras import Span
from engine.vision.data.pixels import Grid, Size

if TYPE_CHECKING:
    from PIL.Image import Image


Placing = Literal["in_place", "split", "parts"]
"""Where images stood in a record: markers in the text, numbered markers by which MiniCPM-V's script splits the text,
or parts of a list."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Args:
        role: "system", "user" or "assistant".
        parts: text, and numbers of the conversation's images, in order.
    """

    role: str
    parts: tuple[str | int, ...]

    @property
    def text(self) -> str:
        """The text without the images."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> list[int]:
        return [part for part in self.parts if isinstance(part, int)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and how their parts were written."""

    turns: tuple[Turn, ...]
    placing: Placing = "in_place"


def with_image_first(chat: Conversation, num_images: int) -> Conversation:
    """Returns the conversation with its only image in front of the text, where no place is named."""
    if num_images != 1 or any(turn.images for turn in chat.turns) or not chat.turns:
        return chat
    at = next((number for number, turn in enumerate(chat.turns) if turn.role == "user"), 0)
    turn = chat.turns[at]
    first = Turn(turn.role, (0, "\n", *turn.parts))
    return Conversation((*chat.turns[:at], first, *chat.turns[at + 1 :]), chat.placing)


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The tokens of a conversation.

    Args:
        ids: of all tokens, the stand-ins of features included.
        targets: whether each token is a target; the first never is.
        spans: for each image, by its number, the tokens that its features replace, in the order of the features.
        odd_labels: what a position must predict, where that is neither the next token nor nothing.
    """

    ids: list[int]
    targets: list[bool]
    spans: list[list[Span]]
    odd_labels: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The pixels of one image for one tower.

    Args:
        patches_PF: float32, the patches of all tiles, tile after tile.
        grids: of each tile.
    """

    patches_PF: NDArray[np.float32]
    grids: tuple[Grid, ...]


class VisionFamily(ABC):
    """The interface of a family. What most of them have in common is what a family has that does not say otherwise:
    one tower, one set of weights, positions and attention as for text, and images as their files have them.

    Attributes:
        patch_features: F, numbers of a patch.
        cross_patch_features: the same of a second tower that reads each image too, or None.
        has_experts: whether tokens of images take weights of their own.
        rotates_by_grid: whether positions are those in time, height and width.
        is_bidirectional: whether tokens of an image see the whole image.
        turns_upright: whether images are turned as their EXIF orientation says.
        remark: on what a run computes otherwise than the original may, for its log; None for nothing.
    """

    patch_features: int
    cross_patch_features: int | None = None
    collector: ClassVar[str] = "engine.vision.data.row_images:collect_images"
    """Collects the images of micro-batches; see `engine.data.parts.collectors`."""
    prompt_collector: ClassVar[str] = "engine.vision.data.row_images:RowImages"
    """Collects those of prompts: takes the family, and their columns, None where no prompt has images."""
    has_experts: ClassVar[bool] = False
    rotates_by_grid: bool = False
    is_bidirectional: bool = False
    turns_upright: ClassVar[bool] = False
    remark: str | None = None

    @abstractmethod
    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        """Yields what is trained on: one item, or one for each answer where the layout has room for one answer only.

        Args:
            chat: its turns' images are numbers into `sizes`.
            sizes: of the images.
            learn: which answers are targets.

        Raises:
            UserError: a conversation that the family cannot express.
        """

    @abstractmethod
    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        """Returns the tokens up to where the assistant's next turn begins, without targets.

        Raises:
            UserError: a conversation that the family cannot express.
        """

    @abstractmethod
    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        """Returns the grids of the tiles that `tiles` makes of an image of this size.

        Args:
            is_only_image: its conversation has no other.
        """

    @abstractmethod
    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        """Returns the patches of an RGB image.

        Args:
            is_only_image: its conversation has no other.
        """

    def grids_together(self, grids: Sequence[Grid], documents: Sequence[int]) -> tuple[Grid, ...]:
        """Returns the grids of all tiles of a micro-batch, with what the tower has to know of a tile's neighbours.

        Args:
            grids: of each tile.
            documents: that each belongs to.
        """
        return tuple(grids)

    def cross_grids(self, size: Size) -> tuple[Grid, ...]:
        """Returns the grids of the tiles for the second tower; none where there is no such tower."""
        return ()

    def cross_tiles(self, image: Image) -> Tiles | None:
        """Returns the patches for the second tower, where there is one."""
        return None

    def positions(self, tokens: NDArray[Any], spans: Sequence[Span], sizes: Sequence[Size]) -> NDArray[np.int64]:
        """Returns the position of each token of a document: int64 [length], or [3, length] in time, height and width.

        Args:
            tokens: whole numbers [length], the ids.
            spans: the tokens that features replace, in order.
            sizes: of the document's images.
        """
        return np.arange(len(tokens), dtype=np.int64)

    def expert_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Returns the tokens that take the weights for images, given those that features replace."""
        return ()
