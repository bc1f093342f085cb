"""Counts of the house: what a text run loads, what the core names of the wings, and how far one walks to understand it.

`python -m tests.house` prints them for this tree, `python -m tests.house TREE` for another checkout.
"""
