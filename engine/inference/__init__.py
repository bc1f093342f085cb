"""Generation: cache, sampling, and the loop over rows."""
