"""Completions of several turns: tools, environments, and the conversations in which the model calls them."""
