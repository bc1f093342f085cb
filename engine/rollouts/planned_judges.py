"""Predicts the memory of reward models among the rewards: each process that calls rewards holds all of them.

Their weights are counted, in the dtype that they are stored in. Not counted: what their passes take, of up to 16,384
tokens each, and the context of a process on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.config.rollout import RolloutOptions
from engine.errors import UserError
from engine.planning.rank_layout import Neighbour

_ADAPTER = "adapter_config.json"


def judges_on_device(options: RolloutOptions) -> Neighbour | None:
    """Returns what the reward models of a run hold on their device; None where there are none.

    Raises:
        UserError: one is not there.
    """
    folders = [source.argument for source in options.reward_sources if source.is_model]
    if not folders:
        return None
    device = options.judge_device or "cuda"
    gpu = None if device == "cpu" else int(device.partition(":")[2] or 0)
    return Neighbour(gpu, options.reward_workers * sum(map(_weights, folders)), options.reward_workers)


def _weights(text: str) -> int:
    """Returns the bytes of a reward model's weights, with its base's where it is an adapter."""
    folder = Path(text)
    found = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if not found:
        raise UserError(
            f"rollout.rewards has model:{text}, which has no weights in files *.safetensors, so that its memory cannot "
            "be predicted: name a folder with them."
        )
    config = folder / _ADAPTER
    if config.is_file() and not (folder / "config.json").is_file():
        found += _weights(str(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]))
    return found
