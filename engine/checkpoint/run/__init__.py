"""A run's checkpoints: their contents, how a rank saves its part, and the folders of steps that are kept."""
