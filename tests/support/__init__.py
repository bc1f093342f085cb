"""Helpers that tests share: see README.md beside this file."""
