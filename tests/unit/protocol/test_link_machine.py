from __future__ import annotations

from protocol_kit import MS
from zbus.protocol.liveness import LinkMachine, LinkState

NEVER = 1 << 62


def ready() -> LinkMachine:
    """Return a link that has its WELCOME."""
    link = LinkMachine(0, hello_every_ns=100 * MS)
    link.link_up(MS)
    link.hello_sent(MS)
    assert link.welcomed(2 * MS)
    return link


def test_a_link_becomes_ready_by_a_welcome():
    """Connecting, handshaking, ready; HELLO is due at once and then no more."""
    link = LinkMachine(0, hello_every_ns=100 * MS)
    assert (link.state, link.hello_due) == (LinkState.CONNECTING, NEVER)
    link.link_up(5)
    assert (link.state, link.hello_due) == (LinkState.HANDSHAKING, 5)
    link.hello_sent(5)
    assert link.hello_due == 5 + 100 * MS
    assert link.welcomed(9)
    assert (link.state, link.hello_due, link.since_ns, link.evidence) == (LinkState.READY, NEVER, 9, "")


def test_only_the_first_welcome_is_news():
    """HELLO is repeated, so WELCOME is, too."""
    assert not ready().welcomed(3 * MS)


def test_a_lost_connection_makes_a_ready_link_suspect_and_never_dead():
    """It says HELLO when the connection is back, and is READY again by the answer."""
    link = ready()
    link.link_down(10 * MS, "the connection was lost")
    assert (link.state, link.hello_due, link.evidence) == (LinkState.SUSPECT, NEVER, "the connection was lost")
    link.link_down(20 * MS, "still lost")
    assert (link.state, link.since_ns) == (LinkState.SUSPECT, 10 * MS)
    link.link_up(30 * MS)
    assert (link.state, link.hello_due) == (LinkState.SUSPECT, 30 * MS)
    assert link.welcomed(31 * MS)
    assert link.state is LinkState.READY


def test_a_connection_lost_before_the_welcome_starts_over():
    """There was nothing to suspect."""
    link = LinkMachine(0)
    link.link_up(1)
    link.link_down(2, "refused")
    assert link.state is LinkState.CONNECTING


def test_a_connection_that_came_back_unnoticed_says_hello_and_resumes():
    """The loss may be seen only by the next connection; what was on its way is asked about at once, and only once."""
    link = ready()
    link.link_up(50 * MS)
    assert (link.state, link.hello_due) == (LinkState.READY, 50 * MS)
    assert link.welcomed(51 * MS)
    assert not link.welcomed(52 * MS)
    assert (link.state, link.since_ns) == (LinkState.READY, 2 * MS)


def test_a_lost_session_is_opened_again():
    """The callee does not know us any more."""
    link = ready()
    link.session_lost(50 * MS)
    assert link.hello_due == 50 * MS


def test_dead_is_for_good():
    """No event brings a dead incarnation back, and the first cause stands."""
    link = ready()
    assert link.dead(10 * MS, "worker_exit", "killed by signal 9")
    assert not link.dead(11 * MS, "lease", "ran out")
    link.link_up(12 * MS)
    link.link_down(13 * MS, "lost")
    link.session_lost(14 * MS)
    assert not link.welcomed(15 * MS)
    assert (link.state, link.hello_due, link.reason, link.evidence, link.since_ns) == (
        LinkState.DEAD, NEVER, "worker_exit", "killed by signal 9", 10 * MS,
    )  # fmt: skip


def test_a_link_whose_transport_gives_up_is_dialled_anew_later_each_time():
    """Unless the transport says that it tries again, redialling is due, after 0.2 s, 0.4 s, … 5 s, until a WELCOME."""
    link = ready()
    link.link_down(0, "lost")
    link.retrying()
    assert link.redial_due == NEVER
    pauses = []
    for now in (0, 10_000 * MS, 20_000 * MS, 30_000 * MS, 40_000 * MS, 50_000 * MS, 60_000 * MS):
        link.link_down(now, "not a zbus peer")
        pauses.append((link.redial_due - now) // MS)
        link.redialled()
        assert link.redial_due == NEVER
    assert pauses == [200, 400, 800, 1600, 3200, 5000, 5000]
    link.link_up(70_000 * MS)
    assert link.redials == 7, "a handshake alone is no answer"
    assert link.welcomed(70_001 * MS)
    link.link_down(80_000 * MS, "lost")
    assert (link.redials, link.redial_due) == (0, 80_200 * MS)
    link.dead(80_100 * MS, "lease", "ran out")
    assert link.redial_due == NEVER


def test_a_welcome_of_a_lost_connection_means_nothing():
    """It comes late, from a queue: the link is not READY by it, and is still dialled anew."""
    link = ready()
    link.link_down(10 * MS, "lost")
    assert not link.welcomed(11 * MS)
    assert (link.state, link.redial_due) == (LinkState.SUSPECT, 210 * MS)


def test_links_do_not_dial_in_step():
    """The pause is between half of it and all of it, by the jitter of the link."""
    pauses = []
    for jitter in (0.0, 0.5, 1.0):
        link = LinkMachine(0, jitter=jitter)
        link.link_down(0, "not a zbus peer")
        pauses.append(link.redial_due // MS)
    assert pauses == [100, 150, 200]


def test_silence_alone_changes_nothing():
    """A link has no timer that kills: a stopped worker stays READY while its kernel answers."""
    link = ready()
    assert link.hello_due == NEVER
