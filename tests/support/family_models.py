"""Small random models of every family, made by stock transformers, and what is asked of them.

Shapes are awkward on purpose: an odd vocabulary, head_dim that is not hidden / heads, a window shorter than documents.
transformers takes seconds to import, so that happens inside the functions: ranks import this module and need none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.distributed.mesh import Mesh
from tests.distributed.cases import Built, Case, build, make_batch, relative_error, uncut
from tests.support.family_table import FACTORS, FAMILIES, ROUTED, SMALL_SIZES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_SEEDS = {
    "ernie 4.5": 7,
    "gemma4 with values": 3,
    "seed oss": 1,
    "qwen3 next": 5,
    "gpt oss": 2,
    "deepseek v2": 1,
    "deepseek v3": 12,
}
"""Seeds of models that otherwise say the same whatever they are asked, or amplify rounding in training."""
_FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
_MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 10}


def make_model(name: str, folder: Path | None = None, **more: Any) -> PreTrainedModel:
    """A random model, saved in `folder` as its users have it; every parameter is drawn, norms and biases too.

    Args:
        more: of its config, in place of what FAMILIES has.
    """
    import transformers

    prefix, changes = FAMILIES[name]
    if name == "minicpm":
        factors = {
            "embedding_multiplier": 12, "residual_multiplier": 1.4 / 2, "attention_multiplier": 10**-0.5,
            "logits_scaling": 40 / 10,
        }  # fmt: skip
        changes = {**changes, **factors}
    kind = f"{prefix}Text" if prefix in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else prefix
    values = {
        key: value
        for key, value in {**SMALL_SIZES, **changes, **more}.items()
        if value is not None or key != "head_dim"
    }
    config = getattr(transformers, f"{kind}Config")(**values)
    torch.manual_seed(len(name) + _SEEDS.get(name, 0))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    if name in ROUTED:
        model.set_experts_implementation("eager")  # torch's grouped products, which are the default, have no fp64
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            mean = 0.0 if prefix in ("Gemma2", "Gemma3") or "bias" in key else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
            if prefix == "Gemma4" and ".self_attn." in key:
                parameter.data.mul_(0.4)  # scores are not divided by anything
        else:
            torch.nn.init.normal_(parameter, std=0.6 * parameter.shape[-1] ** -0.5)
        if key.endswith(".A_log"):
            parameter.data.sub_(2.5)  # sums of decays along a chunk stay small, and so does their rounding
    for key, buffer in (*model.named_buffers(), *model.named_parameters()):
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.05)  # so that all experts have tokens
        if key.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.6, 1.4)
    if folder is not None:
        model.save_pretrained(folder)
        _as_users_have_it(name, folder)
    return model


def _as_users_have_it(name: str, folder: Path) -> None:
    """The forms that stock transformers has no class for."""
    from safetensors.torch import load_file, save_file

    weights, path = folder / "model.safetensors", folder / "config.json"
    if name == "llama fused":
        tensors = load_file(weights)
        for fused, parts in _FUSED.items():
            for layer in range(SMALL_SIZES["num_hidden_layers"]):
                parent = f"model.layers.{layer}.{fused.rpartition('.')[0]}"
                members = [tensors.pop(f"{parent}.{part}.weight") for part in parts]
                tensors[f"model.layers.{layer}.{fused}.weight"] = torch.cat(members)
        save_file(tensors, weights, {"format": "pt"})
    if name == "minicpm":
        config = json.loads(path.read_text())
        kept = {key: value for key, value in config.items() if key not in FACTORS}
        path.write_text(json.dumps({**kept, **_MINICPM, "model_type": "minicpm", "tie_word_embeddings": False}))


def batch_of(seed: int = 2) -> Batch:
    """Packed documents, longer and shorter than the windows."""
    rows = [(0, (9, 1, 22)), (1, (32,)), (2, (5, 5, 14)), (3, (30, 2))]
    return make_batch(rows, row_length=32, seq_length=32, vocab_size=SMALL_SIZES["vocab_size"], seed=seed)


def engine_model(
    folder: Path, mesh: Mesh | None = None, *, trained: str = ".*", adapters: str = "", **more: Any
) -> Built:
    """The model in `folder` on this rank, its weights read as a run reads them."""
    source = open_source(folder)
    case = Case(config=source.model.decoder, trained=trained, adapters=adapters, dropout=0.0, **more)
    built = build(case, mesh, clip_grad_norm=1.0)
    frozen = [entry.shard for entry in built.entries if entry.sink is None]
    load_parameters([*frozen, *(s for s in built.flat.master_shards() if ".lora_" not in s.name)], source)
    built.flat.publish()
    return built


def gradient_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each gradient; that of an expert without tokens must be zero, and few experts have none."""
    without = [key for key, value in expected.items() if ".experts." in key and not value.any()]
    assert len(without) <= len(expected) / 8 and not any(found[key].any() for key in without), without
    return {key: relative_error(value, expected[key]) for key, value in found.items() if key not in without}


def losses_and_gradients(built: Built, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Token losses of one process, and the gradient of their weighted sum."""
    losses = built.model(batch, built.stage.step)
    (losses * batch.loss_weights_BS.flatten()).sum().backward()
    specs = built.specs()
    return losses.detach(), {name: uncut(one, specs[name]) for name, one in built.gradients().items()}


def stock_losses(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and token losses with every document run alone, from position 0."""
    logits, losses = [], []
    tokens, labels = batch.tokens_BS.flatten(), batch.labels_BS.flatten()
    for ids, targets in zip(tokens.split(batch.document_lengths), labels.split(batch.document_lengths), strict=True):
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        loss = torch.nn.functional.cross_entropy(logits[-1], targets, reduction="none", ignore_index=IGNORE_LABEL)
        losses.append(loss)
    return torch.cat(logits), torch.cat(losses)


_RENAMED = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
"""Names on disk -> names of transformers' parameters."""


def live_name(stored: str) -> str:
    """The name of transformers' parameter that has the one of this name on disk, whole or as a part."""
    for name, live in _RENAMED.items():
        stored = stored.replace(name, live)
    return re.sub(r"\.[qkv]_conv1d\.", ".conv1d.", stored)


def stock_gradient(model: torch.nn.Module, folder: Path, name: str) -> Tensor:
    """That of the stock parameter, or of its rows, that the engine calls `name`."""
    parameters = dict(model.named_parameters())
    place = open_model(folder).names.live.to_hf(name)
    for stored, live in _RENAMED.items():
        place = place._replace(name=place.name.replace(stored, live))
    if place.expert is not None:
        return place.expert.of(parameters[place.name].grad)
    if place.name in parameters:
        gradient = parameters[place.name].grad
        return gradient if place.num_rows is None else gradient[place.row_offset : place.row_offset + place.num_rows]
    if match := re.match(r"(.*)\.([qkv])_conv1d\.weight", place.name):
        return parameters[f"{match[1]}.conv1d.weight"].grad.chunk(3)["qkv".index(match[2])]
    if match := re.match(r"(.*\.mixer\.experts)\.(\d+)\.(.*_proj)", place.name):
        return parameters[f"{match[1]}.{match[3]}"].grad[int(match[2])]
    if match := re.match(r"layers\.(\d+)\.mlp\.(router|experts\.(\d+)\.(.*)_proj)", name):  # which transformers stacks
        mlp = f"model.layers.{match[1]}.{open_model(folder).names.live_experts.rpartition('.')[0]}"
        if match[2] == "router":
            return parameters[f"{mlp}.gate.weight"].grad
        if match[4] == "down":
            return parameters[f"{mlp}.experts.down_proj"].grad[int(match[3])]
        return parameters[f"{mlp}.experts.gate_up_proj"].grad[int(match[3])].chunk(2)[match[4] == "up"]
    return parameters[re.sub("qkv_proj|gate_up_proj", name.split(".")[-2], place.name)].grad
