"""Section `loader`: the time that a step waits for images that threads read from the disk, decode and cut into patches.

A step is a pause of a given length, as a GPU's is for the processor. With one thread or more the images of the next
steps are decoded meanwhile, and a step waits only where that takes longer than the step; without threads it waits for
all of it. Files are noise, which is slow to decode, and lie in the page cache from the first epoch on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from engine.data.chat import Learn
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.loader import DataLoader
from engine.data.row_shape import RowShape
from engine.telemetry.processors import available_processors
from engine.vision.data.columns import Extras, PlacedImage, VisionColumns
from engine.vision.data.family import Conversation, EncodedChat, Tiles, VisionFamily
from engine.vision.data.pixels import CLIP_MEAN, CLIP_STD, Grid, Normalisation, Size, resized
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.sections import LoaderOptions
from rankfold.benchmarking.table import Table

_PATCH, _FEATURES = 14, 64
"""Pixels of a patch's side; tokens of an image."""
_TEXT = 32
"""Tokens behind each image."""


class Squares(VisionFamily):
    """A family whose images are one square each, as OmniLMM's are.

    Args:
        side: pixels.
    """

    def __init__(self, side: int) -> None:
        self._size, self._norm = (side, side), Normalisation(CLIP_MEAN, CLIP_STD, _PATCH)
        self.patch_features = self._norm.features

    def grids(self, size: Size, *, is_only_image: bool = True) -> tuple[Grid, ...]:
        """Returns that of the square."""
        return (self._norm.grid(self._size),)

    def tiles(self, image: Image.Image, *, is_only_image: bool = True) -> Tiles:
        """Returns the image's patches."""
        return Tiles(self._norm.patches(resized(image, self._size)), self.grids(self._size))

    def encode(self, chat: Conversation, sizes: Sequence[Size], *, learn: Learn) -> Iterator[EncodedChat]:
        raise AssertionError("the documents here have no text")

    def prompt(self, chat: Conversation, sizes: Sequence[Size]) -> EncodedChat:
        raise AssertionError("the documents here have no text")


def run(options: LoaderOptions) -> Table:
    """Takes the steps with each number of threads."""
    rows, stalls = [], {}
    with tempfile.TemporaryDirectory() as folder:
        files = _write_images(Path(folder), options)
        begin = time.perf_counter()
        family = Squares(options.side)
        for file in files:
            with Image.open(file) as image:
                family.tiles(image.convert("RGB"))
        decoding = (time.perf_counter() - begin) / len(files)
        dataset = _dataset(files, options, family)
        for workers in options.worker_counts():
            stalls[workers] = _stalled(dataset, options, workers)
            rows.append((str(workers), f"{1e3 * stalls[workers] / options.steps:.1f}"))
    return Table(
        title=f"Waiting for {options.rows} images of {options.side} pixels in steps of {options.step_ms} ms",
        columns=("threads", "ms waited in a step"),
        rows=tuple(rows),
        findings=(
            f"One thread reads, decodes and cuts an image in {1e3 * decoding:.1f} ms. {available_processors()} "
            "processors. The first step, before which nothing could be decoded, is not counted.",
        ),
        machine=describe(torch.device("cpu"), ("pillow",)),
        data={"seconds stalled": stalls, "seconds for an image": decoding},
    )


def _write_images(folder: Path, options: LoaderOptions) -> list[Path]:
    generator, files = np.random.default_rng(0), []
    for number in range(options.images):
        files.append(folder / f"{number}.jpg")
        noise = generator.integers(0, 256, (options.side, options.side, 3), dtype=np.uint8)
        Image.fromarray(noise).save(files[-1], quality=90)
    return files


def _dataset(files: Sequence[Path], options: LoaderOptions, family: Squares) -> TokenDataset:
    length, size = _FEATURES + _TEXT, (options.side, options.side)
    targets = [False] * _FEATURES + [True] * _TEXT
    images = [PlacedImage(file.name, str(file.parent), str(file), size, ((0, _FEATURES),)) for file in files]
    dataset = dataset_of(
        [([1] * length, targets)] * len(files),
        seq_length=length,
        extras=[VisionColumns.of([Extras((image,)) for image in images])],
    )
    dataset.read_with(family)
    return dataset


def _stalled(dataset: TokenDataset, options: LoaderOptions, workers: int) -> float:
    """Returns the seconds that all steps but the first waited."""
    loader = DataLoader(
        dataset,
        RowShape(micro_batch_size=options.rows),
        global_batch_size=options.rows,
        seed=1,
        num_workers=workers,
    )
    with closing(loader.stream(0, options.steps + 1)) as stream:
        for _ in stream:
            time.sleep(options.step_ms / 1e3)
    return loader.stalled
