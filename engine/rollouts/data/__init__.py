"""Prompts, and completions of them."""
