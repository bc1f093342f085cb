"""The command lines: what `rankfold COMMAND` and the scripts in tools/ run."""
