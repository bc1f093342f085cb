"""Data, from text to batches: tokenizers, record formats, packing, and the order in which a run reads its data."""
