"""Ranks that share the tiles of a micro-batch each decode the images of their own share, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from engine.batch import Batch, InputRank
from engine.config.model import ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.runtime.launch import Launch
from engine.training.row_shape import shape_of_launch
from engine.vision.batch_parts import CrossImages, Images
from engine.vision.data import row_images as row_images
from engine.vision.data.columns import VisionColumns
from engine.vision.tile_shares import deal_out
from tests.unit.test_vision_data_rows import batch_of, cogvlm, minicpm, minicpm_records


def images_of_many_tiles(tmp_path: Path) -> TokenDataset:
    """Four images of 1, 3, 5 and 1 tiles, in rows of one, two and one."""
    sizes = {"one.png": (40, 40), "three.png": (80, 40), "five.png": (120, 80), "small.png": (20, 20)}
    for number, (name, size) in enumerate(sizes.items()):
        noise = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(noise.to(torch.uint8).numpy()).save(tmp_path / name)
    answer = {"role": "assistant", "content": "He."}
    images: list[Any] = ["one.png", {"<image_00>": "three.png", "<image_01>": "five.png"}, "small.png"]
    texts = ["Who?", "<image_00> or <image_01>?", "Who?"]
    return minicpm(
        tmp_path,
        records=[
            {"image": image, "conversations": [{"role": "user", "content": text}, answer]}
            for image, text in zip(images, texts, strict=True)
        ],
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded from now on."""
    read, names = row_images.read_image, list[str]()

    def counted(path: Path, *arguments: Any, **options: Any) -> Any:
        names.append(path.name)
        return read(path, *arguments, **options)

    monkeypatch.setattr(row_images, "read_image", counted)
    return names


def require_shares(whole: Images, parts: list[Images]) -> None:
    """Each rank has the patches of its share, bit by bit, and knows all else."""
    for part, share in zip(parts, deal_out(whole.grids, len(parts)), strict=True):
        assert part.first_patch == share.patches.start
        assert torch.equal(part.patches_PF, whole.patches_PF[share.patches])
        assert part.grids == whole.grids and part.documents == whole.documents
        assert torch.equal(part.tile_index_N, whole.tile_index_N) and torch.equal(part.places_K, whole.places_K)


@pytest.mark.parametrize("ranks", [2, 3, 11])
def test_each_rank_decodes_the_images_of_its_share(ranks: int, tmp_path: Path, decoded: list[str]) -> None:
    """Broken on purpose: decoding all, one image beside the share, patches one further, and grids of own tiles alone
    each fail here."""
    dataset = images_of_many_tiles(tmp_path)
    rows = list(range(len(dataset)))
    whole = batch_of(dataset, rows).part(Images)
    assert whole is not None and len(decoded) == 4
    assert len(whole.grids) == len(whole.documents) == 10
    assert len(whole.patches_PF) == sum(grid[0] * grid[1] for grid in whole.grids)
    names = list(decoded)
    tiles_of = [name for name, count in zip(names, (1, 3, 5, 1), strict=True) for _ in range(count)]
    parts = []
    for rank, share in enumerate(deal_out(whole.grids, ranks)):
        decoded.clear()
        part = batch_of(dataset, rows, input_rank=InputRank(rank, ranks)).part(Images)
        assert part is not None
        parts.append(part)
        assert decoded == list(dict.fromkeys(tiles_of[share.tiles]))
    require_shares(whole, parts)


def test_two_towers_share_alike(tmp_path: Path, decoded: list[str]) -> None:
    dataset = cogvlm("cogagent", tmp_path, packing=False)
    rows = [0, 0, 0]
    whole = batch_of(dataset, rows)
    found: list[Batch] = []
    for rank in range(4):
        decoded.clear()
        found.append(batch_of(dataset, rows, input_rank=InputRank(rank, 4)))
        has_tiles = found[-1].part(Images) is not None and len(found[-1].part(Images).patches_PF) > 0
        assert len(decoded) == has_tiles  # rows of one image
    for tower in (Images, CrossImages):
        require_shares(whole.part(tower), [one.part(tower) for one in found])


def test_ranks_that_encode_nothing_decode_nothing(tmp_path: Path, decoded: list[str]) -> None:
    dataset = cogvlm("cogagent", tmp_path, packing=False)
    whole, found = batch_of(dataset, [0, 0]), batch_of(dataset, [0, 0], input_rank=InputRank(None, 2))
    assert len(decoded) == 1
    for own, all_of_it in (
        (found.part(Images), whole.part(Images)),
        (found.part(CrossImages), whole.part(CrossImages)),
    ):
        assert own is not None and all_of_it is not None
        assert own.patches_PF.shape == (0, all_of_it.patches_PF.shape[1]) and own.grids == all_of_it.grids


def test_a_image_that_changed_is_refused_where_it_is_decoded(tmp_path: Path) -> None:
    dataset = minicpm(tmp_path, records=minicpm_records()[:2])
    first, second = (InputRank(rank, 2) for rank in range(2))
    whole = batch_of(dataset, [0, 1]).part(Images)
    assert whole is not None
    assert dataset.extra(VisionColumns) is not None
    (image,) = dataset.extra(VisionColumns).images(1)
    Image.new("RGB", (41, 30)).save(image.file)
    with pytest.raises(UserError, match=r"line 2: field 'image' names .* is 41 x 30 now"):
        batch_of(dataset, [0, 1], input_rank=second)
    assert batch_of(dataset, [0, 1], input_rank=first).part(Images) is not None


def test_the_loaders_place_is_that_of_the_mesh() -> None:
    """As the encoder counts: tensor rank by tensor rank of each context rank; later pipeline ranks have no tower."""
    grid = RankGrid(pp=2, dp=2, cp=3, tp=2)
    config = RunConfig(model=ModelOptions(path="x"), parallel=ParallelOptions(tensor=2, context=3, pipeline=2))
    for rank in range(grid.world_size):
        place = grid.coordinates(rank)
        found = shape_of_launch(config, Launch(rank=rank, world_size=grid.world_size, device=torch.device("cpu")))
        assert found.input_rank == InputRank(None if place["pp"] else 2 * place["cp"] + place["tp"], 6)
        assert (found.data_rank, found.context_rank) == (place["dp"], place["cp"])
