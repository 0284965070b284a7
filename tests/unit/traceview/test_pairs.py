"""Calls taken from both sides to match clocks by: the same ones, whatever their ids look like, and not too many."""

import json

import pytest

from traceview import pairs
from traceview.pairs import read_pairs
from traceview.reader import Source

OFFSET_US = 5000


def sides(root, ids):
    """Write a caller's and a worker's file; the worker's clock is ahead."""
    lines = ([], [])
    for number, call in enumerate(ids):
        at = 100.0 * number
        for side, (name, ts, dur) in enumerate((("rpc.client", at, 60), ("rpc.server", at + 20 + OFFSET_US, 20))):
            args = {"call": call, "status": "ok"}
            lines[side].append(json.dumps({"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 1, "args": args}))
    files = [root / "caller.jsonl", root / "worker.jsonl"]
    for file, text in zip(files, lines, strict=True):
        file.write_text("\n".join(text) + "\n")
    return [Source(file, file.name) for file in files]


@pytest.mark.parametrize("form", ["{:016x}", "call-{}-of-run-7", "{}~~~~"])
def test_of_many_calls_the_same_part_is_taken_on_both_sides(tmp_path, monkeypatch, form):
    """Also where no id ends in a character that is chosen: then too, no more than so many are kept."""
    monkeypatch.setattr(pairs, "_BYTES_PER_CALL", 1)
    monkeypatch.setattr(pairs, "_LEAST_CALLS", 2000)
    monkeypatch.setattr(pairs, "_CALLS_PER_FILE", 500)
    monkeypatch.setattr(pairs, "_MOST_CALLS", 1000)
    found = read_pairs(sides(tmp_path, [form.format(n * 2654435761 % 2**32) for n in range(12_000)]), [0, 0])
    assert 30 <= len(found) <= 500
    assert set(found.arrived - found.sent) == {(20 + OFFSET_US) * 1000}
    assert set(found.received - found.answered) == {(20 - OFFSET_US) * 1000}


def test_of_few_calls_all_are_taken(tmp_path):
    """Nothing is left out that fits."""
    assert len(read_pairs(sides(tmp_path, [f"{n:016x}" for n in range(700)]), [0, 0])) == 700


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_of_ids_that_count_upwards_all_ranks_have_a_part(tmp_path, monkeypatch, ranks):
    """Calls are dealt to ranks in turn: which rank it is stands in the last digits of their ids."""
    monkeypatch.setattr(pairs, "_BYTES_PER_CALL", 1)
    monkeypatch.setattr(pairs, "_LEAST_CALLS", 250_000)  # one call of 16 is taken
    monkeypatch.setattr(pairs, "_CALLS_PER_FILE", 1)
    sources = []
    for role, name in (("controller", "rpc.client"), ("actor", "rpc.server")):
        for rank in range(ranks):
            lines = []
            for call in range(rank * 4, 16_000, 4 * ranks):
                for number in range(call, call + 4):
                    args = {"call": f"{number:x}", "status": "ok"}
                    span = {"name": name, "ph": "X", "ts": 10.0 * number, "dur": 5, "pid": 1, "args": args}
                    lines.append(json.dumps(span))
            file = tmp_path / f"{role}_{rank}.jsonl"
            file.write_text("\n".join(lines) + "\n")
            sources.append(Source(file, file.name))
    found = read_pairs(sources, [0] * len(sources))
    assert 500 < len(found) < 2000
    assert found.links() == [(rank, ranks + rank) for rank in range(ranks)]
