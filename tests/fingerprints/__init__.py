"""Fingerprints of small training runs, which show whether a change keeps every bit. See `__main__.py`."""
