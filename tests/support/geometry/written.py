"""Workers whose caches hold what a move has written."""

from tests.support.geometry.numbers import write
from tests.support.geometry.request import Move
from tests.support.geometry.world import Side, Worker, instance
from vllm_pd_connector.geometry.blocks import BlockTable


def written(move: Move, side: Side, tables: list[BlockTable], engine: str) -> list[Worker]:
    workers = instance(move.model, side, engine)
    for worker in workers:
        write(move.model, side, worker, tables, worker.memory, 0, move.stop)
    return workers
