"""Tests of files for schedulers and of --nproc."""
