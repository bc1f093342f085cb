"""The life of a run: how its processes start and meet, hold its folder, are stopped by schedulers, and hang."""
