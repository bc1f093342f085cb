"""Predicts the memory of a run and the time of a step, without weights, processes or a device."""
