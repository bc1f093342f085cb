"""The parts of `rankfold chat`."""
