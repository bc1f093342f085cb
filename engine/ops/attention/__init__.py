"""Causal attention over packed documents, on one device or over the context axis."""
