"""Calls of vLLM's that are watched, as a later release may make them: each with one argument more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd_connector.compat import operations


class Heard:
    """An `Operator` that notes what it hears."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def hear(*args: Any, **kwargs: Any) -> Any:
            self.told.append((name, *args, *kwargs.values()))
            return lambda: None

        return hear


class Later:
    """The engine core, its scheduler and its executor of a release that has an argument more in each call."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.model_executor = SimpleNamespace(sleep=self._sleep_workers, discard=self._discard)
        self.defer_block_free = False

    def is_scheduler_paused(self) -> bool:
        return False

    def collective_rpc(self, method: Any, *, more: int = 0) -> None:
        self.got.append((method, more))

    def set_weight_version(self, weight_version: str, more: int = 0) -> None:
        self.got.append((weight_version, more))

    def add_lora(self, lora_request: Any, more: int = 0) -> bool:
        self.got.append((lora_request, more))
        return True

    def remove_lora(self, lora_id: int, more: int = 0) -> None:
        self.got.append((lora_id, more))

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True, more: int = 0) -> None:
        self.got.append((mode, bool(clear_cache), more))
        self._finish_pause(clear_cache, more)

    def _finish_pause(self, clear_cache: bool, more: int) -> None:
        self.got.append((clear_cache, more))

    def resume_scheduler(self, more: int = 0) -> None:
        self.got.append(more)

    def sleep(self, level: int = 1, mode: str = "abort", more: int = 0) -> None:
        self.got.append((level, mode, more))

    def _sleep_workers(self, level: int = 1, more: int = 0) -> None:
        self.got.append((level, more))

    def _discard(self, tags: tuple[str, ...], more: int = 0) -> None:
        self.got.append((tags, more))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, more: int = 0
    ) -> bool:
        self.got.append((reset_running_requests, reset_connector, more))
        return True


CALLS: list[tuple[Any, list[Any], str]] = [
    (lambda c: c.pause_scheduler(mode="keep", more=7), [("keep", True, 7), (True, 7)], "pausing"),
    (lambda c: c.pause_scheduler("wait", False, 7), [("wait", False, 7), (False, 7)], "pausing"),
    (lambda c: c.resume_scheduler(7), [7], "resumed"),
    (lambda c: c.sleep(0, more=7), [(0, "abort", 7)], ""),
    (lambda c: c.model_executor.sleep(2, 7), [(2, 7)], "weights_changing"),
    (lambda c: c.model_executor.discard(("weights",), more=7), [(("weights",), 7)], ""),
    (lambda c: c.reset_prefix_cache(reset_connector=True, more=7), [(False, True, 7)], "all_reset"),
    (lambda c: c.set_weight_version("v2", more=7), [("v2", 7)], "weights_named"),
    (lambda c: c.add_lora("lora", 7), [("lora", 7)], "adapter_loaded"),
    (lambda c: c.remove_lora(lora_id=3, more=7), [(3, 7)], "adapter_removed"),
    (lambda c: c.collective_rpc("update_weights", more=7), [("update_weights", 7)], "weights_changing"),
]


@pytest.mark.parametrize(("call", "got", "told"), CALLS)
def test_a_call_with_an_argument_that_is_not_known_here_goes_through(call: Any, got: list[Any], told: str) -> None:
    core, operator = Later(), Heard()
    operations._watch_scheduler(core, operator)
    operations._watch_weights(core, operator)
    operations._watch_pauses(core, operator)
    call(core)
    assert core.got == got
    assert (operator.told[-1][0] if operator.told else "") == told
