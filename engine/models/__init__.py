"""The decoder, the table of families, and what can be said of a model without building its weights."""
