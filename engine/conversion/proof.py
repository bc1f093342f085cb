"""Proves exports by their readers: stock transformers or PEFT opens the folder, and its logits are compared
with those of the live model (base and adapters unmerged) by the engine's own decoder.

Both compute in fp32 whatever is stored: stored weights stay mapped files, and each module's are widened while it runs.
So memory is that of one layer, or of the embedding, whatever the size of the model.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.checkpoint.folder import CONFIG
from engine.checkpoint.model_folder import ModelFolder
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.live_logits import Overlay, adapter_plan, live_logits, proof_tokens
from engine.conversion.lora_scales import Scale
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_read import ADAPTER_WEIGHTS, AdapterSource
from engine.conversion.stock_readers import obstacle_to_decoding, stock_decoding
from engine.errors import UserError
from engine.files.documents import read_json
from engine.layers.context import TrainingPlan
from engine.models.decoder_config import DecoderConfig
from engine.models.families import WRAPPINGS, language_family
from engine.sentences import listed

SAME = 1e-3
"""Largest allowed difference of logits, over the largest logit, of two fp32 implementations; they differ by some
1e-6.
"""

_FACTOR_IN_LAYER = re.compile(r"layers\.(\d+)\..*\.(lora_[AB])\b")
_ROUNDED = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""The same where one has weights that a merge rounded: an error of 2^-9 or 2^-12 per weight, amplified by the
layers.
"""


_LONGEST_REASON = 200
"""Letters of what PEFT says; it prints whole modules."""
NEEDS_IMAGES = "logits not compared: the model's layers attend to images, and the proof is text"


class Live(NamedTuple):
    """The model that trained: its parameters by logical name, adapters included, and which adapters there are."""

    config: DecoderConfig
    tensors: TensorReader
    plan: TrainingPlan

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns fp32 [B, S, V] logits; see `live_logits`."""
        return live_logits(self.config, self.tensors, tokens, self.plan)


def live_model(config: DecoderConfig, base: TensorReader | None, trained: TensorReader, scale: Scale) -> Live:
    """Returns the live model of trained values beside their base, which is None where there was none."""
    return Live(config, Overlay(trained, base), adapter_plan(trained, scale))


def live_of(source: WeightSource) -> Live:
    """Returns the live model whose weights a source has, with adapters beside them where it merges."""
    if isinstance(source, MergedSource):
        # without a base all parameters are trained but those that never train, which the source knows
        return live_model(source.model.decoder, source.base or source, source.trained, source.scale)
    return Live(source.model.decoder, source, TrainingPlan())


def prove_model(folder: Path, source: WeightSource) -> str:
    """Compares a Hugging Face folder with the live model.

    Args:
        folder: the export.
        source: its origin.

    Returns:
        One sentence: the comparison, or why there is none.

    Raises:
        UserError: tensors are missing or unexpected to transformers, or logits differ.
    """
    if source.model.decoder.needs_images:
        return NEEDS_IMAGES
    live = live_of(source)
    tokens = proof_tokens(live.config.vocab_size)
    expected = live.logits(tokens)
    written = open_source(folder, source.model.implementation)
    if (obstacle := obstacle_to(folder, written.model)) is None:
        found, reader = stock_logits(folder, live.config, widest(written), tokens), "transformers"
    else:
        found, reader = live_logits(written.model.decoder, written, tokens), f"the engine ({obstacle})"
    limit = SAME
    if isinstance(source, MergedSource):
        limit = _ROUNDED.get(widest(written), SAME)
        _check_adapter_is_in(found, expected, source, tokens, limit)
    difference = largest_difference(found, expected)
    if not difference <= limit:
        raise UserError(
            f"the export gives logits that differ from the live model's by {difference:.1e} of the largest "
            f"(expected at most {limit:.0e}), read by {reader}, so nothing was exported: report this with the model's "
            "config.json."
        )
    return agreement(live.config, tokens, reader, difference)


def prove_adapter(
    folder: Path, base: WeightSource, trained: TensorReader, scale: Scale, unread: str | None = None
) -> str:
    """Compares a PEFT folder with the live model, as `prove_model` does.

    Args:
        unread: why PEFT would not compute with it as it was trained; None where it does.
    """
    model = base.model
    if model.decoder.needs_images:
        return NEEDS_IMAGES
    if missing := [name for name in ("transformers", "peft") if find_spec(name) is None]:
        return f"logits not compared: {missing[0]} is not installed"
    if model.manifest is not None and model.hf_path == model.path:
        return "logits not compared: the Hugging Face folder of the base is gone"
    is_mixture = bool(model.decoder.num_experts)
    unreadable = obstacle_to_decoding(model.hf_path, has_experts=is_mixture)
    if (obstacle := unreadable or obstacle_to(model.hf_path, model)) is not None:
        return f"logits not compared: {obstacle}"
    live = live_model(model.decoder, base, trained, scale)
    tokens = proof_tokens(model.decoder.vocab_size)
    if unread is not None:
        written = AdapterSource(folder, names=model.names, decoder=model.decoder, with_saved_modules=True)
        again = live_model(model.decoder, base, written, written.scale)
        found, reader = again.logits(tokens), f"the engine (not PEFT: {unread})"
    else:
        found = stock_logits(model.hf_path, model.decoder, widest(base), tokens, adapter=folder)
        reader = "PEFT"
    difference = largest_difference(found, live.logits(tokens))
    if not difference <= SAME:
        raise UserError(
            f"with this adapter {reader} gives logits that differ from the live model's by {difference:.1e} of the "
            f"largest, at most {SAME:.0e} was expected, so nothing was exported: report this with the base's "
            "config.json."
        )
    return agreement(model.decoder, tokens, reader, difference)


def agreement(decoder: DecoderConfig, tokens: Tensor, reader: str, difference: float) -> str:
    """Returns the sentence on logits that agree."""
    without = ", without images" if decoder.sees_images else ""
    return f"checked with {reader}: logits of {tokens.numel()} tokens agree to {difference:.1e} of the largest{without}"


def _check_adapter_is_in(found: Tensor, live: Tensor, source: MergedSource, tokens: Tensor, limit: float) -> None:
    """Checks that the effect of training is in the logits, where it is more than rounding could hide."""
    if source.base is None or not source.changed_names():
        return
    before = live_logits(source.base.model.decoder, source.base, tokens)
    effect = largest_difference(before, live)
    if effect > 2 * limit and largest_difference(found, live) > effect / 2:
        raise UserError(
            f"the export is nearer to the base than to the live model (training changed logits by {effect:.1e} "
            "of the largest), so nothing was exported: report this with the model's config.json."
        )


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference over the largest expected value; NaN where a value is not finite."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def widest(source: TensorReader) -> torch.dtype:
    """Returns the widest dtype of a source's tensors."""
    dtypes = {source.dtype(name) for name in source.tensor_names()}
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: dtype.itemsize)


def obstacle_to(folder: Path, model: ModelFolder) -> str | None:
    """Returns why stock transformers cannot read a folder, or None."""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = read_json(folder / CONFIG)
    family = language_family(model.decoder.family, model.hf_config, model.implementation)
    is_wrapped = bool(model.names.spellings)
    if config.get("model_type") not in CONFIG_MAPPING or not (is_wrapped or model.names.body == family.names.body):
        return f"transformers has no class for model_type {config.get('model_type')!r} as a language model"
    if extra := set(model.names.fused) - set(family.fused):
        return f"transformers' {model.decoder.family} has no {sorted(extra)[0].rpartition('.')[2]}"
    return None


def stock_logits(
    folder: Path,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    tokens: Tensor,
    adapter: Path | None = None,
) -> Tensor:
    """Returns fp32 [B, S, V] logits by transformers, of weights that it decodes, with the adapter loaded by PEFT.

    Args:
        decoder: of the model in the folder.

    Raises:
        UserError: transformers misses tensors, or finds some that it does not know.
    """
    auto = _stock_class(folder, decoder)
    brings_head = adapter is not None and decoder.scores  # which the base may not have
    with _quiet(), warnings.catch_warnings():
        # that it takes how to read from here, and how tensors are stored from config.json
        warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
        # eager, the family's own arithmetic: some versions use SDPA for Gemma 2, which skips the soft cap on its scores
        options = {"dtype": dtype, "attn_implementation": "eager", **({"num_labels": 1} if brings_head else {})}
        if (decoding := stock_decoding(folder)) is not None:
            options["quantization_config"] = decoding
        model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
        if brings_head:
            info["missing_keys"] = set(info["missing_keys"]) - {"score.weight"}
            info["unexpected_keys"] = set(info["unexpected_keys"]) - {"lm_head.weight"}
        _refuse_misfits(folder.name, info)
        if adapter is not None:
            model = _with_adapter(model, adapter)
    _widen_while_running(model.eval())
    with torch.no_grad():
        if decoder.scores:
            return _stock_scores(model, tokens)
        return model(input_ids=tokens, use_cache=False).logits.float()


def _stock_class(folder: Path, decoder: DecoderConfig) -> Any:
    """Returns the class of transformers that opens a model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if decoder.scores:
        return AutoModelForSequenceClassification
    # here only asked about text
    with_images = decoder.sees_images or read_json(folder / CONFIG).get("model_type") in WRAPPINGS
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def _stock_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns fp32 [B, S, 1], the scores of all tokens, of which the model itself gives each text's last one."""
    found: list[Tensor] = []
    (head,) = (module for name, module in model.named_modules() if name.rpartition(".")[2] == "score")
    watch = head.register_forward_hook(lambda _, __, scores: found.append(scores))
    for row in tokens:  # one by one: a batch needs a padding token, and no token here is one
        model(input_ids=row[None], use_cache=False)
    watch.remove()
    return torch.cat(found).float()


def _refuse_misfits(what: str, info: Mapping[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise UserError(
                f"transformers finds {kind.replace('_', ' ')} in {what}: {listed(names, most=3)}; "
                f"so nothing was exported, report this with its config.json."
            )


def _with_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Returns the model with the adapter; each of its tensors must be where PEFT's own export would have it."""
    from peft import PeftModel, get_peft_model_state_dict

    with warnings.catch_warnings():
        # PEFT asks for it by the name that transformers had before
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        try:
            adapted = PeftModel.from_pretrained(model, str(folder))
        except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"PEFT cannot put this adapter on the model ({type(error).__name__}: {reason[:_LONGEST_REASON]}), so "
                "nothing was exported: export with --format hf --merge, or leave the module out of lora.targets."
            ) from error
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    loaded = get_peft_model_state_dict(adapted)
    _check_experts(_take_experts(stored), _take_experts(loaded))
    for keys, what in ((stored.keys() - loaded.keys(), "does not take"), (loaded.keys() - stored.keys(), "misses")):
        # with a tied head trained or adapted PEFT lists the base's matrices too
        if strange := sorted(key for key in keys if "lora_" in key or what == "does not take"):
            raise UserError(f"PEFT {what} {strange[0]} of the adapter, so nothing was exported: report this.")
    for key, value in stored.items():
        if not torch.equal(loaded[key].to(value.dtype), value):
            raise UserError(f"PEFT reads {key} with other values than were exported: report this.")
    return adapted


def _take_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes out the factors of a mixture's experts, which PEFT stacks."""
    return {key: tensors.pop(key) for key in list(tensors) if ".experts." in key and ".lora_" in key}


def _check_experts(stored: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Checks that PEFT's stacks have the numbers of the experts' factors, by the sum of squares in each layer."""
    ours, theirs = (_squares_by_layer(tensors) for tensors in (stored, loaded))
    for place in ours.keys() | theirs.keys():
        if not math.isclose(ours.get(place, 0.0), theirs.get(place, 0.0), rel_tol=1e-5):
            raise UserError(
                f"PEFT reads {place[1]} of the experts in layer {place[0]} with other values than were exported: "
                "report this."
            )


def _squares_by_layer(tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for key, tensor in tensors.items():
        match = _FACTOR_IN_LAYER.search(key)
        assert match is not None, key
        found[match[1], match[2]] = found.get((match[1], match[2]), 0.0) + tensor.double().square().sum().item()
    return found


def _widen_while_running(model: nn.Module) -> None:
    """Has each module's own parameters in fp32 while it runs, and mapped again afterwards."""

    def widen(module: nn.Module, _: Sequence[Any]) -> None:
        for parameter in module.parameters(recurse=False):
            held, users = kept.get(parameter, (parameter.data, 0))  # a module around this one may have it too
            kept[parameter] = (held, users + 1)
            parameter.data = parameter.data.float()

    def narrow(module: nn.Module, _: Sequence[Any], __: object) -> None:
        for parameter in module.parameters(recurse=False):
            held, users = kept.pop(parameter)
            if users > 1:
                kept[parameter] = (held, users - 1)
            else:
                parameter.data = held

    kept: dict[nn.Parameter, tuple[Tensor, int]] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.is_floating_point() for parameter in own):
            module.register_forward_pre_hook(widen)
            module.register_forward_hook(narrow)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' own progress bars and advice."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
