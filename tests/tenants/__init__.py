"""Tests of several runs on one base."""
