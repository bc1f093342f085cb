"""Ops of mixtures of experts."""
