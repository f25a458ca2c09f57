"""The prefill side of a comparison: a thread of each worker makes the checksums that decode workers ask for.

It runs beside the forward and the transfers, since the blocks are held by a lease until the answer is there.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.memory import make_device_current
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.checksums.sums import checksums
from vllm_pd_connector.protocol.wire.messages import (
    Accepted,
    ChecksumJob,
    Failure,
    JobChecksums,
    NextChecksumJob,
    Request,
)
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.waiting import wait
from vllm_pd_connector.wake import Wake
from vllm_pd_connector.worker.checksums import memory_of, to_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.sidechannel.net.keys import Keys

logger = init_logger(__name__)
_JOB_WAIT_S = 30.0
_RETRY_S = 1.0
_AGAIN_S = 0.5
_CLOSE_S = 10.0


class ChecksumServer:
    """The prefill side's thread of one worker; `worker` is its number among the instance's, `token` its secret."""

    name = "pd-sums"

    def __init__(self, endpoint: str, keys: Keys | None, manifest: Manifest, worker: int, token: bytes) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._manifest = manifest
        self._memory = memory_of(manifest.segments)
        self._worker = worker
        self._token = token
        self._wake = Wake()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; nothing reads the caches after this returns, unless it still `runs`."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=_CLOSE_S)
        if not self.runs:
            self._wake.close()

    @property
    def runs(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        """Begin again after an unexpected error: without this thread no comparison would ever be answered."""
        current = False
        while not self._stop:
            try:
                if not current:
                    make_device_current(self._manifest.segments)
                    current = True
                self._serve()
            except Exception:
                logger.exception("sums of worker %d", self._worker)
                time.sleep(_AGAIN_S)

    def _serve(self) -> None:
        client = SideChannelClient(keys=self._keys)
        try:
            while not self._stop:
                outcome = self._ask(client, NextChecksumJob(self._token, self._worker), _JOB_WAIT_S)
                if isinstance(outcome, ChecksumJob):
                    for message in self._make(outcome):
                        # The next job is the same again where not all of its sums have come: of a whole job with a hole
                        # a reader would take what arrived well for wrong.
                        if not isinstance(self._ask(client, message, _RETRY_S), Accepted):
                            self._pause(client)
                            break
                elif isinstance(outcome, ProtocolError | Failure):
                    self._pause(client)  # the side channel is not there yet, or not any more
        finally:
            client.close()

    def _ask(self, client: SideChannelClient, request: Request, timeout: float) -> Outcome | None:
        """The outcome of a request, None when this thread is to end."""
        try:
            token = client.send(self._endpoint, request, timeout)
        except ProtocolError as error:  # no socket is left: some may be, later
            return error
        while not self._stop:
            wait(client, self._wake, None)
            if (outcome := dict(client.receive()).get(token)) is not None:
                return outcome
        return None

    def _pause(self, client: SideChannelClient) -> None:
        until = time.monotonic() + _RETRY_S
        while not self._stop and time.monotonic() < until:
            wait(client, self._wake, until)

    def _make(self, job: ChecksumJob) -> Iterator[JobChecksums]:
        try:
            found = checksums(self._manifest, self._memory, job.tables, job.starts, job.stop)
        except Exception as error:  # nothing is vouched for: this reader's check fails, and no other's
            logger.error("sums of job %d: %s: %s", job.job, type(error).__name__, error)
            found = []
        yield from to_messages(self._token, job.job, self._worker, found)
