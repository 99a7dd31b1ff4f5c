"""Phases: what a run does before its first iteration."""
