"""Distillation on given texts: losses, records, teachers and layouts."""
