"""Certifies that two layouts compute the same: `plan.py certify`."""
