"""The commands of `rankfold plan`, one module each."""
