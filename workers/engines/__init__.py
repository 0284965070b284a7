"""Engines that zbus ships (a later part; nothing lives here yet)."""
