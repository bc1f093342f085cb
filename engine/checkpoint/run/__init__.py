"""A run's checkpoints: their contents, the saving of a rank's part, and the folders of kept steps."""
