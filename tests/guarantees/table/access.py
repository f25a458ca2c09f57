"""Who may talk, and what is believed."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    Guarantee(
        "with keys, only known clients get in",
        "SideChannelServer", "bound_router(self._context, host, port, self._watch, keys)", "bound_router(self._context, host, port, self._watch)",
        "test_a_client_without_keys_gets_no_answer",
    ),
    Guarantee(
        "with keys, an instance has its own blocks written into and no other's",
        "SideChannelServer", "isinstance(request, pm.PushInto) and request.home.server_key != asker", "False",
        "test_an_instance_has_its_own_blocks_written_into_and_no_other_s",
    ),
    Guarantee(
        "a server whose authenticator is gone lets nobody in",
        "secure_server", "        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)\n", "",
        "test_without_its_authenticator_a_server_lets_nobody_in",
    ),
    Guarantee(
        "a secret key is read only where its owner chose who else may read it",
        "is_private", "not mode & (0o037 if owner == 0 else 0o077)", "True",
        "test_nobody_else_may_do_anything_with_a_secret_key",
    ),
    Guarantee(
        "without keys, no instance listens where others reach it",
        "Producer", "            require_private_address(self._host", "            (lambda *_: None)(self._host",
        "test_a_producer_without_keys_does_not_listen_where_others_reach_it",
    ),
    Guarantee(
        "without keys, no instance on another host is asked",
        "Sources", "require_known_server(host, server_key", "(lambda *_: None)(host, server_key",
        "test_a_consumer_without_keys_asks_nobody_on_another_host",
    ),
    Guarantee(
        "with a secret, only parameters that a prefill instance made are used",
        "require_signature", "if not hmac.compare_digest(found, sign(remote, secret)):", "if False:",
        "test_another_secret_does_not_do",
    ),
    Guarantee(
        "parameters name no endpoint but a host",
        "Host", r'pattern=r"^[A-Za-z0-9._:%-]+\Z"', 'pattern=r".*"',
        "test_parse::test_a_field_that_is_not_as_declared_is_refused_by_name",
    ),
    Guarantee(
        "with verification, a receive that differs fails",
        "Receive", 'self._fail(f"verification: {problem}") if problem else self._confirm(now)', "self._confirm(now)",
        "test_a_difference_fails_the_receive_and_gives_the_lease_back",
    ),
    Guarantee(
        "with verification, what was written is compared before it is used",
        "Receive", "        if self.verifies and comparable:\n", "        if False:\n",
        "test_what_was_written_is_compared_if_the_prefill_side_keeps_it_for_that",
    ),
    Guarantee(
        "blocks that are compared with what was written are kept until then",
        "PushTable", "            if answer.lease is not None:\n", "            if False:\n",
        "test_a_reader_who_compares_is_given_the_lease_and_not_taken_for_served",
    ),
    Guarantee(
        "requests are bounded before they are in memory",
        "bound_router", "    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_FRAME)\n", "",
        "test_a_message_above_the_limit_never_reaches_the_server[a byte]",
    ),
    Guarantee(
        "requests under way are bounded",
        "SideChannelClient", "        if link is not None and isinstance(request, OF_EACH_RECEIVE) and len(link.pending) >= MAX_PENDING:", "        if False:",
        "test_requests_under_way_are_bounded",
    ),
    Guarantee(
        "replies that nobody takes are bounded",
        "SideChannelServer", "isinstance(reply, _LARGE) and not self._unsent.has_room(client)", "False",
        "test_a_client_that_takes_no_replies_cannot_make_the_server_hoard_them",
    ),
    Guarantee(
        "damaged metadata reaches no library",
        "unseal", "    if made.digest != expected:", "    if False:",
        "test_an_endpoint_with_any_wrong_byte_or_length_is_refused",
    ),
    Guarantee(
        "a defect that one request meets does not reach the others",
        "_binding", "    except Exception as error:  # a defect of ours that one request met", "    except ZeroDivisionError as error:  # a defect",
        "test_an_unexpected_error_fails_requests_and_not_the_thread",
    ),
]
# fmt: on
