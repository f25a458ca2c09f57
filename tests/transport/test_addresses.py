"""The advertised address: from configuration or a route, never from a name, and never one that the peer cannot use."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.transport import addresses
from vllm_pd_connector.transport.addresses import check_reachable, host_identity, local_address, source_address

HERE = ipaddress.ip_address("127.0.0.1")


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name service must not be asked, whatever happens."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("the name service was asked")

    for function in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostname", "getfqdn"):
        monkeypatch.setattr(socket, function, refuse)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1"])
def test_a_configured_address_of_this_machine_is_taken(address: str) -> None:
    assert str(local_address(address, "")) == address


def test_a_configured_address_wins_over_a_route() -> None:
    assert str(local_address("127.0.0.1", "198.51.100.1")) == "127.0.0.1"


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1"])
def test_the_route_to_a_peer_gives_the_address(peer: str) -> None:
    assert str(local_address("", peer)) == peer


def test_without_configuration_the_default_route_gives_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    routes: dict[str, str | None] = {"198.51.100.1": "10.1.2.3", "2001:db8::1": "fd00::7"}

    def source(destination: Any) -> Any:
        text = routes[str(destination)]
        return None if text is None else ipaddress.ip_address(text)

    monkeypatch.setattr(addresses, "source_address", source)
    assert str(local_address("", "")) == "10.1.2.3"
    routes["198.51.100.1"] = None
    assert str(local_address("", "")) == "fd00::7"
    routes["2001:db8::1"] = None
    assert str(local_address("", "")) == "127.0.0.1"


def test_the_source_address_is_the_kernels_choice_and_one_of_this_machine() -> None:
    assert source_address(HERE) == HERE
    default = source_address(ipaddress.ip_address("198.51.100.1"))
    if default is not None:
        assert local_address(str(default), "") == default


@pytest.mark.parametrize(
    ("configured", "route_to", "message"),
    [
        ("prefill-0.example", "", "address: 'prefill-0.example' is not an IP address"),
        ("", "prefill-0.example", "route_to: 'prefill-0.example' is not an IP address"),
        ("0.0.0.0", "", "is not the address of one machine"),
        ("::", "", "is not the address of one machine"),
        ("224.0.0.1", "", "is not the address of one machine"),
        ("fe80::1", "", "is not the address of one machine"),
        ("fe80::1%eth0", "", "is not the address of one machine"),
        ("::1%lo", "", "is not the address of one machine"),
        ("::ffff:0.0.0.0", "", "is not the address of one machine"),
        ("198.51.100.7", "", "198.51.100.7 is no address of this machine"),
    ],
)
def test_an_address_that_cannot_be_advertised_is_a_configuration_error(
    configured: str, route_to: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        local_address(configured, route_to)


def test_no_route_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "source_address", lambda destination: None)
    with pytest.raises(InvalidConfig, match=r"no route from this machine to 10\.9\.9\.9"):
        local_address("", "10.9.9.9")


def test_loopback_is_meant_for_this_machine_alone() -> None:
    for text in ("127.0.0.1", "127.0.1.1"):
        assert str(check_reachable(text, host_identity(), HERE)) == text
        with pytest.raises(TransferError, match="on another machine and advertises the loopback address"):
            check_reachable(text, "another boot:4026531840", ipaddress.ip_address("10.0.0.1"))
    with pytest.raises(TransferError, match="loopback"):
        check_reachable("::1", "another boot:4026531840", ipaddress.ip_address("fd00::1"))


def test_version_4_in_the_clothes_of_version_6_is_version_4() -> None:
    assert str(local_address("::ffff:127.0.0.1", "")) == "127.0.0.1"
    assert str(local_address("", "::ffff:127.0.0.1")) == "127.0.0.1"
    ours = ipaddress.ip_address("10.0.0.1")
    assert str(check_reachable("::ffff:10.0.0.5", "another boot:1", ours)) == "10.0.0.5"
    with pytest.raises(TransferError, match="on another machine and advertises the loopback address 127"):
        check_reachable("::ffff:127.0.0.1", "another boot:1", ours)


def test_a_loopback_address_of_ours_is_for_peers_on_this_machine_alone() -> None:
    with pytest.raises(TransferError, match=r"this worker is at the loopback address 127\.0\.0\.1; set .* here"):
        check_reachable("10.0.0.5", "another boot:1", HERE)
    assert str(check_reachable("10.0.0.5", host_identity(), HERE)) == "10.0.0.5"


def test_a_routable_address_of_another_machine_is_accepted() -> None:
    assert str(check_reachable("10.0.0.5", "another boot:1", ipaddress.ip_address("10.0.0.1"))) == "10.0.0.5"
    assert str(check_reachable("fd00::5", "another boot:1", ipaddress.ip_address("fd00::1"))) == "fd00::5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill-0.example", "is no IP address"),
        ("", "is no IP address"),
        ("0.0.0.0", "leads to no machine"),
        ("ff02::1", "leads to no machine"),
        ("fe80::1", "leads to no machine"),
        ("fd00::5%nowhere", "leads to no machine"),
        ("::ffff:224.0.0.1", "leads to no machine"),
        ("fd00::5", "address: 10.0.0.1 here, fd00::5 there"),
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        check_reachable(text, "another boot:1", ipaddress.ip_address("10.0.0.1"))
