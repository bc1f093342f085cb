"""Several models on one frozen base, each with adapters and an optimizer of its own; see README.md."""
