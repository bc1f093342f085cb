"""Generation over tensor and pipeline ranks: greedy tokens are those of transformers' generate, sampled ones those of
one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import import_checkpoint
from engine.inference.options import Sampling
from tests.family_models import make_model
from tests.generation import STORIES, engine_tokens, random_prompts, stock_greedy
from tests.spawning import spawn
from tests.sweeps import sampled

pytestmark = pytest.mark.distributed

LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1)]}
"""Number of ranks -> tensor and pipeline ranks."""
NAMES = ("llama fused", "mistral", "qwen3", "gemma3")
SAMPLED = {
    "plain": Sampling(temperature=0.9, seed=4),
    "filtered": Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5),
    "top-p": Sampling(temperature=1.2, top_p=0.8, seed=6),
}
PROMPTS = random_prompts(67, (5, 1, 13, 9))
NEW = 12


def _all_tokens(
    layouts: list[tuple[int, int]], stories: str, partitioned: str, families: str
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
        for name in NAMES:
            tokens[name] = engine_tokens(Path(families) / name.replace(" ", "-"), PROMPTS, NEW, **place)
        for name, sampling in SAMPLED.items():
            tokens[name] = engine_tokens(stories, STORIES, NEW, sampling=sampling, **place)
        found[tensor, pipeline] = tokens
        dist.barrier()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", sampled(LAYOUTS, [2]))
def test_every_layout_gives_the_same_tokens(world: int, stories_dir: Path, tmp_path: Path) -> None:
    models = {name: make_model(name, tmp_path / name.replace(" ", "-")) for name in NAMES}
    import_checkpoint(open_source(stories_dir), tmp_path / "base", tensor=2)
    stock = stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), STORIES, 64)
    expected = {name: stock_greedy(model, PROMPTS, NEW) for name, model in models.items()}
    expected |= {"real": stock, "partitioned": [answer[:NEW] for answer in stock]}
    expected["int8"] = engine_tokens(stories_dir, STORIES, NEW, base_dtype="int8")
    for name, sampling in SAMPLED.items():
        expected[name] = engine_tokens(stories_dir, STORIES, NEW, sampling=sampling)
    folders = (str(stories_dir), str(tmp_path / "base"), str(tmp_path))
    for rank, found in enumerate(spawn(_all_tokens, world=world, args=(LAYOUTS[world], *folders), timeout=240)):
        for layout, tokens in found.items():
            assert set(tokens) == ({"qwen3"} if layout == (4, 1) else set(expected))
            for name, answers in tokens.items():
                assert answers == expected[name], (rank, layout, name)
