"""Prompts of a run that are no records: messages of a user, each with an image or without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.data.record_files import Place
from engine.vision.data.columns import PlacedImage
from engine.vision.data.family import VisionFamily
from engine.vision.data.reader import ImageReader
from engine.vision.data.records import ImageSample, plain_conversation, prompt_sample


def sample_conversation(
    family: VisionFamily, folder: str | None, text: str, image: str, number: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Returns the tokens of one of train.sample_prompts, as the model's family writes a user's message, and its images.

    Args:
        folder: data.image_folder.
        image: path of its image; empty without one.
        number: of the prompt.

    Raises:
        UserError: the image cannot be read, or the model needs one.
    """
    place, messages = Place(Path("train.sample_prompts"), "number", number), [{"role": "user", "content": text}]
    sample = ImageSample(place, plain_conversation(messages), ())
    if image:
        sample = prompt_sample(place, {"images": [image]}, messages)
        named = tuple(replace(image, option="train.sample_images") for image in sample.images)
        sample = replace(sample, images=named)
    ids, images = ImageReader(family, folder).prompt(sample)
    return list(ids), images
