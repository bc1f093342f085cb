"""Images that mean nothing, for steps on made-up tokens: towers and vision experts run as they will on real ones.

One tile of the size that the model's family cuts most images into stands at the beginning of each row, where its
features fit. Tiles of other sizes, and what a first step on them costs, are left to the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.models.decoder_config import DecoderConfig
from engine.vision.batch_parts import CrossImages, ExpertTokens, Images
from engine.vision.layers.encoder import VisionConfig
from engine.vision.layers.fronts import ImageEncoder, ImageTower
from engine.vision.layers.token_experts import TokenExperts
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
    tower, encoder = decoder.front(ImageTower), decoder.front(ImageEncoder)
    documents = tuple(range(0, len(batch.document_lengths), len(batch.document_lengths) // rows))
    places = torch.empty(0, dtype=torch.int64)
    parts: list[Images | ExpertTokens] = []
    if tower is not None:
        count = tower.num_features(tower.usual_tile)
        fits = count < length  # the first token is in front of an image
        if fits:
            places = torch.cat([torch.arange(row * length + 1, row * length + 1 + count) for row in range(rows)])
        parts.append(_tiles(Images, tower.model, documents if fits else (), places))
    if encoder is not None:
        parts.append(_tiles(CrossImages, encoder.model, documents, places[:0]))
    if decoder.variant(TokenExperts) is not None:
        parts.append(ExpertTokens.of(places, rows * length))
    if context_size > 1:
        columns = torch.cat([torch.arange(*span) for span in rank_columns(length, context_size, context_rank)])
        parts = [part.columns(columns, length) for part in parts]
    return batch.with_parts(*parts)


def _tiles(kind: type[Images], config: VisionConfig, documents: tuple[int, ...], places_K: Tensor) -> Images:
    """Makes a tile for each of these documents."""
    (rows, columns), count = config.usual_tile, len(documents)
    return kind(
        patches_PF=torch.zeros(count * rows * columns, config.patch_features),
        grids=(config.usual_tile,) * count,
        documents=documents,
        places_K=places_K,
        tile_index_N=torch.arange(count),
    )
