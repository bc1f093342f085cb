"""Commands of tools/plan.py, one module each."""
