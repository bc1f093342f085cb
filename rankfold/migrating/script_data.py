"""The data sets that a Python script loads by their names on the hub, and the splits that its trainer gets."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_HELD_OUT = ("test", "val", "eval", "dev")
"""Beginnings of the names of splits that are not trained on."""


def data_set(call: ast.Call, names: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Yields name, subset and split of a call of load_dataset, as the flags of that name would be called.

    Args:
        call: the call.
        names: variables, with their only value.
    """
    keywords = {one.arg: one.value for one in call.keywords if one.arg}
    path = call.args[0] if call.args else keywords.get("path")
    subset = call.args[1] if len(call.args) > 1 else keywords.get("name")
    split = keywords.get("split")
    if path is None:
        return
    plain = _resolved(split, names)
    word = plain.value if isinstance(plain, ast.Constant) else None
    held_out = isinstance(word, str) and word.startswith(_HELD_OUT)
    yield "eval_dataset" if held_out else "dataset_name", path
    if subset is not None:
        yield "dataset_config", subset
    if split is not None:
        yield "dataset_test_split" if held_out else "dataset_split", split


def splits(call: ast.Call, names: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Yields the splits that a trainer is given, where they are a loaded data set's: train_dataset=data["train"]."""
    for keyword in call.keywords:
        key = {"train_dataset": "dataset_split", "eval_dataset": "dataset_test_split"}.get(str(keyword.arg))
        node = _resolved(keyword.value, names)
        if key and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            loaded = _resolved(node.value, names)
            if isinstance(loaded, ast.Call) and _loads(loaded) and all(one.arg != "split" for one in loaded.keywords):
                yield key, node.slice


def _resolved(node: ast.expr | None, names: dict[str, ast.expr]) -> ast.expr | None:
    return names.get(node.id, node) if isinstance(node, ast.Name) else node


def _loads(call: ast.Call) -> bool:
    function = call.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == "load_dataset"
