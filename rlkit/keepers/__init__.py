"""Keepers: they look at `learner.state_dict()` between iterations, outside the update."""
