"""The micro-batch that a piece of a model is traced with, on the meta device: full rows of documents of one length, and
as many tiles of images as the workload has."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch import Batch
from engine.planning.rank_layout import Workload
from engine.vision.batch_parts import BidirectionalSpans, CrossImages, ExpertTokens, GridPositions, Images
from engine.vision.tile_shares import deal_out
from engine.zigzag import ContextLayout, make_plan, rank_columns

META = torch.device("meta")


def batch(workload: Workload, ranks: int) -> Batch:
    """Makes full rows of documents of one length, the last of a row as long as fits; for the first context rank."""
    rows, length, document = workload.micro_batch, workload.seq_length, workload.document_length
    rest = (length % document,) if length % document else ()
    lengths = ((document,) * (length // document) + rest) * rows
    whole = ContextLayout(size=ranks, num_rows=rows, row_length=length, document_lengths=lengths)
    shape = rows, sum(span.length for span in rank_columns(length, ranks, 0))
    numbers, weights = (torch.empty(shape, dtype=dtype, device=META) for dtype in (torch.int64, torch.float32))
    return Batch(
        tokens_BS=numbers,
        labels_BS=numbers,
        positions_BS=numbers,
        token_index_BS=numbers,
        loss_weights_BS=weights,
        document_offsets=torch.empty(len(lengths) + 1, dtype=torch.int32, device=META),
        document_lengths=lengths,
        context_plan=make_plan(whole, 0) if ranks > 1 else None,
    ).with_parts(
        _experts(workload, shape[0] * shape[1], ranks),
        images(workload, len(lengths)),
        cross_images(workload, len(lengths)),
        _bidirectional(workload, lengths),
        _grid_positions(workload, shape),
    )


def _experts(workload: Workload, num_tokens: int, ranks: int) -> ExpertTokens | None:
    """Gives the vision expert as many tokens as the images have features, spread over context ranks."""
    vision = workload.decoder.vision
    if not workload.decoder.token_experts or vision is None:
        return None
    count = min(sum(map(vision.num_features, workload.tiles)) // ranks, num_tokens)
    of_vision, of_language = (torch.empty(each, dtype=torch.int64, device=META) for each in (count, num_tokens - count))
    return ExpertTokens(vision_V=of_vision, language_L=of_language)


def _grid_positions(workload: Workload, shape: tuple[int, int]) -> GridPositions | None:
    if not workload.decoder.rope_axes or not workload.tiles:
        return None
    return GridPositions(positions_3BS=torch.empty(3, *shape, dtype=torch.int64, device=META))


def images(workload: Workload, num_documents: int) -> Images | None:
    """Makes the patches of the workload's tiles, whose features stand at the first tokens."""
    vision = workload.decoder.vision
    if vision is None:
        return None
    features = sum(map(vision.num_features, workload.tiles))
    patches = sum(grid[0] * grid[1] for grid in workload.tiles)
    return Images(
        patches_PF=torch.empty(patches, vision.patch_features, device=META),
        grids=workload.tiles,
        documents=_documents(len(workload.tiles), num_documents),
        places_K=torch.empty(features, dtype=torch.int64, device=META),
        tile_index_N=torch.empty(len(workload.tiles), dtype=torch.int64, device=META),
    )


def pixels(images: Images, ranks: int) -> int:
    """Returns the bytes of the largest share of the patches."""
    most = max(share.patches.stop - share.patches.start for share in deal_out(images.grids, ranks))
    return most * images.patches_PF[:1].nbytes


def cross_images(workload: Workload, num_documents: int) -> CrossImages | None:
    """Makes the patches of the same images for the encoder that layers attend to."""
    sizes = workload.decoder.cross_attention
    if sizes is None:
        return None
    rows, columns = sizes.encoder.usual_tile
    count = len(workload.tiles)
    return CrossImages(
        patches_PF=torch.empty(count * rows * columns, sizes.encoder.patch_features, device=META),
        grids=((rows, columns),) * count,
        documents=_documents(count, num_documents),
        places_K=torch.empty(0, dtype=torch.int64, device=META),
        tile_index_N=torch.empty(count, dtype=torch.int64, device=META),
    )


def _documents(num_images: int, num_documents: int) -> tuple[int, ...]:
    """Deals images out to documents, in order."""
    return tuple(image * num_documents // num_images for image in range(num_images))


def encoded_shape(workload: Workload) -> tuple[int, int]:
    """Returns the encoded rows of a micro-batch, and their width; of an image a tile, as models with such have it."""
    sizes = workload.decoder.cross_attention
    if sizes is None:
        return 0, 0
    return len(workload.tiles) * sizes.encoder.num_features(sizes.encoder.usual_tile), sizes.encoded


def _bidirectional(workload: Workload, document_lengths: tuple[int, ...]) -> BidirectionalSpans | None:
    """Makes a span of each tile, as many in a document as fit there; of the device's tensors, the shapes."""
    decoder, spans, start = workload.decoder, list[tuple[int, int]](), 0
    if decoder.vision is None or not decoder.bidirectional_images:
        return None
    left = [decoder.vision.num_features(tile) for tile in workload.tiles]
    for length in document_lengths:
        at = start
        while left and at + left[0] <= start + length:
            spans.append((at, at + left[0]))
            at += left.pop(0)
        start += length
    found = BidirectionalSpans.of(spans)
    if found is None:
        return None
    return replace(found, earlier_N=found.earlier_N.to(META), offsets=found.offsets.to(META))
