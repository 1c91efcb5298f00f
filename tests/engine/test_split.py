"""Where graphs are cut, on graphs written down by hand."""

from __future__ import annotations

from scrimp._engine.split import Shape, Split, splits


def shape(edges: dict[int, list[int]], *, ranked: list[int] | None = None, heavy: set[int] = frozenset()) -> Shape:  # type: ignore[assignment]
    """A graph that begins at node 0; ``edges`` tells who follows, nodes without edges are leaves."""
    count = 1 + max([*edges, *(target for targets in edges.values() for target in targets)])
    followers = tuple(tuple((i, target, 0) for i, target in enumerate(edges.get(node, []))) for node in range(count))
    inner = ranked or sorted(edges, reverse=True)
    return Shape(
        edges=followers,
        ranked=(*inner, *(node for node in range(count) if node not in edges)),
        roots=(0,),
        light=frozenset(edges) - heavy,
    )


def parts(split: Split) -> list[set[int]]:
    """The nodes of head, branches and tail."""
    return [set(part.nodes) for part in (split.head, *split.branches, split.tail)]


FORK = {0: [1, 2], 1: [3, 10], 2: [4, 11], 3: [5, 12], 4: [5, 13], 5: [14]}
HEAVY = {1, 2, 3, 4, 5}


def test_a_fork_and_a_join_give_two_branches_and_a_tail() -> None:
    """The head ends above what holds saved tensors; the tail begins where branches meet."""
    first = next(splits(shape(FORK, heavy=HEAVY)))
    assert parts(first) == [{0}, {1, 3}, {2, 4}, {5}]
    assert [crossing.target for crossing in first.tail.incoming] == [5, 5]


def test_a_chain_has_no_branches() -> None:
    """Nothing to run at the same time."""
    assert list(splits(shape({0: [1], 1: [2, 10], 2: [3, 11], 3: [12]}, heavy={1, 2, 3}))) == []


def test_a_trunk_above_the_fork_belongs_to_the_head() -> None:
    """Branches may begin behind a layer of the head's own."""
    below = {node + 1: [target + 1 for target in targets] for node, targets in FORK.items()}
    first = next(splits(shape({0: [1, 20], **below}, heavy={0, *(node + 1 for node in HEAVY)})))
    assert parts(first) == [{0, 1}, {2, 4}, {3, 5}, {6}]


def test_a_leaf_that_two_branches_share_forbids_the_cut() -> None:
    """Its gradient would be complete in neither."""
    shared = {**FORK, 2: [4, 10]}
    assert all({1, 3} not in parts(split) for split in splits(shape(shared, heavy=HEAVY)))


def test_terms_keep_their_sequence() -> None:
    """No cut where the tail adds to a sum before a branch does: PyTorch's sum has another sequence."""
    # Node 2 is the tail's (both branches lead to it), and it and branch 3 add to node 5; 3 runs last of all.
    edges = {0: [1, 3, 6], 1: [2, 10], 6: [2, 11], 3: [5, 12], 2: [5, 13], 5: [14]}
    early = shape(edges, ranked=[5, 2, 3, 1, 6, 0], heavy={1, 2, 3, 5, 6})
    late = shape(edges, ranked=[5, 3, 2, 1, 6, 0], heavy={1, 2, 3, 5, 6})
    assert any({2, 5} in parts(split) for split in splits(early))
    assert not any({2, 5} in parts(split) for split in splits(late))


def test_a_part_ends_where_nothing_is_left_to_free() -> None:
    """A branch whose last node holds tensors and has no leaf cannot be ended after it."""
    bare = {**FORK, 3: [5], 4: [5]}
    assert list(splits(shape(bare, heavy=HEAVY))) == []
    assert list(splits(shape(bare, heavy=HEAVY - {3, 4}))) != []


def test_a_branch_must_come_before_what_follows_it() -> None:
    """No cut where PyTorch would begin the tail before the branch is done."""
    # In branch 1 the tail's node 5 is a later operator than 7, which is the branch's and ready at the same time.
    edges = {0: [1, 2], 1: [5, 7, 10], 2: [5, 11], 7: [12], 5: [13]}
    assert any({1, 7} in parts(split) for split in splits(shape(edges, ranked=[5, 7, 2, 1, 0], heavy={1, 2, 5, 7})))
    assert not any({1, 7} in parts(split) for split in splits(shape(edges, ranked=[7, 5, 2, 1, 0], heavy={1, 2, 5, 7})))
