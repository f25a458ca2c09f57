"""Hypothesis strategies: pairs of sides and what moves between them, with the oracle."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.support.geometry.world import CAN_PAD, LAYOUTS, Model, Move, Side, legal, make_move, table


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
def moves(draw: st.DrawFn) -> Move:
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
    stop = draw(st.integers(1, 40))
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
