"""The page of the Python API: each public name of `engine.api`, from its docstring."""

from __future__ import annotations

import engine.api


def api_page() -> str:
    """Returns Markdown whose ::: lines mkdocstrings fills."""
    functions = [name for name in engine.api.__all__ if not isinstance(getattr(engine.api, name), type)]
    classes = [name for name in engine.api.__all__ if name not in functions]
    parts = [
        "# Python, object by object",
        "Everything that `engine.api` has. The guide is [Python API](python.md); options are explained under "
        "[Options of a run](options/index.md).",
    ]
    for name in [*functions, *classes]:
        parts.append(f"::: engine.api.{name}")
    return "\n\n".join(parts) + "\n"
