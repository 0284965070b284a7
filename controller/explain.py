"""What each error code means, offline: the text behind ``zbus-controller explain CODE``.

``docs/reference/errors.md`` is made from it (``python -m controller.explain``); a test keeps the two equal and proves
that every code raised anywhere stands here.
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

__all__ = ["TEXTS", "Explanation", "page", "text_of"]


class Explanation(NamedTuple):
    """One error code for a reader in trouble.

    Attributes:
        title: What happened, in a few words.
        exit_code: What a command ends with.
        meaning: What is known when this is raised.
        causes: Usual causes, most likely first.
        remedy: What to do, in order.
    """

    title: str
    exit_code: int
    meaning: str
    causes: tuple[str, ...]
    remedy: tuple[str, ...]


TEXTS: Final[dict[str, Explanation]] = {
    "ZB0000": Explanation(
        "an error without a code of its own",
        1,
        "Something zbus knows failed, but it has no code. The sentence says what.",
        ("A rare internal refusal.",),
        ("Run again with -v to see every frame, and report it with that text.",),
    ),
    "ZB0101": Explanation(
        "a config key, value, option or name is wrong",
        2,
        "Nothing was started. The line `from` says where the value stands: a file and line, an environment variable, "
        "or the number of the argument.",
        (
            "A key is misspelt; the nearest existing key is offered.",
            "A value has the wrong type or unit (durations: 30, 250ms, 5m; sizes: 4096, 64MiB).",
            "The product of a role's mesh axes is not its number of replicas.",
            "The root cannot be written.",
        ),
        (
            "Change the place that `from` names: overrides and options win over the environment, that over files.",
            "The config as it was understood stands in the trial's config.yaml, with the origin of each value.",
        ),
    ),
    "ZB0201": Explanation(
        "workers did not become ready in time",
        3,
        "The start deadline (scheduler.startup_timeout) passed, or a start step failed. Each missing rank is named "
        "with the phase it was in. Everything that had been started was stopped.",
        (
            "The engine's setup takes longer than the deadline (large imports, a slow file system).",
            "With scheduler.type=external: an agent was not started, or with another --trial-dir.",
            "A rank died while it started; then its exit status and log are shown.",
        ),
        (
            "Read the log of the named rank in the trial's logs directory.",
            "Give it more time: zbus-controller run TARGET scheduler.startup_timeout=5m",
        ),
    ),
    "ZB0202": Explanation(
        "an engine class cannot be loaded",
        2,
        "Workers import an engine by its path, module:Class. That failed, or the class is not a zbus.Engine.",
        (
            "The module is not importable where the worker runs: wrong directory, missing package.",
            "The class name is misspelt, or importing the module raises.",
            "A module of yours bears the name of another package.",
        ),
        (
            "Try it by hand: python -c 'import MODULE'",
            "Name directories with roles.ROLE.sys_path, or use file.py:Class relative to the config file.",
        ),
    ),
    "ZB0203": Explanation(
        "two workers claim one rank",
        2,
        "Each start of a rank is claimed once in the registry. A second claimant is refused; both are named.",
        (
            "The agent of a role was started twice.",
            "Two nodes were given the same ranks by hand.",
        ),
        ("Stop one of the two agents, or correct --rank and --nproc.",),
    ),
    "ZB0301": Explanation(
        "a worker died, or fell silent, while it held a call",
        4,
        "The worker's exit was observed, or its lease ran out. The block shows how it ended, its last log lines and "
        "whether the call had begun. Nothing was run a second time.",
        (
            "Killed by SIGKILL: most often memory. If the cgroup counted an out-of-memory kill, the block says so.",
            "SIGSEGV, SIGBUS or SIGABRT: native code crashed; the log ends with the Python stack it was called from.",
            "An exit code: the engine, or a library, ended the process itself.",
            "A lease ran out: the host is gone, or cut off.",
        ),
        (
            "Read the crash file named under `saved` and the log of that start.",
            "For memory: raise roles.ROLE.mem or make the batch smaller.",
            "To go on after a loss, set roles.ROLE.restart=one and save checkpoints; resume with --resume.",
        ),
    ),
    "ZB0302": Explanation(
        "a reward function has no result",
        4,
        "Rewards run in processes of their own. One took longer than it may, or ended its process, or no process could "
        "be started. The error names the reward and what it was called with; other calls go on in another process.",
        (
            "A loop without end, or a wait for something that does not come.",
            "Native code that crashes, or a call of os._exit.",
            "Too little memory: the process was killed by SIGKILL.",
        ),
        (
            "Call the function by hand with the item that the error names.",
            "Give it more time: reward_timeout_s in the kwargs of the role, or timeout_s in the call.",
        ),
    ),
    "ZB0401": Explanation(
        "the engine raised an exception",
        1,
        "The method ran and raised. The exception has the class it was raised with where that is a Python builtin, and "
        "carries the worker's traceback. The bus never retries it.",
        ("A fault in the engine, or in its input.",),
        (
            "Read the frames under `in`; all of them with -v.",
            "Debug in one process: zbus-controller run TARGET scheduler.type=inline",
        ),
    ),
    "ZB0402": Explanation(
        "a call did not end by its deadline",
        3,
        "The late ranks are named with what is known of each: not arrived, waiting, or running since when. The outcome "
        "says whether the method may have run.",
        (
            "The method is slow or stuck, for instance in a collective that another rank did not join.",
            "An earlier call of the same lane is still running.",
        ),
        (
            "See what the workers do: zbus-controller status",
            "Give the call more time with its deadline, or all calls with rpc.timeout=1h.",
        ),
    ),
    "ZB0403": Explanation(
        "a call did not run, and that is proved",
        4,
        "The method did not start on this rank, so it is safe to call it again.",
        (
            "The worker ended before it took the call.",
            "An earlier call of a strict batch failed.",
        ),
        ("Repair the root cause that is shown first, then call again.",),
    ),
    "ZB0404": Explanation(
        "it is not known whether a call ran",
        4,
        "The request was sent, and no answer can come any more. It may have run, in part or in full. The evidence is "
        "stated. Only methods declared idempotent or pure are run again.",
        (
            "The worker died or was cut off during the call.",
            "Its answer was evicted before it was fetched.",
        ),
        ("Check the effect of the call (files, weights), or resume from the last checkpoint.",),
    ),
    "ZB0405": Explanation(
        "a value cannot be carried exactly",
        1,
        "zbus sends values only if they arrive exactly as they left; pickle is never used. The path says which part.",
        (
            "An object of a class that is not registered.",
            "A view of memory that cannot be sent as it is, or nesting or size beyond the limits.",
        ),
        ("Send arrays, numbers, text, lists, dicts, or register the dataclass with zbus.register.",),
    ),
    "ZB0406": Explanation(
        "a call was cancelled before it started",
        1,
        "Somebody cancelled the call, or the run was interrupted. It did not start.",
        ("future.cancel(), Ctrl-C, or a failed peer of a strict batch.",),
        ("Nothing to repair.",),
    ),
    "ZB0407": Explanation(
        "not every member of the group was ready, so nothing was sent",
        4,
        "A batch goes to all members or to none. The members that were not ready are named.",
        (
            "A worker has died or restarts at this moment.",
            "A worker's host cannot be reached.",
        ),
        ("See the state of the ranks: zbus-controller status",),
    ),
    "ZB0408": Explanation(
        "the value behind a Ref is gone",
        4,
        "A Ref names a value that stays with the process that made it. That process has ended, has been started anew, "
        "or has let the value go. A method that was to get it as an argument did not start.",
        (
            "The rank that kept it died or was restarted; the error names it and says how it ended.",
            "Its scope has ended (with bus.scope()), or it was released (ref.release()).",
            "The controller was silent for longer than data.ref_lease.",
        ),
        (
            "Make it again: call the endpoint that the error names.",
            "Keep a copy of what must outlive its rank: value = ref.get()",
        ),
    ),
    "ZB0409": Explanation(
        "a process keeps as many bytes for Refs as it may",
        1,
        "Results that stay with a rank (keep=True) and values of ctx.put or bus.put take memory there until they are "
        "let go. The error names who holds how much, by endpoint. Where the limit was reached before, the method did "
        "not start; where its result was too large, it has run and its result is dropped.",
        (
            "Refs of earlier steps are still held: in a list, or by a future that nobody dropped.",
            "One result is larger than the limit.",
        ),
        (
            "Put a step into a scope: with bus.scope(): ...",
            "See who holds how much: zbus-controller status --json",
            "Give it more: data.refs=64GiB",
        ),
    ),
    "ZB0410": Explanation(
        "a rollout made nothing to use",
        1,
        "The error names the rollout, how it ended (failed, lost, rejected, stale or cancelled) and the rank; its own "
        "error stands below as the cause. What other rollouts made is kept for the next call.",
        (
            "The workflow, the engine or the filter raised: the cause shows where.",
            "Ranks died under it as often as RolloutController(attempts=...) allows, or none is left.",
        ),
        (
            "Repair what the cause names.",
            "Look at the ranks: zbus-controller status",
            "Let batches pass over some: RolloutController(tolerate=4)",
        ),
    ),
    "ZB0411": Explanation(
        "new weights did not get to the ranks that generate",
        4,
        "An update of weights failed in the phase that the error names, for all ranks. Ranks whose weights are known "
        "go on with them; a rank that may hold a mixture is stale and generates nothing until it is refreshed.",
        (
            "The training ranks could not gather or write the weights.",
            "Both roles build different models; the first tensor that does not fit is named.",
            "A phase took longer than its limit (Limits of WeightSync); who is missing is named.",
        ),
        (
            "Repair what the error names, then update again: it also reaches ranks that missed earlier updates.",
            "See which ranks there are: zbus-controller status",
        ),
    ),
    "ZB0501": Explanation(
        "the registry cannot be read or written",
        5,
        "Workers and controller find one another through files under the trial's registry directory.",
        (
            "The disk is full or read-only; the file is named.",
            "The root is not on a file system that all hosts share.",
        ),
        ("Free space or choose another --root; old records are intact.",),
    ),
    "ZB0502": Explanation(
        "a socket cannot be made, bound or connected",
        5,
        "The address and the reason stand in the message.",
        (
            "The path of an ipc socket would be too long: TMPDIR or XDG_RUNTIME_DIR is deep.",
            "The limit on open files is too low for the number of workers; the number needed is stated.",
            "The address is not one of this host's.",
        ),
        ("Set XDG_RUNTIME_DIR to a short private directory, or raise the limit with ulimit -n.",),
    ),
    "ZB0601": Explanation(
        "two processes speak different protocol versions",
        6,
        "The versions of both sides are named; they refused one another before any call.",
        ("Two versions of zbus-runtime are installed, for instance in two environments.",),
        ("Install the same version on both sides: zbus-controller --version; zbus-worker --version",),
    ),
    "ZB0602": Explanation(
        "a newer controller or worker holds this place",
        11,
        "Workers obey only the newest controller of a trial, and a replaced worker is refused. This process stops.",
        (
            "Another controller took over the trial.",
            "This worker was replaced while it was stopped or cut off.",
        ),
        ("Nothing to repair in the newer one. See it with: zbus-controller status",),
    ),
    "ZB0801": Explanation(
        "the trial is not found, ambiguous, or in use",
        8,
        "A trial is one directory, <root>/<experiment>/<trial>, and one run at a time uses it.",
        (
            "The trial is finished: its name is taken.",
            "A live controller uses it; its process is named.",
            "The root is another one than when it was started.",
        ),
        (
            "Go on in it with --resume, replace it with --overwrite, or let zbus choose a name.",
            "Name it fully, EXPERIMENT/TRIAL or its directory, and its root with --root.",
        ),
    ),
    "ZB0802": Explanation(
        "the dump to go on from is missing, broken, or of another run; or one cannot be written",
        8,
        "A run with --resume goes on from the newest dump in the trial's checkpoints/recover. That one is judged by "
        "its manifest before anything is loaded, and is never passed over in silence. Nothing on disk was changed.",
        (
            "Files of the dump were removed, changed or truncated: `wrong` names the first.",
            "The driver or the config has other roles, parts or generators than the run that wrote the dump.",
            "The disk is full, so a new dump could not be written; the earlier ones are as they were.",
        ),
        (
            "Put the files back where there is a copy.",
            "Go on from the newest whole dump: zbus-controller run TARGET --trial T --resume recover.fallback=true",
            "Begin anew: zbus-controller run TARGET --trial T --overwrite",
        ),
    ),
}
"""Explanation of each code."""


def text_of(code: str) -> str:
    """Return the explanation of ``code`` as plain text.

    Raises:
        KeyError: There is no such code.
    """
    entry = TEXTS[code]
    lines = [f"{code}: {entry.title} (exit code {entry.exit_code})", "", entry.meaning, "", "Usual causes:"]
    lines += [f"  - {cause}" for cause in entry.causes]
    lines += ["", "What to do:"]
    lines += [f"  - {step}" for step in entry.remedy]
    return "\n".join(lines)


def page() -> str:
    """Return ``docs/reference/errors.md``."""
    lines = [
        "# Error codes",
        "",
        "Made from `controller/explain.py`; `zbus-controller explain CODE` prints the same text offline.",
        "",
    ]
    for code, entry in TEXTS.items():
        lines += [f"## {code}", "", f"**{entry.title[0].upper()}{entry.title[1:]}.** Exit code {entry.exit_code}.", ""]
        lines += [entry.meaning, "", "Usual causes:", ""]
        lines += [f"- {cause}" for cause in entry.causes]
        lines += ["", "What to do:", ""]
        lines += [f"- {step}" for step in entry.remedy]
        lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
