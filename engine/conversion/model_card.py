"""The model card (README.md) of a PEFT adapter: its base and its training, with the front matter that PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.run_files import CHECKPOINTS
from engine.conversion.peft_config import SCORING
from engine.files.documents import open_file
from engine.files.strict_json import JsonFlaw, parse_json

CARD = "README.md"
_METRICS = "metrics.jsonl"


def training_facts(checkpoint: TrainingCheckpoint) -> dict[str, str]:
    """Returns the facts on a card about a training run: its steps, and the losses that are known."""
    state = checkpoint.state
    facts = {"Steps": str(state.get("step"))}
    if (loss := _training_loss(checkpoint, state.get("step"))) is not None:
        facts["Training loss of the last step"] = f"{loss:.4f}"
    best = state.get("best")
    if isinstance(best, dict) and isinstance(loss := best.get("last"), float):
        facts["Last evaluation loss"] = f"{loss:.4f} (step {best.get('seen')})"
    return facts


def model_card(config: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Returns the text of the card.

    Args:
        config: that of adapter_config.json.
        facts: further facts, name -> value.
    """
    base = str(config["base_model_name_or_path"])
    targets = ", ".join(f"`{name}`" for name in config["target_modules"])
    rows = {
        "Base model": f"`{base}`",
        "Rank": f"{config['r']}",
        "Alpha": f"{config['lora_alpha']}",
        "Dropout": f"{config['lora_dropout']}",
        "Targets": targets,
    }
    rows |= {f"`{key}`": "yes" for key in ("use_rslora", "use_dora", "lora_bias") if config[key]}
    if config["modules_to_save"]:
        rows["Trained in full"] = ", ".join(f"`{name}`" for name in config["modules_to_save"])
    auto, more, tag = "CausalLM", "", "text-generation"
    if config["task_type"] == SCORING:
        auto, more, tag = "SequenceClassification", ", num_labels=1", "text-classification"
    table = "\n".join(f"| {name} | {value} |" for name, value in (rows | dict(facts)).items())
    return f"""---
base_model: {json.dumps(base)}
library_name: peft
pipeline_tag: {tag}
tags:
- {json.dumps(f"base_model:adapter:{base}")}
- lora
- transformers
---

# LoRA adapter

| | |
|---|---|
{table}

```python
from peft import PeftModel
from transformers import AutoModelFor{auto}

base = AutoModelFor{auto}.from_pretrained({json.dumps(base)}{more})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```
"""


def _training_loss(checkpoint: TrainingCheckpoint, step: object) -> float | None:
    """Returns the loss of the checkpoint's last step, where the run's metrics file is beside its checkpoints."""
    path = checkpoint.folder.absolute().parents[1] / _METRICS
    if checkpoint.folder.absolute().parent.name != CHECKPOINTS or not Path(path).is_file():
        return None
    found = None
    with open_file(path) as file:
        for line in file:
            try:
                record = parse_json(line)
            except JsonFlaw:
                continue  # the line that a killed run was writing
            if isinstance(record, dict) and record.get("step") == step and isinstance(record.get("loss"), float):
                found = record["loss"]
    return found
