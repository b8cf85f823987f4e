"""A real Ray cluster on this machine, which contacts nobody, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "worker_niceness": 0,
}
"""a node that died is noticed within seconds, and runs are not second to everything else"""
BYTES = 80 << 20
"""of the object store of a node, which runs do not use"""


class Nodes:
    """A cluster of a head without cores, and nodes that come and go by name."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(shutdown_at_exit=False)  # which leaves this program's signals alone
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_head(self) -> None:
        self.cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=BYTES, _system_config=SETTINGS)

    def add(self, name: str, cpus: int = 1, gpus: int = 0, environment: dict[str, str] | None = None, **resources: float) -> None:
        """Start a node, whose name its runs find in $NODE; its GPUs are numbers that Ray counts."""
        self.nodes[name] = self.cluster.add_node(
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=BYTES,
            resources=resources,
            env_vars={"NODE": name, **(environment or {})},
        )

    def holds(self, process: int) -> bool:
        """Return whether a node of this cluster, and not of another on this machine, started a process."""
        parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return any(raylet.process.pid == parent for node in self.nodes.values() for raylet in node.all_processes["raylet"])

    def kill(self, name: str) -> None:
        """End a node as a power cut does."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@contextlib.contextmanager
def nodes(*names: str) -> Iterator[Nodes]:
    """Yield a cluster of a head and nodes of one core each; nothing of it is left afterwards."""
    import ray

    made = Nodes()
    try:
        made.add_head()
        for name in names:
            made.add(name)
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()
