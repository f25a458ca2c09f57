"""Which pair runs: the one of the row in use, and no other."""

from __future__ import annotations

from pathlib import Path

from examples.launch import Servers
from tests.support.servers.cluster import Baselines, Cluster
from tests.support.servers.matrix import Row

ROOT = Path(__file__).resolve().parents[3]


class Pairs:
    """The pair of the row in use; asking for another row ends it."""

    def __init__(self, servers: Servers, directory: Path, connector: str):
        self.servers = servers
        self._directory = directory
        self._connector = connector
        self._current: Cluster | None = None
        self._failed: dict[Row, Exception] = {}
        self.baselines = Baselines(servers, ROOT / ".cache" / "baselines")

    def get(self, row: Row) -> Cluster:
        if row in self._failed:
            raise self._failed[row]
        if self._current is None or self._current.row != row:
            self.end()
            self.baselines.of(row.family)
            try:
                digest_dir = self._directory / "digests" / row.id
                self._current = Cluster(row, self.servers, self.baselines, digest_dir, self._connector)
            except Exception as error:
                # The row's other tests would wait for the same failure again.
                self._failed[row] = error
                raise
        return self._current

    def end(self) -> None:
        if self._current is not None:
            self._current.stop()
            self._current = None
