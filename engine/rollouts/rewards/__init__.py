"""Rewards: functions that score completions, run in processes of their own."""
