"""Hides everything that has been imported so far from the garbage collector, by being imported itself.

For a process that is forked again and again. Not for one that goes on: what is hidden here is never collected.
"""

import gc

gc.collect()
gc.freeze()
