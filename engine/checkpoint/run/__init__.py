"""A run's checkpoints: what they hold, how a rank saves its part, and the folders of steps that are kept."""
