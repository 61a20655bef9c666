"""Page accounting: which KV pages are free, which are held and by how many, which keep a past prompt's blocks.

A page is *free* (holds nothing), *live* (held by at least one sequence) or *cached* (held by none, but its contents
have a key and may be shared again until it is evicted, least recently used first). Must not know: sequences, plans.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockKey = bytes  # names the contents of a full page: its tokens, all tokens before them, and the salt


def root_key(salt: str) -> BlockKey:
    """Return the key before a sequence's first block. Different salts never share pages."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def next_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Return the key of the block of `tokens` after `parent`: 128 bits, so that equal keys mean equal contents."""
    return hashlib.blake2b(array("I", tokens).tobytes(), key=parent, digest_size=16).digest()


class PagePool:
    """All pages of a runtime. Every page that is handed out comes back through `release`, once for each time."""

    def __init__(self, n_pages: int, *, keep: bool = True) -> None:
        self._n_pages = n_pages
        self._keep = keep
        self._free = list(range(n_pages - 1, -1, -1))
        self._holders = [0] * n_pages
        self._key_of: dict[int, BlockKey] = {}
        self._page_of: dict[BlockKey, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def n_available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def n_live(self) -> int:
        """Pages held by sequences."""
        return self._n_pages - self.n_available

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages for one holder to write. The caller has looked at `n_available` before."""
        assert count <= self.n_available, f"{count} pages asked, {self.n_available} available"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def lookup(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the pages of the longest known run of blocks, without holding them yet."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def n_cached_of(self, pages: Sequence[int]) -> int:
        """Return how many of `pages` nobody holds: holding them makes so many fewer available."""
        return sum(page in self._cached for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder, who only reads, to each of `pages`, which `lookup` gave."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take a holder away from each of one sequence's `pages`; its last blocks will be evicted first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released too often"
            if self._holders[page] == 0:
                self._let_go(page)

    def publish(self, page: int, key: BlockKey) -> None:
        """Name the contents of a held page, so that others can share it. The first page with a key keeps it."""
        assert self._holders[page] > 0, f"page {page} is held by nobody"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def _let_go(self, page: int) -> None:
        if self._keep and page in self._key_of:
            self._cached[page] = None
            return
        self._forget(page)
        self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def check_integrity(self, held: Iterable[int]) -> None:
        """AssertionError unless free + cached + live = all, and `held` (one entry a holder) explains every count."""
        counts = [0] * self._n_pages
        for page in held:
            counts[page] += 1
        assert counts == self._holders, "holders of pages are not those that the sequences explain"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        live = {page for page, count in enumerate(counts) if count}
        assert len(free) + len(cached) + len(live) == self._n_pages, "free + cached + live pages are not all pages"
        assert len(free | cached | live) == self._n_pages, "a page is in two states"
        assert {key: page for page, key in self._key_of.items()} == self._page_of, "keys and pages disagree"
        assert cached <= set(self._key_of), "a cached page has no key"
        assert not free & set(self._key_of), "a free page has a key"
