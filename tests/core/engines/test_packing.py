"""Packs of a prefix tree against the obvious: which tokens are in them, and what each token attends to."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch.radix import PrefixTree, build_tree
from lightning.engines.torch.path_attention import Enter, Extend, Leave, Pack, Retract, moves, pack_tree

Rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


def tree_of(rows: list[list[int]]) -> PrefixTree:
    return build_tree([np.array(row, np.int32) for row in rows])


def ancestors(tree: PrefixTree) -> dict[int, list[int]]:
    """The places of the tokens up to and with each place's own, from the root on."""
    found: dict[int, list[int]] = {}
    for node in tree.nodes:
        before = found[tree.nodes[node.parent].stop - 1] if node.parent >= 0 else []
        for place in range(node.start, node.stop):
            before = found[place] = [*before, place]
    return found


def places_of(pack: Pack) -> list[int]:
    return [place for piece in pack.pieces for place in range(piece.start, piece.stop)]


def attended(pack: Pack, path: list[int]) -> list[list[int]]:
    """What each token attends to by chains and crossings, in places of the tree; a place twice would count twice."""
    places = places_of(pack)
    found = [list(path) for _ in places]
    for start, stop in pack.chains:
        for token in range(start, stop):
            found[token] += places[start : token + 1]
    for crossing in pack.crossings:
        for token in range(crossing.first, crossing.last):
            found[token] += places[crossing.start : crossing.stop]
    return [sorted(own) for own in found]


@given(Rows, st.integers(2, 40), st.data())
def test_each_token_is_computed_once_and_sees_its_ancestors(
    rows: list[list[int]], budget: int, data: st.DataObject
) -> None:
    tree = tree_of(rows)
    needed = [False] * len(tree.nodes)
    for index in sorted(data.draw(st.sets(st.integers(0, len(tree.nodes) - 1), min_size=1)), reverse=True):
        while index >= 0:
            needed[index] = True
            index = tree.nodes[index].parent
    above = ancestors(tree)
    path: list[int] = []
    seen: list[int] = []
    opened: list[Pack] = []
    for move in moves(pack_tree(tree, needed, budget)):
        pack = move.pack
        if isinstance(move, Enter):
            places = places_of(pack)
            assert len(path) == pack.depth
            assert len(pack) == len(places) <= (budget // 2 if pack.depth or pack.branches else budget)
            assert attended(pack, path) == [sorted(above[place]) for place in places]
            assert tree.ids[places].tolist() == pack.ids(tree).tolist()
            assert pack.positions().tolist() == [len(above[place]) - 1 for place in places]
            first, last = pack.seen()
            keys = [*path, *places]
            assert [
                sorted(keys[key] for key in range(len(keys)) if first[key] <= token < last[key])
                for token in range(len(places))
            ] == [sorted(above[place]) for place in places]
            seen += places
            opened += [pack] if pack.branches else []
        elif isinstance(move, Extend):
            assert opened[-1] is pack
            assert len(path) == pack.depth
            path += [places_of(pack)[token] for token in move.branch.path]
        elif isinstance(move, Retract):
            assert opened[-1] is pack
            del path[pack.depth :]
        elif isinstance(move, Leave):
            assert opened.pop() is pack
    assert not opened
    assert not path
    wanted = [
        place for node, need in zip(tree.nodes, needed, strict=True) if need for place in range(node.start, node.stop)
    ]
    assert sorted(seen) == wanted


@given(Rows)
def test_a_tree_that_fits_is_one_pack(rows: list[list[int]]) -> None:
    tree = tree_of(rows)
    (pack,) = pack_tree(tree, [True] * len(tree.nodes), max(2, len(tree.ids)))
    assert len(pack) == len(tree.ids)
    assert not pack.branches


def comb(teeth: int) -> PrefixTree:
    """One long row that another leaves at every second token."""
    spine = [place % 2 for place in range(2 * teeth)]
    return tree_of([spine, *([*spine[: 2 * place + 1], 2, 3] for place in range(teeth))])


def test_many_branches_on_one_path_are_few_packs_with_few_crossings_each_and_no_recursion() -> None:
    teeth = 2 * sys.getrecursionlimit()
    tree = comb(teeth)
    assert len(tree.nodes) > teeth
    budget = 1000
    todo = moves(pack_tree(tree, [True] * len(tree.nodes), budget))
    packs = [move.pack for move in todo if isinstance(move, Enter)]
    assert len(packs) <= 2 * len(tree.ids) // (budget // 2)
    for pack in packs:
        counts = np.zeros(len(pack), np.int64)
        for crossing in pack.crossings:
            counts[crossing.first : crossing.last] += 1
        assert counts.max() <= np.log2(len(pack))


def test_small_trees_share_packs_and_a_long_node_is_cut() -> None:
    rows = [[tree, *range(10, 10 + length)] for tree, length in enumerate((5, 5, 2, 40))]
    tree = tree_of(rows)
    packs = pack_tree(tree, [True] * len(tree.nodes), 16)
    assert sorted(len(pack) for pack in packs) == [8, 15]  # 41 tokens are cut into pieces of 8; 6 + 6 + 3 fit together
    todo = moves(packs)
    assert sorted(len(move.pack) for move in todo if isinstance(move, Enter)) == [1, 8, 8, 8, 8, 8, 15]
    assert max(move.pack.depth for move in todo) == 40
