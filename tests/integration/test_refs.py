"""Values that stay with the ranks that made them: taken from there by others, and gone when nobody holds them."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from array_engine import digest
from controller import Controller, Role
from controller.console import Console
from controller.status import describe, show_status
from controller.trials import snapshot
from launching import HERE, launch
from waiting import scaled, wait_until, within
from zbus import CallCancelled, CallTimeout, JoinedRef, RefLimitError, RefLostError, RemoteError
from zbus.codec import Ref
from zbus.config import Config
from zbus.config.schema import DataConfig, SchedulerConfig
from zbus.data.presence import VARIABLE
from zbus.ids import WorkerName

MIB = 1 << 20


@pytest.fixture(autouse=True)
def memory(short_dir, monkeypatch):
    """Give these processes a place of their own, so that what they leave is seen."""
    monkeypatch.setenv(VARIABLE, str(short_dir))
    return short_dir / f"zbus-{os.getuid()}"


def keepers(**fields) -> Role:
    """Return a role of engines that keep and take."""
    return Role("ref_engine:Keeper", sys_path=[str(HERE)], **{"replicas": 2, **fields})


def roles(**fields) -> dict[str, Role]:
    """Return a role that makes and one that takes."""
    return {"actor": keepers(**fields), "critic": keepers()}


def kept(bus: Controller) -> dict[str, int]:
    """Return how many values each process keeps."""
    found = {str(name): status["refs"] for name, status in bus.statuses().items()}
    return {**found, "controller": bus.report()["refs"]}


def until_nothing_is_kept(bus: Controller) -> None:
    """Wait until no process keeps a value or lends memory."""

    def held() -> list[tuple[str, object, int]]:
        found = bus.statuses().items()
        return [
            (str(name), status["refs_holders"], status.get("shared_lent_bytes", 0))
            for name, status in found
            if status["refs"] or status.get("shared_lent_bytes", 0)
        ]

    try:
        wait_until(lambda: not held() and not bus.report()["refs"], what="all values to be let go")
    except AssertionError:
        pytest.fail(f"still held: {held()}, here {bus.report()['refs']}; {bus._session.refs._holds._owners}")


def crossed(bus: Controller) -> int:
    """Return the bytes that this process has read from and written to sockets and files, as the kernel counts them."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["wchar"]) + int(facts["rchar"])


def test_results_stay_with_their_ranks_and_others_take_them_from_there(tmp_path, memory):
    """By option and by declaration; whole, nested, some rows, the caller's own; read-only, and gone when dropped."""
    with launch(tmp_path, roles()) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        plain = actor.make(64, 512)
        refs = actor.make.options(keep=True)(64, 512)
        assert all(type(ref) is Ref for ref in refs)
        assert [ref.owner for ref in refs] == ["actor/0", "actor/1"]
        assert (refs[0].rows, list(refs[0].lengths)) == (64, plain[0]["lengths"].tolist())
        assert "actor/1 make: dict(ids int64 [64, 512]" in repr(refs[1])
        assert [ref.method for ref in actor.rollout(1, 1)] == ["rollout"] * 2
        assert actor.rollout.options(keep=False)(2, 1)[0]["ids"].shape == (2, 1)

        expected = [actor[0].digest(batch) for batch in plain]
        assert critic.digest(refs[0]) == [expected[0]] * 2
        assert (
            critic.digest({"all": [refs[1], (refs[0], 5)], "same": refs[1]})
            == [{"all": [expected[1], (expected[0], 5)], "same": expected[1]}] * 2
        )
        assert actor[0].digest(refs[0]) == expected[0], "its owner too"
        own = refs[0].get()
        assert actor[0].digest(own) == expected[0]
        assert not own["ids"].flags.writeable
        rows = critic[1].digest(refs[0][10:20])
        assert rows["ids"] == digest(plain[0]["ids"][10:20])
        assert rows["texts"] == plain[0]["texts"][10:20]
        assert bus.get([refs[1].take([5, 3])])[0]["texts"] == ["1.5", "1.3"]
        del refs, own, plain
        until_nothing_is_kept(bus)
    assert not memory.exists()


def test_split_over_a_handle_gives_each_rank_its_rows(tmp_path):
    """By count, uneven, and by the token counts that the value declares; a value without rows goes to nobody."""
    with launch(tmp_path, roles()) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        (ref,) = [actor[0].rollout(65, 256)]
        whole = ref.get()
        shares = critic.share(ref)
        assert [share["ids"].shape for share in shares] == [(33, 256), (32, 256)]
        assert np.array_equal(np.concatenate([share["ids"] for share in shares]), whole["ids"])
        assert shares[0]["texts"] + shares[1]["texts"] == whole["texts"]
        balanced = critic.tokens(ref)
        assert sum(tokens for tokens, _ in balanced) == whole["lengths"].sum()
        assert abs(balanced[0][0] - balanced[1][0]) <= whole["lengths"].max()
        assert sorted(balanced[0][1] + balanced[1][1]) == sorted(whole["texts"])
        with pytest.raises(ValueError, match="different length"):
            critic.share({"a": ref, "b": [1]})


def test_a_value_of_256_mb_does_not_cross_the_controller(tmp_path):
    """From rank to rank, whole and by rows: less than 10 KB of messages and files of this process per call."""
    with launch(tmp_path, roles(), config=Config(data=DataConfig(shared_memory=1 << 30))) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        ref = actor[0].blob.options(keep=True)(256, MIB)
        assert ref.nbytes > 256 * MIB
        assert critic[0].corners(ref[0:1]) == [0, 0, 1, MIB], "connections are made"
        before = crossed(bus)
        assert critic[0].corners(ref) == [0, 255, 256, MIB]
        assert critic.parts(ref) == [[0, 127, 128, MIB], [128, 255, 128, MIB]]
        assert crossed(bus) - before < 2 * 10_000


def test_concat_of_what_ranks_keep_is_one_handle(tmp_path):
    """Rows in input order, however they were spread; each rank of another group takes its own from whoever has them."""
    with launch(tmp_path, {"actor": keepers(replicas=3), "critic": keepers()}) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        batch = {"ids": np.arange(50_000).reshape(50, 1000), "texts": [str(row) for row in range(50)]}
        joined = actor.double(batch)
        assert (type(joined), joined.rows) == (JoinedRef, 50)
        assert np.array_equal(joined.get()["ids"], batch["ids"] * 2)
        assert [share["texts"] for share in critic.share(joined)] == [batch["texts"][:25], batch["texts"][25:]]
        again = critic.double(joined)
        assert np.array_equal(bus.get({"x": again[10:45]})["x"]["ids"], batch["ids"][10:45] * 4)
        assert critic[1].digest(again.take([49, 0, 25]))["texts"] == ["49", "0", "25"]
        spread = actor.balance({"lengths": np.arange(1, 21), "ids": np.arange(20)})
        assert spread.order is not None
        assert spread.get()["ids"].tolist() == list(range(20))
        assert [share["ids"].tolist() for share in critic.share(spread)] == [list(range(10)), list(range(10, 20))]
        again.release()
        del joined, spread
        until_nothing_is_kept(bus)


def test_the_controllers_own_values_are_copied_once(tmp_path):
    """Any number of calls with a handle of ``put`` use the one slot; by rows too; and it goes with its last handle."""
    with launch(tmp_path, roles()) as bus:
        critic = bus.group("critic")
        batch = {"ids": np.arange(MIB).reshape(64, -1), "texts": [str(row) for row in range(64)]}
        ref = bus.put(batch)
        batch["ids"] = batch["ids"].copy()
        before = bus.report()["shared_slots"]
        for _ in range(5):
            assert critic.digest(ref) == [critic[0].digest(batch)] * 2
        assert [share["texts"] for share in critic.share(ref)] == [batch["texts"][:32], batch["texts"][32:]]
        assert critic[0].digest(ref.take([3, 1]))["texts"] == ["3", "1"]
        assert bus.report()["shared_slots"] <= before + 1, "those of the plain batches"
        assert np.array_equal(ref[1:3].get()["ids"], batch["ids"][1:3])
        assert bus.report()["refs"] == 1
        del ref
        until_nothing_is_kept(bus)


def test_a_scope_owns_what_is_kept_in_it(tmp_path):
    """At its end all goes, but calls under way get their arguments; a handle then says so; scopes have limits."""
    with launch(tmp_path, roles()) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        outer = actor[0].rollout(4, 4)
        with bus.scope() as scope:
            refs = actor.rollout(64, 512)
            mine = bus.put(np.zeros(MIB))
            assert scope.nbytes == sum(ref.nbytes for ref in (*refs, mine))
            future = critic.digest.submit(refs[0])
            critic.share(refs[1])
        assert [type(answer) for answer in future.result()] == [dict] * 2
        for ref in (*refs, mine):
            with pytest.raises(RefLostError, match="was released"):
                ref.get()
        with pytest.raises(RefLostError, match="was released"):
            critic.digest(refs[1])
        assert outer.get()["ids"].shape == (4, 4)
        wait_until(lambda: kept(bus) == {"actor/0": 1, "actor/1": 0, "critic/0": 0, "critic/1": 0, "controller": 0})
        with bus.scope(limit=MIB) as scope:
            small = actor[0].rollout(1, 1)
            with pytest.raises(RefLimitError, match="may hold 1,048,576 bytes"):
                actor[1].rollout(1024, 512)
            assert small.get()
        outer.release()
        until_nothing_is_kept(bus)


@pytest.mark.parametrize("scheduler", ["inline", "local"])
def test_a_scope_owns_what_its_block_makes_and_nothing_that_is_only_read_there(tmp_path, scheduler):
    """Calls made before it and handles that came before keep what they have; calls made in it lose it, read or not."""
    with launch(tmp_path, {"actor": keepers()}, scheduler=scheduler) as bus:
        actor = bus.group("actor")
        before = actor.rollout.submit(2, 2)
        outer = actor[1].put_once(100)
        with bus.scope() as scope:
            made_before = before.result()
            again = actor[1].put_once(100)
            assert scope.nbytes == 0
            new = actor[0].put_once(100)
            mapped = list(actor.later.map([1000] * 40))
            assert scope.nbytes == new.nbytes + sum(ref.nbytes for ref in mapped)
            unread = actor.rollout.submit(3, 3)
        assert [ref.get()["ids"].shape for ref in made_before] == [(2, 2)] * 2
        assert outer.get().tolist() == again.get().tolist() == [1] * 100
        for ref in (*unread.result(), new, *mapped):
            with pytest.raises(RefLostError, match="was released"):
                ref.get()
        if scheduler == "local":
            wait_until(lambda: kept(bus) == {"actor/0": 1, "actor/1": 2, "controller": 0}, what="the rest to go")


def test_a_lost_owner_is_named_and_nothing_is_left(tmp_path, memory):
    """SIGKILL of the owner: whoever uses the handle learns who it was, what it was, and that the method did not run."""
    with launch(tmp_path, roles()) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        refs = actor.rollout(64, 512)
        assert critic.digest(refs[0])
        os.kill(bus.statuses()[actor[0]._view.core.roster.peers()[0].name]["pid"], signal.SIGKILL)
        began = time.monotonic()
        future = critic.digest.submit(refs[0])
        with pytest.raises(ExceptionGroup) as raised:
            future.result()
        assert [one.outcome for one in future.outcomes()] == ["NOT_EXECUTED"] * 2
        assert time.monotonic() - began < within(10)
        for error in raised.value.exceptions:
            assert isinstance(error, RefLostError)
            assert isinstance(error, RemoteError)
            assert (error.owner_role, error.owner_rank, error.made_by) == ("actor", 0, "rollout")
            assert (error.started, error.outcome) == (False, "NOT_EXECUTED")
            assert "actor/0 no longer has what `rollout` made (dict(ids int64 [64, 512]" in str(error)
            assert "rollout" in error.hint
        assert critic.count("digest") == [1, 1], "it did not run"
        with pytest.raises(RefLostError, match="actor/0 no longer has"):
            refs[0].get()
        assert critic[0].digest(refs[1])["texts"][0] == "1.0", "the other rank's is there"
        del refs
        wait_until(lambda: kept(bus)["actor/1"] == 0)
        wait_until(lambda: len(list(memory.iterdir())) == 4, what="the dead rank's memory to be removed")
    assert not memory.exists()


def test_an_owner_that_is_stopped_is_waited_for_and_one_that_is_killed_meanwhile_is_not(tmp_path):
    """Silence is no death: the call ends by its own deadline, or by the owner's end, or well once it goes on."""
    with launch(tmp_path, roles()) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        refs = actor.rollout(64, 512)
        pid = bus.statuses()[actor_name(actor)]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises((CallTimeout, RefLostError)):
                critic[0].digest.options(deadline=0.5)(refs[0])
            unwanted = critic[0].digest.submit(refs[0])
            wait_until(
                lambda: bus.statuses()[WorkerName("critic", 0)]["state"] == "busy", what="the wait for the owner"
            )
            unwanted.cancel()
            with pytest.raises(CallCancelled) as caught:
                unwanted.result(scaled(10))
            assert caught.value.outcome == "CANCELLED"
            future = critic[1].digest.submit(refs[0])
            aside = critic[1].digest_aside.submit([refs[0], refs[1]])
            assert critic[0].digest(refs[1])["texts"][0] == "1.0"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert future.result()["texts"][0] == "0.0"
        assert [batch["texts"][0] for batch in aside.result()] == ["0.0", "1.0"]
        os.kill(pid, signal.SIGSTOP)
        futures = [critic[1].digest.submit(refs[0]), critic[1].digest_aside.submit(refs[0])]
        os.kill(pid, signal.SIGKILL)
        for future in futures:  # whoever sees the end before its exit record is there knows the end, not the cause
            with pytest.raises(RefLostError, match=r"actor/0 no longer has .* (killed by SIGKILL|its process is gone)"):
                future.result()


def test_in_one_process_handles_work_alike(tmp_path):
    """scheduler=inline: kept, taken, split, joined, released, in the caller's own process."""
    with launch(tmp_path, roles(), scheduler="inline") as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        refs = actor.rollout(65, 16)
        assert critic.digest(refs[1]) == [actor[0].digest(refs[1].get())] * 2
        assert [len(share["texts"]) for share in critic.share(refs[0])] == [33, 32]
        joined = actor.double(bus.put({"ids": np.arange(10), "texts": list("abcdefghij")}))
        assert joined.get()["ids"].tolist() == list(range(0, 20, 2))
        mine = actor.put(100)[1]["ref"]
        with bus.scope():
            gone = actor.rollout(2, 2)
        assert mine.get().tolist() == [1] * 100
        mine.release()
        with pytest.raises(RefLostError, match="was released"):
            critic.digest(gone[0])
        del refs, joined, gone, mine
        ranks = [peer for group in (actor, critic) for peer in group._view.core.roster.peers()]
        wait_until(lambda: not any(peer.refs.desk.statistics()["refs"] for peer in ranks))


def test_status_shows_bytes_held_by_whom(tmp_path, capsys):
    """``zbus-controller status``: what each rank lends and keeps, since when, and in its JSON for whom."""
    with launch(tmp_path, roles()) as bus:
        actor = bus.group("actor")
        refs = [actor[0].rollout(64, 2048) for _ in range(3)]
        data = describe(snapshot(bus.trial))
        memory = {f"{worker['role']}/{worker['rank']}": worker["memory"] for worker in data["workers"]}
        assert memory["actor/0"]["refs"] == 3
        assert memory["actor/0"]["refs_bytes"] == sum(ref.nbytes for ref in refs)
        assert memory["actor/0"]["lent_bytes"] >= 3 * MIB
        (holder,) = memory["actor/0"]["holders"]
        assert (holder["refs"], holder["methods"]) == (3, {"rollout": 3 * refs[0].nbytes})
        assert 0 <= holder["oldest_s"] <= scaled(60)
        assert memory["critic/1"]["refs"] == 0
        show_status(Console(), str(tmp_path), None)
        text = capsys.readouterr().out
        line = next(line for line in text.splitlines() if line.startswith("actor") and " in 3, " in line)
        assert "3MiB" in line.replace(" ", "") or "3.0MiB" in line.replace(" ", "")


def test_a_restarted_rank_does_not_have_what_it_had(tmp_path):
    """A handle names one start of a rank: its successor's values are never taken for it."""
    with launch(tmp_path, {"actor": keepers(replicas=1, restart="one"), "critic": keepers(replicas=1)}) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        ref = actor[0].rollout(8, 8)
        start = actor[0]._view.core.roster.peers()[0].incarnation
        with pytest.raises(Exception, match="died"):
            actor.die()
        wait_until(lambda: actor.ready and actor[0]._view.core.roster.peers()[0].incarnation != start)
        again = actor[0].rollout(8, 8)
        with pytest.raises(RefLostError, match="actor/0 no longer has"):
            critic[0].digest(ref)
        with pytest.raises(RefLostError, match="ended"):
            ref.get()
        assert critic[0].digest(again)["texts"][0] == "0.0"


def test_a_rank_keeps_no_more_than_it_may(tmp_path):
    """The limit is told before the method runs where it is reached, else after; the error names who holds how much."""
    config = Config(data=DataConfig(refs=3 * MIB))
    with launch(tmp_path, {"actor": keepers(replicas=1)}, config=config) as bus:
        actor = bus.group("actor")[0]
        refs = [actor.rollout(64, 2048) for _ in range(2)]
        with pytest.raises(RefLimitError) as raised:
            actor.rollout(64, 2048)
        assert "actor/0 cannot keep the" in str(raised.value)
        assert "at most 3,145,728 bytes" in str(raised.value)
        assert "holds 2 Refs (`rollout`" in str(raised.value)
        assert "holds 2 Refs (`rollout`" in raised.value.facts["held"]
        assert "data.refs" in raised.value.hint
        refs.clear()
        until_nothing_is_kept(bus)
        assert actor.rollout(64, 2048).get()


def test_what_a_holder_does_not_hold_any_more_goes(tmp_path):
    """Answers that nobody looked at, calls that failed on another rank, and those whose caller gave up."""
    with launch(tmp_path, roles()) as bus:
        actor = bus.group("actor")
        future = actor.rollout.submit(64, 512)
        wait_until(lambda: [kept(bus)[f"actor/{rank}"] for rank in range(2)] == [1, 1])
        del future
        until_nothing_is_kept(bus)
        answers = actor.later.map([MIB] * 6)
        refs = list(answers)
        assert sum(kept(bus)[f"actor/{rank}"] for rank in range(2)) == 6
        assert bus.get(refs[0])[0] == 7
        del refs, answers
        until_nothing_is_kept(bus)
        with actor.batch() as b:
            first = b.rollout(8, 8)
            second = b.make(8, 8)
        assert [ref.rows for ref in first.result()] == [8, 8]
        assert second.result()[0]["ids"].shape == (8, 8)
        del first, second, b
        until_nothing_is_kept(bus)


def test_engines_put_and_callers_release(tmp_path):
    """``ctx.put`` in a call is held for its caller: used by others, gone by release, scope, or with its last handle."""
    with launch(tmp_path, roles()) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        put = actor.put(MIB)
        one = actor[0].put(100)["ref"]
        assert [critic[0].digest(answer["ref"]) for answer in put] == [
            digest(np.full(MIB, r, np.uint8)) for r in (0, 1)
        ]
        assert put[1]["ref"].get()[0] == 1
        assert one.get().tolist() == [0] * 100
        put[0]["ref"].release()
        with pytest.raises(RefLostError, match="was released"):
            critic.digest(put[0]["ref"])
        with bus.scope():
            scoped = actor[0].put(100)["ref"]
        with pytest.raises(RefLostError, match="was released"):
            scoped.get()
        assert kept(bus)["actor/1"] == 1
        del put, one
        until_nothing_is_kept(bus)
        held = actor.rollout(1, 1)  # so that the ranks hear of this controller for as long as it takes
        unread = actor.put.submit(1000)
        wait_until(unread.done, what="the answers that nobody will read")
        del unread
        with actor.batch() as b:
            b.put(1000)
            b.put(2000)
        del b
        wait_until(lambda: [kept(bus)[f"actor/{rank}"] for rank in range(2)] == [1, 1], what="what they told of to go")
        del held
        until_nothing_is_kept(bus)


def test_a_guest_that_dies_keeps_nothing(tmp_path):
    """A holder that ends without a word: its values go as soon as its farewell, its process's end or the lease says."""
    config = Config(data=DataConfig(ref_lease=1.0))
    with launch(tmp_path, {"actor": keepers(replicas=1)}, config=config) as bus:
        child = os.fork()
        if child == 0:
            try:
                guest = Controller.attach(bus.trial.path, timeout=scaled(10))
                ref = guest.group("actor")[0].rollout(64, 512)
                assert ref.get()
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        mine = bus.group("actor")[0].rollout(64, 512)
        wait_until(lambda: kept(bus)["actor/0"] == 1, what="the dead guest's value to go")
        assert mine.get()["ids"].shape == (64, 512)


@pytest.mark.parametrize(
    ("transport", "shared"), [("ipc", 0), ("ipc", 3 * MIB), ("tcp", 0)], ids=["none", "little", "tcp"]
)
def test_without_shared_memory_values_are_pulled_from_their_owner(tmp_path, transport, shared):
    """Only the rows that are wanted leave the owner; whole, by ranges and picked; a lost owner is named too."""
    config = Config(data=DataConfig(shared_memory=shared, refs=1 << 30), scheduler=SchedulerConfig(transport=transport))
    with launch(tmp_path, roles(), config=config) as bus:
        actor, critic = bus.group("actor"), bus.group("critic")
        ref = actor[0].make.options(keep=True)(128, 8192)
        plain = actor[0].make(128, 8192)
        assert critic[1].digest(ref) == actor[0].digest(plain)
        given = bus.statuses()[actor_name(actor)].get("bulk_given_bytes", 0)
        assert critic[0].digest(ref[32:64])["ids"] == digest(plain["ids"][32:64])
        if not shared:
            more = bus.statuses()[actor_name(actor)]["bulk_given_bytes"] - given
            assert 0 < more <= plain["ids"][32:64].nbytes + MIB // 2
        assert critic[0].digest(ref.take([100, 3, 50]))["ids"] == digest(plain["ids"][[100, 3, 50]])
        assert [share["texts"][0] for share in critic.share(ref)] == ["0.0", "0.64"]
        assert np.array_equal(ref.get()["ids"], plain["ids"])
        assert np.array_equal(actor[0].share(ref)["ids"], plain["ids"]), "its owner's own"
        mine = bus.put(plain)
        assert critic.digest(mine) == [actor[0].digest(plain)] * 2
        assert [share["texts"][0] for share in critic.share(mine)] == ["0.0", "0.64"]
        del mine
        os.kill(bus.statuses()[actor_name(actor)]["pid"], signal.SIGKILL)
        with pytest.raises(RefLostError, match="actor/0 no longer has"):
            critic[1].digest(ref)
        del ref
        until_nothing_is_kept(bus)


def actor_name(group):
    """Return the name of the group's first rank."""
    return group._view.core.roster.peers()[0].name
