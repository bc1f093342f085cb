"""Images that mean nothing, for steps on made-up tokens: towers and vision experts run as they will on real ones.

One tile of the size that the model's family cuts most images into stands at the beginning of each row, where its
features fit. Tiles of other sizes, and what a first step on them costs, are left to the data.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import Batch, ExpertTokens, Images
from engine.models.decoder_config import DecoderConfig
from engine.vision.data.row_images import held_experts, held_images
from engine.vision.layers.encoder import VisionConfig
from engine.zigzag import rank_columns


def with_made_up_images(batch: Batch, decoder: DecoderConfig, *, context_size: int, context_rank: int) -> Batch:
    """Returns the batch, of full rows of documents of one length, with a tile in the first document of each row; for a
    model of text alone, as it is.

    Args:
        batch: on the CPU, this rank's columns of each row.
        decoder: of the model.
        context_size, context_rank: this rank's place among those that hold parts of each row.
    """
    rows, length = batch.num_rows, batch.row_length * context_size
    vision, cross = decoder.vision, decoder.cross_attention
    documents = tuple(range(0, len(batch.document_lengths), len(batch.document_lengths) // rows))
    places = torch.empty(0, dtype=torch.int64)
    images = cross_images = experts = None
    if vision is not None:
        count = vision.num_features(vision.usual_tile)
        fits = count < length  # the first token is in front of an image
        if fits:
            places = torch.cat([torch.arange(row * length + 1, row * length + 1 + count) for row in range(rows)])
        images = _tiles(vision, documents if fits else (), places)
    if cross is not None:
        cross_images = _tiles(cross.encoder, documents, places[:0])
    if decoder.token_experts:
        is_language = torch.ones(rows * length, dtype=torch.bool)
        is_language[places] = False
        experts = ExpertTokens(vision_V=places, language_L=is_language.nonzero()[:, 0])
    if context_size > 1:
        columns = torch.cat([torch.arange(*span) for span in rank_columns(length, context_size, context_rank)])
        images = None if images is None else held_images(images, columns, length)
        experts = None if experts is None else held_experts(experts, columns, length)
    return replace(batch, images=images, cross_images=cross_images, experts=experts)


def _tiles(config: VisionConfig, documents: tuple[int, ...], places_K: Tensor) -> Images:
    """Makes a tile for each of these documents."""
    (rows, columns), count = config.usual_tile, len(documents)
    return Images(
        patches_PF=torch.zeros(count * rows * columns, config.patch_features),
        grids=(config.usual_tile,) * count,
        documents=documents,
        places_K=places_K,
        tile_index_N=torch.arange(count),
    )
