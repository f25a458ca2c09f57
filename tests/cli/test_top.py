"""`vllm-pd top`: tables of what instances say, once or again and again; one line where nobody answers."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from tests.support.ports import free_port
from tests.support.proxy.stand_ins import exposition, info
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli import top as top_module
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.cli.top import look, view

PEER = "\\u001b[2Jdecode[red]"


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, str]]]:
    """Where pages are served, and which by their path; the instance's given bytes grow by a million with each look."""
    pages: dict[str, str] = {}
    given = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal given
            given += 1_000_000
            text = pages.get(self.path)
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").replace("GIVEN", str(given)).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    link = f'vllm:pd_peer_given_bytes_total{{peer="{PEER}",transport="nixl"}} GIVEN\n'.replace("\\u001b", "\x1b")
    pages["/metrics"] = exposition(info(engine_id="p")) + "vllm:pd_given_bytes_total GIVEN\n" + link
    pages["/instances"] = json.dumps({"instances": [{"url": url}]})
    yield url, pages
    server.shutdown()
    server.server_close()


def test_json_has_rates_of_two_looks(served, capsys):
    assert main(["top", served[0], "--json", "--interval", "0.01"]) == Exit.OK
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["command"]) == (1, "top")
    [row], [link] = answer["instances"], answer["links"]
    assert row["role"] == "kv_producer" and row["given_bytes"] > 0 and link["bytes_per_second"] > 0


def test_instances_behind_a_router_are_looked_at_and_nothing_printed_is_obeyed(served, capsys):
    assert main(["top", "--router", served[0], "--once", "--interval", "0.01"]) == Exit.OK
    text = capsys.readouterr().out
    assert served[0] in text and "?[2Jdecode[red]" in text and "\x1b" not in text


def test_an_instance_that_is_away_is_a_line_and_all_of_them_a_failure(served, capsys):
    away = f"http://127.0.0.1:{free_port()}"
    assert main(["top", served[0], away, "--once", "--interval", "0.01"]) == Exit.OK
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(away)]
    assert "refused" in line
    assert main(["top", away, "--once", "--interval", "0.01"]) == Exit.UNREACHABLE
    assert away in capsys.readouterr().err


@pytest.mark.parametrize("says", ["[]", '{"instances": [1]}', "{", '{"instances": [{"url": "gopher:x"}]}'])
def test_a_router_that_is_none_is_one_line(served, capsys, says):
    served[1]["/instances"] = says
    assert main(["top", "--router", served[0], "--once"]) == Exit.UNREACHABLE
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nobody_to_look_at_is_wrong_usage():
    assert main(["top"]) == Exit.USAGE


def test_the_live_view_has_both_tables_and_obeys_no_markup(served):
    before = look([served[0]], None)
    screen = io.StringIO()
    Console(file=screen, width=250).print(view(list(look([served[0]], None).values()), before))
    assert "quarantine" in screen.getvalue() and "decode[red]" in screen.getvalue()


def test_an_interrupt_ends_the_view(served, monkeypatch):
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top_module.time, "sleep", interrupted)
    assert main(["top", served[0]]) == Exit.INTERRUPTED
