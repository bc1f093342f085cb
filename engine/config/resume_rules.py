"""Which options a run may change when it resumes, and which of these changes it reports.

Every option is in one of two places here: SAID, because another value changes what is trained, evaluated or kept, or
SILENT, because it does not. What must not change at all (the adapters' shape, the base) is refused where the checkpoint
is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError
from engine.files.strict_yaml import YamlFlaw, parse_yaml

SAID: dict[str, tuple[str, ...]] = {
    "": ("trainable",),
    "model": ("dtype", "base_dtype"),
    "lora": (
        "rank", "alpha", "dropout", "targets", "exclude", "layers", "rank_pattern", "alpha_pattern", "rslora", "dora",
        "bias", "fused", "experts", "ensure_weight_tying",
    ),
    "objective": (
        "name", "beta", "label_smoothing", "length_normalised", "margin", "desirable_weight", "undesirable_weight",
        "reference", "loss_type", "epsilon", "epsilon_high", "delta", "kl_bias_correction", "scale_rewards",
        "num_iterations", "top_entropy_quantile", "importance_correction", "importance_max", "importance_min",
        "ratio_level", "sapo_temperature_pos", "sapo_temperature_neg", "reward_aggregation", "mask_truncated",
        "off_policy_threshold", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
    ),
    "rollout": (
        "rewards", "reward_weights", "num_generations", "max_completion_length", "temperature", "top_k", "top_p",
        "min_p", "repetition_penalty", "steps_per_generation", "overlong_buffer", "drop_uniform_groups", "server",
        "overlap", "mismatch", "mismatch_bound",
    ),
    "data": (
        "mix", "validation", "validation_split", "format", "seq_length", "packing", "overlong", "mask_prompt",
        "chat_template", "chat_arguments", "learn_after_end",
    ),
    "optim": (
        "lr", "betas", "eps", "weight_decay", "clip_grad_norm", "loss_scale_window", "schedule", "warmup_steps",
        "warmup_ratio", "min_lr", "lr_pattern",
    ),
    "train": (
        "steps", "epochs", "global_batch_size", "last_batch", "seed", "eval_every", "eval_first", "eval_samples",
        "eval_mean", "target_eval_loss", "early_stopping_patience", "early_stopping_min_delta", "router_aux_loss_coef",
    ),
    "memory": ("activation_dtype",),
    "guards": ("spike_policy", "spike_deviations", "spike_window", "non_finite_policy"),
}  # fmt: skip
"""The options whose change a resumed run reports, by section."""

SILENT: dict[str, tuple[str, ...]] = {
    # the base is compared by fingerprint; kernels agree to rounding; weights are not drawn again
    "model": ("path", "init", "kernels", "attention"),
    # factors come from the checkpoint
    "lora": ("init", "init_from"),
    # a figure
    "objective": ("report_entropy",),
    # the content of the training data is compared by fingerprint, whatever its path, and the names and sizes of its
    # images with it; printed samples
    "data": ("train", "image_folder", "tokenizer", "num_workers", "show"),
    # backends with the same update; when a run gives up; the initial loss scale, since the checkpoint has the current
    # one
    "optim": ("backend", "max_skipped_steps", "loss_scale"),
    # rows that are computed together, processes, how a server is spoken to, and printed samples
    "rollout": (
        "slots", "reward_workers", "reward_timeout", "show", "server_kind", "server_model", "server_timeout",
        "adapter_dir",
    ),
    # layout; bits within one layout; steps without effect; timeouts; printed samples
    "train": (
        "micro_batch_size", "deterministic", "synthetic_steps", "collective_timeout", "hang_report_after",
        "sample_every", "sample_prompts", "sample_tokens", "sample_chat", "sample_images",
    ),
    # where things are kept, not what they are
    "memory": (
        "recompute", "recompute_layers", "offload_activations", "offload_weights", "offload_optimizer", "cuda_graph",
        "graph_documents",
    ),
    # monitoring and reports
    "guards": ("liveness_steps", "liveness_policy", "replicas_every", "replicas_policy", "locate_non_finite"),
    # layout, places and reports: all of them
    "parallel": ("*",),
    "checkpoint": ("*",),
    "log": ("*",),
}  # fmt: skip
"""The options whose change is not reported, and why, by section; * for the whole section."""

_BEFORE: dict[str, Any] = {"train.last_batch": "full", "optim.lr_pattern": None, "train.router_aux_loss_coef": 0.0}
"""The behaviour of runs from before an option existed."""
_DEFAULTS_BEFORE: dict[str, Any] = {"objective.beta": 0.1}
"""Defaults of before, of options that have another now and still mean the same by it."""


@dataclass(frozen=True, slots=True)
class Change:
    """An option that differs from the checkpoint's own configuration."""

    option: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.option} {_shown(self.old)} -> {_shown(self.new)}"


def is_said(option: str) -> bool:
    """Returns whether a change of the option is reported."""
    section, _, name = option.rpartition(".")
    return name in SAID.get(section, ())


def changes(saved: str, now: str) -> list[Change]:
    """Returns the reported options that differ between two configurations, both as `to_yaml` writes them.

    Options that the saved one does not know, because it is older than they are, count as unchanged.
    """
    before, after = _BEFORE | flat_options(saved), flat_options(now)
    return [
        Change(option, before[option], value)
        for option, value in after.items()
        if is_said(option)
        and option in before
        and before[option] != value
        # a default that was written down, and the one that is now
        and not (value is None and option in _DEFAULTS_BEFORE and before[option] == _DEFAULTS_BEFORE[option])
    ]


def flat_options(text: str) -> dict[str, Any]:
    """Returns a configuration in YAML as options by their names, such as {"optim.lr": 2e-4}.

    Raises:
        UserError: it is not YAML.
    """
    flat: dict[str, Any] = {}
    try:
        options = parse_yaml(text)
    except YamlFlaw as flaw:
        raise UserError(f"a saved configuration {flaw}, or copy the run again.") from None
    for name, value in options.items():
        if name in _SECTIONS and isinstance(value, Mapping):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            flat[name] = value
    return flat


_SECTIONS = frozenset((SAID.keys() | SILENT.keys()) - {""})


def _shown(value: Any) -> str:
    """Returns a value as a user writes it."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
