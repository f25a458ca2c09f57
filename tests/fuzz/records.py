"""What a stranger hands to `vllm-pd trace`: it is shown, and moved again."""

from __future__ import annotations

import json

import msgspec

from tests.fuzz.forms import Decoder, as_json
from tests.support.geometry.request import make_move
from tests.support.geometry.world import Model, Side
from tests.support.records import records
from vllm_pd_connector.cli.trace.commands import _text
from vllm_pd_connector.cli.trace.replay import replay
from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.observability.record import record_of

ONE_LAYER = make_move(Model(layers=1, heads=2), Side(layout="HND"), Side(), 0, 7)
RECORDS = tuple(msgspec.json.encode(record) for record in records(ONE_LAYER, chunk_bytes=64))


def use_record(content: bytes) -> object:
    record = record_of("x", content)
    return _text(record), replay(record)


OF_RECORDS = Decoder(use_record, PDConnectorError, RECORDS, json.loads, as_json)
