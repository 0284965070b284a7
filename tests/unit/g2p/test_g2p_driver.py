from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

torch = pytest.importorskip("torch", reason="the example trains with torch: install zbus-runtime[torch]")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "g2p"
PARAMS = {
    "steps": 6,
    "batch": 16,
    "lr": 0.004,
    "warmup": 2,
    "seed": 0,
    "heldout_words": 40,
    "checkpoint_every": 2,
}


class _Progress:
    def __init__(self) -> None:
        self.done = 0.0
        self.fields: list[dict] = []

    def update(self, advance: float = 1, **fields) -> None:
        self.done += advance
        self.fields.append(fields)


class _OneRank:
    """Stands for the group of one rank: each endpoint runs at once; PerRank gives a list, the others the value."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.calls: list[str] = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append(name)
            value = getattr(self.engine, name)(*args, **kwargs)
            return [value] if name in ("train", "evaluate") else value

        return call


def _trial(path: Path, *, resume: bool = False, **params):
    from engines import SFT

    engine = SFT(seed=0)
    engine.setup(SimpleNamespace(init_torch=lambda backend: None))
    group, progress = _OneRank(engine), _Progress()
    run = SimpleNamespace(
        bus=SimpleNamespace(group=lambda role: group),
        config=PARAMS | params,
        resume=resume,
        trial_dir=SimpleNamespace(checkpoints=path),
        progress=lambda total, text: contextlib.nullcontext(progress),
    )
    return run, group, progress


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_reports_what_it_learnt(tmp_path: Path):
    """The metrics hold the loss before and after, exact match, and every step was shown as progress."""
    from sft import main

    run, _, progress = _trial(tmp_path)
    metrics = main(run)

    assert metrics["heldout_loss"] < metrics["heldout_loss_before"] == pytest.approx(4.4, abs=0.2)
    assert 0 <= metrics["heldout_exact"] <= 1
    assert metrics["heldout_words"] == 40
    assert metrics["steps"] == progress.done == 6
    assert all("loss" in fields for fields in progress.fields[1:])


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    """A long run does not fill the disk; the last step is always among those kept."""
    from sft import main

    main(_trial(tmp_path, steps=7)[0])

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006.npz", "step-000007.npz"]


def test_a_resumed_run_continues_and_ends_where_an_uninterrupted_one_does(tmp_path: Path):
    """A run that failed after step 4 and is resumed gives the same held-out result, repeating no step."""
    from sft import main

    whole = main(_trial(tmp_path / "whole")[0])
    run, group, _ = _trial(tmp_path / "cut")
    train = group.engine.train

    def fail_at_five(batch, step, lr):
        if step == 5:
            raise RuntimeError("killed")
        return train(batch, step, lr)

    group.engine.train = fail_at_five
    with pytest.raises(RuntimeError, match="killed"):
        main(run)
    run, group, progress = _trial(tmp_path / "cut", resume=True)
    resumed = main(run)

    assert resumed["resumed_from"] == 4
    assert group.calls.count("train") == 2
    assert progress.done == 6
    assert resumed["heldout_loss"] == pytest.approx(whole["heldout_loss"], abs=1e-6)


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path):
    """A complete trial that is resumed is judged again, and its result is strict JSON."""
    import json

    from sft import main

    first = main(_trial(tmp_path)[0])
    run, group, _ = _trial(tmp_path, resume=True)
    again = main(run)

    assert "train" not in group.calls
    assert again["heldout_loss"] == pytest.approx(first["heldout_loss"])
    json.dumps(again, allow_nan=False)


def test_resuming_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path):
    """A trial that died before its first checkpoint simply starts again."""
    from sft import main

    metrics = main(_trial(tmp_path, resume=True, steps=1)[0])

    assert metrics["resumed_from"] == 0


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    """Warm-up is linear, the peak is the configured rate, the end a tenth of it."""
    from sft import learning_rate

    rates = [learning_rate(step, 100, {"lr": 1.0, "warmup": 10}) for step in range(101)]

    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.05)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[100] == pytest.approx(0.1)


def test_the_config_has_every_parameter_the_driver_reads():
    """sft.yaml and the driver agree on the parameters."""
    config = yaml.safe_load((EXAMPLE / "sft.yaml").read_text())

    assert set(config["params"]) == set(PARAMS)
