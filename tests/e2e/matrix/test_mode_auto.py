"""Mode auto: the decode instance measures both ways to a prefill instance and takes the faster."""

from __future__ import annotations

import re

from tests.support.servers.cluster import Cluster
from tests.support.servers.matrix import AUTO_ROW
from tests.support.servers.over import over
from tests.support.servers.workload import SCENARIOS


@over([AUTO_ROW])
def test_both_ways_are_measured_and_the_faster_is_taken(pair: Cluster) -> None:
    pair.check(SCENARIOS["moved"])
    page = pair.metrics(pair.decode)
    figures = dict(re.findall(r"^vllm:pd_(selftest_\w+|push_chosen)\{[^}]*\} (\S+)$", page, re.MULTILINE))
    read, write = (float(figures[f"selftest_{way}_bytes_per_second"]) for way in ("read", "write"))
    assert read > 0 and write > 0
    assert float(figures["push_chosen"]) == (write > read)
    said = re.findall(r"self-test with prefill engine .*", pair.decode.log.read_text(errors="replace"))
    [told] = said
    assert ("is asked to write" if write > read else "is read from") in told
    print(told)
