"""Families whose pixels come from transformers' image processor for the model's folder: LLaVA, Qwen2.5-VL, Qwen3-VL,
Qwen3.5, InternVL3 and Gemma 3. Conversations go through the model's chat template.

The image processors of transformers that need only Pillow are taken. Its processors for text and images together are
not: they need torchvision, for videos, and pixels where sizes are enough. What they put into the text for an image
is in the table here.

Line breaks beside a marker in a text belong to the marker, because templates write their own; all others are the
text's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from engine.data.chat import Learn, Message
from engine.data.extras import Span
from engine.data.placeholders import Placeholders
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.files.documents import read_json
from engine.size_limits import check_sizes
from engine.vision.data.anyres import anyres_grid, most_tiles, num_features
from engine.vision.data.family import Conversation, EncodedChat, Tiles, Turn, VisionFamily, with_image_first
from engine.vision.data.pixels import Grid, Size
from engine.vision.tower_defaults import CLIP, whole_tower

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class StandIn:
    """What stands for an image in a conversation's text.

    Args:
        mark: what the chat template writes.
        feature: the token that stands for one feature.
        before, behind: what is written around the features.
    """

    mark: str
    feature: str
    before: str = ""
    behind: str = ""

    def text(self, count: int) -> str:
        return self.before + self.feature * count + self.behind


class ProcessorFamily(VisionFamily):
    """A family whose processor makes tiles of one size: one of an image, where the family does not say otherwise.

    Args:
        config: config.json of the model.
        folder: of the model, where its preprocessor_config.json is.
        tokenizer: of the model.
    """

    stand_in: StandIn
    options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the image processor."""
    turns_upright = True

    def __init__(self, config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        feature = tokenizer.added_tokens.get(self.stand_in.feature)
        if feature is None or not tokenizer.has_chat_template:
            lacks = "chat template" if feature is not None else f"token {self.stand_in.feature}"
            raise UserError(
                f"the tokenizer has no {lacks}, which the model needs for images; give data.tokenizer the folder "
                "with the model's own files, or data.chat_template its template."
            )
        self._feature = feature
        self._processor, self._file = _image_processor(folder), _settings_file(folder)
        if getattr(self._processor, "do_pan_and_scan", None):
            raise UserError(
                f"{self._file} has do_pan_and_scan, which cuts images into crops, and that is not supported; set it "
                "to false."
            )
        vision = whole_tower(config)
        if vision is None:
            raise UserError("config.json lacks vision_config, which describes the vision tower: copy it again.")
        self._tower, self._config = vision, config
        self._patch = _side(vision, "patch_size")
        self.patch_features = 3 * self._patch**2
        self._check_sizes()
        self._check_processing()

    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        chat = with_image_first(chat, len(sizes))
        ids, targets = self._tokenizer.apply_chat(
            template_messages(chat), learn=learn, images=self._placeholders(chat, sizes)
        )
        bos = self._bos(ids)
        yield self._placed(chat, bos + ids, [False] * len(bos) + targets, sizes)

    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        chat = with_image_first(chat, len(sizes))
        ids = self._tokenizer.chat_prompt(template_messages(chat), images=self._placeholders(chat, sizes))
        ids = self._bos(ids) + ids
        return self._placed(chat, ids, [False] * len(ids), sizes)

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        rows, columns = (side // self._patch for side in self._image_size())
        return ((rows, columns),)

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        pixels = self._processed([image])["pixel_values"]
        patches, grid = self._patches(pixels)
        return Tiles(patches, (grid,) * len(pixels))

    @abstractmethod
    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        """Returns the features of an image with these tiles."""

    def _runs(self, grids: tuple[Grid, ...]) -> tuple[int, ...]:
        """Returns the features of an image with these tiles that stand side by side, run after run."""
        return (self._num_features(grids),)

    def _stand_in_text(self, place: int, size: Size, *, is_only_image: bool) -> str:
        """Returns what stands for an image.

        Args:
            place: images of the conversation before it.
            size: of the image.
        """
        return self.stand_in.text(self._num_features(self.grids(size, is_only_image=is_only_image)))

    def _processed(self, images: Sequence[Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._processor(images=images, return_tensors="np", **self.options)
        return found

    def _patches(self, pixels: Any) -> tuple[NDArray[np.float32], Grid]:
        """Returns the patches of tiles [n, 3, height, width], and the grid of each tile."""
        pixels = np.asarray(pixels, dtype=np.float32)
        rows, columns = (length // self._patch for length in pixels.shape[-2:])
        pixels = pixels[..., : rows * self._patch, : columns * self._patch]  # the convolution of a tower reads no more
        patches = rearrange(pixels, "n c (h p) (w q) -> (n h w) (c p q)", p=self._patch, q=self._patch)
        return patches, (rows, columns)

    def _bos(self, ids: list[int]) -> list[int]:
        """Returns what belongs in front: the tokenizer's first token, unless it adds none or the template wrote it."""
        bos = self._tokenizer.bos_id
        return [bos] if bos is not None and self._tokenizer.adds_bos and ids[:1] != [bos] else []

    def _placeholders(self, chat: Conversation, sizes: Sequence[Size]) -> Placeholders:
        is_only = len(sizes) == 1
        texts = (
            self._stand_in_text(place, sizes[number], is_only_image=is_only)
            for place, number in enumerate(image_order(chat))
        )
        return Placeholders(self.stand_in.mark, tuple(texts))

    def _placed(self, chat: Conversation, ids: list[int], targets: list[bool], sizes: Sequence[Size]) -> EncodedChat:
        """Returns the tokens with the places of features, which are no targets."""
        runs = [self._runs(self.grids(size, is_only_image=len(sizes) == 1)) for size in sizes]
        places = [at for at, token in enumerate(ids) if token == self._feature]
        if len(places) != (expected := sum(map(sum, runs))):
            raise UserError(
                f"the conversation has {len(places)} times the token {self.stand_in.feature}, but its images have "
                f"{expected} features; remove the token from the text."
            )
        spans: list[list[Span]] = [[] for _ in sizes]
        first = 0
        for number in image_order(chat):
            for count in runs[number]:
                own = places[first : first + count]
                assert own[-1] - own[0] + 1 == len(own), "features of a run are side by side"
                spans[number].append((own[0], own[-1] + 1))
                first += count
        stand_ins = set(places)
        targets = [target and at > 0 and at not in stand_ins for at, target in enumerate(targets)]
        return EncodedChat(ids, targets, spans)

    def _image_size(self) -> Size:
        """Returns height and width in pixels of an image, or of a tile, as the processor makes it."""
        crop = self._processor.crop_size if getattr(self._processor, "do_center_crop", False) else None
        size = dict(crop or self._processor.size)
        if not (size.get("height") and size.get("width")) or not (crop or self._processor.do_resize):
            raise UserError(
                f"{self._file} makes images of no fixed height and width (size {size}, do_resize "
                f"{self._processor.do_resize}), but the tower takes images of one size; copy the model's own file."
            )
        return int(size["height"]), int(size["width"])

    def _check_sizes(self) -> None:
        """Refuses images of another size than the tower's."""
        if (edge := dict(self._processor.size).get("shortest_edge") or 0) > _LONGEST_SIDE:
            raise UserError(f"{self._file} has size.shortest_edge {edge}, but at most {_LONGEST_SIDE:,} is expected.")
        side = _side(self._tower, "image_size")
        height, width = self._image_size()
        if (height, width) != (side, side):
            raise UserError(
                f"{self._file} makes images of {height} x {width} pixels, but config.json has a tower for {side} x "
                f"{side}; copy both files of one model."
            )

    def _check_processing(self) -> None:
        """Processes an image, because transformers looks at most of the settings only then."""
        from PIL.Image import new

        try:
            with np.errstate(all="ignore"):
                tiles = self.tiles(new("RGB", _TRIED))
            fault = "numbers that are not finite" if not np.isfinite(tiles.patches_PF).all() else ""
            if tiles.grids != self.grids(_TRIED):
                fault = f"patches of {tiles.grids} where {self.grids(_TRIED)} are expected"
        except UserError:  # says itself what is wrong, and is a ValueError, too
            raise
        except _OF_PROCESSORS as error:
            fault = str(error)
        if fault:
            raise UserError(
                f"{self._file} has settings with which transformers makes no image of {_TRIED[0]} x {_TRIED[1]} "
                f"({fault}); copy the model's own file."
            )


class Llava(ProcessorFamily):
    """LLaVA 1.5."""

    stand_in = StandIn("<image>", "<image>")

    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        ((rows, columns),) = grids
        # the first output of a CLIP tower is that of the class; "default" leaves the first out, whatever it is
        leaves_out_first = self._config.get("vision_feature_select_strategy", "default") == "default"
        return rows * columns + (self._tower["model_type"] == CLIP) - leaves_out_first


class LlavaNext(Llava):
    """LLaVA-NeXT, whose features of all tiles of an image are one map."""

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        tile, _ = self._image_size()
        pinpoints = self._processor.image_grid_pinpoints
        return (anyres_grid(size, pinpoints, tile=tile, side=tile // self._patch, most=self._most_tiles()),)

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        patches, _ = self._patches(self._processed(self._batch(image, is_only_image))["pixel_values"][0])
        return Tiles(patches, self.grids(image.size, is_only_image=is_only_image))

    def _batch(self, image: Image, is_only_image: bool) -> Sequence[Any]:
        """Returns the images to process, of which the first is taken."""
        return [image]

    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        return num_features(*grids)

    def _most_tiles(self) -> int | None:
        """Returns how many tiles' features an image may have; None where features are not scaled."""
        return None

    def _check_sizes(self) -> None:
        super()._check_sizes()
        tile, _ = self._image_size()
        pinpoints = [list(one) for one in self._processor.image_grid_pinpoints]
        if any(length % tile or length < tile for one in pinpoints for length in one):
            raise UserError(
                f"{self._file} has image_grid_pinpoints that are not whole tiles of {tile} pixels; copy the model's "
                "own file."
            )
        if self._config.get("image_grid_pinpoints") not in (None, pinpoints):
            raise UserError(
                f"{self._file} and config.json have other image_grid_pinpoints; copy both files of one model."
            )


class LlavaOneVision(LlavaNext):
    """LLaVA-OneVision, which cuts the only image of a conversation into tiles, and scales down too many features."""

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return super().grids(size) if is_only_image else ProcessorFamily.grids(self, size)

    def _batch(self, image: Image, is_only_image: bool) -> Sequence[Any]:
        return [image] if is_only_image else [[image, image.resize((1, 1))]]

    def _most_tiles(self) -> int:
        return most_tiles(self._config.get("vision_aspect_ratio", "anyres_max_9"))


class InternVL(ProcessorFamily):
    """InternVL3, whose processor cuts images into tiles."""

    stand_in = StandIn("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>")
    options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return super().grids(size) * int(
            self._processor.get_number_of_image_patches(size[1], size[0], dict(self.options))
        )

    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        ratio = float(self._config.get("downsample_ratio", 0.5))
        return sum(round(rows * ratio) * round(columns * ratio) for rows, columns in grids)


class Gemma3(ProcessorFamily):
    """Gemma 3, in whose attention the tokens of an image see the whole image."""

    stand_in = StandIn("<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n")
    is_bidirectional = True

    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        return int(self._config.get("mm_tokens_per_image", 256))


class QwenVL(ProcessorFamily):
    """Qwen2.5-VL, Qwen3-VL and Qwen3.5, whose processor cuts patches itself, and whose positions are of three kinds."""

    stand_in = StandIn("<|image_pad|>", "<|image_pad|>")
    rotates_by_grid = True

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        return (self._grid(size),)

    def tiles(self, image: Image, *, is_only_image: bool = True) -> Tiles:
        found = self._processed([image])
        grids = tuple((int(rows), int(columns)) for _, rows, columns in found["image_grid_thw"])
        return Tiles(np.asarray(found["pixel_values"], dtype=np.float32), grids)

    def positions(self, tokens: NDArray[Any], spans: Sequence[Span], sizes: Sequence[Size]) -> NDArray[np.int64]:
        length = len(tokens)
        positions = np.empty((3, length), dtype=np.int64)
        at = after = 0
        for (start, end), size in zip(spans, sizes, strict=True):
            positions[:, at:start] = after + np.arange(start - at)
            first = after + start - at
            rows, columns = (side // self._processor.merge_size for side in self._grid(size))
            row, column = np.divmod(np.arange(rows * columns), columns)
            positions[:, start:end] = first + np.stack([np.zeros_like(row), row, column])
            at, after = end, first + max(rows, columns)
        positions[:, at:] = after + np.arange(length - at)
        return positions

    def _num_features(self, grids: tuple[Grid, ...]) -> int:
        ((rows, columns),) = grids
        return rows * columns // int(self._processor.merge_size) ** 2

    def _grid(self, size: Size) -> Grid:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        limits, merged = self._processor.size, self._patch * int(self._processor.merge_size)
        try:
            height, width = smart_resize(size[1], size[0], merged, limits["shortest_edge"], limits["longest_edge"])
        except ValueError as error:
            raise UserError(f"the model's processor refuses an image of {size[0]} x {size[1]} ({error}).") from error
        return height // self._patch, width // self._patch

    def _check_sizes(self) -> None:
        """Refuses patches, or blocks of them, of other sizes than the tower's."""
        processor, limits = self._processor, self._processor.size
        frames = _side(self._tower, "temporal_patch_size")
        self.patch_features *= frames  # an image is as many equal frames
        tower = (self._patch, frames, _side(self._tower, "spatial_merge_size"))
        made = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        if made != tower or not processor.do_resize:
            raise UserError(
                f"{self._file} has patch_size, temporal_patch_size and merge_size {made} and do_resize "
                f"{processor.do_resize}, but config.json has a tower for {tower} and images that are resized; copy "
                "both files of one model."
            )
        if not (limits.get("shortest_edge") and limits.get("longest_edge")):
            raise UserError(
                f"{self._file} has size {dict(limits)}, but shortest_edge and longest_edge, or min_pixels and "
                "max_pixels beside it, are expected: copy the model's own file."
            )


PROCESSOR_FAMILIES: Mapping[str, type[ProcessorFamily]] = {
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOneVision,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_5": QwenVL,
    "qwen3_5_moe": QwenVL,
    "internvl": InternVL,
    "gemma3": Gemma3,
}
"""By model_type."""


def _image_processor(folder: Path) -> Any:
    """Opens the image processor in a model's folder."""
    # the name at the top of transformers 5.17 asks for torchvision
    from transformers.models.auto.image_processing_auto import AutoImageProcessor, get_image_processor_config
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    file = _settings_file(folder)
    if file.is_file():
        check_sizes(read_json(file, "copy it again"), str(file))
    opened: Any = AutoImageProcessor
    try:
        kind = get_image_processor_config(str(folder), local_files_only=True).get("image_processor_type")
        if str(kind).removesuffix("Fast") == _FORMER_QWEN:
            return Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        return opened.from_pretrained(str(folder), backend="pil", local_files_only=True)
    except (OSError, ImportError, *_OF_PROCESSORS) as error:
        raise UserError(f"{file} is none that transformers can open ({error}); copy the model's own file.") from error


_OF_PROCESSORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What becomes of settings that transformers' processors do not check."""
_LONGEST_SIDE = 1 << 12
"""Pixels of the shorter side of an image, before it is cropped to what the tower takes."""
_TRIED = (64, 64)
"""Width and height of the image that is processed for a trial."""
_FORMER_QWEN = "Qwen2_5_VLImageProcessor"
"""Its name in folders from before the release of transformers that has Qwen2.5-VL, where it is Qwen2-VL's."""


def _settings_file(folder: Path) -> Path:
    """Returns the file with the image processor's settings, which transformers 5 writes into those of the whole."""
    whole = folder / "processor_config.json"
    nested = whole.is_file() and "image_processor" in read_json(whole, "copy it again")
    return whole if nested else folder / "preprocessor_config.json"


def _side(vision: Mapping[str, Any], key: str) -> int:
    """Returns a length in `vision_config`, which may be given as two equal ones."""
    given = vision.get(key)
    side = given[0] if isinstance(given, list | tuple) and len(set(given)) == 1 else given
    if not isinstance(side, int) or isinstance(side, bool) or side < 1:
        raise UserError(
            f"config.json has vision_config.{key} {given!r}, but a whole number above 0 is expected: correct it or "
            "copy it again."
        )
    return side


def image_order(chat: Conversation) -> list[int]:
    """Returns the images of a conversation in the order of its text."""
    return [number for turn in chat.turns for number in turn.images]


def template_messages(chat: Conversation) -> list[Message]:
    """Returns a conversation as chat templates read it; line breaks beside an image are its mark's."""
    return [{"role": turn.role, "content": _content(turn, chat)} for turn in chat.turns]


def _content(turn: Turn, chat: Conversation) -> str | list[dict[str, str]]:
    if not turn.images:
        return turn.text
    found = []
    for before, part, behind in zip((None, *turn.parts), turn.parts, (*turn.parts[1:], None), strict=False):
        if isinstance(part, int):
            found.append({"type": "image"})
            continue
        if chat.placing != "parts":
            part = part.lstrip("\n") if isinstance(before, int) else part
            part = part.rstrip("\n") if isinstance(behind, int) else part
        if part:
            found.append({"type": "text", "text": part})
    return found
