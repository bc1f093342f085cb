"""Names of what wings add to the core, and the one function that turns a name into the object.

The core is what every run executes. A wing is a capability that some runs use, in a folder of its own. The core imports
no wing: a table names what a wing has as "module:NAME", and it is imported where it is first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def resolve(name: str) -> Any:
    """Returns the object that "module:NAME" names; imports its module."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
