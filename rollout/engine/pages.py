"""Which page of the cache holds what: a tree of pages, so that sequences that start alike share what they have in common.

Owns page numbers, never what is on the pages. A `Node` is a page in the tree: the tokens on it and, by its place, all tokens
before it; the root stands for a version of the weights, so that what other weights computed is never found. Nodes that a sequence
holds stay; others are kept until their room is needed, least recently used first. Refuses to give out more pages than there are:
`allocate` then gives None.
Invariant: every page is free, in the tree, or lent to one sequence, and only one of these; a full node's page is never written again.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from jaxtyping import Int64

Tokens = Int64[
    np.ndarray, " t"
]  # one number a token, equal where the tokens (or the pieces of frames) are


class Node:
    """A page in the tree. `serial` never comes again, the page number does."""

    __slots__ = ("children", "page", "parent", "root", "serial", "tokens", "users")

    def __init__(self, page: int, tokens: Tokens, parent: Node | None, serial: int):
        self.root = self if parent is None else parent.root
        self.page, self.tokens, self.parent, self.serial = page, tokens, parent, serial
        self.children: dict[bytes, Node] = {}
        self.users = 0


class PageTree:
    """`count` pages of `size` tokens."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._free = list(range(count))[::-1]
        self._roots: dict[Hashable, Node] = {}
        self._idle: collections.OrderedDict[Node, None] = (
            collections.OrderedDict()
        )  # what nobody holds, oldest first
        self._serials = itertools.count()

    def nodes(self) -> Iterator[Node]:
        """Every page in the tree."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.parent is not None:
                yield node

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def match(self, version: Hashable, tokens: Tokens) -> tuple[list[Node], Node | None, int]:
        """What is there of `tokens` already: the full pages, held from now on, then a page whose first so many tokens come next."""
        node, path, at = self._root(version), [], 0
        while at + self.size <= len(tokens) and (
            child := node.children.get(tokens[at : at + self.size].tobytes())
        ):
            path.append(child)
            node, at = child, at + self.size
        rest = tokens[at : at + self.size]
        common = [
            (_common(child.tokens, rest), child.serial, child) for child in node.children.values()
        ]
        most, _, best = max(common, default=(0, 0, None))
        self.hold(path)
        return path, best if most else None, most

    def hold(self, path: Sequence[Node]) -> None:
        for node in path:
            node.users += 1
            self._idle.pop(node, None)

    def release(self, path: Sequence[Node]) -> None:
        """The opposite of `hold`. Pages of weights that were dropped meanwhile are free at once."""
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self._idle[node] = (
                    None  # after all below it, which nobody can hold without it: the oldest is always a leaf
                )
                if self._of_dropped(node):
                    self._remove(node)

    def allocate(self, count: int) -> list[int] | None:
        """So many pages, lent to the caller; None where they are not to be had, even without all that nobody holds."""
        if len(self._free) + len(self._idle) < count:
            return None
        while len(self._free) < count:
            self._remove(next(iter(self._idle)))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self._free += pages

    def insert(
        self, version: Hashable, path: Sequence[Node], tokens: Tokens, pages: Sequence[int]
    ) -> tuple[list[Node], list[int]]:
        """Puts lent pages that hold `tokens`, which follow `path`, into the tree; the caller holds them there.

        Returns the nodes and the pages that are still lent. A full page that is there already is taken instead of the caller's own, which
        is free then; a last page that is not full is added only where no other begins with the same tokens.
        """
        parent, added, left = path[-1] if path else self._root(version), [], list(pages)
        for at in range(0, len(tokens), self.size):
            part = tokens[at : at + self.size]
            known = parent.children.get(part.tobytes())
            if len(part) < self.size and any(
                _common(child.tokens, part) == len(part) for child in parent.children.values()
            ):
                break
            page = left.pop(0)
            if known is None:
                known = parent.children[part.tobytes()] = Node(
                    page, part.copy(), parent, next(self._serials)
                )
            else:
                self._free.append(page)
            self.hold([known])
            added.append(known)
            parent = known
        return added, left

    def take_out(self, node: Node) -> int:
        """Lends a page that is not full, and that only the caller holds, to the caller again."""
        assert (
            node.users == 1
            and not node.children
            and len(node.tokens) < self.size
            and node.parent is not None
        )
        del node.parent.children[node.tokens.tobytes()]
        return node.page

    def drop(self, version: Hashable) -> None:
        """Forgets what `version` computed: at once where nobody holds it, else when it is released."""
        root = self._roots.pop(version, None)
        for node in [] if root is None else [n for n in reversed(self._below(root)) if not n.users]:
            self._remove(node)

    def _root(self, version: Hashable) -> Node:
        return self._roots.setdefault(version, Node(-1, np.zeros(0, np.int64), None, -1))

    def _below(self, root: Node) -> list[Node]:
        """All pages that go on from this one, each before those that go on from it."""
        found, waiting = [], list(root.children.values())
        while waiting:
            found.append(node := waiting.pop())
            waiting += node.children.values()
        return found

    def _of_dropped(self, node: Node) -> bool:
        return not any(root is node.root for root in self._roots.values())

    def _remove(self, node: Node) -> None:
        """Frees a leaf that nobody holds."""
        assert node.parent is not None and not node.users and not node.children
        del self._idle[node], node.parent.children[node.tokens.tobytes()]
        self._free.append(node.page)


def _common(a: Tokens, b: Tokens) -> int:
    """How many tokens both start with."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if differing.size else length
