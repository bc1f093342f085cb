"""Rewards: functions that score completions, run in separate processes."""
