/* Memory that is ordered by releases alone, for the models of the device protocol.
 *
 * Contract
 *   Cell      one place in the memory of a rank, written by one rank. `seen` is what everybody sees;
 *             `late`, where it is not 0, is 1 more than what its writer stored and others may or may
 *             not see yet. A store may stay late for any time: past the end of a call, and past all
 *             later stores of its writer to other places
 *   LOAD      a load by a peer: where a store is late, the value before it or the value itself. Who
 *             saw a value never sees an older one
 *   READ      a load by a peer that must give `value`, whichever of the two it sees
 *   ARRIVES   part of the condition of a wait: a poll could see a value that passes `test` now.
 *             ACCEPT then makes it seen, and nothing else: a relaxed access
 *   release   all that a rank stored before becomes seen (DRAIN in each model), then the flag is
 *             stored. Whoever sees the flag sees the rest. That a load which comes after a wait is
 *             served after it, is the acquire; a model without it makes the load before the wait
 *   numbers   calls count 1 .. GHOST and round again; kernels see a number modulo EPOCHS only. So
 *             values of a call are told from those that look alike, and runs never end: every model
 *             without a bound of its own covers any number of wraps
 * Not modelled: budgets of waits (a time-out is a wait that lasts), two stores to one place that are
 * late both (the older one is seen once the other is made), and tearing of an 8-byte word.
 */
#ifndef N
#define N 2
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif
#define GHOST (2 * EPOCHS)
#define NEXT(call) (call % GHOST + 1)
#define PEER1(rank) ((rank + 1) % N)
#define PEER2(rank) ((rank + 2) % N)
#define EVERY_PEER(condition) (condition(PEER1(rank)) && (N < 3 || condition(PEER2(rank))))
#define ANY_PEER(condition) (condition(PEER1(rank)) || (N > 2 && condition(PEER2(rank))))

typedef Cell { byte seen; byte late }

#define SEE(cell) if :: cell.late -> cell.seen = cell.late - 1; cell.late = 0 :: else fi
#define STORE(cell, value) SEE(cell); cell.late = (value) + 1
#define LOAD(cell, into) \
    if :: into = cell.seen :: atomic { cell.late -> SEE(cell) }; into = cell.seen fi
#define READ(cell, value) \
    assert(cell.seen == (value) && (!cell.late || cell.late - 1 == (value)))
#define ARRIVES(cell, test) (test(cell.seen) || (cell.late && test((cell.late - 1))))
#define ACCEPT(cell, test) if :: !(test(cell.seen)) -> SEE(cell) :: else fi
