"""Who may talk on the side channel: CURVE keys of this instance and of its peers, and what is refused without them.

A directory holds this instance's key pair (the one file `*.key_secret`, with its public part `*.key` beside it) and the
public keys (`*.key`) of all instances that it talks to, in the format of pyzmq's certificates. A server lets only these
clients in. A client connects only to servers whose key is among them; which one it is stands in the request's
parameters (`pd_connector.server_key`), so an unauthenticated peer's parameters can choose among known instances and
nobody else.

Without keys nobody is authenticated, and nobody but this host may be talked to: an instance does not listen on an
address that others reach, and does not ask an instance on another host, unless the configuration allows it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import re
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq
import zmq.auth

from vllm_pd_connector.errors import InvalidConfig, UnauthenticatedPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_pd_connector.config import Config

logger = logging.getLogger(__name__)

TELL_S: Final = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ZAP_DOMAIN = "pd"  # under which a server's socket asks its context's authenticator

_ADVICE = (
    "make keys with `vllm-pd keygen`, give each side the other's public key and set side_channel_keys on both; or, on "
    "a network that only you can reach, set allow_unauthenticated_peers to true"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """One instance's keys. `public` and the `peers` are Z85 text of 40 characters; `directory` is where they lie."""

    directory: Path
    public: str
    secret: str = field(repr=False)
    peers: frozenset[str]


class Admission:
    """Whom an authenticator lets in: the peers, and this instance's own workers, whether its own public key lies among
    theirs or not. A client that is not let in learns nothing and waits; the log here says now and then which key it
    has."""

    def __init__(self, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._known = keys.peers | {keys.public}
        self._directory, self._clock, self._told_at = keys.directory, clock, -math.inf

    def callback(self, _domain: str, key: bytes) -> bool:
        """Source: pyzmq, `Authenticator.configure_curve_callback`."""
        text = key.decode("ascii")
        if text in self._known:
            return True
        if (now := self._clock()) - self._told_at >= TELL_S:
            self._told_at = now
            logger.warning(
                "side channel: a client with key %s is not let in: its *.key is not in %s; if it is a peer, copy it "
                "there and start this instance again, since keys are read at the start (others are silent for %g s)",
                *(text, self._directory, TELL_S),
            )
        return False


def proved_key(part: zmq.Frame) -> str:
    """The key that the connection of a frame's sender has proved, empty if none."""
    try:
        return str(part.get("User-Id"))
    except zmq.ZMQError:
        return ""


def keys_of(config: Config) -> Keys | None:
    """The configured keys, None if none are configured. Raises as `load_keys`."""
    return load_keys(Path(config.side_channel_keys)) if config.side_channel_keys is not None else None


def load_keys(directory: Path) -> Keys:
    """Read a directory of keys.

    Raises:
        InvalidConfig: not a directory, no secret key or more than one, a file that holds no key, a secret key that
            others may read (`is_private`), or that is not of the public key in its file.
    """
    try:
        names = sorted(os.listdir(directory))  # `glob` takes one that may not be read for an empty one
        pairs = [directory / name for name in names if name.endswith(".key_secret")]
        found = [directory / name for name in names if name.endswith(".key")]
    except (OSError, ValueError) as error:  # the second is of a name that is none
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfig(
            f"side_channel_keys: {directory}: {why} (uid {os.geteuid()}); the instance's user must be able to read the "
            "directory and the keys in it; `vllm-pd keygen` makes them"
        ) from error
    if len(pairs) != 1:
        advice = "keep the others elsewhere" if pairs else f"make one with `vllm-pd keygen {directory}`"
        raise InvalidConfig(
            f"side_channel_keys: {directory} has {len(pairs)} files *.key_secret, exactly 1 is needed (this "
            f"instance's own); {advice}"
        )
    status = pairs[0].stat()
    if not is_private(status.st_mode, status.st_uid):
        raise InvalidConfig(
            f"side_channel_keys: {pairs[0]} has mode {status.st_mode & 0o777:04o} and can be read by others; chmod 600 "
            "it, or have root own it and its group read it (640)"
        )
    public, secret = _load(pairs[0])
    if secret is None:
        raise InvalidConfig(f"side_channel_keys: {pairs[0]} holds no secret key; make one with `vllm-pd keygen`")
    with _invalid_key(f"side_channel_keys: {pairs[0]}"):
        if zmq.curve_public(secret.encode()).decode() != public:
            raise ValueError("its secret and its public key are not of one pair; copy the file anew")
    peers = frozenset(_load(path)[0] for path in found)
    if not peers:
        raise InvalidConfig(f"side_channel_keys: {directory} has no *.key: put the peers' public keys there")
    return Keys(directory, public, secret, peers)


def is_private(mode: int, owner: int) -> bool:
    """Whether a file's mode keeps its content from everybody whom its owner did not choose.

    The owner alone may read it; if that is root, the file's group may, too. So come the files of a Kubernetes Secret to
    a user who is not root: root's, with the group `fsGroup` that the pod's containers have, and readable by it. What
    another user owns and a group may read was more likely left open by an umask. PostgreSQL has the same rule for its
    server's key.
    """
    return not mode & (0o037 if owner == 0 else 0o077)


def _load(path: Path) -> tuple[str, str | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        return public.decode("ascii"), secret.decode("ascii") if secret is not None else None
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"side_channel_keys: {path}: {error}") from error


def public_key(path: Path) -> str:
    """The public key in a file, Z85 text. Raises InvalidConfig if there is none."""
    return _load(path)[0]


def create_secret(path: Path) -> None:
    """Write a new secret for signing parameters, for its owner only.

    Raises:
        InvalidConfig: the file exists, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InvalidConfig(f"{path}: a secret cannot be written there: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InvalidConfig(f"{path}: a secret cannot be written there: {error.strerror}") from error


def create_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """As `new_keys`, for good."""
    with new_keys(directory, name) as files:
        return files


@contextmanager
def new_keys(directory: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Write a new key pair; gives the files of the public and the secret key, which is for its owner only. Nothing of
    it is left if the context ends by an error, or this does.

    Raises:
        InvalidConfig: a name that is none of a file in that directory, a directory that cannot be written, or that has
            keys of this name.
    """
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"name of keys: {name!r:.80}; give letters, digits, '.', '_' and '-', a letter or digit first"
        )
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    try:
        if public.exists() or secret.exists():
            raise InvalidConfig(f"{directory} has keys named {name} already; choose another name or remove them")
        new = [above for above in (directory, *directory.parents) if not above.exists()]
    except OSError as error:
        raise InvalidConfig(f"{directory}: keys cannot be written: {error.strerror}") from error
    before = os.umask(0o077)
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            zmq.auth.create_certificates(directory, name)
            public.chmod(0o644)
        finally:
            os.umask(before)
        yield public, secret
    except BaseException as error:
        for path in (public, secret):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        for above in new:
            with contextlib.suppress(OSError):
                above.rmdir()
        if isinstance(error, OSError):
            raise InvalidConfig(f"{directory}: keys cannot be written: {error.strerror}") from error
        raise


def admits(keys: Keys | None, host: str) -> str:
    """Whom a side channel that listens at `host` lets in, for the log."""
    if keys is not None:
        who = f"for {len(keys.peers)} known keys"
    else:
        who = "every process of this host" if is_loopback(host) else "every host that reaches it"
        who = f"for {who}: side_channel_keys is not set"
    return who


def told_wrongly(host: str, others: bool) -> str:
    """Why those on other hosts, if there are to be `others`, do not find a side channel at the address that they are
    told; empty where they do."""
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            return (
                f"other instances are told {host}, which is their own host: set side_channel_host to an address of "
                "this one, unless a router puts that in its place"
            )
    if others and is_loopback(host):
        return (
            f"other instances are told {host}, where one on another host asks itself: set side_channel_host to an "
            "address of this one that they reach, unless all are here"
        )
    return ""


def is_loopback(host: str) -> bool:
    """Whether an address can only be this host. Names are not resolved: all but "localhost" may be anybody, and so may
    an address with a scope ("::1%name"), which is looked up as a name where no interface has that one."""
    with contextlib.suppress(ValueError):
        return "%" not in host and ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def require_private_address(
    host: str, keys: Keys | None, allow_unauthenticated: bool, key: str = "side_channel_host"
) -> None:
    """Refuse to listen where unauthenticated peers reach us; `key` is what messages call the host (`Config.host_key`).

    Raises:
        InvalidConfig: `host` is not loopback and there are no keys.
    """
    if keys is None and not allow_unauthenticated and not is_loopback(host):
        raise InvalidConfig(
            f"{key} {host} can be reached from other hosts, and side_channel_keys is not set: {_ADVICE}"
        )


def require_known_server(
    host: str,
    server_key: str | None,
    keys: Keys | None,
    allow_unauthenticated: bool,
    noun: str = "prefill instance",
) -> None:
    """Refuse to ask an instance that cannot prove who it is; `noun` says in messages what it is.

    Raises:
        UnauthenticatedPeer: its key is not one of ours, it has one and we have none, or nobody has any and it is not
            on this host.
    """
    if keys is not None:
        if server_key is None:
            raise UnauthenticatedPeer(
                f"the {noun} at {host} has no side-channel key, this instance requires one: set "
                "side_channel_keys there too"
            )
        if server_key not in keys.peers:
            raise UnauthenticatedPeer(
                f"the {noun} at {host} says that its side-channel key is {server_key}, which is none of the "
                f"{len(keys.peers)} public keys in {keys.directory}: copy its *.key file there and start again"
            )
    elif server_key is not None:
        raise UnauthenticatedPeer(
            f"the {noun} at {host} talks only to instances whose keys it knows, and side_channel_keys is not "
            "set here: make keys with `vllm-pd keygen`"
        )
    elif not allow_unauthenticated and not is_loopback(host):
        raise UnauthenticatedPeer(f"the {noun} at {host} is on another host and has no key: {_ADVICE}")


@contextmanager
def _invalid_key(where: str) -> Iterator[None]:
    try:
        yield
    except (zmq.ZMQError, ValueError) as error:
        raise InvalidConfig(f"{where}: not a CURVE key: {error}") from error


def secure_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Make a socket accept only clients that the context's authenticator knows, and nobody if there is none."""
    with _invalid_key("side_channel_keys"):
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], keys: Keys, server_key: str) -> None:
    """Make a socket speak to the holder of `server_key` alone."""
    with _invalid_key("server key"):
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
