"""Families of models that see images."""
