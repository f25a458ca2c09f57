"""`kv_connector_extra_config` as one typed, validated object.

Every key has a default that works on one host; unknown keys and wrong types are refused when the engine starts, so
that a misspelt key never silently means its default. Times are seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
import re
import stat
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from vllm_pd_connector import in_tree
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.transport import registry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
DEFAULT_SIDE_CHANNEL_HOST = "127.0.0.1"
DEFAULT_SIDE_CHANNEL_PORT = 5600
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")  # as `protocol.wire.fields.Host`
MAX_STAGING_BYTES = 1 << 40
MIN_SECRET_BYTES = 32


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user can set. See docs/configuration.md for the table that explains each key.

    Attributes:
        transport: which library moves the bytes: a name that `transport.registry` knows.
        mode: who moves the bytes: "pull" (the decode side reads when the prefill has finished), "push" (the prefill
            side writes, while it still computes) or "auto" (the decode side tries both when it first meets a prefill
            instance, and takes the faster). A prefill instance in mode push or auto serves all kinds.
        push_when: "steps" writes what each prefill step completed, "layers" the same layer by layer while a step
            computes, "end" everything when the prefill has finished.
        side_channel_host: address that the prefill side binds and advertises. None: the environment variable
            VLLM_NIXL_SIDE_CHANNEL_HOST that in-tree launch scripts set, else loopback.
        side_channel_port: base port; the data-parallel index is added. None: VLLM_NIXL_SIDE_CHANNEL_PORT, else 5600.
        bootstrap_port: where a prefill instance in mode push or auto answers proxies of vLLM's in-tree Mooncake
            connector, on the side channel's host; the first engine of a `vllm serve` for all of them. None:
            VLLM_MOONCAKE_BOOTSTRAP_PORT, else nowhere.
        side_channel_keys: directory of this instance's CURVE key pair and its peers' public keys
            (`sidechannel.net.keys`).
        allow_unauthenticated_peers: talk to other hosts without keys.
        params_secret: file of a secret that prefill and decode instances share, to sign `kv_transfer_params`.
        kv_lease_duration: how long the prefill side keeps a finished request's blocks without a renewal.
        kv_lease_limit: how long it keeps them at most, however often a decode instance renews.
        kv_lease_share: of the blocks of the pool, the part that prefills for decode instances may take.
        handshake_timeout: from the first attempt to reach a prefill instance to a usable plan.
        transfer_timeout: for reading or writing a request while no part of it arrives, writing from the prefill's end.
        step_timeout: for one engine step of a prefill instance in mode push; after it, those who wait for prefills that
            this engine computes are told that they failed.
        confirm_timeout: for the prefill side's word that the blocks were held while they were read.
        conversations: on a decode instance: keep what a finished request has left for the next turn of its
            conversation; on a prefill instance: read it from there.
        conversation_lease: how long a decode instance keeps it.
        conversation_share: how much of its pool all conversations may hold, oldest given back first.
        shutdown_timeout: how long a prefill instance that ends lets its readers finish; 0: not at all.
        verify: compare checksums over what was received with the prefill side's: of no request, of one in 16, of all.
            On the prefill side anything but "off" lets decode instances ask.
        model_id: name under which both sides know the model; None: the served model's name or path.
        weights_version: what both sides call these weights, in place of what their files or --revision tell.
        allow_mixed_quantization: pair with instances that quantize their weights otherwise, if they allow it, too.
        adapter_ids: by a LoRA adapter's name what both sides call its weights, in place of what its files tell.
        staging_bytes: memory of the side that starts transfers through which caches of another layout are converted,
            per worker; 0 switches conversion off, and unequal layouts move as short runs.
        transport_options: keys of the transport; see docs/configuration.md.
        nixl_series: show the series of vLLM's NixlConnector besides, for dashboards that were made for it.
        trace_dir: directory in which an operator orders records of receives (`vllm-pd trace`), and where these go.
        digest_dir: test switch; every worker writes layout-invariant digests of what it sent or received there.
    """

    transport: str = "nixl"
    mode: Literal["pull", "push", "auto"] = "pull"
    push_when: Literal["steps", "layers", "end"] = "steps"
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    bootstrap_port: int | None = None
    side_channel_keys: str | None = None
    allow_unauthenticated_peers: bool = False
    params_secret: str | None = None
    kv_lease_duration: float = 30.0
    kv_lease_limit: float = in_tree.LEASE_LIMIT_S
    kv_lease_share: float = 0.8
    handshake_timeout: float = 10.0
    transfer_timeout: float = 60.0
    step_timeout: float = 120.0
    confirm_timeout: float = 10.0
    conversations: bool = False
    conversation_lease: float = 120.0
    conversation_share: float = 0.5
    shutdown_timeout: float = 3.0
    verify: Literal["off", "sample", "all"] = "off"
    model_id: str | None = None
    weights_version: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    allow_mixed_quantization: bool = False
    adapter_ids: dict[str, str] = {}
    staging_bytes: int = 64 << 20
    transport_options: dict[str, Any] = {}
    nixl_series: bool = False
    trace_dir: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    digest_dir: str | None = None

    @property
    def handoff(self) -> str:
        """How a router brings requests to a prefill instance: "concurrent" where it writes, so that it can do so while
        it computes; "serial" else, and where its answer is needed, which alone carries its key and its signature."""
        return "concurrent" if self.mode == "push" and self.nameable else "serial"

    @property
    def nameable(self) -> bool:
        """Whether a router can say by itself what a prefill instance answers: it has no key and signs nothing."""
        return self.side_channel_keys is None and self.params_secret is None

    @property
    def pushes(self) -> bool:
        """Whether a prefill instance may be asked to write, and a decode instance may ask."""
        return self.mode != "pull"

    def starts_transfers(self, *, prefills: bool, decodes: bool) -> bool:
        """Whether workers of an instance in these roles read or write others' caches, and so convert."""
        return (prefills and (self.pushes or self.conversations)) or (decodes and self.mode != "push")

    def is_target(self, *, prefills: bool, decodes: bool) -> bool:
        """Whether others may read or write the caches of an instance in these roles. Decode instances choose the way,
        so prefill instances of every mode are read from; prefill instances read what decode kept of a conversation."""
        return prefills or (decodes and (self.pushes or self.conversations))

    def host_key(self, environ: Mapping[str, str] = os.environ) -> str:
        """What errors call the side channel's host: with the variable that it comes from, where it does."""
        told = self.side_channel_host is None and environ.get(HOST_VARIABLE)
        return f"side_channel_host ({HOST_VARIABLE})" if told else "side_channel_host"

    def side_channel(self, data_parallel_index: int, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
        """Host and port at which this instance's scheduler half listens.

        Raises:
            InvalidConfig: the environment's port is not a number, the port is outside 1..65535, or others could not be
                told the host.
        """
        host = self.side_channel_host
        if host is None:  # an empty one is refused: something that was to be put there is not known
            host = environ.get(HOST_VARIABLE) or DEFAULT_SIDE_CHANNEL_HOST
        host = host.removeprefix("[").removesuffix("]")
        if not _HOST.fullmatch(host):
            raise InvalidConfig(
                f"{self.host_key(environ)}: {host!r:.80} is no address that others could be told; give a host's name "
                "or its IPv4 or IPv6 address"
            )
        variable = "VLLM_NIXL_SIDE_CHANNEL_PORT"
        base: int | str | None = self.side_channel_port
        if base is None:
            base = environ.get(variable, DEFAULT_SIDE_CHANNEL_PORT)
        return host, _port("side_channel_port", variable, base, data_parallel_index)

    def bootstrap(self, environ: Mapping[str, str] = os.environ) -> int | None:
        """Port at which the first engine of this instance's `vllm serve` answers bootstrap questions for all of them;
        None if it does not.

        Raises:
            InvalidConfig: as `side_channel`.
        """
        variable = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
        base = environ.get(variable) if self.bootstrap_port is None else self.bootstrap_port
        return None if base is None else _port("bootstrap_port", variable, base, 0)

    def transport_settings(self, *, prefills: bool, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """`transport_options`, with what other keys decide: Mooncake advertises an address, by default the one on the
        route to the side channel's, so that a worker is reached like its instance is, or from this host alone. An
        instance that only decodes and keeps no conversations has no side channel of its own: without a host it is at
        the default route's address, from where it reaches prefill instances of this host and of others; if it is
        written into, that needs `allow_unauthenticated_peers`, and it is at loopback else."""
        settings = dict(self.transport_options)
        if self.transport != "mooncake":
            return settings
        if self.allow_unauthenticated_peers:
            settings.setdefault("allow_unauthenticated_peers", True)
        told = self.side_channel_host or environ.get(HOST_VARIABLE)
        if settings.keys() & {"address", "route_to"}:
            return settings
        if not told and self.pushes and not settings.get("allow_unauthenticated_peers"):
            settings["address"] = DEFAULT_SIDE_CHANNEL_HOST
        elif told or prefills or self.conversations:
            host, _ = self.side_channel(0, environ)
            if host == "localhost":
                settings["address"] = DEFAULT_SIDE_CHANNEL_HOST
            with contextlib.suppress(ValueError):  # a name: the default route decides
                if not ipaddress.ip_address(host).is_unspecified:
                    settings["route_to"] = host
        return settings

    def secret(self) -> bytes | None:
        """The content of `params_secret`, None if that is not set.

        Raises:
            InvalidConfig: the file cannot be read, or its name is none, or it holds less than 32 bytes.
        """
        if self.params_secret is None:
            return None
        try:
            content = Path(self.params_secret).read_bytes().strip()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidConfig(f"params_secret: {self.params_secret!r}: {why}") from error
        if len(content) < MIN_SECRET_BYTES:
            raise InvalidConfig(
                f"params_secret: {self.params_secret} holds {len(content)} bytes, at least {MIN_SECRET_BYTES} are "
                "needed; make one with `vllm-pd keygen --params-secret FILE`"
            )
        return content


def own_directory(key: str, name: str, *, make: bool = False) -> Path:
    """The directory that a key names, into which nobody else may write. One that is not there is right, unless it
    cannot be made.

    Raises:
        InvalidConfig: there is something else than a directory that only its owner, who is this user, can write into,
            or it cannot be made.
    """
    directory = Path(name)
    try:
        if make:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except FileExistsError:
        raise InvalidConfig(f"{key}: {directory} is no directory; name one, or one that can be made") from None
    except FileNotFoundError:
        above = next(one for one in directory.absolute().parents if one.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            raise InvalidConfig(
                f"{key}: {directory} cannot be made: user {os.geteuid()} may not write into {above}; make it for this "
                "user beforehand, or name another"
            ) from None
        return directory
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{key}: {directory}: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidConfig(f"{key}: {directory} is no directory; name one, or one that can be made")
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidConfig(
            f"{key}: {directory} is user {found.st_uid}'s with mode {stat.S_IMODE(found.st_mode):o}, this process "
            f"is user {os.geteuid()}: give it a directory of its own that others cannot write into (chmod 700)"
        )
    return directory


def _port(key: str, variable: str, base: int | str, data_parallel_index: int) -> int:
    try:
        port = int(base) + data_parallel_index
    except ValueError:
        raise InvalidConfig(f"{variable} is {base!r}: set it to a port number") from None
    if not 1 <= port <= 65535:
        raise InvalidConfig(f"{key} {base} + data-parallel index {data_parallel_index} = {port} is outside 1..65535")
    return port


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def expandable_segments(environ: Mapping[str, str]) -> str:
    """The variable by which PyTorch has its expandable segments, whose memory moves; empty if it has none. The first
    that is set is PyTorch's choice."""
    name = next((name for name in _ALLOCATOR if environ.get(name)), _ALLOCATOR[0])
    return name if "expandable_segments:True" in environ.get(name, "").replace(" ", "") else ""


_SAME_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"


def require_ids_of_their_own(environ: Mapping[str, str]) -> None:
    """Refuse engines that take the ids of requests as they come. Behind the id that vLLM's server gives its engine puts
    digits by chance: they tell a request from another of the same id, and what the server added from the client's part,
    by which the legs of a request and the prompts of a batch know each other.

    Raises:
        InvalidConfig: the variable is set.

    Source: vLLM 0.32, `InputProcessor.assign_request_id`.
    """
    if environ.get(_SAME_IDS, "0").strip().lstrip("0"):
        raise InvalidConfig(
            f"{_SAME_IDS} is {environ[_SAME_IDS]!r}: requests of one id would be taken for one another, as vLLM warns, "
            "and the two legs of a request would not find each other; leave it out"
        )


_NO_HUGE_PAGES = (
    "'huge_pages' is no longer a key; leave it out, and where one host's reads of CPU caches should be faster, start "
    "vLLM with THP_MEM_ALLOC_ENABLE=1 in the environment"
)
GONE = {"huge_pages": _NO_HUGE_PAGES}


def unknown_key(key: str, known: Sequence[str]) -> str:
    """What is wrong with a key that is none of those that are known."""
    near = difflib.get_close_matches(key, known, n=1)
    meant = f"; did you mean {near[0]}?" if near else ";"
    return f"{key!r} is not a key{meant} the keys are {', '.join(known)}"


def _mistyped(extra: Mapping[str, Any]) -> str:
    """Which key has a value that cannot be, and what could; empty if each alone is right."""
    for key, value in extra.items():
        try:
            msgspec.convert({key: value}, Config)
        except msgspec.ValidationError as error:
            kind = typing.get_type_hints(Config)[key]
            if typing.get_origin(kind) is Literal:
                return f"{key} is {value!r}: it must be one of {', '.join(typing.get_args(kind))}"
            return f"{key} is {value!r}: {error}"
    return ""


def _require(config: Config, key: str, good: bool, values: str) -> None:
    if not good:
        raise InvalidConfig(f"kv_connector_extra_config.{key} is {getattr(config, key)}: it must be in {values}")


def parse_config(extra: Mapping[str, Any]) -> Config:
    """Validate `kv_connector_extra_config`.

    Raises:
        InvalidConfig: an unknown key, a wrong type or a value out of range; the message names the key.
    """
    for key in extra:
        if key not in Config.__struct_fields__:
            why = in_tree.refusal(key) or GONE.get(str(key)) or unknown_key(str(key), Config.__struct_fields__)
            raise InvalidConfig(f"kv_connector_extra_config: {why}")
    try:
        config = msgspec.convert(dict(extra), Config)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"kv_connector_extra_config: {_mistyped(extra) or error}") from None
    durations = ("kv_lease_duration", "kv_lease_limit", "handshake_timeout", "transfer_timeout", "step_timeout")
    for key in (*durations, "confirm_timeout", "conversation_lease"):
        _require(config, key, 0 < getattr(config, key) <= 86400, "(0, 86400] seconds")
    _require(config, "conversation_share", 0 < config.conversation_share <= 1, "(0, 1]")
    if config.kv_lease_limit < config.kv_lease_duration:
        raise InvalidConfig(
            f"kv_connector_extra_config.kv_lease_limit is {config.kv_lease_limit}, and kv_lease_duration "
            f"{config.kv_lease_duration}: a lease without a renewal is not longer than one with all of them"
        )
    _require(config, "kv_lease_share", 0 < config.kv_lease_share <= 1, "(0, 1], a part of the block pool")
    _require(config, "shutdown_timeout", 0 <= config.shutdown_timeout <= 86400, "[0, 86400] seconds")
    staged = f"[0, {MAX_STAGING_BYTES}] bytes"
    _require(config, "staging_bytes", 0 <= config.staging_bytes <= MAX_STAGING_BYTES, staged)
    registry.find(config.transport)
    return config
