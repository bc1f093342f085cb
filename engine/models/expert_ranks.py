"""The check that a model's experts divide over the ranks that are to hold them."""

from __future__ import annotations

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig


def check_expert_ranks(config: DecoderConfig, *, expert: int, tensor: int, folds: bool) -> None:
    """Checks that the experts divide over their ranks.

    Args:
        expert: ranks over which they are divided.
        tensor: tensor ranks.
        folds: whether they are spread over other ranks than the rest of the model.

    Raises:
        UserError: there are none, or their number does not divide, or tensor ranks cannot be beside expert ranks.
    """
    if not folds:
        return
    option = f"expert is {expert}" if expert > 1 else "expert_tensor is 1"
    if not config.divided_experts:
        reason = "has no experts that a router chooses"
        if config.made_by is not None:
            reason = "has transformers' own modules, and no expert plan of transformers divides experts of theirs"
        raise UserError(
            f"parallel.{option}, but this {config.family} model {reason}: leave parallel.{option.split()[0]} out."
        )
    if tensor > 1 and not config.splits_tokens:
        raise UserError(
            f"parallel.{option} and parallel.tensor is {tensor}, but the experts of this {config.family} model, whose "
            "layers are transformers' own modules, are divided over ranks of one kind: set parallel.tensor to 1, or "
            f"leave parallel.{option.split()[0]} out."
        )
    if (count := config.divided_experts) % expert:
        raise UserError(
            f"parallel.expert is {expert}, which does not divide the model's {count} experts: use a "
            f"parallel.expert that divides {count}."
        )
