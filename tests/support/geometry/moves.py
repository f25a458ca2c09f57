"""Hypothesis strategies: pairs of sides and what moves between them, with the oracle."""

from dataclasses import replace
from math import lcm

from hypothesis import strategies as st

from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import CAN_PAD, LAYOUTS, Model, Side, legal, shares_heads, token_groups


def sides(layouts: tuple[str, ...], heads: int) -> st.SearchStrategy[Side]:
    def finish(side: Side) -> Side:
        ratio = 1 if side.layout[0] == "B" else side.ratio  # vLLM never splits blocks that hold several layers
        window_ratio = min(ratio, side.window_ratio)
        side = replace(side, ratio=ratio, block_tokens=side.block_tokens * ratio)
        side = replace(side, window_ratio=window_ratio, window_slots=side.window_slots * window_ratio)
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
        window_slots=st.sampled_from([0, 2, 3, 4, 5, 6]),
        window_ratio=st.integers(1, 3),
        window_first=st.booleans(),
        apart=st.sampled_from([False, False, True]),
    ).map(finish)


@st.composite
def in_context(draw: st.DrawFn, side: Side, heads: int, splits: int) -> Side:
    """The side with any context parallelism that has all tokens of each of its KV heads (0: of a latent) on some ranks,
    and more of these where that takes some. `splits` is what tensor parallelism divides."""
    tp, pcp = draw(st.sampled_from([(side.tp, 1), (8, 1), (4, 2), (6, 1), (side.tp, 2), (1, 4)]))
    tp = tp if legal(splits, tp) else side.tp
    dcp = draw(st.sampled_from([dcp for dcp in range(1, 9) if shares_heads(heads, tp, pcp, dcp)]))
    interleave = draw(st.sampled_from([n for n in range(1, side.block_tokens + 1) if side.block_tokens % n == 0]))
    tokens, pp = side.block_tokens * dcp, side.pp if tp * pcp <= 4 else 1  # of more ranks each example takes a second
    return replace(side, tp=tp, pp=pp, pcp=pcp, dcp=dcp, interleave=interleave, block_tokens=tokens)


# Which of three layers look at everything, beside a window.
BESIDE = [(0,), (2,), (1, 2), (0, 2)]


@st.composite
def moves(draw: st.DrawFn, *, contexts: bool = True) -> Move:
    """Any move; with `contexts`, some of them under context parallelism."""
    kinds = ["heads", "cpu", "latent", "window", "full and window", "states", "latent states", "window states"]
    kind = draw(st.sampled_from(kinds))
    heads = draw(st.integers(1, 8))
    layouts: tuple[str, ...] = LAYOUTS
    if kind in ("heads", "window", "full and window"):
        key, value = draw(st.sampled_from([(2, 2), (3, 1), (1, 2)]))
        model = Model(3, heads, key, value)
    elif kind == "cpu":
        model, layouts = Model(3, heads, 2, 2), (*LAYOUTS, "CPU", "CPU", "CPU")
    elif kind == "latent":
        model = Model(3, 0, 3)
    else:
        heads, layouts = 4, CAN_PAD
        model = Model(3, 0, 64, states=3) if kind == "latent states" else Model(3, 4, 20, 20, states=2)
    if "window" in kind:
        full = () if kind == "window" else draw(st.sampled_from(BESIDE))
        model = replace(model, window=draw(st.integers(1, 20)), full=full)
    source, destination = draw(pairs(layouts, model, heads, contexts=contexts))
    stop = draw(st.integers(1, 40 if source.dcp * destination.dcp == 1 else 120))
    return make_move(model, source, destination, draw(st.integers(0, stop)), stop, seed=draw(st.integers(0, 99)))


@st.composite
def pairs(draw: st.DrawFn, layouts: tuple[str, ...], model: Model, heads: int, *, contexts: bool) -> tuple[Side, Side]:
    """Any two sides; with `contexts`, half of them under context parallelism. `heads` is what tensor parallelism
    divides."""
    source, destination = draw(sides(layouts, heads)), draw(sides(layouts, heads))
    if contexts and draw(st.booleans()):
        return draw(in_context(source, model.heads, heads)), draw(in_context(destination, model.heads, heads))
    return source, destination


@st.composite
def windows(draw: st.DrawFn, *, contexts: bool = True) -> Move:
    """A window as vLLM leaves it on both sides, alone or beside full attention: blocks wholly before what the next
    position looks at are null. With `contexts`, some of them under context parallelism."""
    full = draw(st.sampled_from([(), *BESIDE]))
    model = Model(3, draw(st.integers(1, 4)), window=draw(st.integers(1, 20)), full=full)
    source, destination = draw(pairs((*LAYOUTS, "CPU"), model, model.heads, contexts=contexts))
    stop = draw(st.integers(1, 40 if source.dcp * destination.dcp == 1 else 120))
    hit = lcm(*(group.block_tokens for group in token_groups(model, destination)))
    start = draw(st.integers(0, stop // hit)) * hit
    return make_move(model, source, destination, start, stop, seed=draw(st.integers(0, 99)), late=True)
