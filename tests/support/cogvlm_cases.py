"""CogVLM's fixtures as batches and models of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch, Embeddings
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.recompute import SELECTIVE, MemoryPlan
from engine.models.decoder import Decoder
from engine.models.families import family_of
from engine.models.families.family import Family
from engine.models.names import NameMap
from engine.vision.batch_parts import CrossImages, ExpertTokens, Images
from engine.vision.ops.cross_attention import Encoded, document_spans, pair_spans
from tests.distributed.cases import cut
from tests.support.vision_fixtures import VisionFixture


def family_of_fixture(data: VisionFixture) -> Family:
    return family_of(data.hf)[0]


def place_of(names: NameMap, name: str, weights: dict[str, Tensor]) -> Tensor:
    """The checkpoint's tensor behind a logical name."""
    place = names.to_hf(name)
    tensor = weights[place.name]
    return tensor if place.num_rows is None else tensor.narrow(0, place.row_offset, place.num_rows)


def fill(entries: Iterable[ShardEntry], names: NameMap, weights: dict[str, Tensor]) -> None:
    for entry in entries:
        if ".lora_" not in entry.name:
            entry.parameter.data.copy_(cut(place_of(names, entry.name, weights), entry.spec))


def plan_of(trained: str, adapters: str = "", fused: str = "", settings: AdapterSettings | None = None) -> TrainingPlan:
    return TrainingPlan(
        trains=lambda module: re.fullmatch(trained, module) is not None,
        adapter=lambda module: settings if re.fullmatch(adapters, module) else None,
        fused=lambda module: re.fullmatch(fused, module) is not None,
    )


def model_of(
    data: VisionFixture,
    plan: TrainingPlan,
    *,
    layout: TensorLayout | None = None,
    memory: MemoryPlan = SELECTIVE,
) -> Decoder:
    family, text = family_of(data.hf)
    model = Decoder(
        family.config_from_hf(text),
        layout=layout or TensorLayout(),
        plan=plan,
        device=torch.device("cpu"),
        dtype=torch.float32,
        memory=memory,
    )
    fill(shard_entries(model), family.names, data.weights)
    return model


def experts_of(data: VisionFixture, case: str) -> ExpertTokens:
    """By the rule: the vision expert's are tokens of images that are followed by one."""
    types = data.inputs[f"{case}.token_type_ids"]
    following = torch.cat((types[:, 1:], torch.zeros_like(types[:, :1])), dim=1)
    mask = ((types == 1) & (following == 1)).flatten()
    if (stored := data.expected.get(f"{case}.vision_expert_mask")) is not None:
        assert torch.equal(mask, stored.flatten())
    return ExpertTokens(vision_V=mask.nonzero()[:, 0], language_L=(~mask).nonzero()[:, 0])


def batch_of(data: VisionFixture, case: str, *, merged: bool = False) -> Batch:
    """A case's rows, each a document; with its images, or with embeddings that have their features already."""
    ids, labels = data.inputs[f"{case}.input_ids"], data.inputs[f"{case}.labels"]
    shifted = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_LABEL)), dim=1)
    rows, length = ids.shape
    patch = data.hf["vision_config"]["patch_size"]
    embeddings = Embeddings(embeddings_TH=data.expected[f"{case}.inputs_embeds"].flatten(0, 1)) if merged else None
    images = None
    if not merged and data.images(case):
        patches, grids = data.patches(case, patch)
        places = (data.inputs[f"{case}.token_type_ids"].flatten() == 1).nonzero()[:, 0]
        images = Images(patches_PF=patches, grids=grids, documents=tuple(range(len(grids))), places_K=places)
    return Batch(
        tokens_BS=ids,
        labels_BS=shifted,
        positions_BS=data.expected[f"{case}.position_ids"],
        token_index_BS=torch.arange(rows * length).view(rows, length),
        loss_weights_BS=(shifted != IGNORE_LABEL).float(),
        document_offsets=torch.arange(0, rows * length + 1, length, dtype=torch.int32),
        document_lengths=(length,) * rows,
    ).with_parts(embeddings, images, None if merged else _cross_images(data, case), experts_of(data, case))


def _cross_images(data: VisionFixture, case: str) -> CrossImages | None:
    if "fixture_cross_vision" not in data.hf:
        return None
    patches, grids = data.patches(case, data.hf["fixture_cross_vision"]["patch_size"], "cross_images")
    nowhere = torch.empty(0, dtype=torch.int64)
    return CrossImages(patches_PF=patches, grids=grids, documents=tuple(range(len(grids))), places_K=nowhere)


def encoded_of(data: VisionFixture, case: str) -> Encoded | None:
    """What CogAgent's layers attend to, as the original had it."""
    if f"{case}.cross_vision" not in data.expected:
        return None
    features = data.expected[f"{case}.cross_vision"].flatten(0, 1)
    rows, length = data.inputs[f"{case}.input_ids"].shape
    per_image = features.shape[0] // rows
    spans = pair_spans(document_spans((length,) * rows), tuple(range(rows)), (per_image,) * rows)
    return Encoded(features, spans)
