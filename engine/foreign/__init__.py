"""Other people's programs and files: what they answer is read, and what they run is run, within limits."""
