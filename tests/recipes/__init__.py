"""Tests of the recipes: facts of models, stored plans, run files, the command."""
