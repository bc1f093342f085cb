"""Pairs of answers, and judged answers."""
