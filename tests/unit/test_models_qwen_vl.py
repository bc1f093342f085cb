"""Qwen2.5-VL and Qwen3-VL: configs as they are released, names in both spellings, what a tower costs, and refusals."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.checkpoint.model_weights import open_source
from engine.config.load import parse_config
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TrainingPlan
from engine.layers.recompute import SELECTIVE
from engine.models.decoder import Part
from engine.models.decoder_config import DecoderConfig
from engine.models.families import family_of
from engine.planning.predict import workload_of
from engine.planning.stage_bytes import stage_bytes
from engine.planning.traces import rank_model
from engine.vision.layers.fronts import ImageTower
from engine.vision.towers.qwen import segments_of
from engine.vision.towers.qwen2_5_vl import windows
from tests.distributed.cases import small_config
from tests.distributed.run_cases import QWEN2_5_VL, QWEN3_VL
from tests.support.commands import options
from tests.support.minicpm_v4_6 import KINDS as MINICPM
from tests.support.qwen_vl import KINDS, make_model
from tests.support.toy_vision import ToyVisionConfig

RELEASED: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
        "max_window_layers": 28, "use_sliding_window": False, "sliding_window": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    "Qwen3-VL-4B-Instruct": {
        "model_type": "qwen3_vl", "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "tie_word_embeddings": True,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
            "intermediate_size": 4096, "num_heads": 16, "in_channels": 3, "out_hidden_size": 2560, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}  # fmt: skip


def read(hf: dict[str, Any]) -> DecoderConfig:
    family, part = family_of(hf)
    return family.config_from_hf(part)


def test_configs_as_they_are_released() -> None:
    older, newer = (read(hf) for hf in RELEASED.values())
    assert Counter(older.rope_axes) == {0: 16, 1: 24, 2: 24} and list(older.rope_axes) == sorted(older.rope_axes)
    assert (older.ropes[0].theta, older.qkv_bias, older.tied_embeddings) == (1e6, True, False)
    assert newer.rope_axes == (0, 1, 2) * 20 + (0,) * 4
    assert (newer.ropes[0].theta, newer.qk_norm, newer.tied_embeddings) == (5e6, True, True)
    old, new = older.front(ImageTower), newer.front(ImageTower)
    assert old is not None and new is not None and (old.deepstack, new.deepstack) == (0, 3)
    assert old.num_features((72, 48)) == new.num_features((72, 48)) == 864
    assert old.usual_tile == (34, 46) and new.usual_tile == (30, 40)


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_came_in_go_out_in_both_spellings(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path / "one")
    spelt = {"visual.": "model.visual.", "model.": "model.language_model."}
    if kind in MINICPM:
        spelt = {root: f"model.{root}" for root in ("vision_tower.", "merger.")}
        spelt |= {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    pairs = spelt if kind == "qwen2_5_vl" else {new: old for old, new in spelt.items()}
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        before = next((old for old in pairs if name.startswith(old)), "")
        renamed[pairs.get(before, "") + name.removeprefix(before)] = tensor
    assert renamed.keys() != tensors.keys()
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "two")
    save_file(renamed, tmp_path / "two" / "model.safetensors", {"format": "pt"})
    for folder, expected in (("one", tensors), ("two", renamed)):
        import_checkpoint(open_source(tmp_path / folder), tmp_path / f"{folder}-base", tensor=2)
        export_hf(open_source(tmp_path / f"{folder}-base"), tmp_path / f"{folder}-out")
        found = load_file(tmp_path / f"{folder}-out" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("config", [QWEN2_5_VL, QWEN3_VL])
def test_the_flops_of_a_tower_are_those_that_torch_counts(config: Any) -> None:
    grids = ((4, 6), (2, 2), (8, 4))
    patches = torch.zeros(sum(rows * columns for rows, columns in grids), config.patch_features)
    # plain products, because the counter does not know the CPU's fused attention
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        features = config.build()(patches, grids)
    assert features.shape[0] == sum(map(config.num_features, grids))
    assert config.flops(grids) == counter.get_total_flops()
    assert config.build()(patches[:0], ()).shape == (0, features.shape[1])
    with pytest.raises(ValueError, match="3 x 4 patches came to a tower that merges 2 x 2"):
        config.build()(patches[:12], ((3, 4),))


def test_windows_of_one_length_are_side_by_side() -> None:
    found = windows((6, 10), read(RELEASED["Qwen2.5-VL-7B-Instruct"]).fronts[0].model)  # type: ignore[arg-type]
    order = found.patches_P[::4] // 4
    assert sorted(found.patches_P.tolist()) == list(range(60)) and torch.equal(order[found.back_K], torch.arange(15))
    assert found.lengths == (48, 12) and order[:4].tolist() == [0, 1, 2, 3] and order[12:].tolist() == [4, 9, 14]
    assert found.places_P2[:6].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]
    assert segments_of([4, 4, 2, 4, 4, 4]) == ((2, 4), (1, 2), (3, 4))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (0, {"vision_config": None}, "lacks vision_config"),
        (0, {"vision_config.out_hidden_size": 8}, "out_hidden_size 8 for a language model of 3584 features"),
        (0, {"vision_config.window_size": 16}, "window_size 16 and fullatt_block_indexes"),
        (0, {"vision_config.fullatt_block_indexes": 7}, "fullatt_block_indexes 7, but windows"),
        (0, {"vision_config.hidden_act": "gelu"}, "vision_config.hidden_act 'gelu', but this model's tower has 'silu'"),
        (0, {"vision_config.temporal_patch_size": 1}, "temporal_patch_size 1, but this model's tower has 2"),
        (0, {"vision_config.num_heads": 33}, "hidden_size 1280, which does not divide into 33 heads"),
        (0, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, r"mrope_section \[16, 24\], but three"),
        (0, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "for heads of 64 pairs"),
        (0, {"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope type 'ntk' in config.json is not supported"),
        (1, {"vision_config.num_position_embeddings": 2305}, "num_position_embeddings 2305, but a square table"),
        (1, {"vision_config.deepstack_visual_indexes": [24]}, r"deepstack_visual_indexes \[24\], but a list"),
        (1, {"text_config.num_hidden_layers": 2}, "3 vision_config.deepstack_visual_indexes, whose features 2 layers"),
        (1, {"text_config.model_type": "qwen3_moe"}, "language model of type 'qwen3_moe' in a qwen3_vl model"),
    ],
)
def test_configs_that_are_refused(kind: int, changes: dict[str, Any], words: str) -> None:
    hf = json.loads(json.dumps(list(RELEASED.values())[kind]))
    for key, value in changes.items():
        part, dot, leaf = key.rpartition(".")
        (hf[part] if dot else hf)[leaf] = value
    with pytest.raises(UserError, match=words):
        read(hf)


def test_the_planner_counts_features_for_later_layers() -> None:
    """A stage keeps what came in below its stream, and sends on what is left of it."""
    config = parse_config(options({"model.path": "none", "data.seq_length": 24, "train.micro_batch_size": 2}))
    plan = TrainingPlan(
        adapter=lambda name: AdapterSettings(rank=2, scale=1.0, dropout=0.0) if "q_proj" in name else None
    )
    seen = {}
    for deepstack in (0, 3):
        decoder = small_config(
            num_layers=4, fronts=(ImageTower(model=ToyVisionConfig(hidden=(1 + deepstack) * 32), deepstack=deepstack),)
        )
        model = rank_model(workload_of(config, decoder, plan, device_type="cpu"), config.parallel)
        for first, last in ((0, 4), (0, 1), (1, 4), (3, 4)):
            part = Part(first=first, last=last, embedding=first == 0, head=last == 4)
            kept = stage_bytes(model, part, SELECTIVE, trains=True, gives_gradient=first > 0).kept
            seen[deepstack, first, last] = sum(kept.values()), model.stream
    more = {key[1:]: (seen[key][0] - seen[0, *key[1:]][0]) / seen[key][1] for key in seen if key[0] == 3}
    assert more == {(0, 4): 3, (0, 1): 3 + 2, (1, 4): 2, (3, 4): 0}
