"""The chat template of a model's processor for text and images, where it is apart from the tokenizer's.

Releases of transformers before chat_template.jinja wrote it into processor_config.json or chat_template.json, and
today's read these first. The tokenizer beside it may have another template, which writes no images.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import UserError
from engine.files.documents import read_json
from engine.sentences import as_written

PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
"""That may hold it under the key `chat_template`, the first that does first."""


def processor_template(folder: Path) -> str | None:
    """Returns the template of the processor in a model's folder; None where the tokenizer's is the only one, or the
    model has no vision tower.

    Raises:
        UserError: one of the files is damaged.
    """
    config = folder / "config.json"
    found = [file for name in PROCESSOR_FILES if (file := folder / name).is_file()]
    if not found or not config.is_file() or not read_json(config, "copy it again").get("vision_config"):
        return None
    for file in found:
        template = read_json(file, "copy it again").get("chat_template")
        if isinstance(template, str):
            return template
        if template is not None:
            raise UserError(
                f"{file} has chat_template {as_written(template)}, but text is expected: copy the model's own file."
            )
    return None
