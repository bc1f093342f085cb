"""Gemma 4's language models: heads whose sizes differ between layers, and experts beside MLPs. See README.md."""
