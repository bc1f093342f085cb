"""Layers of models that see images."""
