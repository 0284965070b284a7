"""The file registry against the memory registry: any sequence of calls gives the same answers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zbus.registry import FileRegistry, MemoryRegistry
from zbus.registry.tempfiles import is_temp

KEYS = st.sampled_from(["a/x", "a/y", "a/X", "b/x", "b/x.1"])
VALUES = st.sampled_from([b"", b"1", b"two\n", b"\0" * 100])


class FileAgainstMemory(RuleBasedStateMachine):
    """Two handles on one directory, in turn, against one table."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.handles = [FileRegistry(self.directory / "registry") for _ in range(2)]
        self.model = MemoryRegistry()
        self.turn = 0

    @property
    def registry(self):
        self.turn += 1
        return self.handles[self.turn % 2]

    @rule(key=KEYS, value=VALUES, durable=st.booleans())
    def put(self, key, value, durable):
        self.registry.put(key, value, durable=durable)
        self.model.put(key, value)

    @rule(key=KEYS, value=VALUES)
    def claim(self, key, value):
        assert self.registry.claim(key, value) == self.model.claim(key, value)

    @rule(key=KEYS, expected=st.none() | VALUES)
    def delete(self, key, expected):
        assert self.registry.delete(key, expected) == self.model.delete(key, expected)

    @rule(key=KEYS)
    def get(self, key):
        assert self.registry.get(key) == self.model.get(key)

    @rule(number=st.integers(0, 1))
    def reopen(self, number):
        self.handles[number].close()
        self.handles[number] = FileRegistry(self.directory / "registry")

    @invariant()
    def listings_agree(self):
        for area in ("a", "b", "c"):
            listing = self.registry.list(area)
            assert listing == self.model.list(area)
            assert list(listing.entries) == sorted(listing.entries)

    @invariant()
    def nothing_is_left_over(self):
        assert not [name for _, _, files in os.walk(self.directory) for name in files if is_temp(name)]

    def teardown(self):
        shutil.rmtree(self.directory)


TestFileAgainstMemory = FileAgainstMemory.TestCase
TestFileAgainstMemory.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
