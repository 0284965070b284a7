"""Merging traces: ours beside AReaL's converter, VizTracer's combine and a bare msgspec loop, on one generated run.

    python benchmarks/trace_merge.py --events 1000000 --json        # every tool that is here
    python benchmarks/trace_merge.py --tools zbus,msgspec-stream --events 10000000 --mem-gb 10 --rounds 3

Each tool runs in a fresh process, one after the other in each of ``--rounds``; times are the best of the rounds, and
``x_msgspec_*`` the median of the ratios to ``msgspec-stream`` in the same round. Peak memory is the sum of the
high-water marks of all processes of a tool, read while they run: an upper bound of what they held at once.
``msgspec-stream`` decodes, shifts and encodes line by line, unsorted, without lanes and arrows: what any tool in Python
pays at least.
AReaL is not a package here: AREAL_CHECKOUT names a checkout or its unpacked wheel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zbus.runtime.processes import children_of
from zbus.testing.memory import high_water_mb

ROLES = ("controller", "actor", "rollout")
TOOLS = ("msgspec-stream", "zbus", "zbus-1", "zbus-gz", "zbus-perfetto", "viztracer", "areal")
PHASES = ((b"forward", 180), (b"all_reduce", 60), (b"backward", 260), (b"optimizer", 40))


class Rank:
    """Writes the events of one process, as recorders do: when they end."""

    def __init__(self, out: Path, role: str, number: int, rank: int, offset_us: float, drift: float) -> None:
        path = out / role / f"traces_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("wb", 1 << 20)
        self.pid = 1000 + number * 100 + rank
        self.tail = b',"args":{"rank":%d,"role":"%b"' % (rank, role.encode())
        self.offset, self.drift, self.count = offset_us, drift, 0
        for name in (b"process_name", b"thread_name"):
            who = b"%b %d" % (role.encode(), rank)
            self.file.write(
                b'{"name":"%b","ph":"M","pid":%d,"tid":%d%b,"name":"%b"}}\n'
                % (name, self.pid, self.pid, self.tail, who)
            )

    def clock(self, us: float) -> float:
        """Return what this process's clock shows."""
        return us * (1 + self.drift) + self.offset

    def span(self, name: bytes, begin: float, end: float, tid: int, more: bytes = b"") -> None:
        """Write a span."""
        where = (self.clock(begin), end - begin, self.pid, self.pid + tid, self.tail, more)
        self.file.write(
            b'{"name":"%b","cat":"compute","ph":"X","ts":%.3f,"dur":%.3f,"pid":%d,"tid":%d%b%b}}\n' % (name, *where)
        )
        self.count += 1

    def other(self, phase: bytes, name: bytes, at: float, more: bytes) -> None:
        """Write an arrow's end, a counter or a mark."""
        where = (self.clock(at), self.pid, self.pid + 1, self.tail)
        self.file.write(
            b'{"name":"%b","cat":"flow","ph":"%b","ts":%.3f,"pid":%d,"tid":%d%b%b\n' % (name, phase, *where, more)
        )
        self.count += 1


def generate(
    out: Path, events: int, *, skew_ms: float, drift_ppm: float, asymmetry: float, seed: int = 1
) -> dict[str, Any]:
    """Write 24 files of steps with overlapping calls; the true clock offsets are in the result."""
    rng = random.Random(seed)
    ranks, offsets = {}, {}
    for number, role in enumerate(ROLES):
        for rank in range(8):
            first = (number, rank) == (0, 0)
            offset = 0.0 if first else rng.uniform(-skew_ms, skew_ms) * 1000
            drift = 0.0 if first else rng.uniform(-drift_ppm, drift_ppm) * 1e-6
            offsets[f"{role}/{rank}"] = (offset, drift)
            ranks[role, rank] = Rank(out, role, number, rank, offset, drift)
    at, step, call = 1e6, 0, 0
    while sum(r.count for r in ranks.values()) < events:
        end = at
        for rank in range(8):
            caller = ranks["controller", rank]
            for role in ROLES[1:]:
                worker = ranks[role, rank]
                slow = 1.6 if (role, rank) == (ROLES[-1], 7) else 1.0
                for k in range(8):
                    call += 1
                    ident = b'"call":"%x","method":"train"' % call
                    sent = at + rng.uniform(5, 60) + k * 900
                    begin = now = sent + rng.uniform(40, 90) * (1 + asymmetry)
                    caller.other(b"s", b"rpc", sent + 1, b'},"id":"%x"}' % call)
                    worker.other(b"f", b"rpc", begin + 1, b'},"id":"%x","bp":"e"}' % call)
                    for name, mean in PHASES:
                        took = rng.gauss(mean, mean * 0.1) * slow
                        worker.span(name, now + 2, now + 2 + took, 1, b',"global_step":%d,"micro":%d' % (step, k))
                        now += took + 3
                    worker.span(b"rpc.server", begin, now + 2, 1, b"," + ident)
                    done = now + 2 + rng.uniform(40, 90)
                    caller.span(b"rpc.client", sent, done, 1, b"," + ident)
                    caller.other(b"C", b"inflight", sent, b',"value":%d}}' % (k + 1))
                    end = max(end, done)
                worker.span(b"train_step", at + 3, end, 0, b',"global_step":%d' % step)
            caller.span(b"controller.step", at, end + 5, 0, b',"global_step":%d' % step)
        at, step = end + 500, step + 1
    for one in ranks.values():
        one.file.close()
    size = sum(p.stat().st_size for p in out.rglob("traces_*.jsonl"))
    return {"events": sum(r.count for r in ranks.values()), "bytes": size, "calls": call, "offsets": offsets}


def files(source: Path) -> list[Path]:
    """Return the trace files."""
    return sorted(source.rglob("traces_*.jsonl"))


def msgspec_stream(source: Path, output: Path) -> None:
    """Decode, shift, renumber and encode each line: no order, no lanes, no arrows, no repair."""
    import msgspec

    number, text = (float | None, None), (str | None, None)
    fields: list[Any] = [("name", str, ""), ("cat", str, ""), ("ph", str, ""), ("ts", *number), ("dur", *number)]
    fields += [("pid", int, 0), ("tid", int, 0), ("id", *text), ("s", *text), ("bp", *text)]
    fields.append(("args", msgspec.Raw, msgspec.Raw(b"{}")))
    decode = msgspec.json.Decoder(msgspec.defstruct("E", fields, omit_defaults=True, gc=False)).decode
    encode = msgspec.json.Encoder().encode
    with output.open("wb", 1 << 20) as out:
        out.write(b'{"traceEvents":[\n')
        first = True
        for pid, path in enumerate(files(source), 1):
            with path.open("rb", 1 << 20) as file:
                while lines := file.readlines(1 << 20):
                    done = []
                    for line in lines:
                        event = decode(line)
                        event.pid = pid
                        if event.ts is not None:
                            event.ts -= 7.0
                        done.append(encode(event))
                    out.write((b"" if first else b",\n") + b",\n".join(done))
                    first = False
        out.write(b"\n]}")


def zbus(source: Path, output: Path, jobs: int | None = None) -> dict[str, Any]:
    """Run our merge: clocks, rows, arrows, order, report; return how well the clocks were matched."""
    import gc

    from traceview.merge import merge

    gc.disable()
    report = merge([str(source)], output, jobs=jobs)
    bounds = [p.clock_bound_us for p in report.processes if p.clock_bound_us is not None]
    return {"clock_bound_us": max(bounds, default=None), "backwards": report.problems.get("causality_violations", 0)}


def viztracer(source: Path, output: Path) -> None:
    """Run VizTracer's combine on the same events as Chrome documents."""
    from viztracer.report_builder import ReportBuilder

    documents = []
    for path in files(source):
        document = output.with_name(f"{path.parent.name}-{path.stem}.json")
        lines = path.read_bytes().strip().replace(b"\n", b",\n")
        document.write_bytes(b'{"viztracer_metadata":{"version":"1.1.1"},"traceEvents":[' + lines + b"]}")
        documents.append(str(document))
    ReportBuilder(documents, verbose=0).save(str(output))


def areal(source: Path, output: Path) -> None:
    """Run AReaL's converter."""
    path = Path(os.environ["AREAL_CHECKOUT"]) / "areal/tools/perf_trace_converter.py"
    spec = importlib.util.spec_from_file_location("areal_converter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.convert_jsonl_to_chrome_trace(source, output)


def one(tool: str, source: Path, output: Path) -> None:
    """Run one tool in this process and print what it took."""
    for path in files(source):  # all start with a warm page cache
        count_lines(path)
    clocks: dict[str, Any] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    if tool == "msgspec-stream":
        msgspec_stream(source, output)
    elif tool.startswith("zbus"):
        suffix = {"zbus-gz": ".json.gz", "zbus-perfetto": ".pftrace"}.get(tool, ".json")
        output = output.with_name(f"out{suffix}")
        clocks = zbus(source, output, 1 if tool == "zbus-1" else None)
    else:
        {"viztracer": viztracer, "areal": areal}[tool](source, output)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = {"wall_s": round(wall, 3), "cpu_s": round(cpu + children.ru_utime + children.ru_stime, 3)}
    print(json.dumps({**facts, **clocks, "out_mb": round(output.stat().st_size / 1e6, 1)}))


def missing(tool: str) -> str:
    """Return why a tool cannot run here, or nothing."""
    if tool == "areal" and not os.environ.get("AREAL_CHECKOUT"):
        return "AREAL_CHECKOUT names no checkout"
    if tool == "viztracer" and importlib.util.find_spec("viztracer") is None:
        return "not installed"
    return ""


def main() -> None:
    """Generate a run and let every tool merge it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--mem-gb", type=float, default=0.0, help="limit of the address space of each process")
    parser.add_argument("--skew-ms", type=float, default=50.0)
    parser.add_argument("--drift-ppm", type=float, default=0.0)
    parser.add_argument("--asymmetry", type=float, default=0.0, help="request slower than reply by this part")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", type=Path, help="directory of the run: made there if it is not, and kept")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("TOOL", "SOURCE", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if options.mem_gb:
            size = int(options.mem_gb * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        one(options.one[0], Path(options.one[1]), Path(options.one[2]))
        return
    with tempfile.TemporaryDirectory(
        prefix="trace-merge-", dir=options.run and options.run.absolute().parent
    ) as directory:
        source = options.run or Path(directory) / "run"
        clocks = {"skew_ms": options.skew_ms, "drift_ppm": options.drift_ppm, "asymmetry": options.asymmetry}
        if not source.is_dir():
            generate(source, options.events, **clocks)
        events = sum(count_lines(path) for path in files(source)) - 2 * len(files(source))
        size = sum(path.stat().st_size for path in files(source))
        if not options.json:
            print(f"{events} events, {size / 1e6:.0f} MB, {len(files(source))} files", flush=True)
        for row in compare(
            options.tools.split(","), source, Path(directory) / "out.json", options.mem_gb, options.rounds
        ):
            row["events"] = events
            for key in ("wall_s", "cpu_s"):
                if key in row:
                    row["events_per_s" if key == "wall_s" else "events_per_cpu_s"] = round(events / row[key])
            print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items() if k != "bench"))


def count_lines(path: Path) -> int:
    """Return how many lines a file has."""
    with path.open("rb") as file:
        return sum(data.count(b"\n") for data in iter(lambda: file.read(1 << 20), b""))


def compare(tools: list[str], source: Path, output: Path, mem_gb: float, rounds: int) -> list[dict[str, Any]]:
    """Run all tools in turn, several times; return for each the best of its rounds, and its ratios."""
    found: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools if not missing(tool)}
    for _ in range(rounds):
        for tool, runs in found.items():
            if not runs or "error" not in runs[-1]:  # what failed once would fail again
                runs.append(run(tool, source, output, mem_gb))
    rows = []
    for tool in tools:
        row: dict[str, Any] = {"bench": "trace_merge", "tool": tool}
        runs = found.get(tool, [])
        good = [one for one in runs if "error" not in one]
        if not runs:
            row["skipped"] = missing(tool)
        elif not good:
            row |= runs[0]
        else:
            row |= {key: min(one[key] for one in good) for key in ("wall_s", "cpu_s")}
            row |= {key: max(one[key] for one in good) for key in ("peak_mb", "processes", "out_mb")}
            row |= {key: good[-1][key] for key in ("clock_bound_us", "backwards") if key in good[-1]}
            floor = [one for one in found.get("msgspec-stream", []) if "error" not in one]
            pairs = list(zip(floor, good, strict=False))
            for key in ("wall_s", "cpu_s"):
                if pairs:
                    row[f"x_msgspec_{key[:-2]}"] = round(statistics.median(a[key] / b[key] for a, b in pairs), 3)
        rows.append(row)
    return rows


def run(tool: str, source: Path, output: Path, mem_gb: float) -> dict[str, Any]:
    """Run one tool in a fresh process, and look at the memory of all its processes."""
    command = [sys.executable, __file__, "--mem-gb", str(mem_gb), "--one", tool, str(source), str(output)]
    peaks: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            for pid in (process.pid, *children_of(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), high_water_mb(pid))
            time.sleep(0.02)
        assert process.stdout is not None
        assert process.stderr is not None
        out, errors = process.stdout.read(), process.stderr.read()
    if process.returncode:
        last = (errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1][:200]
        return {"error": last, "peak_mb": sum(peaks.values())}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {**found, "peak_mb": sum(peaks.values()), "processes": len(peaks)}


if __name__ == "__main__":
    main()
