"""The rules of keys in DeepSpeed's files."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import Conversion, Rule, number, sets, whole
from rankfold.migrating.given import Given

SHARDS = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}


@sets("parallel.shard")
def stage(conversion: Conversion, given: Given) -> None:
    stage = whole(given)
    if stage not in SHARDS:
        raise UserError(f"{given.source} gives {given.key} as {stage}, but ZeRO has stages 0 to 3: use one of them.")
    conversion.take(given, "parallel.shard", SHARDS[stage], f"ZeRO stage {stage}")


def offload(option_name: str) -> Rule:
    def rule(conversion: Conversion, given: Given) -> None:
        place = str(given.value).lower()
        if place in ("none", "null", "false"):
            conversion.take(given, option_name, False)
        elif place in ("cpu", "nvme"):
            conversion.take(given, option_name, True, "in host memory, there is no NVMe" if place == "nvme" else "")
        else:
            raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write none or cpu.")

    return Rule(rule, (option_name,))


@sets("optim.clip_grad_norm")
def clipping(conversion: Conversion, given: Given) -> None:
    conversion.facts["deepspeed_clipping"] = number(given)
    conversion.take(given, "optim.clip_grad_norm", number(given))


@sets()
def optimizer_type(conversion: Conversion, given: Given) -> None:
    known = "adamw adam fusedadam deepspeedcpuadam adamw_torch adamw_torch_fused adamw_hf cpuadam"
    if str(given.value).lower() in known.split():
        conversion.drop(given, "AdamW is the optimizer; optim.backend auto takes its fastest code")
    else:
        conversion.unsupported(given, "AdamW is the optimizer")


SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedulers -> the schedule here."""


@sets("optim.schedule")
def schedule_type(conversion: Conversion, given: Given) -> None:
    conversion.facts["deepspeed_schedule"] = str(given.value)
    if str(given.value) in SCHEDULES:
        conversion.take(given, "optim.schedule", SCHEDULES[str(given.value)])
    else:
        conversion.unsupported(given, "optim.schedule is constant, linear or cosine")


@sets("optim.betas")
def betas(conversion: Conversion, given: Given) -> None:
    if not isinstance(given.value, list) or len(given.value) != 2:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}, but two numbers are expected.")
    conversion.take(given, "optim.betas", [float(value) for value in given.value])
