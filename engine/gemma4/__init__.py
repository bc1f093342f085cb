"""Gemma 4's language models: layers whose heads have sizes of their own. See README.md."""
