"""The configuration of a run: frozen records per concern, and rules between them.

Nothing here imports torch, so that `--help` and a refusal are quick. `engine.config.load` reads YAML and command lines;
its packages are needed by training's command line alone.
"""
