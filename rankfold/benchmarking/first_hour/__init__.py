"""The first hour on a machine with a GPU: its parts, what ran, and a judgement against the targets."""
