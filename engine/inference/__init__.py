"""Text from a model: cache, sampling, and the loop over rows."""
