"""Calls through real workers: answers, errors, streams, guests, orderly ends."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import zbus
from controller import Controller
from launching import launch, probes
from waiting import scaled, wait_until
from zbus.runtime.processes import is_alive, start_time


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory):
    """One trial of two ranks for the tests that leave it as they found it."""
    with launch(tmp_path_factory.mktemp("runs")) as bus:
        yield bus


def test_every_rank_answers_in_rank_order_on_its_main_thread(bus):
    """A call to a group returns one answer per rank, in rank order, run on each worker's main thread."""
    answers = bus.group("actor").whoami()
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == 3
    assert all(answer["thread"] for answer in answers)
    assert [answer["coords"] for answer in answers] == [{"dp": 0}, {"dp": 1}]


def test_split_items_come_back_in_input_order(bus):
    """Uneven shares are joined in input order."""
    assert bus.group("actor").double(list(range(5))) == [0, 2, 4, 6, 8]


def test_arrays_of_any_size_round_trip(bus):
    """A large array arrives equal, whatever its layout."""
    for array in (np.arange(3), np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024).T, np.zeros((0, 3))):
        back = bus.group("actor").echo(array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


def test_a_remote_value_error_is_a_value_error_with_its_place(bus):
    """`except ValueError` catches a remote ValueError; it names role, rank, method and carries the traceback."""
    with pytest.raises(ValueError, match="bad value") as caught:
        bus.group("actor")[1].fail("value")
    error = caught.value
    assert isinstance(error, zbus.RemoteError)
    assert (error.role, error.rank, error.method, error.outcome) == ("actor", 1, "fail", "APP_ERROR")
    assert "engines_under_test.py" in (error.remote_traceback or "")


def test_an_attribute_error_inside_a_method_stays_one(bus):
    """An AttributeError raised by user code is reported as itself, not as a missing endpoint (B6)."""
    with pytest.raises(AttributeError, match="missing_attribute"):
        bus.group("actor")[0].fail("attribute")


def test_an_unknown_endpoint_is_refused_before_anything_is_sent(bus):
    """A misspelt endpoint is an AttributeError at once, with the nearest name (B5, B6)."""
    with pytest.raises(AttributeError, match="whoami"):
        bus.group("actor").whoam()


@pytest.mark.parametrize(("kind", "name"), [("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")])
def test_system_exit_of_a_method_is_its_outcome_and_the_worker_lives(bus, kind, name):
    """SystemExit and KeyboardInterrupt raised by a method become its error; the next call is answered."""
    with pytest.raises(zbus.RemoteError, match=name):
        bus.group("actor")[0].fail(kind)
    assert bus.group("actor")[0].echo(1) == 1


def test_an_exception_whose_repr_raises_is_reported_by_its_type(bus):
    """An exception that cannot be shown is reported by its type name, and the worker lives."""
    with pytest.raises(zbus.RemoteError, match="UnprintableError"):
        bus.group("actor")[0].fail("repr")
    assert bus.group("actor")[0].echo(1) == 1


def test_a_result_that_cannot_be_carried_names_itself(bus):
    """A result the codec refuses is an error of that call that says what and where."""
    with pytest.raises(zbus.RemoteError, match="function"):
        bus.group("actor")[0].fail("lambda")


def test_one_failing_rank_keeps_the_results_of_the_others(bus):
    """A batch with one failure names the failing rank and keeps the good results (B8)."""
    future = bus.group("actor").fail.submit("value", only_rank=1)
    with pytest.raises(zbus.BatchError) as caught:
        future.result()
    error = caught.value
    assert error.results == future.results() == {0: "fine"}
    assert isinstance(error.root, ValueError)
    assert error.root.rank == 1


def test_an_async_endpoint_streams_its_items_in_order(bus):
    """An async generator's items come one by one, in order, more of them than the credit window."""
    assert list(bus.group("actor").count.stream(300)) == list(range(300))


def test_a_stream_that_fails_keeps_its_items_and_raises(bus):
    """Items before a failure are delivered, then the failure is raised."""
    items: list[int] = []
    with pytest.raises(ValueError, match="no 70"):
        items.extend(bus.group("actor").count.stream(100, fail_at=70))
    assert items == list(range(70))


def test_calls_work_inside_a_running_loop_and_can_be_awaited(bus):
    """Sync calls do not touch the caller's loop, and `aio` belongs to it (B46)."""
    actor = bus.group("actor")

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.005)

        ticker = asyncio.create_task(tick())
        assert actor.echo(1) == 1
        async with asyncio.timeout(scaled(20)):
            gained = 0
            while gained <= 5:  # a busy machine may not run this process during one call
                before = ticks
                await actor.sleep.aio(0.2)
                gained = ticks - before
        ticker.cancel()
        return await asyncio.gather(*(actor.slow_echo.aio(number) for number in range(20)))

    assert asyncio.run(main()) == list(range(20))


def test_concurrent_async_calls_overlap_on_one_worker(bus):
    """Calls of a lane with concurrency run at the same time: each of them waits until all have begun."""
    one = bus.group("actor")[0]
    futures = [one.options(deadline=scaled(20)).meet.submit(8) for _ in range(8)]
    assert [future.result() for future in futures] == [8] * 8


def test_ctl_answers_while_the_engine_is_busy(bus, tmp_path):
    """Status is answered while every rank runs a call, and says which and for how long."""
    gate = tmp_path / "go"
    future = bus.group("actor").wait_for.submit(str(gate))
    statuses = wait_until(
        lambda: [s for s in bus.statuses().values() if s["call"] is not None and s["call"]["method"] == "wait_for"][1:],
        what="both ranks to be seen in `wait_for`",
    )
    assert statuses[0]["state"] == "busy"
    gate.touch()
    assert future.result() == [str(gate)] * 2


def test_a_deadline_that_passes_in_the_queue_proves_that_the_call_did_not_run(bus, tmp_path):
    """A call that expires behind another is NOT_EXECUTED, and its place does not stall the lane (B9)."""
    one = bus.group("actor")[0]
    before = len(one.notes())
    gate = tmp_path / "go"
    blocker = one.wait_for.submit(str(gate))
    with pytest.raises(zbus.CallTimeout) as caught:
        one.options(deadline=0.1).note("late")
    assert caught.value.outcome == "NOT_EXECUTED"
    gate.touch()
    blocker.result()
    assert len(one.notes()) == before
    assert one.echo(2) == 2


def test_a_deadline_in_a_running_call_says_that_it_may_have_run(bus):
    """A call that is running at its deadline ends UNKNOWN with that evidence; the worker goes on (B1)."""
    one = bus.group("actor")[1]
    with pytest.raises(zbus.CallTimeout) as caught:
        one.options(deadline=1.0).sleep(2.0)
    assert caught.value.outcome == "UNKNOWN"
    assert one.echo(3) == 3


def test_a_guest_sees_the_trial_but_may_only_make_pure_calls(bus):
    """`attach` gives ctl and pure calls; anything else is refused by the worker, and leaving changes nothing."""
    with Controller.attach(bus.trial.path) as guest:
        actor = guest.group("actor")
        assert actor.double([1, 2]) == [2, 4]
        assert len(guest.statuses()) == 2
        with pytest.raises(PermissionError, match="pure"):
            actor[0].note("from a guest")
    assert bus.group("actor").echo(1) == 1


def test_two_threads_and_a_loop_see_their_own_order_on_every_worker(tmp_path):
    """Each caller's calls are seen by every worker in that caller's order (B2)."""
    with launch(tmp_path) as bus:
        actor = bus.group("actor")

        def thread(name: str) -> None:
            for future in [actor.note.submit((name, number)) for number in range(100)]:
                future.result()

        async def loop() -> None:
            pending = [asyncio.ensure_future(actor.note.aio(("loop", number))) for number in range(100)]
            await asyncio.gather(*pending)

        threads = [threading.Thread(target=thread, args=(name,)) for name in ("a", "b")]
        for one in threads:
            one.start()
        asyncio.run(loop())
        for one in threads:
            one.join()
        first, second = actor.notes()
        assert first == second, "every member sees all callers in one and the same order"
        for name in ("a", "b", "loop"):
            assert [number for who, number in first if who == name] == list(range(100))


def test_overlapping_slices_see_batches_in_one_order(tmp_path):
    """Batches placed by several threads on overlapping slices are seen in the same order by all common members."""
    with launch(tmp_path, {"actor": probes(3)}) as bus:
        actor = bus.group("actor")
        slices = [actor[0:2], actor[1:3], actor, actor[0:3:2]]

        def caller(seed: int) -> None:
            for number in range(250):
                group = slices[(seed + number) % len(slices)]
                with group.batch() as batch:
                    batch.note((seed, number, 0))
                    batch.note((seed, number, 1))

        threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        seen = actor.notes()
        for left in range(3):
            for right in range(left):
                common = set(seen[left]) & set(seen[right])
                assert [x for x in seen[left] if x in common] == [x for x in seen[right] if x in common]
        for one_rank in seen:
            pairs = [one_rank[i : i + 2] for i in range(0, len(one_rank), 2)]
            assert all(a[:2] == b[:2] and (a[2], b[2]) == (0, 1) for a, b in pairs), "a batch is not interleaved"


def test_closing_leaves_no_process_socket_or_lease(tmp_path):
    """After close, workers and agents are gone, the runtime directory is removed, the controller's lease released."""
    with launch(tmp_path) as bus:
        trial = bus.trial
        workers = [(s["pid"], start_time(s["pid"])) for s in bus.statuses().values()]
        from zbus.registry.file import FileRegistry
        from zbus.registry.records import Records

        records = Records(FileRegistry(trial.registry, create=False))
        runtime = Path(records.current_epoch().runtime_dir)
        assert runtime.is_dir()
    assert not any(is_alive(pid, started) for pid, started in workers)
    assert not runtime.exists()
    assert records.leases() == {}
    assert {(ended.rank, ended.exit_code) for ended in records.exits()} == {(0, 0), (1, 0)}
    records.close()


def test_torch_groups_form_without_a_guessed_port(tmp_path):
    """Two ranks join a gloo group through the store on the handed-over socket."""
    pytest.importorskip("torch")
    from controller import Role
    from launching import HERE

    role = Role("engines_under_test:TorchSum", replicas=2, sys_path=[str(HERE)], preload=["torch"])
    with launch(tmp_path, {"actor": role}, startup_timeout=120) as bus:
        assert bus.group("actor").total(1.5) == 4.5
