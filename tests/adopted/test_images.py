"""Images of adopted models: a small model with adapters on language and tower is transformers', or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.adopted.config import adopted_config
from engine.adopted.images.placed import PlacedImages
from engine.adopted.proof import BOUND, attention_proof
from engine.adopted.run_proof import prove
from engine.choices import VISION
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.models.run_proof import AskedOfModel, RunProof
from tests.coverage.image_checks import small_with_tower
from tests.coverage.made_images import image_config_of


def _proven(model_type: str, layers: tuple[int, ...]) -> RunProof:
    """Returns the proof of a run that trains adapters on all linears, in stages of so many layers."""
    config = image_config_of(model_type)
    decoder, trained = adopted_config(config), tuple(small_with_tower(config).factors)
    assert any(name.startswith(VISION) for name in trained) and any(name.startswith("layers.") for name in trained)
    asked = AskedOfModel(trained=trained, layers=layers)
    return prove(decoder, asked, mesh=None, world=Axis("world"), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("model_type", "layers"), [("llava", (16, 16)), ("qwen3_vl_moe", (4, 20)), ("glm4v", (20, 20))]
)
def test_documents_with_images_in_two_stages_are_transformers(model_type: str, layers: tuple[int, int]) -> None:
    rows = _proven(model_type, layers).rows
    assert [row.compared for row in rows] == ["documents packed into rows", "2 stages"]
    assert all(row.worst <= BOUND for row in rows)


def test_a_stage_that_later_features_do_not_reach_is_refused() -> None:
    """The features of the third layer of a tower are added behind the third layer, so that none begins there."""
    with pytest.raises(UserError, match=r"where a stage begins at layer 3: the gradient of vision\..* differs"):
        _proven("qwen3_vl_moe", (3, 21))


@pytest.fixture
def unproven() -> Iterator[None]:
    """Forgets which attention was proven, before and after."""
    attention_proof.cache_clear()
    yield
    attention_proof.cache_clear()


def test_features_in_other_places_are_refused(unproven: None, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PlacedImages.place

    def one_token_early(self: PlacedImages, *arguments: Any) -> dict[str, Any]:
        given = place(self, *arguments)
        return {**given, "inputs_embeds": given["inputs_embeds"].roll(-1, 1)}

    monkeypatch.setattr(PlacedImages, "place", one_token_early)
    with pytest.raises(UserError, match=r"a llava model of transformers cannot be adopted: .* differs"):
        _proven("llava", (32,))


def test_positions_of_text_are_noticed(unproven: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is one document then, for which transformers' own module counts positions."""
    monkeypatch.setattr(PlacedImages, "positions", lambda *_: None)
    assert [row.compared for row in _proven("glm4v", (40,)).rows] == ["rows of one document"]
