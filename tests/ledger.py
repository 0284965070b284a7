"""What really happened to a model: every optimizer step with its rows, and which dump the model before it came from.

A training engine that is ``Recorded`` appends to ``$ZT_LEDGER/rank<r>.jsonl``, beside the job and unknown to it. A load
begins a new line of descent, which names the line and the step that the dump was saved by (a file inside the dump says
so). ``descent`` follows the lines back from the last: those steps, and no others, made the model that there is now.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "Recorded", "Step", "descent", "prompts_of", "step_count"]

VARIABLE = "ZT_LEDGER"
_INSIDE = "descent.{}.json"

Prompt = tuple[int, ...]


class Recorded:
    """Stands before a ``TrainEngine`` among the bases of a class. One file per rank, one write per record."""

    def setup(self, ctx: Any) -> None:
        """Open this rank's file."""
        self._rank = ctx.rank
        self._steps = 0
        directory = Path(os.environ[VARIABLE])
        directory.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(directory / f"rank{ctx.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        super().setup(ctx)  # type: ignore[misc]  # the engine behind it

    def do_initialize(self) -> Any:
        """Begin a line that descends from nothing."""
        found = super().do_initialize()  # type: ignore[misc]  # the engine behind it
        self._begin(None, 0)
        return found

    def do_train_batch(self, batch: Any, loss: str, options: dict[str, Any]) -> Any:
        """Take the step, then write it down: a step that is not written is in no dump either."""
        report = super().do_train_batch(batch, loss, options)  # type: ignore[misc]  # the engine behind it
        self._steps += 1
        self._write(event="step", step=self._steps, rows=prompts_of(batch))
        return report

    def do_save(self, path: str, kind: str) -> Any:
        """Put the line into the dump."""
        found = super().do_save(path, kind)  # type: ignore[misc]  # the engine behind it
        mine = {"line": self._line, "step": self._steps}
        (Path(path) / _INSIDE.format(self._rank)).write_text(json.dumps(mine))
        return found

    def do_load(self, path: str, kind: str) -> Any:
        """Begin a line that descends from that of the dump."""
        found = super().do_load(path, kind)  # type: ignore[misc]  # the engine behind it
        parent = json.loads((Path(path) / _INSIDE.format(self._rank)).read_text())
        self._begin(parent["line"], parent["step"])
        return found

    def _begin(self, parent: str | None, step: int) -> None:
        self._line, self._steps = os.urandom(6).hex(), step
        self._write(event="begin", parent=parent, step=step)

    def _write(self, **record: Any) -> None:
        os.write(self._fd, json.dumps({"line": self._line, **record}).encode() + b"\n")


def prompts_of(batch: Mapping[str, Any]) -> list[Prompt]:
    """Return of each row the tokens that no loss counts: what was asked. Columns are ``Ragged``, or padded."""
    ids, masks = batch["input_ids"], batch["loss_mask"]
    lengths = batch.get("lengths", [None] * len(ids))
    rows = [(row[:length], mask[:length]) for row, mask, length in zip(ids, masks, lengths, strict=True)]
    return [tuple(int(token) for token, answer in zip(row, mask, strict=True) if not answer) for row, mask in rows]


@dataclass
class Step:
    """One optimizer step of the model that there is now: what was asked in its rows, over all ranks."""

    number: int
    prompts: Counter[Prompt] = field(default_factory=Counter)


def descent(directory: Path, ranks: int) -> list[Step]:
    """Return the steps that made the model, the first first.

    Raises:
        AssertionError: The records contradict each other: a step is missing or there twice.
    """
    steps: dict[int, Step] = {}
    lengths = []
    for rank in range(ranks):
        found = _line_of_descent(_records(directory / f"rank{rank}.jsonl"))
        numbers = [number for number, _ in found]
        assert numbers == list(range(1, len(found) + 1)), f"rank {rank}: steps {numbers} made the model"
        lengths.append(len(found))
        for number, rows in found:
            steps.setdefault(number, Step(number)).prompts.update(rows)
    assert len(set(lengths)) == 1, f"ranks took {lengths} steps"
    return [steps[number] for number in sorted(steps)]


def step_count(directory: Path) -> int:
    """Return how many steps were ever taken by rank 0, those that a kill undid too."""
    return sum(record["event"] == "step" for record in _records(directory / "rank0.jsonl"))


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def _line_of_descent(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, Iterable[Prompt]]]:
    begins = {record["line"]: record for record in records if record["event"] == "begin"}
    line: str | None = records[-1]["line"]
    upto = max(record["step"] for record in records if record["line"] == line)
    found: list[tuple[int, Iterable[Prompt]]] = []
    while line is not None:
        begin = begins[line]
        own = [record for record in records if (record["line"], record["event"]) == (line, "step")]
        found = [
            (record["step"], [tuple(row) for row in record["rows"]]) for record in own if record["step"] <= upto
        ] + found
        line, upto = begin["parent"], begin["step"]
    return found
