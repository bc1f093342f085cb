"""Rules for scripts of SwissArmyTransformer, with DeepSpeed's file beside them."""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion

_TOWER = ("vit_checkpoint_activations", "vit_no_grad", "image_length", "eva_args")


def finish(conversion: Conversion) -> None:
    if conversion.given(*_TOWER):
        conversion.to_fill.append(
            "trainable, optim.lr_pattern: the script's disable_untrainable_params says what trains beside adapters, "
            "and at which rate, such as {model.vision: 1e-6} for a tenth of 1e-5"
        )


def warmup_ratio(conversion: Conversion) -> float | None:
    return None if conversion.options.get("optim.warmup_steps") else 0.01


def min_lr(conversion: Conversion) -> float:
    """Returns AnnealingLR's lowest rate: a cosine ends at lr_decay_ratio of the highest, a line at 0."""
    cosine = conversion.options.get("optim.schedule") == "cosine"
    return float(conversion.options["optim.lr"]) / 10 if cosine else 0.0
