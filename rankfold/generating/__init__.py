"""The parts of `rankfold generate`."""
