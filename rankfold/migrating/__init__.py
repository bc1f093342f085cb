"""Turns the configuration files and command lines of other trainers into this engine's YAML."""
