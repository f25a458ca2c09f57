"""Hypothesis strategies: pairs of sides and what moves between them, with the oracle."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import CAN_PAD, LAYOUTS, Model, Side, legal, shares_heads, table


def sides(layouts: tuple[str, ...], heads: int) -> st.SearchStrategy[Side]:
    def finish(side: Side) -> Side:
        ratio = 1 if side.layout[0] == "B" else side.ratio  # vLLM never splits blocks that hold several layers
        side = replace(side, ratio=ratio, block_tokens=side.block_tokens * ratio)
        return side if side.layout in CAN_PAD else replace(side, padding=0)

    return st.builds(
        Side,
        tp=st.sampled_from([tp for tp in range(1, 9) if legal(heads, tp)]),
        pp=st.integers(1, 3),
        layout=st.sampled_from(layouts),
        block_tokens=st.integers(2, 6),
        ratio=st.integers(1, 3),
        padding=st.sampled_from([0, 0, 6]),
        conv=st.sampled_from(["DS", "SD"]),
    ).map(finish)


@st.composite
def in_context(draw: st.DrawFn, side: Side, heads: int, splits: int) -> Side:
    """The side with any context parallelism that has all tokens of each of its KV heads (0: of a latent) on some ranks,
    and more of these where that takes some. `splits` is what tensor parallelism divides."""
    tp, pcp = draw(st.sampled_from([(side.tp, 1), (8, 1), (4, 2), (6, 1), (side.tp, 2), (1, 4)]))
    tp = tp if legal(splits, tp) else side.tp
    dcp = draw(st.sampled_from([dcp for dcp in range(1, 9) if shares_heads(heads, tp, pcp, dcp)]))
    interleave = draw(st.sampled_from([n for n in range(1, side.block_tokens + 1) if side.block_tokens % n == 0]))
    return replace(side, tp=tp, pcp=pcp, dcp=dcp, interleave=interleave, pp=1, block_tokens=side.block_tokens * dcp)


@st.composite
def moves(draw: st.DrawFn, *, contexts: bool = True) -> Move:
    """Any move; with `contexts`, some of them under context parallelism."""
    kind = draw(st.sampled_from(["heads", "cpu", "latent", "window", "states", "latent states"]))
    heads = draw(st.integers(1, 8))
    layouts: tuple[str, ...] = LAYOUTS
    if kind in ("heads", "window"):
        key, value = draw(st.sampled_from([(2, 2), (3, 1), (1, 2)]))
        model = Model(3, heads, key, value, window=draw(st.integers(1, 20)) if kind == "window" else 0)
    elif kind == "cpu":
        model, layouts = Model(3, heads, 2, 2), (*LAYOUTS, "CPU", "CPU", "CPU")
    elif kind == "latent":
        model = Model(3, 0, 3)
    else:
        heads, layouts = 4, CAN_PAD
        model = Model(3, 4, 20, 20, states=2) if kind == "states" else Model(3, 0, 64, states=3)
    source, destination = draw(sides(layouts, heads)), draw(sides(layouts, heads))
    if contexts and kind != "window" and draw(st.booleans()):
        source, destination = (draw(in_context(side, model.heads, heads)) for side in (source, destination))
    stop = draw(st.integers(1, 40 if source.dcp * destination.dcp == 1 else 120))
    return make_move(model, source, destination, draw(st.integers(0, stop)), stop, seed=draw(st.integers(0, 99)))


@st.composite
def windows(draw: st.DrawFn) -> Move:
    """A window as vLLM leaves it on both sides: blocks wholly before what the next position looks at are null."""
    model = Model(3, draw(st.integers(1, 4)), window=draw(st.integers(1, 20)))
    source, destination = (draw(sides((*LAYOUTS, "CPU"), model.heads)) for _ in range(2))
    stop = draw(st.integers(1, 40))
    whole = make_move(replace(model, window=0), source, destination, 0, stop, seed=draw(st.integers(0, 99)))
    needed = max(0, stop + 1 - model.window)
    start = draw(st.integers(0, stop // destination.block_tokens)) * destination.block_tokens
    for side, tables in ((whole.source, whole.source_tables), (whole.destination, whole.destination_tables)):
        ids = tables[0].ids
        ids[: needed // side.block_tokens] = 0
        tables[0] = table(*ids.tolist())
    held = needed // source.block_tokens * source.block_tokens
    return replace(whole, model=model, start=start, late_start=held)
