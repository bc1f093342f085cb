"""The arguments of a Python script that parses them itself, and their defaults: argparse's calls and the dataclasses of
HfArgumentParser, from the script's text. Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Container

_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_OBJECTS = ("args", "training_args")
"""Usual names of a script's parsed arguments, where it changes them."""
_OPTIONS = frozenset({
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm", "max_length", "lora_r",
    "lora_alpha", "lora_dropout", "use_peft", "packing", "assistant_only_loss", "completion_only_loss", "beta",
    "loss_type", "bf16", "fp16", "load_in_4bit", "load_in_8bit", "gradient_checkpointing", "seed",
})  # fmt: skip
"""Options that are a trainer's whatever the variable is called to which a script assigns them."""
_SAME = ("eval", "getattr", "int", "float", "str", "bool")
"""Functions that change the type of an argument, not its value."""
_PARSED = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config", "parse")


def script_arguments(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the names of a script's arguments, with the expressions that are their defaults; those that have to be
    given are left out.
    """
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            _add_argument(node, found)
    if parsed_classes(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(_leaf(one) == "dataclass" for one in node.decorator_list):
                _add_fields(node, found)
    return found


def assigned(tree: ast.Module, classes: Container[str]) -> dict[str, ast.expr]:
    """Returns arguments to which a script itself assigns values once they are parsed, or made by calling `classes`."""
    found: dict[str, ast.expr] = {}
    single = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    made = {
        node.targets[0].id
        for node in single
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call) and _leaf(node.value) in classes
    }
    for node in single:
        target = node.targets[0]
        owner = target.value if isinstance(target, ast.Attribute) else None
        if isinstance(node.value, ast.Call) and _leaf(node.value) in _SAME:
            continue
        if (
            isinstance(target, ast.Attribute)
            and isinstance(owner, ast.Name)
            and (owner.id in {*made, *_OBJECTS} or target.attr in _OPTIONS)
        ):
            found[target.attr] = node.value
    return found


def parsed_classes(tree: ast.Module) -> set[str]:
    """Returns the names in a script that parses dataclasses: those of its arguments' classes are among them."""
    parses = any(isinstance(node, ast.Call) and _leaf(node.func) in _PARSERS for node in ast.walk(tree))
    if not parses:
        return set()
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def parsed_names(tree: ast.Module) -> set[str]:
    """Returns the variables that hold a script's parsed arguments."""
    found = {"args", "training_args", "model_args", "script_args"}
    for node in ast.walk(tree):
        called = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _leaf(node.value.func) in _PARSED
        if called and isinstance(node, ast.Assign):
            for target in node.targets:
                found |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found


def _leaf(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _leaf(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _add_argument(call: ast.Call, found: dict[str, ast.expr]) -> None:
    flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    long = next((flag for flag in flags if flag.startswith("--")), None)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if long is None:
        return
    name = long.lstrip("-").replace("-", "_")
    if "default" in given:
        found[name] = given["default"]
    elif isinstance(action := given.get("action"), ast.Constant) and action.value in ("store_true", "store_false"):
        found[name] = ast.Constant(action.value == "store_false")


def _add_fields(node: ast.ClassDef, found: dict[str, ast.expr]) -> None:
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.value is None:
            continue
        value: ast.expr | None = one.value
        if isinstance(value, ast.Call) and _leaf(value.func) == "field":
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            factory = given.get("default_factory")
            value = given.get("default") or (factory.body if isinstance(factory, ast.Lambda) else None)
        if value is not None:
            found[one.target.id] = value
