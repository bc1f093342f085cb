"""The command lines behind `rankfold COMMAND` and the scripts in tools/."""
