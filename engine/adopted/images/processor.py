"""transformers' processor of a model's folder, opened without what videos and sounds need."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from engine.adopted.structure import FAULTS, first_line, quiet
from engine.errors import UserError
from engine.files.documents import read_json
from engine.size_limits import check_sizes

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files of a folder that may name the class of its processor."""


def open_processor(folder: Path, model_type: str) -> Any:
    """Opens the processor of text and images in a model's folder.

    Its image processor is that of Pillow where there is one. Processors of videos and sounds are left out: those of
    videos ask for torchvision.

    Args:
        model_type: of its config.json.

    Raises:
        UserError: the folder has none that transformers can open, or a package is missing.
    """
    import transformers

    settings = {name: _read(folder / name) for name in _FILES}
    named = _class_name(settings, model_type)
    kind = getattr(transformers, named, None) if named else None
    if kind is None:
        raise UserError(
            f"{folder} names no processor of transformers for images of a {model_type} model: copy its "
            "processor_config.json and preprocessor_config.json."
        )
    try:
        with quiet():
            return _opened(kind, folder, settings)
    except UserError:
        raise
    except (OSError, *FAULTS) as error:
        change = "Copy the model's own files."
        if isinstance(error, ImportError) or "torchvision" in str(error):
            change = "Install the package that it names."
        raise UserError(f"transformers cannot open the {named} in {folder}: {first_line(error)}. {change}") from None


def image_settings(processor: Any) -> dict[str, Any]:
    """Returns what a processor of images and text tells its image processor by default."""
    own = getattr(processor, "images_kwargs", None)
    if own is None:  # before transformers 5.23 they were with its keywords
        own = processor.valid_processor_kwargs._defaults.get("images_kwargs", {})
    return {**own, "return_tensors": "np"}


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(file, "copy it again") if file.is_file() else {}
    check_sizes(found, file.name)
    return found


def _class_name(settings: dict[str, dict[str, Any]], model_type: str) -> str | None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    for found in settings.values():
        if isinstance(name := found.get("processor_class"), str):
            return name
    return PROCESSOR_MAPPING_NAMES.get(model_type)


def _opened(kind: Any, folder: Path, settings: dict[str, dict[str, Any]]) -> Any:
    from transformers import AutoTokenizer

    # the name at the top of transformers 5.17 asks for torchvision
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    class Opened(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Takes None for the parts that are left out."""

    Opened.__name__ = kind.__name__
    auto: Any = AutoImageProcessor
    parts: dict[str, Any] = {}
    for name in kind.get_attributes():
        if name == "image_processor":
            parts[name] = auto.from_pretrained(str(folder), backend="pil", local_files_only=True)
        elif name == "tokenizer":
            parts[name] = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        else:
            parts[name] = None
    taken = inspect.signature(kind.__init__).parameters
    others = {
        key: value
        for key, value in settings["processor_config.json"].items()
        if key in taken and key not in parts and key != "chat_template"
    }
    return Opened(**parts, **others)
