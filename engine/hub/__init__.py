"""The Hugging Face hub: models and adapters by name."""
