"""What the commands take from the environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.proxy.stand_ins import exposition, info
from vllm_pd_connector.cli import top
from vllm_pd_connector.cli.load import bench
from vllm_pd_connector.proxy.commands import announce, drain


@pytest.fixture
def there() -> Iterator[str]:
    """URL of an instance, as far as it is asked here."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = '{"data": [{"id": "m", "root": "m"}]}' if self.path == "/v1/models" else exposition(info())
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "ask", [top._get, drain._ask, announce.ask_instance, bench._model], ids=lambda ask: ask.__module__
)
def test_no_command_asks_an_instance_by_way_of_a_proxy(
    there: str, ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows nothing of a cluster's addresses, and an instance's key is not for it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert ask(there + ("/metrics" if ask in (top._get, drain._ask) else ""))
