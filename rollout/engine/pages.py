"""A prefix tree that records which page of the KV cache holds which tokens.

Sequences with a common prefix share the pages that hold it. This module only does the bookkeeping:
it hands out page numbers and never touches the keys and values. With four tokens per page, two
prompts that begin alike are stored like this:

    root of weight version 7
      [a b c d]  page 12     full, shared by both
        [e f g h]  page 3    full
          [i j]  page 9      partial, so it has no children
        [e x]  page 5        partial: the other prompt differs from its second token on

A page's tokens are only valid together with all tokens before them, because keys and values depend
on the whole prefix. Its place in the tree gives that prefix. The root stands for a version of the
weights, so new weights never find pages that old weights computed.

Every page is in exactly one of three states: free, in the tree, or allocated to one sequence. A
full page in the tree is never written again. A partial page may be: the sequence that published it
continues to write after its tokens, so others copy it instead of sharing it. Pages in the tree that
no sequence holds stay there as a cache, until `allocate` evicts the least recently used of them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int64

# One number per token. Equal numbers mean equal tokens: the same text token, or the same visual
# token of the same frame.
Content = Int64[np.ndarray, " _"]


class Node:
    """A page in the tree. Page numbers are reused, serials never are."""

    __slots__ = ("children", "page", "parent", "root", "serial", "tokens", "users")

    def __init__(self, page: int, tokens: Content, parent: Node | None, serial: int):
        self.root = self if parent is None else parent.root
        self.page = page
        self.tokens = tokens
        self.parent = parent
        self.serial = serial
        self.children: dict[bytes, Node] = {}
        self.users = 0


class PageTree:
    """Allocates `count` pages of `size` tokens and finds those that hold a given prefix.

    Attributes:
        free_pages: numbers of the pages that hold nothing.
        roots: the tree of every weight version.
        evictable: nodes that no sequence holds, least recently used first.
    """

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        # Reversed, because `allocate` pops from the end: low numbers go first.
        self.free_pages = list(range(count))[::-1]
        self.roots: dict[Hashable, Node] = {}
        self.evictable: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._serials = itertools.count()

    def nodes(self) -> Iterator[Node]:
        """Return every page in the tree."""
        for root in list(self.roots.values()):
            yield from _descendants(root)

    def match(self, version: Hashable, tokens: Content) -> tuple[list[Node], Node | None, int]:
        """Find the longest prefix of `tokens` that is cached.

        Args:
            version: the weights that must have computed it.
            tokens: the sequence to look up.

        Returns:
            The full pages of the prefix, which the caller now holds; a page whose first tokens come
            next, to copy from, or None; and the number of its tokens that match. The caller does
            not hold the page to copy from.
        """
        node = self._root(version)
        path: list[Node] = []
        end = 0
        while end + self.size <= len(tokens):
            child = node.children.get(tokens[end : end + self.size].tobytes())
            if child is None:
                break
            path.append(child)
            node = child
            end += self.size
        rest = tokens[end : end + self.size]
        # Of pages that match equally far, the newest wins. The serial makes the choice repeatable.
        matches = [
            (_common_length(child.tokens, rest), child.serial, child)
            for child in node.children.values()
        ]
        length, _, best = max(matches, default=(0, 0, None))
        self.hold(path)
        return path, best if length else None, length

    def hold(self, path: Sequence[Node]) -> None:
        """Protect pages from eviction until `release`."""
        for node in path:
            node.users += 1
            self.evictable.pop(node, None)

    def release(self, path: Sequence[Node]) -> None:
        """Undo one `hold`. Pages of a dropped version become free at once."""
        # From the end of the path to its start: a page becomes evictable after its descendants,
        # which no sequence holds without holding the page too. So the oldest evictable node is
        # always a leaf, and eviction never cuts a page off from its prefix.
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self.evictable[node] = None
                if self._is_dropped(node):
                    self._remove(node)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages, evicting unused ones if needed; None if that is not enough."""
        if len(self.free_pages) + len(self.evictable) < count:
            return None
        while len(self.free_pages) < count:
            self._remove(next(iter(self.evictable)))
        return [self.free_pages.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Return allocated pages that never went into the tree."""
        self.free_pages += pages

    def insert(
        self, version: Hashable, path: Sequence[Node], tokens: Content, pages: Sequence[int]
    ) -> tuple[list[Node], list[int]]:
        """Put allocated pages into the tree, so that other sequences find them.

        The caller holds the nodes it gets back. If a full page with the same tokens is in the tree
        already, that one is used and the caller's copy becomes free. A partial page is only added
        if no page of the tree begins with its tokens.

        Args:
            version: the weights that computed the pages.
            path: the nodes before them.
            tokens: the tokens on them, starting after `path`.
            pages: the caller's pages, in order. There may be more than `tokens` fill.

        Returns:
            The nodes that now follow `path`, and the pages that the caller keeps for itself.
        """
        parent = path[-1] if path else self._root(version)
        added: list[Node] = []
        left = list(pages)
        for first in range(0, len(tokens), self.size):
            content = tokens[first : first + self.size]
            partial = len(content) < self.size
            # A longer page serves every sequence that this one could serve.
            if partial and _begins_any(content, parent.children.values()):
                break
            page = left.pop(0)
            node = parent.children.get(content.tobytes())
            if node is None:
                node = Node(page, content.copy(), parent, next(self._serials))
                parent.children[content.tobytes()] = node
            else:
                self.free_pages.append(page)
            self.hold([node])
            added.append(node)
            parent = node
        return added, left

    def take_out(self, node: Node) -> int:
        """Remove a partial page that only the caller holds, so that it can be written again."""
        assert node.users == 1
        assert not node.children
        assert len(node.tokens) < self.size
        assert node.parent is not None
        del node.parent.children[node.tokens.tobytes()]
        return node.page

    def drop(self, version: Hashable) -> None:
        """Forget what `version` computed. Pages that are still held become free on release."""
        root = self.roots.pop(version, None)
        if root is None:
            return
        # Children first: `_remove` takes leaves only.
        for node in reversed(_descendants(root)):
            if not node.users:
                self._remove(node)

    def _root(self, version: Hashable) -> Node:
        return self.roots.setdefault(version, Node(-1, np.zeros(0, np.int64), None, -1))

    def _is_dropped(self, node: Node) -> bool:
        return not any(root is node.root for root in self.roots.values())

    def _remove(self, node: Node) -> None:
        """Free the page of an unused leaf."""
        assert node.parent is not None
        assert not node.users
        assert not node.children
        del self.evictable[node]
        del node.parent.children[node.tokens.tobytes()]
        self.free_pages.append(node.page)


def page_count(tokens: int, size: int) -> int:
    """Return the number of pages of `size` tokens that hold `tokens` tokens. The last may be
    partial."""
    full, rest = divmod(tokens, size)
    return full + 1 if rest else full


def _descendants(root: Node) -> list[Node]:
    """Return all nodes below `root`, each before its own children."""
    nodes: list[Node] = []
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += node.children.values()
    return nodes


def _begins_any(tokens: Content, nodes: Iterable[Node]) -> bool:
    """Return whether any page begins with all of `tokens`."""
    return any(_common_length(node.tokens, tokens) == len(tokens) for node in nodes)


def _common_length(a: Content, b: Content) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if differing.size else length
