"""Large arrays of real calls: through shared memory, seen whole, used again, left behind by nobody."""

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import zbus
from array_engine import digest
from controller import Role
from controller.collect import equal
from launching import HERE, launch
from waiting import wait_until
from zbus.config import Config
from zbus.config.schema import DataConfig
from zbus.data.presence import VARIABLE

MIB = 1 << 20


@pytest.fixture(autouse=True)
def memory(short_dir, monkeypatch):
    """Give these processes a place of their own, so that what they leave is seen."""
    monkeypatch.setenv(VARIABLE, str(short_dir))
    return short_dir / f"zbus-{os.getuid()}"


def arrays(replicas=2, **fields):
    """Return a role of engines that handle arrays."""
    return {"actor": Role("array_engine:Arrays", replicas=replicas, sys_path=[str(HERE)], **fields)}


def left(memory: Path) -> list[str]:
    """Return the names of processes that hold memory."""
    return sorted(entry.name for entry in memory.iterdir()) if memory.exists() else []


def test_arrays_arrive_as_they_were_sent_and_memory_is_used_again(tmp_path, memory):
    """Both ways, to one and to all, in sizes around the limit; a hundred sends need one slot, all gone at the end."""
    with launch(tmp_path, arrays()) as bus:
        actor = bus.group("actor")
        for nbytes in (MIB // 16 - 1, MIB // 16, MIB + 3, 3 * MIB):
            data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
            assert actor.digest(data) == [digest(data)] * 2
            assert np.array_equal(actor.double(data), data * 2)
            made = actor.make(nbytes, 5)
            assert [digest(one) for one in made] == [
                digest(np.random.default_rng(5 + rank).integers(0, 256, nbytes, np.uint8)) for rank in range(2)
            ]
        before = bus.report()["shared_slots"]  # a rank lets go of what it was sent before it answers
        for number in range(100):
            data = np.full(3 * MIB, number, np.uint8)
            assert actor.digest(data) == [digest(data)] * 2
        report = bus.report()
        assert report["shared_slots"] <= before
        assert report["shared_refused"] == 0
        wait_until(lambda: bus.report()["shared_lent_bytes"] == 0, what="the readers to let go")
        assert len(left(memory)) == 3
    assert left(memory) == []


def test_what_an_engine_keeps_stays_as_it_came(tmp_path):
    """An engine may hold an argument for as long as it likes; later calls use other memory until it lets go."""
    with launch(tmp_path, arrays(1)) as bus:
        actor = bus.group("actor")
        sent = []
        for number in range(5):
            data = np.full(MIB, number, np.uint8)
            sent.append(digest(data))
            actor.keep(data)
            data[:] = 99  # the caller's own array is its own again
            assert actor.kept_digests() == [sent]
        assert bus.report()["shared_lent_bytes"] >= 5 * MIB
        actor.drop()
        actor.digest(np.zeros(MIB, np.uint8))
        wait_until(lambda: bus.report()["shared_lent_bytes"] == 0, what="the engine's arrays to be given back")


def test_a_submitted_array_may_be_changed_at_once(tmp_path):
    """``submit`` copies, into shared memory or not."""
    with launch(tmp_path, arrays()) as bus:
        actor = bus.group("actor")
        for nbytes in (1000, MIB):
            data = np.zeros(nbytes, np.uint8)
            future = actor.digest.submit(data)
            data[:] = 1
            assert future.result() == [digest(np.zeros(nbytes, np.uint8))] * 2


def test_numpy_arrays_are_read_only_and_tensors_are_the_engines_own(tmp_path):
    """A numpy array from shared memory refuses to be written to; a tensor can be, and nobody else sees it."""
    torch = pytest.importorskip("torch")
    with launch(tmp_path, arrays()) as bus:
        actor = bus.group("actor")
        with pytest.raises(ExceptionGroup) as raised:
            actor.change(np.zeros(MIB))
        assert "read-only" in str(raised.value.exceptions[0])
        for numel in (1 << 17, 1 << 21):
            tensor = torch.arange(numel, dtype=torch.float32)
            changed = actor.change(tensor)
            assert all(torch.equal(one, tensor + 1) for one in changed)
            assert tensor[0] == 0
            changed[0].zero_()
            assert torch.equal(changed[1], tensor + 1)


def test_an_array_made_in_shared_memory_is_sent_from_there(tmp_path):
    """What ``empty`` gives is filled and sent without a copy, both ways; a new one each time costs no more memory."""
    with launch(tmp_path, arrays()) as bus:
        actor = bus.group("actor")
        for value in range(20):
            data = bus.empty((4, MIB), np.uint8)
            data[:] = value
            before = bus.report()["shared_slots"]
            assert actor.digest(data) == [digest(data)] * 2
            assert actor.digest(data[0]) == [digest(data[0])] * 2, "a part from the start is lent in place too"
            assert bus.report()["shared_slots"] == before
            assert actor.digest(data[1:]) == [digest(data[1:])] * 2
            assert [int(one[-1]) for one in actor.fill(4 * MIB, value)] == [value] * 2
        assert bus.report()["shared_slots"] <= 4
        kept = actor.fill(MIB, 7)
        actor.fill(MIB, 8)
        assert [int(one[0]) for one in kept] == [7, 7]
        torch = pytest.importorskip("torch")
        tensor = torch.from_numpy(bus.empty((1 << 20,), np.float32)).fill_(3)
        before = bus.report()["shared_slots"]
        assert actor.digest(tensor) == [digest(tensor.numpy())] * 2
        assert bus.report()["shared_slots"] == before
    small = bus.empty(10, np.int64)
    assert (small.shape, small.dtype) == ((10,), np.int64)


def test_the_shares_of_an_array_made_in_shared_memory_are_sent_from_there(tmp_path):
    """Each rank reads its rows in place, also where a share begins amid a page; joined answers are the caller's own."""
    with launch(tmp_path, arrays(3)) as bus:
        actor = bus.group("actor")
        data = bus.empty((1001, 257), np.float64)
        data[:] = np.random.default_rng(8).random(data.shape)
        before = bus.report()["shared_slots"]
        first, second = (actor.double(data) for _ in range(2))
        assert bus.report()["shared_slots"] == before
        assert np.array_equal(first, data * 2)
        first += 1  # it may be written to, and nobody else sees it
        assert np.array_equal(second, data * 2)
        assert np.array_equal(actor.double(first), (data * 2 + 1) * 2)


def test_a_batch_spread_by_tokens_comes_back_in_order(tmp_path):
    """Rectangles and sequences, balanced over ranks: each share is written once, to where it is sent from."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(100, 4000, 64)
    cuts = np.concatenate([[0], lengths.cumsum()])
    batch = {
        "input_ids": zbus.Ragged(rng.integers(0, 1 << 31, cuts[-1]), cuts),
        "mask": rng.random((64, 4096)) < 0.5,
        "scores": rng.random(64),
    }
    with launch(tmp_path, arrays(3)) as bus:
        back = bus.group("actor").same(batch)
        assert equal(back, batch)
        slots = bus.report()["shared_slots"]
        assert equal(bus.group("actor").same(batch), batch)
        assert bus.report()["shared_slots"] == slots == 6, "two arrays a rank"


def test_a_mean_over_ranks_is_that_of_the_batch(tmp_path):
    """Uneven shares, one of them empty, numbers and large arrays: as if one rank had seen all."""
    with launch(tmp_path, arrays(3)) as bus:
        actor = bus.group("actor")
        for rows in (7, 2):
            data = np.random.default_rng(rows).integers(0, 1000, (rows, MIB // 8)).astype(np.float64)
            found = actor.mean(data)
            assert found["all"] == pytest.approx(data.mean(), rel=1e-15)
            assert np.allclose(found["columns"], data.mean(axis=0), rtol=1e-15)
            found["columns"][:] = 0  # it is the caller's own


def test_a_call_that_failed_holds_its_arrays_no_longer_than_its_error(tmp_path):
    """However it was made: once the error is dropped memory is free, without waiting for the garbage collector."""

    def aio(call, data):
        async def main():
            with contextlib.suppress(zbus.BatchError):  # or the loop would keep it
                await call.aio(data)

        asyncio.run(main())
        raise ValueError

    def result(call, data):
        future = call.submit(data)
        try:
            future.result()
        finally:
            del future

    def taken(call, data):
        raise call.submit(data).exception()

    with launch(tmp_path, arrays(2)) as bus:
        actor = bus.group("actor")
        data = np.ones(MIB, np.uint8)
        every = [(how, actor.refuse) for how in (lambda call, data: call(data), result, taken, aio)]
        mapped = [
            (lambda call, data: call.map([data]).result(), actor.refuse_one),
            (lambda call, data: next(call.map([data])), actor.refuse_one),
        ]
        gc.collect()
        gc.disable()
        try:
            for number, (how, call) in enumerate([*every, *mapped]):
                for _ in range(2):
                    try:  # pytest.raises keeps what it has seen
                        how(call, data)
                    except (ValueError, zbus.BatchError):
                        continue
                    pytest.fail("it was refused")
                wait_until(lambda: bus.report()["shared_lent_bytes"] == 0, what=f"way {number} to hold nothing")
        finally:
            gc.enable()


def test_streams_carry_arrays(tmp_path):
    """Items that are arrays arrive in order and whole."""
    with launch(tmp_path, arrays(1)) as bus:
        items = list(bus.group("actor").items.stream(8, MIB))
        assert [int(item[0]) for item in items] == list(range(8))
        assert all((item == item[0]).all() for item in items)


def test_a_call_that_moves_to_another_rank_takes_its_arrays_along(tmp_path, memory):
    """The rank that reads it is killed; the pure call runs elsewhere with the same bytes, and nothing is left."""
    with launch(tmp_path, arrays(2)) as bus:
        data = np.random.default_rng(1).integers(0, 256, 8 * MIB, np.uint8)
        _, _, found = bus.group("actor").digest_or_die(data, str(tmp_path / "marker"))
        assert found == digest(data) == (tmp_path / "marker").read_text()
        wait_until(lambda: len(left(memory)) == 2, what="the agent to remove what the killed rank lent")
    assert left(memory) == []


def test_a_restarted_rank_reads_what_its_predecessor_was_sent(tmp_path):
    """A pure call whose only rank is killed in it runs again in the next start, with the same bytes."""
    with launch(tmp_path, arrays(1, restart="one")) as bus:
        data = np.random.default_rng(2).integers(0, 256, 8 * MIB, np.uint8)
        rank, start, found = bus.group("actor").digest_or_die(data, str(tmp_path / "marker"))
        assert (rank, start, found) == (0, 1, digest(data))
        wait_until(lambda: bus.report()["shared_lent_bytes"] == 0, what="the dead rank's hold to be gone")


def test_results_of_a_killed_rank_stay_readable(tmp_path):
    """What was answered before the end is the caller's, whatever became of the process that lent it."""
    with launch(tmp_path, arrays(1)) as bus:
        actor = bus.group("actor")
        pid = next(iter(bus.statuses().values()))["pid"]
        (made,) = actor.make(4 * MIB, 3)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the rank")
        assert digest(made) == digest(np.random.default_rng(3).integers(0, 256, 4 * MIB, np.uint8))


@pytest.mark.parametrize("limit", [0, 2 * MIB])
def test_with_little_or_no_shared_memory_calls_go_on(tmp_path, memory, limit):
    """What does not fit travels in the messages; 0 switches shared memory off."""
    with launch(tmp_path, arrays(), config=Config(data=DataConfig(shared_memory=limit))) as bus:
        data = np.random.default_rng(4).integers(0, 256, 5 * MIB, np.uint8)
        assert bus.group("actor").digest(data) == [digest(data)] * 2
        assert [digest(one) for one in bus.group("actor").make(5 * MIB, 0)] == [
            digest(np.random.default_rng(rank).integers(0, 256, 5 * MIB, np.uint8)) for rank in range(2)
        ]
        assert (left(memory) == []) is (limit == 0)
