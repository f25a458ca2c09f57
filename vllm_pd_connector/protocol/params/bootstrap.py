"""The bootstrap answer of vLLM's in-tree Mooncake connector: which engine a prefill instance is, and where it listens.

Its proxies ask `GET http://host:port/query` of every prefill instance, choose an engine of the answer, and send both
legs of a request at the same time: the decode instance is told the bootstrap address, the engine and a `transfer_id`,
and asks the same question to find the prefill instance. The form:

    {"<data-parallel rank>": {"engine_id": "…", "worker_addr": {"<tp rank>": {"<pp rank>": "tcp://host:port"}}}}

Here an engine has one address, its side channel's, and gives it for every worker. The engines of one `vllm serve` that
runs several (data parallelism) are told of by the first of them, with which the others register: they send it what they
would answer themselves.

Source: vLLM 0.32 `mooncake/mooncake_utils.py` (MooncakeBootstrapServer), `mooncake/mooncake_connector.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire.fields import EngineId

MAX_ANSWER_BYTES = 1 << 20
MAX_REGISTRATION_BYTES = 1 << 16
QUERY_PATH = "/query"
REGISTER_PATH = "/register"

_Rank = Annotated[str, Meta(min_length=1, max_length=5, pattern="^[0-9]+$")]
_WorkerAddress = Annotated[str, Meta(max_length=300)]
_HOST = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
_URL = re.compile(rf"http://{_HOST}:(?P<port>[0-9]{{1,5}})/?\Z")
_ADDRESS = re.compile(rf"tcp://{_HOST}:(?P<port>[0-9]{{1,5}})\Z")


class HostPort(NamedTuple):
    """A host (an IPv6 address without brackets) and a port."""

    host: str
    port: int


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data-parallel rank of an instance."""

    engine_id: EngineId
    worker_addr: dict[_Rank, dict[_Rank, _WorkerAddress]]


_ANSWER = msgspec.json.Decoder(dict[_Rank, EngineEntry])


class EngineRegistry:
    """The engines of one server, for the one of them that answers; `answer` is what it says. For one thread at a time.

    Args:
        own: the answer of that engine alone, made by `encode_answer`.
    """

    def __init__(self, own: bytes) -> None:
        self.answer = own
        self._entries = _ANSWER.decode(own)

    def join(self, data: bytes) -> None:
        """Another engine registers, by the answer that it would give itself; a repeated one replaces the former.

        Raises:
            ProtocolError: not the answer of one engine, a rank or an engine that is here with another, or too many.
        """
        parse_answer(data)
        joining = _ANSWER.decode(data)
        if len(joining) != 1:
            raise ProtocolError(f"registration of {len(joining)} engines, an engine registers itself alone")
        [(rank, entry)] = joining.items()
        for known_rank, known in self._entries.items():
            if (known_rank == rank) != (known.engine_id == entry.engine_id):
                raise ProtocolError(
                    f"data-parallel rank {rank} with engine_id {entry.engine_id[:80]!r} there, rank {known_rank} with "
                    f"{known.engine_id[:80]!r} here: two servers share a bootstrap port; give each its own"
                )
        entries = self._entries | joining
        answer = msgspec.json.encode(entries)
        if len(answer) > MAX_ANSWER_BYTES:
            raise ProtocolError(
                f"with {len(entries)} engines the answer has {len(answer)} bytes, at most {MAX_ANSWER_BYTES} are read"
            )
        self._entries, self.answer = entries, answer


def encode_answer(dp_rank: int, engine_id: str, place: HostPort, tp_size: int, pp_size: int) -> bytes:
    """The answer of an instance whose workers are all reached at `place`."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    address = f"tcp://{host}:{place.port}"
    workers = {str(tp): {str(pp): address for pp in range(pp_size)} for tp in range(tp_size)}
    return msgspec.json.encode({str(dp_rank): EngineEntry(engine_id, workers)})


def parse_answer(data: bytes) -> dict[str, HostPort]:
    """The address of each engine in an answer.

    Raises:
        ProtocolError: too large, not in the form above, an engine without workers, or one whose workers have addresses
            of their own: that is another connector.
    """
    if len(data) > MAX_ANSWER_BYTES:
        raise ProtocolError(f"bootstrap answer of {len(data)} bytes, at most {MAX_ANSWER_BYTES} are read")
    try:
        entries = _ANSWER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"bootstrap answer is not in the form of vLLM's Mooncake connector: {error}") from error
    found: dict[str, HostPort] = {}
    for entry in entries.values():
        addresses = {address for stages in entry.worker_addr.values() for address in stages.values()}
        if len(addresses) != 1:
            raise ProtocolError(
                f"bootstrap answer: engine {entry.engine_id[:80]!r} has {len(addresses)} worker addresses, an instance "
                "with PDConnector has one; run PDConnector on the prefill instance too"
            )
        found[entry.engine_id] = _host_port(_ADDRESS, addresses.pop(), "worker address")
    return found


def parse_bootstrap_address(text: str) -> HostPort:
    """Host and port of `remote_bootstrap_addr`.

    Raises:
        ProtocolError: not of the form http://host:port.
    """
    return _host_port(_URL, text, "remote_bootstrap_addr")


def _host_port(form: re.Pattern[str], text: str, noun: str) -> HostPort:
    found = form.match(text)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        expected = "http://host:port" if form is _URL else "tcp://host:port"
        raise ProtocolError(f"{noun}: {text[:80]!r} is not of the form {expected}")
    return HostPort(found["host"].strip("[]"), int(found["port"]))
