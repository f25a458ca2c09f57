"""The router's own Prometheus series, in a registry of their own so that several routers can live in one process."""

from __future__ import annotations

import contextlib
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_pd_connector.proxy.instance import InstanceRole
from vllm_pd_connector.proxy.kv_events.known_prefixes import Loss

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0)


class ProxyMetrics:
    """One object per router; README.md explains the series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.requests = counter(
            "vllm_pd_proxy_requests",
            "Requests answered, by the status that the client got (499: the client left).",
            ["status"],
        )
        for status in (500, 502, 503, 504):  # a row that begins with its first failure has not grown
            self.requests.labels(str(status))
        self.broken_streams = counter(
            "vllm_pd_proxy_broken_streams",
            "Streams that ended with an error event after their first byte, the router's or an instance's own.",
        )
        self.legs = counter("vllm_pd_proxy_legs", "Requests sent to an instance.", ["instance", "role"])
        self.retries = counter(
            "vllm_pd_proxy_retries", "Instances passed over because they refused the connection.", ["role"]
        )
        self.affinity = counter(
            "vllm_pd_proxy_affinity_choices", "Instances chosen because they know the prompt's beginning.", ["role"]
        )
        self.turns = counter(
            "vllm_pd_proxy_turns",
            "Requests, by whether they go on with a conversation of which a decode instance is known to hold something "
            "(--conversations on).",
            ["conversation"],
        )
        self.seconds = Histogram(
            "vllm_pd_proxy_seconds",
            "From the request's arrival to the prefill's answer (prefill), to the first byte of the decode's answer "
            "(first_byte), and to the end (total).",
            ["phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = gauge("vllm_pd_proxy_in_flight", "Requests at an instance now.", ["instance"])
        self.usable = gauge(
            "vllm_pd_proxy_instance_usable",
            "1 while an instance is healthy, 0 else; no row of one that is being removed.",
            ["instance"],
        )
        self.known_blocks = gauge(
            "vllm_pd_proxy_known_blocks",
            "Blocks that an instance has announced to hold (--policy kv-events).",
            ["instance"],
        )
        self.event_losses = gauge(
            "vllm_pd_proxy_kv_event_losses",
            "How often what was known of an instance's cache was forgotten since it is followed, by the reason.",
            ["instance", "reason"],
        )

    def forget(self, url: str) -> None:
        """Drop the rows of an instance that was removed."""
        self.in_flight.remove(url)
        for role in InstanceRole:
            with contextlib.suppress(KeyError):  # it had no such leg
                self.legs.remove(url, role)
        self.leaves(url)
        self.unknown(url)

    def unknown(self, url: str) -> None:
        """Drop the rows of what an instance holds, of which nothing is known any more."""
        with contextlib.suppress(KeyError):  # nobody listened to it
            self.known_blocks.remove(url)
        for loss in Loss:
            with contextlib.suppress(KeyError):
                self.event_losses.remove(url, loss)

    def leaves(self, url: str) -> None:
        """Drop the row that says whether an instance is used."""
        with contextlib.suppress(KeyError):
            self.usable.remove(url)

    def exposition(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)
