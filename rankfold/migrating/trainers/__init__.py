"""Functions that the tables of trainers name: conversions of keys and defaults that a table cannot say."""
