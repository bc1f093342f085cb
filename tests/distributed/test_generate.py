"""Generation over tensor and pipeline ranks: greedy tokens are those of transformers' generate, sampled ones those of
one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import import_checkpoint
from engine.errors import UserError
from engine.inference.options import ModelChoice, Sampling
from engine.layers.module import shard_entries
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from tests.support.family_models import make_model
from tests.support.generation import STORIES, engine_tokens, random_prompts, stock_greedy
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1)]}
"""Number of ranks -> tensor and pipeline ranks."""
NAMES = ("llama fused", "mistral", "qwen3", "gemma3", "gemma4 small", "qwen3.5", "falcon h1 with norms")
QUICK_NAMES = ("gemma3", "qwen3.5")
SAMPLED = {
    "plain": Sampling(temperature=0.9, seed=4),
    "filtered": Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5),
    "top-p": Sampling(temperature=1.2, top_p=0.8, seed=6),
}
PROMPTS = random_prompts(67, (5, 1, 13, 9))
NEW = 12


def _all_tokens(
    layouts: list[tuple[int, int]], names: tuple[str, ...], stories: str, partitioned: str, families: str
) -> dict[tuple[int, int], dict[str, list[list[int]]]]:
    """By layout, then by what was run: greedy on the real weights and on the families, and sampled."""
    found = {}
    for tensor, pipeline in layouts:
        place = {"tensor": tensor, "pipeline": pipeline}
        tokens = {}
        if tensor == 4:  # more ranks than key/value heads
            tokens["qwen3"] = engine_tokens(Path(families) / "qwen3", PROMPTS, NEW, **place)
            found[tensor, pipeline] = tokens
            continue
        tokens["real"] = engine_tokens(stories, STORIES, 64, slots=4, **place)
        tokens["partitioned"] = engine_tokens(partitioned, STORIES, NEW, slots=2, **place)
        tokens["int8"] = engine_tokens(stories, STORIES, NEW, slots=2, base_dtype="int8", **place)
        for name in names:
            tokens[name] = engine_tokens(Path(families) / name.replace(" ", "-"), PROMPTS, NEW, **place)
        for name, sampling in SAMPLED.items():
            tokens[name] = engine_tokens(stories, STORIES, NEW, sampling=sampling, **place)
        found[tensor, pipeline] = tokens
        dist.barrier()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "names"), sampled([*((world, NAMES) for world in LAYOUTS), (2, QUICK_NAMES)], [(2, QUICK_NAMES)])
)
def test_every_layout_gives_the_same_tokens(
    world: int, names: tuple[str, ...], stories_dir: Path, tmp_path: Path
) -> None:
    models = {name: make_model(name, tmp_path / name.replace(" ", "-")) for name in names}
    import_checkpoint(open_source(stories_dir), tmp_path / "base", tensor=2)
    stock = stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), STORIES, 64)
    expected = {name: stock_greedy(model, PROMPTS, NEW) for name, model in models.items()}
    expected |= {"real": stock, "partitioned": [answer[:NEW] for answer in stock]}
    expected["int8"] = engine_tokens(stories_dir, STORIES, NEW, base_dtype="int8")
    for name, sampling in SAMPLED.items():
        expected[name] = engine_tokens(stories_dir, STORIES, NEW, sampling=sampling)
    args = (LAYOUTS[world], names, str(stories_dir), str(tmp_path / "base"), str(tmp_path))
    for rank, found in enumerate(spawn(_all_tokens, world=world, args=args, timeout=240)):
        for layout, tokens in found.items():
            assert set(tokens) == ({"qwen3"} if layout == (4, 1) else set(expected))
            for name, answers in tokens.items():
                assert answers == expected[name], (rank, layout, name)


MIXTURES = ("qwen3 moe", "gpt oss", "deepseek v3")
EXPERT_LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"tensor": 2}, {"tensor": 2, "expert": 2}],
    4: [{"tensor": 4, "expert": 2}, {"tensor": 2, "pipeline": 2, "expert": 2}],
}
"""Number of ranks -> how they share the layers and the experts."""


def _num_experts(folder: str, place: dict[str, int]) -> int:
    """Returns the number of experts that a layer has on this rank."""
    launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    opened = open_for_generation(ModelChoice(path=Path(folder), **place), launch, Log(1))
    names = [entry.name for entry in shard_entries(opened.decoder.layers[-1])]
    return len({name.split(".experts.")[1].split(".")[0] for name in names if ".experts." in name})


def _mixture_tokens(layouts: list[dict[str, int]], folders: dict[str, str]) -> list[dict[str, list[list[int]]]]:
    found = []
    for place in layouts:
        if place["tensor"] < 4:
            assert _num_experts(folders["qwen3 moe"], place) == 6 // place.get("expert", 1)
        fit = {name: folder for name, folder in folders.items() if place["tensor"] < 4 or name == "deepseek v3"}
        found.append({name: engine_tokens(folder, PROMPTS, NEW, **place) for name, folder in fit.items()})
        dist.barrier()
    return found


@pytest.mark.parametrize("world", sampled(EXPERT_LAYOUTS, [2]))
def test_mixtures_with_experts_cut_and_divided_give_transformers_tokens(world: int, tmp_path: Path) -> None:
    """There are four prompts, so that ranks with tokens of their own have a few each, and one at the end."""
    experts = {"qwen3 moe": {"num_experts": 6}, "gpt oss": {"num_local_experts": 6}, "deepseek v3": {}}
    folders = {name: tmp_path / str(number) for number, name in enumerate(MIXTURES)}
    models = {name: make_model(name, folder, **experts[name]) for name, folder in folders.items()}
    expected = {name: stock_greedy(model, PROMPTS, NEW) for name, model in models.items()}
    places = {name: str(folder) for name, folder in folders.items()}
    for found in spawn(_mixture_tokens, world=world, args=(EXPERT_LAYOUTS[world], places), timeout=240):
        for layout, tokens in zip(EXPERT_LAYOUTS[world], found, strict=True):
            assert tokens, layout
            for name, answers in tokens.items():
                assert answers == expected[name], (layout, name)


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_model("qwen3 moe", tmp_path / "mixture")
    make_model("mixtral", tmp_path / "odd")
    make_model("qwen3", tmp_path / "dense")
    for folder, world, place, words in (
        ("mixture", 3, {"expert": 2}, "--expert is 2, but there are 3 tensor ranks"),
        ("odd", 2, {"expert": 2}, "does not divide the model's 5 experts"),
        ("dense", 2, {"expert": 2}, "has no experts that a router chooses"),
        ("mixture", 1, {"expert": 0}, "--expert is 0, but at least 1"),
    ):
        with pytest.raises(UserError, match=words):
            choice = ModelChoice(path=tmp_path / folder, **place)
            open_for_generation(choice, Launch(rank=0, world_size=world, device=torch.device("cpu")), Log(1))
