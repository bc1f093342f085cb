"""Rules for LLaMA-Factory's files and flags."""

from __future__ import annotations

from engine.errors import UserError
from rankfold.migrating.conversion import Conversion, other_objective, sets, truth
from rankfold.migrating.given import Given
from rankfold.migrating.trainers import images, shared

_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_STAGES = ("pt", "sft", "dpo", "kto")
_METHODS = ("lora", "full", "freeze")


@sets("objective.name")
def stage(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    if name not in _STAGES:
        raise other_objective(given, {"rm": "a reward model", "ppo": "PPO"}.get(name, "another stage"))
    conversion.add_fact(
        given, "stage", name, f"objective.name: {'language_modeling' if name in ('pt', 'sft') else name}"
    )


@sets("objective.name")
def pref_loss(conversion: Conversion, given: Given) -> None:
    if str(given.value) not in _LOSSES:
        raise other_objective(given, "another loss")
    conversion.add_fact(given, "pref_loss", _LOSSES[str(given.value)], "objective.name, where the stage is dpo")


@sets("lora.rank", "trainable")
def finetuning_type(conversion: Conversion, given: Given) -> None:
    name = str(given.value)
    if name == "oft":
        raise UserError(
            f"{given.source} gives finetuning_type as oft, but orthogonal adapters are not supported: give lora."
        )
    if name not in _METHODS:
        raise UserError(f"{given.source} gives finetuning_type as {name!r}: write lora, full or freeze.")
    conversion.add_fact(given, "finetuning_type", name, f"trains {'adapters' if name == 'lora' else name}")


@sets("data.packing")
def neat_packing(conversion: Conversion, given: Given) -> None:
    if truth(given):
        conversion.take(given, "data.packing", True, "attention stays inside each sample")
    else:
        conversion.drop(given, "switched off")


@sets("data.packing")
def packing(conversion: Conversion, given: Given) -> None:
    conversion.add_fact(given, "packing", truth(given) if given.value is not None else None, "data.packing")


@sets("data.train", "data.validation")
def dataset(conversion: Conversion, given: Given) -> None:
    which = "data.validation" if given.key == "eval_dataset" else "data.train"
    conversion.add_fact(
        given, f"{which} of the hub", given.value, f"{which}: the files that dataset_info.json names for it"
    )


_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
"""Formatting of dataset_info.json -> its columns, as they are called by default."""


@sets("data.train", "data.mix", "data.validation")
def registered(conversion: Conversion, given: Given) -> None:
    """Converts entries of dataset_info.json: those that are files become data.train and data.mix."""
    which = "data.validation" if given.key.startswith("eval") else "data.train"
    entries = [one for one in given.value if isinstance(one, dict)] if isinstance(given.value, list) else []
    files = [f"{one.get('folder', 'data')}/{one['file_name']}" for one in entries if one.get("file_name")]
    if not files or len(files) < len(entries) or not all(file.endswith(shared.FILES) for file in files):
        conversion.drop(given, "not all are files: save them as files and name these")
        return
    counts = [one.get("records") for one in entries]
    limit = next((row.given.value for row in conversion.rows if row.given.key == "max_samples"), None)
    known = [min(one, limit) if isinstance(limit, int) else one for one in counts if isinstance(one, int)]
    shared.files(conversion, given, which, files, known if len(known) == len(files) else None)
    for entry in entries:
        usual = _COLUMNS.get(str(entry.get("formatting", "alpaca")), {})
        columns = entry["columns"] if isinstance(entry.get("columns"), dict) else {}
        other = [
            f"{key} {name}" for key, name in columns.items() if key in usual and name not in (usual[key], key, "text")
        ]
        if other:
            conversion.notes.append(
                f"{entry['file_name']} has other fields ({', '.join(other)}): data.format says which are read"
            )
        if entry.get("num_samples"):
            conversion.notes.append(
                f"num_samples {entry['num_samples']} of {entry['file_name']}: shorten the file to as many"
            )


def preference(conversion: Conversion) -> str:
    """Returns the objective; pref_loss counts with stage dpo alone."""
    kinds = {"dpo": conversion.facts.get("pref_loss", "dpo"), "kto": "kto"}
    return str(kinds.get(conversion.facts.get("stage", "sft"), "language_modeling"))


def alpha(conversion: Conversion) -> float:
    return 2.0 * float(conversion.options["lora.rank"])


def adapters(conversion: Conversion) -> bool:
    """Returns whether adapters train: FinetuningArguments.finetuning_type is lora by default."""
    return bool(conversion.facts.get("finetuning_type", "lora") == "lora")


def _refuse_without_training(conversion: Conversion) -> None:
    """Refuses files for chats, exports and predictions."""
    given = {row.given.key: row.given for row in conversion.rows}
    other = next(
        (key for key in ("export_dir", "infer_backend", "do_predict") if key in given and given[key].value), None
    )
    if other is not None and not (given["do_train"].value if "do_train" in given else False):
        raise UserError(
            f"{given[other].source} has {other} and no do_train, so that it does not train: give a file that does."
        )


def finish(conversion: Conversion) -> None:
    facts, options = conversion.facts, conversion.options
    _refuse_without_training(conversion)
    if facts.get("pure_bf16"):
        options["model.dtype"] = "bfloat16"
    packed = facts.get("packing")
    if packed and facts.get("stage") == "pt":
        conversion.set_default("derived", "packing", "data.packing", "concatenate", "text end to end")
    elif packed:
        conversion.set_default("derived", "packing", "data.packing", True)
        conversion.notes.append(
            "packing without neat_packing lets the samples of a row see each other; here attention stays inside each"
        )
    elif packed is False:
        conversion.set_default("derived", "packing", "data.packing", False)
    if facts.get("finetuning_type") == "freeze":
        _freeze(conversion)
    _images(conversion)


_IMAGES = (
    "media_dir", "image_max_pixels", "image_min_pixels", "freeze_vision_tower", "freeze_multi_modal_projector",
    "freeze_language_model", "train_mm_proj_only",
)  # fmt: skip


def _images(conversion: Conversion) -> None:
    """Sets the trained parts of a vision-language model: by default the language model alone. Full training says
    so of every model, because nothing given tells which has a vision model."""
    facts = conversion.facts
    frozen = {part: facts.get(f"freeze_{part}", part != "language_model") for part in _PARTS}
    if facts.get("projector_only"):
        frozen = {part: part != "projector" for part in _PARTS}
    facts["full training"] = [] if frozen["language_model"] else list(images.LANGUAGE_MODEL)
    trained = [name for part, name in _PARTS.items() if name and not frozen[part]]
    if facts.get("finetuning_type", "lora") == "full" and trained:
        conversion.to_fill.append(
            f"trainable: {' and '.join(trained)} train too; add the names they have in this model, or vision for both"
        )
    elif not frozen["vision_tower"]:
        conversion.to_fill.append(
            "lora.targets: freeze_vision_tower false puts adapters into the tower too; add names of its linears, as "
            r"'vision_tower\..*' or 'visual\.blocks\..*'"
        )
    if conversion.given(*_IMAGES) and not conversion.given("image_max_pixels"):
        conversion.notes.append(
            "LLaMA-Factory makes images of more than 589,824 pixels smaller (image_max_pixels); here they keep their "
            "size until the model's own processor cuts them"
        )


_PARTS = {"vision_tower": "the tower", "projector": "the projector", "language_model": ""}
"""Parts of a vision-language model that may be frozen -> their names where they train in full."""


def _freeze(conversion: Conversion) -> None:
    """Sets the layers that train; the last ones have numbers only once the model is known."""
    facts = conversion.facts  # FreezeArguments has 2 layers and all modules by default
    layers, modules = facts.get("freeze_layers", 2), facts.get("freeze_modules", ["all"])
    source = "FinetuningArguments.finetuning_type = freeze"
    inside = [""] if modules == ["all"] else [f".{name}" for name in modules] or [""]
    extra = facts.get("freeze_extra", [])
    if layers < 0:
        chosen = [f"layers.{number}{name}" for number in range(-layers) for name in inside]
    else:
        chosen = [f"layers.LAST-{back}{name}" for back in range(layers) for name in inside]
        conversion.to_fill.append(
            f"trainable: the last {layers} layers train; write their numbers, from config.json's num_hidden_layers"
        )
    conversion.set_default(source, "freeze_trainable_layers", "trainable", [*chosen, *extra])
    conversion.set_default(source, "freeze_trainable_layers", "lora.rank", 0)
