"""Tests of layers with states."""
