"""Answers of other people's programs, read within limits of time, bytes, nesting and digits."""
