"""Reinforcement learning as a job: asynchronous beside synchronous, and what the bus costs of its CPU time.

    python benchmarks/rl.py --json              # 5 rounds of 40 steps each way
    python benchmarks/rl.py --rounds 1 --steps 120

The job is ``examples/g2p/grpo.yaml`` with one rank that trains and one that generates. ``grpo_steps``: seconds of its
GRPO steps, with answers at most 0 (``sync``) or 2 (``async``) versions old; ``ratio`` is to ``sync`` of the same round.
``bus_cpu``: percent of the CPU time of all processes of the job that is the bus's, over these steps (not the start, the
examinations before and after them, or dumps, of which there are none), by this count:

- not the bus's: the threads of ranks that compute tokens and gradients, and of the main thread that trains the steps;
  the processes that call rewards; the workflow's own steps on its event loop (see ``rl_job/engines_kept.py``);
- the bus's: all else. The controller's process as a whole, with the example's driver and the trainer in it; agents and
  templates; of the rank that trains the publishing of weights and checkpoints; of the one that generates taking them
  over, and what the event loop does for requests, rewards, sessions and answers.

``bus_ms``: the same in milliseconds per step, and of which part of the job.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rounds import Figures, parser, printer, wanted

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "g2p"
MODES = {"sync": 0, "async": 2}
PARTS = ("bus", "controller", "actor", "rollout", "agents")
# -- measuring -------------------------------------------------------------------------------------------------------


def config(steps: int, staleness: int) -> dict[str, Any]:
    """Return the job's config: the example's, one rank each, with engines that keep books."""
    import yaml

    told: dict[str, Any] = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    told["experiment"] = "bench-rl"
    told["target"] = f"{HERE / 'rl_job' / 'job.py'}:drive"
    for role, engine in (("actor", "Train"), ("rollout", "Rollout")):
        told["roles"][role] |= {"engine": f"{HERE / 'rl_job' / 'engines_kept.py'}:{engine}", "sys_path": [str(EXAMPLE)]}
        told["roles"][role]["kwargs"]["model"] = f"{EXAMPLE / 'model.py'}:G2P"
    told["roles"]["actor"]["mesh"] = {"dp": 1}
    told["roles"]["rollout"]["replicas"] = 1
    kwargs = told["roles"]["rollout"]["kwargs"]
    del kwargs["workflows"]  # the engine brings one that keeps books
    kwargs["rewards"] = {"score": f"{EXAMPLE / 'rewards.py'}:score"}
    told["params"] |= {"steps": steps, "max_staleness": staleness, "heldout_words": 50}
    return told


def job(directory: Path, mode: str, steps: int) -> dict[str, float]:
    """Run the job once and return its metrics."""
    import yaml

    file = directory / f"{mode}.yaml"
    file.write_text(yaml.safe_dump(config(steps, MODES[mode])))
    command = [Path(sys.executable).with_name("zbus-controller"), "run", "--json", "--no-merge", str(file)]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, check=False
    )
    if done.returncode:
        sys.exit(f"rl.py: the job failed with {done.returncode}:\n{done.stderr}")
    metrics: dict[str, float] = json.loads(done.stdout)["metrics"]
    return metrics


def main() -> None:
    """Measure."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=40, help="GRPO steps of a job [40]")
    told = options.parse_args()
    chosen = wanted(told.only)
    figures = Figures(told.rounds, printer(as_json=told.json))
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(told.rounds):
            found = {mode: job(Path(directory), mode, told.steps) for mode in MODES}
            for mode, metrics in found.items():
                if chosen("grpo_steps"):
                    figures.add("grpo_steps", mode, "s", metrics["grpo_s"], found["sync"]["grpo_s"])
                if chosen("bus_cpu"):
                    figures.add("bus_cpu", mode, "%", 100 * metrics["cpu_bus"] / metrics["cpu_all"])
                if chosen("bus_ms"):
                    for part in PARTS:
                        name = mode if part == "bus" else f"{mode}_{part}"
                        figures.add("bus_ms", name, "ms", 1000 * metrics[f"cpu_{part}"] / told.steps)
    figures.finish()


if __name__ == "__main__":
    main()
