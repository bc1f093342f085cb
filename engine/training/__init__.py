"""The only package that knows everyone: builds a run from its configuration and drives it."""
