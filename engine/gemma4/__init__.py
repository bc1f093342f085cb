"""Gemma 4's language models: heads whose sizes differ between layers, experts beside MLPs, inputs of single layers, and
keys that layers share. See README.md."""
