"""The protocol's rules, each of which a mutant may break. The default is what the kernel does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Whether each rule is kept."""

    empties: bool = True  # a word's writer empties the same word of the other parity
    empties_in_time: bool = True  # and does so after its step has begun everywhere, not at the end of the step before
    clears_rows: bool = True  # attention's words of rows that this step has not are emptied
    writes_own_parity: bool = True
    reads_own_parity: bool = True
    heads_signal_after_stores: bool = True  # LM heads done: after this CTA's best tokens are written
    done_signals_after_work: bool = True  # samplers done: after all of this CTA's work
    heads_signal: bool = True  # CTA 1 signals at all
    done_signals: bool = True
    releases: bool = True
    acquires: bool = True
    heads_missing: int = 0  # signals less than CTAs that a sampler waits for
    done_missing: int = 0
    begins_when_published: bool = True
    begins_when_done: bool = True
    units_before_joins: bool = True
    marks_layers: bool = True  # partial results say of which layer they are, not only of which step
    checks_marks: bool = True
    new_keys_from_words: bool = True  # keys of this step's rows are awaited as words, not read from pages
    dead_rows_keep_off: bool = True  # rows of slots that have ended write no keys
    writes_taken_late: bool = True  # plans that write slot states are taken between steps
    host_waits_for_room: bool = True  # the host reuses a plan record only when it was taken
