"""Tests of Gemma 4."""
