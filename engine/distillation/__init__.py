"""Distillation: losses that compare a model's distributions with a teacher's, at given tokens."""
