"""Imported by Python as it starts: see `tests.support.other_systems`."""

import os

if "RANKFOLD_TEST_SYSTEM" in os.environ:
    import stand_in  # of this folder, which is on the path

    stand_in.install(os.environ["RANKFOLD_TEST_SYSTEM"])
