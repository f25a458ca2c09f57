"""Addresses and times as users give them on command lines and to the router's operators."""

from __future__ import annotations

import argparse
from typing import NoReturn
from urllib.parse import urlsplit


def base_url(text: str) -> str:
    """A base URL without its closing slash.

    Raises:
        argparse.ArgumentTypeError: not http(s)://host[:port][/path].
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # as whoever looks it up does, whose error is no OSError
    except ValueError:  # also a port that is no number, half an IPv6 address, a name with an empty or an endless label
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a base URL; give http://host:port, with an IPv6 address in brackets"
        )
    return text.rstrip("/")


def http_address(text: str) -> str:
    """A base URL that is all told by its host and port: plain HTTP, a port, and no path.

    Raises:
        argparse.ArgumentTypeError: another.
    """
    url = base_url(text)
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.port is None or parts.path:
        raise argparse.ArgumentTypeError(
            f"{text!r}: vLLM's router takes host:port of plain HTTP alone; give http://host:port"
        )
    return url


def host_and_port(text: str) -> str:
    """An address of a socket, as it is.

    Raises:
        argparse.ArgumentTypeError: not host:port.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address; give host:port")
    return text


def listening_port(text: str) -> int:
    """A port to listen at; 0 takes a free one.

    Raises:
        argparse.ArgumentTypeError: no number, or outside 0..65535.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 5) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535")
    return int(text)


def count(text: str) -> int:
    """A number of things, 0 too.

    Raises:
        argparse.ArgumentTypeError: no number, or below 0.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


class OneLineParser(argparse.ArgumentParser):
    """Wrong words are one line; `--help` has the others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def seconds(text: str) -> float:
    """A positive time.

    Raises:
        argparse.ArgumentTypeError: no number, or one that is no time to wait.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value
