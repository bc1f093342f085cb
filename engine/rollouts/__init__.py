"""Rollouts: the steps of a run whose rows are completions that the model samples itself, scored by functions."""
