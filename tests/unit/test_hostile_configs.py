"""Sizes of config.json that no model has, of every family: one sentence, or a description that takes little memory and
time; never an error of another kind."""

from __future__ import annotations

import copy
import json
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from engine.models.describe import parameter_specs
from engine.models.families import family_of
from engine.models.families.checking import check_kinds
from engine.size_limits import check_sizes
from tests.support import family_models, family_table, gemma_images, qwen_vl, stock_vision
from tests.support.shared_data import shared
from tests.support.sweeps import sampled
from tests.support.vision_data import read_json
from tests.wrong_inputs.workplace import Workplace, check_refused, make_place, run_here

VALUES: tuple[Any, ...] = (10**6, 10**9, 10**18, -1, 0, 1.5, "x", True, [], {}, None)
SECONDS, BYTES = 5, 300 << 20
FIXTURES = ("minicpm-v-2", "minicpm-v-2_6", "cogvlm2", "cogvlm-v1", "cogagent", "omnilmm")
STOCK = ("llava", "internvl", "llava_next", "llava_onevision")
MODELS = (*family_table.FAMILIES, *STOCK, *qwen_vl.KINDS, "gemma3 with images", *FIXTURES)
QUICK = ("qwen3 moe", "minicpm-v-2_6")

Key = tuple[str | int, ...]


def config_of(name: str, folder: Path) -> dict[str, Any]:
    if name in FIXTURES:
        return dict(read_json(name, "config.json"))
    if name == "gemma3 with images":
        gemma_images.make_folder(folder)
    elif name in qwen_vl.KINDS:
        qwen_vl.make_model(name, folder)
    else:
        (stock_vision if name in STOCK else family_models).make_model(name, folder)
    return dict(json.loads((folder / "config.json").read_text()))


def keys(part: Any, place: Key = ()) -> Iterator[Key]:
    """The places of all numbers, and of the lists and mappings around them."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, dict | list):
            yield (*place, key)
            yield from keys(value, (*place, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*place, key)


def changed(config: dict[str, Any], place: Key, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    part: Any = found
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return found


def describe(config: dict[str, Any]) -> None:
    """What every command does with a config before it looks at tensors."""
    family, text = family_of(config)
    parameter_specs(family.config_from_hf(text), tensor_rank=0, tensor_size=1)


@pytest.fixture
def _bounded() -> Iterator[None]:
    """Little more memory than the process has now; too much raises MemoryError, or torch's error."""

    def late(*_: object) -> None:
        raise AssertionError("it takes too long")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, handler)


def check_all(config: dict[str, Any], places: list[Key]) -> None:
    describe(config)
    for place in places:
        for value in VALUES:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            try:
                describe(changed(config, place, value))
            except UserError as refused:
                assert str(refused).endswith((".", "?")) and len(str(refused)) < 700
            except Exception as error:
                raise AssertionError(f"{place} {value!r}") from error


@pytest.mark.parametrize("name", sampled(MODELS, QUICK))
def test_every_number_may_be_anything(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in FIXTURES:
        shared("vision")
    config = config_of(name, tmp_path)
    describe(config)  # what is imported on the way is not counted
    request.getfixturevalue("_bounded")
    check_all(config, list(keys(config)))


def set_model(place: Workplace, init: str, **changes: Any) -> None:
    place.change_config(**changes)
    place.options["model.init"] = init


TOO_LARGE = {"hidden_size": 1 << 17, "vocab_size": 1 << 24, "num_attention_heads": 1 << 10}
COMMANDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "wide heads": ({"head_dim": 10**9}, "checkpoint", "head_dim 1000000000, but at most 4,096"),
    "wide heads, drawn": ({"head_dim": 10**9}, "random", "head_dim 1000000000, but at most 4,096"),
    "many heads, drawn": (
        {"num_attention_heads": 10**6, "num_key_value_heads": 10**6, "head_dim": 4}, "random",
        "num_attention_heads 1000000, but at most 4,096",
    ),
    "a nested size": ({"text_config": {"image_size": [10**9]}}, "random", "text_config.image_size[0] 1000000000"),
    "a wide model": (TOO_LARGE, "checkpoint", "calls for"),
    "a wide model, drawn": (TOO_LARGE, "random", "parameters, which takes at least"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_training_refuses_a_model_that_is_too_large_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, init, words = COMMANDS[name]
    place = make_place(tmp_path / "place")
    set_model(place, init, **changes)
    check_refused(run_here("pretrain_lora", place.arguments(), capsys), words)


def test_experts_of_all_layers_are_counted() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 100, "num_experts": 1000}
    with pytest.raises(UserError, match="1000 experts in each of 100 layers, 100,000 in all, but at most 65,536"):
        family_of(config)


def test_numbers_of_many_digits_are_not_written_out() -> None:
    with pytest.raises(UserError, match=r"has head_dim with a number of many digits, but at most 4,096"):
        check_sizes({"head_dim": 10**5000})


LARGEST_RELEASED: list[dict[str, Any]] = [
    {  # Llama 3.1 405B
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    {  # DeepSeek V3
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "vocab_size": 129280, "max_position_embeddings": 163840,
    },
    {  # Kimi K2
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64,
        "n_routed_experts": 384, "q_lora_rank": 1536, "kv_lora_rank": 512, "vocab_size": 163840,
    },
    {  # Qwen3 235B A22B
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "num_experts": 128, "vocab_size": 151936, "rope_theta": 1e7,
    },
    {"hidden_size": 2880, "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088},  # gpt-oss 120B
    {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "vocab_size": 262208},  # Gemma 3 27B
    {  # Llama 4 Scout's context
        "hidden_size": 5120, "num_hidden_layers": 48, "num_local_experts": 16, "vocab_size": 202048,
        "max_position_embeddings": 10485760, "rope_theta": 500000.0,
    },
    {  # Qwen2.5 14B 1M
        "hidden_size": 5120, "num_hidden_layers": 48, "vocab_size": 152064, "max_position_embeddings": 1010000,
        "rope_theta": 1e7, "sliding_window": 1010000,
    },
]  # fmt: skip


def test_released_models_are_below_the_limits() -> None:
    for file in sorted(shared("configs").glob("*.json")):
        check_sizes(json.loads(file.read_text()))
    for sizes in LARGEST_RELEASED:
        check_sizes(sizes)
        check_sizes({"text_config": sizes})
        check_kinds(sizes)


@pytest.mark.parametrize(
    "settings",
    [{"size": {"height": 10**6, "width": 10**6}}, {"crop_size": 10**6}, {"size": {"shortest_edge": 10**7}}],
)
def test_settings_of_processors_have_the_limits_too(settings: dict[str, Any], tmp_path: Path) -> None:
    from engine.vision.data.processors import _image_processor

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    begin = time.process_time()
    with pytest.raises(UserError, match=r"preprocessor_config\.json has .*, but at most .* is expected"):
        _image_processor(tmp_path)
    assert time.process_time() - begin < SECONDS
