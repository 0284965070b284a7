"""What an engine author declares: the ``Engine`` base class, the ``endpoint`` decorator, the mesh.

Pure declarations, no numpy, torch or sockets. How a call is spread over the ranks of a group (*dispatch*), how the
answers become one value (*collect*), whether a second run does harm (*effect*) and which ordered stream it belongs to
(*lane*) stand at the endpoint; nothing is guessed from argument types or method names.

::

    class Actor(zbus.Engine):
        @zbus.endpoint(Split("dp", by="tokens"), collect=Concat(), effect="pure")
        def logprobs(self, batch): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar, overload

from zbus.errors import ConfigError
from zbus.retry import deadline_seconds

__all__ = [
    "AnyOne",
    "Collect",
    "Concat",
    "Dispatch",
    "Effect",
    "Endpoint",
    "EndpointSpec",
    "Engine",
    "Everywhere",
    "First",
    "Mesh",
    "Parameter",
    "PerRank",
    "RankZero",
    "Reduce",
    "Same",
    "Scatter",
    "Split",
    "Start",
    "Whole",
    "endpoint",
    "endpoints_of",
    "lanes_of",
    "table_from_wire",
    "table_to_wire",
]

S_contra = TypeVar("S_contra", contravariant=True)
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
C_co = TypeVar("C_co", covariant=True)
T = TypeVar("T")

Effect = Literal["once", "idempotent", "pure"]
"""``once``: a second run does harm. ``idempotent``: the same worker may run it again. ``pure``: any worker may."""

Start = Literal["each", "together"]
"""``each``: every rank begins when its turn has come. ``together``: none begins until all of them hold the call."""

EFFECTS: Final = ("once", "idempotent", "pure")
STARTS: Final = ("each", "together")
MAIN: Final = "main"
RESERVED_LANES: Final = frozenset({"ctl", "data", "discovery"})
RESERVED_NAMES: Final = frozenset(
    {
        *(
            "batch",
            "builtin",
            "endpoints",
            "group",
            "mesh",
            "method",
            "options",
            "placer",
            "ranks",
            "ready",
            "role",
            "roster",
        ),
        *("setup", "recover", "teardown"),
    }
)
"""Names an endpoint cannot bear: they mean something else on a group, or are the engine's own hooks."""


class _Kind:
    """A declaration that has no settings: those of one kind are equal. Dataclasses are made ten times slower."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


# -- dispatch: who gets what -----------------------------------------------------------------------------------------


class Everywhere(_Kind):
    """Every rank gets the same arguments."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Split:
    """Each position on a mesh axis gets its share of the items; ranks that differ on other axes only get the same.

    Lists, tuples, arrays and tensors (first dimension) and the columns of dicts are split; scalars, text, bytes, None
    and anything wrapped in ``Whole`` go to every rank. Shares may be uneven (10 over 3: 4, 3, 3) and, when there are
    fewer items than positions, empty.

    Attributes:
        axis: Name of the mesh axis.
        by: ``"count"``: consecutive items, as even as can be. ``"tokens"``: balanced by each item's token count.
        groups: Keeps items together: an int n puts each n consecutive items on one rank; a name is the column or
            argument whose equal values belong together. None: items are free.
        args: Names of the arguments to split; None: all that can be.
        tokens: Column or argument with each item's token count (or its mask); None: ``attention_mask``, ``lengths``,
            ``input_ids`` or, failing these, the length of each item.
    """

    axis: str = "dp"
    by: Literal["count", "tokens"] = "count"
    groups: int | str | None = None
    args: tuple[str, ...] | None = None
    tokens: str | None = None

    def __post_init__(self) -> None:
        """Check the declaration when it is written, not when it is used."""
        axis: object = self.axis
        if not isinstance(axis, str) or not axis:
            msg = f"Split axis {self.axis!r} is not the name of a mesh axis"
            raise ConfigError(msg, hint='name one axis, such as Split("dp")')
        if self.by not in ("count", "tokens"):
            msg = f"Split by {self.by!r} is not known"
            raise ConfigError(msg, hint='use by="count" or by="tokens"')
        if isinstance(self.groups, int) and self.groups < 1:
            msg = f"Split groups={self.groups} cannot hold an item"
            raise ConfigError(msg, hint="give the number of consecutive items of a group, at least 1")
        args: object = self.args
        if isinstance(args, str):
            msg = f"Split args={self.args!r} is text, not a tuple of argument names"
            raise ConfigError(msg, hint=f"write args=({self.args!r},)")


class Scatter(_Kind):
    """Rank i gets item i of every list or tuple argument; each must hold exactly one item per rank."""

    __slots__ = ()


class AnyOne(_Kind):
    """One rank runs it: the least loaded of those that are ready."""

    __slots__ = ()


class RankZero(_Kind):
    """The lowest rank of the group (or slice) runs it."""

    __slots__ = ()


Dispatch = Everywhere | Split | Scatter | AnyOne | RankZero


# -- collect: what becomes of the answers ----------------------------------------------------------------------------


class PerRank(_Kind):
    """A list with each rank's answer, in rank order."""

    __slots__ = ()


class Concat(_Kind):
    """One value, joined in the order of the input items; ranks that only repeat another's share are left out."""

    __slots__ = ()


class Same(_Kind):
    """The one value on which all ranks agree; a rank that differs is an error that names it."""

    __slots__ = ()


class First(_Kind):
    """The answer of the lowest rank."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Reduce:
    """One value from all ranks' answers: numbers, arrays, tensors, or dicts of these, which must be alike.

    Ranks that only repeat another's share are left out, as by ``Concat``; so is a rank that got no items and answers
    None. A rank of weight 0 counts for nothing, whatever it answers. Numbers are reduced exactly and rounded once;
    arrays in rank order, floats in double precision and rounded once to their own dtype, integers exactly or with an
    error. A mean of integers is a float.

    Attributes:
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``. NaN makes a maximum and a minimum NaN.
        by: What a rank counts in a mean. ``"ranks"``: each the same. ``"items"``: the number of items of its share.
        weights: Counts a rank in a mean by this entry of its answer, which must be a dict; that entry is summed.
    """

    op: Literal["sum", "mean", "max", "min"]
    by: Literal["ranks", "items"] = "ranks"
    weights: str | None = None

    def __post_init__(self) -> None:
        """Check the declaration when it is written, not when it is used."""
        if self.op not in ("sum", "mean", "max", "min"):
            msg = f"Reduce {self.op!r} is not known"
            raise ConfigError(msg, hint='use "sum", "mean", "max" or "min"')
        if self.by not in ("ranks", "items"):
            msg = f"Reduce by {self.by!r} is not known"
            raise ConfigError(msg, hint='use by="ranks" or by="items", or weights="<an entry of the answer>"')
        if self.op != "mean" and (self.by != "ranks" or self.weights is not None):
            msg = f"Reduce weighs a mean only, not {self.op!r}"
            raise ConfigError(msg, hint='leave by and weights out, or use Reduce("mean", ...)')
        if self.by != "ranks" and self.weights is not None:
            msg = f"Reduce cannot weigh by {self.by} and by {self.weights!r}"
            raise ConfigError(msg, hint="give one of them")


Collect = PerRank | Concat | Same | First | Reduce


@dataclass(frozen=True, slots=True)
class Whole(Generic[T]):
    """Wraps an argument of a split or scattered call that every rank shall get as it is."""

    value: T


# -- mesh ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """Named axes over the ranks of a group: row-major, so the last axis changes fastest.

    Attributes:
        axes: Size of each axis, in order.
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        """Refuse empty meshes and axes without a place."""
        if not self.axes:
            msg = "a mesh needs at least one axis"
            raise ConfigError(msg, hint='for example mesh={"dp": 4}')
        for name, size in self.axes.items():
            given: object = size
            if not name or isinstance(given, bool) or not isinstance(given, int) or given < 1:
                msg = f"mesh axis {name!r} has size {size!r}, which is not a count of ranks"
                raise ConfigError(msg, hint='for example mesh={"dp": 2, "tp": 2}')
        object.__setattr__(self, "axes", dict(self.axes))

    @classmethod
    def of(cls, axes: Mapping[str, int] | None, world_size: int) -> Mesh:
        """Return the mesh of a role: ``axes`` checked against its number of ranks, or one axis ``dp``.

        Raises:
            ConfigError: The sizes do not multiply to ``world_size``.
        """
        mesh = cls(axes or {"dp": world_size})
        if mesh.size != world_size:
            shape = " x ".join(f"{name}={size}" for name, size in mesh.axes.items())
            msg = f"mesh {shape} has {mesh.size} places, the role has {world_size} ranks"
            raise ConfigError(msg, hint="the sizes of the mesh axes must multiply to the number of replicas")
        return mesh

    @functools.cached_property
    def size(self) -> int:
        """Number of ranks."""
        total = 1
        for size in self.axes.values():
            total *= size
        return total

    def coords(self, rank: int) -> dict[str, int]:
        """Return the position of ``rank`` on each axis.

        Raises:
            IndexError: No such rank.
        """
        if not 0 <= rank < self.size:
            msg = f"rank {rank} is outside 0..{self.size - 1}"
            raise IndexError(msg)
        position: dict[str, int] = {}
        for name, size in reversed(list(self.axes.items())):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the rank at a position that names every axis.

        Raises:
            ConfigError: An axis is missing or unknown.
            IndexError: A coordinate is outside its axis.
        """
        self._check_axes(coords)
        number = 0
        for name, size in self.axes.items():
            if name not in coords:
                msg = f"coordinates {dict(coords)!r} do not name the axis {name!r}"
                raise ConfigError(msg)
            number = number * size + _inside(name, coords[name], size)
        return number

    def select(self, coords: Mapping[str, int | Sequence[int]]) -> list[int]:
        """Return the ranks at the given coordinates, ascending; axes not named are free.

        Raises:
            ConfigError: An axis is unknown.
            IndexError: A coordinate is outside its axis.
        """
        self._check_axes(coords)
        wanted = {
            name: {_inside(name, at, self.axes[name]) for at in ([value] if isinstance(value, int) else value)}
            for name, value in coords.items()
        }
        return [
            rank for rank in range(self.size) if all(self.coords(rank)[name] in ats for name, ats in wanted.items())
        ]

    def _check_axes(self, coords: Mapping[str, Any]) -> None:
        for name in coords:
            if name not in self.axes:
                msg = f"the mesh has no axis {name!r}"
                raise ConfigError(msg, hint=f"its axes are {', '.join(self.axes)}")


def _inside(name: str, at: int, size: int) -> int:
    if not 0 <= at < size:
        msg = f"axis {name} has positions 0..{size - 1}, not {at}"
        raise IndexError(msg)
    return at


# -- the specification of an endpoint --------------------------------------------------------------------------------

ParameterKind = Literal["pos", "any", "args", "key", "kwargs"]
_KINDS: Final[dict[Any, ParameterKind]] = {
    inspect.Parameter.POSITIONAL_ONLY: "pos",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "any",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.KEYWORD_ONLY: "key",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}
_KIND_OF: Final = {text: kind for kind, text in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an endpoint: its name, its kind, and whether a call must give it."""

    name: str
    kind: ParameterKind = "any"
    required: bool = True


@dataclass(frozen=True)
class EndpointSpec:
    """All that is declared of one endpoint, as plain data.

    Attributes:
        name: Method name.
        dispatch: Who gets what.
        collect: What becomes of the answers.
        effect: See ``Effect``.
        lane: The ordered stream it belongs to.
        concurrency: How many calls of its lane may run at once on one worker.
        deadline_s: Default deadline in seconds, or None for the group's.
        trace: Name of its span; None: the method's name.
        strict: A failure of this call makes the calls after it in its batch NOT_EXECUTED.
        start: See ``Start``.
        keep: Results stay with the ranks that made them.
        is_async: A coroutine function or async generator.
        streams: A generator, sync or async.
        parameters: Its parameters without ``self``.
        doc: First line of its docstring.
    """

    name: str
    dispatch: Dispatch = field(default_factory=Everywhere)
    collect: Collect = field(default_factory=PerRank)
    effect: Effect = "once"
    lane: str = MAIN
    concurrency: int | None = None
    deadline_s: float | None = None
    trace: str | None = None
    strict: bool = False
    start: Start = "each"
    keep: bool = False
    is_async: bool = False
    streams: bool = False
    parameters: tuple[Parameter, ...] | None = None
    doc: str = ""

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """The signature a call is checked against, or None where it is not known."""
        if self.parameters is None:
            return None
        return inspect.Signature(
            [
                inspect.Parameter(
                    p.name,
                    _KIND_OF[p.kind],
                    default=inspect.Parameter.empty if p.required or p.kind in ("args", "kwargs") else ...,
                )
                for p in self.parameters
            ]
        )

    @functools.cached_property
    def arity(self) -> tuple[int, int]:
        """Fewest and most arguments of a call that gives all by position; (1, 0) where it must be looked at closer."""
        if self.parameters is None or any(p.kind == "key" and p.required for p in self.parameters):
            return (1, 0)
        plain = [p for p in self.parameters if p.kind in ("pos", "any")]
        most = 1 << 30 if any(p.kind == "args" for p in self.parameters) else len(plain)
        return sum(p.required for p in plain), most

    def to_wire(self) -> dict[str, Any]:
        """Return the specification as JSON-like plain data; ``from_wire`` is its inverse."""
        return {
            "name": self.name,
            "dispatch": _declaration_to_wire(self.dispatch),
            "collect": _declaration_to_wire(self.collect),
            "effect": self.effect,
            "lane": self.lane,
            "concurrency": self.concurrency,
            "deadline_s": self.deadline_s,
            "trace": self.trace,
            "strict": self.strict,
            "start": self.start,
            "keep": self.keep,
            "is_async": self.is_async,
            "streams": self.streams,
            "parameters": None if self.parameters is None else [[p.name, p.kind, p.required] for p in self.parameters],
            "doc": self.doc,
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> EndpointSpec:
        """Rebuild a specification from plain data; fields it does not know are ignored.

        Raises:
            ConfigError: The data do not describe an endpoint.
        """
        try:
            parameters = data.get("parameters")
            return cls(
                name=str(data["name"]),
                dispatch=_declaration_from_wire(data["dispatch"], _DISPATCHES),
                collect=_declaration_from_wire(data["collect"], _COLLECTS),
                effect=data.get("effect", "once"),
                lane=data.get("lane", MAIN),
                concurrency=data.get("concurrency", 1),
                deadline_s=data.get("deadline_s"),
                trace=data.get("trace"),
                strict=bool(data.get("strict", False)),
                start="together" if data.get("start") == "together" else "each",
                keep=bool(data.get("keep", False)),
                is_async=bool(data.get("is_async", False)),
                streams=bool(data.get("streams", False)),
                parameters=None if parameters is None else tuple(Parameter(n, k, r) for n, k, r in parameters),
                doc=str(data.get("doc", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            msg = f"not the description of an endpoint: {error}"
            raise ConfigError(msg) from error


_DISPATCHES: Final[dict[str, Any]] = {c.__name__: c for c in (Everywhere, Split, Scatter, AnyOne, RankZero)}
_COLLECTS: Final[dict[str, Any]] = {c.__name__: c for c in (PerRank, Concat, Same, First, Reduce)}


def _declaration_to_wire(declaration: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": type(declaration).__name__}
    for name in getattr(type(declaration), "__dataclass_fields__", {}):
        value = getattr(declaration, name)
        data[name] = list(value) if isinstance(value, tuple) else value
    return data


def _declaration_from_wire(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    cls = kinds[data["kind"]]
    known = getattr(cls, "__dataclass_fields__", ())
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known})


def table_to_wire(table: Mapping[str, EndpointSpec]) -> dict[str, dict[str, Any]]:
    """Return an endpoint table as plain data."""
    return {name: spec.to_wire() for name, spec in table.items()}


def table_from_wire(data: Mapping[str, Mapping[str, Any]]) -> dict[str, EndpointSpec]:
    """Rebuild an endpoint table; inverse of ``table_to_wire``.

    Raises:
        ConfigError: An entry does not describe an endpoint.
    """
    return {name: EndpointSpec.from_wire(entry) for name, entry in data.items()}


# -- the decorator ---------------------------------------------------------------------------------------------------

if TYPE_CHECKING:

    class Endpoint(Generic[S_contra, P, R_co, C_co]):
        """How type checkers see an endpoint; at run time it is the plain function.

        On an engine it is called like the method it is (``P`` to ``R_co``); through a group it gives the collected
        value ``C_co``.
        """

        @overload
        def __get__(self, instance: None, owner: Any, /) -> Endpoint[S_contra, P, R_co, C_co]: ...
        @overload
        def __get__(self, instance: object, owner: Any, /) -> Callable[P, R_co]: ...
        def __get__(self, instance: Any, owner: Any, /) -> Any: ...
        def __call__(self, engine: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
            """Run the method on an engine at hand."""

    class _One:
        """Decorator of an endpoint whose call gives one value."""

        @overload
        def __call__(
            self, fn: Callable[Concatenate[S, P], AsyncIterator[T]], /
        ) -> Endpoint[S, P, AsyncIterator[T], list[T]]: ...
        @overload
        def __call__(
            self, fn: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], /
        ) -> Endpoint[S, P, Coroutine[Any, Any, T], T]: ...
        @overload
        def __call__(self, fn: Callable[Concatenate[S, P], R], /) -> Endpoint[S, P, R, R]: ...
        def __call__(self, fn: Any, /) -> Any: ...

    class _Many:
        """Decorator of an endpoint whose call gives a list with a value per rank."""

        @overload
        def __call__(
            self, fn: Callable[Concatenate[S, P], AsyncIterator[T]], /
        ) -> Endpoint[S, P, AsyncIterator[T], list[list[T]]]: ...
        @overload
        def __call__(
            self, fn: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], /
        ) -> Endpoint[S, P, Coroutine[Any, Any, T], list[T]]: ...
        @overload
        def __call__(self, fn: Callable[Concatenate[S, P], R], /) -> Endpoint[S, P, R, list[R]]: ...
        def __call__(self, fn: Any, /) -> Any: ...

else:
    Endpoint = Callable


@overload
def endpoint(
    dispatch: AnyOne | RankZero,
    collect: None = None,
    *,
    effect: Effect = ...,
    lane: str | None = ...,
    concurrency: int | None = ...,
    deadline: float | str | None = ...,
    trace: str | None = ...,
    strict: bool = ...,
    start: Start = ...,
    keep: bool = ...,
) -> _One: ...
@overload
def endpoint(
    dispatch: Dispatch,
    collect: Concat | Same | First | Reduce,
    *,
    effect: Effect = ...,
    lane: str | None = ...,
    concurrency: int | None = ...,
    deadline: float | str | None = ...,
    trace: str | None = ...,
    strict: bool = ...,
    start: Start = ...,
    keep: bool = ...,
) -> _One: ...
@overload
def endpoint(
    *,
    collect: Concat | Same | First | Reduce,
    effect: Effect = ...,
    lane: str | None = ...,
    concurrency: int | None = ...,
    deadline: float | str | None = ...,
    trace: str | None = ...,
    strict: bool = ...,
    start: Start = ...,
    keep: bool = ...,
) -> _One: ...
@overload
def endpoint(
    dispatch: AnyOne | RankZero,
    collect: PerRank,
    *,
    effect: Effect = ...,
    lane: str | None = ...,
    concurrency: int | None = ...,
    deadline: float | str | None = ...,
    trace: str | None = ...,
    strict: bool = ...,
    start: Start = ...,
    keep: bool = ...,
) -> _Many: ...
@overload
def endpoint(
    dispatch: Everywhere | Split | Scatter = ...,
    collect: PerRank | None = None,
    *,
    effect: Effect = ...,
    lane: str | None = ...,
    concurrency: int | None = ...,
    deadline: float | str | None = ...,
    trace: str | None = ...,
    strict: bool = ...,
    start: Start = ...,
    keep: bool = ...,
) -> _Many: ...
@overload
def endpoint(dispatch: Callable[Concatenate[S, P], R], /) -> Endpoint[S, P, R, list[R]]: ...
def endpoint(
    dispatch: Any = None,
    collect: Any = None,
    *,
    effect: Effect = "once",
    lane: str | None = None,
    concurrency: int | None = None,
    deadline: float | str | None = None,
    trace: str | None = None,
    strict: bool = False,
    start: Start = "each",
    keep: bool = False,
) -> Any:
    """Declare a method of an engine as callable through the bus.

    The method itself is left as it is; the declaration is stored on it.

    Args:
        dispatch: Who gets what; default ``Everywhere()``.
        collect: What becomes of the answers; default ``First()`` for ``AnyOne`` and ``RankZero``, else ``PerRank()``.
        effect: ``"once"`` (default), ``"idempotent"`` or ``"pure"``; only the last two are ever run again.
        lane: The ordered stream; default ``"main"``, for an async method ``"async"``.
        concurrency: How many calls of the lane may run at once on a worker; default 1, on ``main`` always 1.
        deadline: Default deadline: seconds or text such as ``"2m"``; None: the group's.
        trace: Name of the span; default the method's name.
        strict: A failure makes the calls after it in its batch NOT_EXECUTED.
        start: ``"together"``: the call begins on no rank until all ranks hold it and are free, so that no collective
            is entered without a rank that is gone; a rank lost before makes it NOT_EXECUTED everywhere. Costs one
            more round trip and the wait for the slowest rank; see ``docs/decisions/0010-starting-together.md``.
        keep: Results stay with the ranks that made them, and callers get a ``Ref`` of each; a call may say otherwise
            (``.options(keep=False)``).

    Raises:
        ConfigError: The declaration contradicts itself; raised where the method is defined.
    """
    if inspect.isfunction(dispatch):
        return endpoint()(dispatch)
    if dispatch is None:
        dispatch = Everywhere()

    def declare(fn: Any) -> Any:
        spec = _make_spec(
            fn, dispatch, collect, effect=effect, lane=lane, concurrency=concurrency, trace=trace, strict=strict,
            start=start, keep=keep,
        )  # fmt: skip
        if deadline is not None:
            spec = replace(spec, deadline_s=deadline_seconds(deadline, f"deadline of endpoint `{spec.name}`"))
        fn.__zbus_endpoint__ = spec
        return fn

    return declare


def _make_spec(
    fn: Any,
    dispatch: Any,
    collect: Any,
    *,
    effect: Effect,
    lane: str | None,
    concurrency: int | None,
    trace: str | None,
    strict: bool,
    start: Start,
    keep: bool,
) -> EndpointSpec:
    if not inspect.isfunction(fn):
        msg = f"zbus.endpoint wraps a plain method, not {type(fn).__name__}"
        raise ConfigError(msg, hint="put @zbus.endpoint(...) directly above `def`, below other decorators")
    name = fn.__name__
    is_async = inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
    _check_kind(name, "dispatch", dispatch, _DISPATCHES)
    if collect is None:
        collect = First() if isinstance(dispatch, AnyOne | RankZero) else PerRank()
    _check_kind(name, "collect", collect, _COLLECTS)
    spec = EndpointSpec(
        name=name,
        dispatch=dispatch,
        collect=collect,
        effect=effect,
        lane=lane if lane is not None else "async" if is_async else MAIN,
        concurrency=concurrency,
        trace=trace,
        strict=strict,
        start=start,
        keep=keep,
        is_async=is_async,
        streams=inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn),
        parameters=_parameters(fn),
        doc=(inspect.getdoc(fn) or "").partition("\n")[0],
    )
    _check_spec(spec)
    return spec


def _check_kind(name: str, what: str, value: Any, kinds: Mapping[str, Any]) -> None:
    if type(value) not in kinds.values():
        got = value.__name__ if isinstance(value, type) else repr(value)
        hint = f"write {got}()" if got in kinds else f"one of {', '.join(f'{kind}()' for kind in kinds)}"
        msg = f"endpoint `{name}`: {what} {got} is not a declaration"
        raise ConfigError(msg, hint=hint)


def _check_spec(spec: EndpointSpec) -> None:
    where = f"endpoint `{spec.name}`"
    if spec.name.startswith("_") or spec.name in RESERVED_NAMES:
        msg = f"{where}: this name cannot be an endpoint's"
        raise ConfigError(msg, hint="choose another name; names with a leading _ and the group's own are taken")
    if spec.effect not in EFFECTS:
        msg = f"{where}: effect {spec.effect!r} is not known"
        raise ConfigError(msg, hint=f"one of {', '.join(EFFECTS)}")
    if spec.lane in RESERVED_LANES or not spec.lane or spec.lane.startswith("zbus"):
        msg = f"{where}: lane {spec.lane!r} belongs to the bus"
        raise ConfigError(msg, hint='use "main" or a name of your own')
    if spec.is_async and spec.lane == MAIN:
        msg = f"{where}: an async method cannot be on lane `main`, which runs on the worker's main thread"
        raise ConfigError(msg, hint='leave lane out, or name another, such as lane="gen"')
    if spec.concurrency is not None and spec.concurrency < 1:
        msg = f"{where}: concurrency {spec.concurrency} lets nothing run"
        raise ConfigError(msg)
    if spec.streams and not isinstance(spec.dispatch, AnyOne | RankZero):
        msg = f"{where}: a generator's items come from one rank, but {type(spec.dispatch).__name__} calls several"
        raise ConfigError(msg, hint="declare it with AnyOne() or RankZero(), or return a list")
    if spec.start not in STARTS:
        msg = f"{where}: start {spec.start!r} is not known"
        raise ConfigError(msg, hint=f"one of {', '.join(STARTS)}")
    if spec.start == "together" and isinstance(spec.dispatch, AnyOne | RankZero):
        msg = f"{where}: {type(spec.dispatch).__name__} calls one rank, which has nobody to start together with"
        raise ConfigError(msg, hint="leave start out")
    if isinstance(spec.collect, Reduce) and spec.collect.by == "items" and not isinstance(spec.dispatch, Split):
        msg = f"{where}: Reduce weighs by items, but {type(spec.dispatch).__name__} splits none"
        raise ConfigError(msg, hint='declare Split(...), or name an entry of the answer: Reduce("mean", weights=...)')
    if spec.keep and (spec.streams or isinstance(spec.collect, Same | Reduce)):
        needs = f"{type(spec.collect).__name__}() needs what the ranks answer"
        why = "a generator's items are sent as they come" if spec.streams else needs
        msg = f"{where}: {why}, so its results cannot stay with the ranks"
        raise ConfigError(msg, hint="leave keep out, or return a list" if spec.streams else "collect=PerRank()")
    _check_split_names(spec)
    if spec.lane == MAIN and (spec.concurrency or 1) > 1:
        msg = f"{where}: lane `main` runs one call at a time, concurrency {spec.concurrency} cannot be"
        raise ConfigError(msg, hint='give the endpoint a lane of its own, such as lane="gen"')


def _check_split_names(spec: EndpointSpec) -> None:
    if not isinstance(spec.dispatch, Split) or spec.dispatch.args is None or spec.parameters is None:
        return
    names = [parameter.name for parameter in spec.parameters]
    open_ended = any(parameter.kind in ("args", "kwargs") for parameter in spec.parameters)
    for name in spec.dispatch.args:
        if name not in names and not open_ended:
            msg = f"endpoint `{spec.name}`: Split names the argument {name!r}, which the method does not have"
            raise ConfigError(msg, hint=f"its arguments are {', '.join(names) or 'none'}")


def _parameters(fn: Any) -> tuple[Parameter, ...]:
    own = list(inspect.signature(fn).parameters.values())[1:]
    return tuple(Parameter(p.name, _KINDS[p.kind], p.default is inspect.Parameter.empty) for p in own)


# -- engines ---------------------------------------------------------------------------------------------------------


class Engine:
    """Base of every class a worker hosts. Construct it with plain arguments; heavy work belongs in ``setup``."""

    __zbus_endpoints__: ClassVar[Mapping[str, EndpointSpec]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the endpoint declarations of the class when it is defined."""
        super().__init_subclass__(**kwargs)
        cls.__zbus_endpoints__ = _collect_endpoints(cls)

    def setup(self, ctx: Any) -> None:
        """Make ready for calls; runs once on the worker's main thread before the first call."""

    def recover(self, ctx: Any) -> None:
        """Make ready after a restart of this rank; called after ``setup`` when the start counter is above 0."""

    def teardown(self) -> None:
        """Release what ``setup`` took; runs on the worker's main thread when it stops in order."""


def endpoints_of(cls: type) -> dict[str, EndpointSpec]:
    """Return the endpoints of an engine class by name, inherited ones included.

    Raises:
        ConfigError: Two endpoints of one lane declare different concurrency.
    """
    table = cls.__dict__.get("__zbus_endpoints__")
    return dict(table) if table is not None else _collect_endpoints(cls)


def _collect_endpoints(cls: type) -> dict[str, EndpointSpec]:
    found: dict[str, EndpointSpec] = {}
    for name in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        spec = getattr(inspect.getattr_static(cls, name), "__zbus_endpoint__", None)
        if isinstance(spec, EndpointSpec):
            found[name] = spec if spec.name == name else replace(spec, name=name)
    lanes = _lane_concurrency(cls, found.values())
    return {name: replace(spec, concurrency=lanes[spec.lane]) for name, spec in found.items()}


def _lane_concurrency(cls: type, specs: Any) -> dict[str, int]:
    declared: dict[str, EndpointSpec] = {}
    lanes: dict[str, int] = {}
    for spec in specs:
        lanes.setdefault(spec.lane, 1)
        if spec.concurrency is None:
            continue
        other = declared.setdefault(spec.lane, spec)
        if other.concurrency != spec.concurrency:
            msg = (
                f"engine {cls.__qualname__}: lane `{spec.lane}` has concurrency {other.concurrency} in "
                f"`{other.name}` and {spec.concurrency} in `{spec.name}`"
            )
            raise ConfigError(msg, hint="declare it at one of them, or use two lanes")
        lanes[spec.lane] = spec.concurrency
    return lanes


def lanes_of(table: Mapping[str, EndpointSpec]) -> dict[str, int]:
    """Return the lanes of an endpoint table and how many calls each may run at once."""
    lanes = {MAIN: 1}
    for spec in table.values():
        lanes[spec.lane] = max(lanes.get(spec.lane, 1), spec.concurrency or 1)
    return lanes
