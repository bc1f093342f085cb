"""What a launch does wrong."""

from __future__ import annotations


class Fault(AssertionError):
    """A kernel does what a GPU would not let pass, or would answer differently each time."""
