"""Bulk data off the call path: arrays of one host go through shared memory, and only their whereabouts travel."""
