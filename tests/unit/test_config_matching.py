"""Names and patterns for adapters and trainable modules; adapters' names also against PEFT's own matching."""

from __future__ import annotations

import pytest

from engine.config.matching import matches_target, matches_trainable, require_matched, unmatched_patterns
from engine.errors import UserError

HF_SUFFIX = {
    "attention.q_proj": "self_attn.q_proj",
    "attention.v_proj": "self_attn.v_proj",
    "mlp.up_proj": "mlp.up_proj",
}
MODULES = {
    f"layers.{layer}.{name}": [f"model.layers.{layer}.{hf}"] for layer in (0, 1, 10) for name, hf in HF_SUFFIX.items()
} | {"lm_head": ["lm_head"], "embed_tokens": ["model.embed_tokens"]}


def matched(matcher, *patterns: str) -> set[str]:
    return {name for name, aliases in MODULES.items() if matcher(name, patterns, aliases)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("q_proj", {"layers.0.attention.q_proj", "layers.1.attention.q_proj", "layers.10.attention.q_proj"}),
        ("proj", set()),
        ("_proj", set()),
        ("lm_head", {"lm_head"}),
        ("embed_tokens", {"embed_tokens"}),
        ("layers.1.attention.q_proj", {"layers.1.attention.q_proj"}),
        ("model.layers.1.self_attn.q_proj", {"layers.1.attention.q_proj"}),
        ("self_attn.v_proj", {"layers.0.attention.v_proj", "layers.1.attention.v_proj", "layers.10.attention.v_proj"}),
        (r".*layers\.1\.self_attn\.(q|v)_proj", {"layers.1.attention.q_proj", "layers.1.attention.v_proj"}),
        (r"layers\.1\..*", {"layers.1.attention.q_proj", "layers.1.attention.v_proj", "layers.1.mlp.up_proj"}),
        (".*", set(MODULES)),
    ],
)
def test_target(pattern: str, expected: set[str]) -> None:
    assert matched(matches_target, pattern) == expected


def test_targets_add_up() -> None:
    assert matched(matches_target, "lm_head", "up_proj") == matched(matches_target, "lm_head") | matched(
        matches_target, "up_proj"
    )


@pytest.mark.parametrize("pattern", ["q_proj", "proj", "lm_head", "self_attn.q_proj", "model.layers.10.mlp.up_proj"])
def test_names_mean_what_peft_takes_them_for(pattern: str) -> None:
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    lora = pytest.importorskip("peft").LoraConfig(target_modules=[pattern])
    for name, aliases in MODULES.items():
        theirs = bool(tuners.check_target_module_exists(lora, aliases[0]))
        assert matches_target(name, [pattern], aliases) == theirs, name


@pytest.mark.parametrize("pattern", [r".*self_attn\.(q|v)_proj", r"model\.layers\.1\..*", "lm_head", "q_proj"])
def test_a_regular_expression_means_at_least_what_peft_takes_it_for(pattern: str) -> None:
    """PEFT matches one expression against the whole name; ours may also match an end of it."""
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    lora = pytest.importorskip("peft").LoraConfig(target_modules=pattern)
    theirs = {name for name, aliases in MODULES.items() if tuners.check_target_module_exists(lora, aliases[0])}
    assert theirs <= matched(matches_target, pattern)
    if "." in pattern:
        assert theirs == matched(matches_target, pattern)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", set(MODULES)),
        ("lm_head", {"lm_head"}),
        ("mlp", {"layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "layers.10.mlp.up_proj"}),
        ("layers.*.mlp.*", {"layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "layers.10.mlp.up_proj"}),
        ("layers.1", {"layers.1.attention.q_proj", "layers.1.attention.v_proj", "layers.1.mlp.up_proj"}),
        ("layers.[01].mlp", {"layers.0.mlp.up_proj", "layers.1.mlp.up_proj"}),
        ("model.embed_*", {"embed_tokens"}),
        ("head", set()),
        ("up_pro", set()),
    ],
)
def test_trainable(pattern: str, expected: set[str]) -> None:
    assert matched(matches_trainable, pattern) == expected


def test_trainable_takes_a_parameter_name() -> None:
    assert matches_trainable("norm.weight", ["norm.weight"])
    assert matches_trainable("norm.weight", ["norm"])
    assert not matches_trainable("layers.0.input_norm.weight", ["norm"])


def test_unmatched_patterns_in_the_order_given() -> None:
    targets = ["nope", "q_proj", r".*\.k_proj"]
    assert unmatched_patterns(targets, MODULES, matches_target) == ["nope", r".*\.k_proj"]
    assert unmatched_patterns(["lm_head", "layers.7"], MODULES, matches_trainable) == ["layers.7"]


def test_an_unmatched_pattern_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="lora.targets contains 'q_prj', .*: did you mean q_proj\\?$"):
        require_matched("lora.targets", ["v_proj", "q_prj"], MODULES, matches_target)
    with pytest.raises(UserError, match="trainable contains 'zzz', .*: use names such as q_proj"):
        require_matched("trainable", ["zzz"], MODULES, matches_trainable)
    require_matched("trainable", ["*"], MODULES, matches_trainable)


def test_all_linear_is_every_linear_but_the_head() -> None:
    """PEFT's word; its own list is that of `INCLUDE_LINEAR_LAYERS_SHORTHAND`, which leaves the output embedding out."""
    names = [f"layers.3.{part}" for part in ("attention.q_proj", "attention.o_proj", "mlp.gate_proj", "mlp.down_proj")]
    assert all(matches_target(name, ("all-linear",)) for name in names)
    assert not any(matches_target(name, ("all-linear",)) for name in ("lm_head", "embed_tokens", "layers.3.norm"))
    require_matched("lora.targets", ["all-linear"], dict.fromkeys(names, ()), matches_target)


EXPERTS = {
    "vision.model.vision.linear_proj.gate_proj": ["model.vision.linear_proj.gate_proj"],
    "layers.0.attention.q_proj": ["model.layers.0.self_attn.language_expert_query_key_value"],
    "layers.0.attention.vision.q_proj": ["model.layers.0.self_attn.vision_expert_query_key_value"],
    "layers.0.mlp.vision.up_proj": ["model.layers.0.mlp.vision_mlp.up_proj"],
}
TOWER, LANGUAGE, EXPERT, EXPERT_MLP = EXPERTS


@pytest.mark.parametrize(
    ("matcher", "pattern", "expected"),
    [
        (matches_trainable, "vision", {TOWER}),
        (matches_trainable, "model.vision", {TOWER}),
        (matches_trainable, "vision.*", {TOWER}),
        (matches_trainable, "attention.vision", {EXPERT}),
        (matches_trainable, "mlp.vision", {EXPERT_MLP}),
        (matches_trainable, "vision_mlp", {EXPERT_MLP}),
        (matches_trainable, "attention", {LANGUAGE, EXPERT}),
        (matches_target, r"vision\..*", {TOWER}),
        (matches_target, "vision.q_proj", set()),
        (matches_target, "attention.vision.q_proj", {EXPERT}),
        (matches_target, "q_proj", {LANGUAGE, EXPERT}),
    ],
)
def test_vision_is_the_vision_model_and_no_expert(matcher, pattern: str, expected: set[str]) -> None:
    assert {name for name, aliases in EXPERTS.items() if matcher(name, (pattern,), aliases)} == expected
