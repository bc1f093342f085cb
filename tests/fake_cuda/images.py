"""Images that mean nothing in documents and prompts that have room for one, by arrays of the host, as a loader's
threads make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, BatchPart
from engine.data.collate import pin
from engine.inference.prompt_coordinates import PromptCoordinates
from engine.models.decoder_config import DecoderConfig
from engine.spans import Span
from engine.vision.batch_parts import BidirectionalSpans, CrossImages, ExpertTokens, GridPositions, Images
from engine.vision.layers.encoder import VisionConfig
from engine.vision.layers.fronts import ImageEncoder, ImageTower
from engine.vision.layers.token_experts import TokenExperts


def with_images(batch: Batch, decoder: DecoderConfig) -> Batch:
    """Gives every second document that has room an image."""
    found = _in_documents(batch.document_lengths, decoder, every=2)
    if decoder.rope_axes:
        found.append(GridPositions(positions_3BS=batch.positions_BS.repeat(3, 1, 1)))
    return pin(batch.with_parts(*found))


def prompts_with_images(decoder: DecoderConfig) -> tuple[list[list[int]], PromptCoordinates]:
    """Returns the tokens of two prompts, the first with an image, where the model takes any."""
    count = decoder.fronts[0].num_features(decoder.fronts[0].usual_tile) if decoder.fronts else 0
    # where layers attend to images, each prompt has one
    lengths = [count + 3, count + 3 if decoder.needs_images else 2]
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
    found = _in_documents(lengths, decoder, every=1) if decoder.fronts else []
    if decoder.rope_axes:
        found.append(GridPositions(positions_3BS=positions.repeat(3, 1, 1)))
    coordinates = PromptCoordinates(positions_T=positions, next_positions=tuple(lengths), parts=tuple(found))
    return [[1] * length for length in lengths], coordinates


def _in_documents(lengths: Sequence[int], decoder: DecoderConfig, *, every: int) -> list[BatchPart]:
    """Returns what a batch has of the images in every so many documents."""
    tower, encoder = decoder.front(ImageTower), decoder.front(ImageEncoder)
    assert tower is not None
    count, start = tower.num_features(tower.usual_tile), 0
    spans, documents = list[Span](), list[int]()
    for number, length in enumerate(lengths):
        if length > count + 2 and number % every == 0:
            spans.append(Span(start + 1, start + 1 + count))
            documents.append(number)
        start += length
    assert spans, "no document has room"
    places = np.concatenate([np.arange(*span) for span in spans])
    found: list[BatchPart] = [_images(Images, tower.model, documents, places)]
    if encoder is not None:
        found.append(_images(CrossImages, encoder.model, documents, places[:0]))
    if decoder.variant(TokenExperts) is not None:
        language = np.setdiff1d(np.arange(start), places)
        found.append(ExpertTokens(vision_V=torch.from_numpy(places), language_L=torch.from_numpy(language)))
    if decoder.attention_kind(0).bidirectional:
        earlier = np.concatenate([np.arange(stop - 2, first - 1, -1) for first, stop in spans])
        found.append(
            BidirectionalSpans(
                spans=tuple(spans),
                earlier_N=torch.from_numpy(earlier),
                offsets=torch.from_numpy(np.arange(len(spans) + 1, dtype=np.int32) * (count - 1)),
            )
        )
    return found


def _images(kind: type[Images], tower: VisionConfig, documents: Sequence[int], places: NDArray[np.int64]) -> Images:
    rows, columns, *_ = tower.usual_tile
    patches = np.zeros((len(documents) * rows * columns, tower.patch_features), np.float32)
    return kind(
        patches_PF=torch.from_numpy(patches),
        grids=(tower.usual_tile,) * len(documents),
        documents=tuple(documents),
        places_K=torch.from_numpy(places),
        tile_index_N=torch.from_numpy(np.arange(len(documents))),
    )
