"""The tree of pages against a table of everything that is on pages, and by example."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from rollout.engine.pages import Node, PageTree

SIZE, COUNT = 3, 10
WORDS = st.integers(0, 1)  # so few that many sequences start alike

Key = tuple[int, tuple[int, ...]]  # which root, and all tokens up to a page's last


def tokens(words: Many[int]) -> np.ndarray:
    return np.array(words, np.int64)


def common(a: Many[int], b: Many[int]) -> int:
    """How many tokens both start with."""
    return len(os.path.commonprefix([tuple(a), tuple(b)]))


@dataclasses.dataclass
class Kept:
    """What the table says of a page in the tree."""

    page: int
    users: int = 0
    used: int = 0  # when it was last let go


@dataclasses.dataclass(eq=False)
class User:
    """A sequence: what is on its pages, those of `path` and then those that it was lent."""

    version: str
    root: int
    content: tuple[int, ...]
    path: list[Node]
    lent: list[int]

    @property
    def keys(self) -> list[Key]:
        ends = np.cumsum([len(node.tokens) for node in self.path]).tolist()
        return [(self.root, self.content[:end]) for end in ends]


class Pages(RuleBasedStateMachine):
    """Sequences come, write, let others find what they wrote, and go; the table says at every step what must be where."""

    users = Bundle("users")

    def __init__(self):
        super().__init__()
        self.tree = PageTree(COUNT, SIZE)
        self.kept: dict[Key, Kept] = {}
        self.there: list[User] = []
        self.roots: dict[str, int] = {}
        self.clock = 0

    # --- the table ---

    def root(self, version: str) -> int:
        return self.roots.setdefault(version, 1000 * len(self.roots) + self.clock)

    def below(self, key: Key) -> list[Key]:
        """The pages that go on from this one; from one that is not full, none does."""
        root, prefix = key
        return (
            []
            if len(prefix) % SIZE
            else [
                (r, p)
                for r, p in self.kept
                if r == root and len(p) > len(prefix) and p[: len(prefix)] == prefix
            ]
        )

    def hold(self, keys: Many[Key]) -> None:
        for key in keys:
            self.kept[key].users += 1

    def let_go(self, keys: Many[Key]) -> None:
        """The last page is the first to be left."""
        for key in reversed(keys):
            self.clock += 1
            self.kept[key].users -= 1
            self.kept[key].used = self.clock
            if not self.kept[key].users and key[0] not in self.roots.values():
                del self.kept[key]

    @property
    def free(self) -> int:
        return COUNT - len(self.kept) - sum(len(user.lent) for user in self.there)

    def make_room(self, count: int) -> bool:
        """Whether so many pages are to be had; if so, pages that nobody holds go: those without others below, oldest first."""
        if self.free + sum(not page.users for page in self.kept.values()) < count:
            return False
        while self.free < count:
            leaves = [
                key for key, page in self.kept.items() if not page.users and not self.below(key)
            ]
            del self.kept[min(leaves, key=lambda key: self.kept[key].used)]
        return True

    def allocate(self, count: int) -> list[int] | None:
        """Pages of the tree's, checked against the table."""
        room = self.make_room(count)
        pages = self.tree.allocate(count)
        assert (pages is not None) == room
        if pages is not None:
            taken = [page.page for page in self.kept.values()] + [
                page for user in self.there for page in user.lent
            ]
            assert (
                len(pages) == len(set(pages)) == count
                and not set(pages) & set(taken)
                and set(pages) <= set(range(COUNT))
            )
        return pages

    # --- what happens ---

    @rule(
        target=users,
        version=st.sampled_from("ab"),
        content=st.lists(WORDS, max_size=10).map(tuple),
        room=st.integers(0, 5),
    )
    def come(self, version: str, content: tuple[int, ...], room: int):
        root = self.root(version)
        path, source, more = self.tree.match(version, tokens(content))
        longest = max((common(content, prefix) for r, prefix in self.kept if r == root), default=0)
        assert (len(path), more) == divmod(longest, SIZE)
        user = User(version, root, content, path, [])
        assert [node.page for node in path] == [self.kept[key].page for key in user.keys]
        self.hold(user.keys)
        sources: list[Key] = []
        if source is None:
            assert more == 0
        else:
            sources = [key for key, page in self.kept.items() if page.page == source.page]
            ((_, prefix),) = sources
            assert (
                len(path) == (len(prefix) - 1) // SIZE
                and common(content, prefix) == longest > len(path) * SIZE
            )
            self.tree.hold([source])
            self.hold(sources)
        lent = self.allocate(-(-len(content) // SIZE) - len(path) + room)
        self.tree.release([*path, source] if source else path)
        self.let_go([*user.keys, *sources])
        if lent is None:
            return multiple()
        self.tree.hold(path)
        self.hold(user.keys)
        user.lent = lent
        self.there.append(user)
        return user

    @rule(user=users, drawn=st.lists(WORDS, max_size=5), kept_back=st.integers(0, 3))
    def write(self, user: User, drawn: list[int], kept_back: int):
        """As many more tokens as there is room for, of which others may find all but the last few."""
        if user.path and len(user.path[-1].tokens) < SIZE:
            self.kept.pop(user.keys[-1])
            user.lent.insert(0, self.tree.take_out(user.path.pop()))
        at = len(user.path) * SIZE
        user.content = (*user.content, *drawn)[: at + len(user.lent) * SIZE]
        end = max(at, len(user.content) - kept_back)
        added, left = self.tree.insert(
            user.version, user.path, tokens(user.content[at:end]), user.lent
        )
        mine, found = list(user.lent), []
        # Without a path, what was written after its version was dropped is the first of the version's new tree.
        root = user.root if user.path else self.root(user.version)
        for first in range(at, end, SIZE):
            key = root, user.content[: min(first + SIZE, end)]
            if len(key[1]) % SIZE and any(
                r == root and prefix[: len(key[1])] == key[1] for r, prefix in self.kept
            ):
                break
            page = mine.pop(0)
            self.kept.setdefault(key, Kept(page))
            found.append(key)
        self.hold(found)
        user.root, user.path, user.lent = root, user.path + added, left
        assert left == mine and [node.page for node in added] == [
            self.kept[key].page for key in found
        ]

    @rule(user=consumes(users))
    def go(self, user: User):
        self.tree.release(user.path)
        self.tree.free(user.lent)
        self.there.remove(user)
        self.let_go(user.keys)

    @rule(version=st.sampled_from("ab"))
    def drop(self, version: str):
        self.tree.drop(version)
        root = self.roots.pop(version, None)
        self.kept = {key: page for key, page in self.kept.items() if key[0] != root or page.users}
        self.clock += 1

    # --- what holds at every step ---

    @invariant()
    def the_tree_is_what_the_table_says(self):
        found: dict[
            int, tuple[tuple[int, ...], int]
        ] = {}  # page -> all tokens up to its last, users
        for node in [*self.tree.nodes(), *(node for user in self.there for node in user.path)]:
            prefix, up = (), node
            while up is not None:
                prefix, up = (*up.tokens.tolist(), *prefix), up.parent
            found[node.page] = prefix, node.users
            assert len(node.tokens) == SIZE or (len(node.tokens) and not node.children)
        assert found == {page.page: (prefix, page.users) for (_, prefix), page in self.kept.items()}
        assert len(list(self.tree.nodes())) == sum(
            root in self.roots.values() for root, _ in self.kept
        )

    @invariant()
    def a_page_is_free_or_in_the_tree_or_lent(self):
        taken = [page.page for page in self.kept.values()] + [
            page for user in self.there for page in user.lent
        ]
        assert len(taken) == len(set(taken)) and len(self.tree.free_pages) == COUNT - len(taken) == self.free

    @invariant()
    def a_page_has_as_many_users_as_hold_it(self):
        held = [key for user in self.there for key in user.keys]
        assert all(page.users == held.count(key) for key, page in self.kept.items()) and set(
            held
        ) <= set(self.kept)

    def teardown(self):
        """When all have gone and all versions are dropped, nothing is left."""
        for user in list(self.there):
            self.go(user)
        assert all(not node.users for node in self.tree.nodes())
        self.drop("a")
        self.drop("b")
        assert len(self.tree.free_pages) == COUNT and not list(self.tree.nodes())


def test_any_course_of_sequences():
    run_state_machine_as_test(Pages, settings=settings(max_examples=120, stateful_step_count=40))


@pytest.mark.slow
def test_any_long_course_of_sequences():
    run_state_machine_as_test(Pages, settings=settings(max_examples=400, stateful_step_count=60))


# --- by example ---


def written(tree: PageTree, words: Many[int], version: str = "a") -> list[Node]:
    """The pages of a sequence that is there with all its tokens found by others; it holds them."""
    path, source, _ = tree.match(version, tokens(words))
    lent = tree.allocate(-(-len(words) // SIZE) - len(path))
    assert lent is not None and (source is None or source.page not in lent)
    added, left = tree.insert(version, path, tokens(words[len(path) * SIZE :]), lent)
    tree.free(left)
    return path + added


def found(tree: PageTree, words: Many[int], version: str = "a") -> int:
    """How many tokens of it are there."""
    path, _, more = tree.match(version, tokens(words))
    tree.release(path)
    return len(path) * SIZE + more


def test_full_pages_are_shared_and_a_part_of_a_page_is_named():
    tree = PageTree(COUNT, SIZE)
    first = written(tree, [1, 2, 3, 4, 5, 6, 7])
    assert [node.tokens.tolist() for node in first] == [
        [1, 2, 3],
        [4, 5, 6],
        [7],
    ] and len(tree.free_pages) == COUNT - 3
    path, source, more = tree.match("a", tokens([1, 2, 3, 4, 5, 9, 9]))
    assert (
        path == first[:1]
        and source is first[1]
        and more == 2
        and [node.users for node in first] == [2, 1, 1]
    )
    path, source, more = tree.match("a", tokens([1, 2, 3, 4, 5, 6, 7]))
    assert (
        path == first[:2] and source is first[2] and more == 1
    )  # a page that goes on is nobody else's


def test_of_many_pages_that_begin_alike_the_one_that_helps_most_is_named():
    tree = PageTree(COUNT, SIZE)
    for words in ([1, 1, 1], [1, 2, 1], [1, 2], [2, 2, 2]):
        written(tree, words)
    _, source, more = tree.match("a", tokens([1, 2, 2]))
    assert more == 2 and source is not None and source.tokens[:2].tolist() == [1, 2]
    assert tree.match("a", tokens([3])) == ([], None, 0)


def test_a_page_that_another_wrote_meanwhile_is_taken_instead():
    tree = PageTree(COUNT, SIZE)
    lent = tree.allocate(2)
    first = written(tree, [1, 2, 3, 4])
    assert lent is not None
    added, left = tree.insert("a", [], tokens([1, 2, 3, 4]), lent)
    assert (
        added == first[:1] and left == lent[1:] and first[0].users == 2
    )  # [4] is there already: the last page stays lent
    assert len(tree.free_pages) == COUNT - 3


def test_a_page_goes_on_after_it_was_taken_out():
    tree = PageTree(COUNT, SIZE)
    path = written(tree, [1, 2, 3, 4])
    page = tree.take_out(path.pop())
    assert found(tree, [1, 2, 3, 4]) == 3
    added, left = tree.insert("a", path, tokens([4, 5, 6]), [page])
    assert not left and added[0].page == page and found(tree, [1, 2, 3, 4, 5]) == 5


def test_versions_know_nothing_of_each_other():
    tree = PageTree(COUNT, SIZE)
    written(tree, [1, 2, 3, 4], "a")
    assert found(tree, [1, 2, 3, 4], "b") == 0
    written(tree, [1, 2, 3], "b")
    tree.drop("a")
    assert found(tree, [1, 2, 3, 4], "b") == 3 and found(tree, [1, 2, 3, 4], "a") == 0


def test_a_dropped_version_keeps_what_is_held_until_it_is_let_go():
    tree = PageTree(COUNT, SIZE)
    held, other = written(tree, [1, 2, 3, 4, 5, 6]), written(tree, [1, 2, 3, 7])
    tree.release(other)
    tree.drop("a")
    assert len(tree.free_pages) == COUNT - 2 and not list(tree.nodes()) and found(tree, [1, 2, 3]) == 0
    again = written(tree, [1, 2, 3])  # the same version, afterwards: a new tree
    assert again[0].page not in [node.page for node in held]
    added, _ = tree.insert("a", held, tokens([8]), tree.allocate(1) or [])
    assert found(tree, [1, 2, 3, 4, 5, 6, 8]) == 3
    tree.release(held + added)
    assert len(tree.free_pages) == COUNT - 1 and [node.users for node in again] == [1]


def test_what_is_held_stays_and_what_was_used_last_goes_last():
    tree = PageTree(4, SIZE)
    one, two, three = (written(tree, [n] * 3) for n in (1, 2, 3))
    for path in (two, one, three):
        tree.release(path)
    assert found(tree, [2, 2, 2]) == 3  # used again: now the youngest
    tree.hold(three)
    assert tree.allocate(2) is not None
    assert [found(tree, [n] * 3) for n in (1, 2, 3)] == [0, 3, 3]
    assert tree.allocate(1) is not None and tree.allocate(1) is None
    assert [found(tree, [n] * 3) for n in (1, 2, 3)] == [0, 0, 3]


def test_a_start_is_as_young_as_what_used_it_last():
    """What goes on from a start is gone before it, and a start that was used since outlives others that were not."""
    tree = PageTree(3, SIZE)
    tree.release(written(tree, [1, 1, 1, 2, 2, 2]))
    tree.release(written(tree, [3, 3, 3]))
    assert found(tree, [1, 1, 1, 9]) == 3
    for left in ([[1, 1, 1], [3, 3, 3]], [[1, 1, 1]], []):
        tree.allocate(1)
        assert sorted(node.tokens.tolist() for node in tree.nodes()) == left


def test_a_request_for_too_many_pages_costs_nobody_anything():
    tree = PageTree(4, SIZE)
    held = written(tree, [1, 1, 1])
    tree.release(written(tree, [2, 2, 2, 2, 2]))
    assert tree.allocate(4) is None and len(tree.free_pages) == 1 and found(tree, [2, 2, 2, 2, 2]) == 5
    tree.release(held)
    assert sorted(tree.allocate(4) or []) == [0, 1, 2, 3] and not list(tree.nodes())
