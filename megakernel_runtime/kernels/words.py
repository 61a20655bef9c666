"""Word layouts that host and device share: plan records, slot states, results. Plain integers; standard library only.

Everything is int32. Host to device: a ring of plan records in pinned memory, and one word that counts them. Device to
host: a ring of step records and of token records in pinned memory. Must not know: how either side moves them.
"""

from __future__ import annotations

# A plan record: what to write, then what to run
PLANS = 32  # records in the ring
RECORD = 1024  # words of one
CMD_WORDS = 1024  # of the command that CTA 0 makes of a record's head and rows for all; one for even, one for odd steps
RUN, QUIT, APPLY = 1, 2, 3  # kinds: run steps; leave the GPU; only write
KIND, PLAN, N_DECODE, N_PREFILL, LEASE, N_WRITES, WRITES_FROM, N_CLEARS = range(8)
ROWS_AT = 8  # rows: (slot, position, first row of the segment, token | SAMPLES); decode rows say only their slot
ROW_WORDS = 4
SAMPLES = 1 << 30  # of a prefill row: it is the last known token of its slot
CLEARS_AT = ROWS_AT + 128 * ROW_WORDS  # pairs (first word of the state arena, how many): set to zero before the writes
MAX_CLEARS = (RECORD - CLEARS_AT) // 2
PACKETS = 1 << 18  # ring of writes: pairs (word of the state arena, value), N_WRITES of them from WRITES_FROM on

# Results
RESULTS = 1024  # steps in the rings
STEP_WORDS = 16
SEQUENCE, STEP_PLAN, STEP_INDEX, STEP_ROWS, STEP_LAST = range(5)
BEGAN_AT, ENDED_AT = 6, 8  # two words each, the GPU's nanosecond clock
TOKEN_WORDS = 48  # of one row's token record; the outcome is a device_state.fields.Outcome
OUT_SLOT, OUT_TOKEN, OUT_OUTCOME, OUT_LOGPROB = range(4)  # logprob: fp32, of the chosen token
TOP_IDS_AT, TOP_LOGPROBS_AT = 4, 24  # the most probable tokens, falling, -1 where there is none; fp32

# Record of the wait that gave up first: tag (see `sync.wait_tag`), SM, address of what was awaited (two words), the
# last value seen, the value expected
ABORT_TAG, ABORT_SM, ABORT_WHERE, ABORT_SEEN, ABORT_EXPECTED = 0, 1, 2, 4, 5

# A CTA's time, 64 bit each: clock cycles in all, of these waiting for other CTAs, for weights, for the host; and
# nanoseconds in all. A wait for the host counts when it is over.
ACCOUNTS = 8
TOTAL, DEPENDENCY, MEMORY, HOST, NANOSECONDS = range(5)

# `head`: plans written by the host, plans taken by the kernel, then the GPU's clock when the kernel began and when it
# left, two words each
WRITTEN, TAKEN, BEGAN_HEAD, LEFT_HEAD = 0, 1, 4, 6
