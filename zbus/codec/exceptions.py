"""Exceptions as plain data, and back as errors that a caller can catch by their builtin class.

``describe_exception`` runs in the worker and never raises, whatever the exception's own methods do. What it returns
holds only text, numbers and bytes, so every process can read it. ``rebuild_exception`` runs in the caller: the class is
looked up in a fixed table (builtins, and classes the caller registered), never imported by name.

Never rebuilt as their own class: ``SystemExit``, ``KeyboardInterrupt``, ``GeneratorExit`` (they would end the caller)
and ``StopIteration``, ``StopAsyncIteration`` (they would silently end the caller's loop). They arrive as plain
``RemoteError``.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from zbus.codec.decoder import decode
from zbus.codec.encoder import encode
from zbus.codec.limits import Limits
from zbus.errors import (
    CodecError,
    ConfigError,
    EngineLoadError,
    RecoverError,
    RemoteError,
    RewardError,
    RolloutError,
    WeightsError,
    ZbusError,
)

__all__ = ["describe_exception", "rebuild_exception", "register_exception"]

_E = TypeVar("_E", bound=type[BaseException])
_T = TypeVar("_T")

_REBUILT: Final[dict[str, type[Exception]]] = {
    cls.__name__: cls
    for cls in (
        *(ArithmeticError, AssertionError, AttributeError, BlockingIOError, BrokenPipeError, BufferError, BytesWarning),
        *(ChildProcessError, ConnectionAbortedError, ConnectionError, ConnectionRefusedError, ConnectionResetError),
        *(DeprecationWarning, EOFError, EncodingWarning, ExceptionGroup, FileExistsError, FileNotFoundError),
        *(FloatingPointError, FutureWarning, ImportError, ImportWarning, IndentationError, IndexError),
        *(InterruptedError, IsADirectoryError, KeyError, LookupError, MemoryError, ModuleNotFoundError, NameError),
        *(NotADirectoryError, NotImplementedError, OSError, OverflowError, PendingDeprecationWarning),
        *(PermissionError, ProcessLookupError, RecursionError, ReferenceError, ResourceWarning, RuntimeError),
        *(RuntimeWarning, SyntaxError, SyntaxWarning, SystemError, TabError, TimeoutError, TypeError),
        *(UnboundLocalError, UnicodeDecodeError, UnicodeEncodeError, UnicodeError, UnicodeTranslateError),
        *(UnicodeWarning, UserWarning, ValueError, Warning, ZeroDivisionError),
    )
}
_OURS: Final[dict[str, tuple[type[ZbusError], tuple[str, ...]]]] = {
    "ConfigError": (ConfigError, ()),
    "EngineLoadError": (EngineLoadError, ()),
    "RecoverError": (RecoverError, ()),
    "RewardError": (RewardError, ("reward", "item", "hung")),
    "RolloutError": (RolloutError, ()),
    "WeightsError": (WeightsError, ("phase", "version", "missing")),
}
"""Errors of zbus's own that arrive as themselves, too, with these fields beside ``hint`` and ``facts``.

Those of calls are not among them: one that an engine got says nothing of the call that brought it here.
"""

_NEVER: Final = (StopIteration, StopAsyncIteration)

_MAX_CHAIN: Final = 8
_MAX_MEMBERS: Final = 32
_MAX_NOTES: Final = 16
_MAX_FRAMES: Final = 64
_ARGS_LIMITS: Final = Limits(depth=16, items=10_000, body_bytes=16_384, buffers=0)

_user_classes: dict[str, type[Exception]] = {}


def register_exception(cls: _E, tag: str | None = None) -> _E:
    """Let an exception class of the user's arrive as itself (and as ``RemoteError``). Usable as a decorator.

    It is rebuilt from ``args`` and those attributes that the codec can carry; its ``__init__`` does not run.

    Args:
        cls: A subclass of ``Exception``.
        tag: Its name on the wire, the same in every process; by default ``module.qualified_name``.

    Returns:
        The class, unchanged.

    Raises:
        CodecError: Not an ``Exception`` class, or the tag is taken by another class.
    """
    if not issubclass(cls, Exception) or issubclass(cls, (*_NEVER, BaseExceptionGroup)):
        msg = f"{cls!r} is not an exception class that can be rebuilt"
        raise CodecError(msg, hint="register subclasses of Exception, except StopIteration and exception groups")
    name = tag or _full_name(cls)
    holder = _user_classes.get(name)
    if holder is not None and _full_name(holder) != _full_name(cls):
        msg = f"exception tag {name!r} already belongs to {_full_name(holder)}"
        raise CodecError(msg, hint="give one of them another tag")
    _user_classes[name] = cls
    _dual.cache_clear()
    return cls


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# -- describing ----------------------------------------------------------------------------------------------------


def describe_exception(exc: BaseException, *, limit: int = 65_536) -> dict[str, Any]:
    """Return ``exc`` as plain data. Never raises; any thread may call.

    Keys: ``type``, ``module``, ``builtin`` (nearest builtin class that can be rebuilt, or ``""``), ``tag``,
    ``message``, ``args`` and ``attrs`` (encoded apart, or None), ``notes``, ``traceback`` (text, with causes),
    ``frames`` (``[file, line, function]``), ``os``, ``name``, ``hint`` (of an error of zbus's own), ``own`` (its
    fields, encoded apart), ``cause``, ``context``, ``members``.

    Args:
        exc: Any exception, ``SystemExit`` and its like included.
        limit: Bytes that the encoded description may take; long parts are cut in the middle, and say so.
    """
    trace = _guard(lambda: _traceback(exc, limit), "")
    share = limit
    while True:
        described = _describe(exc, max(share // 4, 64), frozenset())
        described["traceback"] = _cut(trace, share // 4)
        if _size(described) <= limit:
            return described
        if share <= limit // 64:
            return _least(described, limit)
        share //= 2


def _size(described: dict[str, Any]) -> int:
    return sum(len(frame) for frame in encode(described))


def _least(described: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the barest description: what it was and what it said."""
    bare = {key: _cut(described[key], 64) for key in ("type", "module", "builtin", "tag")}
    return {**bare, "message": _cut(described["message"], max(limit // 4, 32))}


def _describe(exc: BaseException, text: int, above: frozenset[int]) -> dict[str, Any]:
    """Describe one exception and, to a bounded depth, those it came from."""
    above |= {id(exc)}
    cls = type(exc)
    described: dict[str, Any] = {
        "type": _guard(lambda: _text(cls.__qualname__, 200), "?"),
        "module": _guard(lambda: _text(cls.__module__, 200), "?"),
        "builtin": _builtin_of(cls),
        "tag": next((tag for tag, known in list(_user_classes.items()) if known is cls), ""),
        "message": _message(exc, text),
        "args": _guard(lambda: _packed(tuple(exc.args)), None),
        "attrs": None,
        "notes": _guard(lambda: [_text(note, text // 8) for note in _notes(exc)], list[str]()),
        "frames": _guard(lambda: _frames(exc), list[list[Any]]()),
    }
    if described["tag"]:
        described["attrs"] = _guard(lambda: _packed(_attributes(exc)), None)
    if isinstance(exc, OSError):
        described["os"] = _guard(lambda: _packed((exc.errno, exc.strerror, exc.filename, exc.filename2)), None)
    if isinstance(exc, (ImportError, NameError, AttributeError)):
        described["name"] = _guard(lambda: _text(exc.name, 200) if isinstance(exc.name, str) else None, None)
    if isinstance(exc, ZbusError) and exc.hint:
        described["hint"] = _guard(lambda: _text(exc.hint, text // 8), "")
    if _OURS.get(cls.__name__, (None,))[0] is cls:
        described["own"] = _guard(lambda: _packed(_own_fields(exc)), None)
    _describe_related(exc, described, text, above)
    return described


def _describe_related(exc: BaseException, described: dict[str, Any], text: int, above: frozenset[int]) -> None:
    """Add the cause or context and the members of a group."""
    if len(above) > _MAX_CHAIN:
        return
    cause, context = exc.__cause__, exc.__context__
    if cause is not None and id(cause) not in above:
        described["cause"] = _describe(cause, text // 2, above)
    elif cause is None and context is not None and not exc.__suppress_context__ and id(context) not in above:
        described["context"] = _describe(context, text // 2, above)
    if isinstance(exc, BaseExceptionGroup):
        members: list[BaseException] = _guard(lambda: list(exc.exceptions[:_MAX_MEMBERS]), [])
        described["members"] = [_describe(member, text // 4, above) for member in members if id(member) not in above]


def _guard(make: Callable[[], _T], fallback: _T) -> _T:
    """Return ``make()``, or the fallback when the exception's own code misbehaves."""
    try:
        return make()
    except BaseException:  # noqa: BLE001  # a user's __str__ may raise SystemExit; the call must still be answered
        return fallback


def _builtin_of(cls: type[BaseException]) -> str:
    if issubclass(cls, _NEVER):
        return ""
    for base in cls.__mro__:
        if _REBUILT.get(base.__name__) is base:
            return base.__name__
    return "ExceptionGroup" if issubclass(cls, BaseExceptionGroup) else ""


def _text(value: Any, limit: int) -> str:
    """Return exact, encodable, bounded text of a str (or of a subclass with methods of its own)."""
    if not isinstance(value, str):
        value = f"<{type(value).__name__} instead of text>"
    clean = str.encode(value, "utf-8", "backslashreplace").decode("utf-8")
    return _cut(clean, limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = max(limit // 2 - 16, 8)
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters cut …\n{text[-half:]}"


def _message(exc: BaseException, limit: int) -> str:
    try:
        return _text(str(exc), limit)
    except BaseException as error:  # noqa: BLE001  # see _guard
        return f"<the text of this {_guard(lambda: type(exc).__name__, 'exception')} raised {type(error).__name__}>"


def _packed(value: Any) -> bytes | None:
    """Return ``value`` encoded apart, so that what the reader does not know costs it only this part."""
    try:
        (body,) = encode(value, limits=_ARGS_LIMITS)
    except (CodecError, ValueError):
        return None
    return bytes(body)


def _attributes(exc: BaseException) -> dict[str, Any]:
    """Return those attributes of a registered exception that can be carried."""
    return {name: value for name, value in vars(exc).items() if name != "__notes__" and _packed(value) is not None}


def _own_fields(exc: BaseException) -> dict[str, Any]:
    """Return the fields of an error of zbus's own that can be carried."""
    _, names = _OURS[type(exc).__name__]
    found = {name: getattr(exc, name) for name in ("facts", *names)}
    return {name: value for name, value in found.items() if _packed(value) is not None}


def _notes(exc: BaseException) -> list[Any]:
    notes = getattr(exc, "__notes__", ())
    return list(notes)[:_MAX_NOTES] if isinstance(notes, (list, tuple)) else []


def _traceback(exc: BaseException, limit: int) -> str:
    try:
        return _text("".join(traceback.format_exception(exc)), limit)
    except BaseException:  # noqa: BLE001  # see _guard
        return _text("".join(traceback.format_tb(exc.__traceback__)), limit)


def _frames(exc: BaseException) -> list[list[Any]]:
    frames = []
    entry = exc.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        frames.append([_text(code.co_filename, 400), entry.tb_lineno, _text(code.co_qualname, 200)])
        if len(frames) > 2 * _MAX_FRAMES:
            del frames[:_MAX_FRAMES]
        entry = entry.tb_next
    return frames[-_MAX_FRAMES:]


# -- rebuilding ----------------------------------------------------------------------------------------------------


def rebuild_exception(
    desc: Mapping[str, Any],
    *,
    role: str | None,
    rank: int | None,
    host: str | None,
    pid: int | None,
    method: str | None,
    attempts: int = 1,
    log_tail: Sequence[str] = (),
) -> RemoteError:
    """Return the error to raise for a description. Never raises on a malformed one; any thread may call.

    The result is a ``RemoteError`` and, where the remote class is a builtin, a subclass of one, or registered here,
    also an instance of that class with its ``args`` (``errno`` and its like included); so are errors of zbus's own that
    say what a user can do, with their fields. ``remote_traceback`` holds the
    traceback, also attached as a note; ``__cause__`` holds the rebuilt cause.

    Args:
        desc: What ``describe_exception`` returned.
        role: Role of the worker.
        rank: Its rank.
        host: Its host.
        pid: Its process.
        method: Endpoint name.
        attempts: How many times the request was transmitted.
        log_tail: Last lines of the worker's log, oldest first.
    """
    where = {"role": role, "rank": rank, "host": host, "pid": pid, "method": method, "attempts": attempts}
    desc = _mapping(desc)
    error = _rebuild(desc, where, 0)
    error.log_tail = list(log_tail)
    remote = _str(desc, "traceback")
    if remote:
        error.remote_traceback = remote
        error.add_note(f"Remote traceback ({_worker(where)}):\n{remote.rstrip()}")
    return error


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _worker(where: Mapping[str, Any]) -> str:
    name = f"{where['role'] or '?'}/{'?' if where['rank'] is None else where['rank']}"
    place = f"pid {where['pid']}" if where["pid"] is not None else ""
    if where["host"]:
        place += f"{' ' if place else ''}on {where['host']}"
    return f"{name}, {place}" if place else name


def _str(desc: Mapping[str, Any], key: str) -> str:
    value = desc.get(key)
    return value if isinstance(value, str) else ""


def _rebuild(desc: Mapping[str, Any], where: Mapping[str, Any], depth: int) -> RemoteError:
    """Rebuild one exception, its notes, cause and members."""
    kind, text = _str(desc, "type") or "Exception", _str(desc, "message")
    message = f"{kind}: {text}" if text else kind
    if depth == 0:
        message += f" (raised by {where['method'] or 'a call'} in {_worker(where)})"
    fields = RemoteError(message, **where, outcome="APP_ERROR", reason="exception").__dict__
    fields |= {"remote_type": kind, "remote_module": _str(desc, "module"), "remote_message": text}
    if _str(desc, "hint"):
        fields["hint"] = _str(desc, "hint")
    error = _construct(desc, fields, text, where, depth)
    notes = desc.get("notes")
    for note in notes if isinstance(notes, list) else ():
        error.add_note(str(note))
    related = desc.get("cause") or desc.get("context")
    if isinstance(related, Mapping) and depth < _MAX_CHAIN:
        error.__cause__ = _rebuild(related, where, depth + 1)
    return error


def _construct(
    desc: Mapping[str, Any], fields: dict[str, Any], text: str, where: Mapping[str, Any], depth: int
) -> RemoteError:
    """Make the instance in the nearest class that takes it."""
    candidates: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    if own := _own_of(desc):
        candidates.append((_str(desc, "type"), (text,), own))
    args = _unpacked(desc.get("args"), tuple)
    if _str(desc, "tag") in _user_classes:
        attributes = _unpacked(desc.get("attrs"), dict) or {}
        candidates.append((_str(desc, "tag"), (text,) if args is None else args, attributes))
    builtin = _str(desc, "builtin")
    if builtin == "ExceptionGroup":
        members = desc.get("members")
        if isinstance(members, list) and members and depth < _MAX_CHAIN:
            rebuilt = [_rebuild(_mapping(member), where, depth + 1) for member in members]
            head = args[0] if args and isinstance(args[0], str) else text
            candidates.append((builtin, (head, rebuilt), {}))
    elif builtin in _REBUILT:
        candidates += [(builtin, choice, _extra(desc, builtin)) for choice in _arguments(desc, args, text)]
    for name, arguments, attributes in candidates:
        try:
            # Of an error of zbus's own, what its reader can do and what is known.
            hint, facts = attributes.get("hint"), attributes.get("facts")
            more: dict[str, Any] = {"hint": hint} if isinstance(hint, str) else {}
            more |= {"facts": facts} if isinstance(facts, dict) else {}
            return _instance(name, arguments, {**attributes, **fields, **more})
        except Exception:  # noqa: BLE001, S112  # a class that refuses these arguments: try the next
            continue
    return _instance("", (fields["message"],), fields)


def _own_of(desc: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an error of zbus's own, of those that it has; empty for any other."""
    kind, names = _OURS.get(_str(desc, "type"), (None, ()))
    if kind is None or _str(desc, "module") != kind.__module__:
        return {}
    told = _unpacked(desc.get("own"), dict) or {}
    facts = told.get("facts")
    facts = facts if isinstance(facts, dict) else {}
    found = {name: told[name] if name in told else getattr(kind, name, None) for name in names}
    return {**found, "facts": {str(key): str(value) for key, value in facts.items()}}


def _unpacked(data: Any, kind: type[_T]) -> _T | None:
    if not isinstance(data, bytes):
        return None
    try:
        value = decode([data], limits=_ARGS_LIMITS)
    except CodecError:
        return None
    return value if type(value) is kind else None


def _arguments(desc: Mapping[str, Any], args: tuple[Any, ...] | None, text: str) -> list[tuple[Any, ...]]:
    """Return the argument lists to try for a builtin class, best first."""
    choices: list[tuple[Any, ...]] = []
    system = _unpacked(desc.get("os"), tuple)
    if system is not None and len(system) == 4 and system[0] is not None:  # errno … filename2
        number, words, first, second = system
        if second is not None:
            choices.append((number, words, first, None, second))
        elif first is not None:
            choices.append((number, words, first))
        elif args is None:
            choices.append((number, words))
    if args is not None:
        choices.append(args)
    choices.append((text,))
    return choices


def _extra(desc: Mapping[str, Any], builtin: str) -> dict[str, Any]:
    named = issubclass(_REBUILT[builtin], (ImportError, NameError, AttributeError))
    return {"name": _str(desc, "name") or None} if named else {}


@functools.lru_cache(maxsize=256)
def _dual(name: str) -> type[RemoteError]:
    """Return the class that is ``RemoteError`` and the class called ``name``; ``""`` is plain ``RemoteError``."""
    base = _user_classes.get(name) or _REBUILT.get(name) or _OURS.get(name, (None,))[0]
    if base is None:
        return RemoteError
    if issubclass(base, RemoteError):
        return base
    namespace: dict[str, Any] = {
        "__module__": "zbus",
        "__doc__": f"A ``{base.__name__}`` raised in a worker.",
        "__reduce__": _reduce,
        "_zbus_name": name,
    }
    if base is ExceptionGroup:
        # A group's own ``message`` cannot be set, and ``str()`` shows ours.
        namespace["message"] = property(lambda self: self.__dict__["message"])
        namespace["derive"] = lambda self, members: ExceptionGroup(self.args[0], members)
    return type(f"Remote{base.__name__}", (RemoteError, base), namespace)


def _instance(name: str, arguments: tuple[Any, ...], fields: dict[str, Any]) -> RemoteError:
    """Make an instance without ``RemoteError.__init__``, whose signature differs from the builtin's."""
    cls = _dual(name)
    # MemoryError's own allocator keeps a free list and refuses subclasses with another first base.
    error = BaseException.__new__(cls, *arguments) if issubclass(cls, MemoryError) else cls.__new__(cls, *arguments)
    builtin = _REBUILT.get(name)
    if builtin is not None and name not in _user_classes:
        _fill(error, builtin, arguments)
    else:
        error.args = arguments
    if "name" in fields:
        error.name = fields["name"]  # type: ignore[attr-defined]  # a field of AttributeError and its like
    # Not setattr: where the builtin has a field of that name (``reason`` of UnicodeDecodeError), its own stands.
    error.__dict__.update(fields)
    error.__dict__["_zbus_arguments"] = arguments
    return error


def _fill(error: Exception, builtin: type[Exception], arguments: tuple[Any, ...]) -> None:
    """Set the fields that the builtin's own ``__init__`` sets."""
    if isinstance(error, BlockingIOError) and len(arguments) == 3 and isinstance(arguments[2], int):
        # In a subclass the third argument would be taken for a file name.
        builtin.__init__(error, *arguments[:2])
        error.characters_written = arguments[2]
        error.args = arguments
        return
    builtin.__init__(error, *arguments)


def _reduce(self: Any) -> tuple[Any, ...]:
    state = {key: value for key, value in self.__dict__.items() if key != "_zbus_arguments"}
    return (_instance, (type(self)._zbus_name, self.__dict__["_zbus_arguments"], state))  # noqa: SLF001  # own class
