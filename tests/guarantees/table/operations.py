"""Weights that change in place, pauses, resets and sleep."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    Guarantee(
        "a cache of other weights than those that a request goes on with is refused",
        "Consumer", "self._own.unlike(receive.weights or self._own.now)", "None",
        "test_a_cache_of_new_weights_is_refused_where_the_old_ones_are",
    ),
    Guarantee(
        "the name of a cache's weights cannot be changed on the way",
        "RemotePrefill", "ours.nonce, ours.weights)", "ours.nonce)",
        "test_other_weights_than_those_of_the_lease_are_not_vouched_for",
    ),
    Guarantee(
        "a prefill of other weights is not pushed",
        "Registrations", "if reason := unlike(weights, into.weights):", "if reason := \"\":",
        "test_other_weights_than_the_decode_side_s_are_not_written",
    ),
    Guarantee(
        "what is held of old weights is not read when they have changed",
        "Operations", "self._producer.end_leases(End.WEIGHTS)", "pass",
        "test_what_is_held_of_old_weights_is_not_read_any_more",
    ),
    Guarantee(
        "weights that nobody has named are nobody's",
        "OwnWeights", "if self.nameless:\n            return f", "if False:\n            return f",
        "test_weights_without_a_name_are_nobodys",
    ),
    Guarantee(
        "a prefill of two weights is not handed over",
        "Epochs", "if begun != self._epoch:", "if False:",
        "test_a_prefill_of_two_weights_is_not_handed_over",
    ),
    Guarantee(
        "a prefix that former weights computed is not handed over",
        "Epochs", "NO_EPOCH if hit and self._outdated else self._epoch", "self._epoch",
        "test_a_prefix_that_the_old_weights_computed_is_not_handed_over",
    ),
    Guarantee(
        "a prefill of two adapters is not handed over",
        "Epochs", "if came != now:", "if False:",
        "test_files_that_are_overwritten_under_an_adapter_of_requests_in_place_are_a_change",
    ),
    Guarantee(
        "a prefix that a former adapter computed is not handed over",
        "Epochs", "self.adapters.spoilt(request):", "False:",
        "test_a_prefix_that_the_former_adapter_computed_is_not_handed_over",
    ),
    Guarantee(
        "nor one that a former adapter's requests compute yet",
        "Epochs", "bool(self._came) or self._cached()", "self._cached()",
        "test_a_prefix_that_the_former_adapter_has_yet_to_compute_is_not_handed_over",
    ),
    Guarantee(
        "nor one that they compute after a reset",
        "Adapters", "            self._look(lora)\n", "            pass\n",
        "test_a_prefix_that_the_former_adapter_has_yet_to_compute_is_not_handed_over",
    ),
    Guarantee(
        "caches of an adapter that was replaced are not loaded",
        "Consumer", "receive.stale if among is None else reason", "receive.stale",
        "test_what_decode_came_for_before_is_not_used",
    ),
    Guarantee(
        "a request of a former adapter that comes late gets and gives nothing",
        "Adapters", "if name != loaded.name:", "if False:",
        "test_a_request_of_the_former_adapter_that_comes_late_is_refused",
    ),
    Guarantee(
        "a load that ends in the moment of a change is not used",
        "Consumer", "receive.outdated = True", "receive.outdated = False",
        "test_a_load_of_old_weights_is_given_up",
    ),
    Guarantee(
        "caches that came before a change are not used after it",
        "Consumer", "self._arrived.add(request_id)", "pass",
        "test_what_came_and_did_not_go_on_is_computed_here",
    ),
    Guarantee(
        "a pause that clears caches waits for what still moves",
        "PDConnector", "half.hold.asked or half.operations.busy", "half.hold.asked",
        "test_a_pause_waits_for_blocks_that_a_failed_read_may_write_into",
    ),
    Guarantee(
        "a pause of mode wait lets leases be read",
        "Operations", 'if self._pause != "wait":', "if True:",
        "test_a_pause_that_waits_has_leases_read_or_run_out",
    ),
    Guarantee(
        "a reset that fails says what is in the way",
        "_watch_scheduler", "operator.not_reset()", "pass",
        "test_a_plain_reset_leaves_leases_and_says_so",
    ),
    Guarantee(
        "an engine that has slept is another incarnation",
        "Producer", "self._server, self._incarnation = None, secrets.token_hex(16)", "self._server = None",
        "test_an_engine_that_sleeps_leaves_and_comes_back_as_another",
    ),
    Guarantee(
        "what a prefill instance reads of a conversation is not read into blocks that a step in flight writes",
        "watch", "scheduler.defer_block_free |= loads", "scheduler.defer_block_free |= False",
        "test_a_turn_is_not_read_into_blocks_that_a_step_in_flight_may_still_write",
    ),
    Guarantee(
        "a request that queues while an instance sleeps does not keep it from waking",
        "Producer",
        "except ProtocolError as error:  # its adapter", "except KeyError as error:  # its adapter",
        "test_a_prefill_whose_adapter_is_replaced_while_its_engine_sleeps_keeps_it_from_nothing",
    ),
]
