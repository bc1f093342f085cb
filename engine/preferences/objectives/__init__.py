"""Losses of compared and of judged answers."""
