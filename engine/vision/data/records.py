"""Finds the images of a record, and where in the conversation they belong.

| written by     | where the images are named                 | where they belong                                   |
|----------------|----------------------------------------------|-----------------------------------------------------|
| MiniCPM-V      | image: a path                                | at <image>; without it before the first question    |
| MiniCPM-V      | image: {"<image_00>": path, ...}             | at <image_00>, ...                                  |
| LLaVA          | image: a path, or a list of them             | at <image>, in order                                |
| ms-swift       | images: a list of paths or of {"path": path} | at <image>, in order                                |
| OpenAI, TRL    | parts of content: {"type": "image", ...}     | where the part is; one without a path of its own is |
|                |                                              | the next of the field images                        |

The frames of a video are images: `videos` is a list with a list of their paths for each <video>, and a part of type
video has such a list, or stands for the next of the field.

An image that belongs nowhere, or a place without an image, is an error that names file, record and field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.data.chat import Message
from engine.data.formats import IMAGE_FIELDS, VIDEOS, FamilySample, has_parts
from engine.data.record_files import Place, Record
from engine.seams import resolve
from engine.vision.data.family import Conversation, Turn

MARKER, VIDEO_MARKER = "<image>", "<video>"
_MARKERS = re.compile(f"({MARKER}|{VIDEO_MARKER})")
_NUMBERED = re.compile(r"(<image_\d+>)")
_PART_FIELDS = ("image", "path", "image_url", "url")
"""Where a part names its image."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as a record names it.

    Args:
        field: of the record.
        path: as written; relative to the records' file, or to data.image_folder.
        option: of the command line that names it; None where a record does.
    """

    field: str
    path: str
    option: str | None = None


@dataclass(frozen=True, slots=True)
class ImageSample(FamilySample):
    """A conversation with images; its assistant turns are trained on.

    Args:
        has_videos: some of the images are frames of videos.
    """

    place: Place
    conversation: Conversation
    images: tuple[ImageRef, ...]
    has_videos: bool = False

    def refusal(self) -> str:
        """Returns why a model of text alone cannot read it."""
        named = f"field '{self.images[0].field}' names an image" if self.images else "the turns are parts"
        models = resolve("engine.vision.data.families:IMAGE_MODELS")
        return (
            f"{named}, but only text is read here: images are read in training, by models of type "
            f"{', '.join(models)} (of InternVL the folder that ends in -hf), and by other models of images and text of "
            "the installed transformers; use one of these, or remove the images."
        )


def image_sample(place: Place, record: Record, messages: Sequence[Message]) -> ImageSample:
    """Returns a record's conversation with its images.

    Args:
        messages: of the record; their content is text or a list of parts.

    Raises:
        UserError: an image and its place do not find each other, or a field is not what it should be.
    """
    if _has_videos(record, messages):
        return replace(image_sample(place, *_frames_as_images(place, record, messages)), has_videos=True)
    given = [field for field in IMAGE_FIELDS if record.get(field)]
    if len(given) == 2:
        raise place.error("fields 'image' and 'images' both name images; keep one of them.")
    for message in messages:
        if message["role"] == "tool" or message.get("tool_calls"):
            raise place.error("a conversation with images calls tools, which no layout has; remove such records.")
    if any(has_parts(message) for message in messages):
        return _of_parts(place, record, messages)
    named = record[given[0]]
    if isinstance(named, Mapping):
        return _of_map(place, named, messages)
    refs = list(_refs(place, given[0], named))
    alone = given[0] == "image" and isinstance(named, str)
    return _of_markers(place, refs, messages, optional=alone and _has_roles(record))


def _has_videos(record: Record, messages: Sequence[Message]) -> bool:
    return bool(record.get(VIDEOS)) or any(
        isinstance(part, Mapping) and part.get("type") == "video"
        for message in messages
        if has_parts(message)
        for part in message["content"]
    )


def _frames_as_images(place: Place, record: Record, messages: Sequence[Message]) -> tuple[Record, tuple[Message, ...]]:
    """Returns a record and its messages with images in the places of videos, one for each frame.

    Raises:
        UserError: a video is no list of images, or stands nowhere.
    """
    given = next((field for field in IMAGE_FIELDS if record.get(field)), None)
    named = [] if given is None else record[given]
    if isinstance(named, Mapping) and not named.keys() & {"path", "url", "bytes"}:
        raise place.error(f"field '{given}' numbers images beside videos; list them in the field images.")
    images = [] if given is None else list(_refs(place, given, named))
    listed = record.get(VIDEOS) or []
    if not isinstance(listed, list):
        raise place.error(f"field '{VIDEOS}' is no list; write a list with the frames of each video.")
    videos = [_frames(place, f"{VIDEOS}[{number}]", video) for number, video in enumerate(listed)]
    others = {name: value for name, value in record.items() if name not in (*IMAGE_FIELDS, VIDEOS)}
    if any(has_parts(message) for message in messages):
        return {**others, "images": images}, _parts_of_frames(place, videos, messages)
    texts = [_MARKERS.split(str(message["content"])) for message in messages]
    for marker, field, count in ((MARKER, given, len(images)), (VIDEO_MARKER, VIDEOS, len(videos))):
        if (times := sum(text.count(marker) for text in texts)) != count:
            raise place.error(
                f"field '{field or 'images'}' has {count}, but {marker} stands {times} times in the conversation; put "
                "it once where each belongs."
            )
    left, refs = {MARKER: iter([image] for image in images), VIDEO_MARKER: iter(videos)}, []
    found = []
    for message, text in zip(messages, texts, strict=True):
        content = ""
        for piece in text:
            frames = next(left[piece]) if piece in left else None
            content += piece if frames is None else MARKER * len(frames)
            refs += frames or []
        found.append({**message, "content": content})
    return {**others, "images": refs}, tuple(found)


def _frames(place: Place, field: str, video: object) -> list[ImageRef]:
    """Returns the frames of a video, which a field names."""
    if not isinstance(video, list) or not video:
        raise place.error(
            f"field '{field}' is no list of the files of a video's frames, and video files are not read; save its "
            "frames as images and list them."
        )
    return [_ref(place, f"{field}[{number}]", frame) for number, frame in enumerate(video)]


def _parts_of_frames(place: Place, videos: list[list[ImageRef]], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns messages with a part of type image for each frame of a video."""
    waiting, found = iter(videos), []
    for at, message in enumerate(messages):
        content: list[Any] = []
        for number, part in enumerate(message["content"] if has_parts(message) else [message["content"]]):
            if not isinstance(part, Mapping) or part.get("type") != "video":
                content.append(part)
                continue
            field = f"messages[{at}].content[{number}]"
            frames = _frames(place, f"{field}.video", part["video"]) if part.get("video") else next(waiting, None)
            if frames is None:
                raise place.error(f"field '{field}' is a video without frames; add them to the field {VIDEOS}.")
            content += [{"type": "image", "image": frame} for frame in frames]
        found.append({**message, "content": content if has_parts(message) else message["content"]})
    if (left := next(waiting, None)) is not None:
        raise place.error(f"field '{left[0].field}' is a frame of a video that no part of a turn stands for; add it.")
    return tuple(found)


def _has_roles(record: Record) -> bool:
    """Returns whether turns are written as MiniCPM-V's script reads them, which puts an image first by itself."""
    turns = record.get("conversations")
    return isinstance(turns, list) and isinstance(turns[0], dict) and "role" in turns[0]


def _of_markers(place: Place, refs: list[ImageRef], messages: Sequence[Message], *, optional: bool) -> ImageSample:
    turns, count = [], 0
    for message in messages:
        parts: list[str | int] = []
        for number, text in enumerate(str(message["content"]).split(MARKER)):
            if number:
                parts.append(count)
                count += 1
            parts.append(text)
        turns.append(Turn(message["role"], tuple(parts)))
    if count != len(refs) and not (optional and not count):
        images = "1 image" if len(refs) == 1 else f"{len(refs)} images"
        field = refs[0].field.partition("[")[0]
        raise place.error(
            f"field '{field}' names {images}, but {MARKER} stands {count} times in the conversation; "
            "put it once where each image belongs."
        )
    return _checked(place, Conversation(tuple(turns)), refs)


def _of_map(place: Place, named: Mapping[str, Any], messages: Sequence[Message]) -> ImageSample:
    if list(named) == [MARKER]:
        refs = [_ref(place, f"image.{MARKER}", named[MARKER])]
        return _of_markers(place, refs, messages, optional=True)
    for marker in named:
        if not _NUMBERED.fullmatch(marker):
            raise place.error(f"field 'image' has the key '{marker}', expected one like <image_00>; rename it.")
    refs = [_ref(place, f"image.{marker}", path) for marker, path in named.items()]
    numbers = {marker: number for number, marker in enumerate(named)}
    turns = []
    for message in messages:
        parts: list[str | int] = []
        for text in _NUMBERED.split(str(message["content"])):
            if _NUMBERED.fullmatch(text) and text not in numbers:
                raise place.error(f"the conversation has {text}, but field 'image' has no such key; add the image.")
            parts.append(numbers.get(text, text))
        turns.append(Turn(message["role"], tuple(parts)))
    return _checked(place, Conversation(tuple(turns), "split"), refs)


def _of_parts(place: Place, record: Record, messages: Sequence[Message]) -> ImageSample:
    given = next((field for field in IMAGE_FIELDS if record.get(field)), None)
    listed = [] if given is None else list(_refs(place, given, record[given]))
    waiting = iter(listed)
    refs: list[ImageRef] = []
    turns = []
    for at, message in enumerate(messages):
        parts: list[str | int] = []
        content = message["content"]
        for number, part in enumerate([content] if isinstance(content, str) else content):
            field = f"messages[{at}].content[{number}]"
            if isinstance(part, str):
                parts.append(part)
            elif not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
                raise place.error(f"field '{field}' is no part of type text or image; correct or remove it.")
            elif part["type"] == "text":
                if not isinstance(part.get("text"), str):
                    raise place.error(f"field '{field}.text' is missing or no string; correct the record.")
                parts.append(part["text"])
            else:
                ref = _of_part(place, field, part) or next(waiting, None)
                if ref is None:
                    raise place.error(f"field '{field}' is an image without a path; add it to the field images.")
                parts.append(len(refs))
                refs.append(ref)
        turns.append(Turn(message["role"], tuple(parts)))
    if (left := next(waiting, None)) is not None:
        raise place.error(f"field '{left.field}' names an image that no part of a turn stands for; add the part.")
    return _checked(place, Conversation(tuple(turns), "parts"), refs)


def _of_part(place: Place, field: str, part: Mapping[str, Any]) -> ImageRef | None:
    """Returns the image that a part names, or None where it only stands for one."""
    for name in _PART_FIELDS:
        if part.get(name) is not None:
            return _ref(place, f"{field}.{name}", part[name])
    return None


def _refs(place: Place, field: str, value: object) -> Iterator[ImageRef]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield _ref(place, f"{field}[{number}]", item)
    else:
        yield _ref(place, field, value)


def _ref(place: Place, field: str, value: object) -> ImageRef:
    """Returns the image that a field names: a path, an object with path or url, or one that was found before."""
    if isinstance(value, ImageRef):
        return value
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            raise place.error(f"field '{field}' has the bytes of an image, expected a path; write it to a file.")
        value = value.get("path") or value.get("url")
    if not isinstance(value, str) or not value:
        raise place.error(f"field '{field}' is no path of an image; correct the record.")
    value = value.removeprefix("file://")
    if re.match("[a-z][a-z0-9+]+:", value):
        scheme = value.partition(":")[0]
        raise place.error(
            f"field '{field}' is an image in {scheme}:, but only files are read; save it and name its path."
        )
    return ImageRef(field, value)


def _checked(place: Place, conversation: Conversation, refs: list[ImageRef]) -> ImageSample:
    """Returns the sample, once every image is in one turn of the user."""
    seen: list[int] = []
    for turn in conversation.turns:
        if turn.role == "assistant" and turn.images:
            raise place.error("a turn of the assistant has an image, which no model here writes; remove the record.")
        seen += turn.images
    for number, ref in enumerate(refs):
        times = seen.count(number)
        if times > 1 or (not times and seen):
            often = "more than once" if times else "nowhere"
            raise place.error(
                f"field '{ref.field}' names an image that stands {often} in the conversation; correct it."
            )
    if not seen and len(refs) > 1:
        raise place.error(
            f"field '{refs[0].field}' names an image that stands nowhere in the conversation; correct it."
        )
    return ImageSample(place, conversation, tuple(refs))


def prompt_sample(place: Place, record: Record, messages: Sequence[Message]) -> ImageSample:
    """Returns a prompt with its images, which stand in front of the first question where it has no markers.

    Raises:
        UserError: as for `image_sample`.
    """
    if _has_videos(record, messages):
        return image_sample(place, record, messages)
    named = next((record[field] for field in IMAGE_FIELDS if record.get(field)), None)
    by_marker = isinstance(named, Mapping) and not named.keys() & {"path", "url", "bytes"}
    marked = by_marker or any(MARKER in str(message.get("content")) for message in messages)
    if marked or any(has_parts(message) for message in messages):
        return image_sample(place, record, messages)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
    count = len(named) if isinstance(named, list) else 1
    parts = [*[{"type": "image"}] * count, {"type": "text", "text": str(messages[first]["content"])}]
    placed = [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]
    images = image_sample(place, record, placed).images
    conversation = plain_conversation(messages)
    if count > 1:  # the families themselves place one, each in its way
        turns, lines = list(conversation.turns), [part for number in range(count) for part in (number, "\n")]
        turns[first] = Turn(turns[first].role, (*lines, *turns[first].parts))
        conversation = Conversation(tuple(turns))
    return ImageSample(place, conversation, images)


def plain_conversation(messages: Sequence[Message]) -> Conversation:
    """Returns the conversation of turns that are text."""
    return Conversation(tuple(Turn(message["role"], (str(message.get("content") or ""),)) for message in messages))
