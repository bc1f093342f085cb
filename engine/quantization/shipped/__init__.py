"""Checkpoints in few bits as vendors ship them: how their config says so, and how libraries spell a matrix."""
