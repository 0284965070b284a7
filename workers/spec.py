"""What an agent hands to a rank: one frozen struct, JSON in the environment or over the template's socket."""

from __future__ import annotations

from typing import Final

import msgspec

from zbus.registry.records import JobRecord

__all__ = ["SPEC_VARIABLE", "RankSpec"]

SPEC_VARIABLE: Final = "ZBUS_RANK_SPEC"
"""Environment variable that carries the spec of a rank started by exec; removed before user code runs."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one start of one rank needs to know.

    Attributes:
        experiment, trial: Names of the run.
        trial_dir: Absolute path of the trial directory.
        runtime_dir: Short private directory for ipc sockets, empty where the transport is tcp.
        role, rank, world_size: Who this is.
        local_rank, local_world_size: Place among the ranks of this agent.
        group_rank: Index of the agent among the agents of the role (torchelastic's GROUP_RANK).
        start: How many times the rank was started before.
        incarnation: Identity of this start.
        agent_id, agent_pid: The agent, which is this process's parent.
        job: What to run.
        log: Absolute path of the log that stdout and stderr already are.
        listen_fds: Descriptors of bound, listening TCP sockets, in the order of ``ports``.
        ports: Their port numbers (``ctx.ports``).
        torch_store_fd: Rank 0's listening socket for the torch store, None on other ranks.
        master_addr, master_port: Where the torch store of this generation of the group listens; port 0 if unknown.
        transport: ``ipc`` or ``tcp``.
        bind_host: Address that tcp sockets bind.
        lease_fd: Descriptor of the agent's ``LeaseWord``, None where there is none.
        published_fd: Descriptor of an eventfd of the agent, to be written once this rank's record is there; or None.
        lease_ttl_s: Silence after which others call the agent dead.
        controller_epoch: Epoch of the controller at this start.
        env: Variables of this rank alone (devices), beside ``job.env``.
    """

    experiment: str
    trial: str
    trial_dir: str
    runtime_dir: str
    role: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int = 0
    start: int
    incarnation: int
    agent_id: str
    agent_pid: int
    job: JobRecord
    log: str
    listen_fds: list[int] = []
    ports: list[int] = []
    torch_store_fd: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    transport: str = "ipc"
    bind_host: str = "127.0.0.1"
    controller_epoch: int = 0
    lease_fd: int | None = None
    published_fd: int | None = None
    lease_ttl_s: float = 5.0
    env: dict[str, str] = {}

    def to_json(self) -> str:
        """Return the spec as one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> RankSpec:
        """Read a spec.

        Raises:
            msgspec.DecodeError: The text is not a spec.
        """
        return msgspec.json.decode(text, type=cls)
