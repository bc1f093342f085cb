"""Rules for MiniMind's scripts, each with its own defaults."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import DTYPES, Conversion, set_dtype, sets, text
from rankfold.migrating.given import PROGRAM, Given


@sets("model.dtype")
def dtype(conversion: Conversion, given: Given) -> None:
    if str(given.value) not in DTYPES:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write bfloat16, float16 or float32.")
    set_dtype(conversion, given, DTYPES[str(given.value)])


@sets("model.path", "model.init")
def from_weight(conversion: Conversion, given: Given) -> None:
    if str(given.value) == "none":
        conversion.take(given, "model.init", "random")
    else:
        conversion.add_fact(given, "weight", text(given), "model.path: the Hugging Face folder of these weights")


_OTHERS = {"grpo": "GRPO", "ppo": "PPO", "agent": "reinforcement learning of tool calls", "distillation": "a student"}
"""Scripts that train something else, with rewards, critics or teachers of their own."""


def script(conversion: Conversion) -> str:
    """Returns the script that was started: dpo, full_sft, pretrain or lora."""
    programs = [str(row.given.value) for row in conversion.rows if row.given.key == PROGRAM]
    return programs[-1].removeprefix("train_").removesuffix(".py") if programs else "full_sft"


def tenth(conversion: Conversion) -> float:
    return float(conversion.options["optim.lr"]) / 10


def finish(conversion: Conversion) -> None:
    if script(conversion) in _OTHERS:
        raise UserError(
            f"train_{script(conversion)}.py of MiniMind trains {_OTHERS[script(conversion)]} with a loop of its own, "
            "which is not converted: of its scripts, train_pretrain.py, train_full_sft.py, train_lora.py and "
            "train_dpo.py are. If it is another project's script, name its source with --from."
        )


def adapters(conversion: Conversion) -> bool:
    return script(conversion) == "lora"
