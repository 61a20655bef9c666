"""The batching policy: what the next step plan holds.

Decode rows first, then prefill chunks of running sequences, then admissions, within the step's token budget. Pages for
decoding are taken from whoever ranks lowest when they run out. Must not know: results, deadlines, who asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megakernel_runtime.interface import Capacity, PageGrant, PrefillRow, SlotAdmit, StepPlan
from server.scheduling.requests import Request, Sequence
from server.scheduling.state import SchedulerState


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int  # tokens that may still be computed in its first step
    releases: list[int]
    open_slots: list[int]  # that it may admit to: free ones, and those it releases
    admits: list[SlotAdmit] = field(default_factory=list[SlotAdmit])
    grants: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # slot -> pages
    prefill: list[PrefillRow] = field(default_factory=list[PrefillRow])
    decode: list[Sequence] = field(default_factory=list[Sequence])
    sequences: dict[int, Sequence] = field(default_factory=dict[int, Sequence])  # of its rows, by slot
    must_run: bool = False  # a slot has to be stopped, even if nothing else is to be done
    short_of_pages: bool = False  # the head of the queue waits for pages

    def add_prefill(self, slot: int, sequence: Sequence) -> None:
        """Add as much of a sequence's prefill as the budget allows."""
        count = min(sequence.target - sequence.n_planned, self.budget)
        self.prefill.append(PrefillRow(slot, sequence.n_planned, count))
        self.sequences[slot] = sequence
        self.budget -= count
        sequence.n_planned += count


class Planner:
    """Makes plans from the state, and brings the state to where the plan will."""

    def __init__(self, state: SchedulerState, capacity: Capacity) -> None:
        self._state = state
        self._last_plan_id = 0
        # A lease that no further plan could end early would hold up admissions and cancellations.
        self._max_lease = capacity.max_lease_steps if capacity.max_plans_ahead > 1 else 1

    def plan(self, now: float) -> StepPlan | None:
        """Return the next plan to submit; None while there is nothing to do that the plans under way do not."""
        if not self._is_due():
            return None
        state = self._state
        state.stale = False
        draft = self._open()
        for sequence in [s for s in state.running if not s.prefilling]:
            self._decode(draft, sequence)
        for sequence in state.running:
            if sequence.prefilling and draft.budget and sequence.slot is not None:
                draft.add_prefill(sequence.slot, sequence)
        self._admit(draft, now)
        return self._commit(draft)

    def _is_due(self) -> bool:
        """Whether a plan now would do something that those under way do not."""
        state = self._state
        if state.flights.full:
            return False
        newest = state.flights.newest
        if newest is None or newest.plan.prefill or state.stopping_slots:
            return True
        if state.stale and state.queue and state.n_open_slots:
            return True
        return newest.steps_left <= max(1, newest.plan.lease_steps // 2)

    def _open(self) -> Draft:
        """Begin a plan: the slots of sequences that are over become free with it."""
        state = self._state
        releases = [*state.finished_slots, *state.stopping_slots]
        draft = Draft(state.step_budget, releases, [*state.free_slots, *releases])
        draft.must_run = bool(state.stopping_slots) and len(state.flights) > 0
        state.finished_slots, state.stopping_slots, state.free_slots = [], [], []
        return draft

    # ---------------------------------------------------------------- decode

    def _decode(self, draft: Draft, sequence: Sequence) -> None:
        """Add a decode row, with the page that its next step may need."""
        state = self._state
        if sequence.slot is None or sequence.will_finish:
            return  # preempted for one before it, or over as soon as the plans under way are
        needed = self._pages_short(sequence, 1)
        while needed > state.pool.n_available:
            victim = state.running[-1]
            self._preempt(draft, victim)
            if victim is sequence:
                return
        self._grant(draft, sequence, needed)
        draft.decode.append(sequence)
        draft.sequences[sequence.slot] = sequence
        draft.budget -= 1

    def _pages_short(self, sequence: Sequence, steps: int) -> int:
        """Return how many pages a sequence lacks to decode `steps` further steps, wherever it may be by then."""
        n_written = min(sequence.n_tokens + sequence.out_max + steps, sequence.max_len) - 1
        return max(0, -(-n_written // self._state.page_size) - len(sequence.pages))

    def _grant(self, draft: Draft, sequence: Sequence, count: int) -> None:
        if count and sequence.slot is not None:
            pages = self._state.pool.allocate(count)
            sequence.pages += pages
            draft.grants.setdefault(sequence.slot, []).extend(pages)

    def _preempt(self, draft: Draft, victim: Sequence) -> None:
        """Put a running sequence back into the queue; all of it is computed again later, save what stays cached."""
        state = self._state
        slot = state.leave(victim)
        state.queue.put_back(victim)
        state.stats.preemptions += 1
        draft.releases.append(slot)
        draft.open_slots.append(slot)

    def _lease(self, draft: Draft) -> int:
        """Return for how many steps the plan may be repeated, and grant the pages for them."""
        lease = 1 if draft.short_of_pages or not draft.decode else self._max_lease
        lease = min(lease, max((s.max_len - s.n_tokens - s.out_min for s in draft.decode), default=1))
        while lease > 1:
            short = [self._pages_short(sequence, lease) for sequence in draft.decode]
            if sum(short) <= self._state.pool.n_available:
                for sequence, count in zip(draft.decode, short, strict=True):
                    self._grant(draft, sequence, count)
                break
            lease //= 2
        return lease

    # ---------------------------------------------------------------- admission

    def _admit(self, draft: Draft, now: float) -> None:
        """Admit from the head of the queue while slots, budget and pages last. Nobody overtakes, but that sequences
        which wait for their sibling to prefill the prompt they share are passed over.
        """
        for request in self._state.queue:
            while request.waiting and not self._waits_for_leader(draft, request):
                sequence = request.waiting[0]
                if not draft.open_slots or not draft.budget or sequence.out_max:
                    return  # out_max: preempted just now, tokens of it are still to come
                if not self._enter(draft, sequence, now):
                    draft.short_of_pages = True
                    return

    def _waits_for_leader(self, draft: Draft, request: Request) -> bool:
        """Whether the prompt's pages are being computed by a sibling; what one plan computes, the next may share."""
        leader = request.leader
        if leader is None:
            return False
        return leader.prefilling or any(row.slot == leader.slot for row in draft.prefill)

    def _enter(self, draft: Draft, sequence: Sequence, now: float) -> bool:
        """Admit a sequence if its pages are there; return whether they were."""
        state = self._state
        n_shareable = (sequence.n_tokens - 1) // state.page_size  # never the last: it is sampled from
        sequence.extend_keys(state.page_size)
        cached = state.pool.lookup(sequence.keys[:n_shareable])
        n_new = -(-sequence.n_tokens // state.page_size) - len(cached)
        spare = len(state.running)  # a page for each, lest the next step preempts what was just admitted
        if n_new + spare > state.pool.n_available - state.pool.n_cached_of(cached):
            return False
        state.pool.hold(cached)
        pages = cached + state.pool.allocate(n_new)
        slot, cached_len = draft.open_slots.pop(), len(cached) * state.page_size
        self._note_admission(sequence, cached_len, now)
        state.queue.take(sequence, now)
        state.enter(sequence, slot, pages, cached_len)
        tokens = (*sequence.request.new.prompt, *sequence.output)
        draft.admits.append(SlotAdmit(slot, tokens, sequence.prompt_len, sequence.sampling, cached_len, tuple(pages)))
        draft.add_prefill(slot, sequence)
        if sequence.request.leader is None and len(cached) < n_shareable:
            sequence.request.leader = sequence
        return True

    def _note_admission(self, sequence: Sequence, cached_len: int, now: float) -> None:
        """Count a sequence's first admission."""
        stats, request = self._state.stats, sequence.request
        if sequence.scheduled:
            return
        sequence.scheduled, sequence.scheduled_at = True, now
        sequence.cached_prompt_tokens = cached_len
        stats.prompt_tokens += sequence.prompt_len
        stats.prefix_queries += sequence.prompt_len
        stats.prefix_hits += cached_len
        if not request.started:
            stats.queue_times.append(now - request.submitted_at)

    # ---------------------------------------------------------------- commit

    def _commit(self, draft: Draft) -> StepPlan | None:
        """Return the plan, recorded as under way; or nothing, and slots stay to be released by a later plan."""
        state = self._state
        if not (draft.prefill or draft.decode or draft.must_run or draft.admits):
            waiting = set(draft.releases)
            state.free_slots = [slot for slot in draft.open_slots if slot not in waiting]
            state.finished_slots = list(draft.releases)
            return None
        lease = self._lease(draft)
        state.free_slots = draft.open_slots
        self._last_plan_id += 1
        plan = StepPlan(
            plan_id=self._last_plan_id,
            releases=tuple(draft.releases),
            admits=tuple(draft.admits),
            grants=tuple(PageGrant(slot, tuple(pages)) for slot, pages in draft.grants.items()),
            prefill=tuple(draft.prefill),
            decode=tuple([sequence.slot for sequence in draft.decode if sequence.slot is not None]),
            lease_steps=lease,
        )
        state.flights.add(plan, draft.sequences)
        for row in draft.prefill:  # later plans may share what this one computes
            state.publish(draft.sequences[row.slot], row.start + row.count)
        return plan
