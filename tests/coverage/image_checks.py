"""What is run of each type that sees images: documents with images, adapters on the language and on its tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.adopted.config import adopted_config
from engine.adopted.forms import small_record
from engine.adopted.proof import Difference, Small, Trained, computed, difference, reference, small_of
from engine.adopted.run_proof import prove
from engine.adopted.structure import FAULTS, first_line, sees_images
from engine.choices import VISION
from engine.distributed.mesh import Axis, build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.storage import WeightPlacement
from engine.models.run_proof import AskedOfModel
from tests.coverage.checks import PACKED, SINGLE, Result, in_one_piece, tried
from tests.coverage.made_images import image_config_of


def images_in_one_process(model_type: str) -> Result:
    """Runs what one process shows; returns what was found, or under "refused" or "failed" a sentence."""
    try:
        config = small_record(image_config_of(model_type))
        if not sees_images(config):
            return {"refused": "its default config has no vision_config, and is read as a language model's"}
        small = small_with_tower(config)
    except UserError as error:
        return {"refused": str(error)}
    except FAULTS as error:  # transformers' own config class
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}
    found, _, wanted = in_one_piece(config, small)
    found["tower"] = sum(bool(wanted.gradients[name].any()) for name in small.factors if name.startswith(VISION))
    found["stages"] = tried(lambda: _in_two_stages(model_type, small))
    return found


def _in_two_stages(model_type: str, small: Small) -> Difference:
    """Returns what the start of a run finds of a model in two stages of as many layers."""
    decoder = adopted_config(image_config_of(model_type))
    half = decoder.num_layers // 2
    asked = AskedOfModel(trained=tuple(small.factors), layers=(half, decoder.num_layers - half))
    row = prove(decoder, asked, mesh=None, world=Axis("world"), device=torch.device("cpu")).rows[-1]
    return Difference(row.figure, row.worst)


def images_on_spread_weights(model_type: str) -> Result:
    """Runs a rank of two that have a part of the weights each; collective."""
    mesh = build_mesh(RankGrid(dp=2), device_type="cpu", num_kv_heads=2)

    def compare() -> Difference:
        small = small_with_tower(small_record(image_config_of(model_type)))
        batch = small.batch(PACKED if small.config.keeps_documents_apart else SINGLE)
        spread = WeightPlacement(mesh.dp_cp, expert_axis=mesh.edp)
        assert spread.is_sharded
        return difference(computed(small.parts(spread=spread), batch), reference(small, batch))

    return {"spread": tried(compare)}


def small_with_tower(config: dict[str, Any]) -> Small:
    """Returns a small model with adapters on all linears that have any, of the language and around it."""
    decoder = adopted_config(config)
    language = small_of(config)
    names = {name.rpartition(".")[0] for name in language.factors} | set(decoder.vision_linears())
    small = small_of(config, Trained.of(f"{name}.lora_A" for name in names))
    return replace(small, config=replace(small.config, attention=decoder.attention))
