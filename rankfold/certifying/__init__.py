"""Certifies that two layouts compute the same: `rankfold plan certify`."""
