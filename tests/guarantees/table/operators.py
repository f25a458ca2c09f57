"""What operators are told, and what their commands leave behind."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    Guarantee(
        "what is explained of a pair is what a receive moves",
        "_work", "tail=Tail.PAGE, late=True)", "late=True)",
        "test_a_receive_takes_what_was_explained",
    ),
    Guarantee(
        "an instance that could not listen ends before it loads its model",
        "check_early", "            _refuse(ports(", "            (lambda _: None)(ports(",
        "test_a_taken_port_is_seen_before_an_engine_starts",
    ),
    Guarantee(
        "an engine is not refused for the ports at which it listens itself",
        "check_early", "asked = [said for one, said in parsed if one() is transfer]", "asked = [_document(transfer)]",
        "test_a_process_that_was_given_its_configuration_asks_nothing",
    ),
    Guarantee(
        "an instance does not start whose connector vLLM has replaced",
        "check_early", "_replaced(said, transfer.kv_connector) if extras(said) else []", "[]",
        "test_offloading_that_takes_the_connectors_place_is_refused",
    ),
    Guarantee(
        "media whose embeddings nobody brings are refused by the API server",
        "_require_embeddings", "    media.allow_missing_mm_embeddings = False\n", "",
        "test_embeddings_of_media_may_be_left_out_only_where_something_brings_them",
    ),
    Guarantee(
        "a key of another connector is refused and not dropped",
        "parse_config", "if key not in Config.__struct_fields__:", "if False:",
        "test_a_mistake_is_one_line",
    ),
    Guarantee(
        "keys are made all or not at all",
        "new_keys", "path.unlink(missing_ok=True)", "pass",
        "test_nothing_is_left_behind_when_the_secret_cannot_be_written",
    ),
    Guarantee(
        "a name of keys leads out of no directory",
        "new_keys", "if not _NAME.fullmatch(name):", "if False:",
        "test_a_name_is_one_of_a_file_in_that_directory",
    ),
]
