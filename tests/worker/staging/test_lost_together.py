"""Two pushes by way of the staging buffer that lose their connection in the same look."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.worker.decode_instance import lacking, set_faults, until
from tests.support.worker.writer import CONFIG, Target, Writer, writes
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.protocol.wire.push_messages import PushEnded
from vllm_pd_connector.worker.push.completion import CompletionReports

A, B = (2, 6, 4), (1, 3, 7)
LOST, UNSURE = PeerLost("a reset", terminal=False), TransferError("unclear", terminal=False)


@pytest.fixture
def config() -> Config:
    """Both pushes have room in the buffer."""
    return msgspec.structs.replace(CONFIG, staging_bytes=1 << 20)


@pytest.mark.parametrize("error", [LOST, UNSURE], ids=["lost", "unclear"])
def test_the_blocks_of_both_stay_in_quarantine(
    writer: Writer, target: Target, monkeypatch: pytest.MonkeyPatch, error: TransferError
) -> None:
    """The first one's result ends the link, and so the second before its own result is handled."""
    monkeypatch.setattr("vllm_pd_connector.worker.staging.stager.SLICE_S", 0.5)  # both in one turn, however slow
    told: list[PushEnded] = []
    send = CompletionReports.send
    monkeypatch.setattr(CompletionReports, "send", lambda self, word: (told.append(word), send(self, word))[1])
    set_faults(writer.transports, held=True)
    writer.whole("a")
    writer.whole("b")
    requests = [
        target.request(writer, f"d-{name}", name, blocks=(lacking(blocks),)) for name, blocks in (("a", A), ("b", B))
    ]
    target.loop.submit(requests, [])
    until(lambda: all(len(part) == 2 for part in writer.pushes()), "both pushes")
    until(lambda: all(map(writes, writer.loops)), "the writes")
    for transport in writer.transports:
        transport.faults.failures.extend([error] * 64)
    set_faults(writer.transports, held=False)
    assert target.wait_for("d-a", "d-b") == [False, False]
    until(lambda: len(told) >= 2 * len(writer.loops), "every worker's word of both")
    target.collect()
    assert not any(word.terminal for word in told), "one was told as over"
    assert target.quarantined == {"d-a", "d-b"} and not target.drained
