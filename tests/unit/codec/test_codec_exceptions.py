from __future__ import annotations

import asyncio
import copy
import errno
import pickle
import traceback
import urllib.error

import pytest

from zbus.codec import decode, describe_exception, encode, exceptions, rebuild_exception, register_exception
from zbus.errors import BatchError, CallError, CodecError, ConfigError, RemoteError, WeightsError, WorkerLost, ZbusError

WHERE = {"role": "actor", "rank": 3, "host": "node7", "pid": 412, "method": "train", "attempts": 2}


def _raised(make):
    try:
        raise make()
    except BaseException as error:  # noqa: BLE001  # any exception at all is the matter of these tests
        return error


def _across(error, **options):
    """Carry an exception the way a call does: described, encoded, decoded, rebuilt."""
    return rebuild_exception(decode(encode(describe_exception(error, **options))), **WHERE)


BUILTINS = [
    ValueError("bad batch"),
    ValueError(),
    ValueError("a", 2, (3,)),
    KeyError("missing"),
    IndexError("x"),
    TypeError("x"),
    AttributeError("x", name="y", obj=None),
    NameError("x", name="y"),
    ImportError("x", name="mod"),
    ModuleNotFoundError("x", name="mod"),
    ZeroDivisionError("x"),
    AssertionError(),
    NotImplementedError("x"),
    RecursionError("x"),
    MemoryError("x"),
    RuntimeError("x"),
    OSError("plain"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOENT, "No such file", "/a"),
    OSError(errno.EXDEV, "Cross-device link", "/a", None, "/b"),
    PermissionError(errno.EACCES, "no", "/x"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError("slow"),
    BlockingIOError(errno.EAGAIN, "again", 3),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "é", 0, 1, "not in range"),
    UnicodeTranslateError("é", 0, 1, "no"),
    SyntaxError("bad", ("f.py", 3, 5, "x = = 1", 3, 6)),
    UserWarning("x"),
    EOFError("x"),
    BufferError("x"),
    SystemError("x"),
    ReferenceError("x"),
]


@pytest.mark.parametrize("error", BUILTINS, ids=[f"{i}-{type(e).__name__}" for i, e in enumerate(BUILTINS)])
def test_builtin_exception_is_caught_by_its_class_and_is_a_remote_error(error):
    """``except ValueError`` catches a remote ValueError, whose args and fields are the original's (B7)."""
    back = _across(_raised(lambda: error))
    assert isinstance(back, type(error))
    assert isinstance(back, RemoteError)
    assert back.args == error.args
    for name in ("errno", "strerror", "filename", "filename2", "name", "start", "reason", "lineno", "object"):
        if hasattr(error, name):
            assert getattr(back, name) == getattr(error, name)
    assert str(back).startswith(f"{type(error).__name__}")
    assert str(error) in str(back)


def test_error_says_where_it_was_raised():
    """Role, rank, host, pid, method, attempts and log tail are facts of the error."""
    back = rebuild_exception(describe_exception(_raised(lambda: ValueError("bad"))), **WHERE, log_tail=["a", "b"])
    assert (back.role, back.rank, back.host, back.pid) == ("actor", 3, "node7", 412)
    assert (back.method, back.attempts, back.outcome, back.reason) == ("train", 2, "APP_ERROR", "exception")
    assert back.log_tail == ["a", "b"]
    assert (back.remote_type, back.remote_module, back.remote_message) == ("ValueError", "builtins", "bad")
    assert str(back) == "ValueError: bad (raised by train in actor/3, pid 412 on node7)"
    assert isinstance(back, CallError)


def test_remote_traceback_is_a_field_and_is_printed():
    """The remote traceback stands in ``remote_traceback`` and is shown when the error is printed (B7)."""
    back = _across(_raised(lambda: ValueError("bad")))
    assert "in _raised" in (back.remote_traceback or "")
    printed = "".join(traceback.format_exception(back))
    assert "Remote traceback (actor/3, pid 412 on node7):" in printed
    assert printed.count("in _raised") == 1


def test_attribute_error_inside_a_method_keeps_its_own_text():
    """An AttributeError of the user's code is not taken for a missing method (B6)."""
    back = _across(_raised(lambda: AttributeError("'NoneType' object has no attribute 'step'")))
    assert isinstance(back, AttributeError)
    assert "'NoneType' object has no attribute 'step'" in str(back)


def test_cause_chain_arrives():
    """Explicit causes and implicit contexts arrive as causes, in order; a suppressed context does not."""

    def fail(*, suppress):
        try:
            try:
                raise KeyError("k")
            except KeyError as error:
                raise ValueError("v") from error
        except ValueError:
            if suppress:
                raise RuntimeError("r") from None
            raise RuntimeError("r")  # noqa: B904  # the implicit context is the point

    with pytest.raises(RuntimeError) as caught:
        fail(suppress=False)
    back = _across(caught.value)
    assert isinstance(back.__cause__, ValueError)
    assert isinstance(back.__cause__.__cause__, KeyError)
    assert back.__cause__.__cause__.__cause__ is None
    with pytest.raises(RuntimeError) as caught:
        fail(suppress=True)
    assert _across(caught.value).__cause__ is None


def test_chain_that_loops_or_is_very_long_is_cut():
    """A cycle of contexts and a chain of thousands are described in bounded size."""
    first, second = ValueError("1"), ValueError("2")
    first.__context__, second.__context__ = second, first
    assert _across(first).__cause__ is not None
    top = ValueError("0")
    error: BaseException = top
    for number in range(500):
        error.__cause__ = ValueError(str(number))
        error = error.__cause__
    assert len(encode(describe_exception(top))[0]) <= 65_536
    assert isinstance(_across(top), ValueError)


def test_notes_arrive():
    """Notes added remotely are notes here."""
    error = ValueError("x")
    error.add_note("while loading shard 3")
    assert "while loading shard 3" in _across(error).__notes__


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_exception_that_would_end_the_caller_is_a_plain_remote_error(error):
    """SystemExit and its like never leave a call as themselves."""
    back = _across(_raised(lambda: error))
    assert type(back) is RemoteError
    assert back.remote_type == type(error).__name__


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration()], ids=["sync", "async"])
def test_stop_iteration_does_not_silently_end_the_callers_loop(error):
    """A remote StopIteration is a plain RemoteError, so that ``list(map(call, …))`` cannot swallow it."""
    back = _across(error)
    assert not isinstance(back, (StopIteration, StopAsyncIteration))
    assert back.remote_type == type(error).__name__

    def call(_item):
        raise back

    with pytest.raises(RemoteError):
        list(map(call, [1]))


class _OwnError(ValueError):
    def __init__(self, code, *, detail):
        super().__init__(f"code {code}: {detail}")
        self.code, self.detail = code, detail


class _BareError(Exception):
    pass


def test_subclass_of_a_builtin_is_caught_by_the_builtin():
    """A user's ValueError subclass that is unknown here is still a ValueError."""
    back = _across(_raised(lambda: _OwnError(5, detail="x")))
    assert isinstance(back, ValueError)
    assert back.remote_type == "_OwnError"
    assert str(back).startswith("_OwnError: code 5: x")
    http = _across(urllib.error.URLError("down"))
    assert isinstance(http, OSError)


def test_unknown_exception_is_a_plain_remote_error():
    """A class with no builtin base but Exception arrives by name."""
    back = _across(_raised(lambda: _BareError("x")))
    assert type(back) is RemoteError
    assert str(back).startswith("_BareError: x")


@register_exception
class _Registered(RuntimeError):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.detail = detail


def test_registered_exception_arrives_as_itself():
    """A registered class is rebuilt from args and attributes, without its ``__init__``."""
    error = _Registered(5, detail={"rows": (1, 2)})
    error.socket = object()
    back = _across(_raised(lambda: error))
    assert isinstance(back, _Registered)
    assert isinstance(back, RemoteError)
    assert back.args == (5,)
    assert back.detail == {"rows": (1, 2)}
    assert back.role == "actor"
    assert isinstance(pickle.loads(pickle.dumps(back)), _Registered)


def test_class_registered_only_by_the_worker_falls_back_to_its_builtin():
    """A tag unknown to the caller costs only the class, not the error."""
    desc = describe_exception(_Registered(5, detail=1))
    desc["tag"] = "nowhere.Unknown"
    back = rebuild_exception(desc, **WHERE)
    assert isinstance(back, RuntimeError)
    assert not isinstance(back, _Registered)


def test_what_cannot_be_rebuilt_is_refused_at_registration():
    """Registering a StopIteration, a group or no exception fails at once."""
    for cls in (StopIteration, ExceptionGroup, SystemExit, int):
        with pytest.raises(CodecError):
            register_exception(cls)

    class _Other(Exception):  # it is never raised
        pass

    with pytest.raises(CodecError, match="already belongs"):
        register_exception(_Other, exceptions._full_name(_Registered))


def test_exception_group_keeps_its_members():
    """``except*`` catches the members of a remote group by their classes."""
    group = ExceptionGroup("two failed", [ValueError("a"), ExceptionGroup("in", [OSError(2, "no", "/f")])])
    back = _across(_raised(lambda: group))
    assert isinstance(back, ExceptionGroup)
    assert isinstance(back, RemoteError)
    caught = []
    try:
        raise back
    except* ValueError as part:
        caught += part.exceptions
    except* OSError as part:
        caught += part.exceptions[0].exceptions
    assert isinstance(caught[0], ValueError)
    assert caught[1].errno == errno.ENOENT
    assert back.message.startswith("ExceptionGroup: two failed")


def test_group_of_exits_holds_plain_remote_errors():
    """A BaseExceptionGroup arrives as an ExceptionGroup whose members cannot end the caller."""
    back = _across(BaseExceptionGroup("b", [KeyboardInterrupt(), ValueError("v")]))
    assert isinstance(back, ExceptionGroup)
    assert type(back.exceptions[0]) is RemoteError
    assert isinstance(back.exceptions[1], ValueError)


def test_errors_of_zbus_raised_in_an_engine_arrive():
    """An engine that itself lost a worker reports it with its text."""
    back = _across(WorkerLost("actor/1 died", role="actor", rank=1))
    assert type(back) is RemoteError
    assert back.remote_type == "WorkerLost"
    batch = _across(BatchError("2 failed", [ValueError("a"), KeyError("b")], {0: 1}))
    assert isinstance(batch, ExceptionGroup)
    assert isinstance(back, ZbusError)


def test_the_hint_of_an_error_of_zbus_arrives_with_it():
    """What to do about an error that an engine of ours raised is told on the controller, too."""
    back = _across(ConfigError("no such loss", hint="name it in the role's kwargs"))
    assert (back.remote_type, back.hint) == ("ConfigError", "name it in the role's kwargs")
    assert _across(ConfigError("no such loss")).hint is None


def test_an_error_of_zbus_that_says_what_to_do_arrives_as_itself():
    """A closed list of kinds keeps class, hint, facts and fields; it is still the error of a call to a rank."""
    cause = ValueError("not a number")
    sent = ConfigError("kwargs.lr is 'fast'", hint="give a number", facts={"from": "job.yaml:3"})
    sent.__cause__ = cause
    back = _across(sent)
    assert isinstance(back, ConfigError)
    assert isinstance(back, RemoteError)
    assert (back.hint, back.facts, back.rank, back.code) == ("give a number", {"from": "job.yaml:3"}, 3, "ZB0401")
    assert str(back).startswith("ConfigError: kwargs.lr is 'fast' (raised by train in actor/3")
    assert isinstance(back.__cause__, ValueError)
    weights = _across(WeightsError("no rank has it", phase="transfer", version=3, missing={1: "gone"}))
    assert (weights.phase, weights.version, weights.missing) == ("transfer", 3, {1: "gone"})
    assert pickle.loads(pickle.dumps(back)).facts == back.facts


def test_a_name_of_zbus_in_another_module_is_no_error_of_zbus():
    """Only what the list holds is rebuilt, whatever the wire says of it."""
    theirs = type("ConfigError", (Exception,), {"__module__": "users"})("mine")
    assert type(_across(theirs)) is RemoteError
    forged = {**describe_exception(ConfigError("x")), "own": {"facts": 3}, "type": "CodecError"}
    assert type(rebuild_exception(forged, **WHERE)) is RemoteError


class _Hostile(Exception):  # named for what it does
    def __init__(self, how):
        self.how = how

    def __str__(self):
        raise self.how

    __repr__ = __str__


class _TextChild(str):
    __slots__ = ()

    def encode(self, *_args, **_options):
        raise ValueError


class _OddText(Exception):  # named for what it does
    def __str__(self):
        return _TextChild("odd \ud800 text")


class _OddArgs(ValueError):
    @property
    def args(self):
        raise RuntimeError("no args for you")

    __notes__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __suppress_context__ = False


@pytest.mark.parametrize(
    "error",
    [
        _Hostile(ValueError("inner")),
        _Hostile(SystemExit(1)),
        _Hostile(KeyboardInterrupt()),
        _Hostile(RecursionError()),
        _OddText("x"),
        _OddArgs("x"),
        ValueError(_Hostile(ValueError("deep"))),
        ValueError(object(), lambda: 0),
        KeyError(object()),
        ValueError("\ud800 \x00 \x1b[31m"),
        OSError(object(), object()),
        UnicodeDecodeError("utf-8", b"\xff" * 50_000, 0, 1, "long"),
    ],
    ids=range(12),
)
def test_exception_whose_own_code_misbehaves_is_still_described(error):
    """A repr or str that raises, odd args, lone surrogates: the type's name always arrives, nothing escapes."""
    back = _across(_raised(lambda: error))
    assert back.remote_type == type(error).__name__
    assert str(back)
    "".join(traceback.format_exception(back))
    pickle.dumps(back)


def _recurse(depth):
    return _recurse(depth + 1)


@pytest.mark.parametrize("limit", [1_000, 4_096, 65_536])
def test_description_stays_within_its_limit(limit):
    """Huge messages, args, notes, tracebacks, chains and groups are cut to the limit, and the cut is said."""
    with pytest.raises(RecursionError) as caught:
        _recurse(0)
    huge = ValueError("x" * 1_000_000, "é" * 100_000)
    huge.add_note("n" * 100_000)
    huge.__cause__ = caught.value
    group = ExceptionGroup("g" * 10_000, [ValueError("v" * 10_000) for _ in range(1000)])
    for error in (huge, caught.value, group, _raised(lambda: huge)):
        desc = describe_exception(error, limit=limit)
        assert sum(len(frame) for frame in encode(desc)) <= limit
        assert rebuild_exception(desc, **WHERE).remote_type == type(error).__name__
    assert "characters cut" in describe_exception(huge, limit=limit)["message"]


@pytest.mark.parametrize("error", BUILTINS, ids=[f"{i}-{type(e).__name__}" for i, e in enumerate(BUILTINS)])
def test_rebuilt_error_survives_copy_and_pickle(error):
    """A rebuilt error can be copied and pickled by its user, with class, args, fields and notes."""
    back = _across(_raised(lambda: error))
    for again in (copy.copy(back), copy.deepcopy(back), pickle.loads(pickle.dumps(back))):
        assert type(again) is type(back)
        assert again.args == back.args
        assert str(again) == str(back)
        assert again.__notes__ == back.__notes__
        assert again.rank == 3
        assert getattr(again, "errno", None) == getattr(back, "errno", None)


def test_rebuilt_group_survives_pickle():
    """Groups are pickled with their members."""
    back = _across(ExceptionGroup("g", [ValueError("a")]))
    again = pickle.loads(pickle.dumps(back))
    assert isinstance(again.exceptions[0], ValueError)
    assert again.role == "actor"


@pytest.mark.parametrize(
    "desc",
    [
        {},
        None,
        [],
        {"type": 5, "message": [], "builtin": "SystemExit"},
        {"type": "X", "builtin": "os.system", "tag": "os.system"},
        {"builtin": "ValueError", "args": b"\xc1", "notes": 5, "cause": 7, "traceback": b"x"},
        {"builtin": "UnicodeDecodeError", "message": "m", "args": b"\x90"},
        {"builtin": "ExceptionGroup", "members": []},
        {"builtin": "ExceptionGroup", "members": [5, None]},
        {"builtin": "OSError", "os": b"\x90"},
        {"builtin": "type", "args": b"\x91\x01"},
    ],
    ids=range(11),
)
def test_malformed_description_still_gives_a_remote_error(desc):
    """A description from a confused or hostile worker never breaks the caller."""
    back = rebuild_exception(desc, **WHERE)
    assert isinstance(back, RemoteError)
    assert not isinstance(back, (SystemExit, KeyboardInterrupt))
    assert back.role == "actor"
    assert str(back)


def test_cause_nested_without_end_is_cut_when_rebuilt():
    """A hostile chain is followed to a bounded depth."""
    desc: dict = {"type": "X"}
    for _ in range(50):
        desc = {"type": "X", "cause": desc}
    error: BaseException | None = rebuild_exception(desc, **WHERE)
    depth = 0
    while error is not None:
        error, depth = error.__cause__, depth + 1
    assert depth < 12


def test_classes_are_made_once():
    """Two errors of one class share one dual class, so ``type`` comparisons and memory stay sane."""
    assert type(_across(ValueError("a"))) is type(_across(ValueError("b")))
