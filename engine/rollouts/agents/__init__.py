"""Completions that a program outside drives: it asks an endpoint of the run, as it would ask any server of models."""
