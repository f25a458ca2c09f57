"""What of a configuration can be refused before vLLM loads a model: seconds after the start, and all of it at once.

vLLM builds its connector when the weights are loaded, and an instance that cannot start says so minutes late. What is
wrong with the configuration alone is found here instead: keys and values, the transport's options and library, keys and
secrets, an address that is not this machine's, and, when the number of the engine is known, ports that are taken.
`compat.early` asks where vLLM has read its command line, and `vllm-pd check-config` asks for an operator.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm_pd_connector import CONNECTOR_NAME, in_tree
from vllm_pd_connector.config import (
    Config,
    expandable_segments,
    own_directory,
    parse_config,
    require_ids_of_their_own,
    unknown_key,
)
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.instance_info import ROLES
from vllm_pd_connector.sidechannel.net.keys import keys_of, require_private_address, told_wrongly
from vllm_pd_connector.sidechannel.net.sockets import require_free
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MULTI: Final = "MultiConnector"
PLUGIN: Final = "pd_connector"
"""Our entry point in vLLM's plugins (`plugin.register`)."""
_POLICIES: Final = ("fail", "recompute")
_KEYS: Final = (
    "kv_connector",
    "kv_role",
    "engine_id",
    "kv_load_failure_policy",
    "kv_connector_module_path",
    "kv_connector_extra_config",
)
_ENGINE_ID: Final = 500
"""Characters of a name: messages have 512, and vLLM adds the data-parallel rank."""
_RANK: Final = re.compile(r"_dp\d+$")
_WORKERS_END: Final = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
_WITHOUT_EFFECT: Final = {"kv_buffer_device": str, "kv_port": int, "enable_permute_local_kv": bool}
"""Keys that vLLM takes and that do nothing here, so that they stop no instance; and the types that vLLM takes."""


def document_problems(document: object, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the whole of a `--kv-transfer-config`, as read from JSON; ports are tried, too."""
    if not isinstance(document, Mapping):
        return [f"the configuration is {document!r:.60}: it must be an object with kv_connector and kv_role"]
    problems = [_unknown(str(key)) for key in document if key not in (*_KEYS, *_WITHOUT_EFFECT)]
    problems += [
        f"{key} is {document[key]!r:.60}: vLLM takes {kind.__name__}; leave it out, it does nothing here"
        for key, kind in _WITHOUT_EFFECT.items()
        if key in document and type(document[key]) is not kind
    ]
    problems += _choice("kv_role", document.get("kv_role"), ROLES)
    problems += _engine_id_problems(document)
    if "kv_connector_extra_config" in document and not isinstance(document["kv_connector_extra_config"], Mapping):
        problems.append(
            f"kv_connector_extra_config is {document['kv_connector_extra_config']!r:.60}: it must be an object"
        )
    if "kv_load_failure_policy" in document:
        problems += _choice("kv_load_failure_policy", document["kv_load_failure_policy"], _POLICIES)
    ours = list(_placed(document))
    if not ours:
        named = document.get("kv_connector")
        known = isinstance(named, str) and named in in_tree.CONNECTORS
        more = "; `vllm-pd migrate` says it in PDConnector's" if known else ""
        problems.append(f"kv_connector is {named!r:.60}: {CONNECTOR_NAME} is not there{more}")
    problems += _order_problems(document)
    problems += _said(lambda: require_ids_of_their_own(environ))
    if (chosen := _without_plugin(environ)) and not all(entry.by_path for entry in ours):
        problems.append(f"{chosen}, which makes {CONNECTOR_NAME} known to vLLM: add it there")
    for place, role, extra, _ in ours:
        found = setting_problems(role, extra, environ) or port_problems(role, extra, range(1), environ)
        problems += _at(place, found)
    return list(dict.fromkeys(problems))


def document_notes(document: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is worth knowing of a configuration in which nothing is wrong: an instance starts with it all the same."""
    notes = [f"{key}: {in_tree.TOP_LEVEL[key]}" for key in _WITHOUT_EFFECT if key in document]
    if name := expandable_segments(environ):
        notes.append(
            f"{name} has expandable_segments:True, with which an instance does not start unless it has "
            "--enable-cumem-allocator or --enable-sleep-mode, whose pool is without them: leave it out"
        )
    ours = list(_placed(document))
    if (chosen := _without_plugin(environ)) and all(entry.by_path for entry in ours):
        notes.append(f"{chosen}: kv_connector_module_path has the connector found, and what the plugin does is missing")
    for place, role, extra, _ in ours:
        found = [*setting_notes(role, extra, environ), *worker_notes(role, extra, environ)]
        notes += _at(place, found)
    return list(dict.fromkeys(notes))


def setting_notes(role: object, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[str]:
    """What will not be as it may be meant, of good settings."""
    config = parse_config(extra)
    notes = _idle_keys(role, extra, config)
    host, _ = config.side_channel(0, environ)
    others = config.side_channel_keys is not None or config.allow_unauthenticated_peers
    if _listens(config, role) and (misleads := told_wrongly(host, others)):
        notes.append(f"{config.host_key(environ)}: {misleads}")
    if (port := config.bootstrap(environ)) is not None and (role == "kv_consumer" or not config.pushes):
        notes.append(
            f"bootstrap_port: nobody will answer at {port}, since that is for prefill instances whose mode is push or "
            f"auto, and this is a {role} in mode {config.mode}"
        )
    return notes


def _idle_keys(role: object, extra: Mapping[str, Any], config: Config) -> list[str]:
    """Which keys were given and do nothing, in this role and mode."""
    prefills, keeps = role != "kv_consumer", role != "kv_producer" and config.conversations
    uses = {
        "push_when": (prefills and config.pushes, "prefill instances whose mode is push or auto"),
        "step_timeout": (prefills and config.pushes, "prefill instances whose mode is push or auto"),
        "shutdown_timeout": (prefills, "prefill instances"),
        "conversation_lease": (keeps, "decode instances with conversations true"),
        "conversation_share": (keeps, "decode instances with conversations true"),
    }
    here = f"a {role} in mode {config.mode} with conversations {str(config.conversations).lower()}"
    return [
        f"{key}: it does nothing here, since it is for {whose}, and this is {here}"
        for key, (used, whose) in uses.items()
        if key in extra and not used
    ]


def ending_notes(
    role: object, extra: Mapping[str, Any], vllm_s: float, several: bool, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Whether vLLM leaves a prefill instance the `shutdown_timeout` that it was given, in which its readers finish.

    Args:
        vllm_s: vLLM's own `--shutdown-timeout`.
        several: whether vLLM's engine runs its workers in processes, which it ends.

    Source: vLLM 0.32 and 0.33, `VllmConfig.shutdown_timeout`, `MultiprocExecutor._ensure_worker_termination`.
    """
    asked = extra.get("shutdown_timeout", 0)
    if role == "kv_consumer":
        return []
    notes = []
    if asked > vllm_s:
        notes.append(
            f"shutdown_timeout is {asked:g}, and vLLM's --shutdown-timeout {vllm_s:g}, after which it kills the engine "
            "and what it has handed over: give that the longest answers and shutdown_timeout together"
        )
    return notes + (worker_notes(role, extra, environ) if several else [])


def worker_notes(role: object, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[str]:
    """As `ending_notes`, of what the environment alone tells."""
    asked, text = extra.get("shutdown_timeout", 0), environ.get(_WORKERS_END, "5")  # vLLM's default
    if role == "kv_consumer" or not text.isdigit() or asked <= int(text):
        return []
    note = (
        f"shutdown_timeout is {asked:g}, and {_WORKERS_END} {text}, after which vLLM ends workers that are processes "
        "of their own, as several are: set it above shutdown_timeout"
    )
    return [note]


def early_problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with the settings that vLLM has read from its command line."""
    ours = list(_placed(document))
    problems = _engine_id_problems(document) if ours else []
    for place, role, extra, _ in ours:
        problems += _at(place, setting_problems(role, extra))
    return problems


def early_port_problems(document: Mapping[str, Any], engines: Iterable[int]) -> list[str]:
    """Which ports are taken that these data-parallel engines are to listen at; the settings are good."""
    known, problems = tuple(engines), []
    for place, role, extra, _ in _placed(document):
        problems += _at(place, port_problems(role, extra, known))
    return problems


def is_ours(document: Mapping[str, Any]) -> bool:
    """Whether an entry is PDConnector's, by its name or, as Dynamo's, by where its class comes from."""
    module = document.get("kv_connector_module_path")
    packaged = isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]
    return document.get("kv_connector") == CONNECTOR_NAME or packaged


def _without_plugin(environ: Mapping[str, str]) -> str:
    """How vLLM's plugins are chosen where ours is not among them; empty where it is."""
    chosen = environ.get("VLLM_PLUGINS")
    if chosen is None or PLUGIN in chosen.split(","):
        return ""
    return f"VLLM_PLUGINS is {chosen!r:.200}, without {PLUGIN}"


def _engine_id_problems(document: Mapping[str, Any]) -> list[str]:
    """vLLM draws a name where none is given."""
    named = document.get("engine_id")
    if isinstance(named, str) and ("$(" in named or "${" in named):
        unset = f"engine_id is {named!r:.60}: nothing was put in the place of the variable"
        return [f"{unset}; set it where this is read (of a pod in its env), or leave engine_id out"]
    if named is None or (isinstance(named, str) and 1 <= len(_RANK.sub("", named)) <= _ENGINE_ID):
        return []
    what = f"has {len(named)} characters" if isinstance(named, str) else f"is {named!r:.60}"
    return [f"engine_id {what}: it must be a string of 1 to {_ENGINE_ID}"]


def _order_problems(document: Mapping[str, Any]) -> list[str]:
    """Whether PDConnector stands in a MultiConnector as it must: first, and once (docs/multi-connector.md)."""
    extra = document.get("kv_connector_extra_config")
    listed = extra.get("connectors") if document.get("kv_connector") == _MULTI and isinstance(extra, Mapping) else ()
    places = [i for i, one in enumerate(listed if isinstance(listed, list | tuple) else ()) if _holds_ours(one)]
    if places[1:]:
        return [f"connectors: PDConnector is there {len(places)} times; name it once, with what all requests need"]
    if places and places[0]:
        return [f"connectors: PDConnector is number {places[0] + 1}; name it first (docs/multi-connector.md)"]
    return []


def _holds_ours(entry: object) -> bool:
    return isinstance(entry, Mapping) and is_ours(entry)


def extras_of(document: Mapping[str, Any]) -> list[Any]:
    """`kv_connector_extra_config` of each PDConnector in a configuration."""
    return [entry.extra for entry in _placed(document)]


class _Entry(NamedTuple):
    """A PDConnector in a configuration: where it stands, its `kv_role` and its `kv_connector_extra_config`, and whether
    it says where its class comes from."""

    place: str
    role: Any
    extra: Any
    by_path: bool


def _placed(document: Mapping[str, Any], place: str = "") -> Iterator[_Entry]:
    """Each PDConnector in a configuration, also beside others in a MultiConnector, which gives each connector the
    settings of its own entry."""
    extra = document.get("kv_connector_extra_config")
    extra = {} if extra is None else extra
    if is_ours(document):
        yield _Entry(place, document.get("kv_role"), extra, bool(document.get("kv_connector_module_path")))
    elif document.get("kv_connector") == _MULTI and isinstance(extra, Mapping):
        connectors = extra.get("connectors")
        for i, one in enumerate(connectors if isinstance(connectors, list | tuple) else ()):
            if isinstance(one, dict):
                one.setdefault("kv_connector_extra_config", {})  # as vLLM reads it, so that the entry's own is yielded
            if isinstance(one, Mapping):
                yield from _placed(one, f"{place}connectors[{i}].")


def _at(place: str, lines: Iterable[str]) -> list[str]:
    """What is said of an entry, with where that stands."""
    return [f"{place}{line}" for line in lines]


def setting_problems(role: object, extra: object, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with `kv_role` and `kv_connector_extra_config` by themselves, on any machine of the instance; each
    problem is one line. Where it listens is not tried: engines may run elsewhere than who reads their configuration."""
    if problems := _choice("kv_role", role, ROLES):
        return problems
    if not isinstance(extra, Mapping):
        return [f"kv_connector_extra_config is {extra!r:.60}: it must be an object"]
    try:
        config = parse_config(extra)
    except InvalidConfig as error:
        return [str(error)]
    prefills, decodes = role != "kv_consumer", role != "kv_producer"
    use = Use(
        serves=config.is_target(prefills=prefills, decodes=decodes),
        posts=config.starts_transfers(prefills=prefills, decodes=decodes),
    )

    def address() -> None:
        host, _ = config.side_channel(0, environ)
        if _listens(config, role):
            unproven = config.allow_unauthenticated_peers
            require_private_address(host, keys_of(config), unproven, config.host_key(environ))

    return _said(
        lambda: registry.check(
            config.transport, config.transport_settings(prefills=prefills, environ=environ), use
        ),
        lambda: keys_of(config),
        config.secret,
        lambda: None if config.trace_dir is None else own_directory("trace_dir", config.trace_dir),
        lambda: config.bootstrap(environ),
        address,
    )  # fmt: skip


def port_problems(
    role: object, extra: Mapping[str, Any], engines: Iterable[int], environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Where engines of this machine, with these data-parallel indices, cannot listen, of good settings."""
    config = parse_config(extra)
    if not _listens(config, role):
        return []
    known = tuple(engines)

    def listen(engine: int) -> None:
        require_free(*config.side_channel(engine, environ), config.host_key(environ))

    tries: list[Callable[[], object]] = [functools.partial(listen, engine) for engine in known]
    if role != "kv_consumer" and config.pushes and 0 in known:
        tries.append(functools.partial(_require_free_bootstrap, config, known, environ))
    return _said(*tries)


def _listens(config: Config, role: object) -> bool:
    return role != "kv_consumer" or config.pushes or config.conversations


def _require_free_bootstrap(config: Config, engines: Iterable[int], environ: Mapping[str, str]) -> None:
    port = config.bootstrap(environ)
    if port is None:
        return
    host, _ = config.side_channel(0, environ)
    for engine in engines:
        if config.side_channel(engine, environ)[1] == port:
            raise InvalidConfig(
                f"bootstrap_port is {port}: the side channel of engine {engine} listens there (side_channel_port); "
                "choose another"
            )
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise InvalidConfig(
            f"bootstrap_port: cannot listen on {host} port {port}: {error.strerror}; choose another"
        ) from error


def _said(*tries: Callable[[], object]) -> list[str]:
    """What each refuses, once."""
    problems: dict[str, None] = {}
    for attempt in tries:
        try:
            attempt()
        except InvalidConfig as error:
            problems[" ".join(str(error).split())] = None
    return list(problems)


def _choice(key: str, value: object, known: tuple[str, ...]) -> list[str]:
    return [] if value in known else [f"{key} is {value!r:.60}: it must be one of {', '.join(known)}"]


def _unknown(key: str) -> str:
    if key in in_tree.TOP_LEVEL:
        return f"{key}: {in_tree.TOP_LEVEL[key]}"
    if key in Config.__struct_fields__:
        return f"{key}: it belongs into kv_connector_extra_config"
    return unknown_key(key, _KEYS)
