"""The decoder, the table of families, and what is known of a model without building its weights."""
