"""Other programs and their files: what they answer is read, and what they run is run, within limits."""
