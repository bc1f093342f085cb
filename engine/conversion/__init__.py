"""Conversion between formats: Hugging Face models, PEFT adapters and partitioned bases; merge, export and proof."""
