"""Agents and ranks: what ``zbus-worker`` runs."""
