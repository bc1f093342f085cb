"""Ops of models that see images."""
