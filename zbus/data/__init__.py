"""Bulk data off the call path: shared memory and refs (a later part; nothing lives here yet)."""
