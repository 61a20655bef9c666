"""Pages: what is free, held, cached, evicted and shared."""

import pytest

from server.scheduling.pages import PagePool, next_key, root_key

KEYS = [next_key(root_key(""), (i,)) for i in range(8)]


def test_keys_depend_on_tokens_order_parent_and_salt():
    root = root_key("")
    first = next_key(root, (1, 2))
    variants = {first, next_key(root, (2, 1)), next_key(first, (1, 2)), next_key(root_key("tenant"), (1, 2))}
    assert len(variants) == 4
    assert first == next_key(root_key(""), (1, 2))


def test_published_pages_are_found_again_after_their_holder_is_gone():
    pool = PagePool(4)
    pages = pool.allocate(3)
    for page, key in zip(pages, KEYS, strict=False):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.n_live == 0
    assert pool.n_available == 4
    found = pool.lookup(KEYS[:2])
    assert found == pages[:2]
    assert pool.n_cached_of(found) == 2
    pool.hold(found)
    assert pool.n_available == 2
    pool.check_integrity(found)


def test_lookup_stops_at_the_first_gap():
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.publish(pages[0], KEYS[0])
    pool.publish(pages[2], KEYS[2])
    assert pool.lookup(KEYS[:3]) == pages[:1]
    assert pool.lookup(KEYS[1:3]) == []


def test_the_longest_unused_goes_first_and_within_a_sequence_its_end():
    pool = PagePool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, key in zip(old + new, KEYS, strict=False):
        pool.publish(page, key)
    pool.release(old)
    pool.release(new)
    pool.hold(pool.lookup(KEYS[:2]))  # used again: now it is younger
    pool.release(old)
    assert pool.allocate(1) == new[1:]
    assert pool.allocate(1) == new[:1]
    assert pool.allocate(1) == old[1:]
    assert pool.lookup(KEYS[:2]) == old[:1]


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(3)
    cached = pool.allocate(1)
    pool.publish(cached[0], KEYS[0])
    pool.release(cached)
    assert cached[0] not in pool.allocate(2)
    assert pool.lookup(KEYS[:1]) == cached


def test_a_page_is_live_until_its_last_holder_is_gone():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.publish(pages[0], KEYS[0])
    pool.hold(pages)
    pool.release(pages)
    assert pool.n_live == 1
    pool.release(pages)
    assert pool.n_live == 0


def test_the_first_page_with_a_key_keeps_it():
    pool = PagePool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], KEYS[0])
    pool.publish(second[0], KEYS[0])
    assert pool.lookup(KEYS[:1]) == first
    pool.release(second)
    assert pool.lookup(KEYS[:1]) == first
    pool.check_integrity(first)


def test_without_a_cache_only_held_pages_are_shared():
    pool = PagePool(2, keep=False)
    pages = pool.allocate(1)
    pool.publish(pages[0], KEYS[0])
    assert pool.lookup(KEYS[:1]) == pages
    pool.release(pages)
    assert pool.lookup(KEYS[:1]) == []
    pool.check_integrity([])


@pytest.mark.parametrize("held", [[0], [0, 0, 1], []])
def test_integrity_notices_holders_that_nobody_explains(held):
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert sorted(pages) == [0, 1]
    pool.check_integrity(pages)
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity(held)


def test_integrity_notices_a_lost_page():
    pool = PagePool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="not all pages"):
        pool.check_integrity([])


def test_asking_for_more_than_there_is_and_giving_back_twice_are_bugs():
    pool = PagePool(1)
    pages = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 pages asked, 0 available"):
        pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(pages)
