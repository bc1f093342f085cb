"""The life of a run: its processes' start and rendezvous, the lock on its folder, stops by schedulers, and hangs."""
