"""Rules for accelerate's and DeepSpeed's files alone: what trains is in the script that they start, which is
missing.
"""

from __future__ import annotations

from rankfold.migrating.conversion import Conversion
from rankfold.migrating.trainer import Default, Ours, Trainer
from rankfold.migrating.trainers import hugging_face as hf

_SCRIPT = "what the script says, which was not given"


def _finish(conversion: Conversion) -> None:
    conversion.notes.append(
        "only the launcher's side was given: the script's own options, such as the learning rate and the steps, "
        "are not in it; give its command line with --flags"
    )


DEFAULTS: dict[str, Default | Ours] = {
    option: default if option.startswith(("memory.", "parallel.", "optim.betas", "optim.eps")) else Ours(_SCRIPT)
    for option, default in hf.DEFAULTS.items()
} | {
    "model.dtype": Default(
        "float32", "DeepSpeedConfig: bf16.enabled and fp16.enabled = False; accelerate: mixed_precision no"
    ),
    "optim.clip_grad_norm": Default(1.0, "deepspeed.runtime.constants: GRADIENT_CLIPPING_DEFAULT"),
    "optim.weight_decay": Default(0.0, "FusedAdam: weight_decay"),
    "optim.schedule": Default("constant", "DeepSpeedConfig: no scheduler"),
}

LAUNCHERS = Trainer(name="the launcher", rules={}, defaults=DEFAULTS, adapters=lambda conversion: False, finish=_finish)
