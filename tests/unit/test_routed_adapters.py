"""Adapters of experts: exported and opened by stock PEFT, merged, read back; and what PEFT would read otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.choices import AdapterForm, AdapterReader
from engine.conversion.import_export import export_hf
from engine.conversion.merged_model import MergedSource, recorded_scale
from engine.conversion.peft_experts import TrainedAdapters, obstacle
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft, unread_by_peft
from engine.conversion.proof import prove_adapter
from engine.conversion.shared_factors import CommonFactors, EachExpert
from engine.errors import UserError
from engine.experts.layers.routed_experts import RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.models.names import own_names
from tests.distributed.cases import RANK, SCALE, small_config, uncut
from tests.parity.test_routed_training import stock_places
from tests.support.family_models import engine_model, make_model
from tests.support.family_table import ROUTED
from tests.support.sweeps import sampled
from tests.unit.test_checkpoint_peft import trained_run
from tests.unit.test_families_adapters import _logits, _stock_logits

TOGETHER = r"layers\.\d+\.mlp\.experts\.\d+\.(gate_up|down)_proj"
ADAPTED = r"layers\.\d+\.((linear_)?attention|mamba|mlp\.experts\.\d+)\.(.*_proj|in_proj_[a-z]+)"
SIZES = small_config(
    num_layers=3,
    variants=(RoutedSizes(
        rule=RoutingRule(num_experts=3, per_token=2, renormalises=True, rounds=True), intermediate=8, shared=4,
        dense_layers=(0,),
    ),),
)  # fmt: skip
EVERY = {f"layers.{i}.mlp.experts.{e}.{leaf}_proj" for i in (1, 2) for e in range(3) for leaf in ("gate", "up", "down")}


FORMS: dict[str, dict[str, Any]] = {
    "per expert": {},
    "one A for gate and up": {"adapters": TOGETHER, "fused": TOGETHER},
    "shared outer": {"experts": "shared_outer"},
    "shared": {"experts": "shared"},
}
"""What is trained, as options of a case."""
WRITTEN: dict[str, tuple[AdapterForm, ...]] = {
    "per expert": ("per_expert", "stacked"),
    "one A for gate and up": ("per_expert", "stacked"),
    "shared outer": ("per_expert", "stacked", "shared_outer"),
    "shared": ("stacked", "shared_outer"),
}
CASES = [
    (name, trained, form)
    for name in ROUTED
    if not name.startswith("nemotron")  # whose experts have no gates
    for trained, forms in WRITTEN.items()
    for form in forms
    if name not in ("gpt oss", "qwen3.5 moe", "granite hybrid moe", "gemma4 moe", "kimi linear") or form == "stacked"
]
QUICK = [
    ("mixtral", "per expert", "per_expert"), ("qwen3 moe", "per expert", "stacked"),
    ("qwen3 moe", "shared outer", "shared_outer"), ("mixtral", "one A for gate and up", "stacked"),
    ("olmoe", "shared", "stacked"), ("gpt oss", "per expert", "stacked"),
    ("gpt oss", "one A for gate and up", "stacked"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "trained", "form"), sampled(CASES, QUICK))
def test_megatron_bridge_3981_5588_5939_6075_ms_swift_7891_peft_opens_exports_and_gives_the_live_models_logits(
    name: str, trained: str, form: AdapterForm, tmp_path: Path
):
    """Read back, each factor has its bits. B by expert instead of by rank, or up before gate, moves logits by 0.1.

    PEFT cannot open the exports of Megatron-Bridge#3981, #5588, #5939, #6075 and ms-swift#7891.
    """
    base = tmp_path / "hf"
    plain = make_model(name, base)
    built = engine_model(base, trained="", **{"adapters": ADAPTED, **FORMS[trained]})
    live, specs = _logits(built), built.specs()
    tensors = {key: uncut(value, specs[key]) for key, value in built.parameters().items()}
    assert (live - _stock_logits(plain)).abs().max() > 0.05, "the adapters do nothing"
    checkpoint = open_run(trained_run(tmp_path / "run", tensors, base, alpha=SCALE * RANK))
    source = open_source(base)
    values = EachExpert(checkpoint.trained(), source.model.decoder)
    by_vllm_alone = name in ("qwen2 moe", "lfm2 moe") and form == "per_expert"  # whose experts PEFT computes without
    reader: AdapterReader | None = "vllm" if by_vllm_alone else None
    export_peft(values, checkpoint.lora, source.model, tmp_path / "adapter", form=form, reader=reader)
    export_hf(MergedSource(source.model, source, values, scale=SCALE), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    torch.testing.assert_close(_stock_logits(merged), live, rtol=0, atol=1e-4)
    model = open_model(base)
    wanted = [name for name in tensors if "gate_up" in name]
    fused = [own.rpartition(".")[0] for name in wanted for own in own_names(name, model.decoder)]
    read = AdapterSource(tmp_path / "adapter", names=model.names, decoder=model.decoder, fused=fused)
    again = CommonFactors(read, list(tensors), model.decoder)
    assert sorted(again.tensor_names()) == sorted(tensors)
    assert all(torch.equal(again.read_whole(key), value) for key, value in tensors.items())
    if form == "shared_outer":
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        shapes = {
            key.partition("experts.")[2]: list(value.shape) for key, value in stored.items() if ".experts.w" in key
        }
        sizes = model.decoder.variant(RoutedSizes)
        assert sizes is not None
        count, inner, hidden = sizes.rule.num_experts, sizes.intermediate, model.decoder.hidden
        assert shapes == {
            "w1.lora_A.weight": [1, RANK, hidden], "w1.lora_B.weight": [count, inner, RANK],
            "w2.lora_A.weight": [count, RANK, inner], "w2.lora_B.weight": [1, hidden, RANK],
            "w3.lora_A.weight": [1, RANK, hidden], "w3.lora_B.weight": [count, inner, RANK],
        }  # fmt: skip
        return
    if by_vllm_alone:
        torch.testing.assert_close(_logits_by_path(plain, tmp_path / "adapter"), live, rtol=0, atol=1e-4)
        return
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(_stock_logits(peft.eval()), live, rtol=0, atol=1e-4)


def test_ranks_of_single_experts_and_the_router_are_stacked(tmp_path: Path):
    """The narrower experts have zeros; a scale of their own is refused, as a stack has one."""
    make_model("qwen3 moe", tmp_path / "hf")
    ranks = ((r".*experts\.1\..*", 5),)
    built = engine_model(tmp_path / "hf", trained="", adapters=rf"{ADAPTED}|.*router", ranks=ranks)
    tensors, source = built.parameters(), open_source(tmp_path / "hf")
    alike = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf", alpha=SCALE * RANK))
    with pytest.raises(UserError, match="differ in scale, and their stack has one: export with --format hf --merge"):
        export_peft(alike.trained(), alike.lora, source.model, tmp_path / "adapter", form="stacked")
    alphas = {r".*experts\.1\..*": 5 * SCALE}
    run = open_run(trained_run(tmp_path / "again", tensors, tmp_path / "hf", alpha=RANK * SCALE, alpha_pattern=alphas))
    with pytest.raises(UserError, match="differ in rank or alpha, .* export with --adapter-form stacked"):
        export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter")
    export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter", form="stacked")
    scale = recorded_scale(run.lora, run.trained(), source.model.names)
    assert "agree to" in prove_adapter(tmp_path / "adapter", source, run.trained(), scale)


def test_what_peft_would_read_otherwise_is_refused(tmp_path: Path):
    make_model("qwen2 moe", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=rf"{ADAPTED}|.*shared_expert.*_proj")
    checkpoint = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf", alpha=5))
    with pytest.raises(UserError, match="shared_expert.down_proj has an adapter, whose name means the experts to PEFT"):
        export_peft(checkpoint.trained(), checkpoint.lora, open_model(tmp_path / "hf"), tmp_path / "adapter")


def test_experts_that_peft_would_not_compute_with_are_refused(tmp_path: Path):
    """PEFT stacks adapters of the types that transformers gives Qwen2-MoE's layout, and not of Qwen2-MoE itself: it
    opens such a folder without a word, and its logits miss the experts by 1. It opens no adapter of a router there."""
    plain = make_model("qwen2 moe", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=rf"{ADAPTED}|.*router")
    tensors, source = built.parameters(), open_source(tmp_path / "hf")
    run = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf", alpha=SCALE * RANK))
    with pytest.raises(UserError, match=r"router has an adapter, but to PEFT .* is no linear: export with --format hf"):
        export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter", form="stacked")
    tensors = {key: value for key, value in tensors.items() if "router" not in key}
    run = open_run(trained_run(tmp_path / "again", tensors, tmp_path / "hf", alpha=SCALE * RANK))
    stacked = "PEFT does not stack .* qwen2_moe .*: export with --adapter-form stacked"
    with pytest.raises(UserError, match=f"{stacked}, or for vLLM alone with --reader vllm"):
        export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter")
    with pytest.raises(UserError, match=rf"{stacked}\."):
        export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter", reader="peft")
    export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter", reader="vllm")
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert not any(".mlp." in key for key in peft.state_dict() if "lora_" in key), "PEFT reads them now"


BY_PATH = ("deepseek v3", "glm4 moe", "qwen2 moe")


@pytest.mark.parametrize("name", sampled(BY_PATH, ("deepseek v3",)))
def test_vllm_reads_linears_beside_the_experts_by_their_paths(name: str, tmp_path: Path):
    """Dense first layers and shared experts have ranks of their own: each key of the folder is the path of a matrix of
    transformers' model, to which B A is added with the scale that PEFT's rule gives that path, which is vLLM's too.
    Without the factors of dense layers alone logits move by 0.1."""
    plain = make_model(name, tmp_path / "hf")
    every = r"layers\..*(?<!kv_b)_proj"
    ranks = ((r"layers\.0\..*", 5), (r".*shared_expert.*down_proj", 2))
    built = engine_model(tmp_path / "hf", trained="", adapters=every, ranks=ranks)
    live, source = _logits(built), open_source(tmp_path / "hf")
    run = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf", alpha=SCALE * RANK))
    beside = {key for key in built.parameters() if ".mlp." in key and ".experts." not in key}
    assert any(".shared_expert" in key for key in beside)
    with pytest.raises(UserError, match="means the experts to PEFT: .* or for vLLM alone with --reader vllm"):
        export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter")
    scale = recorded_scale(run.lora, run.trained(), source.model.names)
    unread = unread_by_peft(run.trained(), run.lora, source.model, "per_expert")
    proof = partial(prove_adapter, base=source, trained=run.trained(), scale=scale, unread=unread)
    report = export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter", reader="vllm", proof=proof)
    assert "the path of its linear, which vLLM reads; PEFT would not" in report.notes[-2]
    assert "checked with the engine (not PEFT" in report.notes[-1]
    torch.testing.assert_close(_logits_by_path(plain, tmp_path / "adapter"), live, rtol=0, atol=1e-4)


def _logits_by_path(plain: Any, folder: Path) -> Tensor:
    """The model's logits with each adapter of a folder added to the matrix at its path."""
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    factors = load_file(folder / "adapter_model.safetensors")
    modules = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in factors}
    assert not any("base_layer" in module for module in modules)
    assert set(settings["target_modules"]) == modules
    parameters, places = dict(plain.named_parameters()), stock_places(plain)
    for module in modules:
        a, b = (factors[f"base_model.model.{module}.lora_{factor}.weight"] for factor in "AB")
        rank, alpha = (
            pattern.get(get_pattern_key(pattern.keys(), module), settings[default])
            for pattern, default in ((settings.get(f"{one}_pattern", {}), key) for one, key in KEYS.items())
        )
        assert rank == a.shape[0], module
        name, place = places.get(module, (f"{module}.weight", lambda x: x))
        with torch.no_grad():
            place(parameters[name]).add_(b @ a * (alpha / rank))
    return _stock_logits(plain)


KEYS = {"rank": "r", "alpha": "lora_alpha"}


def test_what_vllm_folds_into_others_has_no_adapter_there(tmp_path: Path):
    """vLLM multiplies kv_b_proj's matrix with others when it has read it, before it knows of adapters."""
    make_model("deepseek v3", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=r"layers\..*attention.*_proj")
    run = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf", alpha=SCALE * RANK))
    model = open_model(tmp_path / "hf")
    with pytest.raises(UserError, match="0.attention.kv_b_proj has an adapter, .* export with --format hf --merge"):
        export_peft(run.trained(), run.lora, model, tmp_path / "adapter", reader="vllm")
    report = export_peft(run.trained(), run.lora, model, tmp_path / "adapter")
    assert any("kv_b_proj" in note and "vLLM" in note for note in report.notes)


ROUTERS = {f"layers.{i}.mlp.router" for i in (1, 2)}
OUTER = {"layers.1.mlp.experts.gate_proj.lora_A"}


def _found(
    adapted: set[str], in_full: list[str], *, rank: Mapping[str, int] = MappingProxyType({}), **changes: Any
) -> TrainedAdapters:
    facts = {"shared": (), "rslora": False, **changes}
    adapters = dict.fromkeys(adapted, (2, 1.5)) | {module: (one, 1.5) for module, one in rank.items()}
    return TrainedAdapters(adapters=adapters, in_full=in_full, **facts)


@pytest.mark.parametrize(
    ("found", "form", "reader", "reason"),
    [
        (_found(EVERY, []), "per_expert", None, None),
        (_found(EVERY, []), "per_expert", "vllm", None),
        (_found({"layers.1.attention.q_proj"}, ["lm_head"], rslora=True), "per_expert", None, None),
        (_found(EVERY, ["layers.1.mlp.router"]), "stacked", None, "layers.1.mlp.router was trained in full"),
        (_found(EVERY | {"layers.0.mlp.up_proj"}, []), "stacked", None, "layers.0.mlp.up_proj has an adapter"),
        (_found({one for one in EVERY if "up" not in one}, []), "per_expert", None, "one alone"),
        (_found({one for one in EVERY if "up" not in one}, []), "stacked", None, None),
        (_found(EVERY - {"layers.2.mlp.experts.1.down_proj"}, []), "per_expert", None, "experts.1.down_proj has no"),
        (_found(EVERY - {"layers.2.mlp.experts.1.down_proj"}, []), "stacked", None, None),
        (_found(EVERY, [], rslora=True), "per_expert", None, "rslora"),
        (_found(EVERY, [], rslora=True), "stacked", None, None),
        (_found({one for one in EVERY if "down" in one}, [], rslora=True), "per_expert", None, None),
        (_found(EVERY | ROUTERS, []), "per_expert", None, None),
        (_found(EVERY | {"layers.1.mlp.router"}, []), "per_expert", None, "layers.2.mlp.router has no adapter"),
        (_found(EVERY | ROUTERS, []), "per_expert", "vllm", "have not been tried with those"),
        (_found(EVERY | {"layers.0.mlp.up_proj"}, []), "per_expert", "vllm", None),
        (_found(EVERY | {"layers.0.mlp.up_proj"}, []), "per_expert", "peft", "layers.0.mlp.up_proj has an adapter"),
        (_found({"layers.0.mlp.up_proj"}, []), "per_expert", "vllm", None),
        (_found({"layers.0.mlp.shared_expert_gate"}, []), "per_expert", "vllm", "have not been tried"),
        (_found(EVERY, [], rslora=True), "per_expert", "vllm", None),
        (_found({one for one in EVERY if "down" in one}, []), "per_expert", None, None),
        (_found({one for one in EVERY if "down" in one}, []), "per_expert", "vllm", "linears together"),
        (_found(EVERY, [], rank={"layers.1.mlp.experts.0.up_proj": 3}), "per_expert", "vllm", "differ in rank from"),
        (_found(EVERY, [], rank={"layers.0.attention.q_proj": 3}), "per_expert", "vllm", None),
        (_found(EVERY, [], rank={"layers.0.attention.q_proj": 3}), "per_expert", "peft", "differ in rank or alpha"),
        (_found(EVERY, []), "shared_outer", None, "share no factors"),
        (_found(EVERY, [], shared=OUTER), "shared_outer", "sglang", None),
        (_found(EVERY, [], shared=OUTER), "shared_outer", "peft", "PEFT has no form"),
        (
            _found({one for one in EVERY if "down" in one}, [], shared=OUTER),
            "shared_outer",
            "vllm",
            "gate_proj has no adapter, and vLLM reads this form with all linears",
        ),
        (_found(EVERY, []), "stacked", "sglang", "SGLang has no form"),
        (_found(EVERY, []), "per_expert", "sglang", "SGLang is only known to read"),
    ],
)
def test_obstacles(found: TrainedAdapters, form: AdapterForm, reader: AdapterReader | None, reason: str | None):
    seen = obstacle(found, SIZES, form, reader)
    assert seen is None if reason is None else seen is not None and reason in seen


def test_gpt_oss_has_no_adapters_of_single_experts(tmp_path: Path):
    make_model("gpt oss", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=ADAPTED)
    run = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf", alpha=SCALE * RANK))
    for form, reader in (("per_expert", None), ("shared_outer", None), ("per_expert", "vllm"), ("stacked", "vllm")):
        with pytest.raises(UserError, match="of a gpt_oss model.*: export with"):
            export_peft(
                run.trained(), run.lora, open_model(tmp_path / "hf"), tmp_path / "adapter", form=form, reader=reader
            )


def test_skyrl_1852_vllm_41384_52194_47088_40005_a_stack_that_vllm_would_load_and_not_apply_is_refused(tmp_path: Path):
    """vLLM skips its check of names at `base_layer`, and has no module of that name for a model with experts apart."""
    make_model("qwen3 moe", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=ADAPTED)
    run = open_run(trained_run(tmp_path / "run", built.parameters(), tmp_path / "hf", alpha=SCALE * RANK))
    model = open_model(tmp_path / "hf")
    with pytest.raises(UserError, match="would load their stacks .*: export with --adapter-form per_expert"):
        export_peft(run.trained(), run.lora, model, tmp_path / "adapter", form="stacked", reader="vllm")
    assert not (tmp_path / "adapter").exists()
    report = export_peft(run.trained(), run.lora, model, tmp_path / "adapter", form="stacked")
    assert any("vLLM would load them and compute without them" in note for note in report.notes)


def test_megatron_bridge_5376_gate_and_up_are_in_order_in_every_form(tmp_path: Path):
    """B of gate alone is not zero: in a stack its rows are the first half, and in the outer form it is w1."""
    make_model("qwen3 moe", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=ADAPTED, experts="shared_outer")
    tensors = {key: value * (0 if ".up_proj.lora_B" in key else 1) for key, value in built.parameters().items()}
    run = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf", alpha=SCALE * RANK))
    model = open_model(tmp_path / "hf")
    values = EachExpert(run.trained(), model.decoder)
    for form in ("stacked", "shared_outer"):
        export_peft(values, run.lora, model, tmp_path / form, form=form)
    layer = "base_model.model.model.layers.1.mlp.experts"
    stacked = load_file(tmp_path / "stacked" / "adapter_model.safetensors")[f"{layer}.base_layer.lora_B.weight"]
    half = stacked.shape[0] // 2
    assert stacked[:half].any() and not stacked[half:].any()
    outer = load_file(tmp_path / "shared_outer" / "adapter_model.safetensors")
    assert outer[f"{layer}.w1.lora_B.weight"].any() and not outer[f"{layer}.w3.lora_B.weight"].any()
