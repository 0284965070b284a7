import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waiting import wait_until, within
from zbus.transport.pubsub import (
    Delivery,
    GapTracker,
    Hub,
    Message,
    Publisher,
    Subscriber,
    choose_endpoints,
    topic_bytes,
)

LOOP = ["tcp://127.0.0.1:0"]


@pytest.fixture
def hub(factory):
    """Give a running hub."""
    made = Hub(factory, pub=LOOP, sub=LOOP)
    made.start()
    yield made
    assert made.stop()


def linked(factory, hub, *topics: str) -> tuple[Publisher, Subscriber]:
    """Return a publisher and a subscriber that hears it."""
    subscriber = Subscriber(factory)
    subscriber.connect(hub.sub_endpoints, [topic_bytes(topic) for topic in topics])
    publisher = Publisher(factory, 7)
    publisher.connect(hub.pub_endpoints)
    wait_until(lambda: publisher.heard() or publisher.listened, what="the subscription")
    return publisher, subscriber


def test_a_publisher_learns_when_somebody_listens_and_is_then_heard(factory, hub):
    """No first message is lost to a connection that is not there yet, because the publisher is told."""
    publisher, subscriber = linked(factory, hub, "a")
    assert publisher.publish("a", b"one") == 0
    assert publisher.publish("a", b"two") == 1
    got = [wait_until(subscriber.recv, what="a message") for _ in range(2)]
    assert got == [Message("a", 7, 0, b"one"), Message("a", 7, 1, b"two")]
    publisher.close()
    subscriber.close()


def test_a_topic_does_not_hear_a_longer_one(factory, hub):
    """The end mark: `actor` is not `actor2`."""
    publisher, subscriber = linked(factory, hub, "actor")
    publisher.publish("actor2", b"not for you")
    publisher.publish("actor", b"for you")
    assert wait_until(subscriber.recv, what="a message").topic == "actor"
    assert subscriber.recv() is None
    publisher.close()
    subscriber.close()


def test_publishing_to_nobody_counts_so_that_the_next_message_shows_a_gap(factory, hub):
    """A hint that nobody heard is not forgotten."""
    publisher = Publisher(factory, 7)
    publisher.publish("a", b"unheard")
    publisher.close()
    second, subscriber = linked(factory, hub, "a")
    publisher.connect(hub.pub_endpoints)
    wait_until(lambda: publisher.heard() or publisher.listened, what="the subscription")
    publisher.publish("a", b"heard")
    message = wait_until(subscriber.recv, what="a message")
    assert GapTracker().take(message) is Delivery.GAP
    for end in (publisher, second, subscriber):
        end.close()


def test_a_beat_repeats_how_many_messages_there_were(factory, hub):
    """The loss of the last message shows without another message."""
    publisher, subscriber = linked(factory, hub, "a")
    publisher.publish("a", b"x")
    publisher.beat()
    tracker = GapTracker()
    first, beat = (wait_until(subscriber.recv, what="a message") for _ in range(2))
    assert (tracker.take(first), tracker.take(beat)) == (Delivery.NEXT, Delivery.NEXT)
    assert GapTracker().take(beat) is Delivery.GAP
    publisher.close()
    subscriber.close()


def test_a_subscriber_that_does_not_read_hurts_nobody(factory, hub):
    """Row 36: the publisher never waits, the others hear everything, memory is bounded by the high-water marks."""
    publisher, quick = linked(factory, hub, "a")
    stuck = Subscriber(factory)
    stuck.connect(hub.sub_endpoints, [topic_bytes("a")])
    slowest = 0.0
    for number in range(40_000):
        began = time.perf_counter()
        publisher.publish("a", b"x" * 200)
        slowest = max(slowest, time.perf_counter() - began)
        while number % 500 == 499 and quick.recv() is not None:
            pass
    assert slowest < within(1)
    publisher.publish("a", b"last")

    def last_heard() -> bool:
        while (message := quick.recv()) is not None:
            if message.payload == b"last":
                return True
        return False

    wait_until(last_heard, what="the last message")
    for end in (publisher, quick, stuck):
        end.close()


def test_the_hub_counts_what_it_forwards(factory, hub):
    """Statistics come from the loop itself: two frames a message."""
    publisher, subscriber = linked(factory, hub, "a")
    for _ in range(10):
        publisher.publish("a", b"x")
    for _ in range(10):
        wait_until(subscriber.recv, what="a message")
    counted = hub.statistics()
    assert counted is not None
    assert (counted.from_publishers, counted.to_subscribers) == (20, 20)
    publisher.close()
    subscriber.close()


def test_a_hub_stops_in_bounded_time_with_traffic_and_dead_subscribers(factory):
    """Stop is quick whatever is under way, and may be repeated; statistics then are None."""
    hub = Hub(factory, pub=LOOP, sub=LOOP)
    assert not hub.running
    hub.start()
    publisher, subscriber = linked(factory, hub, "a")
    for _ in range(1_000):
        publisher.publish("a", bytes(10_000))
    began = time.monotonic()
    assert hub.stop()
    assert time.monotonic() - began < within(2)
    assert hub.stop()
    assert hub.statistics() is None
    assert not hub.running
    publisher.publish("a", b"to nobody")
    publisher.close()
    subscriber.close()


def test_a_hub_that_cannot_bind_leaves_no_socket_open(factory, hub):
    """A taken address is an error with the address."""
    from zbus.errors import TransportError

    with pytest.raises(TransportError, match="in use"):
        Hub(factory, pub=hub.pub_endpoints, sub=LOOP)
    assert factory.open_sockets == {"discovery": 2, "pair": 2}


def test_junk_on_the_channel_is_counted_and_skipped(factory, hub):
    """Whatever anybody publishes, the next good message is heard."""
    from zbus.transport.multipart import send

    publisher, subscriber = linked(factory, hub, "a")
    junk = (
        [b"a$"],
        [b"a$", b"x", b"y"],
        [b"a$", b""],
        [b"a$", b"\xc1"],
        [b"a$", b"\x93\x01\x02"],
        [b"a$", b"\x94\x02\x01\x00\xc4\x01x"],
        [b"a$", b"\x94\x01\x01\xff\xc4\x01x"],
        [b"a$", b"\x94\x01\xff\x00\xc4\x01x"],
        [b"a$b", b"\x94\x01\x01\x00\xc4\x01x"],
        [b"a$\xff$", b"\x94\x01\x01\x00\xc4\x01x"],
        [b"a$", b"\xdd\xff\xff\xff\xff"],
    )
    for frames in junk:
        assert send(publisher.socket, frames)
    publisher.publish("a", b"good")
    assert wait_until(subscriber.recv, what="the good message").payload == b"good"
    assert subscriber.junk == len(junk)
    publisher.close()
    subscriber.close()


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b"]), st.integers(0, 30)), max_size=60))
def test_every_loss_shows_and_no_copy_counts_twice(stream):
    """For any loss and duplication of numbered messages: gap exactly when numbers were skipped, old when repeated."""
    tracker = GapTracker()
    expected: dict[tuple[int, str], int] = {}
    for publisher, topic, seq in stream:
        want = expected.get((publisher, topic), 0)
        verdict = tracker.take(Message(topic, publisher, seq, b"x"))
        assert verdict is (Delivery.GAP if seq > want else Delivery.OLD if seq < want else Delivery.NEXT)
        expected[publisher, topic] = max(want, seq + 1)


def test_memory_for_streams_is_bounded():
    """A flood of invented publishers pushes out old streams, which then look late: one look at the registry."""
    tracker = GapTracker(limit=100)
    tracker.take(Message("a", 1, 0, b"x"))
    for publisher in range(1_000, 1_200):
        tracker.take(Message("a", publisher, 0, b"x"))
    assert tracker.take(Message("a", 1, 1, b"x")) is Delivery.GAP


def test_an_ipc_endpoint_is_used_where_its_socket_exists(short_dir):
    """The same record serves this host and others."""
    path = short_dir / "s"
    endpoints = [f"ipc://{path}", "tcp://127.0.0.1:5", "tcp://127.0.0.1:6"]
    assert choose_endpoints(endpoints) == endpoints[1:]
    path.touch()
    assert choose_endpoints(endpoints) == endpoints[:1]
    assert choose_endpoints([f"ipc://{short_dir}/none"]) == [f"ipc://{short_dir}/none"]


def test_mistakes_of_code_are_refused(factory, hub):
    """An empty payload is a beat, a topic cannot hold the end mark, a hub starts once."""
    publisher = Publisher(factory, 1)
    with pytest.raises(ValueError, match="beat"):
        publisher.publish("a", b"")
    with pytest.raises(ValueError, match="contains"):
        topic_bytes("a$b")
    with pytest.raises(RuntimeError, match="already started"):
        hub.start()
