"""The only package that knows all others: builds a run from its configuration and drives it."""
