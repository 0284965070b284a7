"""Engines that zbus ships, and what they share. Torch is imported where it is needed, never with these modules."""
