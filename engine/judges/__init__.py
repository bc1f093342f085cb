"""Reward models: a decoder whose head scores a whole text."""
