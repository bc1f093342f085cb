"""The model card (README.md) beside an export: its base and its training, with the front matter that the Hugging Face
hub and PEFT read.

The text between two marks is written anew by each upload; the rest of a card on the hub belongs to people. The licence
is theirs to state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.model_folder import ModelFolder
from engine.config.hub import name_of_snapshot
from engine.conversion.run_facts import NO_FACTS, TrainingFacts

CARD = "README.md"
TAG = "rankfold"
"""The tag by which an upload recognises a card of an earlier one."""
BEGIN, END = "<!-- rankfold: begin -->", "<!-- rankfold: end -->"
_OPENERS = {
    "text-generation": "AutoModelForCausalLM",
    "image-text-to-text": "AutoModelForImageTextToText",
    "text-classification": "AutoModelForSequenceClassification",
}
_LICENCE = "# license: state one here, such as apache-2.0; the licence of the base may bind it"


def adapter_card(config: Mapping[str, Any], model: ModelFolder, facts: TrainingFacts = NO_FACTS) -> str:
    """Returns the card of a PEFT adapter.

    Args:
        config: that of adapter_config.json.
        model: its base.
        facts: about its training.
    """
    task = _task(model)
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
    head = _front(base, "peft", task, facts, [f"base_model:adapter:{base}", "lora", TAG, "transformers"])
    more = f", revision={json.dumps(config['revision'])}" if config.get("revision") else ""
    more += ", num_labels=1" if model.decoder.scores else ""
    example = f"""from peft import PeftModel
from transformers import {_OPENERS[task]}

base = {_OPENERS[task]}.from_pretrained({json.dumps(base)}{more})
model = PeftModel.from_pretrained(base, "OWNER/NAME or a folder")"""
    return _card(head, "LoRA adapter", rows | dict(facts.rows), example)


def model_card(model: ModelFolder, facts: TrainingFacts = NO_FACTS, *, adapter: Path | None = None) -> str:
    """Returns the card of a whole model.

    Args:
        model: that it was made from, which is named where it is a snapshot of the hub.
        facts: about its training.
        adapter: folder of the adapter that was merged into it, named as `model` is.
    """
    task, name = _task(model), name_of_snapshot(model.hf_path.resolve())
    rows = {} if name is None else {"Base model": f"`{name}`"}
    if adapter is not None:
        merged = name_of_snapshot(adapter.resolve())
        rows["Merged adapter"] = "a LoRA adapter" if merged is None else f"`{merged}`"
    head = _front(None if name is None else name.repo, "transformers", task, facts, [TAG])
    example = f"""from transformers import {_OPENERS[task]}

model = {_OPENERS[task]}.from_pretrained("OWNER/NAME or a folder")"""
    return _card(head, "Fine-tuned model", rows | dict(facts.rows), example)


def _task(model: ModelFolder) -> str:
    """Returns the hub's name for a model's purpose."""
    if model.decoder.scores:
        return "text-classification"
    return "image-text-to-text" if "vision_config" in model.hf_config else "text-generation"


def _front(base: str | None, library: str, task: str, facts: TrainingFacts, tags: Iterable[str]) -> str:
    lines = [] if base is None else [f"base_model: {json.dumps(base)}"]
    if base is not None and library == "transformers":
        lines.append("base_model_relation: finetune")
    lines += [f"library_name: {library}", f"pipeline_tag: {task}"]
    if facts.datasets:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in facts.datasets)]
    lines += ["tags:", *(f"- {json.dumps(tag) if ':' in tag else tag}" for tag in tags)]
    return "\n".join([*lines, _LICENCE])


def _card(head: str, title: str, rows: Mapping[str, str], example: str) -> str:
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    table = f"| | |\n|---|---|\n{table}\n\n" if rows else ""
    return f"""---
{head}
---

# {title}

{BEGIN}
{table}```python
{example}
```
{END}
"""


def _cell(text: str) -> str:
    """Returns a text for a cell of a table: on one line, without what would end the cell or a mark."""
    return " ".join(text.replace("|", "\\|").replace("<!--", "").split())
