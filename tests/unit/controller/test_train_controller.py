from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zbus
from controller.group import Group
from controller.role import Role
from controller.scheduling.inline import InlineRuntime
from controller.train import TrainController
from zbus import Ragged, Split
from zbus.errors import BatchError, ConfigError
from zbus.rl import TrainEngine, part


class Plain(TrainEngine):
    """A training engine without a model: it tells what it was given."""

    def __init__(self, equal: bool = False, fails: tuple[int, str] = (-1, "")) -> None:
        super().__init__()
        self.equal = equal
        self.fails = fails
        self.log: list[Any] = []

    def setup(self, ctx: zbus.Context) -> None:
        self.rank = ctx.rank

    def _step(self, method: str) -> None:
        self.log.append(method)
        if self.fails == (self.rank, method):
            raise OSError(f"no {method} here")

    def do_create_process_group(self, backend, timeout_s):
        self._step("group")
        return {"dp": self.rank}

    def do_initialize(self):
        self._step("initialize")
        return {"parameters": 0, "pad_to": "equal" if self.equal else None}

    def do_destroy(self):
        self._step("destroy")

    def do_train_batch(self, batch, loss, options):
        rows = np.asarray(batch["x"])
        self.log.append((rows.tolist(), options))
        report = {"loss": part("mean", float(rows.sum()), len(rows)), f"only_{self.rank}": 1.0}
        return report if loss == "odd" else {"loss": report["loss"]}

    def do_eval_batch(self, batch, loss, options):
        real = batch.get("row_mask", np.ones(len(batch["x"]), bool))
        self.log.append((len(batch["x"]), int(real.sum())))
        rows = np.asarray(batch["x"])[real]
        return {"loss": part("mean", float(rows.sum()), len(rows)), "rows": part("sum", len(rows))}

    def do_forward_batch(self, batch, output, options):
        self.log.append(len(batch["x"]))
        x = batch["x"]
        return Ragged(x.values * 2, x.offsets) if isinstance(x, Ragged) else x * 2

    def do_save(self, path, kind):
        self._step("save")
        Path(path).mkdir(exist_ok=True)
        (Path(path) / f"{kind}.{self.rank}").write_text("whole")
        return {}

    def do_load(self, path, kind):
        return {"found": sorted(entry.name for entry in Path(path).iterdir())}

    @zbus.endpoint(effect="pure")
    def said(self) -> list[Any]:
        return self.log


class Odd(zbus.Engine):
    """Declares an endpoint of the same name in its own way."""

    @zbus.endpoint()
    def train_batch(self, batch, group_size=1):
        return batch, group_size


@pytest.fixture
def make():
    """Controllers over ranks in this process."""
    runtime = InlineRuntime()

    def make(
        engine: type = Plain, replicas: int = 3, mesh: Any = None, pad_to: Any = None, **kwargs: Any
    ) -> TrainController:
        group = Group(runtime.add("actor", Role(engine, replicas=replicas, mesh=mesh, kwargs=kwargs)), runtime)
        return TrainController(SimpleNamespace(group=lambda _: group), pad_to=pad_to)

    yield make
    runtime.close()


def rows_of(train: TrainController) -> list[Any]:
    """Return what each rank got in its only call."""
    return [log[-1][0] for log in train.group.said()]


def test_ten_rows_over_three_ranks_are_four_three_and_three(make):
    """Rows that do not divide are shared unevenly, none twice and none left out."""
    train = make()
    report = train.train_batch({"x": np.arange(10)}, split=Split("dp"))
    assert rows_of(train) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert report["loss"] == 4.5


def test_every_operation_can_be_awaited(make):
    """``aio`` has the blocking methods, with the same results, in the order in which they are awaited."""
    train = make()

    async def main():
        await train.aio.initialize()
        report, _ = await asyncio.gather(
            train.aio.train_batch({"x": np.arange(10)}, split=Split("dp")), train.aio.set_version(3)
        )
        return report["loss"], await train.aio.get_version(), await train.aio.destroy()

    assert asyncio.run(main()) == (4.5, 3, {})
    public = {name for name in vars(TrainController) if not name.startswith("_") and callable(getattr(train, name))}
    assert vars(train.aio).keys() == public - {"config_perf_tracer", "save_perf_tracer"}


def test_fewer_rows_than_ranks_leave_empty_shares(make):
    """Every rank is called, with no rows if need be; what it reports counts for nothing."""
    train = make()
    report = train.train_batch({"x": np.array([3.0, 6.0])})
    assert sorted(map(len, rows_of(train))) == [0, 1, 1]
    assert report["loss"] == 4.5
    assert report.heads.keys() == {0, 1, 2}


def test_long_rows_are_balanced_by_tokens(make):
    """Shares weigh alike by tokens, not by rows."""
    train = make(replicas=2)
    x = Ragged.of([[1] * 9, [2], [3], [4], [5] * 9, [6]])
    assert [float(one.sum()) for one in train.forward_batch({"x": x})] == [18, 4, 6, 8, 90, 12]
    assert sorted(log[-1] for log in train.group.said()) == [3, 3]
    train.forward_batch({"x": Ragged.of([[1] * 8, [2] * 2, [3] * 2, [4] * 2, [5] * 2])})
    assert sorted(log[-1] for log in train.group.said()) == [1, 4]


def test_groups_stay_on_one_rank_and_options_are_the_losses_own(make):
    """groups= is about rows; a loss may have an option of any name, group_size included (B57)."""
    train = make(replicas=2)
    train.train_batch({"x": np.arange(6)}, "sft", {"group_size": 7}, groups=2)
    assert [[one // 2 for one in rows] for rows in rows_of(train)] in (
        [[0, 0, 2, 2], [1, 1]],
        [[0, 0], [1, 1, 2, 2]],
        [[0, 0, 1, 1], [2, 2]],
    )
    assert [log[-1][1] for log in train.group.said()] == [{"group_size": 7, "groups": 2}] * 2


def test_scalars_of_every_head_are_kept(make):
    """Heads that report different scalars lose none of them (B57)."""
    report = make().train_batch({"x": np.arange(6)}, "odd")
    assert [report[f"only_{rank}"] for rank in range(3)] == [1, 1, 1]
    assert report.partial == {"only_0": (1, 2), "only_1": (0, 2), "only_2": (0, 1)}


def test_ranks_that_repeat_a_share_are_no_heads(make):
    """Over dp and tp only the lowest rank of each dp position counts."""
    train = make(replicas=4, mesh={"dp": 2, "tp": 2})
    assert train.heads == (0, 2)
    report = train.train_batch({"x": np.array([1, 2, 3, 4])}, "odd")
    assert report.heads.keys() == {0, 2}
    assert report["loss"] == 2.5


def test_trajectories_come_back_one_answer_each_in_their_order(make):
    """A list of trajectories gives a list of answers, whichever rank had them."""
    train = make(replicas=2)
    items = [{"x": np.arange(size)} for size in (5, 1, 4, 2, 3)]
    assert [one.tolist() for one in train.forward_batch(items)] == [
        (np.arange(n) * 2).tolist() for n in (5, 1, 4, 2, 3)
    ]


@pytest.mark.parametrize("asked_by", ["the controller", "the engine"])
@pytest.mark.parametrize(("count", "groups"), [(7, None), (4, None), (6, 2), (8, 2), (1, None)])
def test_rows_that_make_parts_equal_count_nowhere(make, asked_by, count, groups):
    """Where parts must be equal, added rows are in no statistic and no result."""
    train = make(pad_to="equal") if asked_by == "the controller" else make(equal=True)
    train.initialize()
    x = np.arange(count) + 1.0
    report = train.eval_batch({"x": x}, groups=groups)
    assert report["rows"] == count
    assert report["loss"] == x.mean()
    logs = [log[-1] for log in train.group.said()]
    assert len({rows for rows, _ in logs}) == 1
    assert sum(real for _, real in logs) == count
    assert train.forward_batch({"x": x}).tolist() == (x * 2).tolist()
    assert len({log[-1] for log in train.group.said()}) == 1


def test_a_failed_start_undoes_what_it_started_and_names_its_phase(make):
    """Every rank is told to leave, and the error says in which phase which rank failed (B43)."""
    train = make(fails=(1, "initialize"))
    with pytest.raises(BatchError, match="no initialize here") as caught:
        train.initialize()
    assert caught.value.root.rank == 1
    assert "phase: engine" in "".join(caught.value.__notes__)
    assert [log[-1] for log in train.group.said()] == ["destroy"] * 3


def test_leaving_visits_every_rank_and_tells_what_went_wrong(make):
    """A rank that fails to leave keeps no other from leaving (B43)."""
    train = make(fails=(0, "destroy"))
    train.initialize()
    wrong = train.destroy()
    assert list(wrong) == [0]
    assert "no destroy here" in str(wrong[0])
    assert [log[-1] for log in train.group.said()] == ["destroy"] * 3
    assert make().destroy() == {}


def test_a_checkpoint_is_there_whole_or_not_at_all(make, tmp_path):
    """What a failing rank leaves is removed; a directory in use is not written over."""
    train = make()
    made = train.save(tmp_path / "deep" / "one")
    assert train.load(made)["found"] == ["checkpoint.0", "checkpoint.1", "checkpoint.2"]
    with pytest.raises(ConfigError, match="there is something at"):
        train.save(tmp_path / "deep" / "one")
    broken = make(fails=(2, "save"))
    with pytest.raises(BatchError, match="no save here"):
        broken.save(tmp_path / "two")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["deep"]
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["one"]


def test_a_version_is_what_all_ranks_agree_on(make):
    """set_version reaches every rank; ranks that disagree are named, not averaged (B54)."""
    train = make()
    assert (train.set_version(4), train.get_version()) == (4, 4)
    train.group[1].set_version(3)
    with pytest.raises(zbus.ZbusError, match="rank 1 answered 3"):
        train.get_version()


def test_statistics_of_ranks_and_controller_are_one_table(make):
    """export_stats has every call's report and starts anew."""
    train = make()
    train.train_batch({"x": np.arange(3.0)})
    train.train_batch({"x": np.arange(3.0) + 2})
    found = train.export_stats()
    assert found["train_batch/sft/loss"] == 2.0
    assert "train_batch/sft/loss" not in train.export_stats()


def test_columns_of_different_length_are_refused_before_anything_is_sent(make):
    """A longer second column is not cut and a shorter one no IndexError: the error names both (B57)."""
    train = make()
    with pytest.raises(ConfigError, match=r"`batch\['x'\]` has 3, `batch\['y'\]` has 4"):
        train.train_batch({"x": np.arange(3), "y": np.arange(4)})
    assert train.group.said() == [[], [], []]


def test_an_engine_of_another_declaration_is_called_as_it_declares(make):
    """A role with its own train_batch keeps its arguments (B57)."""
    train = make(engine=Odd, replicas=1)
    assert train.train_batch([1, 2], group_size=5) == [([1, 2], 5)]


def test_a_split_is_declared_before_it_is_overridden(make):
    """Only a call of an endpoint that splits can be split otherwise."""
    train = make()
    with pytest.raises(ConfigError, match="`get_version` is declared Everywhere"):
        train.group.get_version.options(split=Split("dp"))
    with pytest.raises(ConfigError, match=r"axis 'pp'"):
        train.train_batch({"x": np.arange(3)}, split=Split("pp"))


def test_failures_of_several_ranks_name_the_first_as_root(make):
    """A batch that all ranks refuse raises one error of all of them."""
    with pytest.raises(BatchError) as caught:
        make().train_batch({"y": np.arange(3)})
    assert all(isinstance(one, KeyError) for one in caught.value.exceptions)
