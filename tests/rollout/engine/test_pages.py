"""The page tree against a flat table of all cached prefixes.

In the table a page is named by all tokens up to its last one, so sharing needs no tree.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence as Many

import numpy as np
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

from rollout.engine.pages import Node, PageTree, page_count

SIZE, COUNT = 3, 10
WORDS = st.integers(0, 1)  # few, so that many sequences begin alike

Key = tuple[int, tuple[int, ...]]  # which root, and all tokens up to a page's last


def tokens(words: Many[int]) -> np.ndarray:
    return np.array(words, np.int64)


def common(a: Many[int], b: Many[int]) -> int:
    """Length of the common prefix."""
    return len(os.path.commonprefix([tuple(a), tuple(b)]))


@dataclasses.dataclass
class Cached:
    """What the table says of a page in the tree."""

    page: int
    users: int = 0
    released: int = 0
    """When it was last released."""


@dataclasses.dataclass(eq=False)
class User:
    """A sequence. `content` is on the pages of `path`, and then on its own."""

    version: str
    root: int
    content: tuple[int, ...]
    path: list[Node]
    own: list[int]

    @property
    def keys(self) -> list[Key]:
        ends = np.cumsum([len(node.tokens) for node in self.path]).tolist()
        return [(self.root, self.content[:end]) for end in ends]


class Pages(RuleBasedStateMachine):
    """Sequences are admitted, write, publish and leave. The table predicts every result."""

    users = Bundle("users")

    def __init__(self):
        super().__init__()
        self.tree = PageTree(COUNT, SIZE)
        self.cached: dict[Key, Cached] = {}
        self.active: list[User] = []
        self.roots: dict[str, int] = {}
        self.clock = 0

    # --- the table ---

    def root(self, version: str) -> int:
        return self.roots.setdefault(version, 1000 * len(self.roots) + self.clock)

    def below(self, key: Key) -> list[Key]:
        """The cached pages after this one. After a partial page there are none."""
        root, prefix = key
        if len(prefix) % SIZE:
            return []
        return [
            (other_root, longer)
            for other_root, longer in self.cached
            if other_root == root and len(longer) > len(prefix) and longer[: len(prefix)] == prefix
        ]

    def hold(self, keys: Many[Key]) -> None:
        for key in keys:
            self.cached[key].users += 1

    def release(self, keys: Many[Key]) -> None:
        """From the last page to the first."""
        for key in reversed(keys):
            self.clock += 1
            self.cached[key].users -= 1
            self.cached[key].released = self.clock
            if not self.cached[key].users and key[0] not in self.roots.values():
                del self.cached[key]

    @property
    def taken(self) -> list[int]:
        """Pages in the tree or owned by a sequence."""
        in_tree = [page.page for page in self.cached.values()]
        return in_tree + [page for user in self.active for page in user.own]

    @property
    def free(self) -> int:
        return COUNT - len(self.cached) - sum(len(user.own) for user in self.active)

    def make_room(self, count: int) -> bool:
        """Evict until `count` pages are free: unused leaves, oldest first. False if impossible."""
        if self.free + sum(not page.users for page in self.cached.values()) < count:
            return False
        while self.free < count:
            leaves = [
                key for key, page in self.cached.items() if not page.users and not self.below(key)
            ]
            del self.cached[min(leaves, key=lambda key: self.cached[key].released)]
        return True

    def allocate(self, count: int) -> list[int] | None:
        """Allocate from the tree, and check the result against the table."""
        room = self.make_room(count)
        pages = self.tree.allocate(count)
        assert (pages is not None) == room
        if pages is not None:
            assert len(pages) == len(set(pages)) == count
            assert set(pages) <= set(range(COUNT)) - set(self.taken)
        return pages

    # --- what happens ---

    @rule(
        target=users,
        version=st.sampled_from("ab"),
        content=st.lists(WORDS, max_size=10).map(tuple),
        room=st.integers(0, 5),
    )
    def admit(self, version: str, content: tuple[int, ...], room: int):
        root = self.root(version)
        path, source, more = self.tree.match(version, tokens(content))
        longest = max(
            (common(content, prefix) for r, prefix in self.cached if r == root), default=0
        )
        assert (len(path), more) == divmod(longest, SIZE)
        user = User(version, root, content, path, [])
        assert [node.page for node in path] == [self.cached[key].page for key in user.keys]
        self.hold(user.keys)
        sources: list[Key] = []
        if source is None:
            assert more == 0
        else:
            sources = [key for key, page in self.cached.items() if page.page == source.page]
            ((_, prefix),) = sources
            assert len(path) == (len(prefix) - 1) // SIZE
            assert common(content, prefix) == longest > len(path) * SIZE
            self.tree.hold([source])
            self.hold(sources)
        own = self.allocate(page_count(len(content), SIZE) - len(path) + room)
        self.tree.release([*path, source] if source else path)
        self.release([*user.keys, *sources])
        if own is None:
            return multiple()
        self.tree.hold(path)
        self.hold(user.keys)
        user.own = own
        self.active.append(user)
        return user

    @rule(user=users, drawn=st.lists(WORDS, max_size=5), unpublished=st.integers(0, 3))
    def write(self, user: User, drawn: list[int], unpublished: int):
        """Write as many tokens as there is room for, and publish all but the last few."""
        if user.path and len(user.path[-1].tokens) < SIZE:
            self.cached.pop(user.keys[-1])
            user.own.insert(0, self.tree.take_out(user.path.pop()))
        start = len(user.path) * SIZE
        user.content = (*user.content, *drawn)[: start + len(user.own) * SIZE]
        end = max(start, len(user.content) - unpublished)
        added, left = self.tree.insert(
            user.version, user.path, tokens(user.content[start:end]), user.own
        )
        mine = list(user.own)
        found: list[Key] = []
        # If its version was dropped and it has no path, it begins the version's new tree.
        root = user.root if user.path else self.root(user.version)
        for first in range(start, end, SIZE):
            key = root, user.content[: min(first + SIZE, end)]
            if len(key[1]) % SIZE and any(
                r == root and prefix[: len(key[1])] == key[1] for r, prefix in self.cached
            ):
                break
            self.cached.setdefault(key, Cached(mine.pop(0)))
            found.append(key)
        self.hold(found)
        user.root = root
        user.path = user.path + added
        user.own = left
        assert left == mine
        assert [node.page for node in added] == [self.cached[key].page for key in found]

    @rule(user=consumes(users))
    def leave(self, user: User):
        self.tree.release(user.path)
        self.tree.free(user.own)
        self.active.remove(user)
        self.release(user.keys)

    @rule(version=st.sampled_from("ab"))
    def drop(self, version: str):
        self.tree.drop(version)
        root = self.roots.pop(version, None)
        self.cached = {
            key: page for key, page in self.cached.items() if key[0] != root or page.users
        }
        self.clock += 1

    # --- what holds at every step ---

    @invariant()
    def the_tree_is_what_the_table_says(self):
        # Page -> all tokens up to its last, and its users.
        found: dict[int, tuple[tuple[int, ...], int]] = {}
        for node in [*self.tree.nodes(), *(node for user in self.active for node in user.path)]:
            prefix: tuple[int, ...] = ()
            ancestor: Node | None = node
            while ancestor is not None:
                prefix = (*ancestor.tokens.tolist(), *prefix)
                ancestor = ancestor.parent
            found[node.page] = prefix, node.users
            assert len(node.tokens) == SIZE or (len(node.tokens) and not node.children)
        assert found == {
            page.page: (prefix, page.users) for (_, prefix), page in self.cached.items()
        }
        assert len(list(self.tree.nodes())) == sum(
            root in self.roots.values() for root, _ in self.cached
        )

    @invariant()
    def a_page_is_free_or_in_the_tree_or_lent(self):
        taken = self.taken
        assert len(taken) == len(set(taken))
        assert len(self.tree.free_pages) == COUNT - len(taken) == self.free

    @invariant()
    def a_page_has_as_many_users_as_hold_it(self):
        held = [key for user in self.active for key in user.keys]
        assert all(page.users == held.count(key) for key, page in self.cached.items())
        assert set(held) <= set(self.cached)

    def teardown(self):
        """When all sequences have left and all versions are dropped, nothing is cached."""
        for user in list(self.active):
            self.leave(user)
        assert all(not node.users for node in self.tree.nodes())
        self.drop("a")
        self.drop("b")
        assert len(self.tree.free_pages) == COUNT and not list(self.tree.nodes())


def test_any_course_of_sequences():
    run_state_machine_as_test(Pages, settings=settings(max_examples=120, stateful_step_count=40))


def test_a_part_page_is_not_added_beside_one_that_begins_with_it():
    tree = PageTree(COUNT, SIZE)
    pages = tree.allocate(2)
    assert pages is not None
    added, _ = tree.insert("a", [], tokens([0, 1, 1]), pages[:1])
    assert [node.page for node in added] == pages[:1]
    assert tree.insert("a", [], tokens([0, 1]), pages[1:]) == ([], pages[1:])
