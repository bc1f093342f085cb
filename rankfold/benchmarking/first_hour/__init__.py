"""The first hour on a machine with a GPU: its parts, their runs, and a judgement against the targets."""
