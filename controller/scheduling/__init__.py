"""Schedulers: they place and start agents, nothing more."""
