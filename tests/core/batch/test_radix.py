"""The prefix tree against the obvious one: a set of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch.radix import PrefixTree, build_tree
from lightning.batch.sample import IntArray

Rows = st.lists(st.lists(st.sampled_from([0, 1, 2, 300, 2**31 - 1]), min_size=1, max_size=12), min_size=1, max_size=12)


def arrays(rows: list[list[int]]) -> list[IntArray]:
    return [np.array(row, dtype=np.int32) for row in rows]


def path_ids(tree: PrefixTree, node: int) -> tuple[int, ...]:
    """All tokens from the root to the end of a node."""
    found: tuple[int, ...] = ()
    while node >= 0:
        found = (*tree.ids[tree.nodes[node].start : tree.nodes[node].stop].tolist(), *found)
        node = tree.nodes[node].parent
    return found


@given(Rows)
def test_every_distinct_prefix_is_one_token_of_the_tree(rows: list[list[int]]) -> None:
    tree = build_tree(arrays(rows))
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert len(tree.ids) == len(prefixes)
    found = set()
    for index, node in enumerate(tree.nodes):
        assert node.parent < index
        assert len(node) > 0
        whole = path_ids(tree, index)
        assert len(whole) == node.depth + len(node)
        found |= {whole[: end + 1] for end in range(node.depth, len(whole))}
    assert found == prefixes


@given(Rows)
def test_every_row_is_found_again(rows: list[list[int]]) -> None:
    tree = build_tree(arrays(rows))
    for index, row in enumerate(rows):
        places = tree.places(index, np.arange(len(row)))
        assert tree.ids[places].tolist() == row
    by_prefix: dict[tuple[int, ...], int] = {}
    for index, row in enumerate(rows):
        for end, place in enumerate(tree.places(index, np.arange(len(row))).tolist()):
            assert by_prefix.setdefault(tuple(row[: end + 1]), place) == place, "a prefix has one place"


@given(Rows, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows: list[list[int]], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = build_tree(arrays(rows)), build_tree(arrays(shuffled))
    assert one.ids.tobytes() == other.ids.tobytes()
    assert one.nodes == other.nodes


@given(Rows)
def test_nodes_are_cut_only_where_the_tree_branches(rows: list[list[int]]) -> None:
    tree = build_tree(arrays(rows))
    children = [0] * len(tree.nodes)
    for node in tree.nodes:
        if node.parent >= 0:
            children[node.parent] += 1
    assert all(count != 1 for count in children)


def test_a_tree_by_hand() -> None:
    tree = build_tree(arrays([[7, 8, 1, 2], [7, 8, 3], [7, 9], [7, 8, 1, 2]]))
    runs = {tuple(tree.ids[node.start : node.stop].tolist()): node for node in tree.nodes}
    assert set(runs) == {(7,), (8,), (1, 2), (3,), (9,)}
    assert runs[1, 2].depth == runs[(3,)].depth == 2
    assert tree.nodes[runs[1, 2].parent] == runs[(8,)]
    assert runs[(7,)].parent == -1


def test_no_rows_make_an_empty_tree() -> None:
    tree = build_tree([])
    assert (len(tree.ids), tree.nodes) == (0, ())


@pytest.mark.parametrize("tail", [[], [5]])
def test_a_row_that_goes_on_adds_only_its_end(tail: list[int]) -> None:
    tree = build_tree(arrays([[1, 2], [1, 2, 3, *tail]]))
    assert tree.ids.tolist() == [1, 2, 3, *tail]
    assert len(tree.nodes) == 1
