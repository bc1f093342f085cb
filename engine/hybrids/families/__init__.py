"""Families with such layers."""
