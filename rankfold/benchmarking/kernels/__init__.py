"""Section `kernels`: one module per kind of op, each with CASES, and `section`, which checks and times them."""

from rankfold.benchmarking.kernels.section import run

__all__ = ["run"]
