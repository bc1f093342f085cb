"""Ranks, process groups and collectives. Knows tensors and groups; nothing of models."""
