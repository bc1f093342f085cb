"""Keys of accelerate's files, and flags of the launchers: their rules."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import Conversion, set_dtype, sets, truth
from rankfold.migrating.given import Given


@sets("model.dtype")
def mixed_precision(conversion: Conversion, given: Given) -> None:
    names = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "False": "float32", "fp8": "bfloat16"}
    if str(given.value) not in names:
        raise UserError(f"{given.source} gives {given.key} as {given.value!r}: write no, bf16 or fp16.")
    if names[str(given.value)] == "float32":  # a trainer that is switched to 16 bits itself stays so
        conversion.drop(given, "the trainer's own keys say the arithmetic; without them it is float32")
        return
    set_dtype(conversion, given, names[str(given.value)])


@sets()
def distributed_type(conversion: Conversion, given: Given) -> None:
    kind = str(given.value).upper()
    if kind in ("DEEPSPEED", "FSDP", "MULTI_GPU", "MULTI_CPU", "NO", "MEGATRON_LM"):
        conversion.facts["distributed_type"] = kind
        conversion.drop(given, "one launcher for all, torchrun; parallel.shard says what is spread")
    else:
        conversion.drop(given, f"{given.value} has no counterpart")


FSDP_SHARDS = {"FULL_SHARD": "parameters", "SHARD_GRAD_OP": "gradients", "NO_SHARD": "none", "1": "parameters",
               "2": "gradients", "3": "none"}  # fmt: skip


@sets("memory.offload_weights", "memory.offload_optimizer")
def fsdp_offload(conversion: Conversion, given: Given) -> None:
    """Translates FSDP's CPUOffload, which keeps the states of the optimizer in host memory with the parameters."""
    conversion.take(given, "memory.offload_weights", truth(given))
    conversion.take(given, "memory.offload_optimizer", truth(given))
