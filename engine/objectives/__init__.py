"""Training objectives: each turns token losses into the loss that is minimised."""
