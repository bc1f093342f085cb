"""Descriptions of Python functions as JSON schemas, which chat templates show to the model.

The form is that of `transformers.utils.get_json_schema`: types from the hints, words from a docstring in Google's
style.
A function without hints or descriptions is refused, since the model would have to guess how it is called. Without an
import of transformers, so that the processes that call tools start quickly.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_BASIC: dict[object, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    dict: {"type": "object"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    Any: {},
}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class NoSchema(ValueError):
    """Raised where a function cannot be described; its text is the reason."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the description of a function.

    Raises:
        NoSchema: an argument has no type hint or no description, or the function no docstring.
    """
    summary, described, returned = _documented(inspect.getdoc(function) or "")
    if not summary:
        raise NoSchema("it has no docstring that says what it does")
    try:
        hints = get_type_hints(function)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:  # a hint in quotes is evaluated
        raise NoSchema(f"its type hints cannot be read ({type(error).__name__}: {error})") from None
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise NoSchema(f"its argument {name} has no name of its own by which a model could give it")
        if name not in hints:
            raise NoSchema(f"its argument {name} has no type hint")
        if name not in described:
            raise NoSchema(f"its docstring has no line for the argument {name} under Args:")
        if parameter.default is parameter.empty:
            required.append(name)
        properties[name] = _described(_schema(hints[name]), described[name])
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found: dict[str, Any] = {"name": function.__name__, "description": summary, "parameters": parameters}
    if "return" in hints:
        found["return"] = _schema(hints["return"])
        if returned:
            found["return"]["description"] = returned
    return {"type": "function", "function": found}


def _described(schema: dict[str, Any], words: str) -> dict[str, Any]:
    if (choices := _CHOICES.search(words)) is not None:
        try:
            schema["enum"] = [str(one).strip() for one in json.loads(choices.group(1))]
        except (ValueError, TypeError):
            raise NoSchema(f"the choices in {words!r} are no list in JSON") from None
        words = words[: choices.start()].strip()
    return {**schema, "description": words}


def _schema(hint: Any) -> dict[str, Any]:
    """Returns the schema of a type hint."""
    if (basic := _basic(hint)) is not None:
        return dict(basic)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None:
        raise NoSchema(f"there is no JSON schema of the type {getattr(hint, '__name__', hint)}")
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        kinds = {type(one) for one in arguments}
        if not kinds <= {int, float, str, bool, type(None)}:
            raise NoSchema(f"{hint} has choices that are no numbers, texts or truth values")
        names = sorted(_BASIC[kind]["type"] for kind in kinds)
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple:
        if len(arguments) == 1 or Ellipsis in arguments:
            raise NoSchema(f"{hint} is a tuple whose items are not each described: use a list")
        return {"type": "array", "prefixItems": [_schema(one) for one in arguments]}
    if origin is dict:
        found: dict[str, Any] = {"type": "object"}
        if len(arguments) == 2:
            found["additionalProperties"] = _schema(arguments[1])
        return found
    raise NoSchema(f"there is no JSON schema of the type {hint}")


def _basic(hint: Any) -> dict[str, Any] | None:
    try:
        return _BASIC.get(hint)
    except TypeError:  # some hints have no hash
        return None


def _union(arguments: tuple[Any, ...]) -> dict[str, Any]:
    kinds = [_schema(one) for one in arguments if one is not type(None)]
    if len(kinds) == 1:
        found = kinds[0]
    elif all(isinstance(one.get("type"), str) and len(one) == 1 for one in kinds):
        found = {"type": sorted(one["type"] for one in kinds)}
    else:
        found = {"anyOf": kinds}
    if type(None) in arguments:
        found["nullable"] = True
    return found


def _documented(text: str) -> tuple[str, dict[str, str], str]:
    """Returns the words of a docstring before its sections, those of each argument, and those of what is returned."""
    parts = _SECTION.split(text.strip())
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    described: dict[str, str] = {}
    name = None
    body = sections.get("Args") or sections.get("Arguments") or sections.get("Parameters") or ""
    lines = [line for line in body.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    for line in lines:
        found = _ARGUMENT.match(line) if len(line) - len(line.lstrip()) == indent else None
        if found is not None:
            name = found.group(1).lstrip("*")
            described[name] = found.group(2).strip()
        elif name is not None:
            described[name] += " " + line.strip()
    returned = sections.get("Returns") or sections.get("Return") or ""
    return parts[0].strip(), described, " ".join(returned.split())
